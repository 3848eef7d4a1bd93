"""Find the file to which a training writes its steps if `progress.jsonl` names another file."""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tasks.processes.component import AttemptPlan, ComponentPlan
from tasks.record.places import RunPlace, is_own_json_file
from tasks.spec.probes import get_step

#: Suffixes of the names of metrics files.
_SUFFIXES = (".jsonl", ".ndjson", ".json")
#: A search for a training step reads at most this number of bytes, at the end of the file.
_TAIL_BYTES = 65536
#: Number of levels of subfolders that are searched in a folder.
_LEVELS = 2
#: The search of a folder ends after this number of files and folders.
_ENTRIES_AT_MOST = 2000
#: Matches each word of a shell command, and the path in an argument such as `log=out/m.jsonl`.
_WORD = re.compile(r"""[^\s"'=;,|&<>()]+""")


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundMetrics:
    """A file to which the training has probably written its steps."""

    #: Absolute path of the file.
    path: Path
    #: Path of the file for the run spec. The path may begin with `${attempt.dir}` or `${run.dir}`.
    path_in_spec: str
    #: Place that names the file or a folder above the file, such as `the command of trainer`. Empty
    #: if no command and no environment variable names the file.
    named_by: str


def find_metrics(plan: AttemptPlan) -> FoundMetrics | None:
    """Search for the file to which the programs of this attempt have probably written their steps.

    The search first examines the files that a command or an environment variable of a component
    names. Then it examines the folder of the attempt, the run's directory and the working
    directory. The search blocks while it reads the files.

    Args:
        plan: Plan of the attempt.

    Returns:
        None if no file is found, or if the run spec has no key `progress`.
    """
    if plan.progress is None:
        return None
    for path, named_by in _list_candidates(plan):
        is_other = not _is_same_path(path, plan.cwd / (plan.progress.jsonl or ""))
        if is_other and _has_new_steps(path, plan.progress.step, plan.began_at):
            return _describe(plan, path, named_by)
    return None


def _list_candidates(plan: AttemptPlan) -> Iterator[tuple[Path, str]]:
    """Yield the files that may contain the steps, most probable first.

    Yields:
        The path of a file, and the value of `FoundMetrics.named_by` for this file.
    """
    for component in plan.components:
        for path in _list_named_by_command(component):
            yield path, f"the command of {component.name}"
        for value in component.command.env.values():
            if _is_candidate(value):
                yield component.command.cwd / value, f"the environment of {component.name}"

    for folder in _name_folders(plan):
        for path in _list_files(folder):
            yield path, ""


def _name_folders(plan: AttemptPlan) -> dict[Path, str]:
    """Return the folders of an attempt, each with the text that stands for it in the run spec.

    The order is: the folder of the attempt, the folder of the run, the working directory.
    The text for the working directory is empty, because a relative path in the run spec begins at
    the working directory.
    """
    folders = {}
    for component in plan.components:
        attempt_folder = component.command.log.parent
        run = RunPlace(directory=attempt_folder.parent)
        if attempt_folder == run.attempt(plan.number).directory:
            folders = {attempt_folder: "${attempt.dir}/", run.directory: "${run.dir}/"}
    return {**folders, plan.cwd: ""}


def _list_named_by_command(component: ComponentPlan) -> Iterator[Path]:
    """Yield the metrics files that the command of a component may name.

    If the command names a folder, the files in this folder are yielded, too. The working directory
    and its parent folders are skipped, because other programs may write into these folders.
    """
    command = component.command
    for argument in command.argv:
        for word in dict.fromkeys((argument, *_WORD.findall(argument))):
            path = command.cwd / word
            if _is_candidate(path.name):
                yield path
            elif "/" in word and not _is_inside(command.cwd, path):
                yield from _list_files(path)


def _list_files(folder: Path) -> Iterator[Path]:
    """Yield the possible metrics files in a folder and in its subfolders, in a fixed order.

    Hidden folders are skipped. Symbolic links to folders are not followed. The search ends at the
    first folder that exceeds the limit `_ENTRIES_AT_MOST`, and yields no file of that folder. The
    system lists files in no fixed order, so an incomplete list would be a random choice.
    """
    examined = 0
    #: Folders that must still be searched, each with its level below `folder`. The search
    #: continues with the last item.
    remaining = [(folder, 0)]
    while remaining:
        parent, level = remaining.pop()
        names: list[str] = []
        subfolders: list[str] = []
        with suppress(OSError), os.scandir(parent) as entries:
            for entry in entries:
                # Check the limit for each entry, because a folder may contain millions of files.
                examined += 1
                if examined > _ENTRIES_AT_MOST:
                    return
                if not entry.is_dir(follow_symlinks=False):
                    names.append(entry.name)
                elif level < _LEVELS and not entry.name.startswith("."):
                    subfolders.append(entry.name)

        for name in sorted(names):
            if _is_candidate(name):
                yield parent / name
        remaining += [(parent / name, level + 1) for name in sorted(subfolders, reverse=True)]


def _is_inside(path: Path, folder: Path) -> bool:
    """Return True if a path is a folder itself or is inside the folder.

    Symbolic links and `..` in both paths are resolved before the comparison. The paths may be
    relative.
    """
    return Path(os.path.realpath(path)).is_relative_to(os.path.realpath(folder))


def _is_same_path(path: Path, other: Path) -> bool:
    return os.path.normpath(path) == os.path.normpath(other)


def _is_candidate(name: str) -> bool:
    return name.endswith(_SUFFIXES) and not is_own_json_file(os.path.basename(name))


def _has_new_steps(path: Path, key: str, since: float | None) -> bool:
    """Return True if a file contains a training step and was written during this attempt.

    Args:
        path: Path of the file. The file may be missing.
        key: Key of the training step.
        since: Start of the attempt in UTC epoch seconds. None if every file counts as new.
    """
    with suppress(OSError):
        status = path.stat()
        is_new = since is None or status.st_mtime >= since
        if stat.S_ISREG(status.st_mode) and is_new:
            with path.open("rb") as file:
                file.seek(max(0, status.st_size - _TAIL_BYTES))
                return _has_step(file.read(_TAIL_BYTES).splitlines(), key)
    return False


def _has_step(lines: Iterable[bytes], key: str) -> bool:
    for line in lines:
        with suppress(ValueError, RecursionError):
            content = json.loads(line)
            if isinstance(content, dict) and get_step(content, key) is not None:
                return True
    return False


def _describe(plan: AttemptPlan, path: Path, named_by: str) -> FoundMetrics:
    """Return the description of a metrics file, with the path for the run spec."""
    path = Path(os.path.normpath(path))
    folders = _name_folders(plan)
    parents = [folder for folder in folders if path.is_relative_to(folder)]
    path_in_spec = str(path)
    if parents:
        nearest = max(parents, key=lambda folder: len(folder.parts))
        path_in_spec = folders[nearest] + str(path.relative_to(nearest))
    return FoundMetrics(path=path, path_in_spec=path_in_spec, named_by=named_by)
