"""The events that Muster tells its Prefect server: their names, when each is told, what each says.

`docs/events.md` shows these tables, and a test holds it to them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tasks.spec.words import table

#: Of a run that has a process.
_RUN = ("run_id", "workload", "attempt", "host")
#: Of a run as the queue knows it.
_QUEUED = ("run_id", "pool", "queue")
_COMPONENT = (*_RUN, "component", "pid", "submission_id", "log")
_ENGINE = (*_RUN, "component", "engine", "ranks")
_FLEET = (*_RUN, "component", "serving", "engines", "min_active")
_POOL = ("pool", "by")

GATE, RUN, OPERATOR, RECONCILE = "the gate", "the run", "`muster queue`", "reconcile"
DRAINS = f"{OPERATOR}, or the run that failed there"


@dataclass(frozen=True, slots=True, kw_only=True)
class Announcement:
    """One kind of event."""

    name: str
    #: For people: what has happened.
    when: str
    #: Which part of Muster tells it.
    by: str
    #: The keys of its payload, always all of them; what does not apply is null.
    fields: tuple[str, ...]


#: What each key of a payload means, wherever it stands.
FIELDS: Mapping[str, str] = {
    "run_id": "the run's id, which is its flow run's name and the name of its directory",
    "workload": "`ppo`, `grpo` or `sft`",
    "attempt": "the number of the attempt under way, or of the last one; 0 before the first",
    "host": "the machine whose process tells it; paths are paths there",
    "pool": "the work pool",
    "queue": "the queue of the pool; null: all of the pool",
    "message": "one line for people: why, or how it ended",
    "nodes": "GPUs on each node of the gang, by the node's name",
    "gpus": "GPUs of the gang in all",
    "waited_s": "seconds from the time the run was due",
    "directory": "where the attempt's files are",
    "resume_from": "the checkpoint that the attempt starts from; null: none",
    "is_adopted": "the attempt was begun by an earlier process of the run, and goes on in this one",
    "kind": "the kind of failure, such as CUDA_OOM",
    "component": "the component it happened to; of a failure, the first to fail",
    "exit_code": "of the component's process; null where a signal ended it",
    "signal": "that ended the component's process, such as SIGKILL",
    "hint": "what to do about it, where that is known",
    "log": "the component's log",
    "log_tail": "its last lines",
    "pid": "of the component's process; null for a job",
    "submission_id": "of the component's Ray job; null for a process",
    "after_s": "seconds from its start",
    "pids": "what outlived SIGKILL",
    "report": "a file with what it hangs in: stacks and the kernel's view",
    "engine": "the number of the engine, from 0",
    "ranks": "the engine's servers",
    "cause": "why it does not serve",
    "took_s": "seconds that the recovery took",
    "serving": "engines that serve",
    "engines": "engines of the fleet in all",
    "min_active": "the floor that the spec sets; null: none",
    "node": "the node's name",
    "rule": "the name of the rule",
    "metric": "the figure, as the file calls it",
    "step": "the last step that it was found at",
    "value": "the figure then; null where it is no number",
    "median_s": "seconds that a step takes",
    "by": "who did it: `user@host`, or a run's id",
    "reason": "why a run has drained it; null: a person did",
    "until": "UTC epoch seconds: until then; null: until somebody says otherwise",
    "found": "what was wrong, such as that its process was gone",
    "killed": "pids that were ended",
    "jobs": "Ray jobs that were ended",
    "removed": "files, directories and cgroups that were removed",
    "record": "the state that `run.json` was given; empty: none",
    "server": "the state that the flow run was given; empty: none",
    "open": "what is still to be done, and why; empty: nothing",
}


def _one(name: str, when: str, *fields: str, by: str = RUN) -> Announcement:
    return Announcement(name=f"muster.{name}", by=by, when=when, fields=fields)


_FAILURE = ("kind", "component", "exit_code", "signal", "message", "hint", "log", "log_tail")

TABLE: tuple[Announcement, ...] = (
    _one(
        "run.waiting",
        "a run has begun to wait, for its gang or for a place in its pool",
        *(*_QUEUED, "message"),
        by=f"{GATE}, or {RUN} where it waits in its own process",
    ),
    _one(
        "run.admitted",
        "a run was given its gang, or its place in the pool",
        *(*_QUEUED, "nodes", "gpus", "waited_s"),
        by=GATE,
    ),
    _one(
        "run.offered",
        "there is room for a run, which a worker other than the one that looks is to start",
        *(*_QUEUED, "nodes"),
        by=GATE,
    ),
    _one("run.started", "an attempt has begun", *_RUN, "directory", "resume_from", "is_adopted"),
    _one("run.ready", "every component is ready", *_RUN),
    _one(
        "run.requeued",
        "a run was sent back to wait for its next attempt",
        *(*_RUN, "kind", "component", "message"),
        by=f"{RUN}; {GATE} where a worker was lost before it could start the run",
    ),
    _one("run.completed", "a run did what its spec asks as evidence of success", *_RUN, "message"),
    _one(
        "run.failed",
        "a run has failed, and is not tried again",
        *_RUN,
        *_FAILURE,
        by=f"{RUN}; {GATE} for one that can never start",
    ),
    _one(
        "run.cancelled",
        "a run that has a process was cancelled or interrupted, and is taken down",
        *(*_RUN, "message"),
    ),
    _one(
        "run.reconciled",
        "a run whose process was lost was finished",
        *("found", "killed", "jobs", "nodes", "removed", "record", "server", "open"),
        by=RECONCILE,
    ),
    _one(
        "run.alarm",
        "a rule of `watch` found something wrong with the figures of a run",
        *(*_RUN, "rule", "metric", "step", "value", "message"),
    ),
    _one(
        "run.slow",
        "a step takes ten times the median of those before it, and is not over",
        *(*_RUN, "step", "median_s", "message"),
    ),
    _one("component.started", "a component's process or job was started", *_COMPONENT),
    _one("component.ready", "its readiness probe said yes", *_COMPONENT, "after_s"),
    _one("component.drained", "its part is done, and the run goes on without it", *_COMPONENT),
    _one("component.exited", "its process or job has ended", *_COMPONENT, "exit_code", "signal"),
    _one(
        "component.hung",
        "it neither did anything nor said anything, and was examined before its end",
        *(*_COMPONENT, "message", "report"),
    ),
    _one("component.stopped", "all of its processes are gone", *_COMPONENT),
    _one("component.stuck", "some of its processes can't be ended", *_COMPONENT, "pids"),
    _one(
        "rollout.degraded",
        "the first engine of a whole fleet has failed",
        *(*_FLEET, "engine", "ranks", "cause"),
    ),
    _one("rollout.restored", "every engine is up again", *_FLEET),
    _one(
        "rollout.floor",
        "the fleet is under its floor, or can't come up: the run fails of it",
        *_FLEET,
        "message",
    ),
    _one("rollout.engine.failed", "an engine has failed", *_ENGINE, "cause"),
    _one("rollout.engine.recovered", "it was started again, and works", *_ENGINE, "took_s"),
    _one("rollout.engine.retired", "it is not started again", *_ENGINE, "cause"),
    _one("node.drained", "a node gets no new gang", "node", *_POOL, "reason", "until", by=DRAINS),
    _one("node.undrained", "a node may get gangs again", "node", *_POOL, by=OPERATOR),
)

_BY_NAME = {one.name: one for one in TABLE}
#: The run's own events that are announced as they are, and as what.
ANNOUNCED_AS: Mapping[str, str] = {
    "attempt.ready": "muster.run.ready",
    "run.alarm": "muster.run.alarm",
    "run.slow": "muster.run.slow",
    "component.spawned": "muster.component.started",
    **{
        f"component.{name}": f"muster.component.{name}"
        for name in ("ready", "drained", "exited", "stopped", "stuck")
    },
}


def payload_of(name: str, **known: Any) -> dict[str, Any]:
    """The payload of an event: each of its keys, null where nothing is known.

    Raises: KeyError, for a name or a key that the tables do not have.
    """
    fields = _BY_NAME[name].fields
    if strange := set(known).difference(fields):
        raise KeyError(f"{name} has no {', '.join(sorted(strange))}")
    return {key: known.get(key) for key in fields}


def fields_of(name: str) -> tuple[str, ...]:
    """The keys of an event's payload. Raises: KeyError."""
    return _BY_NAME[name].fields


def as_markdown() -> str:
    """Both tables, as `docs/events.md` has them."""
    events = (
        (f"`{one.name}`", one.by, one.when, ", ".join(f"`{key}`" for key in one.fields))
        for one in TABLE
    )
    keys = ((f"`{key}`", meaning) for key, meaning in FIELDS.items())
    return "\n\n".join(
        (table(("event", "told by", "when", "payload"), events), table(("key", "meaning"), keys))
    )
