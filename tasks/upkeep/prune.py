"""Delete files of ended runs on this host, old logs of the stack, and flow runs of the upkeep.

The record `run.json` and the specs of the attempts are always kept: they are small and say what was
run and how it ended. Files that the run's own programs wrote, such as checkpoints and models, are
kept unless `outputs` is set.

Pruning is safe at any time and from several processes at once. A run is skipped if it has not
ended, if it is registered or waits, or if another run uses its files.
"""

from __future__ import annotations

import gzip
import json
import logging
import math
import os
import re
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

from cyclopts import Parameter
from cyclopts.validators import Number
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowFilter
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.client.schemas.responses import DeploymentResponse
from prefect.settings import PREFECT_API_URL
from pydantic import BaseModel, ConfigDict, Field
from rich.filesize import decimal

from tasks.processes.registry import registered_runs
from tasks.record.code_store import forget, names_in, own_files
from tasks.record.places import RunPlace, muster_home
from tasks.record.run_json import RunJson
from tasks.server.artifacts import forget_code, run_log, shared_code
from tasks.server.flow_runs import (
    UPKEEP_FLOWS,
    ServerAway,
    ServerRefuses,
    open_flow_runs,
    talking_to,
)
from tasks.show.arguments import EXIT_DONE, EXIT_FAILED
from tasks.spec.formatting import format_count, join_commas
from tasks.upkeep.waiting_runs import list_waiting_runs

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_DAY_S = 24 * 3600.0
#: A log of the stack is cut when it is larger. The part before the cut is kept, compressed.
_STACK_LOG_BYTES = 50 * 1024**2
#: Days for which completed flow runs of the upkeep are kept.
_UPKEEP_DAYS = 2.0
#: Largest number of flow runs that the Prefect server deletes in one request.
_MAX_DELETED = 50
#: Number of deployments that are requested at once.
_PAGE_SIZE = 200

#: Files that are never deleted, relative to the run's directory.
_KEPT_FILES = re.compile(r"run\.json|attempt-\d+/spec\.yaml")
#: Files that Muster itself writes, relative to the run's directory.
_OWN_FILES = re.compile(
    r"attempt-\d+/[^/]*(\.log|\.log\.gz|\.hang\.txt)"
    r"|attempt-\d+/(events\.jsonl|rollout\.jsonl|rollout-plan\.json|submission[^/]*\.json)"
)
_RUN_ID = re.compile(r"[a-z][a-z0-9-]*-(?:ppo|grpo|sft)-\d{8}-\d{6}-[0-9a-f]{8}")


class Retention(BaseModel):
    """How long the files of ended runs are kept."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    days: float = Field(
        default=60, ge=0, description="A run's files are removed so many days after its end."
    )
    outputs: bool = Field(
        default=False,
        description="What a run's own programs wrote into its directory, such as checkpoints, is "
        "removed with Muster's files.",
    )

    @staticmethod
    def of_environment(environment: Mapping[str, str]) -> Retention:
        """Return what the operator has set: `MUSTER_PRUNE_DAYS` for `days`, and so on.

        Raises:
            ValidationError: A variable has an invalid value. The error names the field.
        """
        values = {
            field: environment.get(f"MUSTER_PRUNE_{field.upper()}") for field in ("days", "outputs")
        }
        return Retention.model_validate({field: value for field, value in values.items() if value})


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunableRun:
    """A run's directory with files that may be deleted."""

    #: `$MUSTER_HOME/runs/<run id>`.
    directory: Path
    #: Files that may be deleted, relative to the directory.
    files: frozenset[str]
    #: Size of these files together.
    size_bytes: int
    #: UTC epoch seconds. Infinite if the run has not ended, or may not have ended.
    ended_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    """Result of one prune of a MUSTER_HOME."""

    #: True if nothing was deleted, and this is only what would be deleted.
    is_dry: bool
    #: Runs whose files were deleted, the run that ended first comes first.
    runs: tuple[PrunableRun, ...] = ()
    #: Number of flow runs of the upkeep that were deleted from the server.
    flow_runs: int = 0
    #: Number of entries of the code store that were deleted because nothing uses them.
    codes: int = 0
    #: What could not be done and why, or an empty string.
    open: str = ""

    @property
    def summary(self) -> str:
        """Summary in one line."""
        parts = []
        if self.runs:
            size = decimal(sum(run.size_bytes for run in self.runs))
            parts.append(f"the files of {format_count(len(self.runs), 'run')} ({size})")
        if self.codes:
            parts.append(f"{format_count(self.codes, 'file')} of code")
        if self.flow_runs:
            parts.append(f"{self.flow_runs} flow runs of the upkeep")

        action = ""
        if parts:
            action = f"{'would remove' if self.is_dry else 'removed'} {join_commas(parts)}"
        return "; ".join(filter(None, (action, self.open))) or "nothing to do"

    def lines(self) -> Iterator[str]:
        """Yield one line for each run, and the summary."""
        yield from (f"{decimal(run.size_bytes):>10}  {run.directory.name}" for run in self.runs)
        yield self.summary


