"""The run spec: everything that a user specifies about a run, as frozen data.

`RunSpec` is also the type of the parameter `spec` of the Prefect flow `train`. The form in the
Prefect UI shows its titles, descriptions and examples. The module `loading` reads specs from files.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from tasks.spec.component import FLEET, Component, Components, OnExitZero
from tasks.spec.data_inputs import DataInput
from tasks.spec.evaluations import Evaluation, KeepBest, check_evaluations
from tasks.spec.failure_kinds import (
    REQUEUED,
    FailureKind,
    list_default_attempts,
    list_default_delays,
    list_requeued_kinds,
)
from tasks.spec.placeholders import mapping_or_empty
from tasks.spec.probes import Url
from tasks.spec.rollout import Rollout
from tasks.spec.run_rules import check_device_use, check_ray_use
from tasks.spec.secrets import find_argument_secrets, find_env_secrets
from tasks.spec.start_from import RunId, StartFrom
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
    is_number,
    make_refusal,
)
from tasks.spec.watch import Watch, WatchRule, check_watch_rules
from tasks.spec.workloads import Workload

#: Default of `progress.every_s`: seconds between two readings of the training step.
DEFAULT_READ_EVERY_S = 0.5
#: Mapping from a component's name to the default value of its key `on_exit_zero`. For other
#: components, the default is `fail`.
_ON_EXIT_ZERO: dict[str, OnExitZero] = {"trainer": "complete", "environment": "complete"}


class Gang(Model):
    """GPUs that the run needs. Muster starts the run only when all of them are free."""

    keys_outside_form = ("cpus_per_gpu",)

    nodes: Count = Field(
        1,
        description="Number of nodes that the run needs. Only a run on Ray can have more than 1.",
        examples=[1],
    )
    gpus_per_node: Count = Field(
        description="Number of GPUs that the run needs on each node.", examples=[8]
    )
    cpus_per_gpu: Count = Field(
        3,
        description="Number of free CPUs that a node must have for each GPU of the run. verl "
        "needs 3.",
    )
    hours: Positive = Field(
        24,
        description="Estimated duration of the run in hours. With the queue's policy `backfill`, "
        "a short run may start while a larger run still waits for GPUs. The estimate never ends "
        "a run.",
    )
    max_hours: Positive | None = Field(
        None,
        description="Time limit of each attempt in hours. Muster stops a longer attempt, which "
        "fails as TIME_LIMIT. To resume the run then, list TIME_LIMIT under `retry`. The queue "
        "also uses this limit to plan other runs. If omitted, there is no limit.",
        examples=[12],
    )


class Ray(Model):
    """The Ray cluster that executes the Ray jobs of a run."""

    address: Url | None = Field(
        None,
        description="URL of the Ray dashboard to which Muster submits the jobs. It may be "
        "omitted if the settings of the work pool list exactly one Ray cluster.",
        examples=["http://127.0.0.1:8265"],
    )
    start_within_s: Seconds = Field(
        600,
        description="Longest time in seconds from the submission of a Ray job until the job has "
        "all of its GPUs. After this time, Muster stops the job with the failure START_TIMEOUT, "
        "and the run returns to the queue.",
    )
    entrypoint_resources: Mapping[Text, Positive] | None = Field(
        None,
        description="Ray resources, with their amounts, that a node must have to run the driver "
        "of a job. If omitted, the driver runs on a node that the queue granted to the run. "
        "If the queue granted no nodes, the driver runs on a node with the Ray resource "
        "`worker_node`, or else on any node except the head.",
        examples=[{"worker_node": 1}],
    )
    entrypoint_label_selector: Mapping[Text, Word] | None = Field(
        None,
        description="Ray labels, with their values, that a node must have to run the driver of a "
        "job.",
        examples=[{"ray.io/node-type": "worker"}],
    )
    entrypoint_cpus: Positive | None = Field(
        None,
        description="Number of CPUs that Ray reserves for the driver of a job. If omitted, Ray "
        "reserves no CPU.",
        examples=[4],
    )
    entrypoint_gpus: Count | None = Field(
        None,
        description="Number of GPUs of the run (`gang`) that the driver of a job takes for "
        "itself. Write this key if the job starts no Ray actors or tasks with GPUs. If omitted, "
        "the driver takes no GPU.",
        examples=[1],
    )
    entrypoint_memory_gib: Positive | None = Field(
        None,
        description="Main memory in GiB that Ray reserves for the driver of a job. If omitted, "
        "Ray reserves no memory.",
        examples=[16],
    )


class Progress(Model):
    """Source from which Muster reads the current step of the run."""

    keys_outside_form = ("every_s",)

    http: Url | None = Field(
        None,
        description="URL that answers with JSON, which contains the current step. Use this key "
        "if the training writes no file for `jsonl`.",
        examples=["http://127.0.0.1:${api.port}/status"],
    )
    jsonl: Text | None = Field(
        None,
        description="File to which the training appends one JSON object per line. Prefer this "
        "key to `http`: with such a file, Muster also draws curves and checks the alarm rules.",
        examples=["${run.dir}/metrics.jsonl"],
    )
    step: DottedKey = Field(
        description="Key of the step number, in the JSON answer of `http` or in each line of the "
        "file of `jsonl`. Join nested keys by dots.",
        examples=["current_step"],
    )
    total: Count | None = Field(
        None,
        description="Number of steps of the whole training. A command can contain it as "
        "${progress.total}. If omitted, Muster shows no remaining time.",
        examples=[60],
    )
    every_s: Seconds = Field(
        DEFAULT_READ_EVERY_S,
        description="Seconds between two readings of the step. A longer interval saves CPU time "
        "in a run of several weeks.",
    )

    @classmethod
    def rules(cls, written: Mapping[str, Any]) -> Iterator[Refusal]:
        sources = [key for key in ("http", "jsonl") if written.get(key) is not None]
        if len(sources) != 1:
            problem = "has both http and jsonl" if sources else "has neither http nor jsonl"
            yield (), make_refusal(problem, "write exactly one of http and jsonl")


class Success(Model):
    """Condition that a run must meet to be complete, in addition to exit code 0."""

    step: Count = Field(
        description="Training step that the run must reach to be complete. It is at most "
        "`progress.total`. A command can contain it as ${success.step}.",
        examples=[60],
    )


class Retry(Model):
    """Number and delay of the retries after one kind of failure."""

    attempts: Count | None = Field(
        None,
        description="Largest number of attempts, including the first. If an attempt reaches a "
        "later step than all attempts before it, the count starts again at 1. Only these kinds of "
        f"failure have a default: {list_default_attempts()}. For every other kind, this key is "
        "required.",
    )
    delay_s: Seconds = Field(
        60,
        description="Seconds between the failure and the first retry. The delay doubles with each "
        "further retry. The default is 60, except for these kinds of failure: "
        f"{list_default_delays()}.",
    )
    max_delay_s: Seconds = Field(
        600,
        description="Upper limit, in seconds, of the growing delay before a retry. If the limit "
        "is below delay_s, the delay stays at delay_s.",
    )


def _switch_to_word(value: object) -> object:
    """Return `on` or `off` for a Boolean. YAML reads these words as true and false."""
    if isinstance(value, bool):
        return "on" if value else "off"
    return value


#: Value of the spec key `code` for a run that uses the project's files directly instead of a stored
#: copy.
LIVE_CODE = "live"


class RunSpec(Document):
    """A training run, with its components and its requirements.

    In a validated spec, `components` is in the order in which the components start. `start_order`
    is either empty, or lists all components in the same order.

    The names of placeholders are not checked here, but in `loading.parse_spec`.
    """

    keys_outside_form = (
        "cwd",
        "code",
        "inputs",
        "start_from",
        "run_id",
        "ray",
        "on_lost_flow",
        "containment",
        "start_order",
        "finish_within_s",
        "watch",
        "tracker",
        "evals",
        "keep_best",
    )

    name: SpecName = Field(
        description="Name of the training. The id of each run of this spec begins with the name.",
        examples=["quickstart"],
    )
    workload: Workload = Field(
        description="Kind of the training. It decides which alarm rules are on by default, and "
        "which metric the page of the run shows. rm: training of a reward model. other: any "
        "other training. step: a step of a pipeline, which trains nothing and has no alarm rules.",
        examples=["grpo"],
    )
    tags: tuple[Text, ...] = Field(
        (),
        description="Labels with which you find the run in the Prefect UI. The queue can limit "
        "the number of GPUs that all runs with the same label hold.",
        examples=[["demo"]],
    )
    env: Env = Field(
        default_factory=dict,
        description="Environment variables of every component of the run. To use the value of a "
        "Prefect Secret block, write `{secret: BLOCK}` in place of the value.",
        examples=[{"HF_HUB_OFFLINE": "1"}],
    )
    cwd: Text = Field(
        ".",
        description="Working directory of the components. A relative path starts at the project's "
        "root.",
    )
    code: Annotated[str, Field(strict=True, pattern=r"^(live|[0-9a-f]{64})$")] | None = Field(
        None,
        description="Version of the project's files that the run uses. live: the files as they "
        "are when the run starts. If omitted, Muster stores a copy of the files when the run is "
        "submitted or its deployment is created, and writes the name of the copy here.",
        examples=["live"],
    )
    inputs: tuple[DataInput, ...] = Field(
        (),
        description="Paths or URIs of the data that the run uses. Muster only shows them, in "
        "`muster lineage` and in Prefect's asset events: it does not read the data, and passes "
        "nothing to the programs. A relative path starts at `cwd`. If omitted, Muster takes the "
        "paths from options of the commands, such as `--dataset` or `data.train_files=`.",
        examples=[["data/train.jsonl", "hf://datasets/openai/gsm8k"]],
    )
    start_from: StartFrom | None = Field(
        None,
        description="Checkpoint of another run from which this run starts. The option `--from` "
        "of `muster submit` and `muster train` sets this key. If omitted, the first attempt "
        "starts without a checkpoint.",
    )
    run_id: RunId | None = Field(
        None,
        description="Id of an earlier run that this run continues. Do not write this key yourself. "
        "`muster retry` sets the key if the Prefect server no longer has the flow run of the "
        "earlier run. If omitted, the run gets a new id.",
        examples=["quickstart-grpo-20260101-120000-0123abcd"],
    )
    gang: Gang | None = Field(
        None,
        description="GPUs that the run needs. Muster starts the run when all of them are free. "
        "If omitted, the run does not wait for any GPUs.",
    )
    ray: Ray | None = Field(
        None,
        description="Ray cluster of the run. The key is required if a component is a Ray job, or "
        "if the inference fleet runs on Ray.",
    )
    on_lost_flow: Literal["stop", "adopt"] = Field(
        "stop",
        description="Treatment of the run's Ray jobs if the flow process (the process that "
        "controls the run) dies. stop: Muster stops the jobs. adopt: the jobs continue, and the "
        "next flow process of the run takes control of them.",
    )
    containment: Literal["auto", "namespace"] = Field(
        "auto",
        description="Method with which Muster finds and ends all processes of the run. auto: the "
        "strongest method that works on this machine without privileges. namespace: a PID "
        "namespace; without PID namespaces on the machine, the run fails before it starts.",
    )
    start_order: tuple[Text, ...] = Field(
        (),
        description="Names of the components in the order in which they start. Components that "
        "are not in this list start last. If omitted, components start in the order of "
        "`components`. Muster fills in this key for a deployment, because Prefect's PostgreSQL "
        "database does not keep the order of keys.",
        examples=[["api", "trainer"]],
    )
    components: Components = Field(
        description="Programs of the run, and its fleet of inference servers. They start in this "
        "order unless `start_order` has another order, and stop in reverse order. The form in "
        "the Prefect UI shows only the usual components and keys. To see or change all of them "
        "in the form, choose `Use JSON input` in the menu of this field.",
        examples=[{"trainer": {"command": ["python", "train.py"]}}],
        json_schema_extra={"position": LAST},
    )
    progress: Progress | None = Field(
        None,
        description="Source from which Muster reads the current training step. If omitted, "
        "Muster shows no steps.",
    )
    success: Success | None = Field(
        None,
        description="Condition that the run must meet to be complete, in addition to exit code "
        "0. If omitted, exit code 0 is enough.",
    )
    stall_after_s: Seconds | None = Field(
        None,
        description="Longest time in seconds without a new training step, or, in a run without "
        "`progress`, without new output. After this time, the run fails as STALLED. Repeated lines "
        "are no new output. Time in which a checkpoint grows does not count. If omitted, there is "
        "no limit.",
        examples=[1800],
    )
    timeout_s: Seconds | None = Field(
        None,
        description="Time limit in seconds of each attempt, for a run without `gang`. For other "
        "runs, use `gang.max_hours`. Muster stops a longer attempt, which fails as TIME_LIMIT. "
        "In a run with both keys, the shorter limit applies.",
        examples=[3600],
    )
    finish_within_s: Seconds = Field(
        300,
        description="Longest time in seconds from the last training step to the end of the "
        "trainer. The last step is `progress.total`, or `success.step` if the spec has no "
        "`progress.total`. After this time, Muster stops the trainer, and the run is completed. "
        "The time in which the trainer writes a checkpoint does not count.",
    )
    watch: Watch | None = Field(
        None,
        description="Alarm rules for the metrics in the file of `progress.jsonl`. They find a "
        "training that runs but does not learn. If omitted, the predefined rules for the "
        "`workload` apply, and Muster only reports an alarm.",
    )
    tracker: Annotated[Literal["on", "off"], BeforeValidator(_switch_to_word)] = Field(
        "on",
        description="Whether Muster sets the environment variables of experiment trackers. on: "
        "each attempt of each component is a run of its own in Weights & Biases and MLflow, and "
        "Muster names and groups these runs. off: Muster sets no variable of a tracker.",
        examples=["off"],
    )
    retry: Mapping[FailureKind, Retry] = Field(
        default_factory=dict,
        description="Kinds of failure after which Muster retries the run, each with the keys "
        "attempts, delay_s and max_delay_s. Muster retries some kinds even if they are not "
        f"listed: {list_requeued_kinds()}.",
        examples=[{"NODE_LOST": {"attempts": 3}}],
    )

    evals: Mapping[Text, Evaluation] = Field(
        default_factory=dict,
        description="Programs that evaluate the checkpoints of the run, by name of the "
        "evaluation. Muster evaluates complete checkpoints during the training. Each evaluation "
        "is a separate run, which waits in the queue. A failed evaluation never fails the "
        "training.",
        examples=[{"math": {"command": ["python", "evaluate.py", "${checkpoint}"]}}],
    )
    keep_best: KeepBest | None = Field(
        None,
        description="Rule that chooses the best checkpoint by a number in the results of an "
        "evaluation. Muster never removes the best checkpoint, even if the key `keep` is set.",
        examples=[{"by": "math.accuracy", "mode": "max"}],
    )

    @classmethod
    def rules(cls, written: Mapping[str, Any]) -> Iterator[Refusal]:
        if written.get("success") is not None and written.get("progress") is None:
            remedy = "add `progress: {jsonl: FILE, step: KEY}`"
            yield (
                ("success",),
                make_refusal("this key needs `progress`, from which Muster reads the step", remedy),
            )
        required = mapping_or_empty(written.get("success")).get("step")
        total = mapping_or_empty(written.get("progress")).get("total")
        if is_number(required) and is_number(total) and required > total:
            problem = f"must be at most progress.total, which is {total:g}, found {required:g}"
            remedy = f"write `success.step: {total:g}` or less, or raise progress.total"
            yield ("success", "step"), make_refusal(problem, remedy)
        if watch := mapping_or_empty(written.get("watch")):
            if not mapping_or_empty(written.get("progress")).get("jsonl"):
                remedy = "add `progress: {jsonl: FILE, step: KEY}`"
                problem = (
                    "this key needs `progress.jsonl`, the file from which Muster reads the metrics"
                )
                yield ("watch",), make_refusal(problem, remedy)
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
        yield from check_evaluations(written)

        kinds_with_limit = set(FailureKind) - REQUEUED
        for kind, policy in mapping_or_empty(written.get("retry")).items():
            has_no_limit = isinstance(policy, Mapping) and policy.get("attempts") is None
            if kind in kinds_with_limit and has_no_limit:
                problem = (
                    "missing: for this kind of failure, the spec must set the number of attempts"
                )
                yield ("retry", str(kind), "attempts"), make_refusal(problem, "write `attempts: 3`")

    @classmethod
    def prepare(cls, data: object) -> object:
        return sort_by_start_order(data) if isinstance(data, Mapping) else data

    @property
    def processes(self) -> dict[str, Component]:
        """Mapping from names to the components that are programs, in the order of their start.

        The inference servers (component `rollout`) are not included.
        """
        return {
            name: component
            for name, component in self.components.items()
            if isinstance(component, Component)
        }

    @property
    def fleet(self) -> Rollout | None:
        """The inference servers (component `rollout`), or None if the run has none."""
        fleet = self.components.get(FLEET)
        return fleet if isinstance(fleet, Rollout) else None

    @property
    def secrets(self) -> frozenset[str]:
        """Secret values in the spec. Muster masks these values in logs, messages and files.

        The secrets of each component are collected separately, because two components may have
        variables with the same name and different secrets.
        """
        values = find_env_secrets(self.env)
        for component in self.components.values():
            words = [*(component.command or ())]
            if isinstance(component, Rollout):
                words += component.args or ()
            values |= find_env_secrets(component.env)
            values |= find_argument_secrets(words)
        for evaluation in self.evals.values():
            values |= find_env_secrets(evaluation.env)
            values |= find_argument_secrets(evaluation.command)
        return values

    @property
    def secret_blocks(self) -> dict[str, str]:
        """Names of the Prefect Secret blocks that environment variables in the spec use.

        Each key is the path of a variable in the spec, such as `env.HF_TOKEN`.
        """
        envs = {"env": self.env}
        for component_name, component in self.components.items():
            envs[f"components.{component_name}.env"] = component.env
        for evaluation_name, evaluation in self.evals.items():
            envs[f"evals.{evaluation_name}.env"] = evaluation.env
        return {
            f"{path}.{name}": value.secret
            for path, env in envs.items()
            for name, value in env.items()
            if isinstance(value, SecretBlock)
        }

    def with_secrets(self, values: Mapping[str, str]) -> RunSpec:
        """Return the spec in which references to Secret blocks are replaced by the blocks' values.

        Call this method only after placeholders were replaced. Otherwise a `${` in a secret would
        become a placeholder.

        Args:
            values: Mapping from the names of Secret blocks to their values.
        """

        def fill_env(env: Env, block_values: Mapping[str, str]) -> Env:
            return {
                name: block_values[value.secret] if isinstance(value, SecretBlock) else value
                for name, value in env.items()
            }

        # The process of the inference servers later replaces placeholders such as `${server.port}`.
        # In the secrets for that process, escape each `${`, so that the process leaves the secrets
        # unchanged.
        fleet_values = {block: value.replace("${", "$${") for block, value in values.items()}
        components = {}
        for name, component in self.components.items():
            env = fill_env(component.env, fleet_values if name == FLEET else values)
            components[name] = component.model_copy(update={"env": env})
        return self.model_copy(update={"env": fill_env(self.env, values), "components": components})

    @property
    def alarms(self) -> dict[str, WatchRule]:
        """Mapping from names to alarm rules. Empty if `progress` contains no metrics file."""
        has_metrics_file = self.progress is not None and self.progress.jsonl is not None
        return (self.watch or Watch()).choose_rules(self.workload) if has_metrics_file else {}

    @property
    def teardown_s(self) -> float:
        """Longest time in seconds that stopping all components can take.

        Components are stopped one after the other. Muster first waits until a component has saved a
        checkpoint or answered a warning, and then until the component has ended.
        """
        graces: list[float] = []
        for component in self.processes.values():
            stop = component.stop
            waits_for_save = component.checkpoints is not None or stop.warn is not None
            graces.append(stop.grace_s + (stop.saves_within_s if waits_for_save else 0.0))
        return sum(graces) + (self.fleet.stop.grace_s if self.fleet is not None else 0.0)

    def count_reserved_gpus(self, name: str) -> int | None:
        """Return the number of this machine's GPUs that are reserved for one component.

        Args:
            name: Name of the component.

        Returns:
            The number of GPUs, or None if no GPUs of this machine are reserved for the component.
        """
        component = self.components[name]
        if isinstance(component, Component):
            return component.gpus
        if component.placement != "local":
            return None
        return component.engines * component.sizes.gpus or None

    def on_exit_zero(self, name: str) -> OnExitZero:
        """Return Muster's reaction if a component ends with exit code 0.

        Without the key `on_exit_zero`, the reaction depends on the component's name. A
        component with `ready: {exit: 0}` only prepares the run, so its exit never ends the run.
        """
        component = self.components[name]
        if not isinstance(component, Component):
            return _ON_EXIT_ZERO.get(name, "fail")
        if component.ready is not None and component.ready.exit is not None:
            return "drain"
        return component.on_exit_zero or _ON_EXIT_ZERO.get(name, "fail")

    def find_retry_policy(self, kind: FailureKind) -> Retry | None:
        """Return the retry policy for a kind of failure, or None if the run is not retried."""
        policy = self.retry.get(kind)
        if kind not in REQUEUED:
            return policy
        defaults: dict[str, Any] = {"attempts": kind.properties.attempts}
        if kind.properties.delay_s is not None:
            defaults["delay_s"] = kind.properties.delay_s
        written = {} if policy is None else policy.model_dump(exclude_unset=True)
        return Retry.model_validate(defaults | written)

    @property
    def first_counted_attempt(self) -> int:
        """Number of the first attempt whose training steps count for the run.

        The number is above 1 if a person has retried the run from an earlier checkpoint.
        """
        return (self.start_from.attempt if self.start_from is not None else None) or 1

    def with_ray_address(self, address: str) -> RunSpec:
        """Return a copy of the spec that contains the address of the Ray cluster.

        A spec that already contains an address or does not use Ray is returned unchanged.

        Args:
            address: Address of the Ray dashboard of the only cluster of the work pool.
        """
        if self.ray is None or self.ray.address is not None:
            return self
        ray = self.ray.model_copy(update={"address": address})
        return self.model_copy(update={"ray": ray})

    def to_server_data(self) -> dict[str, Any]:
        """Return the spec as plain data for the Prefect server, with the key `start_order`.

        This key contains the order of the components, because a server with PostgreSQL does not
        keep the order of keys.
        """
        return {**self.written(), START_ORDER_KEY: list(self.components)}
