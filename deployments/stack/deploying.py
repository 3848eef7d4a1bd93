"""Create or update the deployments of prefect.yaml on the Prefect server.

An existing deployment gets new code and a new spec. All settings that a person can change in the
Prefect UI are kept: schedules, tags, the description, limits, the work queue and job variables.
`prefect deploy` would reset these settings, so this module uses it only to create deployments.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import DeploymentUpdate
from prefect.client.schemas.responses import DeploymentResponse
from prefect.deployments.steps.core import run_steps
from prefect.flows import Flow, load_flow_from_entrypoint
from prefect.utilities.callables import parameter_schema
from prefect.utilities.templating import apply_values

from deployments.stack.env import ROOT
from tasks.processes.own_modules import make_own_command
from tasks.server.deployments import find_deployment
from tasks.server.trusted_clients import GUARDED_PREFECT
from tasks.spec.errors import MusterError

#: Name of the flow parameter whose value comes from prefect.yaml. Users may change the values of
#: other parameters in the Prefect UI, and these values are kept.
_SPEC = "spec"
#: Pull step of a deployment: the worker changes to the root of the checkout before the import of
#: the flow, because the entrypoint of the flow is a relative path.
_ENTER_ROOT = {"prefect.deployments.steps.set_working_directory": {"directory": str(ROOT)}}


def deploy_project(client: SyncPrefectClient, project_file: Path) -> None:
    """Create the missing deployments of a project file, and update the existing deployments.

    The paths in the project file are relative to ROOT. Before the call, the caller must change the
    working directory to ROOT.

    Args:
        client: Client of the Prefect server.
        project_file: A file like prefect.yaml.

    Raises:
        MusterError: `prefect deploy` did not create all missing deployments.
    """
    project = yaml.safe_load(project_file.read_text(encoding="utf-8"))
    missing_names: list[str] = []
    for entry in project["deployments"]:
        flow_name = re.split("[.:]", entry["entrypoint"])[-1]
        full_name = f"{flow_name}/{entry['name']}"
        existing = find_deployment(client, full_name)
        if existing is None:
            missing_names.append(entry["name"])
        else:
            client.update_deployment(existing.id, _build_update(entry, existing))
            print(f"Updated the deployment {full_name}.", flush=True)
    if missing_names:
        _create_deployments(missing_names, project_file)


def _build_update(entry: Mapping[str, Any], existing: DeploymentResponse) -> DeploymentUpdate:
    """Return an update that gives an existing deployment new code and a new spec.

    Args:
        entry: The entry of the deployment in the project file.
        existing: The deployment on the Prefect server.
    """
    flow: Flow[..., Any] = load_flow_from_entrypoint(entry["entrypoint"])
    schema = parameter_schema(flow).model_dump(exclude_unset=True)
    outputs = asyncio.run(run_steps(entry.get("build") or [], print_function=_print_nothing))
    parameters: dict[str, Any] = apply_values(entry.get("parameters") or {}, outputs)
    kept_parameters = {
        name: value
        for name, value in existing.parameters.items()
        if name != _SPEC and name in schema.get("properties", {})
    }
    return DeploymentUpdate(
        entrypoint=entry["entrypoint"],
        parameters={**parameters, **kept_parameters},
        parameter_openapi_schema=schema,
        pull_steps=[_ENTER_ROOT] if entry.get("pull") is None else entry["pull"],
    )


def _create_deployments(names: list[str], project_file: Path) -> None:
    """Create the deployments with the given names by running `prefect deploy`.

    Raises:
        MusterError: `prefect deploy` failed.
    """
    command = [*make_own_command("prefect"), "--no-prompt", "deploy"]
    for name in names:
        command += ["--name", name]
    command.append(f"--prefect-file={project_file}")

    environment = {**os.environ, **GUARDED_PREFECT}
    code = subprocess.run(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL).returncode
    if code != 0:
        raise MusterError(
            f"`prefect deploy` exited with code {code}, so not all of these deployments were "
            f"created: {', '.join(names)}. The output of `prefect deploy` above shows the reason."
        )


def _print_nothing(*_words: object) -> None:
    """Ignore the progress messages that Prefect prints about build steps."""
