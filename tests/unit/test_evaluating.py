"""Evaluations of a run's checkpoints, on a fake Prefect server."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import pytest

from tasks.pipeline.decision import StageRun
from tasks.pipeline.stage_specs import CannotBegin
from tasks.record.checkpoints import find_superfluous_checkpoints
from tasks.record.evaluations import EvaluationsJson
from tasks.record.states import RunState
from tasks.server import flow_runs
from tasks.server.artifacts import Artifacts
from tasks.server.flow_runs import ServerAway
from tasks.spec.loading import parse_spec
from tasks.train import evaluating
from tasks.train.background_work import BackgroundWork
from tasks.train.evaluating import Evaluator, report_late_evaluation
from tasks.train.session import RunSession

RUN_ID = "x-sft-20260101-000000-abcd91c2"


@dataclass
class FakeServer:
    """Fake Prefect server that creates, lists and cancels the flow runs of evaluations."""

    runs: list[StageRun] = field(default_factory=list)
    #: Mapping from the name of an evaluation's task run to the run spec of the evaluation.
    specs: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    tags: list[str] = field(default_factory=list)
    cancelled: list[UUID] = field(default_factory=list)
    #: Error that the next request raises.
    error: Exception | None = None

    @contextmanager
    def connect(self) -> Iterator[Any]:
        if self.error is not None:
            error, self.error = self.error, None
            raise error
        yield SimpleNamespace()

    def create(
        self,
        _client: object,
        _parent: UUID,
        unit: str,
        _number: int,
        *,
        spec: Mapping[str, Any],
        tags: list[str],
    ) -> Any:
        self.specs[unit] = spec
        self.tags = tags
        run = StageRun(
            stage=unit,
            number=1,
            flow_run_id=str(uuid4()),
            name=unit,
            state="Scheduled",
            message="",
            ending=None,
            ended_at=None,
        )
        self.runs.append(run)
        return run

    def end(self, unit: str, ending: RunState, result: object = None, message: str = "") -> None:
        """End an evaluation.

        Args:
            unit: Name of the evaluation's task run.
            ending: Final state of the evaluation.
            result: Result that the evaluation writes to the path in its run spec, or None.
            message: Message of the final state.
        """
        if result is not None:
            path = Path(self.specs[unit]["components"]["step"]["env"]["MUSTER_RESULT"])
            path.write_text(json.dumps(result))
            path.chmod(0o600)
        index = [run.stage for run in self.runs].index(unit)
        state = ending.value.title()
        self.runs[index] = replace(self.runs[index], state=state, ending=ending, message=message)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> FakeServer:
    fake = FakeServer()
    monkeypatch.setattr(evaluating, "create_child_run", fake.create)
    monkeypatch.setattr(evaluating, "describe_stage_run", lambda _name, _number, run: run)
    monkeypatch.setattr(evaluating, "list_stage_runs", lambda *_: list(fake.runs))

    def cancel(_client: object, flow_run_id: UUID, _message: str) -> None:
        fake.cancelled.append(flow_run_id)

    monkeypatch.setattr(flow_runs, "cancel", cancel)
    return fake


@pytest.fixture
def run(muster_home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunSession]:
    """Yield a training that has the evaluation `math`. The first attempt has begun."""
    # Muster stores no copy of this folder, because the folder contains MUSTER_HOME.
    monkeypatch.chdir(tmp_path)
    spec = parse_spec(
        {
            "name": "x",
            "workload": "sft",
            "tags": ["mine"],
            "components": {
                "trainer": {
                    "command": ["true"],
                    "checkpoints": "${run.dir}/checkpoints",
                    "keep": 2,
                }
            },
            "keep_best": {"by": "math.accuracy"},
            "evals": {"math": {"command": ["true", "${checkpoint}", "${checkpoint.step}"]}},
        }
    )
    run = RunSession(spec, run_id=RUN_ID, flow_run_id=uuid4())
    run.begin_attempt()
    (run.place.directory / "checkpoints").mkdir()
    yield run
    run.end_attempt()
    run.close()


def save(run: RunSession, *steps: int) -> None:
    """Write a checkpoint for each step, in the given order.

    While the trainer runs, the newest checkpoint may be incomplete, so Muster does not evaluate
    the newest checkpoint. To get a checkpoint evaluated, a test also saves a newer checkpoint.
    """
    for step in steps:
        (run.place.directory / "checkpoints" / f"step-{step:06}.txt").write_text("weights")


def states(run: RunSession) -> dict[int | None, str]:
    """Return a mapping from the step of a checkpoint to the recorded state of its evaluation."""
    content = EvaluationsJson.read(run.place)
    steps = {one.number: one.step for one in content.checkpoints}
    return {steps[one.checkpoint]: one.state.value for one in content.evaluations}


def list_superfluous(run: RunSession) -> list[int]:
    """Return the steps of the checkpoints that the spec's key `keep` allows Muster to remove."""
    record = run.record.content
    paths = find_superfluous_checkpoints(
        run.spec, run.place, record.attempts, record.foreign_checkpoints
    )
    return [int(path.name.removeprefix("step-").removesuffix(".txt")) for path in paths]


