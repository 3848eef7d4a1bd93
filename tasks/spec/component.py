"""The key `components` of a run spec: the programs of the run and its fleet of servers."""

from __future__ import annotations

import posixpath
import re
import signal
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from tasks.spec.checkpoint_urls import find_url_fault, is_url
from tasks.spec.placeholders import mapping_or_empty
from tasks.spec.probes import LiveProbe, ReadyProbe
from tasks.spec.rollout import Rollout
from tasks.spec.values import (
    PART_NAME,
    Count,
    CountOrZero,
    Env,
    LogBytes,
    Model,
    PartName,
    Positive,
    Refusal,
    Seconds,
    SecondsOrZero,
    SignalName,
    Stop,
    Text,
    Words,
    adapt_form_properties,
    describe_value,
    make_refusal,
    validate_collecting_faults,
)

#: Name of the component that consists of the inference servers.
FLEET = "rollout"

_GIB = 1 << 30
OnExitZero = Literal["complete", "drain", "fail"]
Launcher = Literal["process", "ray_job"]


#: Signals that a program cannot handle. They are not allowed as the warning signal of a component.
_UNCATCHABLE = (signal.SIGKILL.name, signal.SIGSTOP.name)


class ComponentStop(Stop):
    """Signals and waiting times with which Muster warns and then stops a component."""

    warn: SignalName | None = Field(
        None,
        description="Name of a signal that Muster sends as a warning before it ends the attempt. "
        "The component can then write a checkpoint. Only processes with a handler for the signal "
        "get it. If omitted, there is no warning.",
        examples=["SIGUSR1"],
    )
    warn_s: Seconds = Field(
        600,
        description="Seconds from the warning signal `warn` to the end of the attempt. If less "
        "time is left, Muster sends the warning at once.",
    )
    save_grace_s: SecondsOrZero | None = Field(
        None,
        description="Longest time in seconds for which Muster delays the stop of a component that "
        "is writing a checkpoint. Muster waits for the checkpoint before the stop signal, and "
        "again before SIGKILL. The limit is for both waits together. If omitted, the limit is "
        "`grace_s`.",
        examples=[900],
    )

    @classmethod
    def rules(cls, written: Mapping[str, Any]) -> Iterator[Refusal]:
        warn = written.get("warn")
        if warn in _UNCATCHABLE:
            problem = f"must be a signal that a program can handle, found {warn!r}"
            yield ("warn",), make_refusal(problem, "write for example SIGUSR1")
        # A user must not write `warn_s` without `warn`. But accept the default value of `warn_s`,
        # because Prefect adds the default values of all keys to the parameters of a flow run.
        default_warn_s = cls.model_fields["warn_s"].default
        if warn is None and written.get("warn_s") not in (None, default_warn_s):
            problem = (
                "this key needs `warn`, the signal that is sent warn_s seconds before the end of "
                "the attempt"
            )
            yield ("warn_s",), make_refusal(problem, "write `warn: SIGUSR1`, or leave out warn_s")

    @property
    def saves_within_s(self) -> float:
        """Longest time in seconds to wait for a checkpoint before the component is stopped."""
        return self.grace_s if self.save_grace_s is None else self.save_grace_s


