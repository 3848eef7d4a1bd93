"""Report parameters that a flow does not accept.

An automation, `run_deployment` and the Prefect API can create a flow run with any parameters.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import State
from prefect.exceptions import ParameterBindError, PrefectException, SignatureMismatchError
from prefect.states import Failed

from tasks.server.concurrency_lease import set_state_and_release_lease
from tasks.spec.failure_kinds import FailureKind
from tasks.spec.formatting import join_words

#: Errors that Prefect raises before the start of a flow if parameters are unknown or missing.
_WRONG_NAMES = (SignatureMismatchError, ParameterBindError)


def describe_wrong_names(
    flow: str, names: Collection[str], *, accepted: Collection[str], required: Collection[str]
) -> str:
    """Return a message about the unknown and the missing parameters of a flow run.

    Args:
        flow: Name of the flow.
        names: Names of the flow run's parameters.
        accepted: Names of all parameters of the flow.
        required: Names of the parameters without a default value.

    Returns:
        The message. Empty if the flow accepts the parameters.
    """
    unknown = [name for name in names if name not in accepted]
    missing = [name for name in required if name not in names]
    faults = []
    if unknown:
        faults.append(f"unknown {_join_parameters(unknown)}")
    if missing:
        faults.append(f"missing {_join_parameters(missing)}")
    if not faults:
        return ""
    accepted_text = f"only the {_join_parameters(accepted)}" if accepted else "no parameters"
    return (
        f"{' and '.join(faults)}: the flow {flow} accepts {accepted_text}. "
        "Correct the parameters, and start the flow again"
    )


def _join_parameters(names: Collection[str]) -> str:
    noun = "parameter" if len(names) == 1 else "parameters"
    return f"{noun} {join_words(names)}"


@contextmanager
def fail_on_wrong_names(
    flow_run_id: str,
    connect: Callable[[], SyncPrefectClient] = lambda: get_client(sync_client=True),
) -> Iterator[None]:
    """Set a flow run to Failed if Prefect's engine exits because of unknown or missing parameters.

    Without this function, the engine would only exit with code 1, and the worker would report a
    crash without the name of the parameter.

    Args:
        flow_run_id: Id of the flow run that the engine executes in this context.
        connect: Function that returns a client of the Prefect server.
    """
    try:
        yield
    except SystemExit as engine_exit:
        # If parameters are wrong, Prefect's engine catches the error about them, and then calls
        # `exit`. `exit` raises SystemExit, and Python stores the caught error in the attribute
        # `__context__` of SystemExit.
        if not isinstance(engine_exit.__context__, _WRONG_NAMES):
            raise
        try:
            with connect() as client:
                _fail(client, UUID(flow_run_id), engine_exit.__context__)
        except (httpx.HTTPError, PrefectException):
            raise engine_exit from None
        # Exit with code 0, so that the worker does not replace the state Failed with Crashed.
        raise SystemExit(0) from None


def _fail(client: SyncPrefectClient, flow_run_id: UUID, error: Exception) -> None:
    """Set a flow run to Failed, with a message that names the wrong parameters."""
    # Import this module only here, so that other commands start faster. In a flow process,
    # Prefect's engine has already imported the module.
    from prefect.flow_engine import load_flow

    flow_run = client.read_flow_run(flow_run_id)
    flow = load_flow(flow_run)
    parameters = inspect.signature(flow.fn).parameters.values()
    message = describe_wrong_names(
        flow.name,
        [*flow_run.parameters],
        accepted=[parameter.name for parameter in parameters],
        required=[item.name for item in parameters if item.default is inspect.Parameter.empty],
    )
    kind = FailureKind.USER_ERROR.value
    failed: State[Any] = Failed(message=f"{kind}: {message or error}")
    set_state_and_release_lease(client, flow_run_id, failed)
