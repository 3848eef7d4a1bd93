"""The stack for the tests of the UI: as `make up` starts it, with its own home and ports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deployments.stack.state import Stack
from tasks.processes.identity import host_name
from tasks.processes.ports import PortsReserved
from tasks.queue.settings import PoolSettings, TableNode, with_settings
from tests.support.host_environment import FINAL, wait_for
from tests.support.prefect_api import send_request

ROOT = Path(__file__).resolve().parents[2]
#: Time limit of each wait, in seconds. On an idle machine, all waits are far shorter.
WITHIN_S = 180.0
_COMMAND_WITHIN_S = 600.0
#: Nodes of the work pool: only this host, with two made-up GPUs.
NODES = (TableNode(name=host_name(), gpus=2),)
DEVICES = "0-1"


@dataclass(frozen=True, slots=True, kw_only=True)
class UiStack:
    """A running stack: the Prefect server and the other processes that `muster up` starts."""

    #: MUSTER_HOME of the stack.
    home: Path

    @property
    def url(self) -> str:
        """Address of the Prefect UI."""
        text = (self.home / "stack" / "stack.json").read_bytes()
        return Stack.model_validate_json(text).ui_url

    def ask(self, method: str, path: str, content: Any = None) -> Any:
        """Send a request to the stack's Prefect server, and return the JSON of the response."""
        return send_request(method, f"{self.url}/api{path}", content, password=self.password)

    @property
    def password(self) -> str:
        return (self.home / "password").read_text().strip()

    def run(
        self, spec: dict[str, Any] | None = None, *, deployment: str = "train/quickstart"
    ) -> str:
        """Queue a run in the same way as the form of the UI, and return the id of the flow run.

        Args:
            spec: Spec of the run; by default the deployment's own spec.
            deployment: Name of the flow and name of the deployment, with a slash between them.
        """
        deployment_record = self.ask("GET", f"/deployments/name/{deployment}")
        parameters = {} if spec is None else {"spec": spec}
        request_body = {"parameters": parameters, "state": {"type": "SCHEDULED"}}
        created_run = self.ask(
            "POST", f"/deployments/{deployment_record['id']}/create_flow_run", request_body
        )
        return str(created_run["id"])

    def flow_run(self, id: str) -> dict[str, Any]:
        """Return a flow run from the Prefect server."""
        flow_run: dict[str, Any] = self.ask("GET", f"/flow_runs/{id}")
        return flow_run

    def newest_run(self, deployment: str) -> dict[str, Any] | None:
        """Return the newest flow run of a deployment, or None if there is no flow run."""
        deployment_record = self.ask("GET", f"/deployments/name/{deployment}")
        query = {
            "flow_runs": {"deployment_id": {"any_": [deployment_record["id"]]}},
            "sort": "EXPECTED_START_TIME_DESC",
            "limit": 1,
        }
        runs: list[dict[str, Any]] = self.ask("POST", "/flow_runs/filter", query)
        return runs[0] if runs else None

    def until_state(self, id: str, *states: str, saying: str = "") -> dict[str, Any]:
        """Wait until the flow run has one of the given states, and return the flow run.

        Args:
            id: Id of the flow run.
            states: Accepted names of the state.
            saying: Text that the message of the state must contain.
        """

        def find_flow_run() -> dict[str, Any] | None:
            run = self.flow_run(id)
            message = (run["state"] or {}).get("message") or ""
            if run["state_name"] in states and saying in message:
                return run
            # The state of an ended run does not change, so do not wait any longer for the state.
            assert run["state_type"] not in FINAL, run["state"]
            return None

        return wait_for(
            find_flow_run, f"{id} {' or '.join(states)} {saying!r}: {self.flow_run(id)['state']}"
        )

    def cancel(self, id: str) -> None:
        """Cancel a run that has not ended yet, and wait until it is cancelled."""
        if self.flow_run(id)["state_type"] not in FINAL:
            state = {"state": {"type": "CANCELLING"}, "force": False}
            self.ask("POST", f"/flow_runs/{id}/set_state", state)
            self.until_state(id, "Cancelled")

    def place(self, run: dict[str, Any]) -> Path:
        """Return the directory with the record and the logs of a run."""
        return self.home / "runs" / str(run["name"])

    def events(self, run: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the events of the run's first attempt.

        The list is empty if the event file does not exist.
        """
        path = self.place(run) / "attempt-01" / "events.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def muster(self, *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        """Run `muster` in a directory, without environment variables that name a Prefect server."""
        return _run_muster(self.home, *arguments, cwd=cwd)

    def set_nodes(self) -> None:
        """Set made-up nodes in the pool, so that runs can request GPUs on a host without GPUs."""
        pool = self.ask("GET", "/work_pools/gang")
        settings = PoolSettings(nodes=NODES)
        template = with_settings(pool["base_job_template"], settings)
        self.ask("PATCH", "/work_pools/gang", {"base_job_template": template})


@contextmanager
def stack_up(home: Path) -> Iterator[UiStack]:
    """Start a stack with `home` as its MUSTER_HOME, yield the stack, and stop it at the end.

    Raises:
        AssertionError: The stack does not start. The message is the output of `make up`.
    """
    with closing(PortsReserved(["server"])) as ports:
        port = str(ports.numbers["server"])
    try:
        # Port 0 chooses any free port; the default port 8265 may belong to another stack.
        up_result = _run_muster(home, "up", "--port", port, "--ray-dashboard", "0")
        assert up_result.returncode == 0, up_result.stdout + up_result.stderr
        stack = UiStack(home=home)
        stack.set_nodes()
        yield stack
    finally:
        _run_muster(home, "down", "--port", port)


def _run_muster(home: Path, *arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run `muster` with these arguments and this MUSTER_HOME, and return its result."""
    environment = {key: text for key, text in os.environ.items() if not key.startswith("PREFECT_")}
    return subprocess.run(
        (Path(sys.executable).with_name("muster"), *arguments),
        cwd=cwd,
        env={
            **environment,
            "MUSTER_HOME": str(home),
            "PREFECT_HOME": str(home / "prefect"),
            "MUSTER_GPUS": DEVICES,
        },
        capture_output=True,
        text=True,
        timeout=_COMMAND_WITHIN_S,
    )
