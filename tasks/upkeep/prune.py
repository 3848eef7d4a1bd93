"""Pruning what ended runs have left on this host, the stack's own logs, and the upkeep's flow runs.

Of a run that is pruned the record, `run.json`, and the spec of each attempt are kept for ever: they
are small, and say what was run and what became of it. What the run's own programs have written
beside Muster's files (checkpoints, models, figures) is theirs, and stays unless `outputs` says that
it may go with the rest.

Safe at any time, from any number of processes at once: a run that has not ended, that is registered
or parked, or that another one starts from is left as it is.
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
from tasks.spec.words import commas, counted
from tasks.upkeep.parked import parked_runs

_log = logging.getLogger(__name__)
_T = TypeVar("_T")

_DAY_S = 24 * 3600.0
#: A log of the stack is cut at this size; the part before it is kept, compressed.
_STACK_LOG_BYTES = 50 * 1024**2
#: Flow runs of the upkeep that completed are kept for so long.
_UPKEEP_DAYS = 2.0
#: By the server's own rule.
_DELETED_AT_ONCE = 50
_PAGE = 200

#: Of a run that is pruned these stay: what it was, and what became of it.
_KEPT = re.compile(r"run\.json|attempt-\d+/spec\.yaml")
#: What Muster itself writes, in the folder of an attempt.
_OWN = re.compile(
    r"attempt-\d+/[^/]*(\.log|\.log\.gz|\.hang\.txt)"
    r"|attempt-\d+/(events\.jsonl|rollout\.jsonl|rollout-plan\.json|submission[^/]*\.json)"
)
_RUN_ID = re.compile(r"[a-z][a-z0-9-]*-(?:ppo|grpo|sft)-\d{8}-\d{6}-[0-9a-f]{8}")


class Retention(BaseModel):
    """How long what runs leave is kept."""

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
        """What an operator has set: `MUSTER_PRUNE_DAYS` for `days`, and so on.

        Raises: ValidationError, which names the field.
        """
        named = {one: environment.get(f"MUSTER_PRUNE_{one.upper()}") for one in ("days", "outputs")}
        return Retention.model_validate({name: value for name, value in named.items() if value})


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One run's directory with files that may go."""

    #: `$MUSTER_HOME/runs/<run id>`.
    directory: Path
    #: Paths within it, and how many bytes all of them have.
    files: frozenset[str]
    size_bytes: int
    #: UTC epoch seconds; infinite while it has not ended, or nobody knows.
    ended_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    """One prune of this MUSTER_HOME."""

    #: It was only shown.
    is_dry: bool
    #: The runs whose files went, the oldest first.
    runs: tuple[Found, ...] = ()
    #: Flow runs of the upkeep that were deleted from the server.
    flow_runs: int = 0
    #: Of the code store: what nothing names.
    codes: int = 0
    #: What could not be done, and why; empty where all was.
    open: str = ""

    @property
    def summary(self) -> str:
        """One line."""
        size = decimal(sum(run.size_bytes for run in self.runs))
        parts = [f"the files of {counted(len(self.runs), 'run')} ({size})"] if self.runs else []
        parts += [f"{counted(self.codes, 'file')} of code"] if self.codes else []
        parts += [f"{self.flow_runs} flow runs of the upkeep"] if self.flow_runs else []
        did = f"{'would remove' if self.is_dry else 'removed'} {commas(parts)}" if parts else ""
        return "; ".join(filter(None, (did, self.open))) or "nothing to do"

    def lines(self) -> Iterator[str]:
        """One for each run, and the summary."""
        yield from (f"{decimal(run.size_bytes):>10}  {run.directory.name}" for run in self.runs)
        yield self.summary


