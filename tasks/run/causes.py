"""Causes of failure, recognised by the text a component leaves: rules as data.

The first rule that matches, in the table's order, names the cause: what is specific stands before
what is general, and a symptom (a collective that timed out, a bare traceback) after every cause it
could be the symptom of.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tasks.run.failure_kinds import FailureKind

#: How much of a log's end is looked at.
LOOKBACK_BYTES = 200_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One text and what it means."""

    id: str
    kind: FailureKind
    #: Searched in each line, regular expression.
    pattern: re.Pattern[str]
    #: What the user can do.
    hint: str = ""
    #: Where the text comes from.
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """The rule that matched, and the line it matched in."""

    rule: Rule
    line: str


def _rule(id: str, kind: FailureKind, pattern: str, hint: str = "", source: str = "") -> Rule:
    return Rule(id=id, kind=kind, pattern=re.compile(pattern), hint=hint, source=source)


_K = FailureKind
RULES: tuple[Rule, ...] = (
    _rule(
        "verl-total-gpus",
        _K.INSUFFICIENT_RESOURCES,
        r"Total available GPUs [\d.]+ is less than total desired GPUs [\d.]+",
        source="verl single_controller/ray/base.py",
    ),
    _rule(
        "verl-resource-pool",
        _K.INSUFFICIENT_RESOURCES,
        r"Resource pool .+: .+\*.+\s*cannot be satisfied in this ray cluster",
        source="verl, March to September 2025",
    ),
    _rule(
        "verl-placement-group",
        _K.INSUFFICIENT_RESOURCES,
        r"Cannot satisfy placement group requirement for pool",
        source="verl PR #6663",
    ),
    _rule(
        "nemo-rl-gpus",
        _K.INSUFFICIENT_RESOURCES,
        r"Not enough GPUs available\. Requested \d+ GPUs, but only \d+ are available",
        source="NeMo-RL",
    ),
    _rule(
        "vllm-gpus",
        _K.INSUFFICIENT_RESOURCES,
        r"number of required GPUs exceeds the total number of available GPUs",
        source="vLLM",
    ),
    _rule(
        "skyrl-placement-group",
        _K.INSUFFICIENT_RESOURCES,
        r"Failed to create placement group with",
        source="SkyRL",
    ),
    _rule(
        "areal-placement-group",
        _K.INSUFFICIENT_RESOURCES,
        r"Ray placement group timeout",
        source="AReaL",
    ),
    _rule(
        "ray-job-start",
        _K.START_TIMEOUT,
        r"Job supervisor actor failed to start within \d+",
        source="Ray job manager",
    ),
    _rule(
        "nvidia-xid",
        _K.GPU_HARDWARE,
        r"NVRM: Xid .*?: (48|62|64|74|79|95|119|120|140|14[4-9]|150)\b",
        "a GPU is defective: drain its node and try another",
        source="NVIDIA Xid errors",
    ),
    _rule(
        "gpu-ecc",
        _K.GPU_HARDWARE,
        r"(?i)uncorrectable ECC|GPU has fallen off the bus",
        "a GPU is defective: drain its node and try another",
        source="NVIDIA driver",
    ),
    _rule(
        "node-lost",
        _K.NODE_LOST,
        r"NodeDiedError|raylet died|was marked dead|node .* is dead",
        source="Ray",
    ),
    _rule(
        "host-oom",
        _K.HOST_OOM,
        r"oom_kill event|ray\.exceptions\.OutOfMemoryError|Out of memory: Killed process",
        "the host ran out of memory: fewer workers, or a smaller batch",
        source="Slurm, Ray, Linux",
    ),
    _rule(
        "cuda-oom",
        _K.CUDA_OOM,
        r"CUDA out of memory|CUDA error: out of memory|torch\.OutOfMemoryError",
        "a GPU ran out of memory: smaller micro-batches, or more tensor parallelism",
        source="PyTorch",
    ),
    _rule(
        "storage",
        _K.STORAGE,
        r"No space left on device|Stale file handle|Disk quota exceeded|Read-only file system",
        "a file system is full or gone: df -h, then start again",
        source="errno",
    ),
    _rule(
        "port-conflict",
        _K.PORT_CONFLICT,
        r"(?i)address already in use",
        "another process holds the port: use ${NAME.port} for a free one",
        source="errno EADDRINUSE",
    ),
    _rule(
        "module-not-found",
        _K.USER_ERROR,
        r"ModuleNotFoundError: |ImportError: ",
        "a package is missing from the environment of this command",
        source="Python",
    ),
    _rule(
        "file-not-found",
        _K.USER_ERROR,
        r"FileNotFoundError: |can't open file|IsADirectoryError: |NotADirectoryError: ",
        "a path is wrong: relative ones count from the component's cwd",
        source="Python",
    ),
    _rule("permission", _K.USER_ERROR, r"PermissionError: |Permission denied", source="Python"),
    _rule(
        "usage",
        _K.USER_ERROR,
        r"^\S+: error: |unrecognized arguments|the following arguments are required",
        "the command line is not what the program expects: try it with --help",
        source="argparse",
    ),
    _rule(
        "configuration",
        _K.USER_ERROR,
        r"(hydra|omegaconf)\.(core\.)?errors\.|ConfigCompositionException|pydantic.*ValidationError",
        source="hydra, omegaconf, pydantic",
    ),
    _rule(
        "non-finite-loss",
        _K.RUNTIME_ERROR,
        r"(?i)(loss|grad(ient)?(_norm)?)\W{1,4}(is\s+)?(nan|inf)\b|non-finite loss",
        "training diverged: look at the learning rate and the data of that step",
    ),
    _rule(
        "network",
        _K.NETWORK,
        r"ConnectionRefusedError|Connection refused|Connection reset by peer|ConnectionResetError"
        r"|Temporary failure in name resolution|Name or service not known|No route to host",
        "what it talks to is gone or was never there: see the other components' logs",
        source="errno, getaddrinfo",
    ),
    _rule(
        "python-value",
        _K.USER_ERROR,
        r"^(KeyError|TypeError|ValueError|AttributeError|NameError|(Syntax|Indentation)Error): ?",
        source="Python",
    ),
    _rule(
        "collective-timeout",
        _K.COLLECTIVE_TIMEOUT,
        r"Watchdog caught collective operation timeout|NCCL .*timeout|ProcessGroupNCCL.*aborted",
        "a rank fell silent: look for the one that stopped first",
        source="PyTorch NCCL watchdog",
    ),
    _rule("traceback", _K.RUNTIME_ERROR, r"^Traceback \(most recent call last\)", source="Python"),
)


