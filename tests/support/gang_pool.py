"""A gang queue of a test's own: server, work pool, deployment, workers, and its runs."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from subprocess import Popen
from typing import Any

import yaml

from tasks.processes.identity import host_name
from tasks.queue.grants import Grant
from tests.support.gang_evidence import PART, Asked, history_of
from tests.support.gang_referee import FINAL, History
from tests.support.ground import ROOT, Ground, Run, Server, in_checkout, until
from tests.support.prefect_api import ask

POOL = "gang"
NODES: Mapping[str, int] = {"n1": 16}


@dataclass(kw_only=True)
class Host(Ground):
    """A host whose programs get variables of its own."""

    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def env(self) -> dict[str, str]:
        return {**super().env, **self.variables}


def host(name: str, home: Path, api: str) -> Host:
    """One of a name of its own, on this machine."""
    return Host(home=home, api=api, variables={"MUSTER_HOST": name})


@dataclass(kw_only=True)
class GangPool:
    """One work pool of a server, and the host of its worker."""

    ground: Ground
    server: Server
    nodes: Mapping[str, int] = field(default_factory=lambda: dict(NODES))
    #: `gang`, or for a comparison `process`.
    type: str = "gang"
    name: str = POOL
    #: `rank[queue]`: which comes first.
    ranks: Mapping[str, int] = field(default_factory=lambda: {"urgent": 1, "default": 2, "idle": 3})
    #: By flow run id, in the order of submission.
    asked: dict[str, Asked] = field(default_factory=dict)
    _holders: list[str] = field(default_factory=list)

    def set_up(self, *, limit: int | None = 50, **settings: Any) -> None:
        """The pool with its queues, and a deployment of the flow `train` on it.

        Args:
            settings: of the pool, as `PoolSettings` has them.
        """
        self.ground.home.mkdir(parents=True, exist_ok=True)
        pool = {"name": self.name, "type": self.type, "concurrency_limit": limit}
        template = self._template(settings)
        self.ground.post("/work_pools/", **pool, base_job_template=template)
        # The pool's own queue has priority 1 until another one takes that.
        for queue, rank in sorted(self.ranks.items(), key=lambda item: item[1]):
            if queue != "default":
                self.ground.post(f"/work_pools/{self.name}/queues", name=queue, priority=rank)
        flow = self.ground.post("/flows/", name="train")["id"]
        here = {"prefect.deployments.steps.set_working_directory": {"directory": str(ROOT)}}
        deployment = {
            "name": self.name,
            "flow_id": flow,
            "work_pool_name": self.name,
            "entrypoint": "flows/train.py:train",
            "path": str(ROOT),
            "pull_steps": [here],
        }
        ask("POST", f"{self.ground.api}/deployments/", deployment)

    def change(self, **settings: Any) -> None:
        """Other settings, as an operator sets them."""
        self.patch(base_job_template=self._template(settings))

    def patch(self, **content: Any) -> None:
        """Change the work pool: `is_paused`, `concurrency_limit`."""
        ask("PATCH", f"{self.ground.api}/work_pools/{self.name}", content)

    def _template(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        if self.type == "process":
            from prefect.workers.process import ProcessWorker

            return ProcessWorker.get_default_base_job_template()
        from tasks.queue.settings import PoolSettings, TableNode, with_settings
        from tasks.queue.worker import GangWorker

        table = tuple(TableNode(name=name, gpus=gpus) for name, gpus in self.nodes.items())
        return with_settings(
            GangWorker.get_default_base_job_template(), PoolSettings(nodes=table, **settings)
        )

    def start_worker(
        self, name: str = "", *, on: Ground | None = None, type: str = ""
    ) -> Popen[bytes]:
        """Returns: once it takes runs.

        Args:
            name: by default the host's, by which `reconcile` tells whose runs are whose.
            on: its host; else the pool's own.
            type: of the worker, where it is another than the pool's.
        """
        ground = on or self.ground
        name = name or ground.env.get("MUSTER_HOST") or host_name()
        log = f"worker-{name}"
        before = ground.log(log).count("started!")
        worker = ground.start(*self.worker_arguments(name, type), log=log)

        def is_up() -> bool:
            assert worker.poll() is None, ground.log(log)
            return ground.log(log).count("started!") > before

        until(is_up, f"worker {name} takes runs")
        return worker

    def worker_arguments(self, name: str, type: str = "") -> list[str]:
        """Of Python, for a worker of the pool."""
        options = ["--pool", self.name, "--name", name, "--install-policy", "never"]
        return ["-m", "deployments.worker", *options, *(["--type", type] if type else [])]

    def spec(
        self, *, nodes: int = 1, gpus: int = 1, lasts_s: float = 1.0, fails: int = 0, **more: Any
    ) -> dict[str, Any]:
        """Of a run that holds so many GPUs for a while.

        Args:
            fails: so many attempts find that their GPUs are not there.
        """
        arguments = [str(self.lines), f"{lasts_s:.2f}", "${run.dir}", self.ground.api, str(fails)]
        command = [sys.executable, "-I", "-S", "-c", PART, *arguments]
        return {
            "name": "gang",
            "workload": "grpo",
            "gang": {"nodes": nodes, "gpus_per_node": gpus},
            "components": {"trainer": {"command": command, "stop": {"grace_s": 2}}},
            "retry": {"INSUFFICIENT_RESOURCES": {"delay_s": 1, "max_delay_s": 2}},
            **more,
        }

    def submit(
        self,
        spec: Mapping[str, Any],
        *,
        queue: str = "default",
        tags: Sequence[str] = (),
        key: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Run:
        """
        Args:
            key: of the same one, there is one run only, however often it is submitted.
            env: what its job has beyond the worker's.
        """
        deployment = self.ground.get(f"/deployments/name/train/{self.name}")["id"]
        flow_run = self.ground.post(
            f"/deployments/{deployment}/create_flow_run",
            parameters={"spec": dict(spec)},
            work_queue_name=queue,
            tags=list(tags),
            idempotency_key=key,
            job_variables={"env": dict(env)} if env else None,
            enforce_parameter_schema=False,
        )
        self._note(flow_run["id"], spec, self.ranks[queue])
        return Run(ground=self.ground, flow_run_id=flow_run["id"])

    def start(self, spec: Mapping[str, Any]) -> tuple[Popen[bytes], Run]:
        """Directly: `python -m flows.train`."""
        path = self.ground.home / f"spec-{len(self.asked)}.yaml"
        path.write_text(yaml.safe_dump(in_checkout(spec), sort_keys=False))
        seen = {run["id"] for run in self.ground.flow_runs()}
        process = self.ground.start("-m", "flows.train", str(path), log="train")

        def new() -> str:
            assert process.poll() is None, self.ground.log("train")
            return next((r["id"] for r in self.ground.flow_runs() if r["id"] not in seen), "")

        flow_run_id = until(new, "a flow run of the process")
        self._note(flow_run_id, spec, self.ranks["default"])
        return process, Run(ground=self.ground, flow_run_id=flow_run_id)

    def hold(self, nodes: Mapping[str, int], *, hours: float = 1, tags: Sequence[str] = ()) -> Run:
        """A run that has these GPUs, as far as the server can tell: it has no process."""
        name = f"holder-{'-'.join(nodes)}"
        gang = {"nodes": len(nodes), "gpus_per_node": max(nodes.values()), "hours": hours}
        # Else it would get a name of its own in every message.
        spec = {"name": name, "gang": gang}
        flow = self.ground.post("/flows/", name="train")["id"]
        flow_run = self.ground.post(
            "/flow_runs/",
            flow_id=flow,
            name=name,
            parameters={"spec": spec},
            tags=list(tags),
            labels=Grant(nodes=dict(nodes)).label(),
            state={"type": "RUNNING"},
        )
        self._holders.append(flow_run["id"])
        return Run(ground=self.ground, flow_run_id=flow_run["id"])

    def cancel(self, run: Run) -> str:
        """As the button of the UI does; the type of the state that it has then."""
        return self.set_state(run, "CANCELLING")

    def set_state(self, run: Run, type: str) -> str:
        path = f"/flow_runs/{run.flow_run_id}/set_state"
        return str(self.ground.post(path, state={"type": type})["state"]["type"])

    def empty(self) -> None:
        """No run of it is left, nor is any known.

        Raises: AssertionError, where a cancel is not carried out; the run is closed all the same,
            so that the next test has its GPUs.
        """
        # Before those that hold: nothing that waits shall start.
        for id_, run in self.flow_runs().items():
            if run["state_type"] not in FINAL:
                self.cancel(Run(ground=self.ground, flow_run_id=id_))
        for id_ in self._holders:
            self.set_state(Run(ground=self.ground, flow_run_id=id_), "COMPLETED")
        try:
            self.until_all_end(40)
        finally:
            for id_, run in self.flow_runs().items():
                if run["state_type"] not in FINAL:
                    self.set_state(Run(ground=self.ground, flow_run_id=id_), "CANCELLED")
            self._holders.clear()
            self.asked.clear()

    def note(self, flow_run_id: str, spec: Mapping[str, Any]) -> None:
        """One that was submitted by others, to the queue `default`."""
        self._note(flow_run_id, spec, self.ranks["default"])

    def _note(self, flow_run_id: str, spec: Mapping[str, Any], rank: int) -> None:
        gang = {"nodes": 0, "gpus_per_node": 0, **(spec.get("gang") or {})}
        self.asked[flow_run_id] = Asked(
            name=f"{spec.get('name')}/{len(self.asked)}",
            nodes=gang["nodes"],
            gpus=gang["gpus_per_node"],
            rank=rank,
            number=len(self.asked),
        )

    @property
    def lines(self) -> Path:
        """What the components have written."""
        return self.ground.home / "parts.jsonl"

    def noted(self, run: Run) -> list[dict[str, Any]]:
        """What the components of one run have written."""
        name = run.flow_run()["name"]
        return [line for line in self.all_noted() if line["run"] == name]

    def all_noted(self) -> list[dict[str, Any]]:
        if not self.lines.exists():
            return []
        return [json.loads(line) for line in self.lines.read_text().splitlines()]

    def flow_runs(self) -> dict[str, dict[str, Any]]:
        """All that were submitted, by id, as the server has them now."""
        ids = list(self.asked)
        found: dict[str, dict[str, Any]] = {}
        for start in range(0, len(ids), 100):
            some = {"id": {"any_": ids[start : start + 100]}}
            found |= {
                run["id"]: run for run in self.ground.post("/flow_runs/filter", flow_runs=some)
            }
        return found

    def until_all_end(self, within_s: float) -> None:
        """Raises: AssertionError, where some do not."""

        def open_ones() -> list[str]:
            runs = self.flow_runs().values()
            return [run["name"] for run in runs if run["state_type"] not in FINAL]

        deadline = time.monotonic() + within_s
        while left := open_ones():
            assert time.monotonic() < deadline, f"not ended within {within_s:g} s: {left}"
            time.sleep(1.0)

    def histories(self, may_end: Mapping[str, frozenset[str]] | None = None) -> list[History]:
        """The evidence on every run that was submitted.

        Args:
            may_end: how runs may end, by flow run id, where not as completed.
        """
        lines = self.all_noted()
        found = []
        for id_, run in self.flow_runs().items():
            states = self.ground.get(f"/flow_run_states/?flow_run_id={id_}")
            history = history_of(run, states, lines, self.asked[id_])
            ends = (may_end or {}).get(id_, history.may_end)
            found.append(replace(history, may_end=ends))
        return sorted(found, key=lambda history: history.place)


@contextmanager
def gang_pool(
    directory: Path,
    *,
    type: str = "gang",
    nodes: Mapping[str, int] = NODES,
    server: Server | None = None,
    **settings: Any,
) -> Iterator[GangPool]:
    """A pool on a server of its own, without a worker; nothing of it is left afterwards.

    Args:
        server: one that is not started yet; by default on SQLite and loopback.
    """
    server = server or Server(directory / "server")
    ground = host(next(iter(nodes), host_name()), directory / "home", server.api)
    pool = GangPool(ground=ground, type=type, server=server, nodes=nodes)
    try:
        server.start()
        pool.set_up(**settings)
        yield pool
    finally:
        pool.ground.clear()
        server.kill()


def left_of(pool: GangPool) -> list[str]:
    """What must not be there once all runs have ended: processes, and entries of the registry."""
    names = {run["name"] for run in pool.flow_runs().values()}
    wanted = {f"PREFECT__FLOW_RUN_ID={id_}".encode() for id_ in pool.asked}
    wanted |= {f"MUSTER_RUN_ID={name}".encode() for name in names}
    left = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            environ = (entry / "environ").read_bytes() if entry.name.isdigit() else b""
            if of_runs := wanted.intersection(environ.split(b"\0")):
                left.append(f"process {entry.name} of {of_runs}")
    with suppress(FileNotFoundError):
        for entry in (pool.ground.home / "live").iterdir():
            left.append(f"in the registry: {entry.name}")
    return left
