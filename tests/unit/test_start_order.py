"""The order in which components start, also by way of a server that keeps no order of keys."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import yaml

from tasks.spec.errors import InvalidSpec
from tasks.spec.loading import dump_spec, parse_spec, resolve
from tasks.spec.pipeline import add_deployment_specs, parse_pipeline
from tasks.spec.run import RunSpec
from tasks.train import deploying
from tasks.train.deploying import load_pipeline_spec, load_run_spec
from tests.support.submitting import SubmitServer

#: PostgreSQL would have them as judge, sandbox, trainer, environment.
pytestmark = pytest.mark.usefixtures("muster_home")

NAMES = ["environment", "sandbox", "judge", "trainer"]


def spec(*names: str, **more: Any) -> dict[str, Any]:
    components = {name: {"command": ["true"]} for name in names or NAMES}
    return {"name": "x", "workload": "grpo", **more, "components": components}


def through_jsonb(data: Any) -> Any:
    """As a column of PostgreSQL keeps it: keys by length, then by bytes."""
    if isinstance(data, dict):
        keys = sorted(data, key=lambda key: (len(key.encode()), key.encode()))
        return {key: through_jsonb(data[key]) for key in keys}
    return [through_jsonb(item) for item in data] if isinstance(data, list) else data


def order_of(data: object) -> list[str]:
    return list(RunSpec.model_validate(data).components)


def faults_of(data: object) -> list[str]:
    with pytest.raises(InvalidSpec) as caught:
        parse_spec(data)
    return [str(fault) for fault in caught.value.faults]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "spec.yaml"
    path.write_text(yaml.safe_dump(spec(), sort_keys=False))
    return path


def test_a_deployment_s_run_starts_in_the_order_of_its_file(file: Path) -> None:
    kept = through_jsonb(load_run_spec(str(file))["spec"])

    assert list(kept["components"]) == ["judge", "sandbox", "trainer", "environment"]
    assert order_of(kept) == NAMES


def test_a_run_that_is_submitted_starts_in_the_order_of_its_file(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = SubmitServer()
    monkeypatch.setattr(deploying, "to_server", lambda: nullcontext(server))

    deploying.submit(file, set=("components.api.command=[run-api]",))

    kept = through_jsonb(server.created[0]["parameters"]["spec"])
    assert order_of(kept) == [*NAMES, "api"]


def test_the_run_of_a_stage_starts_in_the_order_of_its_file(file: Path) -> None:
    pipeline = {"name": "two", "stages": [{"name": "a", "spec": str(file)}]}
    (file.parent / "two.yaml").write_text(yaml.safe_dump(pipeline))

    kept = parse_pipeline(through_jsonb(load_pipeline_spec(str(file.parent / "two.yaml"))["spec"]))
    started = parse_spec(kept.stage("a").spec)

    assert order_of(through_jsonb(started.written())) == NAMES


def test_so_does_that_of_a_stage_with_the_spec_of_a_deployment(file: Path) -> None:
    stage = {"name": "a", "deployment": "train/a", "set": {"components.api.command": ["run-api"]}}
    deployed = through_jsonb(load_run_spec(str(file))["spec"])

    whole = add_deployment_specs(
        parse_pipeline({"name": "one", "stages": [stage]}), {"a": deployed}
    )

    assert order_of(through_jsonb(whole.stage("a").spec)) == [*NAMES, "api"]


@pytest.mark.parametrize(
    ("more", "order"),
    [
        ({}, NAMES),
        ({"start_order": None}, NAMES),  # a key without a value
        ({"start_order": []}, NAMES),  # as a form sends an empty list
        ({"start_order": NAMES[::-1]}, NAMES[::-1]),
        # a component that was added in a form
        ({"start_order": ["trainer", "judge"]}, ["trainer", "judge", "environment", "sandbox"]),
        ({"start_order": [*NAMES, NAMES[0]]}, NAMES),  # a name counts once
    ],
)
def test_components_start_as_ordered_or_as_written(more: dict[str, Any], order: list[str]) -> None:
    loaded = parse_spec(spec(**more))

    assert list(loaded.components) == list(loaded.processes) == order
    assert list(loaded.start_order) in ([], order)


def test_a_component_that_a_form_leaves_out_need_not_be_taken_out_of_the_list() -> None:
    data = spec("api", "trainer", start_order=["trainer", "api"])

    loaded = RunSpec.model_validate({**data, "components": {**data["components"], "api": None}})

    assert (list(loaded.components), loaded.start_order) == (["trainer"], ("trainer",))
    assert RunSpec.model_validate(loaded.written()) == loaded


def test_the_order_outlives_each_rewriting_of_the_spec() -> None:
    loaded = parse_spec(spec(start_order=["judge"]), ["start_order=[trainer, judge]"])
    order = ["trainer", "judge", "environment", "sandbox"]

    written = yaml.safe_load(dump_spec(loaded))

    assert list(written["components"]) == written["start_order"] == order
    assert list(resolve(loaded, {}, Path("/project")).components) == order
    assert parse_spec(through_jsonb(written)) == parse_spec(loaded) == loaded


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        (
            ["trainer", "sandbocks"],
            "start_order.1: there is no component 'sandbocks' (did you mean `sandbox`?)",
        ),
        (
            ["x"],
            "start_order.0: there is no component 'x' "
            "(remove the name; known components: environment, sandbox, judge, trainer)",
        ),
        ("judge", "start_order: must be a list, found the text 'judge' (write [ITEM, ...])"),
        ([1], "start_order.0: must be text, found 1"),
        ([["judge"]], "start_order.0: must be text, found a list"),
    ],
)
def test_a_name_that_orders_nothing_is_a_fault(order: object, expected: str) -> None:
    assert faults_of(spec(start_order=order)) == [expected]


def test_every_fault_of_the_order_is_told_at_once_beside_those_of_the_components() -> None:
    data = spec("api", "trainer", start_order=["api", "treiner", "traner"])
    data["components"]["api"] = {}

    assert [fault.partition(":")[0] for fault in faults_of(data)] == [
        "start_order.1",
        "start_order.2",
        "components.api.command",
    ]
