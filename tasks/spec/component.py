"""The components of a run spec: its programs and its fleet."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from tasks.spec.placeholders import mapping_or_empty
from tasks.spec.probes import LiveProbe, ReadyProbe
from tasks.spec.rollout import Rollout
from tasks.spec.values import (
    PART_NAME,
    Count,
    CountOrZero,
    Env,
    Model,
    PartName,
    Refusal,
    Stop,
    Text,
    Words,
    adapt_form_properties,
    describe_value,
    make_refusal,
    validate_collecting_faults,
)

#: Name of the component that is a fleet.
FLEET = "rollout"

OnExitZero = Literal["complete", "drain", "fail"]
Launcher = Literal["process", "ray_job"]


class Component(Model):
    """A program of the run, together with all processes that it starts."""

    launcher: Launcher = Field(
        "process", description="process: on this machine. ray_job: submitted to the Ray cluster."
    )
    command: Words = Field(
        description="The program and its arguments, one item each; no shell splits them. "
        "${api.port} and the like are filled in.",
        examples=[["python", "train.py", "--port", "${trainer.port}"]],
    )
    env: Env = Field(
        default_factory=dict,
        description="For this component only; they win over the run's. {secret: BLOCK} in place of "
        "a text is the value of a Prefect Secret block.",
        examples=[{"OMP_NUM_THREADS": "4", "HF_TOKEN": {"secret": "hf-token"}}],
    )
    cwd: Text | None = Field(
        None, description="Relative to the project's root; left out: the run's."
    )
    gpus: CountOrZero | None = Field(
        None,
        description="Of the gang's, so many are this process's own. Left out: it sees those that "
        "no other one has for itself, or all where none is left.",
        examples=[4],
    )
    ports: tuple[PartName, ...] = Field(
        (),
        description="More free ports, by name: `metrics` is ${NAME.ports.metrics}.",
        examples=[["metrics"]],
    )
    ready: ReadyProbe | None = Field(
        None,
        description="When it may receive work; left out: as soon as it is started.",
        examples=[{"http": "http://127.0.0.1:${api.port}/info", "within_s": 60}],
    )
    live: LiveProbe | None = Field(
        None,
        description="Whether it still works while it runs; its death is seen without this.",
        examples=[{"http": "http://127.0.0.1:${trainer.port}/health"}],
    )
    on_exit_zero: OnExitZero | None = Field(
        None,
        description="complete: the run is done. drain: its part is done, the run goes on. fail: "
        "the run has failed. Left out: complete for trainer and environment, else fail.",
    )
    stop: Stop = Field(default_factory=Stop, description="How it is asked to end.")
    checkpoints: Text | None = Field(
        None,
        description="The folder, or a pattern of the files, that its checkpoints are in. From the "
        "last complete one the next attempt starts: ${attempt.resume_from}.",
        examples=["${run.dir}/checkpoints"],
    )
    keep: Count | None = Field(
        None,
        description="Number of complete checkpoints to keep; older ones are removed. Never removed "
        "are the newest complete one, the one before it, the one that the attempt started from, "
        "and those of other runs. Left out: all are kept.",
        examples=[3],
    )

    @classmethod
    def rules(cls, written: Mapping[str, Any]) -> Iterator[Refusal]:
        if written.get("keep") is not None and written.get("checkpoints") is None:
            yield ("keep",), make_refusal("has no checkpoints to keep", "write where they are")
        if fault := _find_folder_fault(written.get("checkpoints"), written.get("cwd")):
            yield ("checkpoints",), make_refusal(fault, 'write "${run.dir}/checkpoints"')


def _find_folder_fault(checkpoints: object, cwd: object) -> str:
    """Return the fault in a folder that also holds files of Muster, or an empty string.

    The directory of a run holds those of its attempts, whose names look like checkpoints. Debug
    files of NCCL and logs lie in the directory of an attempt.
    """
    if not isinstance(checkpoints, str):
        return ""
    is_relative = not checkpoints.startswith(("/", "${"))
    folder = f"{cwd}/{checkpoints}" if isinstance(cwd, str) and is_relative else checkpoints
    if "${run.dir}" not in folder and "${attempt.dir}" not in folder:
        return ""
    # A pattern such as `DIR/*` matches everything in a directory.
    folder = re.sub(r"/\*+/*$", "", folder)
    for placeholder, example in _MUSTER_FOLDERS.items():
        folder = folder.replace(placeholder, example)
    normal = posixpath.normpath(folder)
    for placeholder, example in _MUSTER_FOLDERS.items():
        if example == normal or example.startswith(f"{normal.rstrip('/')}/"):
            return f"{placeholder} holds files of Muster, which are no checkpoints"
    return ""


#: Directories of a run that hold files of Muster, with an example that shows how they lie.
_MUSTER_FOLDERS = {"${run.dir}": "/home/runs/run", "${attempt.dir}": "/home/runs/run/attempt-01"}


class ComponentsByName:
    """Schema of `components`: a fleet under the name `rollout`, a program under any other name.

    The form in the Prefect UI offers the names in `offered`. The value of an offered name may be
    null, because the form sends null for a component that the user omitted. The components keep the
    order of the file.
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
        return core_schema.no_info_wrap_validator_function(self._validate, by_name)

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        json_schema = handler(schema)
        properties = {
            name: {**property_schema, "title": name, "description": self.offered[name]}
            for name, property_schema in json_schema["properties"].items()
        }
        return {**json_schema, "properties": adapt_form_properties(properties)}

    def _validate(
        self, data: object, handler: core_schema.ValidatorFunctionWrapHandler
    ) -> dict[str, Component | Rollout]:
        """Validate the components; the result has the order of `data`."""
        if not isinstance(data, Mapping):
            raise make_refusal(
                f"must be a mapping, found {describe_value(data)}", "write NAME: {command: [...]}"
            )
        written = {
            name: entry
            for name, entry in data.items()
            if entry is not None or name not in self.offered
        }
        if not written:
            raise make_refusal("must not be empty", "write at least one: trainer: {command: [...]}")
        refusals: list[Refusal] = [
            ((name,), make_refusal(f"a name must be like {PART_NAME}, found {name!r}"))
            for name in written
            if isinstance(name, str) and re.fullmatch(PART_NAME, name) is None
        ]
        refusals += _checkpoint_faults(written)
        components = validate_collecting_faults("Components", refusals, lambda: handler(written))
        return {name: components[name] for name in written}


def _checkpoint_faults(written: Mapping[str, object]) -> list[Refusal]:
    """Return a fault for each component with checkpoints, except the first one."""
    names = [
        name
        for name, component in written.items()
        if mapping_or_empty(component).get("checkpoints") is not None
    ]
    problem = "more than one component has checkpoints: ${attempt.resume_from} would not be clear"
    return [
        ((name, "checkpoints"), make_refusal(problem, f"write them for {names[0]} only"))
        for name in names[1:]
    ]


Components = Annotated[Mapping[str, Component | Rollout], ComponentsByName()]
