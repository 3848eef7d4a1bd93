"""Submit a run spec with a matrix: `muster submit SPEC --matrix lr=1e-5,3e-5 --matrix seed=1..4`.

The result is a pipeline with a single stage, which has a run for each point of the matrix.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import FlowRun
from prefect.states import Scheduled

from tasks.pipeline.stage_specs import add_code, require_deployment
from tasks.server.server import read_secrets
from tasks.spec.errors import BadArgument
from tasks.spec.formatting import suggest_name
from tasks.spec.loading import parse_yaml
from tasks.spec.matrix import MAX_POINTS
from tasks.spec.pipeline import PipelineSpec, parse_pipeline
from tasks.spec.programs import add_active_environment
from tasks.spec.run import LIVE_CODE, RunSpec
from tasks.train.local_workers import require_files
from tasks.train.project_summary import print_project

#: Name of the deployment that runs submitted pipelines.
PIPELINE_DEPLOYMENT = "pipeline/any-pipeline"
#: Name of the only stage of a pipeline that `--matrix` creates. The stage has one run for each
#: combination of values.
_STAGE = "points"
#: Matches a range of whole numbers, such as `1..4`.
_RANGE = re.compile(r"(-?\d{1,9})\.\.(-?\d{1,9})")

MatrixOptions = Annotated[
    tuple[str, ...],
    Parameter(
        name="--matrix",
        show_default=False,
        help="Start one run of the spec for each value: `KEY=VALUE,VALUE`, or `KEY=1..4` for "
        "whole numbers. KEY is a dotted path in the spec, or the name of a variable in the "
        "spec's `env`, in small letters (lr for LR). If the option is repeated, each combination "
        "of values is a run.",
    ),
]


def make_matrix_pipeline(
    spec: RunSpec, options: Sequence[str], at_most: int | None = None
) -> PipelineSpec:
    """Return a pipeline that runs a spec once for each combination of the values in the options.

    Args:
        spec: The run spec.
        options: Values of the options `--matrix`.
        at_most: Largest number of runs that are running or wait in the queue at once, or None.

    Raises:
        BadArgument: An option is malformed or names an unknown variable.
        InvalidSpec: The spec for a combination of values is not valid.
    """
    matrix: dict[str, list[Any]] = {}
    for option in options:
        key, equals, text = option.partition("=")
        if not equals or not key or not text:
            raise BadArgument(f"--matrix {option}: write KEY=VALUE,VALUE or KEY=1..4")
        path = _find_path(spec, key)
        if path in matrix:
            raise BadArgument(
                f"there are two options --matrix {key}: write all values in one option"
            )
        matrix[path] = _read_values(key, text)
    stage: dict[str, Any] = {
        "name": _STAGE,
        "spec": spec.to_server_data(),
        "matrix": matrix,
        # If a run of the matrix fails, the other runs must continue.
        "on_failure": "continue",
    }
    if at_most is not None:
        stage["at_most"] = at_most
    tags = [*spec.tags]
    return parse_pipeline({"name": spec.name, "tags": tags, "stages": [stage]}, source="--matrix")


def _find_path(spec: RunSpec, key: str) -> str:
    """Return the path in the run spec, such as `env.SEED`, that a key of `--matrix` means.

    The key is either this path, or the name of an environment variable in the spec, in upper or
    lower case.

    Raises:
        BadArgument: The spec has no such key and no such variable.
    """
    if "." in key or key in RunSpec.model_fields:
        return key
    paths = {name: f"env.{name}" for name in spec.env}
    for component_name, component in spec.components.items():
        for name in component.env:
            paths[name] = f"components.{component_name}.env.{name}"
    for name, path in paths.items():
        if name.lower() == key.lower():
            return path
    names = [name.lower() for name in paths]
    known = f"the variables of the spec are: {', '.join(names) or 'none'}"
    remedy = suggest_name(key, names) or f"write the full path of a key, such as env.NAME; {known}"
    raise BadArgument(f"--matrix {key}: the spec has no variable of this name ({remedy})")


def _read_values(key: str, text: str) -> list[Any]:
    """Return the values in an option `--matrix`.

    Args:
        key: The key of the option, for messages.
        text: The values, separated by commas. Each value is YAML, or a range such as `1..4`.

    Raises:
        BadArgument: A range is empty, or too large.
    """
    values: list[Any] = []
    for part in text.split(","):
        if (match := _RANGE.fullmatch(part)) is None:
            values.append(parse_yaml(part, f"--matrix {key}"))
            continue
        first = int(match[1])
        last = int(match[2])
        if not first <= last < first + MAX_POINTS:
            raise BadArgument(
                f"--matrix {key}: the range {part} must have between 1 and {MAX_POINTS} numbers"
            )
        values += range(first, last + 1)
    return values


def queue_matrix(
    client: SyncPrefectClient, spec: RunSpec, pipeline: PipelineSpec, root: Path
) -> FlowRun:
    """Create and return the flow run of a pipeline that `make_matrix_pipeline` returned.

    The project, the code and the Python interpreter of the pipeline's runs are printed on stderr.

    Args:
        client: Client of the Prefect server.
        spec: The run spec. Its Prefect Secret blocks are checked.
        pipeline: The pipeline.
        root: Root folder of the spec's project.

    Raises:
        CannotBegin: The server has no deployment for pipelines.
        InvalidSpec: The server lacks a Prefect Secret block of the spec, or all workers are on this
            machine, which lacks a file of the spec.
    """
    deployment = require_deployment(client, PIPELINE_DEPLOYMENT)
    read_secrets(client, spec)
    require_files(client, spec, root)
    pipeline = add_code(client, pipeline, root)
    code = pipeline.run_spec(f"{_STAGE}.1").get("code")
    print_project(add_active_environment(spec, root).model_copy(update={"code": code}), root)
    return client.create_flow_run_from_deployment(
        deployment.id,
        parameters={"spec": pipeline.written()},
        state=Scheduled(),
        tags=pipeline.tags,
        job_variables={"working_dir": str(root)} if code == LIVE_CODE else {},
    )
