"""The file layouts of the checkpoints that different trainers write.

`LAYOUTS` lists the known layouts. Each layout has functions that recognise it, that find missing
files, and that read the step of the checkpoint. `judge_content` checks one checkpoint with these
functions. The module `checkpoint_folder` handles folders with several checkpoints.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePosixPath
from typing import Any

from tasks.record.checkpoint_names import (
    NameKind,
    classify_name,
    drop_rank,
    is_partial_name,
    is_step_named,
    read_step,
)
from tasks.record.checkpoint_paths import CheckpointPath, StorePath, walk_files
from tasks.record.checkpoint_store import call_in_parallel, suppress_file_errors
from tasks.record.tensor_files import check_file, read_pickled_number, read_stored_lengths

#: Largest number of files that are checked in one checkpoint. Further files are ignored.
_FILES_AT_MOST = 20_000
#: Largest assumed difference between the clocks of the machines that write one checkpoint, in
#: nanoseconds.
_CLOCK_SLACK_NS = 5_000_000_000
#: Names of files that some trainers write into a checkpoint when it is complete. Sources: prime-rl
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
#: Matches the name of a shard that `save_pretrained` of Hugging Face writes. A checkpoint with
#: several shards also has an index file.
_HF_SHARD = re.compile(r"(?:pytorch_model|model)-\d{5}-of-(?!00001)\d{5}\.(?:safetensors|bin)")
#: Keys of the training step in a pickle file. The first key that exists is used.
_STEP_KEYS = ("global_step", "iteration", "step", "global_steps", "iter", "iter_num", "num_steps")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileFacts:
    """Size, change times and inode number of one file of a checkpoint."""

    size_bytes: int
    #: Time of the last change of the file's content (mtime), in nanoseconds since the epoch.
    changed_ns: int
    #: Time of the last change of the file's inode (ctime), in nanoseconds since the epoch. A
    #: program can set `changed_ns` to any value, but cannot set `inode_changed_ns`.
    inode_changed_ns: int
    inode: int


@dataclass(frozen=True)
class Content:
    """The list of the files of one checkpoint, with their sizes and times."""

    #: Path of the checkpoint: a folder, a file, or the first of several files of different ranks.
    path: CheckpointPath
    #: Mapping from the path of each file, relative to `root`, to the facts about the file. The
    #: value is None for a symbolic link to a missing file.
    files: Mapping[str, FileFacts | None]
    #: Folder from which the paths in `files` start.
    root: CheckpointPath
    is_folder: bool

    @staticmethod
    def read(path: CheckpointPath, parts: Iterable[CheckpointPath] = ()) -> Content:
        """List the files of a checkpoint.

        Args:
            path: Path of the checkpoint.
            parts: All files of the checkpoint, if the checkpoint is a group of files without a
                folder of its own.

        Raises:
            OSError: The checkpoint cannot be listed.
        """
        if not path.is_dir():
            found = {part.name: _facts_of(part) for part in (parts or (path,))}
            return Content(path=path, files=found, root=path.parent, is_folder=False)
        files: dict[str, FileFacts | None] = {}
        prefix = f"{path}/"
        for file_path in walk_files(path):
            if file_path.is_file() or not file_path.exists():  # Skip sockets, pipes and devices.
                files[str(file_path).removeprefix(prefix)] = _facts_of(file_path)
            if len(files) > _FILES_AT_MOST:
                break
        return Content(path=path, files=files, root=path, is_folder=True)

    @property
    def paths(self) -> tuple[CheckpointPath, ...]:
        """Path of the checkpoint's folder, or paths of its files if the checkpoint has no folder of
        its own.
        """
        if self.is_folder:
            return (self.path,)
        return tuple(self.root / name for name in self.files)

    @cached_property
    def names(self) -> frozenset[str]:
        """Paths of all files of the checkpoint, relative to `root`."""
        return frozenset(self.files)

    @cached_property
    def base_names(self) -> frozenset[str]:
        return frozenset(PurePosixPath(name).name for name in self.files)

    @property
    def size_bytes(self) -> int:
        return sum(facts.size_bytes for facts in self._facts)

    @property
    def changed_at(self) -> float:
        """UTC epoch seconds of the last change of the checkpoint's files, or 0 without files."""
        return max((facts.changed_ns for facts in self._facts), default=0) / 1e9

    @property
    def oldest_inode_changed_ns(self) -> int:
        return min((facts.inode_changed_ns for facts in self._facts), default=0)

    @property
    def newest_inode_changed_ns(self) -> int:
        return max((facts.inode_changed_ns for facts in self._facts), default=0)

    @cached_property
    def signature(self) -> str:
        """Hash that changes if a file of the checkpoint is written, replaced, added or removed."""
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


