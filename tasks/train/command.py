"""Run one training in this process: the command `muster train`, and retries of such runs."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
from prefect import tags
from prefect.client.schemas.objects import State
from prefect.exceptions import PrefectException, TerminationSignal
from prefect.settings import PREFECT_API_URL
from prefect.states import Failed

from tasks.processes.devices import Devices
from tasks.processes.identity import ProcessId
from tasks.processes.registry import read_owner, registered_runs
from tasks.processes.signals import expect_one_run, ignore_until_exit, interrupt_on_signals
from tasks.record.run_json import RunJson
from tasks.server.flow_process import (
    EXIT_INTERRUPTED,
    enter_project,
    get_exit_code,
    share_ssl_contexts,
)
from tasks.server.flow_runs import (
    STATE_OF,
    ServerAway,
    connect_to_server,
    make_process_tag,
    propose_state,
)
from tasks.server.server import (
    find_lasting_api_url,
    find_page_url,
    hide_prefect_logs,
    prefect_server,
    read_configured_secrets,
    skip_event_retries,
)
from tasks.show.terminal import Terminal
from tasks.spec.formatting import join_commas
from tasks.spec.loading import load_spec, locate_spec
from tasks.spec.programs import add_active_environment
from tasks.spec.run import LIVE_CODE, RunSpec
from tasks.train.interpreters import describe_interpreters
from tasks.train.missing_modules import describe_missing_modules
from tasks.train.reporter import await_last_artifacts
from tasks.train.run_checkpoints import with_start
from tasks.train.session import spec_file
from tasks.train.spec_check import check_spec

_log = logging.getLogger(__name__)


def run_here(
    train: Callable[..., State[Any]],
    path: Path,
    overrides: Sequence[str] = (),
    start: str | None = None,
) -> int:
    """Run a spec file in this process, and show on the terminal how the run proceeds.

    Args:
        train: The flow `train`.
        path: Path of the run spec.
        overrides: Values of the option `--set` that change the spec, such as `progress.total=20`.
        start: Value of the option `--from`: the run from whose checkpoint this run starts, as `RUN`
            or `RUN@STEP`. None to start without a checkpoint.

    Returns:
        The exit code of the command, see `get_exit_code`.

    Raises:
        MusterError: The spec is invalid, the checkpoint does not exist, or the Prefect server
            cannot be used. No component was started.
    """
    spec = load_spec(path, overrides)
    if start is not None:
        spec = with_start(spec, start)
    spec_file.set(locate_spec(path))
    enter_project(path)
    spec = add_active_environment(spec, Path.cwd())
    with tags(*spec.tags, make_process_tag()):
        return run_in_terminal(spec, partial(train, spec, return_state=True))


def run_in_terminal(spec: RunSpec, run_flow: Callable[[], State[Any]]) -> int:
    """Run the flow of a run in this process, and show on the terminal how the run proceeds.

    The working directory must be the root of the run's project.

    Args:
        spec: The run spec.
        run_flow: Function that runs the flow `train` and returns its final state. This function is
            called while a Prefect server is available.

    Returns:
        The exit code of the command, see `get_exit_code`.

    Raises:
        MusterError: The spec is invalid or the Prefect server cannot be used. No component was
            started.
    """
    if spec.code in (None, LIVE_CODE):
        # The run uses the files in the working directory, so the spec can already be checked
        # against these files. If the run uses submitted code, the task `admit` checks the spec
        # later.
        check_spec(spec)
    _check_devices(spec)
    hide_prefect_logs()
    share_ssl_contexts()
    read_configured_secrets(spec)
    expect_one_run()
    interrupt_on_signals()
    try:
        with Terminal(spec) as terminal:
            terminal.say("connecting to Prefect")
            with prefect_server() as url:
                is_lasting = find_lasting_api_url() is not None
                if not is_lasting:
                    skip_event_retries()
                terminal.say(f"Prefect server {url}")
                root = Path.cwd()
                terminal.say(f"project {root}, python {describe_interpreters(spec, root)}")
                for warning in describe_missing_modules(spec, root):
                    terminal.say(f"warning: {warning}", "bold yellow")
                try:
                    state = _run_to_end(run_flow, terminal)
                finally:
                    # A temporary Prefect server ends when this context closes, so send the last
                    # artifacts now.
                    if not is_lasting:
                        await_last_artifacts()
                # A temporary server ends now, so a link to the run's page is useful only for a
                # lasting server.
                flow_run_id = state.state_details.flow_run_id
                link = None
                if flow_run_id and is_lasting:
                    link = find_page_url("flow-run", flow_run_id)
            ignore_until_exit()
            terminal.end(state.type.value.lower(), state.message or "", link or "")
    except (KeyboardInterrupt, TerminationSignal):
        print(f"Interrupted; {_describe_leftovers()}.", file=sys.stderr)
        return EXIT_INTERRUPTED
    return get_exit_code(state)


def _run_to_end(run_flow: Callable[[], State[Any]], terminal: Terminal) -> State[Any]:
    """Run the flow, and return the final state of the run, as recorded in its file `run.json`.

    The flow can end in another state. For example, the flow fails if the Prefect server does not
    answer at the end of a completed run. The state of the flow is returned only if `run.json`
    contains no final state.

    Args:
        run_flow: Function that runs the flow and returns its final state.
        terminal: The terminal output, which contains the path of `run.json`.

    Raises:
        Exception: The error of the flow, if `run.json` contains no final state.
    """
    try:
        flow_state = run_flow()
    except (httpx.HTTPError, PrefectException) as error:
        recorded_state = _read_final_state(terminal.record)
        if recorded_state is None:
            raise
        _log.debug("the Prefect server did not accept the final state of the run: %r", error)
        return recorded_state
    recorded_state = _read_final_state(terminal.record)
    if recorded_state is None:
        return flow_state
    flow_run_id = recorded_state.state_details.flow_run_id
    if flow_state.is_cancelling() and flow_run_id is not None:
        # A user has cancelled the run after its result was recorded, so the server has rejected the
        # result. Set the result again. Otherwise, the flow run would keep the state Cancelling.
        with suppress(ServerAway), connect_to_server(PREFECT_API_URL.value() or "") as client:
            propose_state(client, str(flow_run_id), flow_state, recorded_state)
    return recorded_state


def _read_final_state(record: Path | None) -> State[Any] | None:
    """Return the Prefect state that corresponds to the final state in a `run.json`.

    Returns:
        The state. None if the run has not ended or `run.json` cannot be read.
    """
    if record is None:
        return None
    with suppress(OSError, ValueError):
        run = RunJson.read(record)
        if run.state.is_final:
            state: State[Any] = STATE_OF.get(run.state, Failed)(message=run.message)
            state.state_details.flow_run_id = UUID(run.flow_run_id) if run.flow_run_id else None
            return state
    return None


def _check_devices(spec: RunSpec) -> None:
    """Check that the GPUs of this machine can be listed.

    Only runs that use GPUs without Ray need this check.

    Raises:
        BadDevices: The environment variables that select the GPUs are invalid. Without this error,
            the run would wait forever.
    """
    if spec.gang is not None and spec.ray is None:
        # Ignore a GPU driver that does not answer. The driver may answer while the run waits for
        # its GPUs. Until then, the message of the waiting run reports the problem.
        with suppress(OSError):
            Devices.here()


def _describe_leftovers() -> str:
    """Return a message that says which runs of this process may still have running programs."""
    this_process = ProcessId.of(os.getpid())
    owners = [read_owner(run) for run in registered_runs()]
    run_ids = [owner.run_id for owner in owners if owner and owner.process == this_process]
    if not run_ids:
        return "all processes of the run have ended"
    return (
        f"processes of {join_commas(run_ids)} may still be running. To end them: muster reconcile"
    )
