"""Search the file to which a training writes its steps, if the run spec names another file."""

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

#: Ends of the names of metrics files.
_SUFFIXES = (".jsonl", ".ndjson", ".json")
#: Number of bytes at the end of a file in which a training step is searched.
_TAIL_BYTES = 65536
#: Folders are searched down to this number of levels.
_LEVELS = 2
#: Largest number of files and folders that one search examines.
_ENTRIES_AT_MOST = 2000
#: Matches the words of a shell command, and the value of an argument such as `log=out/m.jsonl`.
_WORD = re.compile(r"""[^\s"'=;,|&<>()]+""")


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundMetrics:
    """A file to which the training has probably written its steps."""

    #: Absolute path of the file.
    path: Path
    #: Path of the file for the run spec. The path may begin with `${attempt.dir}` or `${run.dir}`.
    path_in_spec: str
    #: Text that says where the name of the file comes from, such as `the command of trainer`. Empty
    #: if the file was only found in a folder of the run.
    named_by: str


def find_metrics(plan: AttemptPlan) -> FoundMetrics | None:
    """Return a file to which this attempt has probably written its steps. May block.

    The files that the commands and the environments of the components name are examined first. Then
    the folder of the attempt, the run's directory and the working directory are searched.

    Args:
        plan: Plan of the attempt.

    Returns:
        None if no such file is found, or if the run spec has no setting `progress`.
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
        Each file, and the source of its name as in `FoundMetrics.named_by`.
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
    """Return a mapping from each folder of the attempt to the name of the folder in the run spec.

    The folder of the attempt comes first, then the run's directory, then the working directory.
    Paths in the run spec are relative to the working directory, so its name is empty.
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
    and the folders above it are skipped: other programs may write into such a large folder.
    """
    command = component.command
    for argument in command.argv:
        for word in dict.fromkeys((argument, *_WORD.findall(argument))):
            path = command.cwd / word
            if _is_candidate(path.name):
                yield path
            elif "/" in word and not command.cwd.is_relative_to(path):
                yield from _list_files(path)


def _list_files(folder: Path) -> Iterator[Path]:
    """Yield the possible metrics files in a folder and in its folders, in a fixed order.

    Hidden folders are skipped. Symbolic links to folders are not followed.
    """
    examined = 0
    for parent, folders, names in os.walk(folder):
        examined += len(folders) + len(names)
        if examined > _ENTRIES_AT_MOST:
            return
        depth = len(Path(parent).relative_to(folder).parts)
        visible = sorted(name for name in folders if not name.startswith("."))
        folders[:] = visible if depth < _LEVELS else []
        for name in sorted(names):
            if _is_candidate(name):
                yield Path(parent) / name


def _is_same_path(path: Path, other: Path) -> bool:
    return os.path.normpath(path) == os.path.normpath(other)


def _is_candidate(name: str) -> bool:
    return name.endswith(_SUFFIXES) and not is_own_json_file(os.path.basename(name))


def _has_new_steps(path: Path, key: str, since: float | None) -> bool:
    """Return True if a file has a training step, and was written during this attempt.

    Args:
        path: The file. It need not exist.
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
