"""Rules for run specs that start verl, checked against the facts about a version of verl.

verl itself has the rules on batches and GPUs. But it checks some of them only after it has taken
its GPUs and loaded the model.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from tasks.spec.component import Component
from tasks.spec.formatting import suggest_name
from tasks.spec.loading import resolve
from tasks.spec.placeholders import list_known_names
from tasks.spec.run import Gang, RunSpec
from tasks.spec.values import select_literals
from tests.peers.verl.facts import Facts, fits

_OVERRIDE = re.compile(r"(?P<sign>\+\+|\+|~)?(?P<key>[A-Za-z_][\w@/.-]*)(?:=(?P<value>.*))?", re.S)
_OF_ENV = re.compile(r"\$\{oc\.env:(\w+)\}")
#: CPUs that a program of verl requests from Ray for each GPU.
#:
#: Source: verl 0.9.1, single_controller/ray/base.py: `ResourcePoolManager.max_colocate_count`, and
#: the default of `RayResourcePool`, which sft_trainer_ray.py uses for its pool.
_CPUS_PER_GPU = {"verl.trainer.main_ppo": 3, "verl.trainer.sft_trainer_ray": 10}


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """The start of a verl program: the spec, the component and the program's configuration."""

    spec: RunSpec
    component: Component
    #: Module of the program, such as `verl.trainer.main_ppo`.
    module: str
    #: Hydra overrides of the command, such as `trainer.nnodes=2`. Placeholders of the spec are
    #: already replaced by values.
    overrides: tuple[str, ...]
    #: Environment variables from the spec.
    env: Mapping[str, str]
    #: Mapping from the dotted name of a configuration key to its value. A key without an override
    #: has its default value.
    values: Mapping[str, Any]

    def number(self, key: str) -> int:
        """Return an integer of the configuration, or 1 if the value is unknown or not positive."""
        value = self.values.get(key)
        return value if isinstance(value, int) and value > 0 else 1

    @property
    def gpus(self) -> int:
        """Number of GPUs that verl uses."""
        return self.number("trainer.nnodes") * self.number("trainer.n_gpus_per_node")


def starts_in(spec: RunSpec) -> Iterator[tuple[str, str, tuple[str, ...], Mapping[str, str]]]:
    """Yield a tuple for each component that runs a module of verl.

    The tuple has the component's name, the module, the overrides and the environment.
    """
    resolved_spec = _resolve_placeholders(spec)
    for name, component in resolved_spec.processes.items():
        match component.command:
            case [_, "-m", str(module), *overrides] if module.startswith("verl."):
                yield (
                    name,
                    module,
                    tuple(overrides),
                    select_literals({**resolved_spec.env, **component.env}),
                )


def faults_in(spec: RunSpec, facts: Facts) -> list[str]:
    """Return a line for each fault of a spec; the list is empty if the spec does not start verl."""
    resolved_spec = _resolve_placeholders(spec)
    faults: list[str] = []
    for name, module, overrides, env in starts_in(spec):
        if module not in facts.entries:
            known = ", ".join(facts.entries)
            faults.append(
                f"{name}: verl {facts.version} is not started by {module}, but by {known}"
            )
            continue
        keys = facts.configurations[facts.entries[module]]
        values = {key: key_facts.default for key, key_facts in keys.items()}
        for override in overrides:
            problem = _check_override(override, env, facts.entries[module], facts, values)
            faults += [f"{name}: {override}: {problem}"] if problem else []
        start = Start(
            spec=resolved_spec,
            component=resolved_spec.processes[name],
            module=module,
            overrides=overrides,
            env=env,
            values=values,
        )
        faults += [f"{name}: {fault}" for rule in _RULES for fault in rule(start)]
    return faults


def _resolve_placeholders(spec: RunSpec) -> RunSpec:
    """Return the spec with values in place of its placeholders, as in a real attempt.

    The values come from a made-up run.
    """
    run_directory = "/muster/runs/example"
    # The values of these two placeholders come from the spec itself. Every other placeholder gets
    # an arbitrary number, because some keys accept no text.
    names_from_spec = {"progress.total", "success.step"}
    known = list_known_names(spec.written())
    names = {
        name: str(number) for number, name in enumerate(sorted(known - names_from_spec), start=1)
    }
    names |= {
        "run.id": "example",
        "run.dir": run_directory,
        "attempt.dir": f"{run_directory}/attempt-01",
    }
    return resolve(spec, names, Path.cwd())


def _check_override(
    override: str, env: Mapping[str, str], configuration: str, facts: Facts, values: dict[str, Any]
) -> str:
    """Return the fault of an override, or an empty string if the override is valid.

    Args:
        override: The override, for example `trainer.nnodes=2`.
        env: Environment variables of the component.
        configuration: Name of the Hydra configuration.
        facts: The programs and keys of one version of verl.
        values: Mapping from the dotted name of a key to its value. This function adds the value of
            a valid override.
    """
    keys = facts.configurations[configuration]
    parts = _OVERRIDE.fullmatch(override)
    if parts is None or (parts["value"] is None and parts["sign"] != "~"):
        return "is no override: write KEY=VALUE"
    key = parts["key"]
    sign = parts["sign"] or ""
    is_known = key in keys or any(known_key.startswith(f"{key}.") for known_key in keys)
    if sign == "+" and key in keys:
        return "is there already (leave out the +)"
    if sign in ("+", "++"):
        values[key] = _parse_value(parts["value"], env)
        return ""
    if not is_known:
        hint = suggest_name(key, keys)
        return f"verl {facts.version} has no such key" + (f" ({hint})" if hint else "")
    if sign == "~" or key not in keys:
        # The key names a group of Hydra's configuration files, as in `engine=fsdp`. Only verl
        # itself knows the members of a group.
        return ""
    value = _parse_value(parts["value"], env)
    if not fits(value, keys[key].types):
        return f"must be {' or '.join(keys[key].types)}, found {value!r}"
    values[key] = value
    return ""