def _facts_of(path: CheckpointPath) -> FileFacts | None:
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Description of the files in the checkpoints that one kind of trainer writes."""

    name: str
    #: Function that returns True if a checkpoint has this layout.
    matches: Callable[[Content], bool]
    #: Function that returns the reason why a checkpoint is incomplete, or an empty string.
    find_gap: Callable[[Content], str] = lambda content: ""
    #: Proof that a checkpoint is complete, as a text for the user. The proof is valid only if
    #: `find_gap` returns an empty string. Example: `metadata.json, which is written last, exists`.
    #: Empty if the files of this layout cannot prove that a checkpoint is complete.
    proof: str = ""
    #: Function that returns the training step that is stored in the checkpoint's files, or None.
    read_step: Callable[[Content], int | None] = lambda content: None


@dataclass(frozen=True, slots=True, kw_only=True)
class ContentVerdict:
    """Result of the check of a checkpoint's files."""

    #: Name of the checkpoint's layout, such as `DeepSpeed`, or an empty string if it is unknown.
    layout: str = ""
    #: Reason why the checkpoint is incomplete, or an empty string.
    gap: str = ""
    #: Text that says why the checkpoint is certainly complete. Empty if this is not certain.
    proof: str = ""
    #: Training step of the checkpoint, or None if unknown.
    step: int | None = None
    #: Training step that is stored in the files of the checkpoint. None if the files contain no
    #: step, or if the name of the checkpoint shows the step, as in `step-20`.
    stored_step: int | None = None
    #: True if the layout of the files proves that they contain the state of a training.
    is_training_state: bool = False


def _has(*names: str) -> Callable[[Content], bool]:
    return lambda content: all(name in content.names for name in names)


def _has_match(pattern: str) -> Callable[[Content], bool]:
    compiled = re.compile(pattern)
    return lambda content: any(compiled.fullmatch(name) for name in content.names)


def _read_json(content: Content, name: str) -> Mapping[str, Any]:
    """Return the JSON object that a file of a checkpoint contains.

    The result is empty if the file is missing or does not contain a JSON object.

    Raises:
        StoreError: The store of the checkpoint did not answer.
    """
    with suppress_file_errors():
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
        return "the file trainer_state.json, which the trainer writes last, is missing"
    return ""


def _accelerate_gap(content: Content) -> str:
    if "random_states_0.pkl" not in content.names:
        return "the file random_states_0.pkl, which accelerate writes last, is missing"
    return ""


def _orbax_gap(content: Content) -> str:
    name = "_CHECKPOINT_METADATA"
    metadata = _read_json(content, name)
    if name in content.names and not metadata:
        return f"{name} is not JSON"
    if "commit_timestamp_nsecs" in metadata and not metadata["commit_timestamp_nsecs"]:
        return (
            "Orbax did not complete the checkpoint: commit_timestamp_nsecs in the file "
            "_CHECKPOINT_METADATA is empty"
        )
    return ""


def _distributed_gap(content: Content) -> str:
    """Return a text about a missing or incomplete file of torch.distributed.checkpoint.

    The result is an empty string if no fault is found. All folders that
    torch.distributed.checkpoint has written into the checkpoint are checked.
    """
    folders = {
        PurePosixPath(name).parent
        for name in content.names
        if name.endswith(".distcp") or PurePosixPath(name).name == ".metadata"
    }
    for folder in sorted(folders):
        metadata = (folder / ".metadata").as_posix()
        if metadata not in content.names:
            return f"the file {metadata}, which the trainer writes last, is missing"
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
                return (
                    f"{shard} has {facts.size_bytes} bytes, but .metadata requires at least "
                    f"{least_bytes} bytes"
                )
            last = content.files[metadata]
            if last is not None and facts.changed_ns > last.changed_ns + _CLOCK_SLACK_NS:
                # A trainer writes `.metadata` after all other files. A file that is newer than
                # `.metadata` shows that the trainer died while it overwrote an older checkpoint.
                return f"{shard} is newer than {metadata}, but the trainer writes {metadata} last"
    return ""


