"""The record of a run, `run.json`: what happened to it, attempt by attempt.

It is the one owner of the run's state. Attempts and components change by the events they emit,
the run itself by `move`; each change replaces the file atomically.
"""

from __future__ import annotations

import copy
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tasks.record.events import Event
from tasks.record.outcome import Failure, Verdict
from tasks.record.places import AttemptPlace, RunPlace
from tasks.record.states import RunState, check_move
from tasks.spec.failure_kinds import FailureKind

_log = logging.getLogger(__name__)

#: The state that an attempt's event brings the run to.
_STATE_AFTER = {
    "attempt.begun": RunState.STARTING,
    "attempt.ready": RunState.RUNNING,
    "teardown.begun": RunState.STOPPING,
}


_SAVED = ("component.spawned", "component.ready", "component.exited")
#: What of a job's events is kept.
_OF_JOBS = ("submission_id", "address", "status", "nodes", "gpus")
_OPEN = (RunState.ADMITTED, RunState.STARTING, RunState.RUNNING)


def write_json(path: Path, content: object) -> None:
    """Replace a file by JSON: a reader sees the old content or the new, never a part.

    Not forced to the disk: on a busy one that takes seconds, in which no death would be seen.

    Raises: OSError.
    """
    draft = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        with draft.open("w", encoding="utf-8") as f:
            json.dump(content, f, indent=2)
            f.write("\n")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def adoptable_attempt(path: Path, content: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The attempt that another process can go on with; None for none.

    One that was being taken down can be judged anew, as long as no job of it was asked to end.

    Args:
        path: of the run's `run.json`.
        content: of it.
    """
    attempts = content["attempts"]
    if not attempts or attempts[-1]["ended_at"] is not None:
        return None
    attempt: Mapping[str, Any] = attempts[-1]
    state = RunState(content["state"])
    if state is RunState.STOPPING:
        place = RunPlace(directory=path.parent).attempt(attempt["number"])
        return None if _is_asked_to_end(place) else attempt
    return attempt if state in _OPEN else None


def _is_asked_to_end(place: AttemptPlace) -> bool:
    """Whether somebody has asked a job of the attempt to end, or nobody can say."""
    try:
        files = [json.loads(path.read_text()) for path in place.submissions()]
    except (OSError, ValueError):
        return True
    return any(file.get("stop_asked_at") is not None for file in files)


def taken_over(content: Mapping[str, Any], now: float, *, adopts: bool = False) -> dict[str, Any]:
    """The record of a run on one host, for its next process on another one.

    An attempt that has no end there is over: its process may live only where it can't be seen, and
    the run's server has given the run to somebody else. Not so where its jobs outlive its process:
    a second attempt would run beside them.

    Args:
        now: UTC epoch seconds.
        adopts: its jobs outlive its processes.
    """
    record: dict[str, Any] = copy.deepcopy({**content})
    if adopts and RunState(record["state"]) in (*_OPEN, RunState.STOPPING):
        return record
    for attempt in record["attempts"][-1:]:
        if attempt["ended_at"] is None:
            where = f" on {attempt['host']}" if attempt.get("host") else ""
            lost = Failure(
                kind=FailureKind.UNKNOWN,
                message=f"the flow process{where} of this attempt was lost, with its host",
                rule="host-lost",
            )
            attempt |= {
                "state": RunState.FAILED.value,
                "ended_at": now,
                "failure": lost.as_json(),
            }
    if not RunState(record["state"]).is_final:
        record["state"] = RunState.PENDING_RESOURCES.value
    return record


class RunRecord:
    """What is known of one run, kept in `run.json`. Safe from any thread."""

    def __init__(
        self,
        path: Path,
        *,
        run_id: str,
        flow_run_id: str,
        clock: Callable[[], float] = time.time,
        on_move: Callable[[RunState, str], None] = lambda state, message: None,
        earlier: Mapping[str, Any] | None = None,
        adopts: bool = False,
        **more: object,
    ) -> None:
        """Begins a record, or goes on with the one that an earlier process of the run left.

        A run that has ended and is begun again, by Prefect's own retry for example, goes on with
        its next attempt.

        Args:
            on_move: told each new state of the run, with its message.
            earlier: what another host has on record of the run, where it has been there.
            adopts: its jobs outlive its processes, on any host.
            more: further keys of the file.
        """
        self._path = path
        self._clock = clock
        self._on_move = on_move
        self._lock = threading.RLock()
        self._content: dict[str, Any] = {
            "run_id": run_id,
            "flow_run_id": flow_run_id,
            "state": RunState.QUEUED.value,
            "started_at": clock(),
            "ended_at": None,
            **more,
            "containment": None,
            "attempts": [],
        }
        if path.exists():
            self._content |= json.loads(path.read_text(encoding="utf-8"))
        if earlier is not None and len(earlier["attempts"]) > len(self._content["attempts"]):
            self._content |= taken_over(earlier, clock(), adopts=adopts)
        if self.state.is_final:
            self._content |= {"state": RunState.QUEUED.value, "ended_at": None}
        self._save()

    @property
    def state(self) -> RunState:
        return RunState(self._content["state"])

    @property
    def attempts(self) -> int:
        """How many attempts were begun."""
        return len(self._content["attempts"])

    def move(self, state: RunState, message: str = "") -> None:
        """Bring the run to a state; into the same state does nothing.

        Raises: IllegalTransition.
        """
        with self._lock:
            if state is self.state:
                return
            check_move(self.state, state)
            self._content["state"] = state.value
            if message:
                self._content["message"] = message
            if state.is_final:
                self._content["ended_at"] = self._clock()
                self._close_ledger(state)
            self._save()
        # Without the lock: whoever is told may hold one that another of our callers waits for.
        self._on_move(state, message)

    def begin_attempt(
        self,
        number: int,
        containment: Mapping[str, object] | None = None,
        *,
        resume_from: str = "",
        ports: Mapping[str, int] | None = None,
        host: str = "",
    ) -> None:
        """Add an attempt to the ledger. Those before it stay as they are.

        Args:
            containment: what holds its processes: level, promise, and why no higher one does.
            resume_from: the checkpoint that it starts from; empty for none.
            ports: `ports[name]`, as placeholders name them.
            host: the machine of its flow process, which has the attempt's files.
        """
        with self._lock:
            self._content["containment"] = dict(containment) if containment else None
            self._note_begun_again()
            self._content["attempts"].append(
                {
                    "number": number,
                    "state": RunState.ADMITTED.value,
                    "started_at": self._clock(),
                    "ended_at": None,
                    "failure": None,
                    "components": {},
                    "ray": {},
                    "ports": dict(ports or {}),
                    "host": host or None,
                    "resume_from": resume_from or None,
                    "decision": None,
                }
            )
            self._save()

    def end_attempt(self, verdict: Verdict) -> None:
        """Give the attempt under way its verdict; one that has its own keeps it."""
        with self._lock:
            attempt = self._under_way()
            if attempt is None:
                return
            attempt["state"] = verdict.state.value
            attempt["ended_at"] = self._clock()
            attempt["failure"] = verdict.failure.as_json() if verdict.failure else None
            self._save()

    def decide(self, decision: str) -> None:
        """Note what follows the last attempt, which has ended."""
        with self._lock:
            self._content["attempts"][-1]["decision"] = decision
            self._save()

    def content(self) -> dict[str, Any]:
        """The whole, as it stands in the file; a copy."""
        with self._lock:
            return copy.deepcopy(self._content)

    def ledger(self) -> list[dict[str, Any]]:
        """Every attempt, as it stands in the file; a copy."""
        with self._lock:
            return copy.deepcopy(list(self._content["attempts"]))

    def components(self) -> dict[str, dict[str, Any]]:
        """What is known of the components of the last attempt, by name; a copy."""
        with self._lock:
            attempts = self._content["attempts"]
            return copy.deepcopy(attempts[-1]["components"]) if attempts else {}

    def observe(self, event: Event) -> None:
        """Take in an event of the attempt that runs now."""
        state = None
        with self._lock:
            attempt = self._under_way()
            if attempt is None:
                return
            if event.component is not None:
                self._observe_component(attempt["components"], event.component, event)
                if "submission_id" in event.fields or event.name.startswith("job."):
                    _observe_job(attempt["ray"], event.component, event.fields)
            if (state := _STATE_AFTER.get(event.name)) is not None:
                attempt["state"] = state.value
            elif event.name in _SAVED or event.name.startswith("job."):
                self._save()
        if state is not None:
            self.move(state)

    def adoptable(self) -> Mapping[str, Any] | None:
        """The attempt that an earlier process was at, where it can be gone on with; a copy."""
        with self._lock:
            return copy.deepcopy(adoptable_attempt(self._path, self._content))

    def _under_way(self) -> dict[str, Any] | None:
        """The attempt that has not ended; an ended one is never changed again."""
        attempts: list[dict[str, Any]] = self._content["attempts"]
        return attempts[-1] if attempts and attempts[-1]["ended_at"] is None else None

    def _close_ledger(self, state: RunState) -> None:
        """Nothing follows the last attempt, where nothing else was decided."""
        for attempt in self._content["attempts"][-1:]:
            if attempt.get("decision") is None:
                attempt["decision"] = f"final: {state.value}"

    def _note_begun_again(self) -> None:
        """Of an attempt that somebody began anew, by hand or after the loss of its process."""
        if not self._content["attempts"]:
            return
        last = self._content["attempts"][-1]
        decision = last.get("decision")
        if decision is None or decision.startswith("final"):
            last["decision"] = f"{decision}; begun again" if decision else "begun again"

    def _observe_component(self, components: dict[str, Any], name: str, event: Event) -> None:
        if event.name == "component.spawned":
            if event.is_adopted and name in components:
                return
            components[name] = {
                "pid": event.pid,
                "started_at": event.at,
                "ready_at": None,
                "ended_at": None,
                "exit_code": None,
                "signal": None,
            }
        elif event.name == "component.ready":
            components[name]["ready_at"] = event.at
        elif event.name == "component.exited":
            components[name]["ended_at"] = event.at
            components[name]["exit_code"] = event.exit_code
            components[name]["signal"] = event.signal

    def _save(self) -> None:
        try:
            write_json(self._path, self._content)
        except OSError as error:
            _log.warning("%s could not be written: %s", self._path, error)


def _observe_job(ray: dict[str, Any], component: str, fields: Mapping[str, Any]) -> None:
    """Take in what happened to a job; the attempt's first one stands above its others."""
    if ray.setdefault("component", component) != component:
        ray = ray.setdefault("others", {}).setdefault(component, {})
    ray |= {key: fields[key] for key in _OF_JOBS if key in fields}
    if place := fields.get("place"):
        ray.setdefault("nodes", [place.removeprefix("node ")])
