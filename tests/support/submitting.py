"""A Prefect server as far as `muster submit` and `muster deploy` ask it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

from prefect.client.schemas.objects import FlowRun
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
        #: The states that the flow run has, one a look; the last one remains.
        self.states: list[State[Any]] = []

    def read_deployment_by_name(self, name: str) -> DeploymentResponse:
        if name != "train/any" or not self._has_any:
            raise ObjectNotFound(http_exc=Exception("404"))
        return self.any

    def read_block_document_by_name(
        self, name: str, block_type_slug: str, include_secrets: bool
    ) -> SimpleNamespace:
        assert (block_type_slug, include_secrets) == ("secret", True)
        if name not in self.blocks:
            raise ObjectNotFound(http_exc=Exception("404"))
        return SimpleNamespace(data={"value": self.blocks[name]})

    def create_flow_run_from_deployment(self, id: UUID, **given: Any) -> FlowRun:
        assert id == self.any.id
        self.created.append(given)
        return self._flow_run()

    def create_deployment(self, **given: Any) -> UUID:
        self.deployed.append(given)
        return uuid4()

    def read_flow_run(self, id: UUID) -> FlowRun:
        run = self._flow_run()
        run.state = self.states.pop(0) if len(self.states) > 1 else self.states[0]
        return run

    def _flow_run(self) -> FlowRun:
        given = self.created[-1]
        return FlowRun(flow_id=self.any.flow_id, parameters=given["parameters"], name="a-run")
