"""Send events about runs, the queue and operator actions to the Prefect server.

`docs/events.md` lists the events. A thread sends the events of runs and of the queue, and waits for
the server's response. If the server is slow, events arrive late. If the server does not answer for
a long time, events are lost. Runs never wait for the server.

Prefect's own `emit_event` is not used, because it sends events through a websocket without a
response. While the server does not answer, `emit_event` retries each event for eight seconds, and
the process cannot exit during these retries.
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

#: Longest time, in seconds, that `Announcer.close` waits until the pending events are sent. After
#: that time, the remaining events are dropped.
CLOSE_WITHIN_S = 5.0
#: Timeout of a request to the Prefect server, in seconds.
_TIMEOUT_S = 5.0
#: Largest number of events in one request.
_MAX_BATCH = 50
#: Largest number of pending events. If there are more, the oldest events are dropped.
_MAX_PENDING = 1000
#: First pause before a request is retried, in seconds. Each further pause is twice as long.
_RETRY_AFTER_S = 1.0
#: Longest pause before a request is retried, in seconds.
_MAX_RETRY_AFTER_S = 30.0
#: Path of Prefect's API for new events.
_EVENTS_PATH: Final = "/events"


@contextmanager
def override_client_settings(*, retries: int, api_url: str | None = None) -> Iterator[None]:
    """Set the number of retries, and optionally the server, of Prefect's clients in this context.

    Prefect's `temporary_settings` is not used, because it reads all settings, which takes as long
    as ten requests.

    Args:
        retries: Number of times that a client repeats a failed request.
        api_url: API address of the Prefect server. If None, the server of this context is kept.
    """
    with _settings_with(retries, api_url):
        yield


def set_client_retries(retries: int) -> None:
    """Set the number of retries of Prefect's clients for the rest of this context.

    Call this at the end of a run. Otherwise, Prefect would spend a long time on sending the final
    state to a server that no longer answers.
    """
    _settings_with(retries, None).__enter__()


def _settings_with(retries: int, api_url: str | None) -> SettingsContext:
    """Return a context manager that sets the retries and the API address of Prefect's clients.

    Args:
        retries: Number of times that a client repeats a failed request.
        api_url: API address of the Prefect server. If None, the address is not changed.
    """
    present = SettingsContext.get()
    assert present is not None
    settings = present.settings
    changes: dict[str, Any] = {
        "client": settings.client.model_copy(update={"max_retries": retries})
    }
    if api_url is not None:
        changes["api"] = settings.api.model_copy(update={"url": api_url})
    return SettingsContext(profile=present.profile, settings=settings.model_copy(update=changes))


#: Function that sends an event of a flow run. Its arguments are those of `Announcer.announce_run`.
SendRunEvent = Callable[..., None]


#: A pair of an event and its flow run (or None). The flow run's deployment, pool and tags are added
#: to the related resources of the event.
_PendingEvent = tuple[Event, FlowRun | None]


class Announcer:
    """Sends events to the Prefect server while the context is open. Thread-safe."""

    def __init__(self, api_url: str, *, again_s: float = _RETRY_AFTER_S) -> None:
        """
        Args:
            api_url: API address of the Prefect server.
            again_s: First pause before a request is retried, in seconds.
        """
        self._api_url = api_url
        self._again_s = again_s
        #: Condition that protects the attributes below, and that is notified when one of them
        #: changes.
        self._changed = threading.Condition()
        #: Events that the server has not accepted yet, oldest first.
        self._pending: deque[_PendingEvent] = deque()
        #: Number of events that were dropped because too many events were pending.
        self._dropped_count = 0
        self._is_closing = False
        # Run the thread in a copy of the current context, which may contain the server's password
        # as a Prefect setting. Otherwise the thread would start with an empty context.
        run_in_context = contextvars.copy_context().run
        self._thread = threading.Thread(
            target=run_in_context, args=(self._work,), name="announcer", daemon=True
        )

    def __enter__(self) -> Announcer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def announce(self, event: Event, flow_run: FlowRun | None = None) -> None:
        """Add an event to the pending events. Return at once.

        Args:
            event: The event.
            flow_run: Flow run whose flow, deployment, pool and tags become related resources of the
                event. If None, no related resources are added.
        """
        with self._changed:
            if len(self._pending) == _MAX_PENDING:
                self._pending.popleft()
                self._dropped_count += 1
            self._pending.append((event, flow_run))
            self._changed.notify_all()

    def announce_run(self, name: str, flow_run: FlowRun, run_id: str, **known: Any) -> None:
        """Send an event about a run of another process. Return at once.

        Args:
            name: Name of the event.
            flow_run: The flow run.
            run_id: Id of the run.
            known: Values for the payload of the event. Keys that `docs/events.md` does not list for
                the event are ignored.
        """
        payload = build_payload(name, run_id=run_id, **known)
        self.announce(make_run_event(name, flow_run, run_id, payload), flow_run)

    def close(self, within_s: float = CLOSE_WITHIN_S) -> None:
        """Wait until the pending events are sent, but not longer than `within_s` seconds.

        Events that are still pending after that time are dropped.

        Args:
            within_s: Longest wait in seconds.
        """
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()
        self._thread.join(within_s)
        unsent_count = len(self._pending) + self._dropped_count
        if unsent_count:
            _log.warning(
                "Muster could not send %d events to the Prefect server at %s",
                unsent_count,
                self._api_url,
            )

    def _work(self) -> None:
        """Send events until `close` is called. The announcer's thread runs this method."""
        # Pass HTTP settings, so that `get_client` creates a new client. Otherwise, `get_client`
        # would return the client of the current flow, and the flow closes that client at its end.
        httpx_settings = {"timeout": _TIMEOUT_S}
        with (
            override_client_settings(retries=0, api_url=self._api_url),
            get_client(httpx_settings=httpx_settings, sync_client=True) as client,
        ):
            self._send_all(client, _Relations(client))

    def _send_all(self, client: SyncPrefectClient, relations: _Relations) -> None:
        """Send batches of events in order, and retry a batch while the server does not answer."""
        pause_s = self._again_s
        while batch := self._wait_for_batch():
            try:
                content = [_as_json(pending, relations) for pending in batch]
                client.request("POST", _EVENTS_PATH, json=content)
            except Exception as error:
                if is_retryable(error):
                    if self._is_closing:
                        return
                    _log.debug(
                        "The Prefect server at %s did not accept events of Muster. Muster "
                        "tries again: %r",
                        self._api_url,
                        error,
                    )
                    with self._changed:
                        self._changed.wait_for(lambda: self._is_closing, timeout=pause_s)
                    pause_s = min(2 * pause_s, _MAX_RETRY_AFTER_S)
                    continue
                # The server will never accept this batch of events. Drop the batch, so that later
                # events are sent.
                _log.exception(
                    "Muster could not send %d events to the Prefect server, and does not try again",
                    len(batch),
                )
            pause_s = self._again_s
            with self._changed:
                # Remove the events of the batch. Some of them may already be missing, because the
                # oldest events are dropped if too many are pending.
                while self._pending and self._pending[0] in batch:
                    self._pending.popleft()

    def _wait_for_batch(self) -> list[_PendingEvent]:
        """Wait for events, and return the next batch. Return an empty list after `close`."""
        with self._changed:
            self._changed.wait_for(lambda: self._pending or self._is_closing)
            return list(islice(self._pending, _MAX_BATCH))


