"""The events of a run of this process for its Prefect server."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from prefect.client.schemas.objects import FlowRun

from tasks.processes.identity import host_name
from tasks.record.events import Event, event_listeners
from tasks.server.events import Announcer, _announcer, of_run
from tasks.server.server import lasting_api_url
from tasks.train.announced import Story, Told
from tasks.train.session import RunSession

_log = logging.getLogger(__name__)


@contextmanager
def announced(run: RunSession, flow_run: FlowRun) -> Iterator[None]:
    """While open, the Prefect server is told what happens to a run, and at the end how it ended.

    Not a temporary one: nobody looks at its events, and it ends with the run.
    """
    if not (api_url := lasting_api_url()):
        yield
        return
    story = _story_of(run)
    with Announcer(api_url) as announcer:

        def tell(one: Told) -> None:
            payload = _masked(one.payload, run.mask)
            event = of_run(one.name, flow_run, run.run_id, payload, at=one.at, tags=run.spec.tags)
            announcer.tell(event, flow_run)

        def observe(event: Event) -> None:
            try:
                for one in story.observe(event):
                    tell(one)
            except Exception:
                _log.exception("%s of %s is not announced", event.name, run.run_id)

        token = event_listeners.set((*event_listeners.get(), observe))
        own_token = _announcer.set(announcer)
        try:
            yield
        finally:
            event_listeners.reset(token)
            _announcer.reset(own_token)
            if run.record.state.is_final and not story.has_ended:
                tell(story.ended(run.record.state, run.verdict.message, time.time()))


def _story_of(run: RunSession) -> Story:
    fleet = run.spec.fleet

    def log_of(component: str) -> str | None:
        return str(run.attempt.log(component)) if run.attempt is not None else None

    return Story(
        common={"run_id": run.run_id, "workload": run.spec.workload, "host": host_name()},
        log_of=log_of,
        failure_of=lambda: run.verdict.failure,
        attempt=run.record.attempts,
        engines=fleet.engines if fleet is not None else 0,
        min_active=fleet.recovery.min_active if fleet is not None else None,
    )


def _masked(value: Any, mask: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return mask(value)
    if isinstance(value, Mapping):
        return {key: _masked(one, mask) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_masked(one, mask) for one in value]
    return value
