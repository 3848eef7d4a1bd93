"""Tests of `RunSession` without a flow and without a Prefect server."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from prefect.client.schemas.objects import State
from prefect.states import Cancelling, Running

from deployments.stack import command
from deployments.stack.state import Stack
from tasks.processes.component import AttemptPlan
from tasks.processes.stop_notes import describe_stopped_worker, write_stop_notes
from tasks.processes.supervisor import Supervisor
from tasks.record.cancellation_note import take_note, write_note
from tasks.record.checkpoints import list_output_folders
from tasks.record.code_store import PROJECT, store_project
from tasks.record.outcome import Verdict
from tasks.record.places import RunPlace
from tasks.record.states import RunState
from tasks.server.interruption import Change, ObservedFlowRun
from tasks.spec.failure_kinds import FailureKind
from tasks.spec.loading import parse_spec
from tasks.train import running_attempt, tasks
from tasks.train.session import RunSession
from tasks.train.tasks import conclude

RUN_ID = "x-sft-20260101-000000-abcd91c2"


def test_directory_of_another_flow_run_is_rejected_and_unchanged(muster_home: Path) -> None:
    spec = parse_spec(
        {"name": "x", "workload": "sft", "components": {"trainer": {"command": ["true"]}}}
    )
    first = uuid4()
    second = uuid4()
    run = RunSession(spec, run_id=RUN_ID, flow_run_id=first)
    run.close()
    content_before = run.place.record.read_bytes()

    with pytest.raises(FileExistsError) as error_info:
        RunSession(spec, run_id=RUN_ID, flow_run_id=second)

    message = str(error_info.value)
    assert str(first) in message and str(second) in message
    assert run.place.record.read_bytes() == content_before


def test_copy_of_the_project_has_the_folder_of_the_checkpoints(
    tmp_path: Path, muster_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The script may write into the folder without creating it, because the project has the folder.
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(PROJECT, "")
    project = tmp_path / "project"
    (project / "out").mkdir(parents=True)
    (project / "out" / "step_1.pt").touch()
    trainer = {"command": ["true"], "checkpoints": "out"}
    written = {"name": "x", "workload": "sft", "components": {"trainer": trainer}}
    code = store_project(project, list_output_folders(parse_spec(written), project))
    run = RunSession(parse_spec({**written, "code": code}), run_id=RUN_ID, flow_run_id=uuid4())

    run.enter_code(lambda name: None)

    assert [*(run.place.code / "out").iterdir()] == []
    run.close()


def test_internal_error_before_an_attempt_fails_the_run(muster_home: Path) -> None:
    spec = parse_spec(
        {"name": "x", "workload": "sft", "components": {"trainer": {"command": ["true"]}}}
    )
    run = RunSession(spec, run_id=RUN_ID, flow_run_id=uuid4())

    run.crash(RuntimeError("the queue is broken"))
    verdict = run.close()

    assert verdict.state is RunState.FAILED
    assert verdict.failure is not None
    assert verdict.failure.kind is FailureKind.UNKNOWN
    assert "the queue is broken" in verdict.message
    assert run.record.state is RunState.FAILED


def test_different_secrets_with_the_same_name_are_masked_in_every_file(
    muster_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = tmp_path / "ray-token"
    token.write_text("of-the-cluster\n")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(token))
    # Leave the project's folder. Otherwise Muster would also store a copy of the project's files.
    monkeypatch.chdir(token.parent)
    token_of_api = "hf-of-the-api"
    token_of_trainer = "hf-of-the-trainer"
    key_option = "sk-of-an-option"
    spec = parse_spec(
        {
            "name": "x",
            "workload": "sft",
            "env": {"HF_TOKEN": "hf-of-the-run", "KEY": "${run.id}", "PASSWORD": "$${in-two}"},
            "components": {
                "api": {
                    "command": ["true", token_of_api, token_of_trainer, "--api-key", key_option],
                    "env": {"HF_TOKEN": token_of_api},
                },
                "trainer": {"command": ["true"], "env": {"HF_TOKEN": token_of_trainer}},
            },
        }
    )
    run = RunSession(spec, run_id=RUN_ID, flow_run_id=uuid4())
    secrets = (
        token_of_api,
        token_of_trainer,
        key_option,
        "hf-of-the-run",
        "of-the-cluster",
        "${in-two}",
    )

    run.begin_attempt()
    run.crash(ValueError({"env": " ".join(secrets)}))
    run.end_attempt()
    verdict = run.close()

    written = {path: path.read_text() for path in muster_home.rglob("*") if path.is_file()}
    assert "the run cannot continue" not in verdict.message and "ValueError" in verdict.message
    for secret in secrets:
        assert secret not in verdict.message
        assert not [path for path, text in written.items() if secret in text]
    assert run.place.record in written and RUN_ID in written[run.place.record]


def test_value_of_a_secret_block_reaches_components_but_no_file(
    muster_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plans: list[AttemptPlan] = []

    class RecordingSupervisor(Supervisor):
        def __init__(self, plan: AttemptPlan, *arguments: Any) -> None:
            plans.append(plan)
            super().__init__(plan, *arguments)

    monkeypatch.setattr(running_attempt, "Supervisor", RecordingSupervisor)
    # Leave the project's folder. Otherwise Muster would also store a copy of the project's files.
    monkeypatch.chdir(muster_home.parent)
    block = {"secret": "dsn"}
    spec = parse_spec(
        {
            "name": "x",
            "workload": "sft",
            "env": {"OF_RUN": block},
            "ray": {"address": "http://127.0.0.1:8265"},
            "components": {
                "api": {"command": ["true"], "launcher": "ray_job", "env": {"OF_API": block}},
                "trainer": {"command": ["true"], "env": {"OF_TRAINER": block}},
            },
        }
    )
    run = RunSession(spec, run_id=RUN_ID, flow_run_id=uuid4())

    run.set_secret_blocks({"dsn": "pg://a-${word}"})
    run.begin_attempt()
    run.crash(ValueError("pg://a-${word} is no address"))
    run.end_attempt()
    verdict = run.close()

    api, trainer = (component.command.env for component in plans[0].components)
    assert (api["OF_RUN"], api["OF_API"]) == ("pg://a-${word}",) * 2
    assert (trainer["OF_RUN"], trainer["OF_TRAINER"]) == ("pg://a-${word}",) * 2
    assert "*** is no address" in verdict.message
    written = {path: path.read_text() for path in muster_home.rglob("*") if path.is_file()}
    assert not [path for path, text in written.items() if "pg://" in text]
    assert "{secret: dsn}" in run.place.attempt(1).spec.read_text()
    assert parse_spec(run.resolved_spec).secret_blocks == spec.secret_blocks


class CountingSupervisor(Supervisor):
    """A supervisor that counts the calls of `hurry`, which skips the grace periods."""

    hurried = 0

    def hurry(self) -> None:
        type(self).hurried += 1


@pytest.fixture
def counting_supervisor(monkeypatch: pytest.MonkeyPatch) -> type[CountingSupervisor]:
    """Let each run use a `CountingSupervisor` during the test, and return this class."""
    monkeypatch.setattr(running_attempt, "Supervisor", CountingSupervisor)
    monkeypatch.setattr(CountingSupervisor, "hurried", 0)
    return CountingSupervisor


def make_run() -> RunSession:
    """Return the session of a run whose trainer sleeps."""
    component = {"command": ["sleep", "600"]}
    spec = parse_spec({"name": "x", "workload": "sft", "components": {"trainer": component}})
    return RunSession(spec, run_id=RUN_ID, flow_run_id=uuid4())


def test_second_cancellation_keeps_the_grace_periods(
    muster_home: Path, counting_supervisor: type[CountingSupervisor]
) -> None:
    run = make_run()
    run.begin_attempt()

    run.interrupt("interrupted by SIGTERM")
    run.interrupt("cancelled from Prefect")
    verdict = run.end_attempt()
    run.close()

    assert counting_supervisor.hurried == 0
    assert (verdict.state, verdict.message) == (RunState.CANCELLED, "interrupted by SIGTERM")


@pytest.mark.parametrize(
    ("change", "state"),
    [
        (Change.CANCELLED, RunState.CANCELLED),
        (Change.CANCELLED_NOW, RunState.CANCELLED),
        (Change.ENDED, RunState.CANCELLED),
        (Change.NONE, RunState.FAILED),
    ],
)
def test_failed_run_that_was_cancelled_on_the_server_while_it_stopped_is_cancelled(
    muster_home: Path, monkeypatch: pytest.MonkeyPatch, change: Change, state: RunState
) -> None:
    monkeypatch.setattr(tasks, "observe_flow_run", lambda _: ObservedFlowRun(change=change))
    run = make_run()
    run.crash(RuntimeError("the data is broken"))
    run.interrupt("cancelled from Prefect")

    final_state = conclude(run)

    assert run.record.state is state
    assert final_state.type.value == state.value.upper()
    assert "the data is broken" in (final_state.message or "")


@pytest.mark.parametrize(
    ("change", "state"),
    [
        (Change.CANCELLED, RunState.CANCELLED),
        (Change.CANCELLED_NOW, RunState.CANCELLED),
        # A final state that a user has set is replaced by the result of the run.
        (Change.ENDED, RunState.FAILED),
        (Change.DELETED, RunState.FAILED),
    ],
)
def test_cancel_that_no_other_thread_has_noticed_counts_at_the_end(
    muster_home: Path, monkeypatch: pytest.MonkeyPatch, change: Change, state: RunState
) -> None:
    cancelling: State[Any] = Cancelling(message="by ada")
    observed = ObservedFlowRun(change=change, state=cancelling)
    monkeypatch.setattr(tasks, "observe_flow_run", lambda _: observed)
    run = make_run()
    run.crash(RuntimeError("the data is broken"))

    final_state = conclude(run)

    assert run.record.state is state
    assert final_state.type.value == state.value.upper()
    message = run.record.content.message
    assert "the data is broken" in message
    is_cancelled = state is RunState.CANCELLED
    assert message.startswith("cancelled from Prefect: by ada, after") is is_cancelled


def test_paths_in_the_message_of_the_flow_run_are_relative_to_the_folder_of_the_run(
    muster_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tasks, "observe_flow_run", lambda _: ObservedFlowRun(change=Change.NONE))
    run = make_run()
    folder = run.place.directory
    message = f"nothing in {folder}/a, file://{folder}/b, {folder}-2/c and {folder}"
    verdict = Verdict(state=RunState.COMPLETED, message=message)
    monkeypatch.setattr(run, "close", lambda **_: verdict)

    final_state = conclude(run)

    expected = f"nothing in a, file://{folder}/b, {folder}-2/c and {folder}"
    assert final_state.message == expected


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (Cancelling(message="cancelled by ada with `muster cancel`"), "cancelled by ada with"),
        (Cancelling(), "cancelled from Prefect"),
        (Running(), "interrupted by SIGTERM"),
    ],
)
def test_run_that_a_worker_ended_by_a_signal_names_the_user_who_cancelled_it(
    muster_home: Path, monkeypatch: pytest.MonkeyPatch, state: State[Any], message: str
) -> None:
    observed = ObservedFlowRun(change=Change.of_state(state), state=state)
    monkeypatch.setattr(tasks, "observe_flow_run", lambda _: observed)
    run = make_run()
    run.begin_attempt()
    run.interrupt("interrupted by SIGTERM")
    run.end_attempt()

    final_state = conclude(run)

    assert run.record.state is RunState.CANCELLED
    assert run.record.content.message.startswith(message)
    assert (final_state.message or "").startswith(message)


def test_run_without_a_server_names_the_user_who_cancelled_it(
    muster_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unknown = ObservedFlowRun(change=Change.NONE)
    monkeypatch.setattr(tasks, "observe_flow_run", lambda _: unknown)
    run = make_run()
    run.begin_attempt()
    write_note(run.place.directory, "cancelled by ada with `muster cancel`")
    run.interrupt("interrupted by SIGTERM")
    run.end_attempt()

    conclude(run)

    assert run.record.content.message == "cancelled by ada with `muster cancel`"
    assert take_note(run.place.directory) == ""


def test_run_that_a_stopped_stack_ends_names_the_stop(
    muster_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    running: State[Any] = Running()
    observed = ObservedFlowRun(change=Change.NONE, state=running)
    monkeypatch.setattr(tasks, "observe_flow_run", lambda _: observed)
    run = make_run()
    run.begin_attempt()
    own_pid = os.getpid()

    # `muster down` writes why the run ends, and then stops the worker. The worker then writes
    # another reason for the end of the run.
    written = write_stop_notes("cancelled, because ada stopped the stack", lambda _: True)
    write_stop_notes(describe_stopped_worker(), lambda owner: owner.process.pid == own_pid)
    run.interrupt("interrupted by SIGTERM")
    run.end_attempt()
    conclude(run)

    assert written == [run.place.directory]
    assert run.record.content.message == "cancelled, because ada stopped the stack"


@pytest.mark.parametrize(("worker", "has_reason"), [("own", True), ("another", False)])
def test_muster_down_tells_the_runs_of_its_worker_who_stopped_the_stack(
    muster_home: Path, monkeypatch: pytest.MonkeyPatch, worker: str, has_reason: bool
) -> None:
    component = {"command": ["sleep", "600"]}
    spec = parse_spec({"name": "x", "workload": "sft", "components": {"trainer": component}})
    api_url = "http://127.0.0.1:4377/api"
    run = RunSession(spec, run_id=RUN_ID, flow_run_id=uuid4(), api_url=api_url, worker=worker)
    stack = Stack.model_construct(worker="own", port=4377)
    reasons = []
    monkeypatch.setattr("tasks.processes.identity.getpass.getuser", lambda: "ada")
    monkeypatch.setattr(command, "stop", lambda _: reasons.append(take_note(run.place.directory)))

    command._stop_with_reason(stack)

    beginning = "cancelled, because ada stopped the stack with `muster down` on "
    assert reasons[0].startswith(beginning) is has_reason
    run.close()


def test_reason_of_a_stop_is_written_only_for_the_stopped_runs(muster_home: Path) -> None:
    run = make_run()

    written = write_stop_notes("cancelled", lambda owner: owner.worker == "another-worker")

    assert written == []
    assert take_note(run.place.directory) == ""
    run.close()


def test_note_about_an_earlier_process_is_not_shown_later(muster_home: Path) -> None:
    place = RunPlace.of(RUN_ID)
    place.directory.mkdir(parents=True)
    write_note(place.directory, "cancelled by ada")

    run = make_run()

    assert take_note(run.place.directory) == ""
    run.close()


@pytest.mark.parametrize("is_early", [True, False])
def test_hurry_skips_the_grace_periods_exactly_once(
    muster_home: Path, counting_supervisor: type[CountingSupervisor], is_early: bool
) -> None:
    run = make_run()
    if not is_early:
        run.begin_attempt()
    run.interrupt("cancelled from Prefect")
    run.hurry()
    if is_early:
        run.begin_attempt()
    run.hurry()
    run.end_attempt()
    run.close()

    assert counting_supervisor.hurried == 1
