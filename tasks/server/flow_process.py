"""The process of a flow run, be it of a run or of a pipeline: which flow run that is, what ends it
from outside, how it leaves its flow run to its next process, and the exit code of its command.

A worker passes a cancel on as SIGTERM, but a run started directly has none, and a worker may be
dead. So each asks the server about itself.
"""

from __future__ import annotations

import contextvars
import functools
import logging
import os
import queue
import re
import signal as signals
import ssl
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol, TypeVar
from uuid import UUID

import certifi
from prefect.client.base import PrefectHttpxAsyncClient, PrefectHttpxSyncClient
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun, State
from prefect.client.schemas.responses import SetStateStatus
from prefect.context import FlowRunContext
from prefect.settings import PREFECT_API_SSL_CERT_FILE
from pydantic import BaseModel

from tasks.record.code_store import PROJECT
from tasks.record.places import make_run_id, muster_home
from tasks.server.flow_runs import FLOW_RUN_VARIABLE, clear_process, thread_here
from tasks.spec.loading import project_of

_log = logging.getLogger(__name__)
_POLL_EVERY_S = 2.0
_CANCELLED = "cancelled from Prefect"
#: How the message of such a run begins, or of a pipeline with such a stage.
_INFEASIBLE = re.compile(r"(stage [\w-]+: )?INFEASIBLE:")
_ENDING_SIGNALS = (signals.SIGINT, signals.SIGTERM, signals.SIGHUP)

#: Of the commands that run a flow. Interrupted: after its teardown.
EXIT_COMPLETED, EXIT_FAILED, EXIT_INVALID, EXIT_INFEASIBLE, EXIT_INTERRUPTED = 0, 1, 2, 3, 130

#: Result storage of a flow that keeps no results. Left out, Prefect asks the server twice, before
#: the flow begins, where they would go.
NO_RESULTS = Path(os.devnull)

M = TypeVar("M", bound=BaseModel)

#: In what starts a flow, and not in threads of its own.
_is_starting = contextvars.ContextVar("is_starting", default=False)


