"""Deployments on the Prefect server: what a renewal keeps, and when their schedules start runs.

A person may change a deployment in the Prefect UI: its schedules, tags, description, work queue,
job variables, concurrency limit, and whether it is paused. Prefect's own "create" replaces all of
that. So Muster creates a deployment only once, and afterwards updates just the fields that it owns.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime
from typing import Any
from zoneinfo import ZoneInfo

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import DeploymentScheduleCreate, DeploymentUpdate
from prefect.client.schemas.objects import DeploymentSchedule
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.schedules import (
    SCHEDULE_TYPES,
    CronSchedule,
    IntervalSchedule,
    RRuleSchedule,
)
from prefect.exceptions import ObjectNotFound
from prefect.server.schemas import schedules as server_schedules

from tasks.spec.formatting import format_duration

#: The schedule that `muster deploy --cron` makes. Schedules made in the UI have no slug.
CRON_SLUG = "cron"
#: The job variable that names the folder in which a run's process starts.
WORKING_DIR = "working_dir"
#: A description that Muster wrote: "/home/a/spec.yaml, of the project /home/a."
_WRITTEN_DESCRIPTION = re.compile(r"/.*, of the project /.*\.", re.DOTALL)


def find_deployment(client: SyncPrefectClient, name: str) -> DeploymentResponse | None:
    """Return the deployment `FLOW/NAME`, or None if the server has none of that name."""
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
    """Give a deployment a new spec. Everything that a person changed in the UI is kept.

    Runs that the server has already scheduled are made again by the server, with the new spec.

    Args:
        existing: The deployment as the server has it now.
        tags: Tags of the new spec. They replace the tags of the previous spec only.
        description: Replaces the description if Muster wrote the present one.
        working_dir: Folder in which runs start. None: the deployment gets no folder from Muster.
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
    if not existing.description or _WRITTEN_DESCRIPTION.fullmatch(existing.description):
        changes["description"] = description
    client.update_deployment(existing.id, DeploymentUpdate(**changes))


def merge_tags(
    new_tags: Collection[str], present_tags: Collection[str], previous_spec: object
) -> list[str]:
    """Return the tags of a new spec, and those present tags that no spec brought."""
    previous_tags: Any = previous_spec.get("tags") if isinstance(previous_spec, Mapping) else None
    replaced = {*new_tags, *(previous_tags or ())}
    return [*new_tags, *(tag for tag in present_tags if tag not in replaced)]


def _merge_job_variables(existing: DeploymentResponse, working_dir: str | None) -> dict[str, Any]:
    """Return the job variables, with the folder of the new spec in place of the previous one's."""
    variables = dict(existing.job_variables or {})
    previous_spec = existing.parameters.get("spec")
    was_live = isinstance(previous_spec, Mapping) and previous_spec.get("code") == "live"
    if was_live:
        variables.pop(WORKING_DIR, None)
    if working_dir is not None:
        variables[WORKING_DIR] = working_dir
    return variables


def new_cron(cron: str, timezone: str | None) -> DeploymentScheduleCreate:
    """Return the schedule of a cron line, for a deployment that has none yet.

    Args:
        timezone: IANA name. None: UTC.

    Raises: pydantic.ValidationError, for a cron line or a time zone that does not exist.
    """
    schedule = CronSchedule(cron=cron, timezone=timezone or "UTC")
    return DeploymentScheduleCreate(schedule=schedule, slug=CRON_SLUG)


def set_cron(
    client: SyncPrefectClient, existing: DeploymentResponse, cron: str, timezone: str | None
) -> None:
    """Set the cron line of a deployment's own schedule. Other schedules stay as they are.

    A schedule that is paused stays paused, and keeps its parameters.

    Args:
        timezone: IANA name. None: that of the present schedule, or UTC if there is none.
    """
    own = next((one for one in existing.schedules if one.slug == CRON_SLUG), None)
    if own is None:
        client.create_deployment_schedules(existing.id, [new_cron(cron, timezone)])
        return
    zone = timezone or _zone_of(own.schedule)
    client.update_deployment_schedule(
        existing.id, own.id, schedule=CronSchedule(cron=cron, timezone=zone)
    )


def remove_cron(client: SyncPrefectClient, existing: DeploymentResponse) -> None:
    """Remove every cron line of a deployment. Schedules of another kind stay."""
    for one in existing.schedules:
        if one.slug == CRON_SLUG or isinstance(one.schedule, CronSchedule):
            client.delete_deployment_schedule(existing.id, one.id)


def describe_schedules(deployment: DeploymentResponse, now: datetime) -> Iterator[str]:
    """Yield one line for each schedule of a deployment, with its next start."""
    if not deployment.schedules:
        yield "none: a run starts only when somebody starts it"
    for one in deployment.schedules:
        own = ", with parameters of its own" if one.parameters else ""
        yield f"{_describe_rule(one.schedule)}{own}; {_describe_start(deployment, one, now)}"


def _zone_of(schedule: SCHEDULE_TYPES) -> str:
    """Return the IANA name of a schedule's time zone. A schedule without one counts in UTC."""
    return getattr(schedule, "timezone", None) or "UTC"


def _describe_rule(schedule: SCHEDULE_TYPES) -> str:
    """Return the rule of a schedule in words: `cron "0 3 * * *" in UTC`."""
    zone = f" in {_zone_of(schedule)}"
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
    """Return when a schedule starts its next run, or why it starts none."""
    if not schedule.active:
        return "paused, so it starts no run; resume it on the deployment's page"
    if deployment.paused:
        return "the deployment is paused, so it starts no run; resume it on its page"
    try:
        start = find_next_start(schedule.schedule, now)
    except ValueError as error:
        return f"next start unknown: {error}"
    if start is None:
        return "no further start"
    zone = ZoneInfo(_zone_of(schedule.schedule))
    said = f"next start {start.astimezone(zone):%Y-%m-%d %H:%M %Z}"
    if zone.key != "UTC":
        said += f", which is {start.astimezone(ZoneInfo('UTC')):%Y-%m-%d %H:%M} UTC"
    return said


def find_next_start(schedule: SCHEDULE_TYPES, now: datetime) -> datetime | None:
    """Return the first start of a schedule from now on, or None if it has ended.

    Only the classes of the Prefect server compute dates, so this asks them.

    Raises: ValueError, for a rule of which the server itself computes no date.
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
