"""A gang queue of a test's own: server, work pool, deployment, workers; and evidence on its runs.

The components of its runs write down themselves when they ran, and on which nodes their run was by
then, so that the evidence for `gang_referee` does not come from the queue.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from subprocess import Popen
from typing import Any

import yaml

from tasks.supervise.identity import host_name
from tests.support.gang_referee import FINAL, History, Part, State
from tests.support.ground import ROOT, Ground, Run, Server, until
from tests.support.prefect_api import ask

POOL = "gang"
NODES: Mapping[str, int] = {"n1": 8, "n2": 8}
#: Holds its gang for some seconds: `FILE SECONDS RUN-DIRECTORY API FAILS`. The first so many
#: attempts find no GPUs. Everything is appended to FILE at once, so that no two lines mix.
PART = """
import json, os, signal, socket, sys, time
began = time.time()
file, lasts_s, directory, api, fails = sys.argv[1:]
attempt = int(os.environ["MUSTER_ATTEMPT"])

def note(what, at, **more):
    line = {"run": os.environ["MUSTER_RUN_ID"], "attempt": attempt, "pid": os.getpid(),
            "what": what, "at": at, **more}
    out = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(out, (json.dumps(line) + chr(10)).encode())
    os.close(out)

def leave(code):
    note("end", time.time())
    os._exit(code)

def placed():
    with open(os.path.join(directory, "run.json")) as record:
        flow_run = json.load(record)["flow_run_id"]
    host, _, port = api.removeprefix("http://").removesuffix("/api").partition(":")
    with socket.create_connection((host, int(port)), 5) as server:
        server.settimeout(5)
        server.sendall(f"GET /api/flow_runs/{flow_run} HTTP/1.0\\r\\n\\r\\n".encode())
        answer = b"".join(iter(lambda: server.recv(65536), b""))
    return json.loads(answer.partition(b"\\r\\n\\r\\n")[2])["labels"].get("muster.gang.nodes", "")

signal.signal(signal.SIGTERM, lambda *_: leave(0))
note("start", began)
print("up", flush=True)
asked = False
while True:
    if not asked:
        try:
            note("placed", time.time(), nodes=placed())
            asked = True
        except (OSError, ValueError, KeyError):
            pass
    if time.time() - began >= float(lasts_s):
        break
    time.sleep(0.05 if asked else 0.2)
if attempt <= int(fails):
    print("Total available GPUs 0 is less than total desired GPUs 16", flush=True)
    leave(1)
