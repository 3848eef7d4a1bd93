"""The run spec: everything that a user specifies about a run, as frozen data.

`RunSpec` is also the parameter of the flow `train`. Its titles, descriptions and examples are shown
in the form of the Prefect UI. `loading` reads specs from files.

Components start in the order of their keys in the file. A Prefect server on PostgreSQL does not
keep that order, because a JSONB column sorts the keys. It does keep the order of lists, so
`start_order` lists the components again.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, core_schema

from tasks.spec.failure_kinds import DELAYS_S, REQUEUED, TRIES, FailureKind
from tasks.spec.placeholders import mapping
from tasks.spec.probes import LiveProbe, ReadyProbe, Url
from tasks.spec.rollout import Rollout, Sizes
from tasks.spec.secrets import secret_values, secrets_in_words
from tasks.spec.values import (
    LAST,
    PART_NAME,
    Count,
    Document,
    DottedKey,
    Env,
    Model,
    NoneOrMore,
    PartName,
    Positive,
    Refusal,
    Seconds,
    SecretBlock,
    SpecName,
    Stop,
    Text,
    Word,
    Words,
    collected,
    drawn,
    refused,
    shown,
)
from tasks.spec.watch import Watch, WatchRule, refusals_of_rules
from tasks.spec.words import did_you_mean

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
    gpus: NoneOrMore | None = Field(
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
        description="So many of its complete checkpoints, the last ones; older ones are removed, "
        "but for the one that the attempt has started from. Left out: all.",
        examples=[3],
    )

    @classmethod
    def rules(cls, written: Mapping[str, Any]) -> Iterator[Refusal]:
        if written.get("keep") is not None and written.get("checkpoints") is None:
            yield ("keep",), refused("has no checkpoints to keep", "write where they are")


class ByName:
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
        return {**json_schema, "properties": drawn(properties)}

    def _validate(
        self, data: object, handler: core_schema.ValidatorFunctionWrapHandler
    ) -> dict[str, Component | Rollout]:
        """Validate the components; the result has the order of `data`."""
        if not isinstance(data, Mapping):
            raise refused(f"must be a mapping, found {shown(data)}", "write NAME: {command: [...]}")
        written = {
            name: entry
            for name, entry in data.items()
            if entry is not None or name not in self.offered
        }
        if not written:
            raise refused("must not be empty", "write at least one: trainer: {command: [...]}")
        refusals: list[Refusal] = [
            ((name,), refused(f"a name must be like {PART_NAME}, found {name!r}"))
            for name in written
            if isinstance(name, str) and re.fullmatch(PART_NAME, name) is None
        ]
        refusals += _checkpoint_faults(written)
        components = collected("Components", refusals, lambda: handler(written))
        return {name: components[name] for name in written}


def _checkpoint_faults(written: Mapping[str, object]) -> list[Refusal]:
    """Return a fault for each component with checkpoints, except the first one."""
    names = [
        name
        for name, component in written.items()
        if mapping(component).get("checkpoints") is not None
    ]
    problem = "more than one component has checkpoints: ${attempt.resume_from} would not be clear"
    return [
        ((name, "checkpoints"), refused(problem, f"write them for {names[0]} only"))
        for name in names[1:]
    ]


Components = Annotated[Mapping[str, Component | Rollout], ByName()]


#: Spec key that lists the components in the order of their start.
KEY = "start_order"


def in_start_order(written: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Return the spec with its components sorted by `start_order`.

    Components that `start_order` does not list come last, in the order of the file. In the result,
    `start_order` lists all components whose value is not null. A user of the form therefore need
    not edit the list after adding or omitting a component.

    Args:
        written: The spec as plain data. It is returned unchanged if it has no `start_order`, or if
            that is invalid.
    """
    order = written.get(KEY)
    components = written.get("components")
    if not order or not isinstance(order, list | tuple) or not isinstance(components, Mapping):
        return written
    if not all(isinstance(name, str) for name in order) or any(refusals_of_order(written)):
        return written
    sorted_components = {name: components[name] for name in [*order, *components]}
    names = [name for name, component in sorted_components.items() if component is not None]
    return {**written, KEY: names, "components": sorted_components}


