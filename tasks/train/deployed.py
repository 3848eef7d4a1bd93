"""List and remove deployments: the commands `muster deployments` and `muster undeploy`."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from json import dumps
from typing import Annotated, Any

from cyclopts import Parameter
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import FlowRun, State
from prefect.client.schemas.responses import DeploymentResponse
from prefect.states import Cancelled
from rich.cells import cell_len

from tasks.processes.identity import host_name
from tasks.queue.ledger import parse_request
from tasks.server.deployments import (
    describe_rule,
    find_start_of_deployment,
    is_description_of_muster,
    list_deployments,
)
from tasks.server.flow_runs import cancel, propose_state, read_flow_runs
from tasks.show.arguments import AsJson
from tasks.show.output import console_of, is_on_terminal, one_line
from tasks.spec.errors import BadArgument
from tasks.spec.formatting import join_commas, suggest_name
from tasks.spec.pipeline import STAGE_DEPLOYMENT
from tasks.train.deploying import TRAIN_FLOW, connect_to_configured_server

#: Names of the flows whose deployments `muster deployments` shows, in the order of the table.
_FLOWS = (TRAIN_FLOW, "pipeline")
_HEAD = ("deployment", "spec", "schedule", "next start", "pool/queue")
#: Prefect state types of flow runs without a process. If the deployment of such a flow run is
#: removed, Prefect deletes the flow run or sets it to Crashed.
_WAITING_TYPES = ("SCHEDULED", "PENDING")
#: Prefect state types of flow runs with a process.
_RUNNING_TYPES = ("RUNNING", "CANCELLING")


@dataclass(frozen=True, slots=True, kw_only=True)
class Deployed:
    """One deployment. The fields are those of `muster deployments --json`."""

    #: Name of the flow and name of the deployment, such as `train/nightly`.
    name: str
    #: Value of the key `name` in the spec. Empty if the deployment contains no spec.
    spec: str
    #: Description of the deployment. `muster deploy` writes the path of the spec into the
    #: description.
    description: str
    #: Rules of the schedules, such as `cron "0 3 * * *" in UTC`. Empty if a person must start each
    #: run.
    schedules: tuple[str, ...]
    #: Time of the next start in UTC epoch seconds. None if no schedule will start a run.
    next_start: float | None
    #: True if the deployment is paused, or if it has schedules and all of them are paused.
    paused: bool
    #: Name of the work pool. Empty if a process serves the deployment without a work pool.
    pool: str
    #: Name of the queue of the work pool. Empty if there is no work pool.
    queue: str

    @staticmethod
    def of_deployment(name: str, deployment: DeploymentResponse, now: datetime) -> Deployed:
        """Return the row of `muster deployments` for a deployment of the Prefect server.

        Args:
            name: Name of the flow and of the deployment, such as `train/nightly`.
            deployment: The deployment.
            now: The present time.
        """
        spec = deployment.parameters.get("spec")
        start = find_start_of_deployment(deployment, now)
        schedules = deployment.schedules
        return Deployed(
            name=name,
            spec=str(spec.get("name", "")) if isinstance(spec, Mapping) else "",
            description=deployment.description or "",
            schedules=tuple(describe_rule(schedule.schedule) for schedule in schedules),
            next_start=start.timestamp() if start is not None else None,
            paused=deployment.paused
            or (bool(schedules) and not any(schedule.active for schedule in schedules)),
            pool=deployment.work_pool_name or "",
            queue=deployment.work_queue_name or "",
        )

    @property
    def cells(self) -> tuple[str, ...]:
        """Cells of the table row that `muster deployments` prints for this deployment."""
        if self.paused:
            start = "paused"
        elif self.next_start is None:
            start = "by hand" if not self.schedules else "none"
        else:
            start = f"{datetime.fromtimestamp(self.next_start, UTC):%Y-%m-%d %H:%M} UTC"
        place = "/".join(filter(None, (self.pool, self.queue)))
        texts = (self.name, self.spec, "; ".join(self.schedules), start, place)
        return tuple(map(one_line, texts))


def deployments(*, json: AsJson = False) -> None:
    """List the deployments of the Prefect server: their specs, schedules and queues.

    Exit: 0 listed, even if there are no deployments; 1 no server answers.

    Args:
        json: Print a list of objects as JSON.
    """
    now = datetime.now(UTC)
    with connect_to_configured_server() as client:
        rows = [
            Deployed.of_deployment(name, deployment, now)
            for name, deployment in list_deployments(client, _FLOWS)
        ]
    if json:
        print(dumps([asdict(row) for row in rows], indent=2))
    elif not rows:
        print("There are no deployments. To create one, run `muster deploy SPEC`.", file=sys.stderr)
    elif is_on_terminal():
        for line in _format_list(rows, console_of(sys.stdout).width):
            print(line)
    else:
        for cells in (_HEAD, *(row.cells for row in rows)):
            print("\t".join(cells))


def _format_list(rows: list[Deployed], width: int) -> Iterator[str]:
    """Yield the lines of the table of deployments for a terminal, with a line of headings.

    If the table is wider than the terminal, each deployment takes two lines. The first line
    contains the name and the next start. The second line is indented and contains the other cells.

    Args:
        rows: The deployments.
        width: Width of the terminal in columns.
    """
    cells = [_HEAD, *(row.cells for row in rows)]
    lines = [*_align_columns(cells)]
    if max(map(cell_len, lines)) <= width:
        yield from lines
        return
    first_lines = [*_align_columns([(name, start) for name, _, _, start, _ in cells])]
    yield first_lines[0]
    for line, (_, spec, schedule, _, place) in zip(first_lines[1:], cells[1:], strict=True):
        yield line
        if other_texts := "; ".join(filter(None, (spec, schedule, place))):
            yield f"  {other_texts}"


def _align_columns(rows: Sequence[tuple[str, ...]]) -> Iterator[str]:
    """Yield each row as a line in which the columns are aligned."""
    widths = [max(map(cell_len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        padded = (
            cell + " " * (width - cell_len(cell)) for cell, width in zip(row, widths, strict=True)
        )
        yield "  ".join(padded).rstrip()


def undeploy(
    name: Annotated[
        str, Parameter(help="Name of the deployment to remove, such as `train/nightly`.")
    ],
    /,
) -> None:
    """Remove a deployment with its schedules.

    Waiting runs of the deployment are cancelled. Running runs continue, but are not retried,
    because a further attempt would need the deployment.

    Exit: 0 removed; 1 no server answers; 2 there is no such deployment, and nothing was done.
    """
    with connect_to_configured_server() as client:
        named = dict(list_deployments(client, _FLOWS))
        full_name = _find_name(name, [*named])
        if full_name == STAGE_DEPLOYMENT:
            raise BadArgument(
                f"{full_name} cannot be removed, because `muster submit` and pipelines use this "
                "deployment to start runs"
            )
        deployment = named[full_name]
        # First remove the schedules. Otherwise, a schedule could add a run after the runs were
        # read.
        for schedule in deployment.schedules:
            client.delete_deployment_schedule(deployment.id, schedule.id)
        runs = [*_read_runs(client, deployment)]
        message = (
            f"cancelled by muster on {host_name()}, because the deployment {full_name} of the run "
            "was removed"
        )
        waiting_runs = [run for run in runs if _get_type(run) in _WAITING_TYPES]
        for run in waiting_runs:
            _cancel_waiting_run(client, run, message)
        client.delete_deployment(deployment.id)

    print(f"The deployment {full_name} was removed.")
    for run in waiting_runs:
        print(f"  {one_line(parse_request(run).name)} was waiting, and was cancelled")
    for run in runs:
        if run not in waiting_runs:
            run_id = one_line(parse_request(run).name)
            print(
                f"  {run_id} is running, and continues. But Muster will not retry the run if it "
                "fails"
            )
            print(f"    end  muster cancel {run_id}")
    if not is_description_of_muster(deployment.description):
        print(
            "If prefect.yaml lists this deployment, the next `muster up` creates the deployment "
            "again."
        )


def _cancel_waiting_run(client: SyncPrefectClient, run: FlowRun, message: str) -> None:
    """Cancel a run without a process, and give the reason in a message.

    Args:
        client: Client of the Prefect server.
        run: The run as it was read from the server.
        message: Message of the run's state.
    """
    state = run.state
    # Set the state Cancelled directly, unless the state has changed since the run was read.
    # Cancelling is not used, because the server would then set Cancelled without the message.
    if state is not None and state.is_scheduled():
        cancelled: State[Any] = Cancelled(message=message)
        if propose_state(client, str(run.id), state, cancelled):
            return
    cancel(client, run.id, message)


def _find_name(name: str, full_names: list[str]) -> str:
    """Return the full name of a deployment, such as `train/nightly`.

    Args:
        name: Name of the deployment, with or without the name of its flow.
        full_names: Full names of all deployments.

    Raises:
        BadArgument: No deployment has this name, or deployments of several flows have this name.
    """
    matches = [full_name for full_name in full_names if name in (full_name, _get_end(full_name))]
    if len(matches) == 1:
        return matches[0]
    if matches:
        raise BadArgument(f"{name} is ambiguous: choose from {join_commas(matches)}")
    suggestion = suggest_name(name, [*full_names, *map(_get_end, full_names)])
    known = f"Deployments on the Prefect server: {join_commas(full_names) or 'none'}."
    raise BadArgument(f"there is no deployment {name}. {suggestion} {known}".replace("  ", " "))


def _get_end(full_name: str) -> str:
    return full_name.partition("/")[2]


def _get_type(run: FlowRun) -> str:
    return run.state.type.value if run.state is not None else _WAITING_TYPES[0]


def _read_runs(client: SyncPrefectClient, deployment: DeploymentResponse) -> Iterator[FlowRun]:
    """Yield the waiting and running flow runs of a deployment.

    Flow runs that a schedule will start in the future are left out.
    """
    criteria: dict[str, Any] = {
        "deployment_id": {"any_": [str(deployment.id)]},
        "state": {"type": {"any_": [*_WAITING_TYPES, *_RUNNING_TYPES]}},
    }
    now = datetime.now(UTC)
    for run in read_flow_runs(client, criteria):
        expected_start = run.expected_start_time
        is_planned = (
            run.auto_scheduled
            and _get_type(run) == _WAITING_TYPES[0]
            and run.run_count == 0
            and expected_start is not None
            and expected_start > now
        )
        if not is_planned:
            yield run
