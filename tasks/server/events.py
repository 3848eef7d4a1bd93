"""Sends events about runs, the queue and operator actions to the Prefect server.

`docs/events.md` lists the events. A thread sends the events of runs and of the queue, and waits for
the server's response. A slow server delays events. If it stays away, events are lost. Runs never
wait for it.

Prefect's own `emit_event` is not used: it sends through a socket without an answer, tries again for
eight seconds for each event while the server is away, and the exit of its process waits for that.
"""

from __future__ import annotations

import contextvars
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from datetime import UTC, datetime
from functools import cache
from itertools import islice
from typing import Any, Final

import httpx
from prefect.client.orchestration import PrefectClient, SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun, WorkPool
from prefect.context import SettingsContext
from prefect.events.schemas.events import Event, RelatedResource, Resource
from prefect.exceptions import ObjectNotFound, PrefectException

from tasks.record.events import build_payload

_log = logging.getLogger(__name__)

#: Seconds to send the remaining events on close. Events that remain after that are dropped.
CLOSE_WITHIN_S = 5.0
#: Timeout of a request, in seconds.
_TIMEOUT_S = 5.0
_AT_ONCE = 50
#: Maximum number of waiting events. Above it, the oldest events are dropped.
_KEPT_AT_MOST = 1000
_AGAIN_S, _AGAIN_AT_MOST_S = 1.0, 30.0
_EVENTS: Final = "/events"


@contextmanager
def client_settings(*, retries: int, api_url: str | None = None) -> Iterator[None]:
    """Set the number of retries, and optionally the server, of Prefect's clients in this context.

    Prefect's `temporary_settings` is not used: it reads all settings, which takes as long as ten
    requests.
    """
    with _settings_with(retries, api_url):
        yield


def insist_on_the_end(retries: int) -> None:
    """Have Prefect's clients of this context try again so often, until the end of this process.

    For the process of a run that has ended, whose final state its server may not take in at once.
    """
    _settings_with(retries, None).__enter__()


def _settings_with(retries: int, api_url: str | None) -> SettingsContext:
    now = SettingsContext.get()
    assert now is not None
    settings = now.settings
    own: dict[str, Any] = {"client": settings.client.model_copy(update={"max_retries": retries})}
    if api_url is not None:
        own["api"] = settings.api.model_copy(update={"url": api_url})
    return SettingsContext(profile=now.profile, settings=settings.model_copy(update=own))


#: Tells an event of a flow run: its name, the flow run, the run id, and what its payload says.
Tell = Callable[..., None]


#: An event, and the flow run whose deployment, pool and tags are named with it.
_Letter = tuple[Event, FlowRun | None]


class Announcer:
    """Sends events to the Prefect server while the context is open. Thread-safe."""

    def __init__(self, api_url: str, *, again_s: float = _AGAIN_S) -> None:
        self._api_url = api_url
        self._again_s = again_s
        self._changed = threading.Condition()
        self._kept: deque[_Letter] = deque()
        self._lost = 0
        self._is_closing = False
        # The server's credentials may be settings of this context only.
        work = contextvars.copy_context().run
        self._thread = threading.Thread(
            target=work, args=(self._work,), name="announcer", daemon=True
        )

    def __enter__(self) -> Announcer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def tell(self, event: Event, flow_run: FlowRun | None = None) -> None:
        """Returns at once. The flow run's deployment, flow, pool and tags are named with it."""
        with self._changed:
            if len(self._kept) == _KEPT_AT_MOST:
                self._kept.popleft()
                self._lost += 1
            self._kept.append((event, flow_run))
            self._changed.notify_all()

    def tell_run(self, name: str, flow_run: FlowRun, run_id: str, **known: Any) -> None:
        """An event of a run that has no process, or none that tells it. Returns at once."""
        payload = build_payload(name, run_id=run_id, **known)
        self.tell(of_run(name, flow_run, run_id, payload), flow_run)

    def close(self, within_s: float = CLOSE_WITHIN_S) -> None:
        """Send the remaining events if the server accepts them in time. Send nothing after that."""
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(within_s)
        if untold := len(self._kept) + self._lost:
            _log.warning("%d events were not told to %s", untold, self._api_url)

    def _work(self) -> None:
        # Settings of its own, or a flow's context would give the client of that flow.
        own = {"timeout": _TIMEOUT_S}
        with (
            client_settings(retries=0, api_url=self._api_url),
            get_client(httpx_settings=own, sync_client=True) as client,
        ):
            self._tell_all(client, _Relations(client))

    def _tell_all(self, client: SyncPrefectClient, relations: _Relations) -> None:
        pause_s = self._again_s
        while batch := self._next():
            try:
                letters = [_as_json(letter, relations) for letter in batch]
                client.request("POST", _EVENTS, json=letters)
            except Exception as error:
                if may_pass(error):
                    if self._is_closing:
                        return
                    _log.debug("%s is told later: %r", self._api_url, error)
                    with self._changed:
                        self._changed.wait_for(lambda: self._is_closing, timeout=pause_s)
                    pause_s = min(2 * pause_s, _AGAIN_AT_MOST_S)
                    continue
                # Drop this batch, so that it does not block later events.
                _log.exception("%d events are lost", len(batch))
            pause_s = self._again_s
            with self._changed:
                # Some events of the batch may have been dropped during the request.
                while self._kept and self._kept[0] in batch:
                    self._kept.popleft()

    def _next(self) -> list[_Letter]:
        """Wait for events, and return the next batch. The batch is empty only at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._kept or self._is_closing)
            return list(islice(self._kept, _AT_ONCE))


class _Relations:
    """The deployment, flow, pool and tags of flow runs, as Prefect's own events name them."""

    def __init__(self, client: SyncPrefectClient) -> None:
        self._readers: dict[str, Callable[[Any], Any]] = {
            "flow": client.read_flow,
            "deployment": client.read_deployment,
            "work-queue": client.read_work_queue,
            "work-pool": client.read_work_pool,
        }
        self._read = cache(self._read_anew)

    def of(self, run: FlowRun) -> list[RelatedResource]:
        keys = run.flow_id, run.deployment_id, run.work_queue_id, run.work_pool_name
        found, tags = list[RelatedResource](), {*run.tags}
        for kind, key in zip(self._readers, keys, strict=True):
            if key is not None and (it := self._read(kind, key)) is not None:
                found.append(_related(f"prefect.{kind}.{it.id}", kind, it.name))
                tags |= {*(getattr(it, "tags", None) or ())}
        return [*found, *(_tag(name) for name in sorted(tags))]

    def _read_anew(self, kind: str, key: object) -> Any:
        """Return an object of the server, or None if the server does not know it."""
        try:
            return self._readers[kind](key)
        except ObjectNotFound:
            return None


