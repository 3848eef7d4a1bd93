"""The layouts of checkpoints that trainers write, as a table.

Each layout says how to recognise it, which of its files may be missing, and how to read its step.
`judge_content` applies the table to one checkpoint. Folders with several checkpoints, and
their pointer files, are the concern of `checkpoint_folder`.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import Any

from tasks.record.checkpoint_names import drop_rank, is_partial_name, is_step_named, read_step
from tasks.record.tensor_files import check_file, read_pickled_number, read_stored_lengths

#: Largest number of files of one checkpoint that are examined.
_FILES_AT_MOST = 20_000
#: Clocks of the machines that write one checkpoint may differ by this time, in nanoseconds.
_CLOCK_SLACK_NS = 5_000_000_000
#: Files that some trainers write when a checkpoint is complete. Sources: prime-rl
#: (`STABLE`), Orbax on cloud storage, Hadoop and Spark, AXLearn.
MARKER_NAMES = frozenset(
    {"STABLE", "_SUCCESS", "COMPLETE", "COMPLETED", "DONE", ".complete", ".done", "_COMMITTED"}
    | {"commit_success.txt", "complete", "done", "completed", ".completed"}
)
_SHARD = re.compile(r"(?P<head>.*?)(?P<number>\d+)[-_]of[-_](?P<count>\d+)(?P<tail>.*)")
_WORLD_RANK = re.compile(r"(?P<head>.*?world_size_)(?P<count>\d+)_rank_(?P<number>\d+)(?P<tail>.*)")
_RANK = re.compile(
    r"(?P<head>.*?(?:rank|mp_rank|rng_state|random_states)_?)(?P<number>\d+)(?P<tail>.*)"
)
#: A shard of Hugging Face's `save_pretrained`, which writes an index if there are several shards.
_HF_SHARD = re.compile(r"(?:pytorch_model|model)-\d{5}-of-(?!00001)\d{5}\.(?:safetensors|bin)")
#: Keys of the step in the pickles of several trainers.
_STEP_KEYS = ("global_step", "iteration", "step", "global_steps", "iter", "iter_num", "num_steps")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFacts:
    """Facts about one file of a checkpoint."""

    size_bytes: int
    #: Time of the last change of the content, in nanoseconds since the epoch.
    changed_ns: int
    #: Time of the last change of the inode. Unlike `changed_ns`, no program can set it.
    inode_changed_ns: int
    inode: int


@dataclass(frozen=True)
class Content:
    """The files of one checkpoint at one moment."""

    #: The checkpoint: a folder, a file, or the first of several files of different ranks.
    path: Path
    #: All files by their path relative to `root`. A link to a missing file has None.
    files: Mapping[str, FileFacts | None]
    #: Folder from which the paths in `files` start.
    root: Path
    is_folder: bool

    @staticmethod
    def read(path: Path, parts: Iterable[Path] = ()) -> Content:
        """List the files of a checkpoint.

        Args:
            path: The checkpoint.
            parts: All files, if the checkpoint consists of several files.

        Raises:
            OSError: The checkpoint cannot be listed.
        """
        if not path.is_dir():
            found = {part.name: _facts_of(part) for part in (parts or (path,))}
            return Content(path=path, files=found, root=path.parent, is_folder=False)
        files: dict[str, FileFacts | None] = {}
        for folder, _, names in os.walk(path, onerror=_raise):
            for name in sorted(names):
                file = Path(folder, name)
                if file.is_file() or not file.exists():  # No socket, pipe or device.
                    files[file.relative_to(path).as_posix()] = _facts_of(file)
            if len(files) > _FILES_AT_MOST:
                break
        return Content(path=path, files=files, root=path, is_folder=True)

    @property
    def paths(self) -> tuple[Path, ...]:
        """Files or folders of the checkpoint: all of them must be removed together."""
        if self.is_folder:
            return (self.path,)
        return tuple(self.root / name for name in self.files)

    @cached_property
    def names(self) -> frozenset[str]:
        """Paths of all files relative to `root`."""
        return frozenset(self.files)

    @cached_property
    def base_names(self) -> frozenset[str]:
        return frozenset(PurePosixPath(name).name for name in self.files)

    @property
    def size_bytes(self) -> int:
        return sum(facts.size_bytes for facts in self._facts)

    @property
    def changed_at(self) -> float:
        """Time of the last change in UTC epoch seconds. 0 if there are no files."""
        return max((facts.changed_ns for facts in self._facts), default=0) / 1e9

    @property
    def oldest_inode_changed_ns(self) -> int:
        return min((facts.inode_changed_ns for facts in self._facts), default=0)

    @property
    def newest_inode_changed_ns(self) -> int:
        return max((facts.inode_changed_ns for facts in self._facts), default=0)

    @cached_property
    def signature(self) -> str:
        """Hash that changes if a file is written, replaced, added or removed."""
        text = repr(
            sorted(
                (name, facts and (facts.size_bytes, facts.changed_ns, facts.inode))
                for name, facts in self.files.items()
            )
        )
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    @property
    def _facts(self) -> list[FileFacts]:
        return [facts for facts in self.files.values() if facts is not None]


def _facts_of(path: Path) -> FileFacts | None:
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    return FileFacts(
        size_bytes=stat.st_size,
        changed_ns=stat.st_mtime_ns,
        inode_changed_ns=stat.st_ctime_ns,
        inode=stat.st_ino,
    )


def _raise(error: OSError) -> None:
    # A folder that was removed during the listing is no failure of the file system.
    if not isinstance(error, FileNotFoundError):
        raise error


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Layout of the checkpoints of one kind of trainer."""

    name: str
    #: Returns True if the checkpoint has this layout.
    matches: Callable[[Content], bool]
    #: Returns the reason why the checkpoint is incomplete, or an empty string.
    find_gap: Callable[[Content], str] = lambda content: ""
    #: Evidence for completeness, for the user. Empty if a checkpoint without a gap may still be
    #: incomplete, because no file of it is always written last.
    proof: str = ""
    #: Returns the step that the checkpoint itself stores, or None.
    read_step: Callable[[Content], int | None] = lambda content: None


