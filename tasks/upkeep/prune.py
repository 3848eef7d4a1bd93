"""Delete files of ended runs and pipelines, unused code, old logs, and maintenance flow runs.

The files `run.json` and `lineage.json` and the specs of a run's attempts are always kept. They are
small, and they document the run and its result. Files that the run's own programs wrote, such as
checkpoints and models, are kept unless the rule `outputs` is set.

Files may be pruned at any time, even by several processes at once. A run is skipped if it has not
ended, if it has a registry entry, if it waits for its next attempt, or if another run uses its
files.

The *upkeep* is Muster's maintenance process of each host. It regularly creates Prefect flow runs.
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
from tasks.record.code_store import delete_unused, find_entry_names, measure_unchanged_files
from tasks.record.places import RunPlace, muster_home
from tasks.record.run_json import RunJson
from tasks.server.artifacts import delete_unused_code, download_code, find_run_logger
from tasks.server.flow_runs import (
    UPKEEP_FLOWS,
    ServerAway,
    ServerRefuses,
    connect_to_server,
    read_open_flow_runs,
)
from tasks.show.arguments import EXIT_DONE, EXIT_FAILED
from tasks.spec.formatting import format_count, join_commas
from tasks.spec.own_settings import PRUNE_DAYS, PRUNE_OUTPUTS
from tasks.spec.workloads import WORKLOADS
from tasks.upkeep.old_pipelines import delete_pipeline, list_old_pipelines
from tasks.upkeep.waiting_runs import list_waiting_runs

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_DAY_S = 24 * 3600.0
#: Largest size, in bytes, of a log file of a process that `muster up` started. A larger log is
#: compressed into an archive and emptied.
_STACK_LOG_BYTES = 50 * 1024**2
#: Number of days to keep completed flow runs of Muster's maintenance flows on the Prefect server.
_UPKEEP_DAYS = 2.0
#: Largest number of flow runs that the Prefect server deletes in one request.
_MAX_DELETED = 50
#: Largest number of deployments that one request to the Prefect server returns.
_PAGE_SIZE = 200

#: Paths, relative to a run's directory, of files that are never deleted.
_KEPT_FILES = re.compile(r"run\.json|lineage\.json|(attempt-\d+/)?spec\.yaml")
#: Paths, relative to a run's directory, of files that Muster itself writes.
_OWN_FILES = re.compile(
    r"attempt-\d+/[^/]*(\.log|\.log\.gz|\.hang\.txt)"
    r"|attempt-\d+/(events\.jsonl|rollout\.jsonl|rollout-plan\.json|submission[^/]*\.json)"
)
#: Id of a run, as it appears in the records and specs of other runs.
_RUN_ID = re.compile(rf"[a-z][a-z0-9-]*-(?:{'|'.join(WORKLOADS)})-\d{{8}}-\d{{6}}-[0-9a-f]{{8}}")


class Retention(BaseModel):
    """Rules for keeping the files of ended runs."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    days: float = Field(
        default=60,
        ge=0,
        description="Number of days after the end of a run for which Muster keeps the files of "
        "the run.",
    )
    outputs: bool = Field(
        default=False,
        description="true: in the directory of a run, Muster also deletes the files that the "
        "programs of the run wrote, such as checkpoints.",
    )

    @staticmethod
    def of_environment(environment: Mapping[str, str]) -> Retention:
        """Return the rules that the environment variables set.

        The variable of the field `days` is `MUSTER_PRUNE_DAYS`. The variable of the field `outputs`
        is `MUSTER_PRUNE_OUTPUTS`. A missing or empty variable leaves the field at its default.

        Raises:
            InvalidVariable: A variable has an invalid value.
        """
        return Retention(days=PRUNE_DAYS.read(environment), outputs=PRUNE_OUTPUTS.read(environment))


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunableRun:
    """A run that has files which may be deleted after the run's end."""

    #: Directory of the run, `$MUSTER_HOME/runs/<run id>`.
    directory: Path
    #: Paths of the files that may be deleted, relative to `directory`.
    files: frozenset[str]
    #: Total size of the files that may be deleted.
    size_bytes: int
    #: Time of the run's end in UTC epoch seconds. Infinite if the files must be kept now, for
    #: example because the run has not ended.
    ended_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PruneResult:
    """Result of `prune_host`, which deletes old data on this host and on the Prefect server."""

    #: True if `prune_host` was called with `dry_run`. Nothing was deleted then, and the other
    #: fields describe the data that would have been deleted without `dry_run`.
    is_dry: bool
    #: Runs whose files were deleted, sorted by the end time of the run.
    runs: tuple[PrunableRun, ...] = ()
    #: Folders of pipelines that were deleted.
    pipelines: tuple[Path, ...] = ()
    #: Number of flow runs of Muster's maintenance flows that were deleted from the Prefect server.
    flow_runs: int = 0
    #: Number of unused entries that were deleted from the code store.
    codes: int = 0
    #: Problems that prevented deletions, or an empty string.
    open: str = ""

    @property
    def summary(self) -> str:
        """One line with four numbers: runs whose files were deleted, pipelines whose files were
        deleted, deleted entries of the code store, and deleted flow runs.

        If problems prevented deletions, the line ends with the problems.
        """
        parts = []
        if self.runs:
            size = decimal(sum(run.size_bytes for run in self.runs))
            parts.append(f"the files of {format_count(len(self.runs), 'run')} ({size})")
        if self.pipelines:
            parts.append(f"the files of {format_count(len(self.pipelines), 'pipeline')}")
        if self.codes:
            parts.append(f"{format_count(self.codes, 'file')} of code")
        if self.flow_runs:
            parts.append(f"{self.flow_runs} flow runs of the upkeep")

        action = ""
        if parts:
            action = f"{'would remove' if self.is_dry else 'removed'} {join_commas(parts)}"
        return "; ".join(filter(None, (action, self.open))) or "nothing to do"

    def lines(self) -> Iterator[str]:
        """Yield one line for each run and for each pipeline, and then the summary."""
        yield from (f"{decimal(run.size_bytes):>10}  {run.directory.name}" for run in self.runs)
        yield from (f"{'':>10}  pipelines/{folder.name}" for folder in self.pipelines)
        yield self.summary


