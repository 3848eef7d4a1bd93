"""Tests of the parameter schema from which the Prefect UI makes the form of a run."""

from __future__ import annotations

from typing import Any

import pytest
from prefect.utilities.callables import parameter_schema
from prefect.utilities.schema_tools.validation import is_valid_schema, validate
from pydantic import BaseModel

from flows.train import train
from tasks.spec.component import Component
from tasks.spec.rollout import Rollout
from tasks.spec.run import Gang, Progress, RunSpec
from tasks.spec.values import list_key_schemas

#: Schema of the parameters of the flow `train`, as stored in a deployment on the Prefect server.
SCHEMA = parameter_schema(train.fn).model_dump_for_openapi()
SPEC: dict[str, Any] = {
    "name": "trial",
    "workload": "sft",
    "components": {"trainer": {"command": ["python", "train.py"]}},
}


def find_faults(spec: dict[str, Any]) -> list[str]:
    """Return the faults that the Prefect server finds in the parameter `spec` of a new run."""
    return [error.message for error in validate({"spec": spec}, SCHEMA)]


def change_spec(path: str, value: object) -> dict[str, Any]:
    """Return a valid spec with another value at a dotted path."""
    *parents, key = path.split(".")
    spec: dict[str, Any] = {**SPEC, "components": {"trainer": {**SPEC["components"]["trainer"]}}}
    mapping = spec
    for parent in parents:
        mapping = mapping[parent]
    mapping[key] = value
    return spec


@pytest.mark.parametrize("model", [RunSpec, Component, Rollout, Gang, Progress])
def test_every_key_is_either_in_the_form_or_outside_of_it(model: type[BaseModel]) -> None:
    schema = model.model_json_schema()

    assert list(list_key_schemas(schema)) == [
        field.alias or name for name, field in model.model_fields.items()
    ]
    outside = {pattern.strip("^$") for pattern in schema["patternProperties"]}
    assert outside and not outside & set(schema["properties"])
    assert not outside & set(schema.get("required", ()))


def test_form_shows_only_the_usual_keys() -> None:
    definitions = SCHEMA["definitions"]

    assert list(definitions["Component"]["properties"]) == [
        "command",
        "env",
        "gpus",
        "checkpoints",
        "keep",
    ]
    assert "stall_after_s" in definitions["RunSpec"]["properties"]
    assert "containment" not in definitions["RunSpec"]["properties"]


def test_schema_is_valid() -> None:
    is_valid_schema(SCHEMA)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("containment", "namespace"),
        ("ray", {"address": "http://127.0.0.1:8265"}),
        ("start_order", ["trainer"]),
        ("components.trainer.stop", {"signal": "SIGINT", "grace_s": 5}),
        ("components.trainer.ready", {"tcp": "127.0.0.1:${trainer.port}"}),
        # null is valid, because a run's stored parameters contain null for each omitted key
        ("watch", None),
        ("components.trainer.live", None),
    ],
)
def test_server_accepts_keys_outside_the_form(path: str, value: object) -> None:
    spec = change_spec(path, value)

    assert find_faults(spec) == []


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("containment", "strong"),
        ("finish_within_s", -1),
        ("components.trainer.launcher", "slurm"),
        ("components.trainer.stop", {"grace_s": "long"}),
        ("components.trainer.no_such_key", 1),
        ("no_such_key", 1),
    ],
)
def test_server_refuses_bad_values_of_keys_outside_the_form(path: str, value: object) -> None:
    spec = change_spec(path, value)

    assert find_faults(spec)
