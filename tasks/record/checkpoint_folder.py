"""List the checkpoints in a folder, and decide which of them are complete.

The files of a checkpoint often do not show whether all of it was saved. Three other facts can show
that a checkpoint is complete: a pointer file in the same folder, a newer checkpoint, or the end of
the trainer. A pointer file is a file in which a trainer names its last complete checkpoint.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from itertools import islice
from pathlib import Path, PurePosixPath

from tasks.record.checkpoint_layouts import (
    MARKER_NAMES,
    Content,
    ContentVerdict,
    judge_content,
)
from tasks.record.checkpoint_names import (
    REMOVAL_SUFFIX,
    NameKind,
    classify_name,
    drop_numbers,
    drop_rank,
    is_current_name,
    is_never_checkpoint,
    is_partial_name,
    is_series_name,
    read_rank,
    read_step,
)
from tasks.record.checkpoint_paths import (
    CheckpointPath,
    find_fixed_folder,
    list_entries,
    match_paths,
    parse_checkpoint_path,
    walk_files,
)
from tasks.record.checkpoint_store import suppress_file_errors

#: Names of pointer files. A trainer writes the name or the step of its last complete checkpoint
#: into such a file.
#:
#: Sources: verl/utils/checkpoint/checkpoint_manager.py; Megatron-LM
#: megatron/training/checkpointing.py; SkyRL skyrl_train/trainer.py; DeepSpeed runtime/engine.py;
#: fvcore/common/checkpoint.py.
_POINTER_NAMES = frozenset(
    {"latest_checkpointed_iteration.txt", "latest_ckpt_global_step.txt", "latest", "last"}
    | {"latest.txt", "last.txt", "latest_checkpoint.txt", "last_checkpoint.txt"}
    | {"latest_checkpoint", "last_checkpoint", "LATEST", "latest_step", "latest_step.txt"}
)
#: End of the message for a checkpoint that may still be incomplete.
_NOT_CONFIRMED = (
    "so Muster cannot say whether this checkpoint is complete until a newer checkpoint exists"
)
#: Largest number of tries to list a folder. A try fails if a file is deleted while the folder is
#: listed.
_RACES_AT_MOST = 5
#: Largest number of files that are read in a folder that does not look like a checkpoint.
_FILES_AT_MOST = 1000
#: Largest size of a pointer file in bytes. A pointer file contains the name of the newest
#: checkpoint. Larger files are not read as pointer files.
_POINTER_BYTES = 4096
#: Value of `_Pointer.text` for an empty file.
_NO_TEXT = "?"
#: Names of checkpoints, with `#` in place of a number. Trainers that use these names write a
#: pointer file after each checkpoint. If the pointer file is missing, the newest checkpoint with
#: one of these names may be incomplete.
_POINTED_AT = ("global_step_#", "iter_#")
#: Suffixes of files that contain tensors or other state of a training.
_STATE_SUFFIXES = frozenset(
    {".pt", ".pth", ".bin", ".ckpt", ".npz", ".npy", ".safetensors", ".pkl", ".pickle", ".tar"}
    | {".zip", ".h5", ".hdf5", ".keras", ".msgpack", ".nemo", ".distcp", ".model", ".state"}
)
#: Suffixes that files of checkpoints and files of exported models can have. A folder that contains
#: only such files may be an exported language model, from which a training cannot resume.
_EXPORT_SUFFIXES = frozenset({".safetensors", ".bin", ".model", ".zip", ".nemo", ".keras"})
#: Suffixes of files, such as JSON files, that may be the whole checkpoint of a small training.
_PLAIN_SUFFIXES = _STATE_SUFFIXES | {".json", ".txt"}
#: Smallest permitted size of a file, relative to the size of the corresponding file in the other
#: checkpoints. If a file is smaller, the checkpoint is incomplete. Used only for checkpoints of an
#: unknown format.
_SMALLEST_SHARE = 0.5
#: Matches names of JSON files with results. Many trainers write these files only for some
#: checkpoints, so a checkpoint without them can be complete.
_RESULT_FILE = re.compile(r"eval|result|metric|sample|best|score|all_", re.IGNORECASE)
#: Matches names of files that are written once per rank.
_RANKED_FILE = re.compile(r"rank|rng_state|random_states")
#: Matches names of files that contain the state of a training, such as the state of the optimizer.
#: An exported model has no such files. Names of models, such as `state_dict` and `opt-125m`, do not
#: match.
_TRAINING_FILE = re.compile(
    r"(?<![a-z])(?:optim(?:i[sz]ers?)?|(?:lr[-_]?)?sched(?:ulers?)?|rng|opt|(?:train(?:er|ing)?)?state)"
    r"(?![a-z]|[-_.]?dict|-\d)",
    re.IGNORECASE,
)
#: Suffix of a file that NeMo creates next to a checkpoint. NeMo removes the file when the
#: checkpoint is complete.
_UNFINISHED_SUFFIX = "-unfinished"


class Completeness(Enum):
    """Result of the check whether all files of a checkpoint were saved completely."""

    COMPLETE = "complete"
    INCOMPLETE = "incomplete"
    #: It is not known yet whether the checkpoint is complete. The trainer may still be writing
    #: files.
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Checkpoint:
    """A checkpoint with its state at the time when its folder was listed."""

    path: CheckpointPath
    #: Files and folders of the checkpoint. There are several if each rank writes its own file.
    parts: tuple[CheckpointPath, ...]
    #: Training step at which the checkpoint was saved, or None if unknown.
    step: int | None
    #: Time of the last change of the checkpoint's files, in UTC epoch seconds.
    changed_at: float
    #: Hash that changes if the checkpoint is written again.
    signature: str
    #: Earliest and latest inode change time (ctime) of the checkpoint's files, in nanoseconds since
    #: the epoch.
    inode_changes_ns: tuple[int, int]
    completeness: Completeness
    #: Text for the user: evidence that the checkpoint is complete, or the reason why it may be
    #: incomplete.
    reason: str

    @property
    def is_complete(self) -> bool:
        return self.completeness is Completeness.COMPLETE

    @property
    def order(self) -> tuple[int, float]:
        """Sort key that puts the newest checkpoint last."""
        return (-1 if self.step is None else self.step, self.changed_at)


@dataclass(frozen=True, slots=True, kw_only=True)
class Listing:
    """The checkpoints in one folder, or the checkpoints that match one pattern."""

    #: Checkpoints in ascending order of their steps.
    checkpoints: tuple[Checkpoint, ...] = ()
    #: Other files and folders. Each pair has the path, and the reason why the file or folder is no
    #: checkpoint of the training.
    others: tuple[tuple[CheckpointPath, str], ...] = ()
    #: Remarks for the user about pointer files that do not name the newest complete checkpoint.
    notes: tuple[str, ...] = ()

    @property
    def complete(self) -> list[Checkpoint]:
        return [checkpoint for checkpoint in self.checkpoints if checkpoint.is_complete]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pointer:
    """A file or symbolic link in which a trainer stores the name of its last checkpoint.

    The named checkpoint is complete.
    """

    name: str
    #: Text of the file, or target of the symbolic link. `_NO_TEXT` if the file is empty.
    text: str
    #: Last part of the path in `text`, which is the name of the checkpoint.
    target: str
    step: int | None

    @property
    def description(self) -> str:
        """Clause about the content of the file: `is empty`, or for example `says 'step_20'`."""
        return "is empty" if self.text == _NO_TEXT else f"says {self.text!r}"


@dataclass(frozen=True)
class _Candidate:
    """A file or folder that may be a checkpoint, with the result of the check of its content."""

    content: Content
    verdict: ContentVerdict
    kind: NameKind

    @property
    def name(self) -> str:
        return self.content.path.name

    @property
    def step(self) -> int | None:
        return self.verdict.step

    @property
    def order(self) -> tuple[int, float]:
        return (-1 if self.step is None else self.step, self.content.changed_at)

    @property
    def is_series_only(self) -> bool:
        """True if a series of similar names is the only proof that this is a checkpoint.

        The name is a prefix and a number, as in `it000005` or `tinylm-19`. The content looks like
        the state of a training, but the layout and the suffixes of the files do not prove this.
        """
        if self.kind is not NameKind.NUMBERED or self.verdict.is_training_state:
            return False
        if not is_series_name(self.name):
            return False
        if not self.content.is_folder:
            # `proof` is set if the first bytes show a known format and the file is complete.
            has_word_suffix = self.content.path.suffix[1:2].isalpha()
            return bool(self.verdict.proof) and not has_word_suffix
        return not _has_suffix(self.content, _STATE_SUFFIXES - _EXPORT_SUFFIXES) and (
            _has_training_files(self.content)
        )

    @property
    def rank(self) -> int:
        """Number that rates how likely this file or folder is a checkpoint. 0 is the most likely.

        In each folder, only the files and folders with the lowest number count as checkpoints.
        """
        if self.verdict.is_training_state and self.kind <= NameKind.NUMBERED:
            return 0
        if self.kind is NameKind.NUMBERED and self.verdict.stored_step is not None:
            # The content of the file or folder includes a training step. So the file or folder is a
            # checkpoint, even if its name has no word such as `step`.
            return NameKind.NAMED_CHECKPOINT
        return int(self.kind)

    @property
    def is_current(self) -> bool:
        """True for a file such as `last.pt` with a training step in its content, not in its name.

        Trainers often write such a file next to numbered checkpoints, such as `vit_00040.pt`.
        """
        return self.kind is NameKind.UNNUMBERED and self.verdict.stored_step is not None


def list_checkpoints(written: str, root: Path, *, is_running: bool) -> Listing:
    """List the checkpoints that a component writes.

    Args:
        written: Folder of the checkpoints, or a pattern (`*`, `?`, `[...]`) that matches them. URLs
            such as `s3://bucket/folder` are allowed.
        root: Directory from which a relative path starts.
        is_running: True if the trainer may still be writing. The newest checkpoint is then complete
            only if its content or a pointer file proves that all files were saved.

    Raises:
        OSError: The folder cannot be read. A missing folder is no error: it has no checkpoints. For
            a URL, the error is a `StoreError`.
    """
    for is_last_try in (*[False] * _RACES_AT_MOST, True):
        path = parse_checkpoint_path(written, root)
        try:
            if path.is_dir():
                return _list_folder(path, is_running=is_running)
            if find_fixed_folder(written) != written:
                return _list_pattern(path, is_running=is_running)
            if not (path.exists() or path.is_symlink()):
                return Listing()
            candidate = _read_candidate(Content.read(path), NameKind.CHECKPOINT)
            return _judge([candidate], [], is_running=is_running)
        except (FileNotFoundError, NotADirectoryError):
            # A trainer deleted a file while the folder was listed, so list the folder again. After
            # the last try, raise the error: an empty list would mean that there are no checkpoints.
            if is_last_try:
                raise
    raise AssertionError


def list_unrecognised(written: str, root: Path) -> list[CheckpointPath]:
    """Return the possible checkpoints in a folder in which Muster recognises no checkpoint.

    A possible checkpoint is a file or folder that satisfies `_may_be_checkpoint`.

    Args:
        written: Folder of the checkpoints, or a pattern that matches them.
        root: Directory from which a relative path starts.

    Returns:
        The paths, sorted by their names. An empty list if a checkpoint was found.

    Raises:
        OSError: The folder cannot be read.
    """
    if list_checkpoints(written, root, is_running=False).checkpoints:
        return []
    folder = parse_checkpoint_path(written, root)
    if not folder.is_dir():
        folder = parse_checkpoint_path(find_fixed_folder(written), root)
    if not folder.is_dir():
        return []
    return [path for path in list_entries(folder) if _may_be_checkpoint(path)]


def _may_be_checkpoint(path: CheckpointPath) -> bool:
    """Return True if an unrecognised file or folder may be a checkpoint.

    If the name contains a number, the file or folder must contain something other than logs. If the
    name contains no number, the file or folder must contain tensors.
    """
    if is_never_checkpoint(path.name) or _read_pointer(path) is not None:
        return False
    if not path.is_dir():
        names = [path.name] if path.is_file() and path.stat().st_size > 0 else []
    else:
        names = [file.name for file in islice(walk_files(path), _FILES_AT_MOST)]
    if classify_name(path.name) is NameKind.OTHER:
        return any(PurePosixPath(name).suffix in _STATE_SUFFIXES for name in names)
    return not all(map(is_never_checkpoint, names))


def _list_pattern(pattern: CheckpointPath, *, is_running: bool) -> Listing:
    paths = match_paths(pattern)
    pointers: list[_Pointer] = []
    if len(parents := {path.parent for path in paths}) == 1:
        [folder] = parents
        pointers = [
            pointer
            for entry in list_entries(folder)
            if (pointer := _read_pointer(entry)) is not None
        ]
    candidates = [*_read_candidates(paths, is_pattern=True)]
    if not candidates:
        # No file or folder looks like a checkpoint. So accept all files and folders.
        candidates = [*_read_candidates(paths, is_pattern=True, accepts_all=True)]
    return _judge(candidates, pointers, is_running=is_running, is_pattern=True)


def _list_folder(folder: CheckpointPath, *, is_running: bool) -> Listing:
    paths = list_entries(folder)
    pointers = [pointer for path in paths if (pointer := _read_pointer(path)) is not None]
    for pointer in pointers:
        # A pointer file such as `latest` may name a checkpoint in a subfolder. List that subfolder,
        # too.
        subfolder = (folder / pointer.text).parent
        if subfolder != folder and folder in subfolder.parents and subfolder.is_dir():
            paths += [path for path in list_entries(subfolder) if path not in paths]
    candidates = _keep_one_series([*_read_candidates(paths)])
    known_names = {candidate.name for candidate in candidates}
    for pointer in pointers:
        # A pointer file names a checkpoint. Add this checkpoint even if the checkpoint's name is
        # unusual, such as `release`, which contains no step.
        target = folder / pointer.target
        if target != folder and target.exists() and target.name not in known_names:
            candidates.append(_read_candidate(Content.read(target), NameKind.CHECKPOINT))
            known_names.add(target.name)
    if not any(candidate.content.is_folder for candidate in candidates):
        # Some trainers overwrite the same files with each new checkpoint. In this case, the folder
        # itself is the checkpoint.
        own = _read_candidate(Content.read(folder), NameKind.CHECKPOINT)
        if own.verdict.is_training_state and _is_flat(own.content):
            return _judge([own], [], is_running=is_running)
    return _judge(candidates, pointers, is_running=is_running, others=_list_others(paths))


def _has_suffix(content: Content, suffixes: Collection[str]) -> bool:
    """Return True if a file of a checkpoint has one of the suffixes."""
    return any(PurePosixPath(name).suffix in suffixes for name in content.names)


def _has_training_files(content: Content) -> bool:
    """Return True if a folder itself has tensors and a file such as `optim.bin` or `state.json`.

    Files in subfolders do not count, because a folder of checkpoints is no checkpoint.
    """
    top_names = [name for name in content.names if "/" not in name]
    has_tensors = any(PurePosixPath(name).suffix in _STATE_SUFFIXES for name in top_names)
    return has_tensors and any(_TRAINING_FILE.search(name) for name in top_names)


def _keep_one_series(candidates: list[_Candidate]) -> list[_Candidate]:
    """Leave out unproven candidates if the numbered names form several series.

    Names that differ only in a number, such as `actor-5` and `actor-10`, form a series. If the
    folder also contains `critic-5`, it is unclear which series consists of checkpoints. So leave
    out candidates if only a series suggests that they are checkpoints (`is_series_only`).
    """
    series = {drop_numbers(one.name) for one in candidates if one.kind is NameKind.NUMBERED}
    if len(series) <= 1:
        return candidates
    return [one for one in candidates if not one.is_series_only]


def _is_flat(content: Content) -> bool:
    """Return True if a folder itself is a checkpoint, instead of a folder that contains
    checkpoints.
    """
    top = {name for name in content.names if "/" not in name}
    return any(name == ".metadata" or classify_name(name) is NameKind.NUMBERED for name in top) or (
        bool(top & {"trainer_state.json", "_CHECKPOINT_METADATA", "common.pt", "optimizer.bin"})
    )


def _list_others(paths: Iterable[CheckpointPath]) -> Iterator[tuple[CheckpointPath, str]]:
    """Yield the files and folders whose names show that they are no checkpoints.

    Each path is yielded together with an explanation.
    """
    for path in paths:
        if read_step(path.name) is None or classify_name(path.name) is not NameKind.OTHER:
            continue
        if path.name.endswith(REMOVAL_SUFFIX):
            continue
        if is_partial_name(path.name):
            yield path, "the name of the checkpoint says that it is incomplete"
        elif path.is_dir() or path.suffix in _STATE_SUFFIXES:
            yield path, "by its name, this is a result of the training and not a checkpoint"


def _read_candidates(
    paths: Sequence[CheckpointPath], *, is_pattern: bool = False, accepts_all: bool = False
) -> Iterator[_Candidate]:
    """Yield the files and folders that may be checkpoints.

    Args:
        paths: Paths of the files and folders.
        is_pattern: True if the paths match a pattern that the user wrote. A checkpoint may then
            have any name.
        accepts_all: True to accept files and folders with any content.
    """
    kinds = {
        path: classify_name(path.name)
        for path in paths
        if not is_partial_name(path.name) and (path.is_dir() or path.is_file())
    }
    has_named = any(kind is not NameKind.OTHER for kind in kinds.values())
    groups: dict[str, list[CheckpointPath]] = {}
    for path, kind in kinds.items():
        if kind is NameKind.OTHER and (has_named or not is_pattern):
            continue
        is_pointer = _read_pointer(path) is not None and not is_pattern
        if is_pointer or any(
            path.with_name(path.name + mark) in paths for mark in ("-unfinished",)
        ):
            continue
        is_rank_file = read_rank(path.name) is not None and not path.is_dir()
        groups.setdefault(drop_rank(path.name) if is_rank_file else path.name, []).append(path)
    for parts in groups.values():
        first = min(parts, key=lambda path: (read_rank(path.name) or 0, path.name))
        with suppress(FileNotFoundError):  # The file may have been removed during the listing.
            candidate = _read_candidate(Content.read(first, sorted(parts)), kinds[first])
            if accepts_all or _is_candidate(candidate, is_pattern=is_pattern):
                yield candidate


def _is_candidate(candidate: _Candidate, *, is_pattern: bool) -> bool:
    """Return True if the name and the content of a file or folder can be those of a checkpoint.

    Args:
        candidate: The file or folder.
        is_pattern: True if the path matches a pattern that the user wrote.
    """
    is_training_state = candidate.verdict.is_training_state
    has_state_suffix = candidate.content.path.suffix in _PLAIN_SUFFIXES
    match candidate.kind:
        case NameKind.NUMBERED if candidate.content.is_folder:
            state_suffixes = _STATE_SUFFIXES if is_pattern else _STATE_SUFFIXES - _EXPORT_SUFFIXES
            return (
                is_training_state
                or _has_suffix(candidate.content, state_suffixes)
                or candidate.is_series_only
            )
        case NameKind.NUMBERED:
            return is_training_state or has_state_suffix or candidate.is_series_only
        case NameKind.UNNUMBERED:
            return is_training_state or (not candidate.content.is_folder and has_state_suffix)
        case _:
            return True


def _read_candidate(content: Content, kind: NameKind) -> _Candidate:
    return _Candidate(content, judge_content(content), kind)


def _read_pointer(path: CheckpointPath) -> _Pointer | None:
    """Return the checkpoint that a pointer file or symbolic link names, or None for other files.

    Raises:
        StoreError: The store of the checkpoints did not answer.
    """
    text = ""
    if path.is_symlink() and is_current_name(path.name) and read_step(path.name) is None:
        text = str(path.readlink())
    elif path.name in _POINTER_NAMES and path.is_file() and not path.is_symlink():
        with suppress_file_errors():
            if path.stat().st_size <= _POINTER_BYTES:
                text = path.read_text("utf-8", "replace").strip() or _NO_TEXT
    if not text:
        return None
    target = PurePosixPath(text).name
    step = int(target) if target.isdecimal() else read_step(target)
    return _Pointer(name=path.name, text=text, target=target, step=step)


def _judge(
    candidates: list[_Candidate],
    pointers: Sequence[_Pointer],
    *,
    is_running: bool,
    is_pattern: bool = False,
    others: Iterable[tuple[CheckpointPath, str]] = (),
) -> Listing:
    """Decide which candidates are checkpoints, and which of these checkpoints are complete.

    Args:
        candidates: Files and folders that may be checkpoints.
        pointers: Pointer files in the same folder. A pointer file contains the name of the newest
            checkpoint.
        is_running: True if the trainer may still be writing.
        is_pattern: True if the candidates match a pattern that the user wrote.
        others: Paths whose names show that they are no checkpoints, each with the reason.
    """
    best_rank = min((one.rank for one in candidates if not one.is_current), default=0)
    if best_rank > NameKind.NAMED_CHECKPOINT and any(one.is_current for one in candidates):
        # Files such as `last.pt` are the checkpoints. The numbered files are probably not.
        chosen = [one for one in candidates if one.is_current]
    else:
        chosen = [one for one in candidates if one.is_current or one.rank == best_rank]
    chosen.sort(key=lambda candidate: candidate.order)
    different = [
        (
            candidate.content.path,
            candidate.verdict.gap
            or f"this is not the same kind of file as the checkpoint {chosen[-1].name}",
        )
        for candidate in candidates
        if candidate not in chosen
    ]
    pointer = _find_best_pointer(pointers, chosen)
    gaps = [_find_gap(candidate, chosen) for candidate in chosen]
    checkpoints = []
    for index, (candidate, gap) in enumerate(zip(chosen, gaps, strict=True)):
        completeness, reason = Completeness.INCOMPLETE, gap
        if not gap:
            newer = chosen[index + 1] if index + 1 < len(chosen) else None
            completeness, reason = _confirm(
                candidate,
                pointer,
                chosen,
                newer=newer,
                is_running=is_running,
                is_pattern=is_pattern,
            )
        content = candidate.content
        checkpoints.append(
            Checkpoint(
                path=content.path,
                parts=content.paths,
                step=candidate.step,
                changed_at=content.changed_at,
                signature=content.signature,
                inode_changes_ns=(content.oldest_inode_changed_ns, content.newest_inode_changed_ns),
                completeness=completeness,
                reason=reason,
            )
        )
    notes = [*_note_pointers(pointers, checkpoints)]
    return Listing(checkpoints=tuple(checkpoints), others=(*different, *others), notes=tuple(notes))


def _find_gap(candidate: _Candidate, chosen: Sequence[_Candidate]) -> str:
    """Return the reason why a checkpoint is incomplete, or an empty string if it seems complete.

    The content of the checkpoint is checked, and then compared with the other checkpoints.

    Args:
        candidate: The checkpoint.
        chosen: All checkpoints of the folder.
    """
    if gap := candidate.verdict.gap:
        return gap
    others = [other for other in chosen if other is not candidate and not other.verdict.gap]
    own_markers = candidate.content.names & MARKER_NAMES
    for other in others:
        if (markers := other.content.names & MARKER_NAMES) and not own_markers:
            return (
                f"this checkpoint lacks the file {min(markers)}, which the checkpoint {other.name} "
                "has"
            )
        is_marked = "trainer_state.json" in other.content.names
        if is_marked and "trainer_state.json" not in candidate.content.names:
            return (
                "this checkpoint lacks the file trainer_state.json, which the checkpoint "
                f"{other.name} has"
            )
    if candidate.verdict.proof:
        others = [other for other in others if other.verdict.proof]
    return _compare(candidate, others) if others else ""


def _compare(candidate: _Candidate, others: Sequence[_Candidate]) -> str:
    """Return a text about a file that is missing or too small, or an empty string.

    The files of a checkpoint are compared with those of other checkpoints. Old checkpoints are
    checked, too, because a trainer may have been killed while it deleted an old checkpoint.

    Args:
        candidate: The checkpoint that is checked.
        others: At least one other checkpoint of the same folder.
    """
    content = candidate.content
    own_counts = _count_state_files(content)
    counts = [_count_state_files(other.content) for other in others]
    for name in sorted(set(counts[0]).intersection(*counts[1:])):
        example = others[-1].name
        if own_counts[name] == 0:
            return (
                f"this checkpoint lacks a file like {name}, but the checkpoint {example} has such "
                "a file"
            )
        has_ranks = _RANKED_FILE.search(name) is not None or not content.is_folder
        least = min(count[name] for count in counts)
        if has_ranks and own_counts[name] < least:
            return (
                f"this checkpoint has {own_counts[name]} files like {name}, but every other "
                f"complete checkpoint has at least {least}"
            )
    if candidate.verdict.proof:
        return ""
    sizes = [_sizes_by_name(other.content) for other in others]
    for name, size_bytes in sorted(_sizes_by_name(content).items()):
        least = min(size.get(name, 0) for size in sizes)
        if size_bytes < _SMALLEST_SHARE * least:
            return (
                f"the file {name} has only {size_bytes} bytes, but in every other complete "
                f"checkpoint it has at least {least} bytes"
            )
    return ""


def _count_state_files(content: Content) -> Counter[str]:
    return Counter(
        _key_of(content, name)
        for name in content.names
        if PurePosixPath(name).suffix in _STATE_SUFFIXES or _is_description(name)
    )


def _is_description(name: str) -> bool:
    """Return True for a file that describes a checkpoint, such as `config.json`."""
    base_name = PurePosixPath(name).name
    is_description = base_name.endswith((".json", ".ocdbt")) or base_name.startswith("_CHECKPOINT")
    return is_description and _RESULT_FILE.search(base_name) is None


def _key_of(content: Content, name: str) -> str:
    """Return a key that is equal for corresponding files in two checkpoints of a folder.

    The key is the path of the file without numbers, because the numbers may be training steps. If
    the checkpoint is a single file, the key is the suffix of the file.

    Args:
        content: The checkpoint that contains the file.
        name: Path of the file in the checkpoint.
    """
    return drop_numbers(name) if content.is_folder else PurePosixPath(name).suffix


def _sizes_by_name(content: Content) -> dict[str, int]:
    """Return a mapping from the names of a checkpoint's files to their sizes in bytes.

    Numbers are removed from the names; see `_key_of`. If several files then have the same name,
    the smallest size is used. Files without state of the training are left out.
    """
    sizes: dict[str, int] = {}
    for name, facts in content.files.items():
        if facts is not None and PurePosixPath(name).suffix in _STATE_SUFFIXES:
            key = _key_of(content, name)
            sizes[key] = min(sizes.get(key, facts.size_bytes), facts.size_bytes)
    return sizes


def _confirm(
    candidate: _Candidate,
    pointer: _Pointer | None,
    chosen: Sequence[_Candidate],
    *,
    newer: _Candidate | None,
    is_running: bool,
    is_pattern: bool,
) -> tuple[Completeness, str]:
    """Return whether a checkpoint without missing files is complete, and the evidence for this
    result.

    Args:
        candidate: The checkpoint.
        pointer: Pointer file with the name of the last complete checkpoint, or None if there is
            none.
        chosen: All checkpoints of the folder.
        newer: The next newer checkpoint, or None if `candidate` is the newest.
        is_running: True if the trainer may still be writing; see `list_checkpoints`.
        is_pattern: True if the checkpoints match a pattern that the user wrote.
    """
    if candidate.verdict.proof:
        return Completeness.COMPLETE, candidate.verdict.proof
    if pointer is not None:
        if candidate.name == pointer.target:
            reason = f"the pointer file {pointer.name} points to this checkpoint"
            return Completeness.COMPLETE, reason
        if pointer.step is not None and candidate.step is not None:
            is_named_by_step = candidate.step == pointer.step and pointer.target.isdecimal()
            if is_named_by_step or candidate.step < pointer.step:
                return (
                    Completeness.COMPLETE,
                    f"the pointer file {pointer.name} points to step {pointer.step}, and this "
                    "checkpoint is not newer",
                )
        has_older = any(
            pointer.step is not None and other.step is not None and other.step <= pointer.step
            for other in chosen
        )
        if has_older or newer is None:
            reason = (
                f"the pointer file {pointer.name} does not point to this checkpoint: the file "
                f"{pointer.description}"
            )
            return Completeness.INCOMPLETE, reason
        return Completeness.COMPLETE, f"the checkpoint {newer.name} was saved later"
    if newer is not None:
        return Completeness.COMPLETE, f"the checkpoint {newer.name} was saved later"
    has_known_layout = bool(candidate.verdict.layout) or is_pattern
    if not has_known_layout and drop_numbers(candidate.name) in _POINTED_AT:
        reason = f"no pointer file points to this checkpoint, {_NOT_CONFIRMED}"
        return Completeness.UNKNOWN, reason
    has_config = "config.json" in candidate.content.names
    is_weights_only = has_config and not _has_training_files(candidate.content)
    if not has_known_layout and is_weights_only:
        reason = (
            "this folder has weights but no training state (such as the optimizer state), "
            f"{_NOT_CONFIRMED}"
        )
        return Completeness.UNKNOWN, reason
    if is_running:
        return Completeness.UNKNOWN, f"Muster does not know this layout of files, {_NOT_CONFIRMED}"
    layout = f"layout {candidate.verdict.layout}" if candidate.verdict.layout else "unknown layout"
    return (
        Completeness.COMPLETE,
        f"the checkpoint has not changed since the trainer ended ({layout})",
    )


def _find_best_pointer(
    pointers: Sequence[_Pointer], chosen: Sequence[_Candidate]
) -> _Pointer | None:
    """Return the pointer file with the highest step, or None if there is no pointer file.

    A pointer file whose checkpoint exists is preferred to all pointer files whose checkpoint is
    missing.
    """

    def order(pointer: _Pointer) -> tuple[bool, int]:
        is_present = any(
            candidate.name == pointer.target or candidate.step == pointer.step
            for candidate in chosen
        )
        return (is_present, -1 if pointer.step is None else pointer.step)

    return max(pointers, key=order, default=None)


def _note_pointers(
    pointers: Sequence[_Pointer], checkpoints: Sequence[Checkpoint]
) -> Iterator[str]:
    """Yield a remark for each pointer file that does not name the newest complete checkpoint."""
    complete = [checkpoint for checkpoint in checkpoints if checkpoint.is_complete]
    if not complete:
        return
    newest = complete[-1]
    for pointer in pointers:
        if pointer.target == newest.path.name or (
            pointer.step is not None and pointer.step == newest.step
        ):
            continue
        yield (
            f"the pointer file {pointer.name} {pointer.description}, but the newest complete "
            f"checkpoint is {newest.path.name}. A trainer that reads the pointer file starts from "
            "another checkpoint than Muster expects"
        )
