"""Kinds of failure. The kind decides whether Muster retries a run.

`docs/states-and-failures.md` describes each kind in detail.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path


class FailureKind(StrEnum):
    """Cause of a failed attempt. The kinds differ in the reaction that they call for.

    Unless a comment says that the run is requeued, the run fails. The user can list the kind under
    `retry` in the spec, and Muster then retries it. "A retry can help" marks kinds whose cause may
    be gone by then.

    A symptom, such as `COLLECTIVE_TIMEOUT` or a bare SIGKILL, counts only if the logs show no other
    cause.
    """

    #: The cluster did not have the GPUs after all. Recognised by the messages of verl (`Total
    #: available GPUs ... is less than`, `cannot be satisfied in this ray cluster`), vLLM and
    #: NeMo-RL. The run is requeued, without limit.
    INSUFFICIENT_RESOURCES = "INSUFFICIENT_RESOURCES"
    #: Ray accepted the job, but the job did not take its GPUs before the deadline, or Ray's job
    #: supervisor did not start. The run is requeued up to five times.
    START_TIMEOUT = "START_TIMEOUT"
    #: The gang is larger than the cluster can ever be. The message shows both sizes.
    INFEASIBLE = "INFEASIBLE"
    #: A component was alive, but its readiness probe did not pass within `within_s`.
    NOT_READY = "NOT_READY"
    #: A GPU is broken: `NVRM: Xid`, an uncorrectable ECC error, fallen off the bus. A retry can
    #: help, and it uses other nodes.
    GPU_HARDWARE = "GPU_HARDWARE"
    #: A node of the Ray cluster died: NodeDiedError, a dead raylet, a node marked dead. A retry can
    #: help: Ray places nothing on a dead node, and a node that is back can be used normally.
    NODE_LOST = "NODE_LOST"
    #: The out-of-memory killer of the kernel or of Ray killed a process.
    HOST_OOM = "HOST_OOM"
    #: `CUDA out of memory`.
    CUDA_OOM = "CUDA_OOM"
    #: The disk is full, or an NFS handle is stale. A retry can help.
    STORAGE = "STORAGE"
    #: A connection was refused or reset, or a host name did not resolve. A retry can help.
    NETWORK = "NETWORK"
    #: Address already in use. A retry can help, because each attempt gets new ports.
    PORT_CONFLICT = "PORT_CONFLICT"
    #: NCCL's watchdog ended a collective operation. This usually follows an earlier failure on
    #: another rank. A retry can help.
    COLLECTIVE_TIMEOUT = "COLLECTIVE_TIMEOUT"
    #: A component missed its `live` probes, or made no new step for `stall_after_s`.
    STALLED = "STALLED"
    #: A rule of `watch` with `then: stop` raised its alarm. A retry can help: it starts from a
    #: checkpoint that was written before the alarm.
    ALARM = "ALARM"
    #: The attempt has run for `gang.max_hours`. A retry can help if the run writes checkpoints.
    TIME_LIMIT = "TIME_LIMIT"
    #: The process that runs the fleet crashed or was killed. The run is requeued up to three times.
    FLEET_LOST = "FLEET_LOST"
    #: A mistake that the user can correct, in a file, module, key, type or value.
    USER_ERROR = "USER_ERROR"
    #: Any other traceback, or a loss that is not finite.
    RUNTIME_ERROR = "RUNTIME_ERROR"
    #: The outcome is unknown. Muster asks the cluster again before it submits anything.
    LOST_CONTACT = "LOST_CONTACT"
    #: No rule recognised the cause.
    UNKNOWN = "UNKNOWN"


#: Kinds that are requeued even if `retry` does not list them, because the run is not to blame.
REQUEUED = frozenset(
    {FailureKind.INSUFFICIENT_RESOURCES, FailureKind.START_TIMEOUT, FailureKind.FLEET_LOST}
)
#: Default number of tries in total, for requeued kinds that block the gang's GPUs at each try.
DEFAULT_ATTEMPTS = {FailureKind.START_TIMEOUT: 6, FailureKind.FLEET_LOST: 4}
#: Default delay before the first retry in seconds, for requeued kinds that need no free GPUs first.
DEFAULT_DELAYS_S = {FailureKind.FLEET_LOST: 5.0}


#: Advice to the user for each kind. It is shown if the failure itself has no hint.
REMEDIES: Mapping[FailureKind, str] = {
    FailureKind(kind): remedy
    for kind, remedy in tomllib.loads(
        Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    ).items()
}
