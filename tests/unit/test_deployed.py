"""Tests of the list that `muster deployments` prints."""

from __future__ import annotations

from contextlib import nullcontext
from uuid import uuid4

import pytest
from cyclopts import App
from prefect.client.schemas.responses import DeploymentResponse

from tasks.server.deployments import is_description_of_muster
from tasks.show.arguments import run
from tasks.train import deployed

DEPLOYMENTS = App(name="deployments", default_command=deployed.deployments)


@pytest.fixture(autouse=True)
def wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")


@pytest.mark.parametrize("is_terminal", [True, False])
def test_list_of_deployments_begins_with_the_names_of_its_columns(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    nightly = DeploymentResponse(
        id=uuid4(),
        name="nightly",
        flow_id=uuid4(),
        parameters={"spec": {"name": "tiny"}},
        work_pool_name="gang",
        work_queue_name="default",
    )
    monkeypatch.setattr(deployed, "connect_to_configured_server", nullcontext)
    monkeypatch.setattr(
        deployed, "list_deployments", lambda client, flows: [("train/nightly", nightly)]
    )
    monkeypatch.setattr(deployed, "is_on_terminal", lambda: is_terminal)

    code = run(DEPLOYMENTS, [])

    header, row = capsys.readouterr().out.splitlines()
    assert code == 0
    assert header.split()[:3] == ["deployment", "spec", "schedule"]
    assert row.split() == ["train/nightly", "tiny", "by", "hand", "gang/default"]
    if not is_terminal:
        assert header.count("\t") == row.count("\t") == 4


@pytest.mark.parametrize("columns", [40, 80])
def test_list_of_deployments_breaks_no_word_on_a_narrow_terminal(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    long_name = "a-long-name-of-a-deployment"
    deployment = DeploymentResponse(
        id=uuid4(),
        name=long_name,
        flow_id=uuid4(),
        parameters={"spec": {"name": long_name}},
        work_pool_name="gang",
        work_queue_name="default",
    )
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.setattr(deployed, "connect_to_configured_server", nullcontext)
    monkeypatch.setattr(
        deployed, "list_deployments", lambda client, flows: [(f"train/{long_name}", deployment)]
    )
    monkeypatch.setattr(deployed, "is_on_terminal", lambda: True)

    run(DEPLOYMENTS, [])

    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines] == [
        ["deployment", "next", "start"],
        [f"train/{long_name}", "by", "hand"],
        [f"{long_name};", "gang/default"],
    ]
    assert columns < 80 or all(len(line) <= columns for line in lines)


@pytest.mark.parametrize(
    ("description", "is_of_muster"),
    [
        ("Run spec: /home/a/spec.yaml. Project: /home/a.", True),
        ("/home/a/spec.yaml, of the project /home/a.", True),
        ("Ask Ada before you change this.", False),
        (None, False),
    ],
)
def test_descriptions_of_this_and_older_releases_are_recognised(
    description: str | None, is_of_muster: bool
) -> None:
    assert is_description_of_muster(description) is is_of_muster
