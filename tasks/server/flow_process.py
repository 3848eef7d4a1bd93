"""Functions for the process that executes a flow run, for runs and for pipelines.

The functions prepare the process, return the flow run of the process, hand the flow run over to the
next process, and choose the exit code of the command.
"""

from __future__ import annotations

import contextvars
import functools
import logging
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
from prefect.exceptions import CancelledRun, CrashedRun, FailedRun
from prefect.settings import PREFECT_API_SSL_CERT_FILE
from pydantic import BaseModel

from tasks.record.code_store import PROJECT
from tasks.record.places import make_run_id, muster_home
from tasks.server.concurrency_lease import set_state_and_release_lease
from tasks.server.flow_runs import FLOW_RUN_VARIABLE, clear_process
from tasks.spec.loading import find_project_root
from tasks.spec.ownership import refuse_foreign_settings

#: Pattern for the start of the state message of an infeasible run, or of a pipeline with an
#: infeasible stage.
_INFEASIBLE = re.compile(r"(stage [\w-]+: )?INFEASIBLE:")

#: Exit codes of the commands that run a flow, for each result of the flow.
EXIT_COMPLETED, EXIT_FAILED, EXIT_INVALID, EXIT_INFEASIBLE, EXIT_INTERRUPTED = 0, 1, 2, 3, 130

#: Value of `result_storage` for a flow that stores no results. Without a value, Prefect requests
#: the default storage from the server twice before the flow begins.
NO_RESULTS = Path(os.devnull)

M = TypeVar("M", bound=BaseModel)

#: True after `retry_while_server_starts` was called in this context. New threads start with False.
_is_starting = contextvars.ContextVar("is_starting", default=False)


def read_flow_run_id() -> str:
    """Return the id of the flow run that this process executes, or an empty string.

    The id is the first argument of the process, or else the value of the environment variable
    PREFECT__FLOW_RUN_ID. Prefect's engine reads the id from the same places, and reports an empty
    id as invalid.
    """
    return sys.argv[1] if len(sys.argv) > 1 else os.environ.get("PREFECT__FLOW_RUN_ID", "")


def retry_while_server_starts() -> None:
    """Make Prefect's clients retry refused connections until the flow of this process begins.

    By default, a Prefect client retries a refused connection only if the client has connected to
    the server before. So a run whose process starts at the same time as the server would become
    CRASHED. After the flow has begun, Prefect's own rules apply.
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


def share_ssl_contexts() -> None:
    """Make all Prefect clients of this process share one SSL context.

    Otherwise, each client would load the CA certificates again, which is slow.
    """

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


def hide_errors_of_ended_runs() -> None:
    """Do not log an error of Prefect's engine if a flow has returned a failed or cancelled state.

    Prefect's engine logs such a state as an unexpected exception, with a traceback of its own code.
    The flow has already logged how its run ended.
    """

    def is_unexpected(record: logging.LogRecord) -> bool:
        exception = record.exc_info[1] if record.exc_info else None
        return not isinstance(exception, FailedRun | CancelledRun | CrashedRun)

    for name in ("prefect.flow_runs", "prefect.engine"):
        logging.getLogger(name).addFilter(is_unexpected)


def enter_project(file: Path) -> None:
    """Change the working directory to the project folder of a file.

    After this call, relative paths refer to the project folder, as in the process of a run.

    Raises: UntrustedPath, if another user owns Prefect's settings in the project folder.
    """
    project = find_project_root(file)
    refuse_foreign_settings(project)
    os.environ["MUSTER_HOME"] = str(muster_home())
    # Remove the variable PROJECT. If a run has started this process, the variable contains the
    # project of that run, which may differ from the project of `file`.
    os.environ.pop(PROJECT, None)
    os.chdir(project)


def get_exit_code(state: State[Any]) -> int:
    """Return the exit code of a command for the final state of its flow run.

    0 if completed. 1 if failed. 3 if the run or a stage can never fit on the cluster. 130 if
    cancelled.
    """
    if state.is_completed():
        return EXIT_COMPLETED
    if state.is_cancelled():
        return EXIT_INTERRUPTED
    return EXIT_INFEASIBLE if _INFEASIBLE.match(state.message or "") else EXIT_FAILED


def get_current_flow_run() -> FlowRun:
    """Return the flow run that executes this code. Raises: RuntimeError, outside of a flow."""
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        raise RuntimeError(
            "this code does not run in a flow run: call this function only in a flow"
        )
    return context.flow_run


def get_current_spec(model: type[M]) -> M:
    """Return the parameter `spec` of the flow run that executes the calling code."""
    context = FlowRunContext.get()
    spec = ((context.parameters if context is not None else None) or {})["spec"]
    return spec if isinstance(spec, model) else model.model_validate(spec)


def make_current_run_id(name: str, kind: str) -> str:
    """Return the run id of the current flow run. The flow run gets this id as its name.

    All processes and attempts of the flow run have the same run id.

    Args:
        name: name in the spec.
        kind: workload of the run, or `pipeline`.
    """
    flow_run = get_current_flow_run()
    return make_run_id(name, kind, flow_run.id, flow_run.created or datetime.now(UTC))


def find_worker_flow_run() -> FlowRun | None:
    """Return the current flow run, if a worker or a deployment server has started this process.

    The worker or deployment server also starts the next process of the flow run when that process
    is due.

    Returns: None if the process was started in another way, such as by a user.
    """
    context = FlowRunContext.get()
    flow_run = context.flow_run if context is not None else None
    if flow_run is None or flow_run.deployment_id is None:
        return None
    return flow_run if os.environ.get(FLOW_RUN_VARIABLE) == str(flow_run.id) else None


def hand_over_flow_run(client: SyncPrefectClient, flow_run_id: UUID, state: State[Any]) -> bool:
    """Set the state in which a flow run waits until its next process starts.

    Return True on success.

    The function first deletes the pid of the present process on the server. Otherwise, a
    cancellation of the flow run would wait endlessly for this process.
    """
    clear_process(client, str(flow_run_id))
    answer = set_state_and_release_lease(client, flow_run_id, state)
    return answer.status == SetStateStatus.ACCEPT
