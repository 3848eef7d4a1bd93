"""What a person does about each kind of failure, in one line, where the failure has no hint of its
own or none that says what comes next.

`docs/states-and-failures.md` says more of each.
"""

from __future__ import annotations

from collections.abc import Mapping

from tasks.spec.failure_kinds import FailureKind

_K = FailureKind

REMEDIES: Mapping[FailureKind, str] = {
    _K.INSUFFICIENT_RESOURCES: "start it again once the GPUs are free: `python -m tasks.queue` "
    "shows who has them",
    _K.START_TIMEOUT: "look at what the nodes have free; too few CPUs for their GPUs "
    "(gang.cpus_per_gpu) is the usual cause",
    _K.INFEASIBLE: "ask for less, or name a larger cluster, or have the limit of the tag raised",
    _K.NOT_READY: "read its log: it still loads (raise ready.within_s), listens elsewhere, or "
    "waits for another",
    _K.GPU_HARDWARE: "drain the node (`python -m tasks.queue drain NODE`), then start it again",
    _K.NODE_LOST: "start it again; list NODE_LOST in `retry` to have that done for you",
    _K.HOST_OOM: "use fewer workers, a smaller batch or less offloading; the same would be killed "
    "again",
    _K.CUDA_OOM: "use smaller micro-batches or more tensor parallelism; the same would not fit "
    "again",
    _K.STORAGE: "make room (df -h, quota), then start it again",
    _K.NETWORK: "see the other components' logs: what it talks to may be what died",
    _K.PORT_CONFLICT: "use ${NAME.port} for a free port, or end the process that has this one",
    _K.COLLECTIVE_TIMEOUT: "look for the rank that stopped first: its own log, and dmesg on its "
    "node",
    _K.STALLED: "see what it hung in: its .hang.txt, beside its log",
    _K.USER_ERROR: "mend what the message names, then start it again",
    _K.RUNTIME_ERROR: "read the line that it names, and the log before it",
    _K.LOST_CONTACT: "wait until the cluster answers: `python -m flows.reconcile` asks it about "
    "the job; start nothing before",
    _K.UNKNOWN: "read its log; what comes from outside, as a bare SIGKILL, is in dmesg",
}
