"""The verb `muster train`: one run in this process."""

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
from prefect.states import Failed
from prefect.utilities.urls import url_for

from tasks.processes.devices import Devices
from tasks.processes.identity import ProcessId
from tasks.processes.registry import owner_of, registered_runs
from tasks.processes.signals import expect_one_run, ignore_until_exit, interrupt_on_signals
from tasks.record.run_json import RunJson
from tasks.server.flow_process import (
    EXIT_INTERRUPTED,
    enter_project_of,
    exit_code_of,
    trust_once,
)
from tasks.server.flow_runs import STATE_OF, process_tag
from tasks.server.server import (
    await_no_events,
    lasting_api_url,
    prefect_server,
    quieten_prefect,
    secrets_here,
)
from tasks.show.terminal import Terminal
from tasks.spec.formatting import join_commas
from tasks.spec.loading import load_spec
from tasks.spec.programs import find_python
from tasks.spec.run import LIVE_CODE, RunSpec
from tasks.train.reporter import await_last_pages
from tasks.train.spec_check import check_spec

_log = logging.getLogger(__name__)


def run_here(train: Callable[..., State[Any]], path: Path, overrides: Sequence[str] = ()) -> int:
    """Run a spec file and show what happens.

    Returns: the exit code, see `exit_code_of`. Raises: MusterError; nothing was started.
    """
    spec = load_spec(path, overrides)
    enter_project_of(path)
    if spec.code in (None, LIVE_CODE):
        # Of another code it is checked where that lies.
        check_spec(spec)
    _check_devices(spec)
    quieten_prefect()
    trust_once()
    secrets_here(spec)
    expect_one_run()
    interrupt_on_signals()
    try:
        with Terminal(spec) as terminal:
            terminal.say("connecting to Prefect")
            with prefect_server() as url:
                if not lasting_api_url():
                    await_no_events()
                terminal.say(f"Prefect server {url}")
                root = Path.cwd()
                terminal.say(f"project {root}, python {find_python(root)}")
                try:
                    with tags(*spec.tags, process_tag()):
                        state = _final_state(partial(train, spec, return_state=True), terminal)
                finally:
                    # The server may end before this process.
                    if not lasting_api_url():
                        await_last_pages()
                id = state.state_details.flow_run_id
                # No page of a server that ends with this process.
                page = url_for("flow-run", obj_id=id) if id and lasting_api_url() else ""
            ignore_until_exit()
            terminal.end(state.type.value.lower(), state.message or "", page or "")
    except (KeyboardInterrupt, TerminationSignal):
        print(f"Interrupted; {_left_running()}.", file=sys.stderr)
        return EXIT_INTERRUPTED
    return exit_code_of(state)


def _final_state(run_flow: Callable[[], State[Any]], terminal: Terminal) -> State[Any]:
    """Run the flow. Returns: how the run ended, by the verdict in its own record.

    The state of the flow run says the same, unless its server was away as the run ended: then the
    flow fails, or ends with an error about that. Raises: what the flow does, if the run has no
    verdict.
    """
    try:
        state = run_flow()
    except (httpx.HTTPError, PrefectException) as error:
        if (verdict := _verdict_of(terminal.record)) is None:
            raise
        _log.debug("the server did not take the final state: %r", error)
        return verdict
    return _verdict_of(terminal.record) or state


def _verdict_of(record: Path | None) -> State[Any] | None:
    """The Prefect state that a run.json stands for; None if the run has not ended."""
    if record is None:
        return None
    with suppress(OSError, ValueError):
        run = RunJson.read(record)
        if run.state.is_final:
            id = UUID(run.flow_run_id) if run.flow_run_id else None
            state: State[Any] = STATE_OF.get(run.state, Failed)(message=run.message)
            state.state_details.flow_run_id = id
            return state
    return None


def _check_devices(spec: RunSpec) -> None:
    """Raises: BadDevices: a run placed here would wait for ever for what nobody can name."""
    if spec.gang is not None and spec.ray is None:
        # A driver that does not answer may do so while the run waits, and its state says so.
        with suppress(OSError):
            Devices.here()


def _left_running() -> str:
    """What this process has left, by its own registry."""
    me = ProcessId.of(os.getpid())
    owners = filter(None, map(owner_of, registered_runs()))
    left = [owner.run_id for owner in owners if owner.process == me]
    if not left:
        return "nothing is left running"
    return f"`muster reconcile` ends what {join_commas(left)} may have left running"