def find_cause(text: str, rules: tuple[Rule, ...] = RULES) -> Cause | None:
    """The first rule, in order, that a line of the text matches; its first such line."""
    lines = text.splitlines()
    for rule in rules:
        for line in lines:
            if rule.pattern.search(line):
                return Cause(rule=rule, line=line.strip()[:500])
    return None


def read_tail(log: Path, limit_bytes: int = LOOKBACK_BYTES) -> str:
    """The end of a log, empty when it can't be read; bytes that are not UTF-8 are replaced."""
    try:
        with log.open("rb") as f:
            f.seek(0, 2)
            f.seek(max(0, f.tell() - limit_bytes))
            return f.read().decode("utf-8", errors="replace")
    except OSError:
        return ""


def last_lines(text: str, count: int = 20, line_length: int = 400) -> str:
    """The last lines that are not blank, long ones cut."""
    lines = [line.rstrip()[:line_length] for line in text.splitlines() if line.strip()]
    return "\n".join(lines[-count:])


_ERROR_LINE = re.compile(r"^([A-Za-z_][\w.]*(Error|Exception|Exit|Interrupt|Warning)\b.*)$")


def last_error(text: str) -> str:
    """The line with which Python's last traceback ends; empty where there is none."""
    lines = text.splitlines()
    return next((line[:500] for line in reversed(lines) if _ERROR_LINE.match(line)), "")