@dataclass(frozen=True, slots=True, kw_only=True)
class ContentVerdict:
    """Conclusion from the content of a checkpoint."""

    #: Name of the layout, or an empty string for an unknown layout.
    layout: str = ""
    #: Reason why the checkpoint is incomplete, or an empty string.
    gap: str = ""
    #: Evidence that the checkpoint is complete, or an empty string if there is no proof.
    proof: str = ""
    #: Step of the checkpoint, or None if unknown.
    step: int | None = None
    #: True if the content is the state of a training, even if the name is unusual.
    is_training_state: bool = False


def _has(*names: str) -> Callable[[Content], bool]:
    return lambda content: all(name in content.names for name in names)


def _has_match(pattern: str) -> Callable[[Content], bool]:
    compiled = re.compile(pattern)
    return lambda content: any(compiled.fullmatch(name) for name in content.names)


def _read_json(content: Content, name: str) -> Mapping[str, Any]:
    """Return the object in a JSON file of the checkpoint, or an empty one."""
    with suppress(OSError, ValueError):
        found = json.loads((content.root / name).read_text(encoding="utf-8"))
        return found if isinstance(found, dict) else {}
    return {}


def _number_in(found: Mapping[str, Any], *keys: str) -> int | None:
    for key in keys:
        value = found.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return int(value)
    return None


def _hugging_face_step(content: Content) -> int | None:
    return _number_in(_read_json(content, "trainer_state.json"), "global_step")


def _hugging_face_gap(content: Content) -> str:
    if "trainer_state.json" not in content.names:
        return "trainer_state.json, which is written last, is missing"
    return ""


def _accelerate_gap(content: Content) -> str:
    if "random_states_0.pkl" not in content.names:
        return "random_states_0.pkl, which accelerate writes last, is missing"
    return ""


def _orbax_gap(content: Content) -> str:
    name = "_CHECKPOINT_METADATA"
    metadata = _read_json(content, name)
    if name in content.names and not metadata:
        return f"{name} is no JSON"
    if "commit_timestamp_nsecs" in metadata and not metadata["commit_timestamp_nsecs"]:
        return "_CHECKPOINT_METADATA has no commit_timestamp_nsecs"
    return ""


