"""The events that Muster tells its Prefect server: their names, and the keys of their payloads.

`docs/events.md` says when each is told and by whom, and what each key means.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

#: Of a run that has a process.
_RUN = ("run_id", "workload", "attempt", "host")
#: Of a run as the queue knows it.
_QUEUED = ("run_id", "pool", "queue")
_COMPONENT = (*_RUN, "component", "pid", "submission_id", "log")
_ENGINE = (*_RUN, "component", "engine", "ranks")
_FLEET = (*_RUN, "component", "serving", "engines", "min_active")
_FAILURE = ("kind", "component", "exit_code", "signal", "message", "hint", "log", "log_tail")

#: The keys of each event's payload: always all of them, null where nothing is known.
PAYLOADS: Mapping[str, tuple[str, ...]] = {
    "muster.run.waiting": (*_QUEUED, "message"),
    "muster.run.admitted": (*_QUEUED, "nodes", "gpus", "waited_s"),
    "muster.run.offered": (*_QUEUED, "nodes"),
    "muster.run.started": (*_RUN, "directory", "resume_from", "is_adopted"),
    "muster.run.ready": _RUN,
    "muster.run.requeued": (*_RUN, "kind", "component", "message"),
    "muster.run.completed": (*_RUN, "message"),
    "muster.run.failed": (*_RUN, *_FAILURE),
    "muster.run.cancelled": (*_RUN, "message"),
    "muster.run.reconciled": (
        *("found", "killed", "jobs", "nodes", "removed", "record", "server", "open"),
    ),
    "muster.run.alarm": (*_RUN, "rule", "metric", "step", "value", "message"),
    "muster.run.slow": (*_RUN, "step", "median_s", "message"),
    "muster.component.started": _COMPONENT,
    "muster.component.ready": (*_COMPONENT, "after_s"),
    "muster.component.drained": _COMPONENT,
    "muster.component.exited": (*_COMPONENT, "exit_code", "signal"),
    "muster.component.hung": (*_COMPONENT, "message", "report"),
    "muster.component.stopped": _COMPONENT,
    "muster.component.stuck": (*_COMPONENT, "pids"),
    "muster.rollout.degraded": (*_FLEET, "engine", "ranks", "cause"),
    "muster.rollout.restored": _FLEET,
    "muster.rollout.floor": (*_FLEET, "message"),
    "muster.rollout.engine.failed": (*_ENGINE, "cause"),
    "muster.rollout.engine.recovered": (*_ENGINE, "took_s"),
    "muster.rollout.engine.retired": (*_ENGINE, "cause"),
    "muster.node.drained": ("node", "pool", "by", "reason", "until"),
    "muster.node.undrained": ("node", "pool", "by"),
}

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
    """The payload of an event. Raises: KeyError, for a name or a key that `PAYLOADS` lacks."""
    if strange := set(known).difference(PAYLOADS[name]):
        raise KeyError(f"{name} has no {', '.join(sorted(strange))}")
    return {key: known.get(key) for key in PAYLOADS[name]}
