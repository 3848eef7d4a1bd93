"""Decide from the name of a file whether it is a checkpoint, and find the step in the name."""

from __future__ import annotations

import glob
import re
from collections import Counter
from collections.abc import Sequence
from enum import IntEnum

#: Matches the names of incomplete files: files that are being written or deleted, or were left by a
#: killed program.
_PARTIAL = re.compile(
    r"^[.~]|^(?:tmp|temp)[-_.]"
    r"|[-_.](?:tmp|temp|partial|incomplete|unfinished|writing|old|bak|backup)(?![a-z0-9])"
    r"|[-_.]part(?![a-z0-9]|[-_]\d)",
    re.IGNORECASE,
)
#: Suffix that Muster adds to the name of a checkpoint before it removes the checkpoint.
REMOVAL_SUFFIX = ".muster-old"
#: Matches the names of files that are certainly no checkpoints, even if a name contains a number.
_OTHER_SUFFIX = re.compile(
    r"^events\.out\.tfevents\.|\.(?:log|ya?ml|jsonl|csv|tsv|md|html?|png|jpe?g|svg|pdf|py|sh|toml"
    r"|cfg|ini|lock|out|err|parquet|arrow|done|onnx|gguf)$",
    re.IGNORECASE,
)
#: Matches names of files and folders that Muster itself creates in the directory of a run.
_MADE_BY_MUSTER = re.compile(r"attempt-\d+|run\.json|lineage\.json|code")
_SUFFIX = re.compile(r"\.[A-Za-z][A-Za-z0-9]*$")
#: Matches a metric in a file name, such as `loss=0.31`. The number of a metric is no training step.
_METRIC = re.compile(r"[-_.]*[A-Za-z][A-Za-z_/]*[=_-]\d+\.\d+(?:e-?\d+)?", re.IGNORECASE)
#: Matches the rank of a process or the number of a shard in a file name. Such a number is no
#: training step.
_RANK = re.compile(
    r"[-_.]*(?:world_size|mp_rank|rank|shard)[-_=]?\d+(?:[-_]?of[-_]?\d+)?|[-_.]*\d+-of-\d+",
    re.IGNORECASE,
)
_RANK_OF = re.compile(r"(?:rank|shard)[-_=]?(\d+)|(\d+)-of-\d+", re.IGNORECASE)
#: Matches the suffix that Lightning adds to a name if a file with the same name already exists.
_VERSION = re.compile(r"[-_.]v\d+$")
_NUMBER = re.compile(r"\d+")
#: Patterns that match a step in a name, in the order of their priority.
_STEPS = (
    re.compile(r"(?:step|steps|iter|iters|iteration|update|updates)[-_=]?(\d+)", re.IGNORECASE),
    re.compile(r"(\d+)[-_]?(?:steps?|iters?|iterations?|updates?)(?![a-z])", re.IGNORECASE),
    re.compile(r"(?<![a-z])(?:ba|batch)[-_=]?(\d+)", re.IGNORECASE),
)

#: Matches a name that consists of a prefix and a training step at its end, such as `tinylm-19`.
_SERIES = re.compile(r"(?P<prefix>(?:.*[^\d.])?)(?P<step>\d+)", re.DOTALL)
#: Matches a date in a name. The last number of such a name is probably no training step.
_DATE = re.compile(r"(?<!\d)(?:19|20)\d\d([-_.]?)(?:0[1-9]|1[0-2])\1(?:0[1-9]|[12]\d|3[01])(?!\d)")
#: Words before a number that is no training step, as in `version_0` and `run-3`.
_COUNTED_WORDS = frozenset(
    {"v", "ver", "version", "run", "try", "trial", "seed", "fold", "log", "job", "task"}
)

_CURRENT_WORDS = frozenset({"last", "latest", "newest", "current"})
_STEP_WORDS = frozenset(
    {"step", "steps", "globalstep", "iter", "iters", "iteration", "epoch", "ep", "ba", "batch"}
    | {"checkpoint", "ckpt", "chkpt", "update", "updates", "snapshot"}
)
#: Words that are common in the names of checkpoints.
_CHECKPOINT_WORDS = (
    _STEP_WORDS
    | _CURRENT_WORDS
    | {"global", "epochstep", "cp", "save", "saved", "state", "model"}
    | {"train", "trainer", "training"}
)
#: Words in the names of results, such as exported models and evaluations. A training cannot resume
#: from a result.
_RESULT_WORDS = frozenset(
    {"hf", "huggingface", "export", "exported", "merged", "converted", "onnx", "gguf", "ggml"}
    | {"quantized", "gptq", "awq", "inference", "unsharded"}
    | {"eval", "evals", "evaluation", "evaluate", "evaluated", "prediction", "predictions", "preds"}
    | {"sample", "samples", "generation", "generations", "generated", "rollout", "rollouts"}
    | {"logs", "metrics", "report", "profile", "profiler", "trace", "traces", "histogram"}
    | {"tensorboard", "tb", "wandb", "mlflow"}
    | {"plot", "plots", "figure", "figures", "image", "images", "video", "videos"}
    | {"replay", "buffer", "vecnormalize"}
)
#: Words in the names of results, such as test outputs. These words are ignored if the name also
#: contains a word for a training step, such as `iter`.
_WEAK_RESULT_WORDS = frozenset(
    {"val", "valid", "validation", "test", "tests", "gen", "debug", "output", "outputs"}
)


