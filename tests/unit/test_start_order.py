"""Tests of the start order of components, also if the server does not keep the order of keys."""

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

pytestmark = pytest.mark.usefixtures("muster_home")

#: Names of components in the order of the spec. PostgreSQL sorts the keys of a JSON object, and so
#: returns these names in another order: judge, sandbox, trainer, environment.
NAMES = ["environment", "sandbox", "judge", "trainer"]


def spec(*names: str, **fields: Any) -> dict[str, Any]:
    """Return a spec with components of these names. Without arguments, the names are NAMES."""
    components = {name: {"command": ["true"]} for name in names or NAMES}
    return {"name": "x", "workload": "grpo", **fields, "components": components}


def through_jsonb(data: Any) -> Any:
    """Return the data as PostgreSQL stores JSON: keys are sorted by length, then by bytes."""
    if isinstance(data, dict):
        keys = sorted(data, key=lambda key: (len(key.encode()), key.encode()))
        return {key: through_jsonb(data[key]) for key in keys}
    if isinstance(data, list):
        return [through_jsonb(item) for item in data]
    return data


def order_of(data: object) -> list[str]:
    """Return the names of the components of a spec, in start order."""
    return list(RunSpec.model_validate(data).components)


def faults_of(data: object) -> list[str]:
    """Parse an invalid spec, and return the error messages about it."""
    with pytest.raises(InvalidSpec) as error_info:
        parse_spec(data)
    return [str(fault) for fault in error_info.value.faults]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A file with a spec whose components are in the order of NAMES."""
    path = tmp_path / "spec.yaml"
    path.write_text(yaml.safe_dump(spec(), sort_keys=False))
    return path


def test_run_of_a_deployment_starts_in_the_order_of_its_file(file: Path) -> None:
    stored = through_jsonb(load_run_spec(str(file))["spec"])

    assert list(stored["components"]) == ["judge", "sandbox", "trainer", "environment"]
    assert order_of(stored) == NAMES


def test_submitted_run_starts_in_the_order_of_its_file(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = SubmitServer()
    monkeypatch.setattr(deploying, "connect_to_configured_server", lambda: nullcontext(server))

    deploying.submit(file, set=("components.api.command=[run-api]",))

    stored = through_jsonb(server.created[0]["parameters"]["spec"])
    assert order_of(stored) == [*NAMES, "api"]


def test_run_of_a_stage_starts_in_the_order_of_its_file(file: Path) -> None:
    pipeline = {"name": "two", "stages": [{"name": "a", "spec": str(file)}]}
    (file.parent / "two.yaml").write_text(yaml.safe_dump(pipeline))

    stored = through_jsonb(load_pipeline_spec(str(file.parent / "two.yaml"))["spec"])
    stage_spec = parse_spec(parse_pipeline(stored).stage("a").spec)

    assert order_of(through_jsonb(stage_spec.written())) == NAMES


def test_run_of_a_stage_starts_in_the_order_of_its_deployment(file: Path) -> None:
    stage = {"name": "a", "deployment": "train/a", "set": {"components.api.command": ["run-api"]}}
    deployed = through_jsonb(load_run_spec(str(file))["spec"])

    pipeline = add_deployment_specs(
        parse_pipeline({"name": "one", "stages": [stage]}), {"a": deployed}
    )

    assert order_of(through_jsonb(pipeline.stage("a").spec)) == [*NAMES, "api"]


@pytest.mark.parametrize(
    ("fields", "order"),
    [
        ({}, NAMES),
        # the key `start_order` has no value, so the components start in the order of the spec
        ({"start_order": None}, NAMES),
        # the form in Prefect's UI can send an empty list. An empty list means the same as no list:
        # the components start in the order of the spec
        ({"start_order": []}, NAMES),
        ({"start_order": NAMES[::-1]}, NAMES[::-1]),
        # components that are not in the list, for example because they were added in Prefect's UI,
        # start last
        ({"start_order": ["trainer", "judge"]}, ["trainer", "judge", "environment", "sandbox"]),
        # a repeated name counts once
        ({"start_order": [*NAMES, NAMES[0]]}, NAMES),
    ],
)
def test_components_start_in_the_given_order_or_as_written(
    fields: dict[str, Any], order: list[str]
) -> None:
    loaded = parse_spec(spec(**fields))

    assert list(loaded.components) == list(loaded.processes) == order
    assert list(loaded.start_order) in ([], order)


def test_removed_component_may_stay_in_the_start_order() -> None:
    data = spec("api", "trainer", start_order=["trainer", "api"])

    loaded = RunSpec.model_validate({**data, "components": {**data["components"], "api": None}})

    assert (list(loaded.components), loaded.start_order) == (["trainer"], ("trainer",))
    assert RunSpec.model_validate(loaded.written()) == loaded


def test_start_order_is_kept_when_a_spec_is_written_and_resolved() -> None:
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
def test_unknown_names_and_wrong_types_in_the_start_order_are_faults(
    order: object, expected: str
) -> None:
    assert faults_of(spec(start_order=order)) == [expected]


def test_faults_of_the_start_order_and_of_components_are_reported_together() -> None:
    data = spec("api", "trainer", start_order=["api", "treiner", "traner"])
    data["components"]["api"] = {}

    paths = [fault.partition(":")[0] for fault in faults_of(data)]

    assert paths == [
        "start_order.1",
        "start_order.2",
        "components.api.command",
    ]
