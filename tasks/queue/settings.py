"""What an operator sets on a work pool: its policy, its nodes where there is no Ray, its limits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from tasks.queue.policy import Policy


class TableNode(BaseModel):
    """A node of a cluster without Ray."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(min_length=1, title="Name")
    gpus: int = Field(ge=0, title="GPUs")
    cpus: float | None = Field(
        None, ge=0, title="CPUs", description="Left out: CPUs are not counted."
    )


class PoolSettings(BaseModel):
    """How a work pool of type `gang` admits runs."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    policy: Policy = Field(
        "fifo",
        title="Policy",
        description=(
            "fifo: strictly in order. backfill: later runs may pass where, by the estimates, the "
            "first of the line is not delayed by them."
        ),
    )
    nodes: tuple[TableNode, ...] = Field(
        (),
        title="Nodes",
        description="For runs that name no Ray cluster: the nodes there are.",
    )
    ray: str = Field(
        "",
        title="Ray cluster",
        description="Address of the dashboard of a cluster whose nodes are shown even while no "
        "run is on it.",
    )
    limits: dict[str, int] = Field(
        default_factory=dict,
        title="GPUs per tag",
        description="At most so many GPUs at once for the runs with a tag, a team's for example.",
    )
    drained: tuple[str, ...] = Field(
        (),
        title="Drained nodes",
        description="Names of nodes that get no new gang; what runs there goes on.",
    )

    @field_validator("nodes")
    @classmethod
    def _unique(cls, nodes: tuple[TableNode, ...]) -> tuple[TableNode, ...]:
        names = [node.name for node in nodes]
        if doubles := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"names of nodes are not unique: {', '.join(doubles)}")
        return nodes


#: Where the settings stand among the variables of a pool's base job template.
VARIABLE = "gang"


def settings_of(base_job_template: Mapping[str, Any]) -> PoolSettings:
    """The settings of a work pool; the defaults where its template has none.

    Args:
        base_job_template: of the work pool.

    Raises: pydantic.ValidationError, where somebody has spoilt them.
    """
    properties = base_job_template.get("variables", {}).get("properties", {})
    return PoolSettings.model_validate(properties.get(VARIABLE, {}).get("default") or {})


def with_settings(base_job_template: Mapping[str, Any], settings: PoolSettings) -> dict[str, Any]:
    """The template with other settings; all else is left as it is."""
    template = dict(base_job_template)
    variables = dict(template.get("variables", {}))
    properties = dict(variables.get("properties", {}))
    variable = dict(properties.get(VARIABLE, {"type": "object", "title": "Gang queue"}))
    variable["default"] = settings.model_dump(mode="json")
    template["variables"] = {**variables, "properties": {**properties, VARIABLE: variable}}
    return template
