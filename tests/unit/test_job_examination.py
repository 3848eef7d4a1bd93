"""Examination of a hanging Ray job on its nodes, which have no code of Muster."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ray import cloudpickle

import tasks
from tasks.processes.guarded import Command
from tasks.processes.hang_report import (
    HangEvidence,
    HungProcess,
    compose_report,
    examine_carriers,
    nccl_status,
)
from tasks.processes.tree import read_environment
from tasks.ray.dashboard import NoAnswer
from tasks.ray.job import RayJob
from tasks.ray.submission import JobPlan
from tests.support.host_environment import wait_for
from tests.support.ray_jobs import make_job

HANGS = """
import threading
def waits_for_its_peers():
    print("up", flush=True)
    threading.Event().wait()
waits_for_its_peers()
"""
ON_A_NODE = """
import json, sys
sys.modules["tasks"] = None
from ray import cloudpickle
examine, given = cloudpickle.load(sys.stdin.buffer)
print(json.dumps(examine(**given)))
"""


@pytest.fixture
def hanging() -> Iterator[subprocess.Popen[str]]:
    """Start a hanging program with the environment variables of a Ray job of Muster.

    A second program has the variables of another run. Yield the process of the first program.
    """
    with (
        subprocess.Popen(
            [sys.executable, "-c", HANGS],
            env={"MUSTER_RUN_ID": "a-run", "API_KEY": "hunter2", "RANK": "5"},
            stdout=subprocess.PIPE,
            text=True,
        ) as process,
        subprocess.Popen(["sleep", "600"], env={"MUSTER_RUN_ID": "another"}) as other,
    ):
        assert process.stdout is not None and process.stdout.readline() == "up\n"
        yield process
        process.kill()
        other.kill()


def test_stacks_are_read_on_nodes_without_muster(
    hanging: subprocess.Popen[str],
) -> None:
    cloudpickle.register_pickle_by_value(tasks)
    try:
        given = {"wanted": {"MUSTER_RUN_ID": "a-run"}, "within_s": 30.0}
        sent = cloudpickle.dumps((examine_carriers, given))
    finally:
        cloudpickle.unregister_pickle_by_value(tasks)

    done = subprocess.run([sys.executable, "-I", "-c", ON_A_NODE], input=sent, capture_output=True)

    assert done.returncode == 0, done.stderr.decode()
    result = json.loads(done.stdout)
    text, [seen] = result["text"], result["processes"]
    assert "waits_for_its_peers" in text
    assert (seen["pid"], seen["rank"]) == (hanging.pid, "5")
    assert seen["frame"].startswith("waits_for_its_peers (<string>:5), in ")
    assert f"pid {hanging.pid}, child of" in text and "waits in: " in text
    assert "sleep 600" not in text and "hunter2" not in text


def process(
    pid: int, rank: str, frame: str, parent: int = 1, *, waits_for_children: bool = False
) -> HungProcess:
    return HungProcess(
        pid=pid,
        parent=parent,
        name="python",
        state="S (sleeping)",
        rank=rank,
        frame=frame,
        is_own=bool(frame),
        waits_for_children=waits_for_children,
    )


NODE = HangEvidence(
    machine="m",
    processes=[process(8, "", "main (b.py:1)"), process(7, "3", "all_reduce (a.py:7)")],
    text="py-spy: hunter2",
    nccl="rank 2 is behind",
    gpus="0: 100 % busy",
)


class Clusters:
    """Fake Ray dashboard that returns the address of Ray's control store (GCS).

    With `answers=False`, each request fails, as if the dashboard did not respond.
    """

    def __init__(self, *, answers: bool = True) -> None:
        self._answers = answers

    async def gcs_address(self) -> str:
        if not self._answers:
            raise NoAnswer("away")
        return "10.0.0.1:6379"


def job_of(tmp_path: Path, events: list[tuple[str, dict[str, Any]]], dashboard: Clusters) -> RayJob:
    command = Command(argv=("train",), env={}, cwd=tmp_path, log=tmp_path / "t.log", grace_s=1.0)
    plan = JobPlan(
        address="http://127.0.0.1:1",
        submission_id="r--a01",
        run_id="r",
        attempt=1,
        component="trainer",
        command=command,
        submission_file=tmp_path / "submission.json",
        mask=lambda text: text.replace("hunter2", "***"),
    )

    job = make_job(plan, lambda name, **fields: events.append((name, fields)))
    job._dashboard = SimpleNamespace(gcs_address=dashboard.gcs_address)  # type: ignore[assignment]
    job.is_pending = False
    return job


@pytest.mark.asyncio
async def test_examination_is_written_beside_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[tuple[str, dict[str, Any]]] = []

    async def examine(
        gcs_address: str, **_: object
    ) -> tuple[dict[str, HangEvidence], dict[str, str]]:
        return {"10.0.0.2": NODE}, {"10.0.0.3": f"no answer, by {gcs_address}"}

    monkeypatch.setattr("tasks.ray.job.examine", examine)

    job = job_of(tmp_path, events, Clusters())
    await job.examine()

    report = tmp_path / "trainer.hang.txt"
    [(name, fields)] = events
    assert (name, fields["path"]) == ("component.diagnosed", str(report))
    text = report.read_text()
    assert text.startswith("trainer (job r--a01) hangs, ")
    assert (
        "trainer, rank 3, node 10.0.0.2, pid 7 (python), S (sleeping): all_reduce (a.py:7)" in text
    )
    assert "py-spy: ***" in text and "node 10.0.0.3: no answer, by 10.0.0.1:6379" in text
    assert text.index("rank 3") < text.index("pid 8")
    assert "GPUs of node 10.0.0.2: 0: 100 % busy" in text and "rank 2 is behind" in text
    assert job.hangs_in.startswith("all_reduce (a.py:7) (rank 3, node 10.0.0.2, pid 7")


@pytest.mark.asyncio
async def test_unreachable_cluster_does_not_prevent_the_end_of_a_job(tmp_path: Path) -> None:
    events: list[tuple[str, dict[str, Any]]] = []

    await job_of(tmp_path, events, Clusters(answers=False)).examine()

    assert events == [] and not (tmp_path / "trainer.hang.txt").exists()


#: Program that answers like NCCL's RAS service, which reports the state of the ranks. The program
#: never answers its first client, as if the program were stopped.
RAS = """
import socket
listening = socket.create_server(("127.0.0.1", 0))
print(listening.getsockname()[1], flush=True)
silent, _ = listening.accept()
client, _ = listening.accept()
with client, client.makefile("rwb", buffering=0) as lines:
    for answer in ("SERVER PROTOCOL 2", "OK", "rank 2 is behind"):
        asked = lines.readline().decode().strip()
        lines.write(f"{answer}, asked {asked}\\n".encode())
"""


def test_nccl_is_asked_only_at_processes_of_the_job() -> None:
    with (
        subprocess.Popen([sys.executable, "-c", RAS], stdout=subprocess.PIPE, text=True) as ras,
        subprocess.Popen(["sleep", "600"]) as other,
    ):
        assert ras.stdout is not None
        address = f"localhost:{ras.stdout.readline().strip()}"
        env = {"NCCL_RAS_ADDR": address}
        with subprocess.Popen(["sleep", "600"], env=env) as rank:
            # The kernel shows the variables of a new program only some moments after its start.
            wait_for(lambda: "NCCL_RAS_ADDR" in read_environment(rank.pid), "the rank's variables")
            foreign = nccl_status([rank.pid, other.pid])
            status = nccl_status([rank.pid, ras.pid])
            rank.kill()
        other.kill()
        ras.kill()

    assert foreign == ""
    assert status == "rank 2 is behind, asked VERBOSE STATUS\n"


@pytest.mark.parametrize(
    "frames",
    [
        # Rank 0 waits in the backward pass for rank 1, which waits for its data loader.
        (
            "main (train.py:14), in _engine_run_backward (graph.py:979)",
            "load (data.py:5), in wait (threading.py:327)",
        ),
        ("main (train.py:14), in all_reduce (distributed_c10d.py:7)", "main (train.py:20)"),
        ("main (train.py:14), in barrier (distributed_c10d.py:7)", "read (data.py:9)"),
        # Rank 0 waits in `init_process_group` until rank 1 joins the process group.
        (
            "main (t.py:3), in _new_process_group_helper (torch/distributed/distributed_c10d.py:9)",
            "main (t.py:35)",
        ),
        (
            "main (t.py:36), in _create_c10d_store (torch/distributed/rendezvous.py:203)",
            "load (data.py:5), in wait (threading.py:327)",
        ),
        ("main (t.py:36), in synchronize (deepspeed/comm/torch.py:7)", "main (t.py:35)"),
        # Rank 0 waits in the constructor of `DistributedDataParallel`.
        (
            "main (t.py:36), in _verify_param_shape_across_processes "
            "(torch/distributed/utils.py:286)",
            "main (t.py:28)",
        ),
        (
            "main (t.py:36), in DistributedDataParallel._pre_forward "
            "(torch/nn/parallel/distributed.py:9)",
            "main (t.py:28)",
        ),
        # Rank 0 waits for its child process, which is rank 1 and still imports modules.
        ("<module> (t.py:13), in Popen.poll (multiprocessing/popen_fork.py:27)", "main (t.py:1)"),
    ],
)
def test_report_names_the_rank_that_does_not_wait_for_other_ranks(frames: tuple[str, str]) -> None:
    processes = [process(7 + rank, str(rank), frame) for rank, frame in enumerate(frames)]
    evidence = HangEvidence(machine="m", processes=processes, text="", nccl="", gpus="")

    hangs_in, _ = compose_report("trainer", "trainer", {"n1": evidence}, {})

    assert hangs_in.startswith(f"{frames[1]} (rank 1, ")


@pytest.mark.parametrize(
    ("frames", "named"),
    [
        # In the first case, the frames do not show which of the two ranks hangs, so both are named.
        (["receive (t.py:9)", "load (t.py:5)"], [0, 1]),
        (["receive (t.py:9)", "load (t.py:5)", "receive (t.py:9)"], [1]),
        (["a (t.py:1)", "b (t.py:2)", "c (t.py:3)", "d (t.py:4)"], [0]),
        (["receive (t.py:9)", ""], [0]),
    ],
)
def test_report_names_all_ranks_that_are_equally_probable_causes(
    frames: list[str], named: list[int]
) -> None:
    processes = [process(7 + rank, str(rank), frame) for rank, frame in enumerate(frames)]
    evidence = HangEvidence(machine="m", processes=processes, text="", nccl="", gpus="")

    hangs_in, _ = compose_report("trainer", "trainer", {"n1": evidence}, {})

    assert [place.partition(" (rank ")[0] for place in hangs_in.split(" or in ")] == [
        frames[rank] for rank in named
    ]


def test_report_names_a_child_before_the_parent_that_waits_for_its_children() -> None:
    processes = [
        process(7, "", "main (t.py:9), in select (selectors.py:415)", waits_for_children=True),
        process(8, "", "worker (t.py:3), in all_reduce (torch/distributed/d.py:7)", parent=7),
        process(9, "", "worker (t.py:5)", parent=7),
    ]
    evidence = HangEvidence(machine="m", processes=processes, text="", nccl="", gpus="")

    hangs_in, report = compose_report("trainer", "trainer", {"n1": evidence}, {})

    assert hangs_in.startswith("worker (t.py:5) (node n1, pid 9 ")
    assert report.index("pid 8") < report.index("pid 7")


def test_report_includes_a_child_that_the_fork_server_started_for_the_waiting_process() -> None:
    processes = [
        process(7, "1", "main (t.py:9), in select (selectors.py:415)", waits_for_children=True),
        # The server of the start method `forkserver` executes only library code.
        process(8, "1", "", parent=7),
        process(9, "1", "worker (t.py:5)", parent=8),
    ]
    evidence = HangEvidence(machine="m", processes=processes, text="", nccl="", gpus="")

    hangs_in, _ = compose_report("trainer", "trainer", {"n1": evidence}, {})

    assert hangs_in.startswith("worker (t.py:5) (rank 1, ") and " or in " not in hangs_in


def test_report_names_a_process_that_waits_for_another_program() -> None:
    # Rank 1 waits for a program such as nvidia-smi, which is no Python program.
    processes = [
        process(7, "0", "main (t.py:9), in all_reduce (torch/distributed/d.py:7)"),
        process(8, "1", "main (t.py:5), in wait (subprocess.py:7)", waits_for_children=True),
        process(9, "1", "", parent=8),
    ]
    evidence = HangEvidence(machine="m", processes=processes, text="", nccl="", gpus="")

    hangs_in, _ = compose_report("trainer", "trainer", {"n1": evidence}, {})

    assert hangs_in.startswith("main (t.py:5), in wait (subprocess.py:7) (rank 1, ")