def refusals_of_order(written: Mapping[str, Any]) -> Iterator[Refusal]:
    """Yield a fault for each name in `start_order` that is not the name of a component."""
    order = written.get(KEY)
    components = written.get("components")
    if not isinstance(order, list | tuple) or not isinstance(components, Mapping):
        return
    for index, name in enumerate(order):
        if isinstance(name, str) and name not in components:
            known_names = [str(known_name) for known_name in components]
            remedy = did_you_mean(name, known_names)
            remedy = remedy or f"take it out; known are {', '.join(known_names)}"
            yield (KEY, index), refused(f"there is no component {name!r}", remedy)


#: Name of the component that is a fleet.
FLEET = "rollout"

#: Default of `on_exit_zero` by component name; other components have `fail`.
_ON_EXIT_ZERO: dict[str, OnExitZero] = {"trainer": "complete", "environment": "complete"}


class Gang(Model):
    """GPUs that the run needs. Muster grants all of them together or none."""

    nodes: Count = Field(
        1, description="Nodes that the run spans; more than one on Ray only.", examples=[1]
    )
    gpus_per_node: Count = Field(description="GPUs on each of them.", examples=[8])
    cpus_per_gpu: Count = Field(3, description="CPUs that go with each GPU; verl asks for 3.")
    hours: Positive = Field(
        24, description="An estimate, by which shorter runs may pass; it never ends a run."
    )
    max_hours: Positive | None = Field(
        None,
        description="An attempt that runs for longer is ended as TIME_LIMIT, which `retry` may "
        "list; others are planned by it.",
        examples=[12],
    )


class Ray(Model):
    """The Ray cluster, for a run that uses Ray."""

    address: Url | None = Field(
        None,
        description="The dashboard's address, to which jobs are submitted. Left out: that of the "
        "one cluster that the work pool lists.",
        examples=["http://127.0.0.1:8265"],
    )
    start_within_s: Seconds = Field(
        600, description="A job that has not taken its GPUs by then is stopped and queued again."
    )
    entrypoint_resources: Mapping[Text, Positive] | None = Field(
        None,
        description="Resources of the node that a job's driver lands on, so that it is no head.",
        examples=[{"worker_node": 1}],
    )
    entrypoint_label_selector: Mapping[Text, Word] | None = Field(
        None,
        description="Labels of the node that a job's driver lands on.",
        examples=[{"ray.io/node-type": "worker"}],
    )


class Progress(Model):
    """Source of the run's current step."""

    http: Url | None = Field(
        None,
        description="An address that answers with JSON.",
        examples=["http://127.0.0.1:${api.port}/status"],
    )
    jsonl: Text | None = Field(
        None,
        description="A file that grows by a JSON object a line; better, where there is one.",
        examples=["${run.dir}/metrics.jsonl"],
    )
    step: DottedKey = Field(
        description="The key of the step in the answer or the line.", examples=["current_step"]
    )
    total: Count | None = Field(
        None, description="Steps in all; ${progress.total} in a command.", examples=[60]
    )
    every_s: Seconds = Field(
        0.5, description="The pause between two looks; longer spares a run of weeks some work."
    )

    @classmethod
    def rules(cls, written: Mapping[str, Any]) -> Iterator[Refusal]:
        sources = [key for key in ("http", "jsonl") if written.get(key) is not None]
        if len(sources) != 1:
            problem = "reads http and jsonl at once" if sources else "reads nothing"
            yield (), refused(problem, "write one of http and jsonl")


class Success(Model):
    """Evidence of success that a run needs in addition to exit code 0."""

    step: Count = Field(
        description="The step that must have been reached; ${success.step} in a command.",
        examples=[60],
    )


class Retry(Model):
    """Number and delay of the retries after a kind of failure."""

    attempts: Count | None = Field(
        None,
        description="The tries in all. Only INSUFFICIENT_RESOURCES, START_TIMEOUT and FLEET_LOST "
        "need none.",
    )
    delay_s: Seconds = Field(
        60, description="Before the first new try; it then grows. Of FLEET_LOST, left out, it is 5."
    )
    max_delay_s: Seconds = Field(600, description="How far the delay grows, if beyond it.")


#: Value of the spec key `code`: run the project's current files instead of a stored copy.
LIVE = "live"