class Component(Model):
    """A program of the run, with all processes that the program starts."""

    keys_outside_form = (
        "launcher",
        "cwd",
        "memory_gib",
        "ports",
        "ready",
        "live",
        "on_exit_zero",
        "stop",
        "log_max_bytes",
    )

    launcher: Launcher = Field(
        "process",
        description="Way in which Muster starts the component. process: as a process on the host "
        "of the run. ray_job: as a job that Muster submits to the Ray cluster.",
    )
    command: Words = Field(
        description="The program of the component and its arguments, with one list item for each "
        "argument. Muster starts the program without a shell, and replaces placeholders such as "
        "${api.port}.",
        examples=[["python", "train.py", "--port", "${trainer.port}"]],
    )
    env: Env = Field(
        default_factory=dict,
        description="Environment variables of this component. They override the `env` of the "
        "run. To use the value of a Prefect Secret block, write `{secret: BLOCK}` in place of the "
        "value.",
        examples=[{"OMP_NUM_THREADS": "4", "HF_TOKEN": {"secret": "hf-token"}}],
    )
    cwd: Text | None = Field(
        None,
        description="Working directory of this component. A relative path starts at the "
        "project's root. If omitted, the `cwd` of the run applies.",
    )
    gpus: CountOrZero | None = Field(
        None,
        description="Number of GPUs of the run that are reserved for this component. If omitted, "
        "the component sees all GPUs of the run that are not reserved. If all GPUs of the run are "
        "reserved for other components, the component sees all GPUs of the run.",
        examples=[4],
    )
    memory_gib: Positive | None = Field(
        None,
        description="Memory limit in GiB for all processes of this component together. If the "
        "processes need more, the kernel kills one of them, and the run fails as HOST_OOM. Only "
        "for `launcher: process`. If this machine cannot limit the memory, the run fails before "
        "it starts. If omitted, there is no limit.",
        examples=[64],
    )
    ports: tuple[PartName, ...] = Field(
        (),
        description="Names of further ports that Muster reserves for the component NAME, in "
        "addition to ${NAME.port}. The port `metrics`, for example, is ${NAME.ports.metrics}.",
        examples=[["metrics"]],
    )
    ready: ReadyProbe | None = Field(
        None,
        description="Probe that decides when the component is ready. Muster then starts the next "
        "component. If omitted, the component is ready as soon as it has started.",
        examples=[{"http": "http://127.0.0.1:${api.port}/info", "within_s": 60}],
    )
    live: LiveProbe | None = Field(
        None,
        description="Probe that decides whether the running component still works. The probe "
        "finds a component that hangs. No probe is needed to notice that a process has ended.",
        examples=[{"http": "http://127.0.0.1:${trainer.port}/health"}],
    )
    on_exit_zero: OnExitZero | None = Field(
        None,
        description="Meaning of exit code 0 of this component. complete: the run is complete. "
        "drain: the component has finished, and the run continues. fail: the run has failed. If "
        "omitted, it is `complete` for the trainer and the environment, `drain` for a component "
        "with `ready: {exit: 0}`, and `fail` for any other component.",
    )
    stop: ComponentStop = Field(
        default_factory=ComponentStop,
        description="Warning signal, stop signal and grace period with which Muster stops this "
        "component.",
    )
    checkpoints: Text | None = Field(
        None,
        description="Folder of the component's checkpoints, or a pattern that matches their "
        "paths. It may be a URL with s3://, gs:// or file://. The next attempt gets the path or "
        "URL of the last complete checkpoint as ${attempt.resume_from}. Only one component of a "
        "run may have this key.",
        examples=["${run.dir}/checkpoints", "s3://bucket/${run.id}/checkpoints"],
    )
    log_max_bytes: LogBytes | None = Field(
        None,
        description="Largest size, in bytes, of the component's log file. Muster keeps the first "
        "quarter and the newest lines of a larger log. A line between the two parts says how many "
        "bytes were left out. If omitted, there is no limit.",
        examples=[1_000_000_000],
    )
    keep: Count | None = Field(
        None,
        description="Number of complete checkpoints to keep. Muster removes older checkpoints. It "
        "never removes the two newest complete checkpoints, the checkpoint from which the current "
        "attempt started, and checkpoints of other runs. If omitted, Muster keeps all checkpoints.",
        examples=[3],
    )

    @property
    def memory_bytes(self) -> int | None:
        """Memory limit of the component in bytes, or None for no limit."""
        return int(self.memory_gib * _GIB) if self.memory_gib is not None else None

    @classmethod
    def rules(cls, written: Mapping[str, Any]) -> Iterator[Refusal]:
        if written.get("keep") is not None and written.get("checkpoints") is None:
            problem = (
                "this key needs `checkpoints`, the folder from which Muster removes old checkpoints"
            )
            remedy = "write `checkpoints: FOLDER`, or leave out `keep`"
            yield ("keep",), make_refusal(problem, remedy)
        if written.get("memory_gib") is not None and written.get("launcher") == "ray_job":
            problem = "this key needs launcher: process, because a Ray job runs on another node"
            yield ("memory_gib",), make_refusal(problem, "leave out memory_gib")
        stop = mapping_or_empty(written.get("stop"))
        shows_saves = written.get("checkpoints") is not None or stop.get("warn") is not None
        if stop.get("save_grace_s") is not None and not shows_saves:
            problem = (
                "this key needs `checkpoints`, because Muster watches this folder to see whether "
                "the component writes a checkpoint"
            )
            remedy = "write `checkpoints: FOLDER`, or leave out save_grace_s"
            yield ("stop", "save_grace_s"), make_refusal(problem, remedy)
        is_preparation = mapping_or_empty(written.get("ready")).get("exit") is not None
        on_exit_zero = written.get("on_exit_zero")
        if is_preparation and on_exit_zero in ("complete", "fail"):
            problem = (
                f"must be drain, found {on_exit_zero!r}: with ready: {{exit: 0}}, the run "
                "continues after exit code 0 of this component"
            )
            yield ("on_exit_zero",), make_refusal(problem, "leave it out")
        checkpoints = written.get("checkpoints")
        if isinstance(checkpoints, str) and (url_fault := find_url_fault(checkpoints)):
            yield ("checkpoints",), make_refusal(url_fault.problem, url_fault.remedy)
        if fault := _find_folder_fault(checkpoints, written.get("cwd")):
            yield ("checkpoints",), make_refusal(fault, 'write "${run.dir}/checkpoints"')


