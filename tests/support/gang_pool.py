"""A gang queue for one test: Prefect server, work pool, deployment, workers, and runs."""

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
from tests.support.gang_evidence import COMPONENT_PROGRAM, SubmittedDemand, make_history
from tests.support.gang_referee import FINAL, History
from tests.support.host_environment import (
    ROOT,
    HostEnvironment,
    Run,
    Server,
    wait_for,
    with_absolute_cwd,
)
from tests.support.prefect_api import send_request

#: Name of the work pool.
POOL = "gang"
#: Default nodes of a pool: mapping from the name of a node to its number of GPUs.
NODES: Mapping[str, int] = {"n1": 16}


@dataclass(kw_only=True)
class Host(HostEnvironment):
    """A simulated host (`HostEnvironment`) whose programs get further environment variables."""

    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def env(self) -> dict[str, str]:
        """Environment variables of all programs of the host."""
        return {**super().env, **self.variables}


def host(name: str, home: Path, api: str) -> Host:
    """Return a simulated host: its programs run on this machine, but have their own host name.

    Args:
        name: Host name that Muster uses for the host.
        home: MUSTER_HOME of the host.
        api: URL of the Prefect server's API.
    """
    return Host(home=home, api=api, variables={"MUSTER_HOST": name})


@dataclass(kw_only=True)
class GangPool:
    """A work pool on a Prefect server, with the host of its worker and the submitted runs."""

    #: Simulated host on which the worker of the pool runs.
    host_env: HostEnvironment
    server: Server
    #: Mapping from the name of each node of the pool to its number of GPUs.
    nodes: Mapping[str, int] = field(default_factory=lambda: dict(NODES))
    #: Type of the work pool: `gang`, or `process` for a comparison with Prefect's own pool.
    type: str = "gang"
    #: Name of the work pool.
    name: str = POOL
    #: Priority of each work queue. The queue with the lowest number is served first.
    ranks: Mapping[str, int] = field(default_factory=lambda: {"urgent": 1, "default": 2, "idle": 3})
    #: Mapping from the flow run id of each submitted run to its requested GPUs, in the order of
    #: submission.
    asked: dict[str, SubmittedDemand] = field(default_factory=dict)
    #: Flow run ids of the runs that the method `hold` created. These runs hold GPUs, but have no
    #: process.
    _holders: list[str] = field(default_factory=list)

    def set_up(self, *, limit: int | None = 50, **settings: Any) -> None:
        """Create the work pool, its work queues, and a deployment of the flow `train`.

        Args:
            limit: Concurrency limit of the work pool. None for no limit.
            **settings: Settings of the work pool: fields of `PoolSettings`.
        """
        self.host_env.home.mkdir(parents=True, exist_ok=True)
        pool = {"name": self.name, "type": self.type, "concurrency_limit": limit}
        template = self._template(settings)
        self.host_env.post("/work_pools/", **pool, base_job_template=template)
        # The work pool already has a queue `default`, with priority 1. If a new queue gets the
        # priority of `default`, the server moves `default` to the next priority. So create the new
        # queues in the order of their priorities. Then the server moves no queue except `default`.
        for queue, rank in sorted(self.ranks.items(), key=lambda item: item[1]):
            if queue != "default":
                self.host_env.post(f"/work_pools/{self.name}/queues", name=queue, priority=rank)
        self.create_deployment(self.name)

    def create_deployment(self, name: str) -> None:
        """Create a deployment of the flow `train`, or attach an existing one to the work pool.

        Args:
            name: Name of the deployment.
        """
        flow = self.host_env.post("/flows/", name="train")["id"]
        here = {"prefect.deployments.steps.set_working_directory": {"directory": str(ROOT)}}
        deployment = {
            "name": name,
            "flow_id": flow,
            "work_pool_name": self.name,
            "entrypoint": "flows/train.py:train",
            "path": str(ROOT),
            "pull_steps": [here],
        }
        send_request("POST", f"{self.host_env.api}/deployments/", deployment)

    def change(self, **settings: Any) -> None:
        """Change settings of the work pool. Argument names are fields of `PoolSettings`."""
        self.patch(base_job_template=self._template(settings))

    def patch(self, **content: Any) -> None:
        """Change fields of the work pool on the server, for example `concurrency_limit`."""
        send_request("PATCH", f"{self.host_env.api}/work_pools/{self.name}", content)

    def _template(self, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Return the base job template of a work pool with these settings."""
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
        self, name: str = "", *, on: HostEnvironment | None = None, type: str = ""
    ) -> Popen[bytes]:
        """Start a worker of the work pool, and wait until it accepts runs.

        Args:
            name: Name of the worker. If empty, the worker has the name of its host.
            on: Host of the worker. If None, the host of the pool.
            type: Type of the worker. If empty, the type of the work pool.
        """
        host_env = on or self.host_env
        name = name or host_env.env.get("MUSTER_HOST") or host_name()
        log = f"worker-{name}"
        earlier_starts = host_env.log(log).count("started!")
        worker = host_env.start(*self.worker_arguments(name, type), log=log)

        def is_up() -> bool:
            assert worker.poll() is None, host_env.log(log)
            return host_env.log(log).count("started!") > earlier_starts

        wait_for(is_up, f"worker {name} takes runs")
        return worker

    def worker_arguments(self, name: str, type: str = "") -> list[str]:
        """Return the arguments with which the Python interpreter starts a worker of the pool."""
        options = ["--pool", self.name, "--name", name, "--install-policy", "never"]
        return ["-m", "deployments.worker", *options, *(["--type", type] if type else [])]

    def spec(
        self, *, nodes: int = 1, gpus: int = 1, lasts_s: float = 1.0, fails: int = 0, **keys: Any
    ) -> dict[str, Any]:
        """Return the spec of a run that holds GPUs for a while and then succeeds.

        Args:
            nodes: Number of nodes.
            gpus: Number of GPUs on each node.
            lasts_s: Seconds until the run gives the GPUs back.
            fails: Number of attempts that fail because of missing GPUs, before an attempt succeeds.
            **keys: Further keys of the spec.
        """
        arguments = [str(self.lines), f"{lasts_s:.2f}", "${run.dir}", self.host_env.api, str(fails)]
        command = [sys.executable, "-I", "-S", "-c", COMPONENT_PROGRAM, *arguments]
        return {
            "name": "gang",
            "workload": "grpo",
            "gang": {"nodes": nodes, "gpus_per_node": gpus},
            "components": {"trainer": {"command": command, "stop": {"grace_s": 2}}},
            "retry": {"INSUFFICIENT_RESOURCES": {"delay_s": 1, "max_delay_s": 2}},
            **keys,
        }

    def submit(
        self,
        spec: Mapping[str, Any],
        *,
        queue: str = "default",
        tags: Sequence[str] = (),
        key: str | None = None,
        env: Mapping[str, str] | None = None,
        deployment: str = "",
    ) -> Run:
        """Submit a run to the work pool, and return the run.

        Args:
            spec: Spec of the run.
            queue: Name of the work queue.
            tags: Tags of the flow run.
            key: Idempotency key: submissions with the same key create only one run.
            env: Environment variables of the run's process, in addition to those of the worker.
            deployment: Name of the deployment. If empty, the deployment that `set_up` creates.
        """
        name = deployment or self.name
        deployment_id = self.host_env.get(f"/deployments/name/train/{name}")["id"]
        flow_run = self.host_env.post(
            f"/deployments/{deployment_id}/create_flow_run",
            parameters={"spec": dict(spec)},
            work_queue_name=queue,
            tags=list(tags),
            idempotency_key=key,
            job_variables={"env": dict(env)} if env else None,
            enforce_parameter_schema=False,
        )
        self._note(flow_run["id"], spec, self.ranks[queue])
        return Run(host_env=self.host_env, flow_run_id=flow_run["id"])

    def start(self, spec: Mapping[str, Any]) -> tuple[Popen[bytes], Run]:
        """Start a run with `python -m flows.train`, without a worker.

        Return the process of the run, and the run.
        """
        path = self.host_env.home / f"spec-{len(self.asked)}.yaml"
        path.write_text(yaml.safe_dump(with_absolute_cwd(spec), sort_keys=False))
        earlier_ids = {run["id"] for run in self.host_env.flow_runs()}
        process = self.host_env.start("-m", "flows.train", str(path), log="train")

        def find_new_id() -> str:
            assert process.poll() is None, self.host_env.log("train")
            ids = (run["id"] for run in self.host_env.flow_runs())
            return next((id_ for id_ in ids if id_ not in earlier_ids), "")

        flow_run_id = wait_for(find_new_id, "a flow run of the process")
        self._note(flow_run_id, spec, self.ranks["default"])
        return process, Run(host_env=self.host_env, flow_run_id=flow_run_id)

    def hold(self, nodes: Mapping[str, int], *, hours: float = 1, tags: Sequence[str] = ()) -> Run:
        """Create a flow run that holds GPUs. No process belongs to this flow run.

        Args:
            nodes: Mapping from the name of a node to the number of GPUs to hold.
            hours: Expected duration of the run, in hours.
            tags: Tags of the flow run.
        """
        name = f"holder-{'-'.join(nodes)}"
        gang = {"nodes": len(nodes), "gpus_per_node": max(nodes.values()), "hours": hours}
        # The spec needs the name, too: Muster's messages name a run by the name in its spec.
        spec = {"name": name, "gang": gang}
        flow = self.host_env.post("/flows/", name="train")["id"]
        flow_run = self.host_env.post(
            "/flow_runs/",
            flow_id=flow,
            name=name,
            parameters={"spec": spec},
            tags=list(tags),
            labels=Grant(nodes=dict(nodes)).label(),
            state={"type": "RUNNING"},
        )
        self._holders.append(flow_run["id"])
        return Run(host_env=self.host_env, flow_run_id=flow_run["id"])

    def cancel(self, run: Run) -> str:
        """Cancel a run as the Prefect UI does, and return the type of its new state."""
        return self.set_state(run, "CANCELLING")

    def set_state(self, run: Run, type: str) -> str:
        """Ask the Prefect server to set a state type for a run; return the resulting state type."""
        path = f"/flow_runs/{run.flow_run_id}/set_state"
        return str(self.host_env.post(path, state={"type": type})["state"]["type"])

    def cancel_all(self) -> None:
        """Cancel all runs, wait for their ends, and remove them from this object.

        Raises:
            AssertionError: A run did not end within 40 s after its cancellation. In this case, the
                method first sets the run's state on the server to CANCELLED, so that the next test
                can use the GPUs.
        """
        # First cancel the queued runs. Otherwise the queued runs would start as soon as GPUs become
        # free.
        for id_, run in self.flow_runs().items():
            if run["state_type"] not in FINAL:
                self.cancel(Run(host_env=self.host_env, flow_run_id=id_))
        for id_ in self._holders:
            self.set_state(Run(host_env=self.host_env, flow_run_id=id_), "COMPLETED")
        try:
            self.wait_until_all_end(40)
        finally:
            for id_, run in self.flow_runs().items():
                if run["state_type"] not in FINAL:
                    self.set_state(Run(host_env=self.host_env, flow_run_id=id_), "CANCELLED")
            self._holders.clear()
            self.asked.clear()

    def record_run(self, flow_run_id: str, spec: Mapping[str, Any]) -> None:
        """Record the GPUs that a run requests, after another program has submitted the run.

        Args:
            flow_run_id: Id of the flow run, in the queue `default`.
            spec: Spec of the run.
        """
        self._note(flow_run_id, spec, self.ranks["default"])

    def _note(self, flow_run_id: str, spec: Mapping[str, Any], rank: int) -> None:
        gang = {"nodes": 0, "gpus_per_node": 0, **(spec.get("gang") or {})}
        self.asked[flow_run_id] = SubmittedDemand(
            name=f"{spec.get('name')}/{len(self.asked)}",
            nodes=gang["nodes"],
            gpus=gang["gpus_per_node"],
            rank=rank,
            number=len(self.asked),
        )

    @property
    def lines(self) -> Path:
        """File with the lines that the components of all runs write."""
        return self.host_env.home / "parts.jsonl"

    def read_lines_of(self, run: Run) -> list[dict[str, Any]]:
        """Return the lines of `parts.jsonl` that the components of a run have written."""
        name = run.flow_run()["name"]
        return [line for line in self.read_lines() if line["run"] == name]

    def read_lines(self) -> list[dict[str, Any]]:
        """Return the lines of `parts.jsonl` that the components of all runs have written."""
        if not self.lines.exists():
            return []
        return [json.loads(line) for line in self.lines.read_text().splitlines()]

    def flow_runs(self) -> dict[str, dict[str, Any]]:
        """Read all submitted runs from the server; return a mapping from id to flow run."""
        ids = list(self.asked)
        flow_runs: dict[str, dict[str, Any]] = {}
        for start in range(0, len(ids), 100):
            page = self.host_env.post(
                "/flow_runs/filter", flow_runs={"id": {"any_": ids[start : start + 100]}}
            )
            flow_runs |= {run["id"]: run for run in page}
        return flow_runs

    def wait_until_all_end(self, within_s: float) -> None:
        """Wait until all submitted runs have ended.

        Raises:
            AssertionError: A run did not end within `within_s` seconds.
        """

        def list_unfinished() -> list[str]:
            runs = self.flow_runs().values()
            return [run["name"] for run in runs if run["state_type"] not in FINAL]

        deadline = time.monotonic() + within_s
        while unfinished := list_unfinished():
            assert time.monotonic() < deadline, f"not ended within {within_s:g} s: {unfinished}"
            time.sleep(1.0)

    def histories(self, may_end: Mapping[str, frozenset[str]] | None = None) -> list[History]:
        """Return the history of each submitted run, in the order of the queue.

        Args:
            may_end: Mapping from a flow run id to the state types with which this run may end. All
                other runs must end as COMPLETED.
        """
        lines = self.read_lines()
        histories = []
        for id_, run in self.flow_runs().items():
            states = self.host_env.get(f"/flow_run_states/?flow_run_id={id_}")
            history = make_history(run, states, lines, self.asked[id_])
            ends = (may_end or {}).get(id_, history.may_end)
            histories.append(replace(history, may_end=ends))
        return sorted(histories, key=lambda history: history.place)


@contextmanager
def gang_pool(
    directory: Path,
    *,
    type: str = "gang",
    nodes: Mapping[str, int] = NODES,
    server: Server | None = None,
    **settings: Any,
) -> Iterator[GangPool]:
    """Run a Prefect server with one work pool while the context is open. Start no worker.

    After the context, the server and all programs of the pool have ended.

    Args:
        directory: Directory for the files of the server and of the host.
        type: Type of the work pool.
        nodes: Mapping from the name of a node to its number of GPUs.
        server: Prefect server, which is not started yet. If None, a server with SQLite on
            127.0.0.1.
        **settings: Arguments of `GangPool.set_up`.
    """
    server = server or Server(directory / "server")
    host_env = host(next(iter(nodes), host_name()), directory / "home", server.api)
    pool = GangPool(host_env=host_env, type=type, server=server, nodes=nodes)
    try:
        server.start()
        pool.set_up(**settings)
        yield pool
    finally:
        pool.host_env.clear()
        server.kill()


def list_leftovers(pool: GangPool) -> list[str]:
    """Return descriptions of leftover processes and registry entries of the runs of a pool.

    Call this function when all runs have ended. The list is then empty if Muster cleaned up
    everything.
    """
    names = {run["name"] for run in pool.flow_runs().values()}
    variables = {f"PREFECT__FLOW_RUN_ID={id_}".encode() for id_ in pool.asked}
    variables |= {f"MUSTER_RUN_ID={name}".encode() for name in names}

    leftovers = []
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            environ = (entry / "environ").read_bytes() if entry.name.isdigit() else b""
            if of_runs := variables.intersection(environ.split(b"\0")):
                leftovers.append(f"process {entry.name} of {of_runs}")
    with suppress(FileNotFoundError):
        for entry in (pool.host_env.home / "live").iterdir():
            leftovers.append(f"in the registry: {entry.name}")
    return leftovers