class RunSpec(Document):
    """A training run: its components in the order of their start, and its requirements.

    `start_order` is either empty or lists all components, in the order of `components`.

    Validation does not check the names of placeholders; `loading` does.
    """

    name: SpecName = Field(
        description="What this training is called; the run's id begins with it.",
        examples=["quickstart"],
    )
    workload: Literal["ppo", "grpo", "sft"] = Field(
        description="The kind of training.", examples=["grpo"]
    )
    tags: tuple[Text, ...] = Field(
        (), description="Labels to find the run by.", examples=[["demo"]]
    )
    env: Env = Field(
        default_factory=dict,
        description="Given to every component. {secret: BLOCK} in place of a text is the value of "
        "a Prefect Secret block.",
        examples=[{"HF_HUB_OFFLINE": "1"}],
    )
    cwd: Text = Field(".", description="Where the components run, relative to the project's root.")
    code: Annotated[str, Field(strict=True, pattern=r"^(live|[0-9a-f]{64})$")] | None = Field(
        None,
        description="Left out: the project as it was when the run was submitted, or its deployment "
        "made, which a name in this place stands for. live: as it lies there when the run starts.",
        examples=["live"],
    )
    gang: Gang | None = Field(None, description="The GPUs it needs; left out: none are asked for.")
    ray: Ray | None = Field(None, description="The cluster, only where something uses Ray.")
    on_lost_flow: Literal["stop", "adopt"] = Field(
        "stop",
        description="What becomes of Ray jobs whose flow process died. stop: they are stopped. "
        "adopt: they go on, and the next process of the run attaches to them.",
    )
    containment: Literal["auto", "namespace"] = Field(
        "auto",
        description="auto: the best that this machine offers without privileges. namespace: a PID "
        "namespace for the run, or the run is refused.",
    )
    start_order: tuple[Text, ...] = Field(
        (),
        description="The names of the components in the order of their start; those left out start "
        "after them. Left out itself: the order in which the components are written. A "
        "deployment's spec has it from its file, since a server on PostgreSQL keeps no order of "
        "keys.",
        examples=[["api", "trainer"]],
    )
    components: Components = Field(
        description="Started in this order unless `start_order` has another, stopped in reverse. "
        "The form has api, rollout, trainer and environment; another is added there by `Use JSON "
        "input` in the menu of this field.",
        examples=[{"trainer": {"command": ["python", "train.py"]}}],
        json_schema_extra={"position": LAST},
    )
    progress: Progress | None = Field(None, description="Where the run's step is to be read.")
    success: Success | None = Field(
        None, description="Evidence beyond exit 0; left out: exit 0 is enough."
    )
    stall_after_s: Seconds | None = Field(
        None,
        description="No new step for so long (without `progress`: no output but lines that "
        "repeat): the run has failed as STALLED.",
        examples=[1800],
    )
    watch: Watch | None = Field(
        None,
        description="Alarms over the figures of `progress.jsonl`, for a training that is alive and "
        "worthless; left out: those of the workload tell.",
    )
    retry: Mapping[FailureKind, Retry] = Field(
        default_factory=dict,
        description="Kinds of failure that are tried again, each with attempts, delay_s and "
        "max_delay_s. INSUFFICIENT_RESOURCES is, without limit, listed or not, START_TIMEOUT five "
        "times, and FLEET_LOST three times.",
        examples=[{"NODE_LOST": {"attempts": 3}}],
    )

    @classmethod
    def rules(cls, written: Mapping[str, Any]) -> Iterator[Refusal]:
        if written.get("success") is not None and written.get("progress") is None:
            remedy = "write progress: {jsonl: FILE, step: KEY} too"
            yield ("success",), refused("needs `progress`: nothing would show the step", remedy)
        if watch := mapping(written.get("watch")):
            if not mapping(written.get("progress")).get("jsonl"):
                remedy = "write progress: {jsonl: FILE, step: KEY} too"
                yield ("watch",), refused("has no file of figures to look at", remedy)
            for place, refusal in refusals_of_rules(watch, written.get("workload")):
                yield ("watch", *place), refusal
        yield from refusals_of_order(written)
        components = {
            name: component
            for name, component in mapping(written.get("components")).items()
            if isinstance(component, Mapping)
        }
        yield from _ray_faults(written, components)
        yield from _device_faults(written, components)

        kinds_with_limit = set(FailureKind) - REQUEUED
        for kind, policy in mapping(written.get("retry")).items():
            has_no_limit = isinstance(policy, Mapping) and policy.get("attempts") is None
            if kind in kinds_with_limit and has_no_limit:
                problem = "missing: this kind is not tried again without limit"
                yield ("retry", str(kind), "attempts"), refused(problem, "write attempts: 3")

    @classmethod
    def prepared(cls, data: object) -> object:
        return in_start_order(data) if isinstance(data, Mapping) else data

    @property
    def processes(self) -> dict[str, Component]:
        """The components that are programs, without the fleet, in the order of their start."""
        return {
            name: component
            for name, component in self.components.items()
            if isinstance(component, Component)
        }

    @property
    def fleet(self) -> Rollout | None:
        """The component `rollout`, or None if the run has no fleet."""
        fleet = self.components.get(FLEET)
        return fleet if isinstance(fleet, Rollout) else None

    @property
    def secrets(self) -> frozenset[str]:
        """Secret values in the spec, which must be masked in all output.

        They are collected from each component separately, because components may use the same
        variable name for different secrets.
        """
        values = secret_values(self.env)
        for component in self.components.values():
            words = [*(component.command or ())]
            if isinstance(component, Rollout):
                words += component.args or ()
            values |= secret_values(component.env)
            values |= secrets_in_words(words)
        return values

    @property
    def secret_blocks(self) -> dict[str, str]:
        """Names of the required Prefect Secret blocks, by the path of the variable in the spec."""
        envs = {"env": self.env}
        for component_name, component in self.components.items():
            envs[f"components.{component_name}.env"] = component.env
        return {
            f"{path}.{name}": value.secret
            for path, env in envs.items()
            for name, value in env.items()
            if isinstance(value, SecretBlock)
        }

    def with_secrets(self, values: Mapping[str, str]) -> RunSpec:
        """Return the spec with its references to Secret blocks replaced by their values.

        Call this after the placeholders of the run are filled in.

        Args:
            values: Value of each Secret block, by the name of the block.
        """

        def fill_env(env: Env, block_values: Mapping[str, str]) -> Env:
            return {
                name: block_values[value.secret] if isinstance(value, SecretBlock) else value
                for name, value in env.items()
            }

        # The fleet still fills in its own placeholders, so a `${` in a value must be escaped.
        fleet_values = {block: value.replace("${", "$${") for block, value in values.items()}
        components = {}
        for name, component in self.components.items():
            env = fill_env(component.env, fleet_values if name == FLEET else values)
            components[name] = component.model_copy(update={"env": env})
        return self.model_copy(update={"env": fill_env(self.env, values), "components": components})

    @property
    def alarms(self) -> dict[str, WatchRule]:
        """Alarm rules by name; empty if the run has no metrics file."""
        has_metrics_file = self.progress is not None and self.progress.jsonl is not None
        return (self.watch or Watch()).of(self.workload) if has_metrics_file else {}

    def own_gpus(self, name: str) -> int | None:
        """Return the number of this machine's GPUs reserved for a component, or None if unset."""
        component = self.components[name]
        if isinstance(component, Component):
            return component.gpus
        if component.placement != "local":
            return None
        return component.engines * component.sizes.gpus or None

    def on_exit_zero(self, name: str) -> OnExitZero:
        """Return the meaning of exit code 0 of a component; the default depends on its name."""
        component = self.components[name]
        written = component.on_exit_zero if isinstance(component, Component) else None
        return written or _ON_EXIT_ZERO.get(name, "fail")

    def retry_of(self, kind: FailureKind) -> Retry | None:
        """Return the retry policy for a kind of failure, or None if the failure is final."""
        policy = self.retry.get(kind)
        if kind not in REQUEUED:
            return policy
        defaults: dict[str, Any] = {"attempts": TRIES.get(kind)}
        if kind in DELAYS_S:
            defaults["delay_s"] = DELAYS_S[kind]
        written = {} if policy is None else policy.model_dump(exclude_unset=True)
        return Retry.model_validate(defaults | written)

    def on_cluster(self, address: str) -> RunSpec:
        """Return the spec with this address of its Ray cluster, unless it has an address or no Ray.

        A spec without an address uses the cluster of its work pool.
        """
        if self.ray is None or self.ray.address is not None:
            return self
        ray = self.ray.model_copy(update={"address": address})
        return self.model_copy(update={"ray": ray})

    def for_server(self) -> dict[str, Any]:
        """Return plain data with `start_order`, because a server may not keep the order of keys."""
        return {**self.written(), KEY: list(self.components)}


