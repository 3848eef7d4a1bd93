"""The run specs of a pipeline's stages: those of deployments, and the code that they name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.responses import DeploymentResponse
from prefect.exceptions import ObjectNotFound

from tasks.server.artifacts import submitted_code
from tasks.spec.errors import MusterError
from tasks.spec.pipeline import PipelineSpec


class CannotBegin(MusterError):
    """A stage cannot begin, and another try does not help: change the pipeline or the server."""


def require_deployment(client: SyncPrefectClient, name: str) -> DeploymentResponse:
    """Return the deployment `FLOW/NAME`.

    Raises:
        CannotBegin: The server has no such deployment.
    """
    try:
        return client.read_deployment_by_name(name)
    except (ObjectNotFound, ValueError):
        raise CannotBegin(
            f"the Prefect server has no deployment {name}: Muster's own are made by `muster up` or "
            "`python -m deployments.stack.setup`, one of a spec of yours by `muster deploy SPEC`"
        ) from None


def read_specs_of_deployments(client: SyncPrefectClient, spec: PipelineSpec) -> dict[str, Any]:
    """Return the run spec of each stage that takes it from a deployment, by the stage's name.

    Raises:
        CannotBegin: A deployment does not exist or has no spec.
    """
    specs: dict[str, Any] = {}
    for stage in spec.stages:
        if stage.spec is None and (name := stage.deployment):
            specs[stage.name] = require_deployment(client, name).parameters.get("spec")
            if not isinstance(specs[stage.name], Mapping):
                raise CannotBegin(f"the deployment {name} has no spec: write spec: FILE.yaml")
    return specs


def add_code(client: SyncPrefectClient | None, pipeline: PipelineSpec, root: Path) -> PipelineSpec:
    """Return the pipeline with the project's code entered in each spec that names no code.

    Args:
        client: Client of the Prefect server, or None if no server is set.
        pipeline: The pipeline.
        root: Root directory of the project.

    Raises:
        InvalidSpec, NoCode, OSError: The code cannot be stored or is not available.
    """
    written = pipeline.written()
    project_code: str | None = None
    for spec in filter(None, (stage.get("spec") for stage in written["stages"])):
        if spec.get("code") is None:
            project_code = project_code or submitted_code(client, None, root)
            spec["code"] = project_code
        else:
            submitted_code(client, spec["code"], root)
    return PipelineSpec.model_validate(written)
