"""A Prefect server as far as `muster submit` and `muster deploy` ask it."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

from prefect.client.schemas.actions import DeploymentScheduleCreate, DeploymentUpdate
from prefect.client.schemas.filters import ArtifactFilter
from prefect.client.schemas.objects import Artifact, DeploymentSchedule, FlowRun
from prefect.client.schemas.responses import DeploymentResponse
from prefect.exceptions import ObjectNotFound
from prefect.states import State


class SubmitServer:
    """It has the deployment of any spec, unless said otherwise."""

    def __init__(self, *, has_any: bool = True) -> None:
        self.any = DeploymentResponse(
            id=uuid4(),
            name="any",
            flow_id=uuid4(),
            entrypoint="flows.train.train",
            work_pool_name="gang",
            parameter_openapi_schema={"required": ["spec"], "properties": {"spec": {}}},
        )
        self._has_any = has_any
        self.api_url = "http://a/api"
        #: The values of its Secret blocks.
        self.blocks: dict[str, str] = {}
        #: What each flow run was created with, and each deployment.
        self.created: list[dict[str, Any]] = []
        self.deployed: list[dict[str, Any]] = []
        #: The deployments of specs, by their name without the flow's.
        self.deployments: dict[str, DeploymentResponse] = {}
        self.artifacts: list[Artifact] = []
        #: Of the flow run.
        self.labels: dict[str, Any] = {}
        #: The states that the flow run has, one a look; the last one remains.
        self.states: list[State[Any]] = []

    def read_deployment_by_name(self, name: str) -> DeploymentResponse:
        if name == "train/any" and self._has_any:
            return self.any
        if (found := self.deployments.get(name.removeprefix("train/"))) is None:
            raise ObjectNotFound(http_exc=Exception("404"))
        return found.model_copy(deep=True)

    def read_block_document_by_name(
        self, name: str, block_type_slug: str, include_secrets: bool
    ) -> SimpleNamespace:
        assert (block_type_slug, include_secrets) == ("secret", True)
        if name not in self.blocks:
            raise ObjectNotFound(http_exc=Exception("404"))
        return SimpleNamespace(data={"value": self.blocks[name]})

    def request(
        self, method: str, path: str, *, json: dict[str, Any], path_params: Any = None
    ) -> SimpleNamespace:
        if method == "PATCH":
            [asked] = [one for one in self.artifacts if str(one.id) == path_params["id"]]
            asked.updated = datetime.now(UTC)
            return SimpleNamespace()
        assert (method, path) == ("POST", "/artifacts/")
        self.artifacts.append(Artifact(id=uuid4(), updated=datetime.now(UTC), **json))
        return SimpleNamespace(json=lambda: {"id": str(self.artifacts[-1].id)})

    def read_artifacts(
        self, *, artifact_filter: ArtifactFilter, limit: int = 200, offset: int = 0
    ) -> list[Artifact]:
        ids, types = artifact_filter.id, artifact_filter.type
        found = [
            one
            for one in self.artifacts
            if (ids is None or one.id in (ids.any_ or ()))
            and (types is None or one.type in (types.any_ or ()))
        ]
        return found[offset : offset + limit]

    def delete_artifact(self, id: UUID) -> None:
        self.artifacts = [one for one in self.artifacts if one.id != id]

    def update_flow_run_labels(self, id: UUID, labels: dict[str, Any]) -> None:
        self.labels.update(labels)

    def create_flow_run_from_deployment(self, id: UUID, **given: Any) -> FlowRun:
        assert id == self.any.id
        self.created.append(given)
        return self._flow_run()

    def create_deployment(self, **given: Any) -> UUID:
        self.deployed.append(given)
        kept = {key: value for key, value in given.items() if key != "schedules"}
        made = DeploymentResponse(id=uuid4(), **kept)
        self.deployments[made.name] = made
        self.create_deployment_schedules(made.id, given["schedules"] or [])
        return made.id

    def update_deployment(self, id: UUID, deployment: DeploymentUpdate) -> None:
        """Changes the given fields alone, as the server's PATCH does."""
        found = self._deployment(id)
        for key, value in deployment.model_dump(exclude_unset=True).items():
            setattr(found, key, value)

    def create_deployment_schedules(
        self, id: UUID, schedules: Sequence[DeploymentScheduleCreate]
    ) -> None:
        for one in schedules:
            made = DeploymentSchedule(id=uuid4(), schedule=one.schedule, slug=one.slug)
            self._deployment(id).schedules.append(made)

    def update_deployment_schedule(self, id: UUID, schedule_id: UUID, *, schedule: Any) -> None:
        [found] = [one for one in self._deployment(id).schedules if one.id == schedule_id]
        found.schedule = schedule

    def delete_deployment_schedule(self, id: UUID, schedule_id: UUID) -> None:
        found = self._deployment(id)
        found.schedules = [one for one in found.schedules if one.id != schedule_id]

    def _deployment(self, id: UUID) -> DeploymentResponse:
        [found] = [one for one in self.deployments.values() if one.id == id]
        return found

    def read_flow_run(self, id: UUID) -> FlowRun:
        run = self._flow_run()
        run.state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        return run

    def _flow_run(self) -> FlowRun:
        given = self.created[-1]
        return FlowRun(flow_id=self.any.flow_id, parameters=given["parameters"], name="a-run")
