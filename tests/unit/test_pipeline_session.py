"""A pipeline of steps from its first run to its final state, on a fake Prefect server."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import pytest
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.client.schemas.responses import SetStateStatus
from prefect.exceptions import Pause

from tasks.pipeline import progress_report, server_requests
from tasks.pipeline import session as session_module
from tasks.pipeline.decision import StageRun
from tasks.pipeline.matrix_page import Artifacts
from tasks.pipeline.progress_report import ProgressReport
from tasks.pipeline.session import PipelineSession
from tasks.pipeline.stage_runs import describe_stage_run
from tasks.record.code_store import store_project
from tasks.record.evaluations import (
    CheckpointNote,
    EvaluationNote,
    EvaluationsJson,
    EvaluationState,
    locate_evaluation_result,
)
from tasks.record.places import RunPlace
from tasks.record.states import RunState
from tasks.spec.pipeline import Stage, parse_pipeline

START = datetime(2026, 1, 1, tzinfo=UTC)


@dataclass
class FakeRuns:
    """The runs of a pipeline on a fake Prefect server.

    The runs still exist when a test continues the pipeline with a new `PipelineSession`.
    """

    runs: list[StageRun] = field(default_factory=list)
    #: Mapping from the name of a stage, such as `a`, to the spec of its run. A stage with a matrix
    #: has a run for each combination of values. The names of these runs are `a.1`, `a.2` and so on.
    specs: dict[str, Mapping[str, Any]] = field(default_factory=dict)
    #: Mapping from the name of a stage, such as `a` or `a.1`, to the tags of its run.
    tags: dict[str, list[str]] = field(default_factory=dict)
    #: Earlier runs with the same inputs as a stage of this pipeline. The pipeline reuses the
    #: results of these runs.
    cached: list[StageRun] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    artifacts: dict[str, Any] = field(default_factory=dict)
    #: Mapping from a tag to the completed flow run with this tag. Steps with the same inputs have
    #: the same tag.
    cache: dict[str, FlowRun] = field(default_factory=dict)
    #: Mapping from the id of an evaluation's flow run to the type of its state.
    evaluations: dict[UUID, StateType] = field(default_factory=dict)

    def create(
        self,
        _client: object,
        _pipeline: UUID,
        _stage: Stage,
        unit: str,
        number: int,
        *,
        spec: Mapping[str, Any],
        tags: list[str],
    ) -> StageRun:
        run = StageRun(
            stage=unit,
            number=number,
            flow_run_id=str(uuid4()),
            name=f"{unit}-run-{number}",
            state="Running",
            message="",
            ending=None,
            ended_at=None,
        )
        self.runs.append(run)
        self.specs[unit] = spec
        self.tags[unit] = tags
        return run

    def end(self, unit: str, result: object = None, ending: RunState = RunState.COMPLETED) -> None:
        """Write the result file of an active run, and end the run.

        `unit` is the name of the run's stage, such as `a`. The runs of a stage with a matrix are
        named `a.1`, `a.2` and so on.
        """
        [index] = [i for i, run in enumerate(self.runs) if run.stage == unit and not run.ending]
        run = self.runs[index]
        attempt = RunPlace.of(run.name).attempt(1).directory
        attempt.mkdir(parents=True, exist_ok=True)
        (attempt / "result.json").write_text(json.dumps(result))
        state = ending.value.title()
        ended_at = START + timedelta(seconds=len(self.runs))
        self.runs[index] = replace(
            run, state=state, message="UNKNOWN: x", ending=ending, ended_at=ended_at
        )

    def report(self, unit: str, values: Mapping[int, float]) -> None:
        """Append lines to the metrics file of a run. `values` maps a step to a metric value."""
        run = next(run for run in self.runs if run.stage == unit)
        place = RunPlace.of(run.name)
        attempt = place.attempt(1).directory
        attempt.mkdir(parents=True, exist_ok=True)
        record = {"run_id": run.name, "state": "running", "started_at": 1.0}
        record["attempts"] = [{"number": 1, "state": "running"}]
        place.record.write_text(json.dumps(record))
        metrics = attempt / "metrics.jsonl"
        progress = {"jsonl": str(metrics), "step": "step"}
        (attempt / "spec.yaml").write_text(json.dumps({"progress": progress}))
        with metrics.open("a") as file:
            for step, value in values.items():
                file.write(json.dumps({"step": step, "reward": value}) + "\n")

    def evaluate(self, unit: str, name: str, accuracies: Mapping[int, float | None]) -> None:
        """Write the records of evaluations, one for each checkpoint of a run.

        `accuracies` maps the step of each checkpoint to the result of its evaluation. The result is
        None while the evaluation is running.
        """
        run = next(run for run in self.runs if run.stage == unit)
        place = RunPlace.of(run.name)
        place.directory.mkdir(parents=True, exist_ok=True)
        notes = []
        checkpoints = []
        for number, (step_number, accuracy) in enumerate(accuracies.items(), start=1):
            path = f"/checkpoints/{unit}/{step_number}"
            checkpoints.append(CheckpointNote(number=number, path=path, step=step_number))
            flow_run_id = uuid4()
            state_type = StateType.RUNNING if accuracy is None else StateType.COMPLETED
            self.evaluations[flow_run_id] = state_type
            note = EvaluationNote(name=name, checkpoint=number, state=EvaluationState.RUNNING)
            notes.append(note.with_changes(flow_run_id=str(flow_run_id)))
            if accuracy is not None:
                result = locate_evaluation_result(place, name, number)
                result.parent.mkdir(exist_ok=True)
                result.write_text(json.dumps({"accuracy": accuracy}))
        EvaluationsJson(checkpoints=tuple(checkpoints), evaluations=tuple(notes)).write(place)

    def cancel(self, flow_run_id: UUID, labels: Mapping[str, str]) -> None:
        """Set the state of a run to Cancelled, and set the labels of its flow run."""
        [index] = [i for i, run in enumerate(self.runs) if run.flow_run_id == str(flow_run_id)]
        run = self.runs[index]
        flow_run = FlowRun(
            id=flow_run_id,
            flow_id=uuid4(),
            name=run.name,
            labels=dict(labels),
            state=State(type=StateType.CANCELLED, timestamp=START),
        )
        self.runs[index] = describe_stage_run(run.stage, run.number, flow_run)

    @property
    def active(self) -> list[str]:
        return [run.stage for run in self.runs if run.ending is None]


@dataclass
class FakeClient:
    server: FakeRuns
    labels: dict[UUID, Mapping[str, str]] = field(default_factory=dict)

    def read_flow_run_states(self, _flow_run_id: UUID) -> list[State[Any]]:
        return [State(type=StateType.RUNNING, timestamp=START)]

    def read_flow_runs(self, *, flow_run_filter: Any, **_: Any) -> list[FlowRun]:
        return [
            FlowRun(id=id_, flow_id=uuid4(), state=State(type=self.server.evaluations[id_]))
            for id_ in flow_run_filter.id.any_
        ]

    def update_flow_run_labels(self, flow_run_id: UUID, labels: Mapping[str, str]) -> None:
        self.labels[flow_run_id] = labels

    def set_flow_run_state(
        self, flow_run_id: UUID, state: State[Any], *, force: bool
    ) -> SimpleNamespace:
        assert state.is_cancelling() and not force
        self.server.cancel(flow_run_id, self.labels[flow_run_id])
        return SimpleNamespace(status=SetStateStatus.ACCEPT, state=state)


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, muster_home: object) -> FakeRuns:
    """Replace the Prefect server, on which pipelines create their runs, by a fake."""
    fake = FakeRuns()

    @contextmanager
    def connect(_connection: object) -> Iterator[FakeClient]:
        yield FakeClient(fake)

    def use_cached(_client: object, flow_run: FlowRun, unit: str, **_: Any) -> None:
        run = next(run for run in fake.runs if run.flow_run_id == str(flow_run.id))
        fake.cached.append(replace(run, stage=unit, number=1, state="Cached"))

    def find_cached(_client: object, tag: str) -> list[FlowRun]:
        return [fake.cache[tag]] if tag in fake.cache else []

    def show_skipped(_client: object, stage: str, reason: str, **_: Any) -> None:
        fake.skipped[stage] = reason

    def show(_self: object, _client: object, key: str, shown: Any) -> None:
        fake.artifacts[key] = shown

    replaced = {
        "create_stage_run": fake.create,
        "list_stage_runs": lambda *_: list(fake.runs),
        "list_cached_runs": lambda *_: list(fake.cached),
        "find_cached_runs": find_cached,
        "use_cached_run": use_cached,
    }
    for name, value in replaced.items():
        monkeypatch.setattr(session_module, name, value)
    monkeypatch.setattr(server_requests.PrefectConnection, "client", connect)
    monkeypatch.setattr(progress_report, "show_skipped_stage", show_skipped)
    monkeypatch.setattr(progress_report.flow_runs, "set_running_message", lambda *_: None)
    monkeypatch.setattr(ProgressReport, "say", lambda *_: None)
    monkeypatch.setattr(Artifacts, "show", show)
    return fake


def step(name: str, **more: Any) -> dict[str, Any]:
    return {"name": name, "call": "steps:run", "on": "host", **more}


def start(*stages: dict[str, Any]) -> PipelineSession:
    """Return a new `PipelineSession` for a pipeline with these stages."""
    spec = parse_pipeline({"name": "steps", "stages": list(stages)})
    return PipelineSession(spec, flow_run_id=uuid4(), api_url="http://127.0.0.1:9/api")


def arguments(server: FakeRuns, unit: str) -> Any:
    env = server.specs[unit]["components"]["step"]["env"]
    return json.loads(env["MUSTER_STEP_ARGS"])


def test_results_are_handed_over_and_stages_run_in_parallel(server: FakeRuns) -> None:
    use = {"needs": ["a"], "args": {"n": "${stage.a.result.n}"}}
    stages = [step("a"), step("b", **use), step("c", **use), step("d", args={"s": "x"})]
    session = start(*stages)

    assert session.advance()
    first = server.active
    server.end("a", {"n": 3})
    assert session.advance()
    second = server.active
    server.end("b")
    assert session.advance()
    third = server.active
    server.end("c")
    assert session.advance()
    server.end("d")

    assert not session.advance()
    assert (first, second, third) == (["a"], ["b", "c"], ["c"])
    assert arguments(server, "b") == {"n": 3}
    assert session.conclude().message == "all stages are complete: a, b, c, d"


def test_new_process_continues_with_the_active_runs(server: FakeRuns) -> None:
    stages = [step("a"), step("b", needs=[]), step("c")]
    start(*stages).advance()

    session = start(*stages)
    session.advance()

    assert server.active == ["a", "b"]
    server.end("a")
    server.end("b")
    session.advance()
    assert server.active == ["c"]


def test_false_condition_skips_a_stage_and_the_stages_that_use_it(server: FakeRuns) -> None:
    stages = [
        step("eval"),
        step("train", when="${stage.eval.result.score} > 0.6"),
        step("export", args={"path": "${stage.train.result}"}),
        step("report"),
    ]
    session = start(*stages)
    session.advance()
    server.end("eval", {"score": 0.5})

    session.advance()

    assert server.active == ["report"]
    assert server.skipped == {
        "train": "the condition of the stage is false: ${stage.eval.result.score} > 0.6",
        "export": "the stage uses a value of stage train, but stage train was skipped",
    }
    server.end("report")
    assert not session.advance()
    state = session.conclude()
    assert state.type is StateType.COMPLETED
    assert state.message is not None
    assert state.message.startswith("complete: eval, report; stage train: skipped, because the ")


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ({"score": "high"}, "when: the text 'high' cannot be compared with 0.6"),
        ({"sc": 1}, "when: the result has no key 'score'; its keys are: sc"),
    ],
)
def test_condition_without_a_value_fails_the_pipeline(
    server: FakeRuns, result: object, message: str
) -> None:
    session = start(step("eval"), step("train", when="${stage.eval.result.score} > 0.6"))
    session.advance()
    server.end("eval", result)

    assert not session.advance()
    assert session.conclude().message == f"stage train: USER_ERROR: {message}"


def test_step_without_a_usable_result_fails_and_is_repeated_on_request(server: FakeRuns) -> None:
    session = start(step("a"), step("b"))
    session.advance()
    server.end("a")
    [run] = server.runs
    (RunPlace.of(run.name).attempt(1).directory / "result.json").write_text("{")

    assert not session.advance()
    message = session.conclude().message
    assert message is not None and "stage a: USER_ERROR: the result" in message
    server.runs[0] = replace(run, ended_at=START - timedelta(seconds=1), ending=RunState.COMPLETED)
    start(step("a"), step("b")).advance()
    assert [(run.stage, run.number) for run in server.runs] == [("a", 1), ("a", 2)]


def test_equal_step_of_an_earlier_pipeline_is_not_repeated(server: FakeRuns) -> None:
    first = start(step("a", cache="inputs", args={"n": 1}))
    first.advance()
    server.end("a", {"n": 5})
    [run] = server.runs
    [tag] = [tag for tag in server.tags["a"] if tag.startswith("cache:")]
    state = State(type=StateType.COMPLETED)
    server.cache[tag] = FlowRun(
        id=UUID(run.flow_run_id), flow_id=uuid4(), name=run.name, state=state
    )
    server.runs[0] = replace(run, stage="of-another-pipeline", ending=RunState.COMPLETED)

    stages = [
        step("again", cache="inputs", args={"n": 1}),
        step("other", needs=[], cache="inputs", args={"n": 2}),
        step("use", needs=["again"], args={"n": "${stage.again.result.n}"}),
    ]
    session = start(*stages)
    session.advance()
    session.advance()

    assert [run.stage for run in server.cached] == ["again"]
    assert server.active == ["other", "use"]
    assert arguments(server, "use") == {"n": 5}


def test_best_point_of_a_matrix_is_handed_over_and_shown(server: FakeRuns) -> None:
    grid = step(
        "grid", matrix={"lr": [1, 2, 3]}, at_most=2, best={"by": "score"}, on_failure="continue"
    )
    args = {
        "lr": "${stage.grid.best.point.lr}",
        "run": "${stage.grid.best.run_id}",
        "all": "${stage.grid.results}",
    }
    session = start(grid, step("use", args=args))
    session.advance()
    assert server.active == ["grid.1", "grid.2"]
    server.end("grid.1", {"score": 0.2})
    server.end("grid.2", {"score": 0.9})
    session.advance()
    assert server.active == ["grid.3"]
    server.end("grid.3", ending=RunState.FAILED)

    session.advance()

    assert arguments(server, "use") == {
        "lr": 2,
        "run": "grid.2-run-1",
        "all": [
            {"point": {"lr": 1}, "result": {"score": 0.2}},
            {"point": {"lr": 2}, "result": {"score": 0.9}},
        ],
    }
    shown = server.artifacts["points-grid"]
    assert (
        shown.headline == "grid: 3 of 3 points of the matrix have ended, best score 0.9 at point 2"
    )
    rows = json.loads(shown.data)
    assert rows[1] == {
        "point": "2",
        "lr": "2",
        "state": "Completed",
        "figure": "0.9",
        "best": "best",
    }
    assert rows[2]["state"] == "Failed"


def test_process_hands_over_a_pipeline_with_active_runs(
    server: FakeRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    messages: list[str | None] = []
    monkeypatch.setattr(
        session_module.flow_process,
        "hand_over_flow_run",
        lambda _client, _id, state: messages.append(state.message),
    )
    session = start(step("a"), step("b", needs=[]), step("c"))
    session.advance()
    session.hand_over("its worker stops")

    with pytest.raises(Pause):
        session.advance()

    assert messages and "stage a, b continues" in str(messages[0])
    assert server.active == ["a", "b"]


def reward_grid(**more: Any) -> dict[str, Any]:
    """Return a stage with a matrix of five runs. Runs with a low reward are stopped early."""
    trainer = {"command": ["true"], "checkpoints": "${run.dir}/checkpoints"}
    spec = {
        "name": "a",
        "workload": "sft",
        "env": {"LR": "0"},
        "components": {"trainer": trainer},
        "progress": {"jsonl": "${attempt.dir}/metrics.jsonl", "step": "step"},
    }
    return {
        "name": "grid",
        "spec": spec,
        "matrix": {"env.LR": ["1", "2", "3", "4", "5"]},
        "stop_early": {"by": "reward", "after_step": 2},
        "best": {"by": "reward"},
        **more,
    }


def test_point_below_the_median_is_stopped_early_and_shown(server: FakeRuns) -> None:
    session = start(reward_grid())
    session.advance()
    for number in range(1, 6):
        server.report(f"grid.{number}", {1: number / 10})
    session.advance()
    before = server.active

    for number in range(1, 6):
        server.report(f"grid.{number}", {2: number / 10, 3: number / 10})
    session.advance()
    session.advance()

    assert len(before) == 5
    assert server.active == ["grid.3", "grid.4", "grid.5"]
    stopped = server.runs[0]
    assert (stopped.state, stopped.message) == (
        "stopped early",
        "the best reward until step 3 is 0.1, which is below 0.3, the median of 5 points of the "
        "matrix at step 3",
    )
    shown = server.artifacts["points-grid"]
    assert shown.headline == "grid: 2 of 5 points of the matrix have ended, 2 stopped early"
    rows = json.loads(shown.data)
    assert [row["state"] for row in rows] == ["stopped early"] * 2 + ["Running"] * 3
    assert [row["figure"] for row in rows] == ["0.1", "0.2", "0.3", "0.4", "0.5"]
    assert shown.picture.count("<polyline") == 5


def test_completed_point_is_better_than_a_stopped_one_with_a_better_figure(
    server: FakeRuns,
) -> None:
    use = step("use", args={"lr": "${stage.grid.best.point.env.LR}"})
    session = start(reward_grid(), use)
    session.advance()
    for number in range(1, 6):
        server.report(f"grid.{number}", {3: number / 10})
    session.advance()
    server.report("grid.1", {4: 0.9})
    for number in (3, 4, 5):
        server.end(f"grid.{number}")

    session.advance()
    server.end("use")

    assert arguments(server, "use") == {"lr": "5"}
    assert not session.advance()
    assert session.conclude().message == "all stages are complete: grid, use"


def test_stopped_point_is_the_best_if_no_point_has_completed(server: FakeRuns) -> None:
    use = step("use", args={"lr": "${stage.grid.best.point.env.LR}"})
    session = start(reward_grid(on_failure="continue"), use)
    session.advance()
    for number in range(1, 6):
        server.report(f"grid.{number}", {3: number / 10})
    session.advance()
    for number in (3, 4, 5):
        server.end(f"grid.{number}", ending=RunState.FAILED)

    session.advance()

    assert arguments(server, "use") == {"lr": "2"}
    rows = json.loads(server.artifacts["points-grid"].data)
    assert [row["best"] for row in rows] == ["", "best", "", "", ""]


def evaluated_grid(**keys: Any) -> dict[str, Any]:
    """Return a stage with a matrix of two trainings, which an evaluation compares."""
    spec = {
        "name": "rewards",
        "workload": "sft",
        "env": {"LR": "1"},
        "components": {"trainer": {"command": ["true"], "checkpoints": "saved"}},
        "evals": {"math": {"command": ["true"]}},
    }
    best = {"by": "math.accuracy"}
    return {"name": "grid", "spec": spec, "matrix": {"env.LR": ["1", "2"]}, "best": best, **keys}


def test_evaluations_choose_the_best_point_and_its_best_checkpoint(server: FakeRuns) -> None:
    args = {
        "lr": "${stage.grid.best.point.env.LR}",
        "checkpoint": "${stage.grid.best.checkpoint}",
    }
    session = start(evaluated_grid(), step("use", args=args))
    session.advance()
    server.evaluate("grid.1", "math", {10: 0.4, 20: 0.5})
    server.evaluate("grid.2", "math", {10: 0.9, 20: 0.2})
    server.end("grid.1")
    server.end("grid.2")

    session.advance()

    assert arguments(server, "use") == {"lr": "2", "checkpoint": "/checkpoints/grid.2/10"}
    shown = server.artifacts["points-grid"]
    assert shown.headline == (
        "grid: 2 of 2 points of the matrix have ended, best math.accuracy 0.9 at point 2"
    )
    assert shown.picture.count("<polyline") == 2


def test_stage_waits_for_the_evaluations_that_choose_its_best_point(server: FakeRuns) -> None:
    use = step("use", args={"lr": "${stage.grid.best.point.env.LR}"})
    session = start(evaluated_grid(), use)
    session.advance()
    server.evaluate("grid.1", "math", {10: 0.4})
    server.evaluate("grid.2", "math", {10: None})
    server.end("grid.1")
    server.end("grid.2")

    is_waiting = session.advance()
    active_before = server.active
    server.evaluate("grid.2", "math", {10: 0.9})
    session.advance()

    assert (is_waiting, active_before) == (True, [])
    assert server.active == ["use"]
    assert arguments(server, "use") == {"lr": "2"}


def test_failed_evaluation_does_not_delay_the_next_stage(server: FakeRuns) -> None:
    use = step("use", args={"lr": "${stage.grid.best.point.env.LR}"})
    session = start(evaluated_grid(), use)
    session.advance()
    server.evaluate("grid.1", "math", {10: 0.4})
    server.evaluate("grid.2", "math", {10: None})
    server.evaluations = dict.fromkeys(server.evaluations, StateType.CRASHED)
    server.end("grid.1")
    server.end("grid.2")

    session.advance()

    assert arguments(server, "use") == {"lr": "1"}


def test_next_process_stops_a_point_whose_reason_is_recorded(server: FakeRuns) -> None:
    """The first process of a pipeline is killed just before it cancels a run.

    The process has already recorded why the run must stop. So the next process must cancel the run.
    """
    session = start(reward_grid())
    session.advance()
    server.runs[1] = replace(server.runs[1], stop_reason="reward 0 is too low")

    start(reward_grid()).advance()

    assert server.runs[1].state == "stopped early"
    assert server.active == ["grid.1", "grid.3", "grid.4", "grid.5"]


def test_missing_optuna_is_reported_before_anything_starts(
    server: FakeRuns, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session_module, "read_specs_of_deployments", lambda *_: {})
    monkeypatch.setattr(session_module, "read_secrets", lambda *_, **__: {})
    monkeypatch.setitem(sys.modules, "optuna", None)
    session = start(reward_grid())

    session.prepare()

    assert not session.advance()
    assert server.runs == []
    message = str(session.conclude().message)
    assert (
        message.startswith("USER_ERROR: ")
        and "stages.0.stop_early: this key needs the Python" in message
    )


@pytest.fixture
def project(server: FakeRuns, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Return a project with the function `steps:run`, which has the required argument `n`."""
    monkeypatch.setattr(session_module, "read_specs_of_deployments", lambda *_: {})
    monkeypatch.setattr(session_module, "read_secrets", lambda *_, **__: {})
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "pyproject.toml").write_text("")
    (folder / "steps.py").write_text("def run(n):\n    return n\n")
    return folder


