"""Whether what a spec names is there: directories, programs, scripts, files of --config.

Asked before anything starts, and only as far as it is certain: to miss a fault costs a failed
start, to invent one forbids a run. So an argument is looked at only where it is the script of
Python or of a shell, or is given by --config to a script of Python. A command that runs on the
cluster is not looked at, nor is what only the start of the run tells.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath

from tasks.spec.errors import Fault
from tasks.spec.placeholders import is_templated, substituted
from tasks.spec.rollout import Rollout
from tasks.spec.run import Component, RunSpec
from tasks.spec.values import texts
from tasks.spec.words import did_you_mean

_PYTHON = re.compile(r"python(\d(\.\d+)?)?|pypy3?")
_SHELL = re.compile(r"sh|bash|dash|ksh|zsh")
_REMEDY = (
    "install it, or write its path (./NAME) after chmod +x; each argument is an item by itself"
)
#: Options that have no value in Python, nor in a shell. After any other there may be no script.
_FLAGS = re.compile(r"-[BEIPbdehinqsuvx]+")
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
        its_path, command = path if own is None else _known(own), _items(component)
        if command and cwd is not None and its_path is not None:
            faults += _command_faults(f"{place}.command", command, cwd, its_path)
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


def _command_faults(
    place: str, command: Sequence[str | None], cwd: Path, path: str
) -> Iterator[Fault]:
    """What the command at this place of the spec names, item by item, and is not there."""
    if not (program := command[0]):
        return
    # The entries of a PATH start where the component runs.
    ways = [cwd / entry for entry in path.split(os.pathsep)]
    if not _is_program(program, cwd, ways):
        names = (name for way in ways for name in _names(way))
        near = _near(cwd / program) if "/" in program else did_you_mean(program, names)
        yield Fault(
            path=f"{place}.0",
            problem=f"{program!r} is no program that can be run here",
            remedy=near or _REMEDY,
        )
    name = PurePosixPath(program).name
    is_python = _PYTHON.fullmatch(name) is not None
    index = _script(command) if is_python or _SHELL.fullmatch(name) else None
    script = None if index is None else command[index]
    if script is None:
        return
    # A shell looks on the path, too.
    if not ((cwd / script).exists() or (not is_python and _is_program(script, cwd, ways))):
        yield _missing(f"{place}.{index}", "script", script, cwd)
    # A shell script may change the directory before it reads a --config.
    elif is_python:
        yield from _config_faults(place, command, cwd)


def _is_program(program: str, cwd: Path, ways: Sequence[Path]) -> bool:
    where = str(cwd / program) if "/" in program else program
    return shutil.which(where, path=os.pathsep.join(map(str, ways))) is not None


def _script(command: Sequence[str | None]) -> int | None:
    """The index of an interpreter's script, or None where there is none or that is not certain."""
    for index, item in enumerate(command[1:], start=1):
        if item is None:
            return None
        if not item.startswith(("-", "+")):
            return index
        if not _FLAGS.fullmatch(item):
            return None
    return None


def _config_faults(place: str, command: Sequence[str | None], cwd: Path) -> Iterator[Fault]:
    for index, item in enumerate(command):
        if (option := _CONFIG_OPTION.fullmatch(item or "")) is None:
            continue
        at = index if option[2] is not None else index + 1
        value = option[2] if at == index else "".join(filter(None, command[at : at + 1]))
        # A device or a pipe will do too: --config /dev/stdin.
        if value and _CONFIG_FILE.fullmatch(value) and not (cwd / value).exists():
            yield _missing(f"{place}.{at}", "config file", value, cwd)


def _missing(place: str, what: str, written: str, cwd: Path) -> Fault:
    remedy = _near(cwd / written) or f"it is looked for in {(cwd / written).parent}"
    return Fault(path=place, problem=f"there is no such {what}: {written}", remedy=remedy)


def _near(file: Path) -> str:
    """A remedy: the nearest name beside a file that is not there, or nothing."""
    names = set(_names(file.parent)) - {file.name}
    return did_you_mean(file.name, names)


def _names(directory: Path) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []
