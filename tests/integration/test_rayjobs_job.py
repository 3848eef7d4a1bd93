"""A Ray job on a real cluster: what its driver gets, how it ends, and that nothing is left."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from tasks.ray.dashboard import Dashboard
from tasks.ray.job import stop_submission
from tasks.ray.submission import SubmissionFile
from tasks.record.outcome import GivenUp
from tasks.spec.failure_kinds import FailureKind
from tests.support.ray_cluster import RayCluster, free_gpus
from tests.support.ray_jobs import WITHIN_S, Jobs, kill, until

pytestmark = [pytest.mark.asyncio, pytest.mark.slow]

#: A tree that has left its session in each way: a session of its own, and a daemon.
_TREE = "setsid sleep 3600 & (setsid sh -c 'sleep 3600 & wait' &) ;"


@pytest_asyncio.fixture
async def jobs(ray_cluster: RayCluster, tmp_path: Path, muster_home: Path) -> AsyncIterator[Jobs]:
    jobs = Jobs(ray_cluster.address, tmp_path)
    yield jobs
    await jobs.clear()
    assert jobs.marked() == []


#: A driver that waits for ever for an actor, which does, too, on another node.
_HANGS = """
import ray, threading
ray.init(logging_level="ERROR")
@ray.remote(num_gpus=1, runtime_env={"env_vars": {"RANK": "3"}})
class Rank:
    def stuck_in_all_reduce(self):
        print("up", flush=True)
        threading.Event().wait()
def waits_for_its_ranks():
    ray.get(Rank.remote().stuck_in_all_reduce.remote())
waits_for_its_ranks()
"""


@pytest.mark.thorough
async def test_a_job_that_hangs_leaves_the_stacks_of_its_processes(jobs: Jobs) -> None:
    plan, job = await jobs.launched("python", "-c", _HANGS)
    await until(lambda: "up" in plan.command.log.read_text())

    await job.examine()

    report = plan.command.log.with_name("trainer.hang.txt").read_text()
    named = report.split("\n\n")[1]
    first, second, *_ = named.splitlines()
    assert ": waits_for_its_ranks (" in second, named
    assert first.startswith("trainer, rank 3, node "), named
    assert ": Rank.stuck_in_all_reduce (" in first, named
    assert job.hangs_in.startswith("Rank.stuck_in_all_reduce ("), job.hangs_in
    assert "component.diagnosed" in [name for name, _ in jobs.told.events]
    assert await job.end() == ()


async def test_the_driver_gets_its_words_its_environment_and_the_programs_of_ray(
    jobs: Jobs, ray_cluster: RayCluster
) -> None:
    program = (
        "import json, os, shutil, sys; print(json.dumps({'argv': sys.argv[1:], "
        "'env': dict(os.environ), 'files': os.listdir(), 'ray': __import__('ray').__file__}))"
    )
    words = ["a b", "$HOME", "it's", '"', "", "*", "\\n", "é"]
    (jobs.working_dir / "train.py").write_text("")
    (jobs.working_dir / "runpy.py").write_text("raise SystemExit('hides the standard library')")
    (jobs.working_dir / "data.bin").write_text("")
    (jobs.working_dir / ".git").mkdir()
    (jobs.working_dir / "tests").mkdir()
    (jobs.working_dir / "tests" / "test_a.py").write_text("")

    plan, exit_ = await jobs.ended(
        *("python", "-I", "-c", program, *words),
        env={"QUOTED": 'a\'b "c" $d', "PYTHONPATH": "/mine"},
        excludes=("*.bin",),
    )

    said = json.loads(plan.command.log.read_text().splitlines()[-1])
    env = said["env"]
    assert (exit_.exit_code, exit_.signal) == (0, None)
    assert said["argv"] == words
    assert env["QUOTED"] == 'a\'b "c" $d'
    assert (env["MUSTER_RUN_ID"], env["MUSTER_ATTEMPT"]) == (plan.run_id, "1")
    assert env["MUSTER_COMPONENT"] == "trainer"
    assert set(said["files"]) == {"train.py", "runpy.py"}
    assert said["ray"].startswith(sys.prefix)
    assert "/mine" in env["PYTHONPATH"].split(":")
    assert not any(Path(path, "muster_driver").exists() for path in env["PYTHONPATH"].split(":"))
    assert "py_modules" not in json.loads(env["RAY_JOB_CONFIG_JSON_ENV_VAR"])["runtime_env"]
    known = json.loads(plan.submission_file.read_text())
    assert known["driver_node_id"] in {node.node_id for node in ray_cluster.nodes}
    assert (known["status"], known["exit_code"], known["left"]) == ("succeeded", 0, [])


@pytest.mark.thorough
async def test_its_end_is_told_by_code_or_signal(jobs: Jobs) -> None:
    segfault = "import ctypes; ctypes.string_at(0)"

    ends = await asyncio.gather(
        jobs.ended("sh", "-c", "exit 7"),
        jobs.ended("sh", "-c", "kill -KILL $$"),
        jobs.ended("python", "-c", segfault),
        jobs.ended("no-such-program"),
    )

    assert [(end.exit_code, end.signal) for _, end in ends] == [
        (7, None),
        (None, 9),
        (None, 11),
        (127, None),
    ]
    lines = ends[3][0].command.log.read_text().splitlines()
    assert any("muster: cannot execute" in line or "no-such-program" in line for line in lines[2:])


async def test_nothing_of_the_driver_survives_its_end_its_death_or_rays_supervisor(
    jobs: Jobs, ray_cluster: RayCluster
) -> None:
    (_, ended), (_, killed), (lost, orphan) = await asyncio.gather(
        jobs.launched("sh", "-c", f"{_TREE} exec sleep 2"),
        jobs.launched("sh", "-c", f"{_TREE} exec sleep 3601"),
        jobs.launched("sh", "-c", f"{_TREE} exec sleep 3602"),
    )
    await until(lambda: _pids_of(jobs, "sleep\x003601") and _pids_of(jobs, "sleep\x003602"))

    for pid in _pids_of(jobs, "sleep\x003601"):
        kill(pid)
    dashboard = Dashboard(ray_cluster.address)
    supervisor = await dashboard.supervisor_of(lost.submission_id)
    await dashboard.aclose()
    assert supervisor is not None
    kill(supervisor.pid)
    ends = [await asyncio.wait_for(job.exited, WITHIN_S) for job in (ended, killed, orphan)]

    assert [(end.exit_code, end.signal) for end in ends] == [(0, None), (None, 9), (None, None)]
    assert "supervisor" in ends[2].note
    # Not swept: the wrapper alone has ended them.
    await until(lambda: not jobs.marked(), 10)
    assert [await job.end() for job in (ended, killed, orphan)] == [(), (), ()]


async def test_a_stop_ends_the_whole_tree_with_its_grace_period(jobs: Jobs) -> None:
    polite = f"trap 'sleep 0.5; echo saved; exit 5' TERM; {_TREE} while :; do sleep 0.1; done"
    deaf = f"trap '' TERM; {_TREE} while :; do sleep 0.1; done"
    (polite_plan, first), (_, second), (_, third) = await asyncio.gather(
        jobs.launched("sh", "-c", polite),
        jobs.launched("sh", "-c", deaf),
        jobs.launched("sh", "-c", deaf, grace_s=600.0),
    )
    await until(lambda: len(jobs.marked()) >= 12)

    first.stop()
    first.stop()
    second.stop()
    third.kill()
    ends = [await asyncio.wait_for(job.exited, WITHIN_S) for job in (first, second, third)]

    assert "as asked" in ends[0].note and "as asked" in ends[1].note
    assert [await job.end() for job in (first, second, third)] == [(), (), ()]
    assert jobs.marked() == []
    assert polite_plan.command.log.read_text().splitlines().count("saved") == 1
    assert jobs.told.swept


@pytest.mark.thorough
async def test_a_stop_from_outside_is_said_to_be_one(jobs: Jobs, ray_cluster: RayCluster) -> None:
    plan, job = await jobs.launched("sleep", "3600")
    dashboard = Dashboard(ray_cluster.address)

    await dashboard.stop(plan.submission_id)
    exit_ = await asyncio.wait_for(job.exited, WITHIN_S)

    await dashboard.aclose()
    assert "from outside" in exit_.note


async def test_a_pending_job_is_ended_and_its_start_deadline_kept(jobs: Jobs) -> None:
    plan = jobs.plan("sleep", "3600", entrypoint_resources={"nowhere": 1}, start_within_s=1.5)
    other = jobs.plan("sleep", "3600", entrypoint_resources={"nowhere": 1})
    late, waiting = jobs.job(plan), jobs.job(other)
    await waiting.launch()
    launch = asyncio.create_task(waiting.until_running())

    with pytest.raises(GivenUp) as refused:
        await late.launch()
        await late.until_running()
    launch.cancel()
    left = await late.end() + await waiting.end()

    assert (refused.value.loss.kind, refused.value.loss.rule) == (
        FailureKind.START_TIMEOUT,
        "start-deadline",
    )
    assert left == ()
    for one in (plan, other):
        state = await jobs.state_of(one)
        assert state is not None and state.is_final


async def test_a_second_process_attaches_without_a_gap_or_repeat_in_the_log(jobs: Jobs) -> None:
    program = (
        "import os, time\n"
        "for i in range(60): os.write(1, b'%d ' % i + b'\\xff\\xfe' * 9 + b'\\n'); time.sleep(0.1)"
    )
    plan, first = await jobs.launched("python", "-c", program)
    await until(lambda: plan.command.log.exists() and b"\n5 " in plan.command.log.read_bytes())
    await first.let_go()
    before = plan.command.log.read_bytes()

    second = jobs.job(plan)
    await second.launch()
    await second.until_running()
    exit_ = await asyncio.wait_for(second.exited, WITHIN_S)
    left = await second.end()

    expected = b"".join(b"%d " % i + b"\xff\xfe" * 9 + b"\n" for i in range(60))
    assert (exit_.exit_code, left) == (0, ())
    assert plan.command.log.read_bytes().startswith(before) and before
    assert plan.command.log.read_bytes().endswith(expected)
    assert plan.command.log.read_bytes().count(b"\n5 ") == 1
    assert jobs.told.names.count("job.submitted") == 1
    assert jobs.told.names.count("job.attached") == 1


@pytest.mark.thorough
async def test_a_job_without_a_process_of_ours_is_ended_by_its_file(jobs: Jobs) -> None:
    plan, job = await jobs.launched("sh", "-c", f"{_TREE} exec sleep 3600")
    await job.let_go()

    before = await jobs.state_of(plan)
    file = SubmissionFile.read(plan.submission_file)
    assert file is not None
    how = {"emit": jobs.told.emit, "grace_s": 1.0, "unknown_after_s": 60.0}
    ended = await stop_submission(file, **how)

    assert before is not None and before.status == "RUNNING"
    assert (ended.left, ended.unseen) == ((), ())
    assert jobs.marked() == []
    assert json.loads(plan.submission_file.read_text())["status"] == "stopped"


@pytest.mark.thorough
async def test_gpus_that_are_not_taken_by_the_deadline_are_named(jobs: Jobs) -> None:
    program = (
        "import ray, time; from ray.util.placement_group import placement_group as pg\n"
        "ray.init(log_to_driver=False)\n"
        "big = pg([{'GPU': 8}] * 3); time.sleep(3600)"
    )
    plan, first = await jobs.launched("python", "-c", program, gpus=24)
    await first.let_go()
    job = jobs.job(replace(plan, start_within_s=1.0))
    await job.launch()
    await job.until_running()

    loss = await asyncio.wait_for(job.until_job_lost(), WITHIN_S)
    left = await job.end()

    assert (loss.kind, loss.rule) == (FailureKind.START_TIMEOUT, "gpus-not-taken")
    assert "0 of the 24 GPUs" in loss.message
    assert left == ()


async def test_gpus_once_taken_are_free_after_the_end_even_where_they_outlive_the_driver(
    jobs: Jobs, ray_cluster: RayCluster
) -> None:
    program = (
        "import ray, time; from ray.util.placement_group import placement_group as pg\n"
        "ray.init(log_to_driver=False)\n"
        "@ray.remote(num_gpus=2, num_cpus=0)\n"
        "class A:\n"
        "    def ping(self): pass\n"
        "kept = A.options(name='kept', namespace='n', lifetime='detached').remote()\n"
        "own = A.remote()\n"
        "ray.get([kept.ping.remote(), own.ping.remote()])\n"
        "group = pg([{'GPU': 4}], lifetime='detached', name='g'); ray.get(group.ready())\n"
        "print('taken', flush=True); time.sleep(3600)"
    )
    plan, job = await jobs.launched("python", "-c", program, gpus=8, start_within_s=40.0)
    lost = asyncio.create_task(job.until_job_lost())
    await until(lambda: plan.command.log.exists() and b"\ntaken\n" in plan.command.log.read_bytes())
    # The cluster's control store hears of it a moment after the driver.
    while sum((await free_gpus(ray_cluster.gcs_address)).values()) != 8:
        await asyncio.sleep(0.05)

    left = await job.end()

    after = await free_gpus(ray_cluster.gcs_address)
    is_lost = lost.done()
    lost.cancel()
    assert left == ()
    assert sum(after.values()) == 16
    assert not is_lost


def _pids_of(jobs: Jobs, words: str) -> list[int]:
    found = []
    for pid in jobs.marked():
        try:
            cmdline = Path(f"/proc/{pid}/cmdline").read_text()
        except OSError:
            continue
        if cmdline.rstrip("\0") == words and pid != os.getpid():
            found.append(pid)
    return found
