"""Tests of the events about Prefect assets, and of the artifact with the lineage of a run."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest
from prefect.assets import Asset, materialize
from prefect.client.schemas.objects import FlowRun
from prefect.context import AssetContext
from prefect.states import Completed

from tasks.record.lineage import (
    DataKind,
    Lineage,
    LineageInput,
    LineageOutput,
    LineageResume,
)
from tasks.server.assets import list_asset_events, make_asset_key
from tasks.show.lineage import TreeNode, format_tree, parse_lineage, show_lineage

RUN = "own-sft-20260102-000000-00000001"
PARENT = "parent-sft-20260101-000000-00000000"
FLOW_RUN = FlowRun(id=UUID(int=7), flow_id=UUID(int=8), name=RUN)
CHECKPOINT = LineageOutput(
    uri="/runs/own/step_4", kind=DataKind.CHECKPOINT, step=4, attempt=2, at=5.0, signature="x"
)
LINEAGE = Lineage(
    run_id=RUN,
    workload="sft",
    inputs=(
        LineageInput(uri="/data/train.jsonl"),
        LineageInput(uri="s3://b/step_20", kind=DataKind.CHECKPOINT, run=PARENT, step=20),
    ),
    resumes=(LineageResume(attempt=2, uri="/runs/own/step_2", step=2),),
    outputs=(CHECKPOINT,),
)


@pytest.mark.parametrize(
    ("uri", "key"),
    [
        ("/data/train.jsonl", "file:///data/train.jsonl"),
        ("/data/dir/", "file:///data/dir"),
        ("s3a://bucket/a/", "s3://bucket/a"),
        ("hf://datasets/openai/gsm8k", "hf://datasets/openai/gsm8k"),
        ("openai/gsm8k", "data://openai/gsm8k"),
        (f"muster://runs/{RUN}/result", f"muster://runs/{RUN}/result"),
    ],
)
def test_asset_key_is_the_uri_of_the_data(uri: str, key: str) -> None:
    assert make_asset_key(uri) == key


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("/data/a b", "/data/a#b"),
        ("/data/ä%20", "/data/ä#20"),
        ("git+ssh://host/a", "gitssh://host/a"),
        ("/" + 600 * "a" + "1", "/" + 600 * "a" + "2"),
        ("/a\\udcff{x}", "/a\\udcfe{x}"),
    ],
)
def test_keys_that_prefect_does_not_accept_are_replaced_by_unique_keys(
    first: str, second: str
) -> None:
    keys = {make_asset_key(first), make_asset_key(second)}

    assert len(keys) == 2
    # The class `Asset` raises an error if a key is too long or contains a forbidden character.
    assert [Asset(key=key).key for key in keys] == [*keys]


def test_events_name_the_run_the_data_and_the_checkpoint_of_the_attempt() -> None:
    events = [*list_asset_events(FLOW_RUN, LINEAGE, LINEAGE.outputs, with_inputs=True)]

    assert [(event.event, event.resource.id) for event in events] == [
        ("prefect.asset.referenced", "file:///data/train.jsonl"),
        ("prefect.asset.referenced", "s3://b/step_20"),
        ("prefect.asset.materialization.succeeded", "file:///runs/own/step_4"),
    ]
    made = events[-1]
    assert made.resource.name == f"checkpoint of step 4 of {RUN}"
    assert [(resource.role, resource.id) for resource in made.related] == [
        ("asset", "file:///data/train.jsonl"),
        ("asset", "s3://b/step_20"),
        ("asset", "file:///runs/own/step_2"),
        ("asset-materialized-by", "muster"),
        ("flow-run", f"prefect.flow-run.{FLOW_RUN.id}"),
    ]
    assert made.occurred.timestamp() == 5.0
    assert made.payload["step"] == 4
    assert made.payload["inputs"] == ["/data/train.jsonl", "s3://b/step_20", "/runs/own/step_2"]


def test_event_has_the_same_id_again_unless_the_checkpoint_was_saved_again() -> None:
    def find_id(output: LineageOutput) -> UUID:
        [event] = list_asset_events(FLOW_RUN, LINEAGE, [output], with_inputs=False)
        return event.id

    assert find_id(CHECKPOINT) == find_id(CHECKPOINT)
    assert find_id(CHECKPOINT) != find_id(CHECKPOINT.with_changes(signature="y"))


def test_events_have_the_form_of_prefects_own_asset_events(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    emitted: list[dict[str, Any]] = []
    monkeypatch.setattr("prefect.events.emit_event", lambda **event: emitted.append(event))

    @materialize("file:///runs/own/step_4", by="muster", asset_deps=["file:///data/train.jsonl"])
    def train() -> None:
        """Do nothing: the test needs only the assets of this task."""

    context = AssetContext.from_task_and_inputs(train, UUID(int=1))
    lineage = LINEAGE.with_changes(inputs=LINEAGE.inputs[:1], resumes=())

    context.emit_events(Completed())
    events = [*list_asset_events(FLOW_RUN, lineage, LINEAGE.outputs, with_inputs=True)]

    assert [event.event for event in events] == [event["event"] for event in emitted]
    assert [event.resource.id for event in events] == [
        event["resource"]["prefect.resource.id"] for event in emitted
    ]
    own_related = [resource.root for resource in events[-1].related if resource.role != "flow-run"]
    assert own_related == emitted[-1]["related"]


def test_lineage_is_read_back_from_its_artifact() -> None:
    hostile = LINEAGE.with_changes(inputs=(LineageInput(uri="/a|b```\n### JSON\n\n```\n{}"),))

    assert parse_lineage(str(show_lineage(LINEAGE).data)) == LINEAGE
    assert parse_lineage(str(show_lineage(hostile).data)) == hostile


@pytest.mark.parametrize("data", ["", "### JSON\n\n```\n[]\n```", "### JSON\n\n```\n{}\n```"])
def test_changed_artifact_counts_as_missing(data: str) -> None:
    assert parse_lineage(data) is None


def test_tree_has_a_branch_for_each_line() -> None:
    root = TreeNode(text="run")
    root.add("made from").add("data \x1b[31m/a")
    root.add("made").add("checkpoint")

    assert [*format_tree(root)] == [
        "run",
        "├── made from",
        "│   └── data /a",
        "└── made",
        "    └── checkpoint",
    ]
