"""Tests of submitting a Ray job that need no Ray cluster."""

from __future__ import annotations

import asyncio
import json
import shlex
import signal
import threading
from dataclasses import replace
from pathlib import Path

import pytest

from tasks.processes.guarded import Command
from tasks.ray.dashboard import Actor, LiveNode, PlacementGroup
from tasks.ray.end import describe_actors_and_groups
from tasks.ray.submission import JobPlan, SubmissionFile
from tasks.ray.submit import build_entrypoint, build_environment, choose_driver_node, list_excludes
from tasks.record.disk import DiskThread
from tasks.record.run_json import SubmissionJson


@pytest.fixture
def plan(tmp_path: Path) -> JobPlan:
    return JobPlan(
        address="http://127.0.0.1:8265",
        submission_id="r--a02",
        run_id="r",
        attempt=2,
        component="trainer",
        command=Command(
            argv=("python", "train.py"),
            env={"A": "1"},
            cwd=tmp_path,
            log=tmp_path / "trainer.log",
            grace_s=2.5,
        ),
        submission_file=tmp_path / "submission.json",
    )


def node(name: str, *, is_head: bool = False, **resources: float) -> LiveNode:
    return LiveNode(
        node_id=f"{name}-id", ip=name, name=name, is_head=is_head, resources_total=resources
    )


HEAD = node("head", is_head=True, CPU=4)


@pytest.mark.parametrize(
    ("nodes", "resources", "labels"),
    [
        # a worker node has the custom resource `worker_node`, so the job requests 0.001 of this
        # resource
        ([HEAD, node("a", worker_node=100)], {"worker_node": 0.001}, {}),
        # no node has the resource `worker_node`, so the job requests a node that is not the head
        ([HEAD, node("a", CPU=1)], {}, {"ray.io/node-id": "!head-id"}),
        # the cluster has only a head node, with or without the resource `worker_node`. So the
        # driver may run on the head node
        ([HEAD], {}, {}),
        ([node("head", is_head=True, worker_node=1)], {}, {}),
    ],
)
def test_driver_avoids_the_head_if_there_is_another_node(
    plan: JobPlan, nodes: list[LiveNode], resources: dict[str, float], labels: dict[str, str]
) -> None:
    place = choose_driver_node(plan, nodes)

    assert place == (resources, labels)


def test_driver_runs_on_granted_nodes(plan: JobPlan) -> None:
    nodes = [HEAD, *(node(name, worker_node=100) for name in "abc")]

    place = choose_driver_node(replace(plan, nodes={"a": 8, "c/c-id": 4, "gone": 8}), nodes)

    assert place == ({}, {"ray.io/node-id": "in(a-id,c-id)"})


def test_placement_in_the_spec_overrides_everything(plan: JobPlan) -> None:
    plan = replace(plan, entrypoint_label_selector={"zone": "a"})

    place = choose_driver_node(plan, [HEAD, node("a", worker_node=100)])

    assert place == ({}, {"zone": "a"})


def test_job_that_another_host_may_have_submitted_is_not_new(plan: JobPlan) -> None:
    SubmissionFile.begin(replace(plan, may_be_submitted_since=7.0))

    file = SubmissionFile.read(plan.submission_file)
    assert file is not None and file.content.submit_began_at == 7.0
    # There was no answer to the submission, so Muster does not know whether the cluster has the
    # job.
    assert file.content.submitted_at is None


def test_command_survives_the_shell_unchanged(plan: JobPlan) -> None:
    words = ("a b", "$HOME", "it's", "", "*", "--", "\n")

    entrypoint = build_entrypoint(replace(plan, command=replace(plan.command, argv=words)))

    read = shlex.split(entrypoint)
    assert tuple(read[read.index("--") + 1 :]) == words
    assert read[read.index("--grace") + 1] == "2.5"


def test_job_environment_identifies_the_run_and_outlasts_the_grace_period(plan: JobPlan) -> None:
    env = build_environment(replace(plan, command=replace(plan.command, stop_signal=signal.SIGINT)))

    assert env == {
        "A": "1",
        "MUSTER_RUN_ID": "r",
        "MUSTER_ATTEMPT": "2",
        "MUSTER_COMPONENT": "trainer",
        "RAY_JOB_STOP_WAIT_TIME_S": "8",
        "RAY_JOB_STOP_SIGNAL": "SIGINT",
    }


def test_muster_home_inside_the_working_directory_is_not_shipped(
    plan: JobPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUSTER_HOME", str(plan.command.cwd / "var" / "muster"))

    excludes = list_excludes(replace(plan, excludes=("*.ckpt",)))

    assert {".git", "/tests", "*.ckpt", "/var/muster"} <= set(excludes)


def test_submission_file_of_an_earlier_process_is_continued(plan: JobPlan) -> None:
    SubmissionFile.begin(plan).note(submitted_at=12.0)

    again = SubmissionFile.begin(plan)

    assert again.content.submitted_at == 12.0
    assert json.loads(plan.submission_file.read_text())["submission_id"] == "r--a02"


def test_note_does_not_wait_until_the_file_is_written(plan: JobPlan) -> None:
    file, answers = SubmissionFile.begin(plan), threading.Event()
    file.disk = DiskThread("disk")
    file.disk.do(answers.wait)

    async def send() -> tuple[bool, float | None]:
        file.note(submit_began_at=12.0)
        written = asyncio.create_task(file.written())
        await asyncio.sleep(0)
        was_written = written.done()
        answers.set()
        await written
        return was_written, SubmissionJson.read(plan.submission_file).submit_began_at

    assert asyncio.run(send()) == (False, 12.0)


def test_submission_file_of_another_submission_is_replaced(plan: JobPlan) -> None:
    SubmissionFile.begin(plan).note(submitted_at=12.0)

    other = SubmissionFile.begin(replace(plan, submission_id="r--a03"))

    assert other.content.submitted_at is None


def test_submission_file_contains_no_environment(plan: JobPlan) -> None:
    SubmissionFile.begin(replace(plan, command=replace(plan.command, env={"TOKEN": "s3cret"})))

    assert "s3cret" not in plan.submission_file.read_text()


def test_held_resources_are_described_with_node_and_pid() -> None:
    actor = Actor(actor_id="x", class_name="Worker", state="ALIVE", node_id="a-id", pid=7, gpus=2.0)
    group = PlacementGroup(group_id="0123456789", gpus_on={"b-id": 4.0})
    waiting = PlacementGroup(group_id="abcdefghij")

    words = describe_actors_and_groups(([actor], [group, waiting]), [node("a"), node("b")])

    assert words == (
        "node a, pid 7: actor Worker, which is ALIVE, holds 2 GPUs",
        "node b: placement group 01234567 holds 4 GPUs",
        "node unknown: placement group abcdefgh holds 0 GPUs",
    )
