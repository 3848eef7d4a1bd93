"""Whether what a spec names is there: directories, programs, scripts, files of --config.

Asked before anything starts. A command that runs on the cluster is not looked at, nor is what only
the start of the run tells; see `command_line` for what is certain enough.

Which programs and files a command names, as far as that is certain.

Pure: nothing is looked at on disk. An option that is not known here may take a value or not, so
what follows it is left alone: to miss a fault costs a failed start, to invent one forbids a run.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path, PurePosixPath

from tasks.spec.errors import Fault
from tasks.spec.placeholders import is_templated, substituted
from tasks.spec.run import Component, Rollout, RunSpec


class Role(Enum):
    """What a named thing is to the command."""

    #: Executed: found on the path, or as a file where it has a slash.
    PROGRAM = "program"
    #: Read by an interpreter, from the working directory.
    SCRIPT = "script"
    #: Read by a shell: from the working directory, else found on the path.
    SHELL_SCRIPT = "shell script"
    #: Loaded by node, which adds a suffix of its own.
    MODULE = "module"
    #: Given to an option such as --config.
    CONFIG = "config file"


@dataclass(frozen=True, slots=True, kw_only=True)
class Named:
    """One thing that must be there before the command can work."""

    #: Its place in the command.
    index: int
    #: The path or the bare name, without the option that it was given to.
    text: str
    role: Role
    #: The PATH that `env PATH=...` sets for it; None: the component's.
    path: str | None = None


#: An item of a command; None where only the start of the run tells what it is.
Item = str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    """The options of a program that stand before its script."""

    #: Without a value; letters may be joined (`-uB`).
    flags: frozenset[str] = frozenset()
    #: With a value, in the next item or joined.
    valued: frozenset[str] = frozenset()
    #: There is no script after one of these: what follows is code, a module or standard input.
    ends: frozenset[str] = frozenset()
    role: Role = Role.SCRIPT


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _letters(text: str) -> frozenset[str]:
    return frozenset(f"-{letter}" for letter in text)


def _long(text: str) -> frozenset[str]:
    return frozenset(f"--{name}" for name in _words(text))


_SHELL = _Options(
    flags=_letters("aefhiklmnprtuvxBCEHPT") | _long("login posix noprofile norc"),
    valued=_letters("oO") | _long("rcfile init-file"),
    ends=_letters("cs"),
    role=Role.SHELL_SCRIPT,
)
_INTERPRETERS: dict[str, _Options] = {
    r"python(\d(\.\d+)?)?|pypy3?": _Options(
        flags=_letters("bBdEiIOPqRsSuvx"), valued=_letters("WX"), ends=_letters("cmhV")
    ),
    r"sh|bash|dash|ksh|zsh": _SHELL,
    r"node": _Options(ends=_letters("eipcvh"), role=Role.MODULE),
    r"perl": _Options(flags=_letters("wWtTs"), ends=_letters("eESvhV")),
    r"ruby": _Options(flags=_letters("w"), ends=_letters("eSvh")),
    r"torchrun": _Options(
        flags=_long("standalone"),
        valued=_long(
            "nnodes nproc-per-node rdzv-backend rdzv-endpoint rdzv-id rdzv-conf max-restarts "
            "monitor-interval start-method role log-dir redirects tee node-rank master-addr "
            "master-port local-addr local-ranks-filter"
        )
        | _letters("rt"),
        ends=_long("module no-python") | _letters("mh"),
    ),
    r"accelerate launch": _Options(
        flags=_long("multi-gpu cpu use-deepspeed use-fsdp debug quiet"),
        valued=_long(
            "config-file num-processes num-machines machine-rank main-process-ip "
            "main-process-port mixed-precision gpu-ids num-cpu-threads-per-process "
            "deepspeed-config-file zero-stage rdzv-backend dynamo-backend"
        ),
        ends=_long("module no-python") | _letters("mqh"),
    ),
    r"deepspeed": _Options(
        valued=_long("include exclude num-gpus num-nodes master-port master-addr hostfile launcher")
        | _letters("ieH"),
        ends=_long("module no-python") | _letters("mh"),
    ),
}

#: Programs that run another: their own options, and how many items stand before the other one.
_WRAPPERS: dict[str, tuple[_Options, int]] = {
    "env": (_Options(), 0),
    "nice": (_Options(valued=_letters("n") | _long("adjustment")), 0),
    "nohup": (_Options(), 0),
    "setsid": (_Options(flags=_letters("cfw") | _long("ctty fork wait")), 0),
    "stdbuf": (_Options(valued=_letters("ioe") | _long("input output error")), 0),
    "timeout": (
        _Options(
            flags=_letters("v") | _long("foreground preserve-status verbose"),
            valued=_letters("ks") | _long("kill-after signal"),
        ),
        1,
    ),
}

#: Their arguments belong to another machine, root directory or user.
_ELSEWHERE = _words(
    "apptainer bwrap chroot docker enroot firejail kubectl mpirun mpiexec nsenter podman ray "
    "singularity sky srun ssh su sudo unshare"
)

_CONFIG_OPTION = re.compile(r"(--(?:config|config[-_]file|env[-_]file))(?:=(.*))?", re.DOTALL)
#: A plain path to a file; no address, no list of files.
_CONFIG_FILE = re.compile(r"[\w./+@ -]*\.(?:yaml|yml|json|toml|env|py)")
_ASSIGNMENT = re.compile(r"([A-Za-z_]\w*)=(.*)", re.DOTALL)


def named_in(command: Sequence[Item]) -> tuple[Named, ...]:
    """What the command names: its program, the script of an interpreter, files of --config.

    Looks through `env A=b`, `nice`, `nohup`, `setsid`, `stdbuf` and `timeout`, and no further than
    `ssh`, `docker` and the like.
    """
    return tuple(_named(command, 0, None))


def _named(command: Sequence[Item], start: int, path: str | None) -> Iterator[Named]:
    program = command[start] if start < len(command) else None
    if not program:
        return
    yield Named(index=start, text=program, role=Role.PROGRAM, path=path)
    name = PurePosixPath(program).name
    if name in _ELSEWHERE:
        return
    if name in _WRAPPERS:
        yield from _inside(command, start, path, *_WRAPPERS[name])
        return
    first = start + 1
    if name == "accelerate" and command[first : first + 1] == ["launch"]:
        name, first = "accelerate launch", first + 1
    options = _interpreter(name)
    if options is None:
        yield from _config_files(command, first)
        return
    found = _skip(command, first, options)
    if found is None:
        if not _gives_code(command, first):
            yield from _config_files(command, first)
        return
    script = command[found]
    if script is not None:
        yield Named(index=found, text=script, role=options.role, path=path)
    if options.role is not Role.SHELL_SCRIPT:  # it may change the directory first
        yield from _config_files(command, first)


def _interpreter(name: str) -> _Options | None:
    return next((way for rule, way in _INTERPRETERS.items() if re.fullmatch(rule, name)), None)


def _inside(
    command: Sequence[Item], start: int, path: str | None, options: _Options, operands: int
) -> Iterator[Named]:
    """What the program run by a wrapper names; nothing where the wrapper is not understood."""
    index = _skip(command, start + 1, options)
    if index is None:
        return
    index += operands
    while PurePosixPath(command[start] or "").name == "env" and index < len(command):
        assigned = _ASSIGNMENT.fullmatch(command[index] or "")
        if assigned is None:
            break
        if assigned.group(1) == "PATH":
            path = assigned.group(2)
        index += 1
    yield from _named(command, index, path)


def _skip(command: Sequence[Item], start: int, options: _Options) -> int | None:
    """The index of the first item that is no option, or None where that is not certain."""
    index = start
    while index < len(command):
        item = command[index]
        if item is None or item == "-":
            return None
        if item == "--":
            return index + 1 if index + 1 < len(command) else None
        if not item.startswith(("-", "+")):
            return index
        taken = _long_option(item, options) if item.startswith("--") else _short(item, options)
        if taken is None:
            return None
        index += taken
    return None


def _long_option(item: str, options: _Options) -> int | None:
    """How many items the option takes, itself included; None where it is not known."""
    name, equals, _ = item.partition("=")
    name = name.replace("_", "-")
    if name in options.valued:
        return 1 if equals else 2
    return 1 if name in options.flags and not equals else None


def _short(item: str, options: _Options) -> int | None:
    for position, letter in enumerate(item[1:], start=1):
        option = f"-{letter}" if item[0] == "-" else item
        if option in options.valued:
            return 1 if position < len(item) - 1 else 2
        if option not in options.flags:
            return None
    return 1


def _gives_code(command: Sequence[Item], start: int) -> bool:
    """Whether code stands in the command itself: its arguments mean what the code makes of them."""
    first = next((item for item in command[start:] if not item or not item.startswith("--")), None)
    return first is None or first == "-" or re.match(r"-[A-Za-z]*[ceE]", first) is not None


def _config_files(command: Sequence[Item], start: int) -> Iterator[Named]:
    for index, item in enumerate(command[start:], start=start):
        option = _CONFIG_OPTION.fullmatch(item or "")
        if option is None:
            continue
        joined = option.group(2)
        place = index if joined is not None else index + 1
        value = joined if joined is not None else (*command, None)[place]
        if _CONFIG_FILE.fullmatch(value or "") and value:
            yield Named(index=place, text=value, role=Role.CONFIG)


_MODULE_SUFFIXES = (".js", ".mjs", ".cjs", ".json", ".node")


def component_path(python: str, path: str) -> str:
    """The PATH that components get: the interpreter's own directory comes first.

    So `python` and `run-api` are those of the virtual environment that Muster itself runs in,
    activated or not.

    Args:
        python: `sys.executable`; its symbolic link is not followed, since it leads out of the
            virtual environment.
        path: The PATH so far, which may be empty.
    """
    first = str(Path(python).parent)
    entries = path.split(os.pathsep) if path else []
    if entries and entries[0] == first:
        return path
    return os.pathsep.join([first, *entries])


def lookup_faults(spec: RunSpec, *, root: Path, path: str) -> tuple[Fault, ...]:
    """One fault for each thing that the spec names and that is not there, in file order.

    Args:
        spec: As loaded, its placeholders not filled in.
        root: The project's root, from which every `cwd` starts, also that of a component.
        path: The PATH of components that set none of their own; see `component_path`.
    """
    faults = [*_directory_faults("cwd", spec.cwd, root)]
    for name, component in spec.components.items():
        place = f"components.{name}"
        faults += _directory_faults(f"{place}.cwd", component.cwd, root)
        cwd = _directory(component.cwd or spec.cwd, root)
        world = _World(cwd=cwd, path=_path_of(component, spec.env, path))
        for item in named_in(_items(component)):
            faults += world.faults(f"{place}.command.{item.index}", item)
    return tuple(faults)


def _items(component: Component | Rollout) -> list[str | None]:
    """What it runs on this machine, word by word.

    The directory of what a cluster runs goes there; what its command names is looked for there.
    """
    if isinstance(component, Rollout):
        is_here, command = component.placement == "local", component.command or ()
    else:
        is_here, command = component.launcher == "process", component.command
    return [None if is_templated(item) else _literal(item) for item in command if is_here]


def _literal(text: str) -> str:
    return substituted(text, lambda name: name)


def _path_of(component: Component | Rollout, env: Mapping[str, str], path: str) -> str | None:
    """The PATH by which the component's program is found; None where the start tells."""
    own = {**env, **component.env}.get("PATH")
    if own is None:
        return path
    return None if is_templated(own) else _literal(own)


