"""Whether what a spec names is there: directories, programs, scripts, files of --config.

Asked before anything starts. A command that runs on the cluster is not looked at, nor is what only
the start of the run tells; see `command_line` for what is certain enough.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from tasks.spec.command_line import Named, Role, named_in
from tasks.spec.errors import Fault
from tasks.spec.placeholders import is_templated, substituted
from tasks.spec.run import Component, Rollout, RunSpec

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