def _ray_faults(
    written: Mapping[str, Any], components: Mapping[str, Mapping[str, Any]]
) -> Iterator[Refusal]:
    """Yield the faults in the combination of Ray jobs with other keys."""
    jobs = [
        name for name, component in components.items() if component.get("launcher") == "ray_job"
    ]
    uses_of_ray = [f"{jobs[0]} is a Ray job"] if jobs else []
    if components.get(FLEET, {}).get("placement") == "ray":
        uses_of_ray.append("rollout is placed on Ray")
    if uses_of_ray and written.get("ray") is None:
        problem = f"missing: {uses_of_ray[0]}, and no cluster is named"
        yield ("ray",), refused(problem, 'write ray: {address: "http://127.0.0.1:8265"}')

    for name in jobs:
        if mapping(components[name].get("live")).get("processes") is not None:
            problem = "child processes are watched on this machine, and a Ray job runs on another"
            yield ("components", name, "live", "processes"), refused(problem, "leave it out")
        if mapping(components[name].get("ready")).get("notify"):
            problem = "a Ray job runs on another machine, from where it can't notify this one"
            remedy = "write log: REGEX, or http: of an address that it serves"
            yield ("components", name, "ready", "notify"), refused(problem, remedy)

    if written.get("on_lost_flow") == "adopt" and len(jobs) < len(components):
        other = next(name for name in components if name not in jobs)
        problem = f"{other} is a process, which ends with the flow process of its run"
        remedy = "write stop, or launcher: ray_job for every component"
        yield ("on_lost_flow",), refused(problem, remedy)


