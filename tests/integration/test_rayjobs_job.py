"""A Ray job on a real cluster: the environment of its driver, and its end without leftovers."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from tasks.ray.dashboard import Dashboard
from tasks.ray.job import stop_submission
from tasks.ray.submission import SubmissionFile
from tasks.record.outcome import ComponentFailed
from tasks.spec.failure_kinds import FailureKind
from tests.support.ray_cluster import RayCluster, free_gpus
from tests.support.ray_jobs import WITHIN_S, Jobs, kill, wait_until

pytestmark = [pytest.mark.asyncio, pytest.mark.slow]

#: Shell commands that start two processes outside of the job's session: a process in a new session,
#: and a daemon.
_TREE = "setsid sleep 3600 & (setsid sh -c 'sleep 3600 & wait' &) ;"


@pytest_asyncio.fixture
async def jobs(ray_cluster: RayCluster, tmp_path: Path, muster_home: Path) -> AsyncIterator[Jobs]:
    """Yield an object that starts Ray jobs; no process of a job may remain after the test."""
    jobs = Jobs(ray_cluster.address, tmp_path)
    yield jobs
    await jobs.clear()
    assert jobs.list_processes() == []


#: A driver that waits forever for an actor. The actor, on another node, also waits forever.
_HANGING_DRIVER = """
import ray, threading
ray.init(logging_level="ERROR")
@ray.remote(num_gpus=1, runtime_env={"env_vars": {"RANK": "3"}})
class Rank:
    def stuck_in_all_reduce(self):
        print("up", flush=True)
        threading.Event().wait()
def wait_for_ranks():
    ray.get(Rank.remote().stuck_in_all_reduce.remote())