def warnings(run: RunSession) -> list[str]:
    attempt = run.record.content.attempt
    assert attempt is not None
    return [*attempt.warnings]


def test_complete_checkpoint_is_evaluated(server: FakeServer, run: RunSession) -> None:
    save(run, 10, 20)

    Evaluator(run, server.connect).advance()

    [(unit, spec)] = server.specs.items()
    path = str(run.place.directory / "checkpoints" / "step-000010.txt")
    assert unit == "evaluate-math-step-10-1"
    assert spec["components"]["step"]["command"] == ["true", path, "10"]
    assert server.tags == ["mine", f"evaluation-of:{RUN_ID}"]
    assert states(run) == {10: "waiting"}


def test_next_checkpoint_waits_for_the_end_of_the_evaluation(
    server: FakeServer, run: RunSession
) -> None:
    evaluator = Evaluator(run, server.connect)
    save(run, 10, 20)
    evaluator.advance()
    save(run, 30, 40)
    evaluator.advance()
    created_before = [*server.specs]

    server.end("evaluate-math-step-10-1", RunState.COMPLETED, {"accuracy": 0.5})
    evaluator.advance()

    assert created_before == ["evaluate-math-step-10-1"]
    assert states(run) == {10: "completed", 20: "skipped", 30: "waiting"}


def test_failed_evaluation_is_a_warning_of_the_training(
    server: FakeServer, run: RunSession
) -> None:
    evaluator = Evaluator(run, server.connect)
    save(run, 10, 20)
    evaluator.advance()

    server.end("evaluate-math-step-10-1", RunState.FAILED, message="EXIT_CODE: exit code 3")
    evaluator.advance()

    assert states(run)[10] == "failed"
    assert "the evaluation math of step 10 failed: EXIT_CODE: exit code 3" in warnings(run)
    assert run.supervisor.decision is None


def test_result_that_is_not_json_is_a_failed_evaluation(
    server: FakeServer, run: RunSession
) -> None:
    evaluator = Evaluator(run, server.connect)
    save(run, 10, 20)
    evaluator.advance()

    server.end("evaluate-math-step-10-1", RunState.COMPLETED, {"accuracy": float("nan")})
    evaluator.advance()

    assert states(run)[10] == "failed"
    assert any("is not JSON" in warning for warning in warnings(run))


