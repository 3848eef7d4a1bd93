"""Pruning what ended runs have left on this host, the stack's own logs, and the upkeep's flow runs.

What may go is `tasks.upkeep.retention`'s to say. Safe at any time, from any number of processes
at once: a run that has not ended, that is registered or parked, or that another one starts from is
left as it is.
"""

from __future__ import annotations

import gzip
import json
import logging
import math
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import FlowFilter
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.client.schemas.responses import DeploymentResponse
from prefect.settings import PREFECT_API_URL
from pydantic import ValidationError

from tasks.processes.identity import host_name
from tasks.processes.registry import registered_runs
from tasks.record.code_store import forget, names_in, own_files
from tasks.record.places import RunPlace, muster_home
from tasks.record.run_json import RunJson
from tasks.server.artifacts import forget_code, leave_report, run_log, shared_code
from tasks.server.flow_runs import (
    UPKEEP_FLOWS,
    ServerAway,
    ServerRefuses,
    open_flow_runs,
    talking_to,
)
from tasks.show.arguments import EXIT_DONE, EXIT_FAILED
from tasks.spec.errors import BadArgument
from tasks.upkeep.parked import parked_runs
from tasks.upkeep.report import Pruned
from tasks.upkeep.retention import (
    Act,
    Found,
    PrunePlan,
    Retention,
    Step,
    compress,
    named_by,
    plain_logs,
    plan,
    removable,
    remove,
    run_ids_in,
    sizes,
    variable_of,
)

_log = logging.getLogger(__name__)

#: A log of the stack is cut at this size; so many earlier parts of it are kept, compressed.
_STACK_LOG_BYTES = 50 * 1024**2
_STACK_LOGS_KEPT = 3
#: By the server's own rule.
_DELETED_AT_ONCE = 50
_PAGE = 200
_DELETED_AT_MOST = 20_000


def prune_host(keep: Retention | None = None, *, dry_run: bool = False) -> Pruned:
    """Do what the rules say, or with `dry_run` only say it.

    Where the server of PREFECT_API_URL is set and does not answer, nothing is removed: a run that
    waits there may be about to start from what another one has left.

    Raises: ValidationError, where the environment, by which it keeps by default, sets nonsense.
    """
    keep = keep or Retention.of_environment(os.environ)
    none = PrunePlan(steps=(), held=())
    pruned = Pruned(host=host_name(), home=muster_home(), plan=none, is_dry=dry_run)
    try:
        named = _named_on_server()
    except ServerAway as error:
        is_refused = isinstance(error, ServerRefuses)
        why = str(error) if is_refused else f"the Prefect server does not answer ({error})"
        return replace(pruned, open=f"nothing was pruned: {why}")
    found = survey(keep, frozenset(run_ids_in(named)))
    pruned = replace(pruned, plan=plan(found, keep, time.time()))
    steps = pruned.plan.steps
    removed = {step.run.run_id for step in steps if step.act is Act.REMOVE}
    kept = (run.directory for run in found if run.removable_bytes and run.run_id not in removed)
    codes = _forget_code(named, kept, dry_run=dry_run)
    if dry_run:
        return replace(pruned, codes=codes)
    return replace(
        pruned,
        codes=codes,
        done=tuple(done for step in steps if (done := _carry_out(step, keep)) is not None),
        rotated=tuple(_rotate_stack_logs(pruned.home)),
        flow_runs=_delete_upkeep(keep),
    )


def publish(pruned: Pruned) -> None:
    """Log what was done, and leave an artifact of it; of nothing, none."""
    log = run_log(_log)
    for line in pruned.lines():
        log.info("%s", line)
    if pruned.done or pruned.has_problem:
        leave_report("prune", pruned.as_markdown(), pruned.summary, log)