def prune_host(keep: Retention | None = None, *, dry_run: bool = False) -> Pruned:
    """Delete what the retention rules allow.

    If a Prefect server is set and does not answer, nothing is deleted: a run that waits there could
    need the files of another run.

    Args:
        keep: How long files are kept. None: as the environment of this host says.
        dry_run: Delete nothing, only return what would be deleted.

    Raises:
        ValidationError: The environment of this host has an invalid setting.
    """
    keep = keep or Retention.of_environment(os.environ)
    try:
        server_text = _on_server(_names_and_parameters) or ""
    except ServerAway as error:
        is_refused = isinstance(error, ServerRefuses)
        why = str(error) if is_refused else f"the Prefect server does not answer ({error})"
        return Pruned(is_dry=dry_run, open=f"nothing was pruned: {why}")

    candidates = survey(keep, {*_RUN_ID.findall(server_text)})
    runs = [run for run in candidates if time.time() - run.ended_at > keep.days * _DAY_S]
    kept_directories = [run.directory for run in candidates if run not in runs]
    problems: list[str] = []
    if not dry_run:
        # A run may have been resumed since the survey, so check again.
        ended = (run for run in runs if math.isfinite(_ended_at(run.directory)))
        runs = [run for run in ended if run.directory.name not in registered_runs()]
        problems = [problem for run in runs if (problem := _delete_files(run))]
        _cut_stack_logs()

    codes = 0
    flow_runs = 0
    try:
        codes = _on_server(partial(_forget_code, server_text, kept_directories, dry_run)) or 0
        flow_runs = 0 if dry_run else _on_server(_delete_upkeep) or 0
    except (ServerAway, OSError) as error:
        _log.warning("code, or flow runs of the upkeep, were not pruned: %s", error)
    return Pruned(
        is_dry=dry_run, runs=tuple(runs), codes=codes, flow_runs=flow_runs, open="; ".join(problems)
    )


def publish(pruned: Pruned) -> None:
    """Log the result."""
    for line in pruned.lines():
        run_log(_log).info("%s", line)


