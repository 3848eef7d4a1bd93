"""Tests of the environment variables that experiment trackers get."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from tasks.spec.errors import InvalidSpec
from tasks.spec.loading import dump_spec, parse_spec, parse_yaml
from tasks.spec.run import RunSpec
from tasks.train.plan import component_env

RUN_ID = "x-sft-20260101-000000-abcd91c2"
#: Environment variables that select a run in Weights & Biases.
SELECTING = {
    "WANDB_RUN_ID": "mine",
    "WANDB_RESUME": "never",
    "WANDB_RESUME_FROM": "mine?_step=10",
    "WANDB_FORK_FROM": "mine?_step=10",
}


@pytest.fixture(autouse=True)
def no_tracker_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (*SELECTING, "WANDB_RUN_GROUP", "WANDB_NAME", "WANDB_JOB_TYPE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("MLFLOW_RUN_ID", "MLFLOW_RUN_CONTEXT"):
        monkeypatch.delenv(name, raising=False)


def make_spec(
    env: Mapping[str, str] = {}, trainer_env: Mapping[str, str] = {}, **keys: Any
) -> RunSpec:
    """Return a spec with the components `api` and `trainer`."""
    components = {
        "api": {"command": ["run"]},
        "trainer": {"command": ["run"], "env": dict(trainer_env)},
    }
    content = {"name": "x", "workload": "sft", "env": dict(env), "components": components}
    return parse_spec(content | keys)


def tracker_variables(
    spec: RunSpec, component: str = "trainer", attempt: int = 1
) -> dict[str, str]:
    """Return the environment variables of W&B and MLflow that a component gets."""
    env = component_env(spec, component, RUN_ID, attempt)
    return {name: env[name] for name in env if name.startswith(("WANDB_", "MLFLOW_"))}


def test_all_attempts_and_components_are_in_one_group_of_wandb() -> None:
    spec = make_spec()

    variables = [
        tracker_variables(spec, component, attempt)
        for component in ("api", "trainer")
        for attempt in (1, 2)
    ]

    assert {each["WANDB_RUN_GROUP"] for each in variables} == {RUN_ID}
    assert [each["WANDB_NAME"] for each in variables] == [
        f"{RUN_ID}--a01-api",
        f"{RUN_ID}--a02-api",
        f"{RUN_ID}--a01-trainer",
        f"{RUN_ID}--a02-trainer",
    ]
    assert [each["WANDB_JOB_TYPE"] for each in variables] == ["api", "api", "trainer", "trainer"]


def test_no_process_gets_the_id_of_another_wandb_run() -> None:
    variables = tracker_variables(make_spec(), attempt=2)

    assert not variables.keys() & SELECTING.keys()


@pytest.mark.parametrize("place", ["run", "component", "environment"])
@pytest.mark.parametrize("name", SELECTING)
def test_muster_sets_no_wandb_variable_if_the_user_selects_a_wandb_run(
    name: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = {name: SELECTING[name]}
    if place == "environment":
        monkeypatch.setenv(name, SELECTING[name])
    spec = make_spec(
        env=chosen if place == "run" else {}, trainer_env=chosen if place == "component" else {}
    )

    variables = tracker_variables(spec, attempt=2)

    of_wandb = {key: value for key, value in variables.items() if key.startswith("WANDB_")}
    assert of_wandb == chosen


@pytest.mark.parametrize(
    "chosen",
    [{"WANDB_NAME": "mine"}, {"WANDB_RUN_GROUP": "mine"}, {"WANDB_JOB_TYPE": "mine"}],
)
@pytest.mark.parametrize("place", ["run", "component"])
def test_name_in_the_spec_replaces_only_the_name_from_muster(
    chosen: dict[str, str], place: str
) -> None:
    spec = make_spec(
        env=chosen if place == "run" else {}, trainer_env=chosen if place == "component" else {}
    )

    variables = tracker_variables(spec)

    from_muster = {
        "WANDB_RUN_GROUP": RUN_ID,
        "WANDB_NAME": f"{RUN_ID}--a01-trainer",
        "WANDB_JOB_TYPE": "trainer",
    }
    assert {name: variables[name] for name in from_muster} == from_muster | chosen


def test_mode_in_the_spec_is_kept() -> None:
    variables = tracker_variables(make_spec(env={"WANDB_MODE": "offline"}))

    assert variables["WANDB_MODE"] == "offline"
    assert variables["WANDB_RUN_GROUP"] == RUN_ID


def test_runs_of_mlflow_are_tagged_with_run_attempt_and_component() -> None:
    variables = tracker_variables(make_spec(), attempt=2)

    assert json.loads(variables["MLFLOW_RUN_CONTEXT"]) == {
        "muster.run": RUN_ID,
        "muster.attempt": "2",
        "muster.component": "trainer",
    }


def test_run_of_mlflow_is_a_child_of_its_parent() -> None:
    env = component_env(make_spec(), "trainer", RUN_ID, 2, mlflow_parent="0123abcd")

    assert json.loads(env["MLFLOW_RUN_CONTEXT"])["mlflow.parentRunId"] == "0123abcd"


@pytest.mark.parametrize("name", ["MLFLOW_RUN_ID", "MLFLOW_RUN_CONTEXT"])
@pytest.mark.parametrize("place", ["run", "component"])
def test_muster_sets_no_mlflow_variable_if_the_user_selects_an_mlflow_run(
    name: str, place: str
) -> None:
    chosen = {name: "{}"}
    spec = make_spec(
        env=chosen if place == "run" else {}, trainer_env=chosen if place == "component" else {}
    )

    variables = tracker_variables(spec, attempt=2)

    of_mlflow = {key: value for key, value in variables.items() if key.startswith("MLFLOW_")}
    assert of_mlflow == chosen


def test_without_tracker_only_variables_of_the_spec_are_set() -> None:
    spec = make_spec(env={"WANDB_MODE": "offline"}, tracker="off")

    assert tracker_variables(spec) == {"WANDB_MODE": "offline"}


@pytest.mark.parametrize("word", ["off", "'off'", "false"])
def test_tracker_off_in_yaml_is_not_read_as_false(word: str) -> None:
    # YAML reads the word `off` as the value false.
    text = (
        f"{{name: x, workload: sft, components: {{trainer: {{command: [run]}}}}, tracker: {word}}}"
    )

    spec = parse_spec(parse_yaml(text, "x.yaml"))

    assert spec.tracker == "off"
    assert parse_spec(parse_yaml(dump_spec(spec), "spec.yaml")).tracker == "off"


def test_unknown_value_of_tracker_is_refused() -> None:
    with pytest.raises(InvalidSpec, match="tracker"):
        make_spec(tracker="wandb")
