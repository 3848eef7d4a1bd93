"""The stack whose UI is looked at: as `make up` starts it, in a home and on ports of its own."""

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
from tests.support.ground import FINAL, until
from tests.support.prefect_api import ask

ROOT = Path(__file__).resolve().parents[2]
#: Far longer than anything here takes on a machine that does nothing else.
WITHIN_S = 180.0
_COMMAND_WITHIN_S = 600.0
#: The nodes of the pool, for gangs: this host, and devices that stand in for its GPUs.
NODES = (TableNode(name=host_name(), gpus=2),)
DEVICES = "0-1"


@dataclass(frozen=True, slots=True, kw_only=True)
class UiStack:
    """A stack that is up."""

    #: Its MUSTER_HOME.
    home: Path

    @property
    def url(self) -> str:
        text = (self.home / "stack" / "stack.json").read_bytes()
        return Stack.model_validate_json(text).ui_url

    def ask(self, method: str, path: str, content: Any = None) -> Any:
        """Ask its Prefect server."""
        return ask(method, f"{self.url}/api{path}", content, password=self.password)

    @property
    def password(self) -> str:
        return (self.home / "password").read_text().strip()

    def run(
        self, spec: dict[str, Any] | None = None, *, deployment: str = "train/quickstart"
    ) -> str:
        """Queue a run, as the form does; the flow run's id.

        Args:
            spec: in place of the deployment's own.
        """
        found = self.ask("GET", f"/deployments/name/{deployment}")
        parameters = {} if spec is None else {"spec": spec}
        order = {"parameters": parameters, "state": {"type": "SCHEDULED"}}
        made = self.ask("POST", f"/deployments/{found['id']}/create_flow_run", order)
        return str(made["id"])

    def flow_run(self, id: str) -> dict[str, Any]:
        found: dict[str, Any] = self.ask("GET", f"/flow_runs/{id}")
        return found

    def newest_run(self, deployment: str) -> dict[str, Any] | None:
        found = self.ask("GET", f"/deployments/name/{deployment}")
        query = {
            "flow_runs": {"deployment_id": {"any_": [found["id"]]}},
            "sort": "EXPECTED_START_TIME_DESC",
            "limit": 1,
        }
        runs: list[dict[str, Any]] = self.ask("POST", "/flow_runs/filter", query)
        return runs[0] if runs else None

    def until_state(self, id: str, *states: str, saying: str = "") -> dict[str, Any]:
        """The flow run, once its state is called so and its message holds that text."""

        def found() -> dict[str, Any] | None:
            run = self.flow_run(id)
            said = (run["state"] or {}).get("message") or ""
            if run["state_name"] in states and saying in said:
                return run
            # It would be waited for in vain.
            assert run["state_type"] not in FINAL, run["state"]
            return None

        return until(found, f"{id} {' or '.join(states)} {saying!r}: {self.flow_run(id)['state']}")

    def cancel(self, id: str) -> None:
        """End a run, and wait for that."""
        if self.flow_run(id)["state_type"] not in FINAL:
            state = {"state": {"type": "CANCELLING"}, "force": False}
            self.ask("POST", f"/flow_runs/{id}/set_state", state)
            self.until_state(id, "Cancelled")

    def place(self, run: dict[str, Any]) -> Path:
        """Where the files of a run are."""
        return self.home / "runs" / str(run["name"])

    def events(self, run: dict[str, Any]) -> list[dict[str, Any]]:
        path = self.place(run) / "attempt-01" / "events.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def muster(self, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        """`muster` as somebody types it in a folder of his own, who has set no server."""
        return _command(self.home, *words, cwd=cwd)

    def set_nodes(self) -> None:
        """Give the pool nodes, so that gangs are queued without a GPU."""
        pool = self.ask("GET", "/work_pools/gang")
        settings = PoolSettings(nodes=NODES)
        template = with_settings(pool["base_job_template"], settings)
        self.ask("PATCH", "/work_pools/gang", {"base_job_template": template})


@contextmanager
def stack_up(home: Path) -> Iterator[UiStack]:
    """A stack in this home, taken down at the end.

    Raises: AssertionError, with what `make up` said, where it does not come up.
    """
    with closing(PortsReserved(["server"])) as ports:
        port = str(ports.numbers["server"])
    try:
        # 8265 is left to a stack of the user's.
        done = _command(home, "up", "--port", port, "--ray-dashboard", "0")
        assert done.returncode == 0, done.stdout + done.stderr
        stack = UiStack(home=home)
        stack.set_nodes()
        yield stack
    finally:
        _command(home, "down", "--port", port)


def _command(home: Path, *words: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    mine = {key: text for key, text in os.environ.items() if not key.startswith("PREFECT_")}
    return subprocess.run(
        (Path(sys.executable).with_name("muster"), *words),
        cwd=cwd,
        env={
            **mine,
            "MUSTER_HOME": str(home),
            "PREFECT_HOME": str(home / "prefect"),
            "MUSTER_GPUS": DEVICES,
        },
        capture_output=True,
        text=True,
        timeout=_COMMAND_WITHIN_S,
    )