def test_missing_deployment_fails_only_the_evaluation(
    server: FakeServer, run: RunSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise CannotBegin("The Prefect server has no deployment train/any")

    monkeypatch.setattr(evaluating, "create_child_run", refuse)
    save(run, 10, 20)

    Evaluator(run, server.connect).advance()

    assert states(run) == {10: "failed"}
    assert any("no deployment train/any" in warning for warning in warnings(run))


def test_server_that_does_not_answer_is_asked_again(server: FakeServer, run: RunSession) -> None:
    evaluator = Evaluator(run, server.connect)
    save(run, 10, 20)
    server.error = ServerAway("no answer")

    evaluator.advance()
    states_before = states(run)
    evaluator.advance()

    assert states_before == {10: "chosen"}
    assert states(run) == {10: "waiting"}


def test_next_process_creates_no_evaluation_again(server: FakeServer, run: RunSession) -> None:
    save(run, 10, 20)
    Evaluator(run, server.connect).advance()

    Evaluator(run, server.connect).advance()

    assert len(server.runs) == 1


def test_last_checkpoint_of_a_completed_training_is_evaluated(
    server: FakeServer, run: RunSession, listener_errors: list[str]
) -> None:
    evaluator = Evaluator(run, server.connect)
    save(run, 10, 20)
    evaluator.advance()

    for state in (RunState.RUNNING, RunState.STOPPING, RunState.COMPLETED):
        run.record.move(state)
    evaluator.advance()

    assert states(run) == {10: "waiting", 20: "waiting"}
    assert server.cancelled == []
    # The test has set the states by hand. So the record refuses the states of the real teardown.
    run.end_attempt()
    run.close()
    assert all("IllegalTransition" in text for text in listener_errors)
    listener_errors.clear()


def test_cancelled_training_cancels_its_evaluations(server: FakeServer, run: RunSession) -> None:
    evaluator = Evaluator(run, server.connect)
    save(run, 10, 20)
    evaluator.advance()

    run.interrupt("cancelled by a person")
    run.end_attempt()
    run.close()
    evaluator.advance()

    assert server.cancelled == [UUID(server.runs[0].flow_run_id)]
    assert states(run) == {10: "waiting"}


def test_checkpoints_that_evaluations_need_are_not_removed(
    server: FakeServer, run: RunSession
) -> None:
    evaluator = Evaluator(run, server.connect)
    save(run, 10, 20)
    evaluator.advance()
    server.end("evaluate-math-step-10-1", RunState.COMPLETED, {"accuracy": 0.5})
    save(run, 30, 40)
    evaluator.advance()
    save(run, 50, 60, 70, 80)

    before_next_look = list_superfluous(run)
    evaluator.advance()

    # The checkpoint of step 30 is kept because its evaluation has not ended. The checkpoint of step
    # 10 is kept because step 10 has the best result.
    assert before_next_look == [20]
    assert list_superfluous(run) == [20, 40, 50]


def test_run_with_a_temporary_server_warns_that_nothing_is_evaluated(run: RunSession) -> None:
    save(run, 10, 20)

    Evaluator(run, None).work(BackgroundWork())

    assert any("temporary Prefect server" in warning for warning in warnings(run))
    assert not run.place.evaluations.exists()


@pytest.mark.parametrize(
    ("training_id", "has_training_ended", "expected"),
    [
        (RUN_ID, True, "failed"),
        # The training still runs, and will record that the evaluation has failed. So the process
        # of the evaluation does not record this failure.
        (RUN_ID, False, "waiting"),
        # The training's id comes from a tag, which every user of the Prefect server can change. So
        # an id that leads to another folder is ignored.
        ("../other", True, "waiting"),
    ],
)
def test_evaluation_that_ends_after_its_training_records_its_end(
    server: FakeServer,
    run: RunSession,
    monkeypatch: pytest.MonkeyPatch,
    training_id: str,
    has_training_ended: bool,
    expected: str,
) -> None:
    save(run, 10, 20)
    Evaluator(run, server.connect).advance()
    if has_training_ended:
        run.end_attempt()
        run.close()
    shown: list[str] = []
    monkeypatch.setattr(
        Artifacts, "show", lambda _self, _client, _key, page: shown.append(page.data)
    )
    evaluation: Any = SimpleNamespace(
        flow_run_id=UUID(server.runs[0].flow_run_id),
        run_id="math-step-20260101-000000-abcd91c2",
        record=SimpleNamespace(state=RunState.FAILED),
        verdict=SimpleNamespace(message="EXIT_CODE: exit code 3"),
        mask=str,
    )

    report_late_evaluation(evaluation, training_id, server.connect)

    assert states(run) == {10: expected}
    assert ["failed: EXIT" in page for page in shown] == [True] * (expected == "failed")


def test_damaged_record_does_not_stop_the_training(server: FakeServer, run: RunSession) -> None:
    save(run, 10, 20)
    run.place.evaluations.write_text("{")
    run.place.evaluations.chmod(0o600)

    Evaluator(run, server.connect).advance()

    assert server.runs == []
    assert run.supervisor.decision is None