def _distributed_gap(content: Content) -> str:
    """Check each folder of torch.distributed.checkpoint in the checkpoint."""
    folders = {
        PurePosixPath(name).parent
        for name in content.names
        if name.endswith(".distcp") or PurePosixPath(name).name == ".metadata"
    }
    for folder in sorted(folders):
        metadata = (folder / ".metadata").as_posix()
        if metadata not in content.names:
            return f"{metadata}, which is written last, is missing"
        try:
            lengths = read_stored_lengths(content.root / metadata)
        except ValueError as error:
            return f"{metadata} {error}"
        for name, least_bytes in lengths.items():
            shard = (folder / name).as_posix()
            facts = content.files.get(shard)
            if facts is None:
                return f"{shard}, which .metadata names, is missing"
            if facts.size_bytes < least_bytes:
                return f"{shard} has {facts.size_bytes} bytes, .metadata says {least_bytes}"
            last = content.files[metadata]
            if last is not None and facts.changed_ns > last.changed_ns + _CLOCK_SLACK_NS:
                # A save over an older checkpoint was cut short: its `.metadata` is the old one.
                return f"{shard} is newer than {metadata}, which is written last"
    return ""


def _megatron_gap(content: Content) -> str:
    """Check the files that Megatron's dist_checkpointing writes in addition to the shards."""
    for folder in _folders_with(content, "common.pt"):
        metadata = (folder / "metadata.json").as_posix()
        if metadata not in content.names:
            return f"{metadata}, which is written last, is missing"
        backend = _read_json(content, metadata).get("sharded_backend")
        if backend == "torch_dist" and (folder / ".metadata").as_posix() not in content.names:
            return f"{(folder / '.metadata').as_posix()} is missing"
    return ""


def _deepspeed_gap(content: Content) -> str:
    """Compare the optimizer's files with the number of ranks in the model's file."""
    for name in sorted(content.names):
        if re.fullmatch(r"(?:.*/)?mp_rank_\d+_model_states\.pt", name):
            ranks = read_pickled_number(content.root / name, "dp_world_size")
            suffix = re.search(r"mp_rank_\d+", name)
            optimizer = [
                other
                for other in content.names
                if "zero_pp_rank_" in other and suffix and suffix[0] in other
            ]
            if ranks and optimizer and len(optimizer) < ranks:
                return f"has {len(optimizer)} of {ranks} files of the optimizer"
    return ""


def _folders_with(content: Content, base_name: str) -> Iterator[PurePosixPath]:
    for name in sorted(content.names):
        if PurePosixPath(name).name == base_name:
            yield PurePosixPath(name).parent


def _is_verl(content: Content) -> bool:
    return any(_WORLD_RANK.fullmatch(PurePosixPath(name).name) for name in content.names)


def _pickled_step(content: Content) -> int | None:
    name = min(content.names, default="")
    return read_pickled_number(content.root / name, *_STEP_KEYS) if name else None


def _lightning_folder_step(content: Content) -> int | None:
    return read_pickled_number(content.root / "meta.pt", "global_step")


