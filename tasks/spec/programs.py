"""Whether what a spec names is there: directories, programs, scripts, files of --config.

Asked before anything starts, and only as far as it is certain: to miss a fault costs a failed
start, to invent one forbids a run. So an argument of a program is looked at only where it is the
script of Python or of a shell, or given to --config. A command that runs on the cluster is not
looked at, nor is what only the start of the run tells.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from tasks.spec.errors import Fault
from tasks.spec.placeholders import is_templated, substituted
from tasks.spec.rollout import Rollout
from tasks.spec.run import Component, RunSpec
from tasks.spec.values import texts
from tasks.spec.words import did_you_mean

_PYTHON = re.compile(r"python(\d(\.\d+)?)?|pypy3?")
_SHELL = re.compile(r"sh|bash|dash|ksh|zsh")
#: Options before the script: letters without a value, then at most one with a value, which may
#: stand in the next item. Any other (`-c`, `-m`) means that there is no script.
_PYTHON_OPTION = re.compile(r"-(?=.)[bBdEiIOPqRsSuvx]*(?:([WX])(.*))?", re.DOTALL)
_SHELL_OPTION = re.compile(r"-(?=.)[aefhiklmnprtuvxBCEHPT]*(?:([oO])(.*))?", re.DOTALL)

#: A program or a file is meant only where its name is much like the one that was written.
_LIKENESS = 0.75
#: Their arguments belong to another machine, root directory, user or program.
_ELSEWHERE = re.compile(
    "apptainer|bwrap|chroot|docker|enroot|env|firejail|kubectl|mpirun|mpiexec|nice|nohup|nsenter"
    "|podman|ray|setsid|singularity|sky|srun|ssh|stdbuf|su|sudo|timeout|unshare"
)
_CONFIG_OPTION = re.compile(r"(--(?:config|config[-_]file|env[-_]file))(?:=(.*))?", re.DOTALL)
#: A plain path to a file; no address, no list of files.
_CONFIG_FILE = re.compile(r"[\w./+@ -]*\.(?:yaml|yml|json|toml|env|py)")


def component_path(python: str, path: str) -> str:
    """The PATH that components get: the directory of their interpreter comes first.

    So `python` and `run-api` are those of one virtual environment, activated or not. Its symbolic
    link is not followed, since it leads out of there.
    """
    first = str(Path(python).parent)
    is_first = path.split(os.pathsep)[0] == first
    return path if is_first else os.pathsep.join(filter(None, (first, path)))


def python_of(root: Path) -> str:
    """The interpreter of a project's components: that of its `.venv` where there is one, else the
    one that Muster itself runs in."""
    own = root / ".venv" / "bin" / "python"
    return str(own) if os.access(own, os.X_OK) else sys.executable


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
        own = texts({**spec.env, **component.env}).get("PATH")
        world = _World(cwd=cwd, path=path if own is None else _known(own))
        faults += world.faults(f"{place}.command", _items(component))
    return tuple(faults)


def _items(component: Component | Rollout) -> list[str | None]:
    """What it runs on this machine, word by word; None for what only the start tells.

    The directory of what a cluster runs goes there; what its command names is looked for there.
    """
    if isinstance(component, Rollout):
        is_here, command = component.placement == "local", component.command or ()
    else:
        is_here, command = component.launcher == "process", component.command
    return [_known(item) for item in command if is_here]


def _known(text: str) -> str | None:
    """The text with its literal `${`; None where it has placeholders."""
    return None if is_templated(text) else substituted(text, lambda name: name)


def _directory(cwd: str, root: Path) -> Path | None:
    """Where a component runs; None where that is not there yet or only the start tells."""
    known = _known(cwd)
    return root / known if known is not None and (root / known).is_dir() else None


def _directory_faults(path: str, cwd: str | None, root: Path) -> Iterator[Fault]:
    known = None if cwd is None else _known(cwd)
    if known is None or (directory := root / known).is_dir():
        return
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

    def faults(self, place: str, command: Sequence[str | None]) -> Iterator[Fault]:
        """What the command at this place of the spec names, item by item, and is not there."""
        program = command[0] if command else None
        if not program:
            return
        yield from self._program_faults(f"{place}.0", program)
        name = PurePosixPath(program).name
        if _SHELL.fullmatch(name):  # it may change the directory before it reads a --config
            yield from self._script_faults(place, command, _SHELL_OPTION, "shell script")
        elif _PYTHON.fullmatch(name):
            yield from self._script_faults(place, command, _PYTHON_OPTION, "script")
            if _script(command, _PYTHON_OPTION) is not None or not _gives_code(command):
                yield from self._config_faults(place, command)
        elif not _ELSEWHERE.fullmatch(name) and not _gives_code(command):
            yield from self._config_faults(place, command)

    def _program_faults(self, place: str, program: str) -> Iterator[Fault]:
        if "/" in program:
            file = self._file(program)
            if file is not None:
                yield from _file_faults(place, program, file)
            return
        directories = self._directories()
        if directories is None:
            return
        files = [way / program for way in directories if (way / program).is_file()]
        if any(os.access(file, os.X_OK) for file in files):
            return
        if files:
            yield _not_executable(place, program, files[0])
            return
        yield Fault(
            path=place,
            problem=f"no program {program!r} in the {len(directories)} directories of the PATH",
            remedy=self._remedy(program, directories),
        )

    def _script_faults(
        self, place: str, command: Sequence[str | None], option: re.Pattern[str], what: str
    ) -> Iterator[Fault]:
        index = _script(command, option)
        script = None if index is None else command[index]
        file = None if script is None else self._file(script)
        if script is None or file is None or file.exists():
            return
        if option is _SHELL_OPTION and "/" not in script:  # a shell looks on the path too
            directories = self._directories()
            if directories is None or any((way / script).exists() for way in directories):
                return
        yield _missing(f"{place}.{index}", what, script, file)

    def _config_faults(self, place: str, command: Sequence[str | None]) -> Iterator[Fault]:
        for index, (item, following) in enumerate(zip(command, [*command[1:], None], strict=True)):
            option = _CONFIG_OPTION.fullmatch(item or "")
            if option is None:
                continue
            is_joined = option.group(2) is not None
            value = option.group(2) if is_joined else following
            if not value or not _CONFIG_FILE.fullmatch(value):
                continue
            file = self._file(value)
            # A device or a pipe will do too: --config /dev/stdin.
            if file is not None and (file.is_dir() or not file.exists()):
                at = index if is_joined else index + 1
                yield _missing(f"{place}.{at}", "config file", value, file)

    def _file(self, text: str) -> Path | None:
        if Path(text).is_absolute():
            return Path(text)
        return None if self.cwd is None else self.cwd / text

    def _directories(self) -> list[Path] | None:
        """The directories of the PATH; None where one of them is not known."""
        if self.path is None:
            return None
        entries = [self._file(entry or ".") for entry in self.path.split(os.pathsep)]
        known = [entry for entry in entries if entry is not None]
        return known if len(known) == len(entries) else None

    def _remedy(self, program: str, directories: list[Path]) -> str:
        if any(letter.isspace() for letter in program):
            return "write the program and each argument as an item of its own"
        here = self._file(program)
        if here is not None and here.is_file():
            return f"for the file here write ./{program}"
        programs = {name for way in directories for name in _names(way)}
        near = did_you_mean(program, sorted(programs), likeness=_LIKENESS)
        return near or "install it, or write its full path"


def _script(command: Sequence[str | None], option: re.Pattern[str]) -> int | None:
    """The index of an interpreter's script, or None where there is none or that is not certain."""
    index = 1
    while index < len(command):
        item = command[index]
        if item is None:
            return None
        if item == "--":
            return index + 1 if index + 1 < len(command) else None
        if not item.startswith(("-", "+")):
            return index
        found = option.fullmatch(item)
        if found is None:
            return None
        index += 2 if found.group(1) and not found.group(2) else 1
    return None