def _device_faults(
    written: Mapping[str, Any], components: Mapping[str, Mapping[str, Any]]
) -> Iterator[Refusal]:
    """Yield the faults in the use of this machine's GPUs by processes and a local fleet."""
    #: Number of GPUs that each component reserves for itself.
    reserved: dict[str, int] = {}
    for name, component in components.items():
        has_gpus = type(component.get("gpus")) is int and name != FLEET
        if has_gpus and component.get("launcher") == "ray_job":
            problem = "Ray gives a job its GPUs"
            yield ("components", name, "gpus"), refused(problem, "ask Ray for them in its program")
        elif has_gpus:
            reserved[name] = component["gpus"]
    requests = ", ".join(f"{name} asks for {gpus}" for name, gpus in reserved.items() if gpus)

    fleet = components.get(FLEET, {})
    engines = fleet.get("engines", 1)
    if fleet and fleet.get("placement", "local") == "local" and type(engines) is int:
        sizes = Sizes.of(fleet)
        reserved[FLEET] = engines * sizes.gpus if sizes is not None else 0
    total = sum(reserved.values())

    if requests and written.get("gang") is None:
        remedy = f"write gang: {{gpus_per_node: {total}}}"
        yield ("gang",), refused(f"missing: {requests} GPUs, and the run has none", remedy)

    gang = mapping(written.get("gang"))
    if not gang or written.get("ray") is not None:
        return
    gpus_per_node = gang.get("gpus_per_node")
    nodes = gang.get("nodes", 1)
    if type(nodes) is int and nodes > 1:
        problem = f"processes start on one host, and the gang is of {nodes}"
        remedy = "write 1, or run it on Ray: launcher: ray_job, and ray: {address: ...}"
        yield ("gang", "nodes"), refused(problem, remedy)
    elif requests and type(gpus_per_node) is int and total > gpus_per_node:
        parts = " + ".join(f"{name} {gpus}" for name, gpus in reserved.items() if gpus)
        problem = f"{gpus_per_node} are too few: {parts} = {total}"
        remedy = f"write {total}, or have them ask for less"
        yield ("gang", "gpus_per_node"), refused(problem, remedy)

    yield from _device_variable_faults(("env",), written.get("env"))
    for name, component in components.items():
        yield from _device_variable_faults(("components", name, "env"), component.get("env"))


def _device_variable_faults(place: tuple[str, ...], env: object) -> Iterator[Refusal]:
    """Yield a fault for each variable in `env` that Muster itself sets to the granted GPUs."""
    for variable in sorted({*chain(*VISIBLE.values())} & mapping(env).keys()):
        problem = "the queue says which GPUs the run has, and Muster sets it"
        remedy = "leave it out; a process that is to have some for itself says gpus: 2"
        yield (*place, variable), refused(problem, remedy)


#: Environment variables that restrict a program to certain devices, by kind of accelerator. Engines
#: on ROCm also read CUDA's variable, and refuse to start if the two variables differ.
#: Source: vllm/platforms/rocm.py; verl/single_controller/base/worker.py.
VISIBLE = {
    "nvidia": ("CUDA_VISIBLE_DEVICES",),
    "amd": ("HIP_VISIBLE_DEVICES", "CUDA_VISIBLE_DEVICES"),
    "ascend": ("ASCEND_RT_VISIBLE_DEVICES",),
}