#: All known layouts. The first matching layout gives a checkpoint its name, and every matching
#: layout is checked.
LAYOUTS: tuple[Layout, ...] = (
    Layout(
        # Source: transformers/trainer.py, _save_checkpoint.
        name="Hugging Face Trainer",
        matches=lambda content: bool(content.names & {"trainer_state.json", "training_args.bin"}),
        find_gap=_hugging_face_gap,
        proof="trainer_state.json is there, and every shard is whole",
        read_step=_hugging_face_step,
    ),
    Layout(
        # Source: accelerate/checkpointing.py, save_accelerator_state.
        name="accelerate",
        matches=lambda content: (
            _has_match(r"random_states_\d+\.pkl")(content)
            or (
                _has_match(r"optimizer(?:_\d+)?\.bin")(content)
                and "trainer_state.json" not in content.names
            )
        ),
        find_gap=_accelerate_gap,
        proof="random_states_0.pkl, which is written last, is there",
    ),
    Layout(
        # Source: NeMo-RL nemo_rl/utils/checkpoint.py; the folder is renamed at the end.
        name="NeMo-RL",
        matches=_has("training_info.json"),
        proof="NeMo-RL gave the folder its final name",
        read_step=lambda content: _number_in(
            _read_json(content, "training_info.json"), "step", "total_steps"
        ),
    ),
    Layout(
        # Source: orbax/checkpoint/_src/metadata/checkpoint.py; a folder is renamed at the end.
        name="Orbax",
        matches=lambda content: bool(
            content.names & {"_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt"}
        ),
        find_gap=_orbax_gap,
        proof="Orbax gave the folder its final name",
    ),
    Layout(
        # Source: Megatron-LM megatron/core/dist_checkpointing/serialization.py, save.
        name="Megatron distributed checkpoint",
        matches=lambda content: (
            "common.pt" in content.base_names
            and bool(content.base_names & {".metadata", "metadata.json"} or _is_sharded(content))
        ),
        find_gap=lambda content: _megatron_gap(content) or _distributed_gap(content),
        proof="metadata.json, which is written last, is there",
    ),
    Layout(
        # Source: verl/utils/checkpoint/fsdp_checkpoint_manager.py; trainer/ppo/ray_trainer.py
        # writes data.pt after the models.
        name="verl FSDP",
        matches=lambda content: _is_verl(content) and "data.pt" in content.names,
        proof="all ranks and data.pt, which is written last, are there",
    ),
    Layout(name="verl FSDP, models only", matches=_is_verl),
    Layout(
        # Source: torch/distributed/checkpoint/filesystem.py; torchtitan, slime, prime-rl.
        name="PyTorch DCP",
        matches=lambda content: ".metadata" in content.names or _is_sharded_at_top(content),
        find_gap=_distributed_gap,
        proof=".metadata is there, and every shard that it names",
    ),
    Layout(
        name="PyTorch DCP in subfolders",
        matches=lambda content: ".metadata" in content.base_names or _is_sharded(content),
        find_gap=_distributed_gap,
    ),
    Layout(
        # Source: deepspeed/runtime/engine.py, save_checkpoint.
        name="DeepSpeed",
        matches=_has_match(r"(?:.*/)?(?:bf16_)?(?:zero_pp_rank_\d+_)?mp_rank_\d+_\w+_states\.pt"),
        find_gap=_deepspeed_gap,
    ),
    Layout(
        # Source: Megatron-LM megatron/training/checkpointing.py.
        name="Megatron",
        matches=_has_match(r"mp_rank_\d+(?:_\d+)*/.*\.pt"),
    ),
    Layout(
        # Source: lightning/pytorch/strategies/fsdp.py, save_checkpoint.
        name="Lightning, sharded",
        matches=_has("meta.pt"),
        read_step=_lightning_folder_step,
    ),
    Layout(
        # Source: lightning/pytorch/callbacks/model_checkpoint.py; NeMo 1 writes the same files.
        name="Lightning",
        matches=lambda content: not content.is_folder and content.path.suffix == ".ckpt",
        read_step=_pickled_step,
    ),
    Layout(
        name="single file",
        matches=lambda content: not content.is_folder and len(content.files) == 1,
        read_step=_pickled_step,
    ),
    Layout(
        name="one file per rank",
        matches=lambda content: not content.is_folder,
    ),
)


def _is_sharded(content: Content) -> bool:
    return any(name.endswith(".distcp") for name in content.names)


def _is_sharded_at_top(content: Content) -> bool:
    return any(name.endswith(".distcp") and "/" not in name for name in content.names)


#: Layouts that are no training state by themselves: any file may be one.
_WEAK_LAYOUTS = frozenset({"single file", "one file per rank", "Lightning, sharded"})


def judge_content(content: Content) -> ContentVerdict:
    """Return the layout of a checkpoint, a gap in its files, or the proof of its completeness.

    Raises:
        OSError: A file cannot be read.
    """
    matching = [layout for layout in LAYOUTS if layout.matches(content)]
    layout = matching[0] if matching else None
    gap, has_only_known_formats = _find_general_gap(content)
    for other in matching:
        gap = gap or other.find_gap(content)

    proof = layout.proof if layout else ""
    if markers := sorted(content.names & MARKER_NAMES):
        proof = f"{markers[0]} is there"
    elif not content.is_folder and has_only_known_formats:
        proof = _prove_files(content)
    return ContentVerdict(
        layout=layout.name if layout else "",
        gap=gap,
        proof="" if gap else proof,
        step=_read_step(content, layout),
        is_training_state=layout is not None and layout.name not in _WEAK_LAYOUTS,
    )


def _prove_files(content: Content) -> str:
    """Return the proof for a checkpoint of one file, or of a known number of files."""
    if len(content.files) == 1 and drop_rank(content.path.name) == content.path.name:
        return "the file has the length that its format states"
    counts = {_count_in(name) for name in content.names}
    if counts == {len(content.files)}:
        return "the files of all ranks have the length that their format states"
    return ""


