"""What a flow run asks of a cluster, from its parameters."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from prefect.client.schemas.objects import FlowRun
from pydantic import ValidationError

from tasks.queue.demand import Demand
from tasks.record.places import make_run_id
from tasks.spec.errors import InvalidSpec
from tasks.spec.loading import parse_spec
from tasks.spec.run import Gang

#: The name of a run, as its spec has to give it.
_NAME = re.compile(r"[a-z][a-z0-9-]{0,31}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What a flow run asks for."""

    #: The run id, or the flow run's name where it is no run of ours.
    name: str
    #: None where it asks for no GPUs.
    demand: Demand | None = None
    #: The estimate of its user.
    hours: float = 24.0
    #: The address of its Ray cluster; empty where it names none.
    cluster: str = ""
    #: Resources that the driver of its job asks for.
    entrypoint: Mapping[str, float] | None = None
    tags: frozenset[str] = frozenset()
    #: What is wrong with its gang; empty for nothing.
    fault: str = ""


def ask_of(flow_run: FlowRun) -> Ask:
    """What a flow run asks for; cheap, so no more of its spec is checked than that."""
    tags = frozenset(flow_run.tags)
    spec = flow_run.parameters.get("spec")
    if not isinstance(spec, Mapping):
        return Ask(name=flow_run.name, tags=tags)
    tags |= {tag for tag in spec.get("tags") or () if isinstance(tag, str)}
    name = _run_id(flow_run, spec)
    if spec.get("gang") is None:
        return Ask(name=name, tags=tags)
    try:
        gang = Gang.model_validate(spec["gang"])
    except (ValidationError, InvalidSpec):
        return Ask(name=name, tags=tags, fault=fault_of(flow_run) or "its gang can't be read")
    ray = spec.get("ray")
    ray = ray if isinstance(ray, Mapping) else {}
    return Ask(
        name=name,
        demand=Demand(
            nodes=gang.nodes, gpus_per_node=gang.gpus_per_node, cpus_per_gpu=gang.cpus_per_gpu
        ),
        hours=gang.hours,
        cluster=str(ray.get("address") or "").rstrip("/"),
        entrypoint=_amounts(ray.get("entrypoint_resources")),
        tags=tags,
    )


def _amounts(value: object) -> dict[str, float]:
    """Those that are numbers: whatever else is there is told by the check of the whole spec."""
    items = value.items() if isinstance(value, Mapping) else ()
    return {str(name): amount for name, amount in items if isinstance(amount, int | float)}


def fault_of(flow_run: FlowRun) -> str:
    """What is wrong with the spec of a flow run, with every fault; empty for nothing. It takes
    some milliseconds."""
    spec = flow_run.parameters.get("spec")
    if not isinstance(spec, Mapping):
        return ""
    try:
        parse_spec(dict(spec), source=_called(spec), from_form=True)
    except InvalidSpec as error:
        return str(error)
    return ""


def name_where_refused(flow_run: FlowRun, ask: Ask) -> str:
    """What the flow run of a refused run is called: the run id; where the spec says no workload,
    one of the same form; where it has no fit name either, as Prefect has called it."""
    spec = flow_run.parameters.get("spec")
    name = spec.get("name") if isinstance(spec, Mapping) else None
    if ask.name != flow_run.name or not isinstance(name, str) or not _NAME.fullmatch(name):
        return ask.name
    if flow_run.name.startswith(f"{name}-"):
        return ask.name
    return make_run_id(name, "invalid", flow_run.id, flow_run.created or datetime.now(UTC))


def _called(spec: Mapping[str, Any]) -> str:
    """What a person calls a spec that may be faulty. Prefect's name of its flow run is not known
    to whoever wrote it."""
    name = spec.get("name")
    fits = isinstance(name, str) and _NAME.fullmatch(name)
    return f"the spec of {name}" if fits else "the spec"


def _run_id(flow_run: FlowRun, spec: Mapping[str, Any]) -> str:
    name, workload = spec.get("name"), spec.get("workload")
    if not isinstance(name, str) or not isinstance(workload, str):
        return flow_run.name
    return make_run_id(name, workload, flow_run.id, flow_run.created or datetime.now(UTC))