def _find_folder_fault(checkpoints: object, cwd: object) -> str:
    """Return an error text if a checkpoint folder also contains files of Muster, otherwise "".

    Muster could mistake these files for checkpoints. Examples are the directories of attempts,
    whose names look like names of checkpoints, and the logs in the directory of an attempt.
    """
    if not isinstance(checkpoints, str):
        return ""
    checkpoints = checkpoints.removeprefix("file://")
    is_relative = not checkpoints.startswith(("/", "${")) and not is_url(checkpoints)
    folder = f"{cwd}/{checkpoints}" if isinstance(cwd, str) and is_relative else checkpoints
    if "${run.dir}" not in folder and "${attempt.dir}" not in folder:
        return ""
    # The value of `checkpoints` may be a pattern such as `DIR/*`, which matches all files in DIR.
    # Check the folder DIR in this case.
    folder = re.sub(r"/\*+/*$", "", folder)
    for placeholder, example in _MUSTER_FOLDERS.items():
        folder = folder.replace(placeholder, example)
    normal = posixpath.normpath(folder)
    for placeholder, example in _MUSTER_FOLDERS.items():
        if example == normal or example.startswith(f"{normal.rstrip('/')}/"):
            return (
                "must be a folder for checkpoints only, but Muster itself writes other files into "
                f"{placeholder}"
            )
    return ""


#: Placeholders for directories into which Muster writes files, each with an example path.
#: `_find_folder_fault` uses the example paths to compare folders.
_MUSTER_FOLDERS = {"${run.dir}": "/home/runs/run", "${attempt.dir}": "/home/runs/run/attempt-01"}


class ComponentsByName:
    """Pydantic schema of the spec key `components`.

    The component `rollout` consists of inference servers. Each other component is a program. The
    order of the components in the file is kept.

    The form in the Prefect UI has fields for the components in `offered`, and sends null if the
    user leaves out such a component. So null is a valid value for these components.
    """

    #: Components in the web form of the Prefect UI: mapping from the name to the description.
    offered: ClassVar[Mapping[str, str]] = {
        "api": "The server through which the other components exchange data, such as run-api of "
        "Atropos.",
        "rollout": "A fleet of inference servers.",
        "trainer": "The training program.",
        "environment": "The program that generates the rollouts for the training.",
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
        """Return a mapping from names to validated components, in the order of `data`."""
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
            raise make_refusal(
                "must not be empty",
                "write at least one component, such as `trainer: {command: [...]}`",
            )
        refusals: list[Refusal] = [
            (
                (name,),
                make_refusal(
                    f"a component's name must match the pattern {PART_NAME}, found {name!r}"
                ),
            )
            for name in written
            if isinstance(name, str) and re.fullmatch(PART_NAME, name) is None
        ]
        refusals += _checkpoint_faults(written)
        components = validate_collecting_faults("Components", refusals, lambda: handler(written))
        return {name: components[name] for name in written}


def _checkpoint_faults(written: Mapping[str, object]) -> list[Refusal]:
    """Return a fault for each component with the key `checkpoints`, except the first.

    Only one component of a run may have this key, because the placeholder `${attempt.resume_from}`
    can have only one value.
    """
    names = [
        name
        for name, component in written.items()
        if mapping_or_empty(component).get("checkpoints") is not None
    ]
    if not names:
        return []
    problem = (
        "only one component of a run may have `checkpoints`, because there is only one "
        f"${{attempt.resume_from}}. But {names[0]} has the key, too"
    )
    remedy = f"write checkpoints for {names[0]} only"
    return [((name, "checkpoints"), make_refusal(problem, remedy)) for name in names[1:]]


Components = Annotated[Mapping[str, Component | Rollout], ComponentsByName()]
