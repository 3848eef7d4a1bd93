"""Create and update deployments on the Prefect server, and describe their schedules.

A person may change a deployment in the Prefect UI: its schedules, tags, description, work queue,
job variables, concurrency limit, and whether it is paused. Prefect's "create" request replaces all
of these settings. Muster therefore creates a deployment only once. Later it updates only the fields
that it owns.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from itertools import count
from typing import Any, Literal
from zoneinfo import ZoneInfo

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import DeploymentScheduleCreate, DeploymentUpdate
from prefect.client.schemas.filters import FlowFilter
from prefect.client.schemas.objects import (
    ConcurrencyLimitStrategy,
    ConcurrencyOptions,
    DeploymentSchedule,
)
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.schedules import (
    SCHEDULE_TYPES,
    CronSchedule,
    IntervalSchedule,
    RRuleSchedule,
)
from prefect.client.schemas.sorting import DeploymentSort
from prefect.exceptions import ObjectNotFound
from prefect.server.schemas import schedules as server_schedules

from tasks.spec.formatting import format_count, format_duration

#: Largest number of deployments that one request returns. The server does not allow a larger
#: number.
_PAGE = 200
#: Slug (identifier) of the schedule that `muster deploy --cron` makes. Schedules that a user makes
#: in the Prefect UI have no slug.
CRON_SLUG = "cron"
#: Treatment of a new run that is due before the previous run of the deployment has ended. `skip`
#: cancels the new run. `queue` lets the new run wait for the end of the previous run. `allow` lets
#: both run at the same time.
Overlap = Literal["skip", "queue", "allow"]
#: The job variable that names the folder in which a run's process starts.
WORKING_DIR = "working_dir"
#: Pattern of the deployment descriptions that Muster writes, for example "Run spec:
#: /home/a/spec.yaml. Project: /home/a." Older releases wrote "/home/a/spec.yaml, of the project
#: /home/a."
_WRITTEN_DESCRIPTION = re.compile(
    r"Run spec: /.*\. Project: /.*\.|/.*, of the project /.*\.", re.DOTALL
)


def list_deployments(
    client: SyncPrefectClient, flows: Sequence[str]
) -> list[tuple[str, DeploymentResponse]]:
    """Return the name `FLOW/NAME` and the deployment, for all deployments of some flows.

    Args:
        client: Client of the Prefect server.
        flows: Names of the flows. The result is sorted in the order of these flows. The deployments
            of one flow are sorted by name.
    """
    named = []
    for flow in flows:
        flow_filter = FlowFilter.model_validate({"name": {"any_": [flow]}})
        for offset in count(step=_PAGE):
            page = client.read_deployments(
                flow_filter=flow_filter,
                sort=DeploymentSort.NAME_ASC,
                limit=_PAGE,
                offset=offset,
            )
            named += [(f"{flow}/{deployment.name}", deployment) for deployment in page]
            if len(page) < _PAGE:
                break
    return named


def find_deployment(client: SyncPrefectClient, name: str) -> DeploymentResponse | None:
    """Return the deployment `FLOW/NAME`, or None if the server has no such deployment."""
    try:
        return client.read_deployment_by_name(name)
    except ObjectNotFound:
        return None


def renew_deployment(
    client: SyncPrefectClient,
    existing: DeploymentResponse,
    *,
    entrypoint: str | None,
    spec: Mapping[str, Any],
    parameter_schema: Mapping[str, Any],
    tags: Collection[str],
    description: str,
    working_dir: str | None,
) -> None:
    """Give a deployment a new spec. Keep all changes that a user made in the Prefect UI.

    Runs that the server has already scheduled are replaced with runs of the new spec.

    Args:
        client: Client of the Prefect server.
        existing: The deployment as the server has it now.
        entrypoint: File and function of the flow in Prefect's form, such as `flow.py:train`.
        spec: The new spec as plain data.
        parameter_schema: JSON schema of the flow's parameters.
        tags: Tags of the new spec, which replace only the tags of the previous spec.
        description: New description, which is used only if Muster wrote the present description.
        working_dir: Folder in which the processes of runs start. None if Muster sets no folder.
    """
    previous_spec = existing.parameters.get("spec")
    changes: dict[str, Any] = {
        "entrypoint": entrypoint,
        "pull_steps": [],
        "parameters": {"spec": dict(spec)},
        "parameter_openapi_schema": dict(parameter_schema),
        "tags": merge_tags(tags, existing.tags, previous_spec),
        "job_variables": _merge_job_variables(existing, working_dir),
    }
    if not existing.description or is_description_of_muster(existing.description):
        changes["description"] = description
    client.update_deployment(existing.id, DeploymentUpdate(**changes))


def merge_tags(
    new_tags: Collection[str], present_tags: Collection[str], previous_spec: object
) -> list[str]:
    """Return the tags of a deployment after its spec was replaced.

    The result contains the tags of the new spec and the tags that a user added. Tags of the
    previous spec are omitted.

    Args:
        new_tags: Tags of the new spec.
        present_tags: Tags that the deployment has now.
        previous_spec: The spec that is replaced, as plain data.
    """
    previous_tags: Any = previous_spec.get("tags") if isinstance(previous_spec, Mapping) else None
    replaced = {*new_tags, *(previous_tags or ())}
    return [*new_tags, *(tag for tag in present_tags if tag not in replaced)]


def _merge_job_variables(existing: DeploymentResponse, working_dir: str | None) -> dict[str, Any]:
    """Return the job variables of a deployment after its spec was replaced.

    All variables are kept, except a working directory that Muster set for the previous spec. That
    working directory is replaced.
    """
    variables = dict(existing.job_variables or {})
    previous_spec = existing.parameters.get("spec")
    was_live = isinstance(previous_spec, Mapping) and previous_spec.get("code") == "live"
    if was_live:
        variables.pop(WORKING_DIR, None)
    if working_dir is not None:
        variables[WORKING_DIR] = working_dir
    return variables


def make_cron_schedule(cron: str, timezone: str | None) -> DeploymentScheduleCreate:
    """Return the schedule of a cron line, for a deployment without a schedule.

    Args:
        cron: The cron line, such as `0 3 * * *`.
        timezone: IANA name of the time zone. If None, UTC is used.

    Raises:
        pydantic.ValidationError: The cron line is invalid or the time zone does not exist.
    """
    schedule = CronSchedule(cron=cron, timezone=timezone or "UTC")
    return DeploymentScheduleCreate(schedule=schedule, slug=CRON_SLUG)


def set_cron(
    client: SyncPrefectClient, existing: DeploymentResponse, cron: str, timezone: str | None
) -> None:
    """Set the cron line of the schedule that `muster deploy` manages. Keep all other schedules.

    An existing managed schedule keeps its parameters, and stays paused if it was paused.

    Args:
        client: Client of the Prefect server.
        existing: The deployment as the server has it now.
        cron: The cron line, such as `0 3 * * *`.
        timezone: IANA name of the time zone. None to keep the time zone of the managed schedule, or
            to use UTC for a new schedule.
    """
    cron_schedules = [schedule for schedule in existing.schedules if schedule.slug == CRON_SLUG]
    if not cron_schedules:
        client.create_deployment_schedules(existing.id, [make_cron_schedule(cron, timezone)])
        return
    present = cron_schedules[0]
    zone = timezone or _read_zone(present.schedule)
    client.update_deployment_schedule(
        existing.id, present.id, schedule=CronSchedule(cron=cron, timezone=zone)
    )


def make_overlap_settings(overlap: Overlap) -> dict[str, Any]:
    """Return the settings that make a deployment allow, queue or skip overlapping runs."""
    if overlap == "allow":
        return {"concurrency_limit": None, "concurrency_options": None}
    strategy = ConcurrencyLimitStrategy.ENQUEUE
    if overlap == "skip":
        strategy = ConcurrencyLimitStrategy.CANCEL_NEW
    return {
        "concurrency_limit": 1,
        "concurrency_options": ConcurrencyOptions(collision_strategy=strategy),
    }


def set_overlap(client: SyncPrefectClient, existing: DeploymentResponse, overlap: Overlap) -> None:
    """Set how a deployment treats overlapping runs, by changing its concurrency limit.

    Args:
        client: client of the Prefect server.
        existing: the deployment as the server has it now.
        overlap: treatment of a run that starts while another run of the deployment is running.
    """
    client.update_deployment(existing.id, DeploymentUpdate(**make_overlap_settings(overlap)))


def describe_overlap(deployment: DeploymentResponse) -> str:
    """Return one line about the concurrency limit of a deployment."""
    limit = deployment.global_concurrency_limit
    if limit is None:
        return "allow: runs may overlap"
    options = deployment.concurrency_options
    runs = format_count(limit.limit, "run")
    if options and options.collision_strategy is ConcurrencyLimitStrategy.CANCEL_NEW:
        return f"skip: at most {runs} at a time; each further run is cancelled"
    return f"queue: at most {runs} at a time; each further run waits"


def remove_cron(client: SyncPrefectClient, existing: DeploymentResponse) -> None:
    """Remove every cron schedule of a deployment. Keep its interval and rrule schedules."""
    for schedule in existing.schedules:
        if schedule.slug == CRON_SLUG or isinstance(schedule.schedule, CronSchedule):
            client.delete_deployment_schedule(existing.id, schedule.id)


def is_description_of_muster(description: str | None) -> bool:
    """Return True if `muster deploy` wrote the description of a deployment."""
    return _WRITTEN_DESCRIPTION.fullmatch(description or "") is not None


def describe_schedules(deployment: DeploymentResponse, now: datetime) -> Iterator[str]:
    """Yield one line for each schedule of a deployment, with the time of the next start."""
    if not deployment.schedules:
        yield "none: runs start only by hand"
    for schedule in deployment.schedules:
        rule = describe_rule(schedule.schedule)
        parameters = ", with its own parameters" if schedule.parameters else ""
        yield f"{rule}{parameters}; {_describe_start(deployment, schedule, now)}"


def _read_zone(schedule: SCHEDULE_TYPES) -> str:
    """Return the IANA name of a schedule's time zone, or "UTC" if the schedule has no time zone."""
    return getattr(schedule, "timezone", None) or "UTC"