def prune_host(keep: Retention | None = None, *, dry_run: bool = False) -> Pruned:
    """Do what the rules say, or with `dry_run` only say it.

    Where the server of PREFECT_API_URL is set and does not answer, nothing is removed: a run that
    waits there may be about to start from what another one has left.

    Raises: ValidationError, where the environment, by which it keeps by default, sets nonsense.
    """
    keep = keep or Retention.of_environment(os.environ)
    try:
        named = _on_server(_named_by_server) or ""
    except ServerAway as error:
        is_refused = isinstance(error, ServerRefuses)
        why = str(error) if is_refused else f"the Prefect server does not answer ({error})"
        return Pruned(is_dry=dry_run, open=f"nothing was pruned: {why}")
    found = survey(keep, {*_RUN_ID.findall(named)})
    runs = [run for run in found if time.time() - run.ended_at > keep.days * _DAY_S]
    kept = [run.directory for run in found if run not in runs]
    problems: list[str] = []
    if not dry_run:
        # One may have been begun again since it was looked at.
        ended = (run for run in runs if math.isfinite(_ended_at(run.directory)))
        runs = [run for run in ended if run.directory.name not in registered_runs()]
        problems = [why for run in runs if (why := _remove(run))]
        _cut_stack_logs()
    codes = flow_runs = 0
    try:
        codes = _on_server(partial(_forget_code, named, kept, dry_run)) or 0
        flow_runs = 0 if dry_run else _on_server(_delete_upkeep) or 0
    except (ServerAway, OSError) as error:
        _log.warning("code, or flow runs of the upkeep, were not pruned: %s", error)
    return Pruned(
        is_dry=dry_run, runs=tuple(runs), codes=codes, flow_runs=flow_runs, open="; ".join(problems)
    )


def publish(pruned: Pruned) -> None:
    """Log what was done."""
    for line in pruned.lines():
        run_log(_log).info("%s", line)


def survey(keep: Retention, wanted: set[str]) -> list[Found]:
    """The runs on this host with files that may go, the one that ended first is the first. None
    that is registered as running, or waits for its next attempt; that an open flow run names, as
    those that are wanted; or that another one has started from, which has not been pruned itself.
    """
    here = sorted((muster_home() / "runs").glob("*"))
    directories = {path: _sizes(path) for path in here if path.is_dir() and not path.is_symlink()}
    held = wanted.union(registered_runs(), parked_runs())
    for path, sizes in directories.items():
        if any(map(_OWN.fullmatch, sizes)):
            held |= _named_by(path)
    found = []
    for path, sizes in directories.items():
        gone = {name for name in sizes if not _KEPT.fullmatch(name)}
        if not keep.outputs:
            own = {f"code/{name}" for name in own_files(path / "code")}
            gone = {name for name in gone if name in own or _OWN.fullmatch(name)}
        if gone:
            # Of one that is held nobody knows whether it has ended.
            ended_at = math.inf if path.name in held else _ended_at(path)
            size_bytes = sum(sizes[name] for name in gone)
            found.append(
                Found(
                    directory=path, files=frozenset(gone), size_bytes=size_bytes, ended_at=ended_at
                )
            )
    return sorted(found, key=lambda run: run.ended_at)


def _ended_at(directory: Path) -> float:
    with suppress(OSError, ValueError):
        content = RunJson.read(RunPlace(directory=directory).record)
        if content.state.is_final and content.ended_at is not None:
            return content.ended_at
    return math.inf


def _sizes(directory: Path) -> dict[str, int]:
    """Bytes of every file, by its path within the directory; links are not followed."""
    found = {}
    for folder, names, files in os.walk(directory):
        for name in [*files, *(n for n in names if os.path.islink(os.path.join(folder, n)))]:
            path = os.path.join(folder, name)
            with suppress(OSError):
                found[os.path.relpath(path, directory)] = os.lstat(path).st_size
    return found


def _named_by(directory: Path) -> set[str]:
    """The other runs that a run's record and specs name: it has started from what they left."""
    found: set[str] = set()
    for path in (directory / "run.json", *directory.glob("attempt-*/spec.yaml")):
        with suppress(OSError):
            found.update(_RUN_ID.findall(path.read_text(encoding="utf-8", errors="replace")))
    return found - {directory.name}


def _remove(run: Found) -> str:
    """Remove its files, and the folders that are empty then; why not all went, or nothing."""
    directory, problem = run.directory, ""
    for name in run.files:
        try:
            (directory / name).unlink(missing_ok=True)
        except OSError as error:
            problem = problem or str(error)
    folders = (Path(above) / name for above, names, _ in os.walk(directory) for name in names)
    for folder in sorted(folders, reverse=True):
        with suppress(OSError):
            folder.rmdir()
    return f"not all of {directory.name} went: {problem}" if problem else ""


