"""The deployments of prefect.yaml on the Prefect server: missing ones are created, present ones get
new code and specs.

`prefect deploy --all` would do both, but it also resets what a person changed in the UI: schedules,
tags, the description, limits, the work queue and job variables. So it only creates here.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
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
from tasks.server.deployments import find_deployment
from tasks.server.trusted_clients import GUARDED_PREFECT
from tasks.spec.errors import MusterError

#: The parameter that the files of prefect.yaml fill. Other parameters belong to the operator.
_SPEC = "spec"
#: The step by which a worker finds the code of a flow that an entry names by its file.
_ENTER_ROOT = {"prefect.deployments.steps.set_working_directory": {"directory": str(ROOT)}}


def deploy_project(client: SyncPrefectClient, project_file: Path) -> None:
    """Create the deployments of a project file that are missing, and renew the others.

    The paths in the file start from ROOT, which is the working directory of the caller.

    Raises: MusterError, if Prefect does not create one.
    """
    project = yaml.safe_load(project_file.read_text(encoding="utf-8"))
    missing: list[str] = []
    for entry in project["deployments"]:
        flow_name = re.split("[.:]", entry["entrypoint"])[-1]
        full_name = f"{flow_name}/{entry['name']}"
        existing = find_deployment(client, full_name)
        if existing is None:
            missing.append(entry["name"])
        else:
            client.update_deployment(existing.id, _renewal(entry, existing))
            print(f"Renewed the deployment {full_name}.", flush=True)
    if missing:
        _create(missing, project_file)


def _renewal(entry: Mapping[str, Any], existing: DeploymentResponse) -> DeploymentUpdate:
    """Return the update of a present deployment: its code, and the spec that its entry names."""
    flow: Flow[..., Any] = load_flow_from_entrypoint(entry["entrypoint"])
    schema = parameter_schema(flow).model_dump(exclude_unset=True)
    outputs = asyncio.run(run_steps(entry.get("build") or [], print_function=_ignore))
    parameters: dict[str, Any] = apply_values(entry.get("parameters") or {}, outputs)
    kept = {
        name: value
        for name, value in existing.parameters.items()
        if name != _SPEC and name in schema.get("properties", {})
    }
    return DeploymentUpdate(
        entrypoint=entry["entrypoint"],
        parameters={**parameters, **kept},
        parameter_openapi_schema=schema,
        pull_steps=[_ENTER_ROOT] if entry.get("pull") is None else entry["pull"],
    )


def _create(names: list[str], project_file: Path) -> None:
    """Have Prefect's command create the entries of these names."""
    command = (
        *(sys.executable, "-m", "prefect", "--no-prompt", "deploy"),
        *_each_named(names),
        f"--prefect-file={project_file}",
    )
    environment = {**os.environ, **GUARDED_PREFECT}
    code = subprocess.run(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL).returncode
    if code != 0:
        raise MusterError(
            f"`prefect deploy` exited {code} and did not create all of: {', '.join(names)}. "
            "Its own lines above say why."
        )


def _each_named(names: list[str]) -> Iterator[str]:
    for name in names:
        yield from ("--name", name)


def _ignore(*_words: object) -> None:
    """Take the place of the print function of Prefect's build steps."""