def survey(keep: Retention, wanted: set[str]) -> list[PrunableRun]:
    """Return the runs on this host that have files to delete, the run that ended first comes first.

    The end time of a run is infinite, so that its files are kept, in these cases:

    - The run has not ended, or is registered or waits for its next attempt.
    - An open flow run names it.
    - Another run, which has not been pruned, has started from its files.

    Args:
        keep: Decides whether files of the run's own programs count.
        wanted: Ids of the runs that open flow runs name.
    """
    paths = sorted((muster_home() / "runs").glob("*"))
    directories = {
        path: _file_sizes(path) for path in paths if path.is_dir() and not path.is_symlink()
    }
    protected = wanted.union(registered_runs(), list_waiting_runs())
    for path, sizes in directories.items():
        is_pruned = not any(map(_OWN_FILES.fullmatch, sizes))
        if not is_pruned:
            protected |= _named_runs(path)

    candidates = []
    for path, sizes in directories.items():
        removable = {name for name in sizes if not _KEPT_FILES.fullmatch(name)}
        if not keep.outputs:
            code_files = {f"code/{name}" for name in own_files(path / "code")}
            removable = {
                name for name in removable if name in code_files or _OWN_FILES.fullmatch(name)
            }
        if removable:
            candidates.append(
                PrunableRun(
                    directory=path,
                    files=frozenset(removable),
                    size_bytes=sum(sizes[name] for name in removable),
                    ended_at=math.inf if path.name in protected else _ended_at(path),
                )
            )
    return sorted(candidates, key=lambda run: run.ended_at)


def _ended_at(directory: Path) -> float:
    """Return the end of a run in UTC epoch seconds, or infinity if it may not have ended."""
    with suppress(OSError, ValueError):
        content = RunJson.read(RunPlace(directory=directory).record)
        if content.state.is_final and content.ended_at is not None:
            return content.ended_at
    return math.inf


def _file_sizes(directory: Path) -> dict[str, int]:
    """Return the size in bytes of every file, by its path relative to the directory.

    A symbolic link counts as a file and is not followed.
    """
    sizes = {}
    for folder, folder_names, file_names in os.walk(directory):
        links = [name for name in folder_names if os.path.islink(os.path.join(folder, name))]
        for name in [*file_names, *links]:
            path = os.path.join(folder, name)
            with suppress(OSError):
                sizes[os.path.relpath(path, directory)] = os.lstat(path).st_size
    return sizes


def _named_runs(directory: Path) -> set[str]:
    """Return the other runs that a run's record and specs name: it has started from their files."""
    run_ids: set[str] = set()
    for path in (directory / "run.json", *directory.glob("attempt-*/spec.yaml")):
        with suppress(OSError):
            run_ids.update(_RUN_ID.findall(path.read_text(encoding="utf-8", errors="replace")))
    return run_ids - {directory.name}


def _delete_files(run: PrunableRun) -> str:
    """Delete the files of a run, and the folders that are empty then.

    Returns:
        Reason why files are left, or an empty string.
    """
    directory = run.directory
    problem = ""
    for name in run.files:
        try:
            (directory / name).unlink(missing_ok=True)
        except OSError as error:
            problem = problem or str(error)

    folders = (Path(parent) / name for parent, names, _ in os.walk(directory) for name in names)
    # In reverse order, a folder comes after the folders in it.
    for folder in sorted(folders, reverse=True):
        with suppress(OSError):
            folder.rmdir()
    return f"not all of {directory.name} went: {problem}" if problem else ""


def _cut_stack_logs() -> None:
    """Cut the logs of this host's stack that have become large.

    The processes that write them keep them open in append mode. A few lines that are written
    between the copy and the cut are lost.
    """
    for path in (muster_home() / "stack" / "logs").glob("*.log"):
        try:
            if path.stat().st_size > _STACK_LOG_BYTES:
                with path.open("rb") as source, gzip.open(f"{path}.1.gz", "wb", 6) as target:
                    shutil.copyfileobj(source, target, 1 << 20)
                os.truncate(path, 0)
        except OSError as error:
            _log.warning("%s was not cut: %s", path, error)


def _on_server(ask: Callable[[SyncPrefectClient], _T]) -> _T | None:
    """Call a function with a client of the Prefect server. Returns None if no server is set.

    Raises:
        ServerAway: The server did not answer.
    """
    if not (api_url := PREFECT_API_URL.value()):
        return None
    with talking_to(api_url) as client:
        return ask(client)