def survey(keep: Retention, wanted: frozenset[str] = frozenset()) -> list[Found]:
    """Every run's directory on this host; those that are wanted are named by open flow runs."""
    registered, parked = set(registered_runs()), set(parked_runs())
    # A run that was pruned needs what it has started from no more.
    here = sorted((muster_home() / "runs").glob("*"))
    directories = {path: sizes(path) for path in here if path.is_dir() and not path.is_symlink()}
    sources: dict[str, str] = {}
    for path, files in directories.items():
        if removable(files, outputs=False):
            sources |= dict.fromkeys(named_by(path), path.name)
    reasons = (
        (registered, "it is registered as running"),
        (parked, "it waits for its next attempt"),
        (wanted, "a flow run that has not ended names it"),
    )
    found = []
    for path, files in directories.items():
        ended_at, held = _ending(RunPlace(directory=path).record)
        held = held or next((why for names, why in reasons if path.name in names), "")
        if not held and path.name in sources:
            held = f"{sources[path.name]} has started from it"
        code = {f"code/{name}" for name in own_files(path / "code")}
        gone = code.union(removable(files, outputs=keep.outputs))
        found.append(
            Found(
                directory=path,
                held=held,
                ended_at=ended_at,
                removable_bytes=sum(files[name] for name in gone),
                log_bytes=sum(files[name] for name in (*plain_logs(files), *code)),
                size_bytes=sum(files.values()),
            )
        )
    return found


def _ending(record: Path) -> tuple[float, str]:
    """When a run ended, UTC epoch seconds, and why it must be taken as one that has not."""
    try:
        content = RunJson.read(record).known()
    except (OSError, ValueError) as error:
        return math.inf, f"its record can't be read ({error})"
    if not content.state.is_final:
        return math.inf, "it has not ended"
    if content.ended_at is None:
        return math.inf, "its record does not say when it ended"
    return content.ended_at, ""


def _carry_out(step: Step, keep: Retention) -> Step | None:
    """None where the run has been begun again since it was looked at."""
    directory = step.run.directory
    _, held = _ending(RunPlace(directory=directory).record)
    if held or step.run.run_id in registered_runs():
        return None
    before, problem = sizes(directory), ""
    try:
        # Its tree is kept elsewhere, for as long as something names it.
        remove(directory / "code", own_files(directory / "code"))
        if step.act is Act.REMOVE:
            remove(directory, removable(before, outputs=keep.outputs))
        else:
            for name in plain_logs(before):
                compress(directory / name)
    except OSError as error:
        problem = str(error)
    freed = sum(before.values()) - sum(sizes(directory).values())
    return replace(step, freed_bytes=freed, problem=problem)


def _rotate_stack_logs(home: Path) -> Iterator[Path]:
    """Cut the logs of this host's stack that have grown large; their writers append. A line or two
    that come between the copy and the cut are lost."""
    for path in sorted((home / "stack" / "logs").glob("*.log")):
        try:
            if path.stat().st_size <= _STACK_LOG_BYTES:
                continue
            for number in range(_STACK_LOGS_KEPT, 0, -1):
                earlier = path.with_name(f"{path.name}.{number}.gz")
                if earlier.exists():
                    earlier.replace(path.with_name(f"{path.name}.{number + 1}.gz"))
            path.with_name(f"{path.name}.{_STACK_LOGS_KEPT + 1}.gz").unlink(missing_ok=True)
            with path.open("rb") as source, gzip.open(f"{path}.1.gz", "wb", 6) as target:
                shutil.copyfileobj(source, target, 1 << 20)
            os.truncate(path, 0)
            yield path
        except OSError as error:
            _log.warning("%s was not cut: %s", path, error)


def _named_on_server() -> str:
    """The names and parameters of open flow runs and of deployments. Raises: ServerAway."""
    api_url = PREFECT_API_URL.value()
    if not api_url:
        return ""
    with talking_to(api_url) as client:
        named: list[FlowRun | DeploymentResponse] = [*open_flow_runs(client), *_deployments(client)]
    return "\n".join(f"{one.name} {json.dumps(one.parameters, default=str)}" for one in named)


def _deployments(client: SyncPrefectClient) -> Iterator[DeploymentResponse]:
    at = 0
    while found := client.read_deployments(limit=_PAGE, offset=at):
        yield from found
        at += len(found)