def outlast_server_starts() -> None:
    """Until this process's flow begins, ask a server again that can't be connected to.

    Prefect does so only once a client has been connected, so that a run whose process is started
    while the server is would be CRASHED. Once the flow has begun, its own rules hold.
    """
    _is_starting.set(True)

    def outlasting(made: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(made)
        def make(self: Any, *arguments: Any, **options: Any) -> None:
            made(self, *arguments, **options)
            self._has_connected = _is_starting.get() and FlowRunContext.get() is None

        return make

    for client in (PrefectHttpxAsyncClient, PrefectHttpxSyncClient):
        client.__init__ = outlasting(client.__init__)  # type: ignore[method-assign]


def trust_once() -> None:
    """Read the certificates that a server's is checked by once, and not anew for each client."""

    @functools.cache
    def made(_changed_at: int, **options: Any) -> ssl.SSLContext:
        return ssl.create_default_context(**options)

    def create(**options: Any) -> ssl.SSLContext:
        changed_at = os.stat(options["cafile"]).st_mtime_ns if options else 0
        return made(changed_at, **options)

    shared = SimpleNamespace(**{**vars(ssl), "create_default_context": create})
    for name in ("prefect.client.orchestration", "prefect._internal.version_checking"):
        vars(sys.modules[name])["ssl"] = shared
    create(cafile=PREFECT_API_SSL_CERT_FILE.value() or certifi.where())


def is_cancelled(flow_run_id: UUID) -> bool:
    """Whether the flow run should end; not while nobody can say.

    A server that does not know the flow run has lost its record: no reason to lose the training.
    """
    try:
        with get_client(sync_client=True) as client:
            state = client.read_flow_run(flow_run_id).state
    except Exception as error:
        _log.debug("state of flow run %s not known: %r", flow_run_id, error)
        return False
    return state is not None and (state.is_cancelling() or state.is_cancelled())


class Interruptible(Protocol):
    """What can be ended from any thread: a run, or a pipeline of them."""

    def interrupt(self, why: str) -> None: ...

    def let_go(self, why: str) -> None:
        """Leave it to its next process."""


@contextmanager
def ended_from_outside(
    session: Interruptible, flow_run_id: UUID, *, may_be_left: bool
) -> Iterator[None]:
    """While open, a cancel, SIGINT, SIGTERM and SIGHUP end the session instead of this process.

    Nothing is raised where the signal happens to land: the run ends through its supervisor, and
    the caller, who waits for that, goes on to its teardown. The handler only notes the signal, for
    a thread: the main thread may hold any lock where it lands. Outside the main thread, where
    Python can't handle signals, only cancels are seen.

    A worker ends its flow runs' processes with SIGTERM when one is cancelled and when it is itself
    stopped, to be upgraded for example; only the server knows which.

    Args:
        may_be_left: SIGTERM of a worker that was not asked to cancel leaves it to the next worker.
    """
    asks = may_be_left and started_by_others() is not None
    # Unlike any other queue's, its `put` takes no lock.
    seen, is_over = queue.SimpleQueue[int](), threading.Event()

    def watch() -> None:
        # A server that does not answer means nothing: the run goes on, and is asked about again.
        while not is_over.wait(_POLL_EVERY_S):
            if is_cancelled(flow_run_id):
                session.interrupt(_CANCELLED)
                return

    def ask() -> None:
        if is_cancelled(flow_run_id):
            session.interrupt(_CANCELLED)
        else:
            session.let_go("its flow process was ended by SIGTERM")

    def handle() -> None:
        while signum := seen.get():
            if signum == signals.SIGTERM and asks:
                thread_here("on-term", ask).start()
            else:
                session.interrupt(f"interrupted by {signals.Signals(signum).name}")

    def on_signal(signum: int, frame: object) -> None:
        seen.put(signum)

    is_main = threading.current_thread() is threading.main_thread()
    handled = _ENDING_SIGNALS if is_main else ()
    threads = [thread_here("signals", handle), thread_here("cancel-watch", watch)]
    for thread in threads:
        thread.start()
    before = {signum: signals.signal(signum, on_signal) for signum in handled}
    try:
        yield
    finally:
        is_over.set()
        for signum, handler in before.items():
            # None stands for a handler that was not installed from Python.
            signals.signal(signum, signals.SIG_DFL if handler is None else handler)
        seen.put(0)
        for thread in threads:
            thread.join()


def end_on_signals() -> None:
    """Until a flow takes signals over, they end this program as Ctrl-C does; a shell that puts it
    in the background would have SIGINT ignored."""
    for signum in _ENDING_SIGNALS:
        signals.signal(signum, signals.default_int_handler)


def enter_project_of(file: Path) -> None:
    """Work in the project that a file lies in, as the process of a run does.

    Paths that were given relative to the directory before are none any more.
    """
    os.environ["MUSTER_HOME"] = str(muster_home())
    # That of a run around this process.
    os.environ.pop(PROJECT, None)
    os.chdir(project_of(file))


def exit_code_of(state: State[Any]) -> int:
    """Of a command, by the final state of its flow run: 0 completed, 1 failed, 3 it or a stage of
    it can never fit, 130 interrupted."""
    if state.is_completed():
        return EXIT_COMPLETED
    if state.is_cancelled():
        return EXIT_INTERRUPTED
    return EXIT_INFEASIBLE if _INFEASIBLE.match(state.message or "") else EXIT_FAILED


def flow_run_here() -> FlowRun:
    """That of this context. Raises: RuntimeError, outside of a flow."""
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        raise RuntimeError("there is no flow run here: this is for the body of a flow only")
    return context.flow_run


def spec_here(model: type[M]) -> M:
    """The parameter `spec` of the flow run of this context."""
    context = FlowRunContext.get()
    spec = ((context.parameters if context is not None else None) or {})["spec"]
    return spec if isinstance(spec, model) else model.model_validate(spec)


def id_here(name: str, kind: str) -> str:
    """The id of what this flow run does, which becomes its name: the same for each process of it,
    so for all attempts."""
    flow_run = flow_run_here()
    return make_run_id(name, kind, flow_run.id, flow_run.created or datetime.now(UTC))


def started_by_others() -> FlowRun | None:
    """The flow run, where a worker or a server of deployments has started this process for it, and
    will start another one when it is due again."""
    context = FlowRunContext.get()
    flow_run = context.flow_run if context is not None else None
    if flow_run is None or flow_run.deployment_id is None:
        return None
    return flow_run if os.environ.get(FLOW_RUN_VARIABLE) == str(flow_run.id) else None


def hand_over(client: SyncPrefectClient, flow_run_id: UUID, state: State[Any]) -> bool:
    """Whether the server took the state in which the flow run waits for its next process.

    Without a process on record: a cancel of the waiting flow run would wait for that one for ever.
    """
    clear_process(client, str(flow_run_id))
    return client.set_flow_run_state(flow_run_id, state).status == SetStateStatus.ACCEPT