class _Relations:
    """Finds the related resources of flow runs: flow, deployment, queue, pool and tags.

    Each object is read from the server only once. The related resources have the same ids and roles
    as in Prefect's own events.
    """

    def __init__(self, client: SyncPrefectClient) -> None:
        self._readers: dict[str, Callable[[Any], Any]] = {
            "flow": client.read_flow,
            "deployment": client.read_deployment,
            "work-queue": client.read_work_queue,
            "work-pool": client.read_work_pool,
        }
        self._read = cache(self._read_uncached)

    def find(self, flow_run: FlowRun) -> list[RelatedResource]:
        """Return the related resources of a flow run."""
        keys = {
            "flow": flow_run.flow_id,
            "deployment": flow_run.deployment_id,
            "work-queue": flow_run.work_queue_id,
            "work-pool": flow_run.work_pool_name,
        }
        resources: list[RelatedResource] = []
        tags = {*flow_run.tags}
        for kind, key in keys.items():
            found = self._read(kind, key) if key is not None else None
            if found is not None:
                resources.append(_make_resource(f"prefect.{kind}.{found.id}", kind, found.name))
                tags |= {*(getattr(found, "tags", None) or ())}
        return [*resources, *(_make_tag(name) for name in sorted(tags))]

    def _read_uncached(self, kind: str, key: object) -> Any:
        """Return an object of the server, or None if the server does not know the object."""
        try:
            return self._readers[kind](key)
        except ObjectNotFound:
            return None


