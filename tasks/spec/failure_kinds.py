"""The kinds of failure of a run. The kind decides whether Muster retries the run.

`docs/states-and-failures.md` describes each kind in detail.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from enum import StrEnum
from pathlib import Path


class FailureKind(StrEnum):
    """Kind of the cause that made an attempt of a run fail. Each kind needs another reaction.

    By default, the run fails. If the user lists the kind under `retry` in the run spec, Muster
    retries the run instead. If Muster requeues the run by default, the comment of the kind mentions
    it. The comment "A retry can help" marks kinds whose cause may be gone at the next attempt.

    `COLLECTIVE_TIMEOUT` and a SIGKILL without further evidence are symptoms. They count only if the
    logs show no other cause.
    """

    #: The cluster did not have the GPUs that were granted to the run. Muster recognises this by
    #: messages of verl (`Total available GPUs ... is less than`, `cannot be satisfied in this ray
    #: cluster`), vLLM and NeMo-RL. The run is requeued, without limit.
    INSUFFICIENT_RESOURCES = "INSUFFICIENT_RESOURCES"
    #: Ray accepted the job, but the job did not take its GPUs before the deadline, or Ray's job
    #: supervisor did not start. The run is requeued up to five times.
    START_TIMEOUT = "START_TIMEOUT"
    #: The run needs more GPUs than the cluster can ever provide. The message shows both numbers.
    INFEASIBLE = "INFEASIBLE"
    #: A component was alive, but its readiness probe did not succeed within `within_s` seconds.
    NOT_READY = "NOT_READY"
    #: A GPU is broken: the log shows `NVRM: Xid`, an uncorrectable ECC error, or a GPU that has
    #: fallen off the bus. A retry can help, because it uses other nodes.
    GPU_HARDWARE = "GPU_HARDWARE"
    #: A node of the Ray cluster died: the log shows NodeDiedError, a dead raylet or a node that is
    #: marked dead. A retry can help, because Ray uses only living nodes.
    NODE_LOST = "NODE_LOST"
    #: The memory of a machine was full, so the out-of-memory killer of the kernel or of Ray killed
    #: a process.
    HOST_OOM = "HOST_OOM"
    #: A GPU ran out of memory: the log shows `CUDA out of memory`.
    CUDA_OOM = "CUDA_OOM"
    #: The disk is full, or an NFS handle is stale. A retry can help.
    STORAGE = "STORAGE"
    #: A connection was refused or reset, or a host name did not resolve. A retry can help.
    NETWORK = "NETWORK"
    #: Another process used the port of a component. A retry can help, because each attempt gets
    #: new ports.
    PORT_CONFLICT = "PORT_CONFLICT"
    #: The watchdog of NCCL ended a collective operation that took too long. The usual reason is an
    #: earlier failure of another rank. A retry can help.
    COLLECTIVE_TIMEOUT = "COLLECTIVE_TIMEOUT"
    #: A component failed its `live` probe several times in a row, or the run made no new step for
    #: `stall_after_s` seconds.
    STALLED = "STALLED"
    #: An alarm rule of the spec key `watch` with `then: stop` raised its alarm. A retry can help,
    #: because it starts from a checkpoint that was written before the alarm.
    ALARM = "ALARM"
    #: The attempt has run for `gang.max_hours` hours. A retry can help if the run writes
    #: checkpoints.
    TIME_LIMIT = "TIME_LIMIT"
    #: The process of the fleet of inference servers crashed or was killed. The run is requeued up
    #: to three times.
    FLEET_LOST = "FLEET_LOST"
    #: The user made a mistake that a retry cannot correct, such as a missing file or module, or a
    #: wrong key, type or value.
    USER_ERROR = "USER_ERROR"
    #: The log shows a traceback that fits no other kind, or a training loss that is NaN or
    #: infinite.
    RUNTIME_ERROR = "RUNTIME_ERROR"
    #: The Ray cluster did not answer, so it is unknown how the Ray job ended. Muster asks the
    #: cluster again before it submits another job.
    LOST_CONTACT = "LOST_CONTACT"
    #: No rule recognised the cause of the failure.
    UNKNOWN = "UNKNOWN"


#: Kinds of failure that the run itself did not cause. Muster requeues the run even if `retry` in
#: the run spec does not list the kind.
REQUEUED = frozenset(
    {FailureKind.INSUFFICIENT_RESOURCES, FailureKind.START_TIMEOUT, FailureKind.FLEET_LOST}
)
#: Largest number of attempts, including the first, by kind of failure, if the user sets no number.
#: These kinds have a limit because each attempt occupies the GPUs of the run for some time. After
#: other failures in `REQUEUED`, a run is requeued without limit.
DEFAULT_ATTEMPTS = {FailureKind.START_TIMEOUT: 6, FailureKind.FLEET_LOST: 4}
#: Default delay before the first retry in seconds, by kind of failure. The delay is short, because
#: the retry need not wait until other runs free their GPUs.
DEFAULT_DELAYS_S = {FailureKind.FLEET_LOST: 5.0}


#: Advice to the user for each kind of failure. It is shown if the failure itself has no hint.
REMEDIES: Mapping[FailureKind, str] = {
    FailureKind(kind): remedy
    for kind, remedy in tomllib.loads(
        Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    ).items()
}