def may_pass(error: Exception) -> bool:
    """Return True if the server may accept the same request later."""
    if isinstance(error, httpx.HTTPStatusError):
        status = error.response.status_code
        return status >= 500 or status in (408, 429)
    return isinstance(error, httpx.HTTPError)


def _as_json(letter: _Letter, relations: _Relations) -> dict[str, Any]:
    event, flow_run = letter
    related = relations.of(flow_run) if flow_run is not None else []
    related = [*event.related, *related]
    return event.model_copy(update={"related": related}).model_dump(mode="json")


def _related(id: str, role: str, name: str) -> RelatedResource:
    return RelatedResource(
        {"prefect.resource.id": id, "prefect.resource.role": role, "prefect.resource.name": name}
    )


def _tag(name: str) -> RelatedResource:
    about = {"prefect.resource.id": f"prefect.tag.{name}", "prefect.resource.role": "tag"}
    return RelatedResource(about)


def of_run(
    name: str,
    flow_run: FlowRun,
    run_id: str,
    payload: Mapping[str, Any],
    *,
    at: float | None = None,
    tags: Sequence[str] = (),
) -> Event:
    """An event about a flow run, at UTC epoch seconds or now, with tags in addition to its own."""
    component = payload.get("component")
    related = [_tag(tag) for tag in tags if tag not in flow_run.tags]
    if component is not None:
        related.append(_related(f"muster.component.{run_id}.{component}", "component", component))
    return Event(
        event=name,
        occurred=datetime.fromtimestamp(time.time() if at is None else at, UTC),
        resource=Resource(_related(f"prefect.flow-run.{flow_run.id}", "flow-run", run_id).root),
        related=related,
        payload=dict(payload),
    )


def of_pool(name: str, pool: WorkPool, *, node: str | None = None, **known: Any) -> Event:
    """An event about a work pool, or about a node that its runs are placed on."""
    it, related = _related(f"prefect.work-pool.{pool.id}", "work-pool", pool.name), []
    if node is not None:
        known["node"] = node
        it, related = _related(f"muster.node.{node}", "node", node), [it]
    payload = build_payload(name, pool=pool.name, **known)
    return Event(event=name, resource=Resource(it.root), related=related, payload=payload)


async def told_at_once(client: PrefectClient, *events: Event) -> None:
    """Tell events from where the server has just answered; a failure costs a warning."""
    if not events:
        return
    batch = [event.model_dump(mode="json") for event in events]
    try:
        await client.request("POST", _EVENTS, json=batch)
    except (httpx.HTTPError, PrefectException) as error:
        _log.warning("not told: %s: %r", ", ".join(one.event for one in events), error)


#: Announcer of the run of this context, or None.
announcer_here: ContextVar[Announcer | None] = ContextVar("announcer", default=None)


def tell_here(name: str, flow_run: FlowRun, run_id: str, **known: Any) -> None:
    """Call `Announcer.tell_run` of this context's announcer. Do nothing if it has no announcer."""
    if (announcer := announcer_here.get()) is not None:
        announcer.tell_run(name, flow_run, run_id, **known)