wait_for_ranks()
"""


@pytest.mark.thorough
async def test_report_about_a_hanging_job_has_the_stacks_of_its_processes(jobs: Jobs) -> None:
    plan, job = await jobs.launch("python", "-c", _HANGING_DRIVER)
    await wait_until(lambda: "up" in plan.command.log.read_text())

    await job.examine()

    report = plan.command.log.with_name("trainer.hang.txt").read_text()
    named_frames = report.split("\n\n")[1]
    first_line, second_line, *_ = named_frames.splitlines()
    assert ": wait_for_ranks (" in second_line, named_frames
    assert first_line.startswith("trainer, rank 3, node "), named_frames
    assert ": Rank.stuck_in_all_reduce (" in first_line, named_frames
    assert job.hangs_in.startswith("Rank.stuck_in_all_reduce ("), job.hangs_in
    assert "component.diagnosed" in [name for name, _ in jobs.told.events]
    assert await job.end() == ()


async def test_driver_gets_its_arguments_its_environment_and_the_programs_of_ray(
    jobs: Jobs, ray_cluster: RayCluster
) -> None:
    program = (
        "import json, os, shutil, sys; print(json.dumps({'argv': sys.argv[1:], "
        "'env': dict(os.environ), 'files': os.listdir(), 'ray': __import__('ray').__file__}))"
    )
    arguments = ["a b", "$HOME", "it's", '"', "", "*", "\\n", "é"]
    (jobs.working_dir / "train.py").write_text("")
    (jobs.working_dir / "runpy.py").write_text("raise SystemExit('hides the standard library')")
    (jobs.working_dir / "data.bin").write_text("")
    (jobs.working_dir / ".git").mkdir()
    (jobs.working_dir / "tests").mkdir()
    (jobs.working_dir / "tests" / "test_a.py").write_text("")

    plan, job_exit = await jobs.run_to_end(
        "python",
        "-I",
        "-c",
        program,
        *arguments,
        env={"QUOTED": 'a\'b "c" $d', "PYTHONPATH": "/mine"},
        excludes=("*.bin",),
    )

    output = json.loads(plan.command.log.read_text().splitlines()[-1])
    env = output["env"]
    assert (job_exit.exit_code, job_exit.signal) == (0, None)
    assert output["argv"] == arguments
    assert env["QUOTED"] == 'a\'b "c" $d'
    assert (env["MUSTER_RUN_ID"], env["MUSTER_ATTEMPT"]) == (plan.run_id, "1")
    assert env["MUSTER_COMPONENT"] == "trainer"
    assert set(output["files"]) == {"train.py", "runpy.py"}
    assert output["ray"].startswith(sys.prefix)
    assert "/mine" in env["PYTHONPATH"].split(":")
    assert not any(Path(path, "muster_driver").exists() for path in env["PYTHONPATH"].split(":"))
    assert "py_modules" not in json.loads(env["RAY_JOB_CONFIG_JSON_ENV_VAR"])["runtime_env"]
    submission = json.loads(plan.submission_file.read_text())
    assert submission["driver_node_id"] in {node.node_id for node in ray_cluster.nodes}
    assert (submission["status"], submission["exit_code"], submission["left"]) == (
        "succeeded",
        0,
        [],
    )


@pytest.mark.thorough
async def test_end_of_a_job_is_reported_as_exit_code_or_signal(jobs: Jobs) -> None:
    segfault = "import ctypes; ctypes.string_at(0)"

    ends = await asyncio.gather(
        jobs.run_to_end("sh", "-c", "exit 7"),
        jobs.run_to_end("sh", "-c", "kill -KILL $$"),
        jobs.run_to_end("python", "-c", segfault),
        jobs.run_to_end("no-such-program"),
    )

    assert [(end.exit_code, end.signal) for _, end in ends] == [
        (7, None),
        (None, 9),
        (None, 11),
        (127, None),
    ]
    lines = ends[3][0].command.log.read_text().splitlines()
    assert any("muster: cannot execute" in line or "no-such-program" in line for line in lines[2:])


async def test_no_process_survives_the_end_of_the_driver_or_of_rays_supervisor(
    jobs: Jobs, ray_cluster: RayCluster
) -> None:
    (_, ended), (_, killed), (orphan_plan, orphan) = await asyncio.gather(
        jobs.launch("sh", "-c", f"{_TREE} exec sleep 2"),
        jobs.launch("sh", "-c", f"{_TREE} exec sleep 3601"),
        jobs.launch("sh", "-c", f"{_TREE} exec sleep 3602"),
    )
    await wait_until(
        lambda: _find_pids(jobs, "sleep\x003601") and _find_pids(jobs, "sleep\x003602")
    )

    for pid in _find_pids(jobs, "sleep\x003601"):
        kill(pid)
    dashboard = Dashboard(ray_cluster.address)
    supervisor = await dashboard.supervisor_of(orphan_plan.submission_id)
    await dashboard.aclose()
    assert supervisor is not None
    kill(supervisor.pid)
    ends = [await asyncio.wait_for(job.exited, WITHIN_S) for job in (ended, killed, orphan)]

    assert [(end.exit_code, end.signal) for end in ends] == [(0, None), (None, 9), (None, None)]
    assert "supervisor" in ends[2].note
    # The wrapper process of each job ends all other processes of the job. So `end`, which searches
    # for leftover processes, finds none.
    await wait_until(lambda: not jobs.list_processes(), 10)
    assert [await job.end() for job in (ended, killed, orphan)] == [(), (), ()]


async def test_stop_ends_all_processes_after_the_grace_period(jobs: Jobs) -> None:
    saving_script = (
        f"trap 'sleep 0.5; echo saved; exit 5' TERM; {_TREE} while :; do sleep 0.1; done"
    )
    ignoring_script = f"trap '' TERM; {_TREE} while :; do sleep 0.1; done"
    (saving_plan, first), (_, second), (_, third) = await asyncio.gather(
        jobs.launch("sh", "-c", saving_script),
        jobs.launch("sh", "-c", ignoring_script),
        jobs.launch("sh", "-c", ignoring_script, grace_s=600.0),
    )
    await wait_until(lambda: len(jobs.list_processes()) >= 12)

    first.stop()
    first.stop()
    second.stop()
    third.kill()
    ends = [await asyncio.wait_for(job.exited, WITHIN_S) for job in (first, second, third)]

    assert "stopped by Muster" in ends[0].note and "stopped by Muster" in ends[1].note
    assert [await job.end() for job in (first, second, third)] == [(), (), ()]
    assert jobs.list_processes() == []
    assert saving_plan.command.log.read_text().splitlines().count("saved") == 1
    assert jobs.told.swept


#: A driver that starts an actor. Driver and actor write a line for each SIGUSR1.
_WARNED_DRIVER = """
import os, ray, signal, threading
def listen(name):
    signal.signal(signal.SIGUSR1, lambda *_: os.write(2, f"{name} is warned\\n".encode()))
