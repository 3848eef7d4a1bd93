"""The command `python -m flows.train`: one run in this process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from prefect import tags
from prefect.client.schemas.objects import State
from prefect.exceptions import TerminationSignal
from prefect.utilities.urls import url_for

from tasks.server.flow_process import (
    EXIT_FAILED,
    EXIT_INTERRUPTED,
    EXIT_INVALID,
    end_on_signals,
    exit_code_of,
)
from tasks.server.flow_runs import process_tag
from tasks.server.server import NoServer, lasting_api_url, prefect_server, quieten_prefect
from tasks.show.terminal import Terminal
from tasks.spec.errors import InvalidSpec
from tasks.spec.loading import load_spec
from tasks.train.deploying import parser_of_spec
from tasks.train.session import check_spec


def main(train: Callable[..., State[Any]], arguments: Sequence[str] | None = None) -> int:
    """Run a spec file and show what happens.

    Returns: 0 completed, 1 failed, 2 the spec is invalid and nothing was started, 130 interrupted.
    """
    parser = parser_of_spec(
        "python -m flows.train",
        "Run one training to its end, on the Prefect server of PREFECT_API_URL or on a temporary "
        "one.",
        "Exit: 0 completed, 1 failed, 2 the spec is invalid (nothing was started), 3 it can never "
        "fit the cluster, 130 interrupted (after teardown).",
    )
    options = parser.parse_args(arguments)
    try:
        spec = load_spec(Path(options.spec), options.set)
        check_spec(spec)
    except InvalidSpec as error:
        print(f"{error}\nNothing was started.", file=sys.stderr)
        return EXIT_INVALID
    quieten_prefect()
    end_on_signals()
    try:
        with Terminal(spec) as terminal:
            terminal.say("connecting to Prefect")
            with prefect_server() as url:
                terminal.say(f"Prefect server {url}")
                with tags(*spec.tags, process_tag()):
                    state = train(spec, return_state=True)
                page = _page_of(state)
            terminal.end(state.type.value.lower(), state.message or "", page)
    except NoServer as error:
        print(error, file=sys.stderr)
        return EXIT_FAILED
    except (KeyboardInterrupt, TerminationSignal):
        print("Interrupted; nothing is left running.", file=sys.stderr)
        return EXIT_INTERRUPTED
    return exit_code_of(state)


def _page_of(state: State[Any]) -> str:
    """The flow run's page in the UI; empty where its server ends with this process."""
    flow_run_id = state.state_details.flow_run_id
    if lasting_api_url() is None or flow_run_id is None:
        return ""
    return url_for("flow-run", obj_id=flow_run_id) or ""