def _count_in(name: str) -> int | None:
    match = _WORLD_RANK.fullmatch(name) or _SHARD.fullmatch(name)
    return int(match["count"]) if match else None


def _read_step(content: Content, layout: Layout | None) -> int | None:
    """Return the step in the name, or the step in the content if the name has no step."""
    step = read_step(content.path.name)
    if is_step_named(content.path.name) or layout is None:
        return step
    with suppress(OSError, ValueError):
        stored = layout.read_step(content)
        return step if stored is None else stored
    return step


def _find_general_gap(content: Content) -> tuple[str, bool]:
    """Check the rules for all layouts: every file is whole, and no shard or rank is missing.

    Returns:
        The gap or an empty string, and True if the format of every file is known.
    """
    if not content.files:
        return "is empty", False
    has_only_known_formats = True
    for name, facts in sorted(content.files.items()):
        base_name = PurePosixPath(name).name
        if facts is None:
            return f"{name} links to a missing file", False
        if base_name in MARKER_NAMES or base_name == "__init__.py":
            continue
        if content.is_folder and _is_temporary(base_name):
            return f"{name} is still being written", False
        if facts.size_bytes == 0 and not _may_be_empty(base_name):
            return f"{name} is empty", False
        if facts.size_bytes == 0:
            continue
        try:
            check = check_file(content.root / name)
        except PermissionError:
            return f"{name} cannot be read: permission denied", False
        if check.damage:
            return f"{name} {check.damage}", False
        has_only_known_formats = has_only_known_formats and check.is_known_format
    gap = _find_missing_shard(content) or _find_missing_rank(content)
    return gap, has_only_known_formats


def _is_temporary(base_name: str) -> bool:
    is_hidden = base_name.startswith(".")
    return base_name.endswith((".tmp", ".part", ".partial", ".incomplete")) or (
        is_partial_name(base_name) and not is_hidden and base_name.startswith(("tmp", "temp"))
    )


def _may_be_empty(base_name: str) -> bool:
    """Return True for files without tensors, which may be empty in a complete checkpoint."""
    suffixes = (".txt", ".md", ".lock", ".log", ".gitattributes", ".gitignore", ".py", ".yaml")
    return base_name.endswith(suffixes)


def _find_missing_shard(content: Content) -> str:
    """Check sets of files whose names or index say how many there must be."""
    for name in sorted(content.names):
        if name.endswith(".index.json"):
            weights = _read_json(content, name).get("weight_map")
            shards = {*weights.values()} if isinstance(weights, dict) else set()
            folder = PurePosixPath(name).parent
            for shard in sorted(map(str, shards)):
                if (folder / shard).as_posix() not in content.names:
                    return f"{(folder / shard).as_posix()}, which {name} names, is missing"

    for name in sorted(content.names):
        if _HF_SHARD.fullmatch(name) and not any(
            other.endswith(".index.json") for other in content.names
        ):
            return f"{name} is one of several shards, and their index is missing"

    for pattern, first_numbers in ((_WORLD_RANK, (0,)), (_SHARD, (0, 1))):
        numbers: dict[tuple[str, int, str], dict[int, str]] = defaultdict(dict)
        for name in content.names:
            if match := pattern.fullmatch(name):
                key = (match["head"], int(match["count"]), match["tail"])
                numbers[key][int(match["number"])] = name
        for (_, count, _), present in sorted(numbers.items()):
            if not any({*present} == {*range(first, first + count)} for first in first_numbers):
                example = present[min(present)]
                return f"has {len(present)} of {count} files like {example}"
    return ""


def _find_missing_rank(content: Content) -> str:
    """Check that files with a rank in their names have no gap between their ranks."""
    numbers: dict[tuple[str, str], set[int]] = defaultdict(set)
    for name in content.names:
        is_numbered = _WORLD_RANK.fullmatch(name) or _SHARD.fullmatch(name)
        if not is_numbered and (match := _RANK.fullmatch(name)):
            numbers[match["head"], match["tail"]].add(int(match["number"]))
    for (head, tail), present in numbers.items():
        # Files of other machines may lie elsewhere, so the first rank need not be 0.
        missing = {*range(min(present), max(present) + 1)} - present
        if missing:
            return f"{head}{min(missing)}{tail} is missing"
    return ""
