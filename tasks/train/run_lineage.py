"""Record the lineage of a run while it runs, and show the lineage on its Prefect server.

A thread writes the file `lineage.json`, sends the events about Prefect assets, and updates the
artifact `lineage`. The run never waits for this thread, except for a moment at its end.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun

from tasks.record.events import Event, listen_to_events
from tasks.record.lineage import Lineage, describe_lineage, read_lineage, write_lineage
from tasks.server.artifacts import Artifacts
from tasks.server.assets import list_asset_events
from tasks.server.events import current_announcer, override_client_settings
from tasks.server.flow_runs import make_context_thread
from tasks.server.server import find_lasting_api_url
from tasks.show.lineage import LINEAGE, show_lineage
from tasks.spec.secrets import mask_nested
from tasks.train.session import RunSession

_log = logging.getLogger(__name__)

#: Seconds between two searches for new checkpoints.
_CHECKPOINTS_EVERY_S = 30.0
#: Longest wait in seconds for the last update of the lineage when the run ends. A slower update is
#: abandoned.
_END_TIMEOUT_S = 3.0
#: Timeout of a request to the Prefect server, in seconds.
_REQUEST_TIMEOUT_S = 5.0
#: Events that may change the lineage.
_CHANGING_EVENTS = ("attempt.begun", "attempt.adopted", "component.exited", "attempt.ended")


class LineageRecorder:
    """Records the lineage of one run in a thread: the data that the run reads and writes."""

    def __init__(self, run: RunSession, flow_run: FlowRun) -> None:
        self._run = run
        self._flow_run = flow_run
        #: The last recorded lineage, in which secrets are masked.
        self._recorded = read_lineage(run.place) or Lineage(run_id=run.run_id)
        #: True if the lineage file on this machine contains the recorded lineage.
        self._is_written = False
        #: The lineage in the artifact on the server. None if this process has not sent the
        #: artifact.
        self._shown: Lineage | None = None
        existing_keys = (LINEAGE,) if flow_run.run_count > 1 else ()
        self._artifacts = Artifacts(flow_run.id, existing_keys)
        has_checkpoints = any(one.checkpoints for one in run.spec.processes.values())
        #: Seconds between two updates. None if the lineage can change only after events of the run.
        self._interval_s = _CHECKPOINTS_EVERY_S if has_checkpoints else None
        self._must_update = threading.Event()
        self._is_closing = False
        self._thread = make_context_thread("lineage", self._work)

    def start(self) -> None:
        """Start the thread. If no thread can be started, no lineage is recorded."""
        try:
            self._thread.start()
        except RuntimeError as error:
            _log.warning("The lineage of run %s is not recorded: %s", self._run.run_id, error)

    def observe(self, event: Event) -> None:
        """Wake the recording thread if the event may change the lineage. Return at once."""
        if event.name in _CHANGING_EVENTS:
            self._must_update.set()

    def close(self) -> None:
        """Update the run's lineage a last time, and end the thread. Wait at most a few seconds."""
        self._is_closing = True
        self._must_update.set()
        if self._thread.ident is not None:
            self._thread.join(_END_TIMEOUT_S)

    def _work(self) -> None:
        with ExitStack() as stack:
            client: SyncPrefectClient | None = None
            # Show the lineage only on a lasting server. A temporary server and its artifacts end
            # with the run.
            if find_lasting_api_url():
                stack.enter_context(override_client_settings(retries=0))
                # HTTP settings make `get_client` return a separate client. Without these settings,
                # `get_client` would return the client of the flow, and the flow closes that client.
                client = stack.enter_context(
                    get_client(httpx_settings={"timeout": _REQUEST_TIMEOUT_S}, sync_client=True)
                )
            is_last = False
            while not is_last:
                is_last = self._is_closing
                try:
                    self._update(client)
                except Exception as error:
                    _log.warning(
                        "Muster could not record the data lineage of run %s: %r",
                        self._run.run_id,
                        error,
                    )
                if not is_last:
                    self._must_update.wait(self._interval_s)
                    self._must_update.clear()

    def _update(self, client: SyncPrefectClient | None) -> None:
        """Record the present lineage, and show it on the Prefect server if it has changed."""
        run = self._run
        if run.attempt is None:
            return
        present = describe_lineage(
            run.spec,
            run.resolved_spec.written(),
            run.place,
            run.record.content,
            is_running=not self._is_closing,
        )
        masked = Lineage.model_validate(mask_nested(present.as_json(), run.mask))
        lineage = masked.including(self._recorded)
        if lineage != self._recorded:
            self._announce(lineage)
            self._recorded = lineage
            self._is_written = False
        if not self._is_written:
            write_lineage(run.place, lineage.as_json())
            self._is_written = True
        # If there are no inputs and outputs, do not add an empty artifact to the page of the run.
        has_data = bool(lineage.inputs or lineage.outputs)
        if client is not None and has_data and lineage != self._shown:
            self._artifacts.show(client, LINEAGE, show_lineage(lineage))
            self._shown = lineage

    def _announce(self, lineage: Lineage) -> None:
        """Send Prefect events about outputs and inputs that the last update did not contain."""
        announcer = current_announcer.get()
        if announcer is None:
            return
        known = {(output.uri, output.signature) for output in self._recorded.outputs}
        new_outputs = [one for one in lineage.outputs if (one.uri, one.signature) not in known]
        events = list_asset_events(
            self._flow_run,
            lineage,
            new_outputs,
            with_inputs=lineage.inputs != self._recorded.inputs,
        )
        for event in events:
            announcer.announce(event, self._flow_run)


@contextmanager
def record_lineage(run: RunSession, flow_run: FlowRun) -> Iterator[None]:
    """Record the lineage of a run in a thread while the context is open.

    Errors in the thread are logged, and do not end the run.
    """
    recorder = LineageRecorder(run, flow_run)
    with listen_to_events(recorder.observe):
        recorder.start()
        try:
            yield
        finally:
            recorder.close()