leave(0)
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What a run was submitted with."""

    name: str
    nodes: int
    gpus: int
    #: Of its queue: the lower comes first.
    rank: int
    number: int


@dataclass(kw_only=True)
class Host(Ground):
    """A host whose programs get variables of its own."""

    variables: Mapping[str, str] = field(default_factory=dict)

    @property
    def env(self) -> dict[str, str]:
        return {**super().env, **self.variables}


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
        from tasks.gang.settings import PoolSettings, TableNode, with_settings
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
        name = name or host_name()
        ground, log = on or self.ground, f"worker-{name}"
        before = ground.log(log).count("started!")
        options = ["--pool", self.name, "--name", name, "--install-policy", "never"]
        if type:
            options += ["--type", type]
        worker = ground.start("-m", "deployments.worker", *options, log=log)

        def is_up() -> bool:
            assert worker.poll() is None, ground.log(log)
            return ground.log(log).count("started!") > before

        until(is_up, f"worker {name} takes runs")
        return worker

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
        self, spec: Mapping[str, Any], *, queue: str = "default", tags: Sequence[str] = ()
    ) -> Run:
        deployment = self.ground.get(f"/deployments/name/train/{self.name}")["id"]
        flow_run = self.ground.post(
            f"/deployments/{deployment}/create_flow_run",
            parameters={"spec": dict(spec)},
            work_queue_name=queue,
            tags=list(tags),
            enforce_parameter_schema=False,
        )
        self._note(flow_run["id"], spec, self.ranks[queue])
        return Run(ground=self.ground, flow_run_id=flow_run["id"])

    def start(self, spec: Mapping[str, Any]) -> tuple[Popen[bytes], Run]:
        """Directly: `python -m flows.train`."""
        path = self.ground.home / f"spec-{len(self.asked)}.yaml"
        path.write_text(yaml.safe_dump(dict(spec), sort_keys=False))
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
        held = ",".join(f"{node}:{gpus}" for node, gpus in nodes.items())
        flow_run = self.ground.post(
            "/flow_runs/",
            flow_id=flow,
            name=name,
            parameters={"spec": spec},
            tags=list(tags),
            labels={"muster.gang.nodes": held},
            state={"type": "RUNNING"},
        )
        self._holders.append(flow_run["id"])
        return Run(ground=self.ground, flow_run_id=flow_run["id"])

    def cancel(self, run: Run) -> None:
        """As the button of the UI does."""
        self.set_state(run, "CANCELLING")

    def set_state(self, run: Run, type: str) -> None:
        self.ground.post(f"/flow_runs/{run.flow_run_id}/set_state", state={"type": type})

    def empty(self) -> None:
        """No run of it is left, nor is any known."""
        for id_ in self._holders:
            self.set_state(Run(ground=self.ground, flow_run_id=id_), "COMPLETED")
        for id_, run in self.flow_runs().items():
            if run["state_type"] not in FINAL:
                self.cancel(Run(ground=self.ground, flow_run_id=id_))
        self.until_all_end(60)
        self._holders.clear()
        self.asked.clear()

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
        return [line for line in self._lines() if line["run"] == name]

    def _lines(self) -> list[dict[str, Any]]:
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
        lines = self._lines()
        found = []
        for id_, run in self.flow_runs().items():
            asked = self.asked[id_]
            states = self.ground.get(f"/flow_run_states/?flow_run_id={id_}")
            found.append(
                History(
                    name=f"{asked.name} ({id_[:8]})",
                    nodes=asked.nodes,
                    gpus=asked.gpus,
                    place=(asked.rank, asked.number),
                    states=sorted(map(_state, states), key=lambda state: state.at),
                    parts=_parts([line for line in lines if line["run"] == run["name"]]),
                    placed=nodes_of(str(run["labels"].get("muster.gang.nodes") or "")),
                    may_end=(may_end or {}).get(id_, frozenset({"COMPLETED"})),
                )
            )
        return sorted(found, key=lambda history: history.place)


def _state(state: Mapping[str, Any]) -> State:
    due = (state.get("state_details") or {}).get("scheduled_time")
    return State(
        at=_seconds(state["timestamp"]),
        type=state["type"],
        name=state["name"] or "",
        due=_seconds(due) if due else 0.0,
    )


def _seconds(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def nodes_of(label: str) -> dict[str, int] | None:
    """`gpus[node]` of the label `n1:8,n2:8`; None where it names none."""
    nodes = {}
    for part in label.split(","):
        name, _, gpus = part.rpartition(":")
        if name:
            nodes[name] = int(gpus)
    return nodes or None


def _parts(lines: Sequence[Mapping[str, Any]]) -> list[Part]:
    lives: dict[tuple[int, int], dict[str, Mapping[str, Any]]] = {}
    for line in lines:
        lives.setdefault((line["attempt"], line["pid"]), {})[line["what"]] = line
    return [
        Part(
            attempt=attempt,
            pid=pid,
            began=life["start"]["at"],
            ended=life["end"]["at"] if "end" in life else None,
            nodes=nodes_of(life["placed"]["nodes"]) if "placed" in life else None,
        )
        for (attempt, pid), life in lives.items()
    ]


@contextmanager
def gang_pool(directory: Path, *, type: str = "gang", **settings: Any) -> Iterator[GangPool]:
    """A pool on a server of its own, without a worker; nothing of it is left afterwards."""
    server = Server(directory / "server")
    ground = Ground(home=directory / "home", api=server.api)
    pool = GangPool(ground=ground, type=type, server=server)
    try:
        server.start()
        pool.set_up(**settings)
        yield pool
    finally:
        pool.ground.clear()
        server.kill()


def left_of(pool: GangPool) -> list[str]:
    """What must not be there once all runs have ended: processes, and entries of the registry."""
    left = [
        f"process {pid} of {run.flow_run_id}"
        for run in (Run(ground=pool.ground, flow_run_id=id_) for id_ in pool.asked)
        for pid in run.processes()
    ]
    live = pool.ground.home / "live"
    with suppress(FileNotFoundError):
        left += [f"in the registry: {entry.name}" for entry in live.iterdir()]
    return left