def _megatron_gap(content: Content) -> str:
    """Return a text that names the missing file of a Megatron checkpoint, or an empty string.

    Only the metadata files of Megatron's dist_checkpointing are checked, and not the shards.
    """
    for folder in _folders_with(content, "common.pt"):
        metadata = (folder / "metadata.json").as_posix()
        if metadata not in content.names:
            return f"the file {metadata}, which the trainer writes last, is missing"
        backend = _read_json(content, metadata).get("sharded_backend")
        if backend == "torch_dist" and (folder / ".metadata").as_posix() not in content.names:
            return f"{(folder / '.metadata').as_posix()} is missing"
    return ""


def _deepspeed_gap(content: Content) -> str:
    """Return a text about missing optimizer files of a DeepSpeed checkpoint, or an empty string.

    Each rank writes one optimizer file. The file with the model weights contains the number of
    ranks.
    """
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
                return (
                    f"the checkpoint has only {len(optimizer)} of {ranks} files with the state of "
                    "the optimizer"
                )
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


#: Layouts of the checkpoints of all known trainers. If several layouts match a checkpoint, the user
#: sees the name of the first layout. The checkpoint is incomplete if the function `find_gap` of any
#: matching layout returns a reason.
LAYOUTS: tuple[Layout, ...] = (
    Layout(
        # Source: transformers/trainer.py, _save_checkpoint.
        name="Hugging Face Trainer",
        matches=lambda content: bool(content.names & {"trainer_state.json", "training_args.bin"}),
        find_gap=_hugging_face_gap,
        proof="trainer_state.json exists, and no shard is missing or cut short",
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
        proof="random_states_0.pkl, which is written last, exists",
    ),
    Layout(
        # Source: NeMo-RL nemo_rl/utils/checkpoint.py. NeMo-RL gives the folder its final name when
        # the checkpoint is complete.
        name="NeMo-RL",
        matches=_has("training_info.json"),
        proof="the folder has the name that NeMo-RL gives to complete checkpoints",
        read_step=lambda content: _number_in(
            _read_json(content, "training_info.json"), "step", "total_steps"
        ),
    ),
    Layout(
        # Source: orbax/checkpoint/_src/metadata/checkpoint.py. Orbax gives a folder its final name
        # when the checkpoint is complete.
        name="Orbax",
        matches=lambda content: bool(
            content.names & {"_CHECKPOINT_METADATA", "_METADATA", "manifest.ocdbt"}
        ),
        find_gap=_orbax_gap,
        proof="the folder has the name that Orbax gives to complete checkpoints",
    ),
    Layout(
        # Source: Megatron-LM megatron/core/dist_checkpointing/serialization.py, save.
        name="Megatron distributed checkpoint",
        matches=lambda content: (
            "common.pt" in content.base_names
            and bool(content.base_names & {".metadata", "metadata.json"} or _is_sharded(content))
        ),
        find_gap=lambda content: _megatron_gap(content) or _distributed_gap(content),
        proof="metadata.json, which is written last, exists",
    ),
    Layout(
        # Source: verl/utils/checkpoint/fsdp_checkpoint_manager.py; trainer/ppo/ray_trainer.py
        # writes data.pt after the models.
        name="verl FSDP",
        matches=lambda content: _is_verl(content) and "data.pt" in content.names,
        proof="the files of all ranks exist, and also data.pt, which the trainer writes last",
    ),
    Layout(name="verl FSDP, models only", matches=_is_verl),
    Layout(
        # Source: torch/distributed/checkpoint/filesystem.py; torchtitan, slime, prime-rl.
        name="PyTorch DCP",
        matches=lambda content: ".metadata" in content.names or _is_sharded_at_top(content),
        find_gap=_distributed_gap,
        proof="the file .metadata exists, and every shard listed in .metadata exists",
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


#: Names of layouts that can also match files that are not checkpoints. A match with one of these
#: layouts does not prove that the files contain the state of a training.
_WEAK_LAYOUTS = frozenset({"single file", "one file per rank", "Lightning, sharded"})


def judge_content(content: Content) -> ContentVerdict:
    """Check the files of a checkpoint: recognise its layout, and search for missing files.

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
    name = content.path.name
    stored_step = None
    if layout is not None and (not is_step_named(name) or classify_name(name) is NameKind.NUMBERED):
        with suppress_file_errors():
            stored_step = layout.read_step(content)
    return ContentVerdict(
        layout=layout.name if layout else "",
        gap=gap,
        proof="" if gap else proof,
        # The number in the name of the checkpoint is preferred if it is clearly a step.
        step=read_step(name) if stored_step is None or is_step_named(name) else stored_step,
        stored_step=stored_step,
        is_training_state=layout is not None and layout.name not in _WEAK_LAYOUTS,
    )


def _prove_files(content: Content) -> str:
    """Return why a checkpoint is certainly complete, or an empty string if this is not certain.

    Call this function only if no file is damaged. The checkpoint is certainly complete if it is a
    single file, or if the file names contain the total number of files.
    """
    if len(content.files) == 1 and drop_rank(content.path.name) == content.path.name:
        return "the file is as long as its header says"
    counts = {_count_in(name) for name in content.names}
    if counts == {len(content.files)}:
        return "the files of all ranks exist, and are as long as their headers say"
    return ""


def _count_in(name: str) -> int | None:
    match = _WORLD_RANK.fullmatch(name) or _SHARD.fullmatch(name)
    return int(match["count"]) if match else None


def _find_general_gap(content: Content) -> tuple[str, bool]:
    """Check a checkpoint of any trainer for damaged files, missing shards and missing ranks.

    Returns:
        - The reason why the checkpoint is incomplete, or an empty string.
        - True if the format of every file is known.
    """
    if not content.files:
        return "is empty", False
    if isinstance(content.root, StorePath) and len(content.files) > 1:
        # Check the files in parallel first, so that the loop below uses cached results. Without
        # this step, checking many files one after the other would take minutes.
        call_in_parallel(check_file, [content.root / name for name in content.files])
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
            return f"{name}: {check.damage}", False
        has_only_known_formats = has_only_known_formats and check.is_known_format
    gap = _find_missing_shard(content) or _find_missing_rank(content)
    return gap, has_only_known_formats


def _is_temporary(base_name: str) -> bool:
    is_hidden = base_name.startswith(".")
    return base_name.endswith((".tmp", ".part", ".partial", ".incomplete")) or (
        is_partial_name(base_name) and not is_hidden and base_name.startswith(("tmp", "temp"))
    )


def _may_be_empty(base_name: str) -> bool:
    """Return True if a file with this name may be empty in a complete checkpoint."""
    suffixes = (".txt", ".md", ".lock", ".log", ".gitattributes", ".gitignore", ".py", ".yaml")
    return base_name.endswith(suffixes)


def _find_missing_shard(content: Content) -> str:
    """Return a text that names a missing shard of a checkpoint, or an empty string.

    The expected number of shards is in the names of the shards, or in an index file.
    """
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
            return (
                f"{name} is one of several shards, but the index file of the shards (*.index.json) "
                "is missing"
            )

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
    """Return a text that names a missing file of a rank, or an empty string.

    The file names contain ranks. Each rank between the lowest and the highest of these ranks must
    have a file.
    """
    numbers: dict[tuple[str, str], set[int]] = defaultdict(set)
    for name in content.names:
        is_numbered = _WORLD_RANK.fullmatch(name) or _SHARD.fullmatch(name)
        if not is_numbered and (match := _RANK.fullmatch(name)):
            numbers[match["head"], match["tail"]].add(int(match["number"]))
    for (head, tail), present in numbers.items():
        # Ranks below the lowest and above the highest present rank do not count as missing. Their
        # files may be on the disks of other machines.
        missing = {*range(min(present), max(present) + 1)} - present
        if missing:
            return f"{head}{min(missing)}{tail} is missing"
    return ""