def _forget_code(named: str, kept: Iterable[Path], *, dry_run: bool) -> int:
    """Of the code that no run with files, no open flow run and no deployment names, here and on the
    server, how much was removed. Without a server nobody knows what is named."""
    if not (api_url := PREFECT_API_URL.value()):
        return 0
    specs = (file for run in kept for file in run.glob("attempt-*/spec.yaml"))
    texts = (file.read_text(encoding="utf-8", errors="replace") for file in specs)
    try:
        with talking_to(api_url) as client:
            on_server = names_in(named, partial(shared_code, client))
            gone = forget(on_server | names_in("\n".join(texts)), is_dry=dry_run)
            return len(gone) + (0 if dry_run else forget_code(client, on_server))
    except (ServerAway, OSError) as error:
        _log.warning("the code of runs was not pruned: %s", error)
        return 0


def _delete_upkeep(keep: Retention) -> int:
    """Delete flow runs that the upkeep has completed some days ago, more than a hundred a day, of
    which Prefect itself deletes none; how many there were."""
    api_url = PREFECT_API_URL.value()
    if not api_url or keep.upkeep_days is None:
        return 0
    count = 0
    try:
        with talking_to(api_url) as client:
            flows = FlowFilter.model_validate({"name": {"any_": UPKEEP_FLOWS}})
            deployments = [str(one.id) for one in client.read_deployments(flow_filter=flows)]
            before = datetime.now(UTC) - timedelta(days=keep.upkeep_days)
            which = {
                "deployment_id": {"any_": deployments},
                "state": {"type": {"any_": [StateType.COMPLETED.value]}},
                "end_time": {"before_": before.isoformat()},
            }
            content = {"flow_runs": which, "limit": _DELETED_AT_ONCE}
            while deployments and count < _DELETED_AT_MOST:
                where: Any = "/flow_runs/bulk_delete"  # not in Prefect's own list
                deleted = len(client.request("POST", where, json=content).json()["deleted"])
                count += deleted
                if deleted < _DELETED_AT_ONCE:
                    break
    except ServerAway as error:
        _log.warning("flow runs of the upkeep were not deleted: %s", error)
    return count


#: A number, or `never`.
Rule = Annotated[str | None, Parameter(show_default=False)]


def prune(
    *,
    yes: bool = False,
    compress_after_days: Rule = None,
    days: Rule = None,
    runs: Rule = None,
    gib: Rule = None,
    outputs: bool | None = None,
    upkeep_days: Rule = None,
) -> int:
    """Show what may go of what ended runs have left in MUSTER_HOME, and with --yes remove it.

    With a run's files goes the copy of its code, and what of the code store nothing names any more.
    run.json and the specs of a run always stay; what its own programs wrote stays unless --outputs
    says otherwise; a run that has not ended, waits, or that another one has started from is left as
    it is. A rule that is left out is that of the environment, MUSTER_PRUNE_DAYS and so on, or the
    default.

    Exit: 0 done, or shown; 1 something could not be done; 2 a rule is wrong.

    Args:
        yes: Do it; else it is only shown.
        compress_after_days: Logs are compressed so many days after a run's end; by default 7.
        days: A run's files are removed so many days after its end; by default 60.
        runs: Of the runs that have ended, at most so many keep files.
        gib: All runs together keep at most so many GiB.
        outputs: What a run's own programs wrote into its directory is removed with Muster's files.
        upkeep_days: Flow runs of `reconcile` and `prune` that completed are deleted from the
            Prefect server after so many days; by default 2.
    """
    rules = {name: value for name, value in locals().items() if name in Retention.model_fields}
    # What it would log is printed here.
    logging.getLogger("tasks.upkeep.prune").setLevel(logging.ERROR)
    rules = {variable_of(name): str(value) for name, value in rules.items() if value is not None}
    try:
        keep = Retention.of_environment({**os.environ, **rules})
    except ValidationError as error:
        wrong = [(str(fault["loc"][0]), fault["msg"]) for fault in error.errors()]
        said = [f"{variable_of(x)} or --{x.replace('_', '-')}: {why}" for x, why in wrong]
        raise BadArgument("\n".join(said)) from error
    pruned = prune_host(keep, dry_run=not yes)
    for line in pruned.lines():
        print(line)
    if not yes and pruned.plan.steps:
        print("Nothing was done. To do it: muster prune --yes")
    return EXIT_FAILED if pruned.has_problem else EXIT_DONE