class NameKind(IntEnum):
    """Kind of a file or folder according to its name.

    A lower value means that the file or folder is more likely to be a checkpoint.
    """

    #: The name contains only words that are usual for checkpoints, as in `global_step_10`,
    #: `checkpoint-10` and `last`.
    CHECKPOINT = 0
    #: The name contains `step` or a similar word and further words, as in `qwen-step-20`.
    NAMED_CHECKPOINT = 1
    #: The name contains a number, but no word for a step, as in `policy-20`.
    NUMBERED = 2
    #: The name contains words for checkpoints, but no number, as in `last.pt`. A trainer may
    #: overwrite such a file with each new checkpoint.
    UNNUMBERED = 3
    #: The name is that of an incomplete file, a log or another output of the training.
    OTHER = 4


def classify_name(name: str) -> NameKind:
    """Return the kind of a file or folder in a checkpoint folder, according to its name."""
    if is_never_checkpoint(name):
        return NameKind.OTHER
    words = _list_words(name)
    has_step_word = bool(words & _STEP_WORDS)
    if words & _RESULT_WORDS or (words & _WEAK_RESULT_WORDS and not has_step_word):
        return NameKind.OTHER
    if read_step(name) is None:
        is_replaced_name = words <= _CHECKPOINT_WORDS and words & (_CURRENT_WORDS | _STEP_WORDS)
        return NameKind.UNNUMBERED if is_replaced_name else NameKind.OTHER
    if words <= _CHECKPOINT_WORDS:
        # A file whose name is only a number, such as `20`, is not always a checkpoint.
        return NameKind.CHECKPOINT if words else NameKind.NUMBERED
    return NameKind.NAMED_CHECKPOINT if has_step_word else NameKind.NUMBERED


def is_never_checkpoint(name: str) -> bool:
    """Return True if a file is certainly no complete checkpoint, according to its name.

    This is the case for logs, for temporary files and for the files that Muster itself writes.
    """
    is_other = _OTHER_SUFFIX.search(name) or _MADE_BY_MUSTER.fullmatch(name)
    return bool(is_other) or is_partial_name(name)


def is_series_name(name: str) -> bool:
    """Return True if a name can be that of a checkpoint in a series, such as `it000005`.

    The name must consist of a prefix and a number at its end. The prefix may be empty. The result
    is False if the number belongs to a date, a version or a run.
    """
    match = _SERIES.fullmatch(_SUFFIX.sub("", name))
    if match is None or _DATE.search(name):
        return False
    words = re.findall(r"[a-z]+", match["prefix"].lower())
    return not words or words[-1] not in _COUNTED_WORDS


def is_partial_name(name: str) -> bool:
    """Return True if a name is that of a hidden, temporary or incomplete file."""
    return _PARTIAL.search(name) is not None


def is_current_name(name: str) -> bool:
    """Return True if a name stands for the newest checkpoint.

    Examples are `last` and `latest-rank0.pt`.
    """
    return bool(_list_words(name) & _CURRENT_WORDS) and classify_name(name) is not NameKind.OTHER


def is_step_named(name: str) -> bool:
    """Return True if a word such as `step` marks a number in the name as the training step.

    The result is True for `step-20` and False for `epoch=2.ckpt`, in which the number is an epoch.
    """
    stem = _strip(name)
    has_step = any(pattern.search(stem) for pattern in _STEPS)
    return has_step or (read_step(name) is not None and not _list_words(name) & {"epoch", "ep"})


def read_step(name: str) -> int | None:
    """Return the training step in the name of a checkpoint, or None if the name has no step.

    The step is the number next to a word such as `step`. Without such a word, the last number in
    the name is the step. Ranks, shard numbers and metrics do not count.
    """
    stem = _strip(name)
    for pattern in _STEPS:
        if matches := pattern.findall(stem):
            return int(matches[-1])
    numbers = _NUMBER.findall(stem)
    return int(numbers[-1]) if numbers else None


def read_rank(name: str) -> int | None:
    """Return the rank or shard number in the name of a file, or None if the name has neither."""
    match = _RANK_OF.search(name)
    return int(match[1] or match[2]) if match else None


def drop_rank(name: str) -> str:
    """Return the name of a file without the rank of the process that wrote the file.

    So all files that the ranks write for one checkpoint get the same name.
    """
    return _RANK.sub("", name)


def drop_numbers(name: str) -> str:
    """Return a name in which each number is replaced by `#`.

    Example: the result is `step-#` for both `step-20` and `step-40`. The result is the same for all
    checkpoints of one training.
    """
    return _NUMBER.sub("#", name)


def make_pattern(names: Sequence[str]) -> str:
    """Return a glob pattern for the series with the most names, such as `it*` for `it000005`.

    A series consists of names that differ only in a number.

    Args:
        names: Names of files and folders in a folder, at least one.
    """
    patterns = [
        re.sub(r"^\*", "[0-9]*", drop_numbers(glob.escape(name)).replace("#", "*"))
        for name in names
    ]
    counts = Counter(patterns)
    return max(reversed(patterns), key=counts.__getitem__)


def _strip(name: str) -> str:
    """Return a checkpoint's name without file extension, metrics, ranks and version.

    A version is a part such as `-v2`. The training step stays in the name.
    """
    without_metrics = _METRIC.sub("", _SUFFIX.sub("", name))
    return _VERSION.sub("", _RANK.sub("", without_metrics))


def _list_words(name: str) -> set[str]:
    return set(re.findall(r"[a-z]+", _strip(name).lower()))
