"""The stages of a pipeline as a table on its flow run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from uuid import UUID

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    ArtifactFilterKey,
)
from prefect.utilities.urls import url_for

from tasks.pipeline.steps import StageRun
from tasks.spec.pipeline import PipelineSpec

#: Of the artifact.
KEY = "stages"


class StageTable:
    """One artifact, found again by each process of the pipeline and replaced by what is so now."""

    def __init__(self, spec: PipelineSpec, flow_run_id: UUID) -> None:
        self._spec = spec
        self._flow_run_id = flow_run_id
        self._id: UUID | None = None
        self._shown = ""

    def show(
        self,
        client: SyncPrefectClient,
        runs: Sequence[StageRun],
        checkpoints: Mapping[str, str],
    ) -> None:
        """
        Args:
            checkpoints: What runs hand on, by flow run id; empty for nothing.
        """
        text = table_of(self._spec.stage_names, runs, checkpoints)
        if text == self._shown:
            return
        self._id = self._id or self._find(client)
        if self._id is None:
            created = client.create_artifact(
                ArtifactCreate(
                    key=KEY,
                    type="markdown",
                    description=f"The stages of {self._spec.name}",
                    data=text,
                    flow_run_id=self._flow_run_id,
                )
            )
            self._id = created.id
        else:
            client.update_artifact(self._id, ArtifactUpdate(data=text))
        self._shown = text

    def _find(self, client: SyncPrefectClient) -> UUID | None:
        found = client.read_artifacts(
            artifact_filter=ArtifactFilter(
                key=ArtifactFilterKey(any_=[KEY]),
                flow_run_id=ArtifactFilterFlowRunId(any_=[self._flow_run_id]),
            ),
            limit=1,
        )
        return found[0].id if found else None


def table_of(
    stages: Sequence[str], runs: Sequence[StageRun], checkpoints: Mapping[str, str]
) -> str:
    """The stages as Markdown, a row for each try."""
    rows = ["| stage | run | state | says | checkpoint |", "| --- | --- | --- | --- | --- |"]
    for stage in stages:
        tries = sorted((run for run in runs if run.stage == stage), key=lambda run: run.number)
        for run in tries:
            name = stage if run.number == 1 else f"{stage}, try {run.number}"
            found = checkpoints.get(run.flow_run_id)
            cells = (name, _link(run), run.state, run.message, f"`{found}`" if found else "")
            rows.append(f"| {' | '.join(map(_cell, cells))} |")
        if not tries:
            rows.append(f"| {stage} | | to come | | |")
    return "\n".join(rows)


def link_of(run: StageRun) -> str:
    """The page of a run in the UI; its id where there is no UI."""
    url = url_for("flow-run", obj_id=run.flow_run_id)
    return url or f"flow run {run.flow_run_id}"


def _link(run: StageRun) -> str:
    return f"[{run.name}]({link_of(run)})"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
