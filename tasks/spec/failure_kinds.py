"""The kinds of failure: what a run died of decides whether it is tried again.

`docs/states-and-failures.md` says more of each.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path


class FailureKind(StrEnum):
    """Why an attempt failed, named by what should happen next.

    A symptom (`COLLECTIVE_TIMEOUT`, a bare SIGKILL) counts only where nothing else is recognised.
    Source: shared/facts/rl-stack.md.
    """

    #: The cluster had no room after all: verl's `Total available GPUs ... is less than`, `cannot be
    #: satisfied in this ray cluster`, vLLM's and NeMo-RL's texts. Back to the queue, without limit.
    INSUFFICIENT_RESOURCES = "INSUFFICIENT_RESOURCES"
    #: The job was accepted but did not take its GPUs by our deadline, or Ray's job supervisor did
    #: not start. Back to the queue, five times.
    START_TIMEOUT = "START_TIMEOUT"
    #: The gang is larger than the cluster can ever be. Failed, with the numbers.
    INFEASIBLE = "INFEASIBLE"
    #: A component lived but its readiness probe did not pass by `within_s`. Failed.
    NOT_READY = "NOT_READY"
    #: `NVRM: Xid` of a broken device, uncorrectable ECC, fallen off the bus. Worth another try, on
    #: other nodes.
    GPU_HARDWARE = "GPU_HARDWARE"
    #: NodeDiedError, a dead raylet, a node marked dead. Worth another try: Ray places nothing on a
    #: node that it counts as dead, and one that has come back is a node like any other.
    NODE_LOST = "NODE_LOST"
    #: The kernel's or Ray's out-of-memory killer. Failed: it would be killed again.
    HOST_OOM = "HOST_OOM"
    #: `CUDA out of memory`. Failed: it would not fit again.
    CUDA_OOM = "CUDA_OOM"
    #: No space left, a stale NFS handle. Worth another try.
    STORAGE = "STORAGE"
    #: Connection refused or reset, a name that does not resolve. Worth another try.
    NETWORK = "NETWORK"
    #: Address already in use. Worth another try: each attempt gets fresh ports.
    PORT_CONFLICT = "PORT_CONFLICT"
    #: NCCL's watchdog. A cascade, so first look for what came before it; worth another try.
    COLLECTIVE_TIMEOUT = "COLLECTIVE_TIMEOUT"
    #: Missed `live` probes, or no new step for `stall_after_s`. Failed.
    STALLED = "STALLED"
    #: A rule of `watch` that says `stop` was broken. Failed; worth another try from a checkpoint
    #: that was written before it.
    ALARM = "ALARM"
    #: It has run for `gang.max_hours`. Failed; worth another try where it has checkpoints.
    TIME_LIMIT = "TIME_LIMIT"
    #: The process that holds the fleet was killed, or crashed. Back to the queue, three times.
    FLEET_LOST = "FLEET_LOST"
    #: A file, module, key, type or value that the user can mend. Failed.
    USER_ERROR = "USER_ERROR"
    #: Any other traceback, or a loss that is not finite. Failed.
    RUNTIME_ERROR = "RUNTIME_ERROR"
    #: The outcome is not known: asked again before anything is submitted.
    LOST_CONTACT = "LOST_CONTACT"
    #: Nothing was recognised. Failed.
    UNKNOWN = "UNKNOWN"


#: Tried again without being listed: the run did nothing wrong.
REQUEUED = frozenset(
    {FailureKind.INSUFFICIENT_RESOURCES, FailureKind.START_TIMEOUT, FailureKind.FLEET_LOST}
)
#: The tries in all, where the spec says nothing, of what costs the time of its gang each time.
TRIES = {FailureKind.START_TIMEOUT: 6, FailureKind.FLEET_LOST: 4}
#: Seconds before the first new try, where the spec says nothing, of what waits for no room.
DELAYS_S = {FailureKind.FLEET_LOST: 5.0}


#: What a person does about each, where the failure has no hint that says what comes next.
REMEDIES: Mapping[FailureKind, str] = {
    FailureKind(kind): remedy
    for kind, remedy in tomllib.loads(
        Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    ).items()
}
