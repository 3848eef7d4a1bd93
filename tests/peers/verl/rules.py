"""What is wrong with a run spec that starts verl, as far as the facts of a version say.

The rules on batches and GPUs are those that verl holds itself, some of them only after it has taken
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
#: CPUs that a program of verl asks Ray for with each GPU.
#: Source: verl 0.9.1, single_controller/ray/base.py: `ResourcePoolManager.max_colocate_count`, and
#: the default of `RayResourcePool`, with which sft_trainer_ray.py makes its pool.
_CPUS_PER_GPU = {"verl.trainer.main_ppo": 3, "verl.trainer.sft_trainer_ray": 10}


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One start of verl, with its configuration as far as it is known."""

    spec: RunSpec
    component: Component
    #: `verl.trainer.main_ppo`.
    module: str
    #: As they stand in the command, with the spec's placeholders filled in.
    overrides: tuple[str, ...]
    #: The environment that the spec gives.
    env: Mapping[str, str]
    #: The value of each key: the override's, else the default.
    values: Mapping[str, Any]

    def number(self, key: str) -> int:
        """An integer of the configuration; 1 where it is none or unknown."""
        value = self.values.get(key)
        return value if isinstance(value, int) and value > 0 else 1

    @property
    def gpus(self) -> int:
        return self.number("trainer.nnodes") * self.number("trainer.n_gpus_per_node")


def starts_in(spec: RunSpec) -> Iterator[tuple[str, str, tuple[str, ...], Mapping[str, str]]]:
    """Each component that runs a module of verl: its name, the module, overrides, environment."""
    filled = _filled(spec)
    for name, component in filled.processes.items():
        match component.command:
            case [_, "-m", str(module), *overrides] if module.startswith("verl."):
                yield (
                    name,
                    module,
                    tuple(overrides),
                    select_literals({**filled.env, **component.env}),
                )


def faults_in(spec: RunSpec, facts: Facts) -> list[str]:
    """What is wrong with a spec, a line each; empty for one that does not start verl."""
    filled = _filled(spec)
    faults: list[str] = []
    for name, module, overrides, env in starts_in(spec):
        if module not in facts.entries:
            known = ", ".join(facts.entries)
            faults.append(
                f"{name}: verl {facts.version} is not started by {module}, but by {known}"
            )
            continue
        keys = facts.configurations[facts.entries[module]]
        values = {key: one.default for key, one in keys.items()}
        for override in overrides:
            problem = _override_fault(override, env, facts.entries[module], facts, values)
            faults += [f"{name}: {override}: {problem}"] if problem else []
        start = Start(
            spec=filled,
            component=filled.processes[name],
            module=module,
            overrides=overrides,
            env=env,
            values=values,
        )
        faults += [f"{name}: {fault}" for rule in _RULES for fault in rule(start)]
    return faults


def _filled(spec: RunSpec) -> RunSpec:
    """The spec as an attempt would see it, in a directory of no run."""
    run = "/muster/runs/example"
    # The spec has these numbers itself; of the others some place takes no word, but each a number.
    own = {"progress.total", "success.step"}
    known = list_known_names(spec.written())
    names = {name: str(at) for at, name in enumerate(sorted(known - own), start=1)}
    names |= {"run.id": "example", "run.dir": run, "attempt.dir": f"{run}/attempt-01"}
    return resolve(spec, names, Path.cwd())


def _override_fault(
    override: str, env: Mapping[str, str], configuration: str, facts: Facts, values: dict[str, Any]
) -> str:
    """What is wrong with one override, else nothing; a good one is entered in `values`."""
    keys = facts.configurations[configuration]
    parts = _OVERRIDE.fullmatch(override)
    if parts is None or (parts["value"] is None and parts["sign"] != "~"):
        return "is no override: write KEY=VALUE"
    key, sign = parts["key"], parts["sign"] or ""
    is_known = key in keys or any(one.startswith(f"{key}.") for one in keys)
    if sign == "+" and key in keys:
        return "is there already (leave out the +)"
    if sign in ("+", "++"):
        values[key] = _value_of(parts["value"], env)
        return ""
    if not is_known:
        hint = suggest_name(key, keys)
        return f"verl {facts.version} has no such key" + (f" ({hint})" if hint else "")
    if sign == "~" or key not in keys:
        # A group, such as engine=fsdp: which others there are is for verl to say.
        return ""
    value = _value_of(parts["value"], env)
    if not fits(value, keys[key].types):
        return f"must be {' or '.join(keys[key].types)}, found {value!r}"
    values[key] = value
    return ""


