"""Read the run specs that a pipeline takes from deployments, and store the code of its stages."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.responses import DeploymentResponse
from prefect.exceptions import ObjectNotFound
from pydantic import ValidationError

from tasks.record.checkpoints import list_output_folders
from tasks.server.artifacts import store_submitted_code
from tasks.spec.errors import MusterError
from tasks.spec.pipeline import PipelineSpec
from tasks.spec.programs import find_active_environment
from tasks.spec.run import RunSpec
from tasks.spec.step import is_step


class CannotBegin(MusterError):
    """A stage of a pipeline cannot begin, and another try would fail, too.

    The user must change the pipeline's spec or the Prefect server.
    """


def require_deployment(client: SyncPrefectClient, name: str) -> DeploymentResponse:
    """Return a deployment from the Prefect server.

    Args:
        client: Client of the Prefect server.
        name: Name of the deployment in the form `FLOW/NAME`.

    Raises:
        CannotBegin: The Prefect server has no deployment with this name.
    """
    try:
        return client.read_deployment_by_name(name)
    except (ObjectNotFound, ValueError):
        raise CannotBegin(
            f"The Prefect server has no deployment {name}. To create Muster's own deployments, "
            "run `muster up` or `python -m deployments.stack.setup`. To create a deployment of "
            "your own spec, run `muster deploy SPEC`."
        ) from None


def read_specs_of_deployments(client: SyncPrefectClient, spec: PipelineSpec) -> dict[str, Any]:
    """Read the run specs of the stages that name a deployment instead of a spec.

    Returns:
        Mapping from the name of a stage to the run spec.

    Raises:
        CannotBegin: A deployment does not exist or has no run spec.
    """
    specs: dict[str, Any] = {}
    for stage in spec.stages:
        if stage.spec is None and (name := stage.deployment):
            specs[stage.name] = require_deployment(client, name).parameters.get("spec")
            if not isinstance(specs[stage.name], Mapping):
                raise CannotBegin(
                    f"The deployment {name}, which the stage {stage.name} uses, has no run spec. "
                    "Write `spec: FILE.yaml` in the stage."
                )
    return specs


def add_code(client: SyncPrefectClient | None, pipeline: PipelineSpec, root: Path) -> PipelineSpec:
    """Return the pipeline with a key `code` in each step and in each run spec.

    If a step or a run spec has no key `code`, the function stores the project's code, and writes
    the name of the stored code into the key. The code of a run leaves out the checkpoints of
    earlier runs, see `store_project`. If the key already names stored code, this code must
    be available. If a run needs the Python environment that the user has activated for this
    command, the run's spec also gets the variable VIRTUAL_ENV or CONDA_PREFIX.

    Args:
        client: Client of the Prefect server, or None if no server is configured.
        pipeline: The pipeline.
        root: Root directory of the project.

    Raises:
        InvalidSpec, NoCode, OSError: The code cannot be stored, or the named code is not available.
    """
    written = pipeline.written()
    #: Stored copies of the code. Key: folders that the copy leaves out. Value: name of the copy.
    codes: dict[tuple[str, ...], str] = {}
    parts = [stage if is_step(stage) else stage.get("spec") for stage in written["stages"]]
    for spec in filter(None, parts):
        if spec.get("code") is None:
            outputs = () if is_step(spec) else _list_outputs(spec, root)
            if outputs not in codes:
                codes[outputs] = store_submitted_code(client, None, root, outputs)
            spec["code"] = codes[outputs]
        else:
            store_submitted_code(client, spec["code"], root)
        env = spec.get("env") or {}
        if active := find_active_environment(root, env):
            spec["env"] = {**active, **env}
    return PipelineSpec.model_validate(written)


def _list_outputs(spec: Mapping[str, Any], root: Path) -> tuple[str, ...]:
    """Return the folders of a project in which the run of a stage saves its checkpoints.

    Args:
        spec: The run spec of the stage. Its values may depend on earlier stages, so that the spec
            is not valid yet. Then the result is empty.
        root: Root directory of the project.
    """
    with suppress(ValidationError):
        return list_output_folders(RunSpec.model_validate(spec), root)
    return ()