def _names_and_parameters(client: SyncPrefectClient) -> str:
    """Return the names and parameters of all open flow runs and deployments as one text."""
    items: list[FlowRun | DeploymentResponse] = [*open_flow_runs(client)]
    offset = 0
    while page := client.read_deployments(limit=_PAGE_SIZE, offset=offset):
        items += page
        offset += len(page)
    return "\n".join(f"{item.name} {json.dumps(item.parameters, default=str)}" for item in items)


def _forget_code(
    server_text: str, kept_directories: Iterable[Path], dry_run: bool, client: SyncPrefectClient
) -> int:
    """Delete code that is no longer used, from this host's code store and from the server.

    Code is used if a run that keeps its files, an open flow run or a deployment names it. Without
    a server this is unknown, so nothing is deleted then.

    Returns:
        The number of deleted entries.
    """
    specs = [spec for path in kept_directories for spec in path.glob("attempt-*/spec.yaml")]
    spec_text = "\n".join(spec.read_text(encoding="utf-8", errors="replace") for spec in specs)
    used_on_server = names_in(server_text, partial(shared_code, client))
    deleted = forget(used_on_server | names_in(spec_text), is_dry=dry_run)
    if dry_run:
        return len(deleted)
    return len(deleted) + forget_code(client, used_on_server)


def _delete_upkeep(client: SyncPrefectClient) -> int:
    """Delete flow runs that the upkeep completed some days ago, and return their number.

    The upkeep makes more than a hundred flow runs a day, and Prefect itself never deletes any.
    """
    upkeep_flows = FlowFilter.model_validate({"name": {"any_": UPKEEP_FLOWS}})
    deployments = client.read_deployments(flow_filter=upkeep_flows)
    deployment_ids = [str(deployment.id) for deployment in deployments]
    before = datetime.now(UTC) - timedelta(days=_UPKEEP_DAYS)
    flow_run_filter = {
        "deployment_id": {"any_": deployment_ids},
        "state": {"type": {"any_": [StateType.COMPLETED.value]}},
        "end_time": {"before_": before.isoformat()},
    }
    content = {"flow_runs": flow_run_filter, "limit": _MAX_DELETED}
    count = 0
    while deployment_ids:
        path: Any = "/flow_runs/bulk_delete"  # Missing in the client's list of valid paths.
        deleted = len(client.request("POST", path, json=content).json()["deleted"])
        count += deleted
        if deleted < _MAX_DELETED:
            break
    return count


def prune(
    *,
    yes: bool = False,
    days: Annotated[
        float, Parameter(env_var="MUSTER_PRUNE_DAYS", validator=Number(gte=0))
    ] = Retention().days,
    outputs: Annotated[bool, Parameter(env_var="MUSTER_PRUNE_OUTPUTS")] = Retention().outputs,
) -> int:
    """Show which files of ended runs can be deleted from MUSTER_HOME; with --yes, delete them.

    The copy of a run's code is deleted with its files, and so is unused code in the code store.
    run.json and the specs of a run are always kept. Files that the run's own programs wrote are
    kept unless --outputs is given. A run is skipped if it has not ended, waits, or if another run
    has started from its files.

    Exit: 0 done, or shown; 1 something could not be done; 2 a rule is wrong.

    Args:
        yes: Delete the files. Otherwise they are only shown.
        days: A run's files are removed so many days after its end.
        outputs: What a run's own programs wrote into its directory is removed with Muster's files.
    """
    # The result is printed, so it need not be logged as well.
    # What it would log is printed here.
    logging.getLogger("tasks.upkeep.prune").setLevel(logging.ERROR)
    pruned = prune_host(Retention(days=days, outputs=outputs), dry_run=not yes)
    for line in pruned.lines():
        print(line)
    if not yes and pruned.runs:
        print("Nothing was done. To do it: muster prune --yes")
    return EXIT_FAILED if pruned.open else EXIT_DONE
