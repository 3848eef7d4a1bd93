"""Tests of the list that `muster deployments` prints."""

from __future__ import annotations

from contextlib import nullcontext
from uuid import uuid4

import pytest
from cyclopts import App
from prefect.client.schemas.responses import DeploymentResponse

from tasks.show.arguments import run
from tasks.train import deployed

DEPLOYMENTS = App(name="deployments", default_command=deployed.deployments)


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