@pytest.mark.parametrize(
    ("directory", "message"),
    [
        ("empty", "stages.1.call: the project folder of the function other:run is unknown"),
        ("project", "stages.1.call: the project has no module 'other'"),
    ],
)
def test_missing_function_of_a_spec_from_the_form_fails_before_any_stage(
    server: FakeRuns,
    project: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    directory: str,
    message: str,
) -> None:
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path / directory)
    command = {"name": "first", "command": ["true"], "on": "host"}
    session = start(command, {**step("other", args={"n": 1}), "call": "other:run"})

    session.prepare()

    assert not session.advance()
    assert server.runs == []
    final_message = str(session.conclude().message)
    assert final_message.startswith("USER_ERROR: ") and message in final_message


def test_function_of_stored_code_is_checked_with_its_arguments(
    server: FakeRuns, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = store_project(project)
    monkeypatch.chdir(tmp_path)
    session = start(step("a", code=code, args={"m": 1}))

    session.prepare()

    assert not session.advance()
    assert server.runs == []
    assert "stages.0.args.m: run has no argument 'm'" in str(session.conclude().message)


def test_pipeline_with_valid_stored_code_begins_outside_of_a_project(
    server: FakeRuns, project: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = store_project(project)
    monkeypatch.chdir(tmp_path)
    session = start(step("a", code=code, args={"n": 1}))

    session.prepare()

    assert session.advance()
    assert server.active == ["a"]


@pytest.mark.parametrize(
    ("decide_s", "expected_s"),
    [
        (0.05, 2.0),
        # a check takes 0.5 s, for example if the pipeline has hundreds of runs: the wait is 5 s
        (0.5, 5.0),
        (60.0, 20.0),
    ],
)
def test_wait_between_two_checks_grows_with_the_time_that_a_check_takes(
    decide_s: float, expected_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    session = start(step("a"))
    session._decide_s = decide_s
    waits: list[float] = []

    def wait(delay_s: float) -> bool:
        waits.append(delay_s)
        return False

    monkeypatch.setattr(session._requests, "wait", wait)
    session.wait()

    assert waits == [expected_s]