def _cut_stack_logs() -> None:
    """Cut the logs of this host's stack that have grown large; their writers append. A line or two
    that come between the copy and the cut are lost."""
    for path in (muster_home() / "stack" / "logs").glob("*.log"):
        try:
            if path.stat().st_size > _STACK_LOG_BYTES:
                with path.open("rb") as source, gzip.open(f"{path}.1.gz", "wb", 6) as target:
                    shutil.copyfileobj(source, target, 1 << 20)
                os.truncate(path, 0)
        except OSError as error:
            _log.warning("%s was not cut: %s", path, error)


def _on_server(ask: Callable[[SyncPrefectClient], _T]) -> _T | None:
    """None where no server is set. Raises: ServerAway."""
    if not (api_url := PREFECT_API_URL.value()):
        return None
    with talking_to(api_url) as client:
        return ask(client)


def _named_by_server(client: SyncPrefectClient) -> str:
    """The names and parameters of open flow runs and of deployments."""
    named: list[FlowRun | DeploymentResponse] = [*open_flow_runs(client)]
    at = 0
    while found := client.read_deployments(limit=_PAGE, offset=at):
        named += found
        at += len(found)
    return "\n".join(f"{one.name} {json.dumps(one.parameters, default=str)}" for one in named)


def _forget_code(named: str, kept: Iterable[Path], dry_run: bool, client: SyncPrefectClient) -> int:
    """Of the code that no run with files, no open flow run and no deployment names, here and on the
    server, how much was removed. Without a server nobody knows what is named."""
    specs = (file for run in kept for file in run.glob("attempt-*/spec.yaml"))
    texts = (file.read_text(encoding="utf-8", errors="replace") for file in specs)
    on_server = names_in(named, partial(shared_code, client))
    gone = forget(on_server | names_in("\n".join(texts)), is_dry=dry_run)
    return len(gone) + (0 if dry_run else forget_code(client, on_server))


def _delete_upkeep(client: SyncPrefectClient) -> int:
    """Delete flow runs that the upkeep has completed some days ago, more than a hundred a day, of
    which Prefect itself deletes none; how many there were."""
    flows = FlowFilter.model_validate({"name": {"any_": UPKEEP_FLOWS}})
    deployments = [str(one.id) for one in client.read_deployments(flow_filter=flows)]
    before = datetime.now(UTC) - timedelta(days=_UPKEEP_DAYS)
    which = {
        "deployment_id": {"any_": deployments},
        "state": {"type": {"any_": [StateType.COMPLETED.value]}},
        "end_time": {"before_": before.isoformat()},
    }
    content = {"flow_runs": which, "limit": _DELETED_AT_ONCE}
    count = 0
    while deployments:
        where: Any = "/flow_runs/bulk_delete"  # not in Prefect's own list
        deleted = len(client.request("POST", where, json=content).json()["deleted"])
        count += deleted
        if deleted < _DELETED_AT_ONCE:
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
    """Show what may go of what ended runs have left in MUSTER_HOME, and with --yes remove it.

    With a run's files goes the copy of its code, and what of the code store nothing names any more.
    run.json and the specs of a run always stay; what its own programs wrote stays unless --outputs
    says otherwise; a run that has not ended, waits, or that another one has started from is left as
    it is.

    Exit: 0 done, or shown; 1 something could not be done; 2 a rule is wrong.

    Args:
        yes: Do it; else it is only shown.
        days: A run's files are removed so many days after its end.
        outputs: What a run's own programs wrote into its directory is removed with Muster's files.
    """
    # What it would log is printed here.
    logging.getLogger("tasks.upkeep.prune").setLevel(logging.ERROR)
    pruned = prune_host(Retention(days=days, outputs=outputs), dry_run=not yes)
    for line in pruned.lines():
        print(line)
    if not yes and pruned.runs:
        print("Nothing was done. To do it: muster prune --yes")
    return EXIT_FAILED if pruned.open else EXIT_DONE