def _directory(cwd: str, root: Path) -> Path | None:
    """Where a component runs; None where that is not there yet or only the start tells."""
    if is_templated(cwd):
        return None
    directory = root / _literal(cwd)
    return directory if directory.is_dir() else None


def _directory_faults(path: str, cwd: str | None, root: Path) -> Iterator[Fault]:
    if cwd is None or is_templated(cwd) or _directory(cwd, root) is not None:
        return
    directory = root / _literal(cwd)
    problem = "is a file" if directory.exists() else "there is no such directory"
    yield Fault(
        path=path,
        problem=f"{problem}: {cwd}",
        remedy=_near(directory) or f"it is taken relative to the project's root, {root}",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _World:
    """What a component sees of this machine."""

    #: Where it runs; None where that is not known, so that nothing relative to it is.
    cwd: Path | None
    #: Its PATH; None where it is not known.
    path: str | None

    def faults(self, place: str, named: Named) -> Iterator[Fault]:
        if named.role is Role.PROGRAM:
            yield from self._program_faults(place, named)
        elif (file := self._file(named.text)) is None or self._is_there(file, named):
            return
        else:
            yield Fault(
                path=place,
                problem=f"there is no such {named.role.value}: {named.text}",
                remedy=_near(file) or f"it is looked for in {file.parent}",
            )

    def _file(self, text: str) -> Path | None:
        if Path(text).is_absolute():
            return Path(text)
        return None if self.cwd is None else self.cwd / text

    def _is_there(self, file: Path, named: Named) -> bool:
        if named.role is Role.CONFIG:
            return file.is_file() or _is_special(file)
        if file.exists():
            return True
        if named.role is Role.MODULE:
            return any(Path(f"{file}{suffix}").is_file() for suffix in _MODULE_SUFFIXES)
        if named.role is Role.SHELL_SCRIPT and "/" not in named.text:
            directories = self._directories(named)
            return directories is None or any((way / named.text).exists() for way in directories)
        return False

    def _program_faults(self, place: str, named: Named) -> Iterator[Fault]:
        if "/" in named.text:
            file = self._file(named.text)
            if file is not None:
                yield from _file_faults(place, named.text, file)
            return
        directories = self._directories(named)
        if directories is None:
            return
        files = [way / named.text for way in directories if (way / named.text).is_file()]
        if any(os.access(file, os.X_OK) for file in files):
            return
        if files:
            yield _not_executable(place, named.text, files[0])
            return
        yield Fault(
            path=place,
            problem=f"no program {named.text!r} in the {len(directories)} directories of the PATH",
            remedy=self._remedy(named, directories),
        )

    def _directories(self, named: Named) -> list[Path] | None:
        """The directories of the PATH; None where one of them is not known."""
        path = named.path if named.path is not None else self.path
        if path is None:
            return None
        entries = [self._file(entry or ".") for entry in path.split(os.pathsep)]
        known = [entry for entry in entries if entry is not None]
        return known if len(known) == len(entries) else None

    def _remedy(self, named: Named, directories: list[Path]) -> str:
        if any(letter.isspace() for letter in named.text):
            return "write the program and each argument as an item of its own"
        here = self._file(named.text)
        if here is not None and here.is_file():
            return f"for the file here write ./{named.text}"
        programs = {name for way in directories for name in _names(way)}
        near = difflib.get_close_matches(named.text, sorted(programs), n=1, cutoff=0.75)
        return f"did you mean `{near[0]}`?" if near else "install it, or write its full path"


def _file_faults(place: str, text: str, file: Path) -> Iterator[Fault]:
    if file.is_dir():
        yield Fault(path=place, problem=f"is a directory: {text}", remedy="name the program in it")
    elif not file.exists():
        remedy = _near(file) or f"it is looked for in {file.parent}"
        yield Fault(path=place, problem=f"there is no such program: {text}", remedy=remedy)
    elif not os.access(file, os.X_OK):
        yield _not_executable(place, text, file)


def _not_executable(place: str, text: str, file: Path) -> Fault:
    return Fault(path=place, problem=f"is not executable: {text}", remedy=f"chmod +x {file}")


def _near(file: Path) -> str:
    """A remedy: the nearest name beside a file that is not there, or nothing."""
    if not file.parent.is_dir():
        return ""
    near = difflib.get_close_matches(file.name, _names(file.parent), n=1, cutoff=0.75)
    return f"did you mean `{near[0]}`?" if near else ""


def _names(directory: Path) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []


def _is_special(file: Path) -> bool:
    """A device or a pipe: --config /dev/stdin."""
    return file.exists() and not file.is_dir()
