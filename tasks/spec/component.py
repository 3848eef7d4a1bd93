"""The components of a run spec: what each runs, and how it is watched and stopped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from pydantic import Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from tasks.spec.form import drawn
from tasks.spec.probes import LiveProbe, ReadyProbe
from tasks.spec.rollout import Rollout
from tasks.spec.stop import Stop
from tasks.spec.values import (
    PART_NAME,
    Env,
    Model,
    PartName,
    Text,
    Unique,
    Words,
    collected,
    refused,
    shown,
    with_text_keys,
)

OnExitZero = Literal["complete", "drain", "fail"]
Launcher = Literal["process", "ray_job"]


class Component(Model):
    """One program of the run, with all the processes that it starts."""

    launcher: Launcher = Field(
        "process",
        title="Launcher",
        description="process: on this machine. ray_job: submitted to the Ray cluster.",
    )
    command: Words = Field(
        title="Command",
        description=(
            "The program and its arguments, one item each; no shell splits them. "
            "${api.port} and the like are filled in."
        ),
        examples=[["python", "train.py", "--port", "${trainer.port}"]],
    )
    env: Env = Field(
        default_factory=dict,
        title="Environment variables",
        description="For this component only; they win over the run's.",
        examples=[{"OMP_NUM_THREADS": "4"}],
    )
    cwd: Text | None = Field(
        None,
        title="Working directory",
        description="Relative to the project's root; left out: the run's.",
    )
    ports: Annotated[tuple[PartName, ...], Unique] = Field(
        (),
        title="Ports",
        description="More free ports, by name: `metrics` is ${NAME.ports.metrics}.",
        examples=[["metrics"]],
    )
    ready: ReadyProbe | None = Field(
        None,
        title="Ready",
        description="When it may receive work; left out: as soon as it is started.",
        examples=[{"http": "http://127.0.0.1:${api.port}/info", "within_s": 60}],
    )
    live: LiveProbe | None = Field(
        None,
        title="Live",
        description="Whether it still works while it runs; its death is seen without this.",
        examples=[{"http": "http://127.0.0.1:${trainer.port}/health"}],
    )
    on_exit_zero: OnExitZero | None = Field(
        None,
        title="On exit 0",
        description=(
            "complete: the run is done. drain: its part is done, the run goes on. fail: the run "
            "has failed. Left out: complete for trainer and environment, else fail."
        ),
    )
    stop: Stop = Field(default_factory=Stop, title="Stop", description="How it is asked to end.")
    checkpoints: Text | None = Field(
        None,
        title="Checkpoints",
        description=(
            "The folder, or a pattern of the files, that its checkpoints are in. From the last "
            "complete one the next attempt starts: ${attempt.resume_from}."
        ),
        examples=["${run.dir}/checkpoints"],
    )


class ByName:
    """Schema of `components`: a fleet under `rollout`, a component under any other name.

    Only the names that a form should offer are listed; the order stays that of the file, in which
    the components are started. Each of them may be null, which is how a form leaves one out.
    """

    offered: ClassVar[Mapping[str, str]] = {
        "api": "The server between the others, such as run-api of Atropos.",
        "rollout": "A fleet of inference servers.",
        "trainer": "What trains.",
        "environment": "What makes the rollouts that are trained on.",
    }

    def __get_pydantic_core_schema__(
        self, source: object, handler: GetCoreSchemaHandler
    ) -> CoreSchema:
        component = handler.generate_schema(Component)
        fleet = handler.generate_schema(Rollout)
        fields = {
            name: core_schema.typed_dict_field(
                core_schema.with_default_schema(
                    core_schema.nullable_schema(fleet if name == "rollout" else component),
                    default=None,
                ),
                required=False,
            )
            for name in self.offered
        }
        by_name = core_schema.typed_dict_schema(
            fields, extras_schema=component, extra_behavior="allow", total=False
        )
        return core_schema.no_info_wrap_validator_function(self._in_order, by_name)

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        found = handler(schema)
        named = {
            name: {**one, "title": name, "description": self.offered[name]}
            for name, one in found["properties"].items()
        }
        return {**found, "properties": drawn(named)}

    def _in_order(
        self, data: object, handler: core_schema.ValidatorFunctionWrapHandler
    ) -> dict[str, Component | Rollout]:
        if not isinstance(data, Mapping):
            raise refused(f"must be a mapping, found {shown(data)}", "write NAME: {command: [...]}")
        entries, refusals = with_text_keys(data)
        written = {
            name: entry
            for name, entry in entries.items()
            if entry is not None or name not in self.offered
        }
        if not written and not refusals:
            raise refused("must not be empty", "write at least one: trainer: {command: [...]}")
        for name in written:
            try:
                PART_NAME.checked(name)
            except PydanticCustomError as error:
                refusals.append(((name,), error))
        refusals += _more_than_one_with_checkpoints(written)
        valid = collected("Components", refusals, lambda: handler(written))
        return {name: valid[name] for name in written}


def _more_than_one_with_checkpoints(
    written: Mapping[str, object],
) -> list[tuple[tuple[str | int, ...], PydanticCustomError]]:
    named = [
        name
        for name, component in written.items()
        if isinstance(component, Mapping) and component.get("checkpoints") is not None
    ]
    problem = "more than one component has checkpoints: ${attempt.resume_from} would not be clear"
    remedy = f"write them for {named[0]} only" if named else ""
    return [((name, "checkpoints"), refused(problem, remedy)) for name in named[1:]]


Components = Annotated[Mapping[str, Component | Rollout], ByName()]
