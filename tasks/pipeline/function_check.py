"""Check the functions of a pipeline's `call` steps in the code that the steps will use.

A pipeline file is checked when it is loaded, because its project is then known. A spec from the
web form of the Prefect UI has no file, so its functions are checked when the pipeline starts.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from prefect.client.orchestration import SyncPrefectClient

from tasks.pipeline.stage_specs import CannotBegin
from tasks.record.code_store import check_out, read_code
from tasks.server.artifacts import download_code
from tasks.spec.errors import Fault, InvalidSpec
from tasks.spec.loading import is_project_root
from tasks.spec.pipeline import PipelineSpec, Stage
from tasks.spec.run import LIVE_CODE
from tasks.spec.step import find_call_faults


def check_functions(client: SyncPrefectClient, pipeline: PipelineSpec, directory: Path) -> None:
    """Check that the function of each `call` step exists and accepts the arguments of the step.

    Args:
        client: Client of the Prefect server, which may have the stored code of the steps.
        pipeline: The pipeline.
        directory: Working directory of the pipeline's process. Steps without stored code use the
            code in this directory.

    Raises:
        InvalidSpec: A function is missing or rejects its arguments. The error has all faults.
        NoCode: The stored code of a step is not available.
        CannotBegin: The stored code of a step cannot be unpacked, for example on a full disk.
    """
    faults: list[Fault] = []
    indexes_by_code: dict[str, list[int]] = {}
    for index, stage in enumerate(pipeline.stages):
        if stage.call is None:
            continue
        if stage.code in (None, LIVE_CODE):
            faults += _check_directory(stage, index, directory)
        else:
            indexes_by_code.setdefault(str(stage.code), []).append(index)

    for name, indexes in indexes_by_code.items():
        with tempfile.TemporaryDirectory(prefix="muster-code-") as place:
            root = Path(place) / "project"
            try:
                fetch = partial(download_code, client)
                check_out(read_code(name, fetch), root, fetch)
            except OSError as error:
                raise CannotBegin(
                    f"the project code {name}, which a step uses, cannot be unpacked: {error}"
                ) from error
            for index in indexes:
                faults += _check_stage(pipeline.stages[index], index, root)
    if faults:
        raise InvalidSpec(tuple(faults), f"pipeline {pipeline.name!r}")


def _check_stage(stage: Stage, index: int, root: Path) -> Iterator[Fault]:
    """Yield the faults of the function that a step of a pipeline calls.

    Args:
        stage: The step, which is a stage with the key `call`.
        index: Index of the step in the pipeline.
        root: Folder in which the function is looked up.
    """
    written = stage.model_dump(mode="json", exclude_unset=True)
    yield from find_call_faults(written, f"stages.{index}", root)


def _check_directory(stage: Stage, index: int, directory: Path) -> Iterator[Fault]:
    """Look up the function of a step in the pipeline's working directory, and yield the faults.

    Sometimes the directory is not the root of a project, for example if Prefect has created the
    directory for this process. All faults of the function are then replaced by a single fault: the
    project of the function is unknown.
    """
    faults = [*_check_stage(stage, index, directory)]
    if not faults or is_project_root(directory):
        yield from faults
        return
    yield Fault(
        path=f"stages.{index}.call",
        problem=f"the project folder of the function {stage.call} is unknown, because the pipeline "
        "was not read from a file, and the step has no key `code`",
        remedy="write the pipeline into a file in the project folder, and start this file with "
        "`muster pipeline FILE`. Or copy the line `code: NAME` from the spec of an earlier run of "
        "the project",
    )
