"""A fake Prefect server in memory, for tests of `muster submit` and `muster deploy`."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

from prefect.client.schemas.actions import DeploymentScheduleCreate, DeploymentUpdate
from prefect.client.schemas.filters import ArtifactFilter
from prefect.client.schemas.objects import Artifact, DeploymentSchedule, FlowRun, WorkerStatus
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.sorting import ArtifactSort
from prefect.exceptions import ObjectNotFound
from prefect.states import State


class SubmitServer:
    """A fake of Prefect's synchronous client, for tests of `muster submit` and `muster deploy`."""

    def __init__(self, *, has_any: bool = True) -> None:
        """
        Args:
            has_any: True if the server has the deployment `train/any`, which runs any spec.
        """
        #: The deployment `train/any`.
        self.any = DeploymentResponse(
            id=uuid4(),
            name="any",
            flow_id=uuid4(),
            entrypoint="flows.train.train",
            work_pool_name="gang",
            parameter_openapi_schema={"required": ["spec"], "properties": {"spec": {}}},
        )
        self._has_any = has_any
        #: Names of the work pool's workers that are online.
        self.workers: list[str] = []
        self.api_url = "http://a/api"
        #: Mapping from the name of a Secret block to its value.
        self.blocks: dict[str, str] = {}
        #: Arguments of each call that created a flow run.
        self.created: list[dict[str, Any]] = []
        #: Arguments of each call that created a deployment.
        self.deployed: list[dict[str, Any]] = []
        #: Mapping from the name of a created deployment to the deployment. The name does not
        #: include the name of the flow.
        self.deployments: dict[str, DeploymentResponse] = {}
        self.artifacts: list[Artifact] = []
        #: Labels of the flow run.
        self.labels: dict[str, Any] = {}
        #: States of the flow run. Each read of the flow run returns the next state. Reads after the
        #: last state return the last state again.
        self.states: list[State[Any]] = []

    def read_deployment_by_name(self, name: str) -> DeploymentResponse:
        if name == "train/any" and self._has_any:
            return self.any
        if (deployment := self.deployments.get(name.removeprefix("train/"))) is None:
            raise ObjectNotFound(http_exc=Exception("404"))
        return deployment.model_copy(deep=True)

    def read_work_pools(self, **_filters: Any) -> list[SimpleNamespace]:
        return [SimpleNamespace(name="gang")]

    def read_workers_for_work_pool(self, _pool: str) -> list[SimpleNamespace]:
        return [SimpleNamespace(name=name, status=WorkerStatus.ONLINE) for name in self.workers]

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
            [artifact] = [item for item in self.artifacts if str(item.id) == path_params["id"]]
            artifact.updated = datetime.now(UTC)
            return SimpleNamespace()
        assert (method, path) == ("POST", "/artifacts/")
        self.artifacts.append(Artifact(id=uuid4(), updated=datetime.now(UTC), **json))
        return SimpleNamespace(json=lambda: {"id": str(self.artifacts[-1].id)})

    def read_artifacts(
        self,
        *,
        artifact_filter: ArtifactFilter,
        sort: ArtifactSort | None = None,
        limit: int = 200,
        offset: int = 0,
    ) -> list[Artifact]:
        ids = artifact_filter.id
        types = artifact_filter.type
        keys = artifact_filter.key
        selected = [
            artifact
            for artifact in self.artifacts
            if (ids is None or artifact.id in (ids.any_ or ()))
            and (types is None or artifact.type in (types.any_ or ()))
            and (keys is None or artifact.key in (keys.any_ or ()))
        ]
        return selected[offset : offset + limit]

    def delete_artifact(self, id: UUID) -> None:
        self.artifacts = [artifact for artifact in self.artifacts if artifact.id != id]

    def update_flow_run_labels(self, id: UUID, labels: dict[str, Any]) -> None:
        self.labels.update(labels)

    def create_flow_run_from_deployment(self, id: UUID, **fields: Any) -> FlowRun:
        assert id == self.any.id
        self.created.append(fields)
        return self._flow_run()

    def create_deployment(self, **fields: Any) -> UUID:
        self.deployed.append(fields)
        response_fields = {key: value for key, value in fields.items() if key != "schedules"}
        deployment = DeploymentResponse(id=uuid4(), **response_fields)
        self.deployments[deployment.name] = deployment
        self.create_deployment_schedules(deployment.id, fields["schedules"] or [])
        return deployment.id

    def update_deployment(self, id: UUID, deployment: DeploymentUpdate) -> None:
        """Change only the fields that are set in the update, as the server's PATCH does."""
        stored = self._deployment(id)
        for key, value in deployment.model_dump(exclude_unset=True).items():
            setattr(stored, key, value)

    def create_deployment_schedules(
        self, id: UUID, schedules: Sequence[DeploymentScheduleCreate]
    ) -> None:
        for request in schedules:
            schedule = DeploymentSchedule(id=uuid4(), schedule=request.schedule, slug=request.slug)
            self._deployment(id).schedules.append(schedule)

    def update_deployment_schedule(self, id: UUID, schedule_id: UUID, *, schedule: Any) -> None:
        schedules = self._deployment(id).schedules
        [stored] = [stored for stored in schedules if stored.id == schedule_id]
        stored.schedule = schedule

    def delete_deployment_schedule(self, id: UUID, schedule_id: UUID) -> None:
        deployment = self._deployment(id)
        deployment.schedules = [
            schedule for schedule in deployment.schedules if schedule.id != schedule_id
        ]

    def _deployment(self, id: UUID) -> DeploymentResponse:
        """Return the created deployment with this id."""
        [deployment] = [item for item in self.deployments.values() if item.id == id]
        return deployment

    def read_flow_run(self, id: UUID) -> FlowRun:
        run = self._flow_run()
        run.state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        return run

    def _flow_run(self) -> FlowRun:
        """Return the flow run that was created last."""
        parameters = self.created[-1]["parameters"]
        return FlowRun(flow_id=self.any.flow_id, parameters=parameters, name="a-run")