def prune_host(keep: Retention | None = None, *, dry_run: bool = False) -> PruneResult:
    """Delete the old files of this host that the retention rules do not keep.

    If a Prefect server is configured but does not answer, nothing is deleted, because a queued run
    on that server could need the old files of another run.

    Args:
        keep: The retention rules. If None, the rules are read from the environment variables of
            this process.
        dry_run: If True, nothing is deleted. The result describes the data that would be deleted.

    Raises:
        ValidationError: An environment variable has an invalid value.
    """
    keep = keep or Retention.of_environment(os.environ)
    try:
        server_text = _on_server(_describe_open_work)
    except ServerAway as error:
        is_refused = isinstance(error, ServerRefuses)
        why = str(error) if is_refused else f"the Prefect server does not answer ({error})"
        return PruneResult(is_dry=dry_run, open=f"nothing was deleted: {why}")

    candidates = survey(keep, {*_RUN_ID.findall(server_text or "")})
    runs = [run for run in candidates if time.time() - run.ended_at > keep.days * _DAY_S]
    kept_directories = [run.directory for run in candidates if run not in runs]
    pipelines: list[Path] = []
    if server_text is not None:
        # Only the server knows which pipelines have not ended. So without a server, no pipeline is
        # deleted.
        pipelines = list_old_pipelines(keep.days * _DAY_S, server_text, kept_directories)
    problems: list[str] = []
    if not dry_run:
        # A run may have been resumed since `survey` read its record, so check each run again.
        ended = (run for run in runs if math.isfinite(_ended_at(run.directory)))
        runs = [run for run in ended if run.directory.name not in registered_runs()]
        problems = [problem for run in runs if (problem := _delete_files(run))]
        problems += filter(None, map(delete_pipeline, pipelines))
        _cut_stack_logs()

    codes = 0
    flow_runs = 0
    try:
        codes = _on_server(partial(_forget_code, server_text or "", kept_directories, dry_run)) or 0
        flow_runs = 0 if dry_run else _on_server(_delete_upkeep) or 0
    except (ServerAway, OSError) as error:
        _log.warning(
            "Some unused copies of code, or some old flow runs of `reconcile` and `prune`, could "
            "not be deleted: %s",
            error,
        )
    return PruneResult(
        is_dry=dry_run,
        runs=tuple(runs),
        pipelines=tuple(pipelines),
        codes=codes,
        flow_runs=flow_runs,
        open="; ".join(problems),
    )