def _parse_value(text: str, env: Mapping[str, str]) -> Any:
    """Return the value that Hydra parses from the text of an override.

    Only the part of Hydra's grammar that the specs use is supported.
    """
    text = _OF_ENV.sub(lambda match: env.get(match[1], match[0]), text)
    if "${" in text:
        return text
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", value):
        # Hydra's grammar reads a text such as `1e-5` as a number, but YAML's grammar does not.
        return float(value)
    return value


def _check_gang(start: Start) -> Iterator[str]:
    """Yield a fault if the spec's key `gang` differs from the GPUs and CPUs that verl requests."""
    gang = start.spec.gang or Gang(gpus_per_node=1)
    for key, path, expected in (
        ("trainer.nnodes", "gang.nodes", gang.nodes),
        ("trainer.n_gpus_per_node", "gang.gpus_per_node", gang.gpus_per_node),
    ):
        if start.values.get(key) != expected:
            yield f"{key} is {start.values.get(key)}, but {path} is {expected}"
    needed = _CPUS_PER_GPU.get(start.module, 1)
    if gang.cpus_per_gpu < needed:
        yield f"gang.cpus_per_gpu is {gang.cpus_per_gpu}, but verl asks Ray for {needed}"


def _check_algorithm(start: Start) -> Iterator[str]:
    """Yield a fault if verl would not train with the algorithm that the spec's `workload` names."""
    estimator = start.values.get("algorithm.adv_estimator")
    workload = start.spec.workload
    if estimator is None and workload != "sft":
        yield f"{start.module} does no {workload}"
    if estimator is not None and (estimator == "grpo") != (workload == "grpo"):
        yield f"algorithm.adv_estimator is {estimator}, but workload is {workload}"
    if estimator == "grpo" and start.number("actor_rollout_ref.rollout.n") < 2:
        yield "actor_rollout_ref.rollout.n is below 2: GRPO compares the answers to a prompt"


def _check_engine(start: Start) -> Iterator[str]:
    """Yield a fault if the spec chooses no inference engine."""
    if start.values.get("actor_rollout_ref.rollout.name") == "???":
        yield "actor_rollout_ref.rollout.name is missing: vllm or sglang"


def _check_batches(start: Start) -> Iterator[str]:
    """Yield a fault for each batch size that verl cannot divide among the GPUs of the program.

    Source: verl 0.9.1, utils/config.py, workers/engine_workers.py, sft_trainer_ray.py.
    """
    train = start.number("data.train_batch_size")
    answers = start.number("actor_rollout_ref.rollout.n")
    if (rows := train * answers) % start.gpus:
        yield f"data.train_batch_size: {rows} answers do not divide by {start.gpus} GPUs"
    for part in ("actor_rollout_ref.actor", "critic"):
        if f"{part}.ppo_mini_batch_size" not in start.values:
            continue
        mini = start.values[f"{part}.ppo_mini_batch_size"]
        if not isinstance(mini, int):
            # The value is a reference to another key, which is checked separately. For example, the
            # critic uses the mini-batch size of the actor by default.
            continue
        if mini > train:
            yield f"{part}.ppo_mini_batch_size, {mini}, is above data.train_batch_size, {train}"
        if (rows := mini * answers) % start.gpus:
            yield f"{part}.ppo_mini_batch_size: {rows} answers do not divide by {start.gpus} GPUs"
    parallel = start.number("actor_rollout_ref.rollout.tensor_model_parallel_size")
    if start.gpus % parallel:
        yield f"{start.gpus} GPUs do not divide by tensor_model_parallel_size, {parallel}"


def _check_directory(start: Start) -> Iterator[str]:
    """Yield a fault if the next attempt could not find the checkpoints of the run."""
    folder = str(start.values.get("trainer.default_local_dir"))
    if not PurePosixPath(folder).is_absolute():
        yield f"trainer.default_local_dir: {folder} is in the copy of the working directory"
    if "/attempt-01" in folder and start.values.get("trainer.resume_mode") == "auto":
        yield "trainer.default_local_dir is in attempt-01: the next attempt cannot resume from it"


def _check_progress(start: Start) -> Iterator[str]:
    """Yield a fault if Muster cannot read the run's progress from the metrics that verl writes."""
    progress = start.spec.progress
    if progress is None or progress.jsonl is None:
        return
    if "file" not in (start.values.get("trainer.logger") or ()):
        yield "trainer.logger has no `file`, so that nothing writes what progress reads"
    if (path := start.env.get("VERL_FILE_LOGGER_PATH")) != progress.jsonl:
        yield f"progress.jsonl is {progress.jsonl}, but VERL_FILE_LOGGER_PATH is {path}"
    if progress.step != "step":
        yield f"progress.step is {progress.step}: verl calls it step"
    steps = start.values.get("trainer.total_training_steps")
    if steps is not None and progress.total != steps:
        yield f"progress.total is {progress.total}, but trainer.total_training_steps is {steps}"


_RULES: tuple[Callable[[Start], Iterator[str]], ...] = (
    _check_gang,
    _check_algorithm,
    _check_engine,
    _check_batches,
    _check_directory,
    _check_progress,
)
