"""The process of a flow run, be it of a run or of a pipeline: which flow run that is, how it leaves
its flow run to its next process, and the exit code of its command.
"""

from __future__ import annotations

import contextvars
import functools
import os
import re
import ssl
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar
from uuid import UUID

import certifi
from prefect.client.base import PrefectHttpxAsyncClient, PrefectHttpxSyncClient
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import FlowRun, State
from prefect.client.schemas.responses import SetStateStatus
from prefect.context import FlowRunContext
from prefect.settings import PREFECT_API_SSL_CERT_FILE
from pydantic import BaseModel

from tasks.record.code_store import PROJECT
from tasks.record.places import make_run_id, muster_home
from tasks.server.flow_runs import FLOW_RUN_VARIABLE, clear_process
from tasks.spec.loading import find_project_root
from tasks.spec.ownership import refuse_foreign_settings

#: How the message of such a run begins, or of a pipeline with such a stage.
_INFEASIBLE = re.compile(r"(stage [\w-]+: )?INFEASIBLE:")

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


def enter_project_of(file: Path) -> None:
    """Work in the project that a file lies in, as the process of a run does.

    Paths that were given relative to the directory before are none any more.

    Raises: UntrustedPath, if another user has put settings of Prefect there.
    """
    project = find_project_root(file)
    refuse_foreign_settings(project)
    os.environ["MUSTER_HOME"] = str(muster_home())
    # That of a run around this process.
    os.environ.pop(PROJECT, None)
    os.chdir(project)


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