ray.init(logging_level="ERROR")
@ray.remote(num_cpus=0)
class Rank:
    def __init__(self):
        listen("rank")
    def ping(self):
        pass
rank = Rank.remote()
ray.get(rank.ping.remote())
listen("driver")
os.write(2, b"up\\n")
while True:
    threading.Event().wait(0.1)
"""


@pytest.mark.thorough
async def test_driver_and_actors_with_a_handler_are_warned_once(jobs: Jobs) -> None:
    plan, job = await jobs.launch("sh", "-c", 'python -c "$0"; exit $?', _WARNED_DRIVER)
    log = plan.command.log
    # Ray also writes the command, which contains "up", to the log. So wait for the line "up".
    await wait_until(lambda: log.exists() and "up" in log.read_text().splitlines())

    warned = await job.warn(signal.SIGUSR1)
    job._warn_again_s = 0.0
    again = await job.warn(signal.SIGUSR1)

    assert len(warned) == 2 and again == []
    await wait_until(lambda: {"driver is warned", "rank is warned"} <= ended_lines(log.read_text()))
    assert await job.read_planned_end() is None
    assert not job.exited.done()
    assert await job.end() == ()


def ended_lines(text: str) -> set[str]:
    """Return the last three words of each line of a log.

    Each message of the test has three words. Ray puts the name of an actor before each message that
    the actor prints.
    """
    return {" ".join(line.split()[-3:]) for line in text.splitlines()}


@pytest.mark.thorough
async def test_job_that_saves_after_its_stop_signal_is_killed_later(jobs: Jobs) -> None:
    saving_script = (
        "trap 'for i in 1 2 3 4; do sleep 1; done; echo saved; exit 5' TERM; echo is up; "
        "while :; do sleep 0.1; done"
    )
    plan, job = await jobs.launch("sh", "-c", saving_script, grace_s=0.5, save_grace_s=60.0)
    log = plan.command.log
    await wait_until(lambda: log.exists() and "is up" in log.read_text().splitlines())

    job.stop()
    job.delay_kill(30.0)
    await asyncio.wait_for(job.exited, WITHIN_S)

    assert await job.end() == ()
    assert log.read_text().splitlines().count("saved") == 1


@pytest.mark.thorough
async def test_stop_of_a_job_by_another_program_is_reported(
    jobs: Jobs, ray_cluster: RayCluster
) -> None:
    plan, job = await jobs.launch("sleep", "3600")
    dashboard = Dashboard(ray_cluster.address)

    await dashboard.stop(plan.submission_id)
    job_exit = await asyncio.wait_for(job.exited, WITHIN_S)

    await dashboard.aclose()
    assert "from outside" in job_exit.note


async def test_pending_job_can_be_ended_and_obeys_its_start_deadline(jobs: Jobs) -> None:
    plan = jobs.plan("sleep", "3600", entrypoint_resources={"nowhere": 1}, start_within_s=1.5)
    other_plan = jobs.plan("sleep", "3600", entrypoint_resources={"nowhere": 1})
    late = jobs.job(plan)
    waiting = jobs.job(other_plan)
    await waiting.launch()
    launch = asyncio.create_task(waiting.until_running())

    with pytest.raises(ComponentFailed) as refused:
        await late.launch()
        await late.until_running()
    launch.cancel()
    leftovers = await late.end() + await waiting.end()

    assert (refused.value.reason.kind, refused.value.reason.rule) == (
        FailureKind.START_TIMEOUT,
        "start-deadline",
    )
    assert leftovers == ()
    for job_plan in (plan, other_plan):
        state = await jobs.state_of(job_plan)
        assert state is not None and state.is_final


@pytest.mark.thorough
async def test_second_process_attaches_without_a_gap_or_a_repetition_in_the_log(jobs: Jobs) -> None:
    program = (
        "import os, time\n"
        "for i in range(60): os.write(1, b'%d ' % i + b'\\xff\\xfe' * 9 + b'\\n'); time.sleep(0.1)"
    )
    plan, first = await jobs.launch("python", "-c", program)
    await wait_until(lambda: plan.command.log.exists() and b"\n5 " in plan.command.log.read_bytes())
    await first.detach()
    log_before = plan.command.log.read_bytes()

    second = jobs.job(plan)
    await second.launch()
    await second.until_running()
    job_exit = await asyncio.wait_for(second.exited, WITHIN_S)
    leftovers = await second.end()

    expected = b"".join(b"%d " % i + b"\xff\xfe" * 9 + b"\n" for i in range(60))
    assert (job_exit.exit_code, leftovers) == (0, ())
    assert plan.command.log.read_bytes().startswith(log_before) and log_before
    assert plan.command.log.read_bytes().endswith(expected)
    assert plan.command.log.read_bytes().count(b"\n5 ") == 1
    assert jobs.told.names.count("job.submitted") == 1
    assert jobs.told.names.count("job.attached") == 1


@pytest.mark.thorough
async def test_job_without_a_muster_process_can_be_ended_by_its_submission_file(jobs: Jobs) -> None:
    plan, job = await jobs.launch("sh", "-c", f"{_TREE} exec sleep 3600")
    await job.detach()

    status_before = await jobs.state_of(plan)
    file = SubmissionFile.read(plan.submission_file)
    assert file is not None
    options = {"emit": jobs.told.emit, "grace_s": 1.0, "unknown_after_s": 60.0}
    ended = await stop_submission(file, **options)

    assert status_before is not None and status_before.status == "RUNNING"
    assert (ended.left, ended.unseen) == ((), ())
    assert jobs.list_processes() == []
    assert json.loads(plan.submission_file.read_text())["status"] == "stopped"


@pytest.mark.thorough
async def test_missing_gpus_at_the_deadline_are_named(jobs: Jobs) -> None:
    program = (
        "import ray, time; from ray.util.placement_group import placement_group as pg\n"
        "ray.init(log_to_driver=False)\n"
        "big = pg([{'GPU': 8}] * 3); time.sleep(3600)"
    )
    plan, first = await jobs.launch("python", "-c", program, gpus=24)
    await first.detach()
    job = jobs.job(replace(plan, start_within_s=1.0))
    await job.launch()
    await job.until_running()

    reason = await asyncio.wait_for(job.until_job_lost(), WITHIN_S)
    leftovers = await job.end()

    assert (reason.kind, reason.rule) == (FailureKind.START_TIMEOUT, "gpus-not-taken")
    assert "0 of the 24 GPUs" in reason.message
    assert leftovers == ()


@pytest.mark.thorough
async def test_all_gpus_are_free_after_the_end_even_if_actors_are_detached(
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
    plan, job = await jobs.launch("python", "-c", program, gpus=8, start_within_s=40.0)
    loss_watch = asyncio.create_task(job.until_job_lost())
    await wait_until(
        lambda: plan.command.log.exists() and b"\ntaken\n" in plan.command.log.read_bytes()
    )
    # When the driver prints "taken", the cluster's control store may still count the job's GPUs as
    # free. So wait until only 8 GPUs of the cluster are free.
    while sum((await free_gpus(ray_cluster.gcs_address)).values()) != 8:
        await asyncio.sleep(0.05)

    leftovers = await job.end()

    gpus_after = await free_gpus(ray_cluster.gcs_address)
    is_lost = loss_watch.done()
    loss_watch.cancel()
    assert leftovers == ()
    assert sum(gpus_after.values()) == 16
    assert not is_lost


def _find_pids(jobs: Jobs, command_line: str) -> list[int]:
    """Return the pids of the jobs' processes with this command line.

    NUL characters separate the arguments in the command line, like in `/proc/PID/cmdline`.
    """
    pids = []
    for pid in jobs.list_processes():
        try:
            cmdline = Path(f"/proc/{pid}/cmdline").read_text()
        except OSError:
            continue
        if cmdline.rstrip("\0") == command_line and pid != os.getpid():
            pids.append(pid)
    return pids
