"""Which programs and files a command names, as far as that is certain.

Pure: nothing is looked at on disk. An option that is not known here may take a value or not, so
what follows it is left alone: to miss a fault costs a failed start, to invent one forbids a run.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import PurePosixPath


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
