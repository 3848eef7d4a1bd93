"""Read names in a folder of checkpoints: the step, and the kind of file that a name suggests."""

from __future__ import annotations

import re
from enum import IntEnum

#: Names of files that are being written, were abandoned, or are being removed.
_PARTIAL = re.compile(
    r"^[.~]|^(?:tmp|temp)[-_.]"
    r"|[-_.](?:tmp|temp|partial|incomplete|unfinished|writing|old|bak|backup)(?![a-z0-9])"
    r"|[-_.]part(?![a-z0-9]|[-_]\d)",
    re.IGNORECASE,
)
#: Suffix of a checkpoint that Muster removes.
REMOVAL_SUFFIX = ".muster-old"
#: Suffixes of files that are no checkpoints, although their names may have numbers.
_OTHER_SUFFIX = re.compile(
    r"^events\.out\.tfevents\.|\.(?:log|ya?ml|jsonl|csv|tsv|md|html?|png|jpe?g|svg|pdf|py|sh|toml"
    r"|cfg|ini|lock|out|err|parquet|arrow|done|onnx|gguf)$",
    re.IGNORECASE,
)
#: Directories that Muster itself makes in the directory of a run.
_MADE_BY_MUSTER = re.compile(r"attempt-\d+|run\.json|code")
_SUFFIX = re.compile(r"\.[A-Za-z][A-Za-z0-9]*$")
#: A metric in a name, such as `loss=0.31`. Its number is no step.
_METRIC = re.compile(r"[-_.]*[A-Za-z][A-Za-z_/]*[=_-]\d+\.\d+(?:e-?\d+)?", re.IGNORECASE)
#: The rank of a process, or the number of a shard. It is no step.
_RANK = re.compile(
    r"[-_.]*(?:world_size|mp_rank|rank|shard)[-_=]?\d+(?:[-_]?of[-_]?\d+)?|[-_.]*\d+-of-\d+",
    re.IGNORECASE,
)
_RANK_OF = re.compile(r"(?:rank|shard)[-_=]?(\d+)|(\d+)-of-\d+", re.IGNORECASE)
#: A number that Lightning adds if a file of the same name exists.
_VERSION = re.compile(r"[-_.]v\d+$")
_NUMBER = re.compile(r"\d+")
#: Places of the step in a name, the best first.
_STEPS = (
    re.compile(r"(?:step|steps|iter|iters|iteration|update|updates)[-_=]?(\d+)", re.IGNORECASE),
    re.compile(r"(\d+)[-_]?(?:steps?|iters?|iterations?|updates?)(?![a-z])", re.IGNORECASE),
    re.compile(r"(?<![a-z])(?:ba|batch)[-_=]?(\d+)", re.IGNORECASE),
)


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


_CURRENT_WORDS = _words("last latest newest current")
_STEP_WORDS = _words(
    "step steps globalstep iter iters iteration epoch ep ba batch checkpoint ckpt chkpt update "
    "updates snapshot"
)
#: Words that may be in the name of a checkpoint.
_CHECKPOINT_WORDS = (
    _STEP_WORDS
    | _CURRENT_WORDS
    | _words("global epochstep cp save saved state model train trainer training")
)
#: Words in the names of results that are made from a checkpoint. A training cannot resume from
#: those.
_RESULT_WORDS = _words(
    "hf huggingface eval evals evaluation evaluate evaluated export exported merged converted "
    "sample samples generation generations generated prediction predictions preds logs metrics "
    "plot plots figure figures profile profiler trace traces tensorboard tb wandb mlflow rollout "
    "rollouts onnx gguf ggml quantized gptq awq histogram video videos image images report "
    "replay buffer vecnormalize inference unsharded"
)
#: Words that name a result only if the name has no word for a step.
_WEAK_RESULT_WORDS = _words("val valid validation test tests gen debug output outputs")


class NameKind(IntEnum):
    """Kind of entry that a name suggests. A lower value is a better candidate."""

    #: The name consists of words such as `global_step_10`, `checkpoint-10` or `last`.
    CHECKPOINT = 0
    #: The name also has other words: `qwen-step-20`.
    NAMED_CHECKPOINT = 1
    #: The name has a number, but no word for a step: `policy-20`.
    NUMBERED = 2
    #: The name has no number. Such a file may be replaced with each save: `last.pt`.
    UNNUMBERED = 3
    #: A result of the training, a log, or a file that is incomplete by its name.
    OTHER = 4


def classify_name(name: str) -> NameKind:
    """Return the kind of entry that a name in a folder of checkpoints suggests."""
    is_other = _OTHER_SUFFIX.search(name) or _MADE_BY_MUSTER.fullmatch(name)
    if is_other or is_partial_name(name):
        return NameKind.OTHER
    words = _list_words(name)
    has_step_word = bool(words & _STEP_WORDS)
    if words & _RESULT_WORDS or (words & _WEAK_RESULT_WORDS and not has_step_word):
        return NameKind.OTHER
    if read_step(name) is None:
        is_replaced_name = words <= _CHECKPOINT_WORDS and words & (_CURRENT_WORDS | _STEP_WORDS)
        return NameKind.UNNUMBERED if is_replaced_name else NameKind.OTHER
    if words <= _CHECKPOINT_WORDS:
        # A bare number is the name of a checkpoint only if the content is a checkpoint.
        return NameKind.CHECKPOINT if words else NameKind.NUMBERED
    return NameKind.NAMED_CHECKPOINT if has_step_word else NameKind.NUMBERED


def is_partial_name(name: str) -> bool:
    """Return True if a name marks a file that is incomplete, abandoned or hidden."""
    return _PARTIAL.search(name) is not None


def is_current_name(name: str) -> bool:
    """Return True if a name stands for the newest checkpoint: `last`, `latest-rank0.pt`."""
    return bool(_list_words(name) & _CURRENT_WORDS) and classify_name(name) is not NameKind.OTHER


def is_step_named(name: str) -> bool:
    """Return True if a name says which number in it is the step. In `epoch=2.ckpt` none is."""
    stem = _strip(name)
    has_step = any(pattern.search(stem) for pattern in _STEPS)
    return has_step or (read_step(name) is not None and not _list_words(name) & {"epoch", "ep"})


def read_step(name: str) -> int | None:
    """Return the step in the name of a checkpoint, or None.

    This is the number after a word such as `step`, otherwise the last number of the name. Ranks,
    numbers of shards and metrics are no steps.
    """
    stem = _strip(name)
    for pattern in _STEPS:
        if matches := pattern.findall(stem):
            return int(matches[-1])
    numbers = _NUMBER.findall(stem)
    return int(numbers[-1]) if numbers else None


def read_rank(name: str) -> int | None:
    """Return the rank or shard number in the name of a file, or None."""
    match = _RANK_OF.search(name)
    return int(match[1] or match[2]) if match else None


def drop_rank(name: str) -> str:
    """Return a name without its rank. Files of one checkpoint then have the same name."""
    return _RANK.sub("", name)


def drop_numbers(name: str) -> str:
    """Return a name with `#` for each number, to compare the names of several checkpoints."""
    return _NUMBER.sub("#", name)


def _strip(name: str) -> str:
    """Return a name without its suffix, its metrics, its rank and its version."""
    without_metrics = _METRIC.sub("", _SUFFIX.sub("", name))
    return _VERSION.sub("", _RANK.sub("", without_metrics))


def _list_words(name: str) -> set[str]:
    return set(re.findall(r"[a-z]+", _strip(name).lower()))