def find_start_of_deployment(deployment: DeploymentResponse, now: datetime) -> datetime | None:
    """Return the earliest next start of a deployment's schedules, or None if there is none.

    Paused schedules are ignored, and so are schedules whose dates the server cannot compute.
    """
    if deployment.paused:
        return None
    starts = []
    for schedule in deployment.schedules:
        if schedule.active:
            with suppress(ValueError):
                starts.append(find_next_start(schedule.schedule, now))
    return min((start for start in starts if start is not None), default=None)


def describe_rule(schedule: SCHEDULE_TYPES) -> str:
    """Return a description of a schedule's rule, such as `cron "0 3 * * *" in UTC`."""
    zone = f" in {_read_zone(schedule)}"
    match schedule:
        case CronSchedule(cron=cron):
            return f'cron "{cron}"{zone}'
        case IntervalSchedule(interval=interval):
            return f"every {format_duration(interval.total_seconds())}{zone}"
        case RRuleSchedule(rrule=rrule):
            return f"rrule {' '.join(rrule.split())}{zone}"
    return "no rule"


def _describe_start(
    deployment: DeploymentResponse, schedule: DeploymentSchedule, now: datetime
) -> str:
    """Return the time of a schedule's next start, or the reason why the schedule starts no run."""
    if not schedule.active:
        return "the schedule is paused, so it starts no run; resume the schedule in the Prefect UI"
    if deployment.paused:
        return (
            "the deployment is paused, so it starts no run; resume the deployment in the Prefect UI"
        )
    try:
        start = find_next_start(schedule.schedule, now)
    except ValueError as error:
        return f"next start unknown: {error}"
    if start is None:
        return "no further start"
    zone = ZoneInfo(_read_zone(schedule.schedule))
    description = f"next start {start.astimezone(zone):%Y-%m-%d %H:%M %Z}"
    if zone.key != "UTC":
        description += f", which is {start.astimezone(ZoneInfo('UTC')):%Y-%m-%d %H:%M} UTC"
    return description


def find_next_start(schedule: SCHEDULE_TYPES, now: datetime) -> datetime | None:
    """Return the first start of a schedule after a time, or None if the schedule has ended.

    The dates are computed with classes of the Prefect server, because Prefect's client has no such
    function.

    Args:
        schedule: The schedule.
        now: The present time.

    Raises:
        ValueError: The classes of the Prefect server cannot compute a date for the schedule.
    """
    if not isinstance(schedule, CronSchedule | IntervalSchedule | RRuleSchedule):
        return None
    rules: dict[type, Any] = {
        CronSchedule: server_schedules.CronSchedule,
        IntervalSchedule: server_schedules.IntervalSchedule,
        RRuleSchedule: server_schedules.RRuleSchedule,
    }
    rule = rules[type(schedule)].model_validate(schedule.model_dump())
    dates: Sequence[datetime] = asyncio.run(rule.get_dates(n=1, start=now))
    return dates[0] if dates else None
