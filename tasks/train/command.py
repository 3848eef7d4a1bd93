"""The verb `muster train`: one run in this process."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from prefect import tags
from prefect.client.schemas.objects import State
from prefect.exceptions import TerminationSignal
from prefect.utilities.urls import url_for

from tasks.processes.devices import Devices
from tasks.processes.identity import ProcessId
from tasks.processes.registry import owner_of, registered_runs
from tasks.processes.signals import expect_one_run, ignore_until_exit, interrupt_on_signals
from tasks.server.flow_process import (
    EXIT_INTERRUPTED,
    enter_project_of,
    exit_code_of,
    trust_once,
)
from tasks.server.flow_runs import process_tag
from tasks.server.server import lasting_api_url, prefect_server, quieten_prefect, secrets_here
from tasks.show.terminal import Terminal
from tasks.spec.loading import load_spec
from tasks.spec.programs import python_of
from tasks.spec.run import LIVE, RunSpec
from tasks.spec.words import commas
from tasks.train.reporter import await_last_pages
from tasks.train.session import check_spec


def run_here(train: Callable[..., State[Any]], path: Path, overrides: Sequence[str] = ()) -> int:
    """Run a spec file and show what happens.

    Returns: the exit code, see `exit_code_of`. Raises: MusterError; nothing was started.
    """
    spec = load_spec(path, overrides)
    enter_project_of(path)
    if spec.code in (None, LIVE):
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
                terminal.say(f"Prefect server {url}")
                root = Path.cwd()
                terminal.say(f"project {root}, python {python_of(root)}")
                try:
                    with tags(*spec.tags, process_tag()):
                        state = train(spec, return_state=True)
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
    return f"`muster reconcile` ends what {commas(left)} may have left running"
