"""The run spec: everything that a user specifies about a run, as frozen data.

`RunSpec` is also the parameter of the flow `train`. Its titles, descriptions and examples are shown
in the form of the Prefect UI. `loading` reads specs from files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import Field

from tasks.spec.component import FLEET, Component, Components, OnExitZero
from tasks.spec.failure_kinds import DEFAULT_ATTEMPTS, DEFAULT_DELAYS_S, REQUEUED, FailureKind
from tasks.spec.placeholders import mapping_or_empty
from tasks.spec.probes import Url
from tasks.spec.rollout import Rollout
from tasks.spec.run_rules import check_device_use, check_ray_use
from tasks.spec.secrets import find_argument_secrets, find_env_secrets
from tasks.spec.start_order import START_ORDER_KEY, check_start_order, sort_by_start_order
from tasks.spec.values import (
    LAST,
    Count,
    Document,
    DottedKey,
    Env,
    Model,
    Positive,
    Refusal,
    Seconds,
    SecretBlock,
    SpecName,
    Text,
    Word,
    make_refusal,
)
from tasks.spec.watch import Watch, WatchRule, check_watch_rules

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
            yield (), make_refusal(problem, "write one of http and jsonl")


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
LIVE_CODE = "live"


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
        "repeat), and no checkpoint that grows: the run has failed as STALLED.",
        examples=[1800],
    )
    finish_within_s: Seconds = Field(
        300,
        description="Time from the last step (the larger of `success.step` and "
        "`progress.total`) until the trainer must have ended. After that, Muster stops it, and the "
        "run is completed. Time in which a checkpoint grows does not count.",
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
            yield (
                ("success",),
                make_refusal("needs `progress`: nothing would show the step", remedy),
            )
        if watch := mapping_or_empty(written.get("watch")):
            if not mapping_or_empty(written.get("progress")).get("jsonl"):
                remedy = "write progress: {jsonl: FILE, step: KEY} too"
                yield ("watch",), make_refusal("has no file of figures to look at", remedy)
            for place, refusal in check_watch_rules(watch, written.get("workload")):
                yield ("watch", *place), refusal
        yield from check_start_order(written)
        components = {
            name: component
            for name, component in mapping_or_empty(written.get("components")).items()
            if isinstance(component, Mapping)
        }
        yield from check_ray_use(written, components)
        yield from check_device_use(written, components)

        kinds_with_limit = set(FailureKind) - REQUEUED
        for kind, policy in mapping_or_empty(written.get("retry")).items():
            has_no_limit = isinstance(policy, Mapping) and policy.get("attempts") is None
            if kind in kinds_with_limit and has_no_limit:
                problem = "missing: this kind is not tried again without limit"
                yield ("retry", str(kind), "attempts"), make_refusal(problem, "write attempts: 3")

    @classmethod
    def prepared(cls, data: object) -> object:
        return sort_by_start_order(data) if isinstance(data, Mapping) else data

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
        values = find_env_secrets(self.env)
        for component in self.components.values():
            words = [*(component.command or ())]
            if isinstance(component, Rollout):
                words += component.args or ()
            values |= find_env_secrets(component.env)
            values |= find_argument_secrets(words)
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

    @property
    def teardown_s(self) -> float:
        """The longest time that the grace periods of a teardown take, in seconds.

        Components are stopped one after the other. A component with checkpoints may finish a save
        before it is stopped, for as long as its grace period.
        """
        graces = [
            component.stop.grace_s * (1 if component.checkpoints is None else 2)
            for component in self.processes.values()
        ]
        return sum(graces) + (self.fleet.stop.grace_s if self.fleet is not None else 0.0)

    def count_reserved_gpus(self, name: str) -> int | None:
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

    def find_retry_policy(self, kind: FailureKind) -> Retry | None:
        """Return the retry policy for a kind of failure, or None if the failure is final."""
        policy = self.retry.get(kind)
        if kind not in REQUEUED:
            return policy
        defaults: dict[str, Any] = {"attempts": DEFAULT_ATTEMPTS.get(kind)}
        if kind in DEFAULT_DELAYS_S:
            defaults["delay_s"] = DEFAULT_DELAYS_S[kind]
        written = {} if policy is None else policy.model_dump(exclude_unset=True)
        return Retry.model_validate(defaults | written)

    def with_ray_address(self, address: str) -> RunSpec:
        """Return the spec with this address of its Ray cluster, unless it has an address or no Ray.

        A spec without an address uses the cluster of its work pool.
        """
        if self.ray is None or self.ray.address is not None:
            return self
        ray = self.ray.model_copy(update={"address": address})
        return self.model_copy(update={"ray": ray})

    def to_server_data(self) -> dict[str, Any]:
        """Return plain data with `start_order`, because a server may not keep the order of keys."""
        return {**self.written(), START_ORDER_KEY: list(self.components)}