def publish(pruned: PruneResult) -> None:
    """Write the result of a prune to the log of the active flow run, line by line."""
    for line in pruned.lines():
        find_run_logger(_log).info("%s", line)


def survey(keep: Retention, wanted: set[str]) -> list[PrunableRun]:
    """Return the runs on this host that have files which may be deleted, now or later.

    The runs are sorted by their end time. In these cases, the files of a run must be kept for now,
    and the end time of the run in the result is infinite:

    - The run has not ended, has a registry entry, or waits for its next attempt.
    - A deployment, or a flow run that has not ended, refers to the run.
    - Another run has started from the run's files, and the other run's files were not pruned.

    Args:
        keep: The retention rules. They decide whether files of the run's own programs are included.
        wanted: Ids of the runs to which deployments or flow runs on the Prefect server refer.
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
            code_files = {f"code/{name}" for name in measure_unchanged_files(path / "code")}
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
    """Return the end time of a run in UTC epoch seconds, or infinity if no end is recorded."""
    with suppress(OSError, ValueError):
        content = RunJson.read(RunPlace(directory=directory).record)
        if content.state.is_final and content.ended_at is not None:
            return content.ended_at
    return math.inf


def _file_sizes(directory: Path) -> dict[str, int]:
    """Return a mapping from relative path to size in bytes, for all files below a directory.

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
    """Return the run ids that a run's record and specs contain, except the id of the run itself.

    The run may have started from files of these other runs, for example from a checkpoint.
    """
    run_ids: set[str] = set()
    specs = (directory / "spec.yaml", *directory.glob("attempt-*/spec.yaml"))
    for path in (directory / "run.json", *specs):
        with suppress(OSError):
            run_ids.update(_RUN_ID.findall(path.read_text(encoding="utf-8", errors="replace")))
    return run_ids - {directory.name}


def _delete_files(run: PrunableRun) -> str:
    """Delete the files of a run, and then the empty folders in its directory.

    Returns:
        An empty string if all files were deleted. Otherwise, a sentence with the first error.
    """
    directory = run.directory
    problem = ""
    for name in run.files:
        try:
            (directory / name).unlink(missing_ok=True)
        except OSError as error:
            problem = problem or str(error)

    folders = (Path(parent) / name for parent, names, _ in os.walk(directory) for name in names)
    # Delete the folders that are empty now. In the reverse order of their paths, subfolders come
    # before their parent folder.
    for folder in sorted(folders, reverse=True):
        with suppress(OSError):
            folder.rmdir()
    return f"some files of {directory.name} could not be deleted: {problem}" if problem else ""


def _cut_stack_logs() -> None:
    """Compress each large log file of the stack into an archive, and empty the file.

    The stack is the server and the other processes that `muster up` starts on this host. These
    processes keep their log files open in append mode, so a log file is truncated and not replaced.
    Lines that are written after the compression and before the truncation are lost.
    """
    for path in (muster_home() / "stack" / "logs").glob("*.log"):
        try:
            if path.stat().st_size > _STACK_LOG_BYTES:
                with path.open("rb") as source, gzip.open(f"{path}.1.gz", "wb", 6) as target:
                    shutil.copyfileobj(source, target, 1 << 20)
                os.truncate(path, 0)
        except OSError as error:
            _log.warning("The log file %s was not archived: %s", path, error)


def _on_server(ask: Callable[[SyncPrefectClient], _T]) -> _T | None:
    """Call a function with a client of the Prefect server, and return its result.

    Returns:
        The result of the function, or None if no server is configured.

    Raises:
        ServerAway: The server did not answer.
    """
    if not (api_url := PREFECT_API_URL.value()):
        return None
    with connect_to_server(api_url) as client:
        return ask(client)