def _value_of(text: str, env: Mapping[str, str]) -> Any:
    """The value that Hydra makes of a text, for what the specs use of its grammar."""
    text = _OF_ENV.sub(lambda found: env.get(found[1], found[0]), text)
    if "${" in text:
        return text
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    if isinstance(value, str) and re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", value):
        # A number in Hydra's grammar and not in YAML's.
        return float(value)
    return value


def _gang_is_verls(start: Start) -> Iterator[str]:
    gang = start.spec.gang or Gang(gpus_per_node=1)
    for key, path, asked in (
        ("trainer.nnodes", "gang.nodes", gang.nodes),
        ("trainer.n_gpus_per_node", "gang.gpus_per_node", gang.gpus_per_node),
    ):
        if start.values.get(key) != asked:
            yield f"{key} is {start.values.get(key)}, but {path} is {asked}"
    needed = _CPUS_PER_GPU.get(start.module, 1)
    if gang.cpus_per_gpu < needed:
        yield f"gang.cpus_per_gpu is {gang.cpus_per_gpu}, but verl asks Ray for {needed}"


def _algorithm_is_the_workload(start: Start) -> Iterator[str]:
    estimator, workload = start.values.get("algorithm.adv_estimator"), start.spec.workload
    if estimator is None and workload != "sft":
        yield f"{start.module} does no {workload}"
    if estimator is not None and (estimator == "grpo") != (workload == "grpo"):
        yield f"algorithm.adv_estimator is {estimator}, but workload is {workload}"
    if estimator == "grpo" and start.number("actor_rollout_ref.rollout.n") < 2:
        yield "actor_rollout_ref.rollout.n is below 2: GRPO compares the answers to a prompt"


def _engine_is_chosen(start: Start) -> Iterator[str]:
    if start.values.get("actor_rollout_ref.rollout.name") == "???":
        yield "actor_rollout_ref.rollout.name is missing: vllm or sglang"


def _batches_divide(start: Start) -> Iterator[str]:
    """Source: verl 0.9.1, utils/config.py, workers/engine_workers.py, sft_trainer_ray.py."""
    train = start.number("data.train_batch_size")
    answers = start.number("actor_rollout_ref.rollout.n")
    if (rows := train * answers) % start.gpus:
        yield f"data.train_batch_size: {rows} answers do not divide by {start.gpus} GPUs"
    for part in ("actor_rollout_ref.actor", "critic"):
        if f"{part}.ppo_mini_batch_size" not in start.values:
            continue
        mini = start.values[f"{part}.ppo_mini_batch_size"]
        if not isinstance(mini, int):
            # The critic's is the actor's where nothing else is written.
            continue
        if mini > train:
            yield f"{part}.ppo_mini_batch_size, {mini}, is above data.train_batch_size, {train}"
        if (rows := mini * answers) % start.gpus:
            yield f"{part}.ppo_mini_batch_size: {rows} answers do not divide by {start.gpus} GPUs"
    parallel = start.number("actor_rollout_ref.rollout.tensor_model_parallel_size")
    if start.gpus % parallel:
        yield f"{start.gpus} GPUs do not divide by tensor_model_parallel_size, {parallel}"


def _files_are_everyones(start: Start) -> Iterator[str]:
    folder = str(start.values.get("trainer.default_local_dir"))
    if not PurePosixPath(folder).is_absolute():
        yield f"trainer.default_local_dir: {folder} is in the copy of the working directory"
    if "/attempt-01" in folder and start.values.get("trainer.resume_mode") == "auto":
        yield "trainer.default_local_dir is the attempt's: the next one will not resume from it"


def _progress_is_written(start: Start) -> Iterator[str]:
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
    _gang_is_verls,
    _algorithm_is_the_workload,
    _engine_is_chosen,
    _batches_divide,
    _files_are_everyones,
    _progress_is_written,
)