def is_retryable(error: Exception) -> bool:
    """Return True if the server may accept the same request later."""
    if isinstance(error, httpx.HTTPStatusError):
        status = error.response.status_code
        return status >= 500 or status in (408, 429)
    return isinstance(error, httpx.HTTPError)


def _as_json(pending: _PendingEvent, relations: _Relations) -> dict[str, Any]:
    """Return an event and all its related resources as JSON data for Prefect's API."""
    event, flow_run = pending
    related = list(event.related)
    if flow_run is not None:
        related += relations.find(flow_run)
    return event.model_copy(update={"related": related}).model_dump(mode="json")


def _make_resource(id: str, role: str, name: str) -> RelatedResource:
    """Return a resource with its id, its role in an event, and a name for people."""
    return RelatedResource(
        {"prefect.resource.id": id, "prefect.resource.role": role, "prefect.resource.name": name}
    )


def _make_tag(name: str) -> RelatedResource:
    """Return a tag as a related resource of an event."""
    labels = {"prefect.resource.id": f"prefect.tag.{name}", "prefect.resource.role": "tag"}
    return RelatedResource(labels)


def make_run_event(
    name: str,
    flow_run: FlowRun,
    run_id: str,
    payload: Mapping[str, Any],
    *,
    at: float | None = None,
    tags: Sequence[str] = (),
) -> Event:
    """Return an event about a flow run.

    Args:
        name: Name of the event.
        flow_run: The flow run.
        run_id: Id of the run. The event shows this id as the name of the flow run.
        payload: Payload of the event. If the payload has the key `component`, the component of this
            name becomes a related resource.
        at: Time of the event in UTC epoch seconds. If None, the current time is used.
        tags: Tags in addition to the tags of the flow run.
    """
    component = payload.get("component")
    related = [_make_tag(tag) for tag in tags if tag not in flow_run.tags]
    if component is not None:
        related.append(
            _make_resource(f"muster.component.{run_id}.{component}", "component", component)
        )
    return Event(
        event=name,
        occurred=datetime.fromtimestamp(time.time() if at is None else at, UTC),
        resource=Resource(
            _make_resource(f"prefect.flow-run.{flow_run.id}", "flow-run", run_id).root
        ),
        related=related,
        payload=dict(payload),
    )


def make_pool_event(name: str, pool: WorkPool, *, node: str | None = None, **known: Any) -> Event:
    """Return an event about a work pool, or about a node of the pool's cluster.

    Args:
        name: Name of the event.
        pool: The work pool.
        node: Name of the node. If given, the event is about the node, and the work pool is a
            related resource. If None, the event is about the work pool.
        known: Values for the payload of the event. Keys that `docs/events.md` does not list for the
            event are ignored.
    """
    pool_resource = _make_resource(f"prefect.work-pool.{pool.id}", "work-pool", pool.name)
    if node is None:
        subject = pool_resource
        related = []
    else:
        known["node"] = node
        subject = _make_resource(f"muster.node.{node}", "node", node)
        related = [pool_resource]
    payload = build_payload(name, pool=pool.name, **known)
    return Event(event=name, resource=Resource(subject.root), related=related, payload=payload)


async def send_events(client: PrefectClient, *events: Event) -> None:
    """Send events in one request, without a retry. Log a warning if the server rejects the events.

    Call this only if the server has just answered another request. Otherwise, the call could wait
    for a server that does not answer.
    """
    if not events:
        return
    batch = [event.model_dump(mode="json") for event in events]
    try:
        await client.request("POST", _EVENTS_PATH, json=batch)
    except (httpx.HTTPError, PrefectException) as error:
        names = ", ".join(event.event for event in events)
        _log.warning("The Prefect server did not accept the events %s: %r", names, error)


#: The `Announcer` that sends the events of the run in the current context. None if the context
#: belongs to no run.
current_announcer: ContextVar[Announcer | None] = ContextVar("announcer", default=None)


def announce_run_event(name: str, flow_run: FlowRun, run_id: str, **known: Any) -> None:
    """Send an event of a run to the Prefect server with `current_announcer`.

    Do nothing if `current_announcer` is not set. The arguments are those of
    `Announcer.announce_run`.
    """
    announcer = current_announcer.get()
    if announcer is not None:
        announcer.announce_run(name, flow_run, run_id, **known)