def _describe_open_work(client: SyncPrefectClient) -> str:
    """Return the ids, names and parameters of all deployments and unfinished flow runs as one text.

    Callers keep the runs, the pipelines and the stored code that this text names.
    """
    items: list[FlowRun | DeploymentResponse] = [*read_open_flow_runs(client)]
    offset = 0
    while page := client.read_deployments(limit=_PAGE_SIZE, offset=offset):
        items += page
        offset += len(page)
    return "\n".join(
        f"{item.id} {item.name} {json.dumps(item.parameters, default=str)}" for item in items
    )


def _forget_code(
    server_text: str, kept_directories: Iterable[Path], dry_run: bool, client: SyncPrefectClient
) -> int:
    """Delete unused code from this host's code store and from the Prefect server.

    Code is in use if one of these refers to the code: a run whose files are kept, an unfinished
    flow run, or a deployment.

    Args:
        server_text: Names and parameters of all deployments and unfinished flow runs.
        kept_directories: Directories of the runs that keep their files.
        dry_run: If True, nothing is deleted, and only the unused entries on this host are counted.
        client: Client of the Prefect server.

    Returns:
        The number of deleted entries.
    """
    # The specs and records of the kept runs name the entries of the code store that are still used:
    # `spec.yaml` names the entry with the code of a submitted run, and `run.json` names the entry
    # with a copy of the project's files.
    files = [
        file
        for directory in kept_directories
        for file in (*directory.glob("attempt-*/spec.yaml"), *directory.glob("run.json"))
    ]
    local_text = "\n".join(file.read_text(encoding="utf-8", errors="replace") for file in files)
    used_on_server = find_entry_names(server_text, partial(download_code, client))
    deleted = delete_unused(used_on_server | find_entry_names(local_text), is_dry=dry_run)
    if dry_run:
        return len(deleted)
    return len(deleted) + delete_unused_code(client, used_on_server)


def _delete_upkeep(client: SyncPrefectClient) -> int:
    """Delete old completed flow runs of Muster's maintenance flows, and return their number.

    The maintenance flows have more than a hundred flow runs a day, and Prefect never deletes old
    flow runs.
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
        # Use `Any` to satisfy the type checker: `client.request` declares a fixed list of paths,
        # and this path is not in the list.
        path: Any = "/flow_runs/bulk_delete"
        deleted = len(client.request("POST", path, json=content).json()["deleted"])
        count += deleted
        if deleted < _MAX_DELETED:
            break
    return count


def prune(
    *,
    yes: bool = False,
    days: Annotated[
        float, Parameter(env_var=PRUNE_DAYS.name, validator=Number(gte=0))
    ] = Retention().days,
    outputs: Annotated[bool, Parameter(env_var=PRUNE_OUTPUTS.name)] = Retention().outputs,
) -> int:
    """List old files of ended runs and pipelines in MUSTER_HOME, and delete them with --yes.

    The copy of a run's code is deleted together with the run's files. Unused code is deleted from
    the code store. run.json and the specs of a run are always kept. Files that the run's own
    programs wrote are kept unless --outputs is given. A run is skipped if it has not ended, if it
    waits for its next attempt, or if another run has started from its files.

    Exit: 0 files deleted or listed; 1 a file could not be deleted; 2 a rule is invalid.

    Args:
        yes: Delete the files. By default they are only listed.
        days: Number of days after the end of a run for which Muster keeps the files of the run.
        outputs: Also delete the files that a run's own programs wrote into its directory.
    """
    # The result is printed to the terminal, so do not log it as well.
    logging.getLogger("tasks.upkeep.prune").setLevel(logging.ERROR)
    pruned = prune_host(Retention(days=days, outputs=outputs), dry_run=not yes)
    for line in pruned.lines():
        print(line)
    if not yes and (pruned.runs or pruned.pipelines):
        print("No file was deleted. To delete these files: muster prune --yes")
    return EXIT_FAILED if pruned.open else EXIT_DONE