def _gives_code(command: Sequence[str | None]) -> bool:
    """Whether code stands in the command itself, or may: what follows means what it makes of it."""
    first = next((item for item in command[1:] if not item or not item.startswith("--")), "")
    return first is None or re.fullmatch(r"-|-[A-Za-z]*[ceE].*", first, re.DOTALL) is not None


def _missing(place: str, what: str, text: str, file: Path) -> Fault:
    remedy = _near(file) or f"it is looked for in {file.parent}"
    return Fault(path=place, problem=f"there is no such {what}: {text}", remedy=remedy)


def _file_faults(place: str, text: str, file: Path) -> Iterator[Fault]:
    if file.is_dir():
        yield Fault(path=place, problem=f"is a directory: {text}", remedy="name the program in it")
    elif not file.exists():
        yield _missing(place, "program", text, file)
    elif not os.access(file, os.X_OK):
        yield _not_executable(place, text, file)


def _not_executable(place: str, text: str, file: Path) -> Fault:
    return Fault(path=place, problem=f"is not executable: {text}", remedy=f"chmod +x {file}")


def _near(file: Path) -> str:
    """A remedy: the nearest name beside a file that is not there, or nothing."""
    if not file.parent.is_dir():
        return ""
    return did_you_mean(file.name, _names(file.parent), likeness=_LIKENESS)


def _names(directory: Path) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []
