"""Check run specs with verl itself: its Hydra configuration, its dataclasses and its own checks.

    PYTHONPATH=HYDRA:. python -S -m tests.peers.verl.compose FOLDER < question.json > answer.json

FOLDER contains verl's unpacked wheel. HYDRA contains hydra-core and its dependencies. `wheel.py`
starts this module in this way.

question: {NAME: {"module": MODULE, "overrides": [...], "env": {...}}}

answer: {"entries": {MODULE: CONFIGURATION}, "configurations": {CONFIGURATION: {KEY: {"default",
"types"}}}, "faults": {NAME: [...]}}
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import importlib
import json
import os
import sys
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import hydra  # type: ignore[import-not-found]
from hydra.core.global_hydra import GlobalHydra  # type: ignore[import-not-found]
from hydra.utils import instantiate  # type: ignore[import-not-found]
from omegaconf import DictConfig, OmegaConf  # type: ignore[import-not-found]

from tests.peers.verl import stand_ins
from tests.peers.verl.facts import TYPE_NAMES, fits

#: The programs of verl that a run may start.
ENTRIES = ("verl.trainer.main_ppo", "verl.trainer.sft_trainer_ray")
#: Mapping from a configuration key to a type that verl accepts in addition to the type of the
#: key's default value.
#:
#: Source: verl 0.9.1, trainer/sft_trainer_ray.py (`after_each_epoch`), utils/tracking.py (one
#: logger), utils/dataset/ (one file or several).
_ADDITIONAL_TYPES = {
    "trainer.save_freq": "str",
    "trainer.test_freq": "str",
    "trainer.logger": "str",
    "data.train_files": "list",
    "data.val_files": "list",
}


def configuration_of(folder: Path, module: str) -> str:
    """Read the name of the Hydra configuration from the source code of a program of verl.

    Raises:
        LookupError: The program does not exist, or has no configuration of Hydra.
    """
    path = folder / f"{module.replace('.', '/')}.py"
    if not path.exists():
        raise LookupError(f"verl has no module {module}")
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "hydra.main":
            for keyword in node.keywords:
                if keyword.arg == "config_name":
                    return str(ast.literal_eval(keyword.value))
    raise LookupError(f"{module} has no hydra.main")


def compose(folder: Path, configuration: str, overrides: list[str]) -> DictConfig:
    """Return the Hydra configuration that a program of verl would get with these overrides.

    An unknown key raises an exception of Hydra.
    """
    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(str(folder / "verl/trainer/config"), version_base=None):
        return hydra.compose(configuration, overrides)


def class_of(node: object) -> type[Any] | None:
    """Return the dataclass that verl makes from a mapping. The key `_target_` names the class.

    Return None if the mapping is not converted to a dataclass of verl.
    """
    target = node.get("_target_") if isinstance(node, Mapping) else None
    if not isinstance(target, str) or not target.startswith("verl."):
        return None
    module, _, name = target.rpartition(".")
    target_class: type[Any] = getattr(importlib.import_module(module), name)
    return target_class if dataclasses.is_dataclass(target_class) else None


def types_in(hint: object) -> list[str]:
    """Return the names of the types that an annotation allows; `any` stands for an unknown type."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return sorted({name for part in typing.get_args(hint) for name in types_in(part)})
    if typing.get_origin(hint) is typing.Literal:
        return sorted({TYPE_NAMES.get(type(value), "any") for value in typing.get_args(hint)})
    plain = typing.get_origin(hint) or hint
    return [TYPE_NAMES.get(plain, "any") if isinstance(plain, type) else "any"]


def keys_of(config: DictConfig) -> dict[str, dict[str, Any]]:
    """Return the default value and the types of each key of a configuration.

    Returns:
        A mapping from the dotted name of each key to `{"default": ..., "types": [...]}`.
    """
    keys: dict[str, dict[str, Any]] = {}

    def walk(node: Mapping[str, Any], path: str) -> None:
        owner = class_of(node)
        hints = typing.get_type_hints(owner) if owner else {}
        for key, value in node.items():
            name = f"{path}{key}"
            if isinstance(value, dict) and value:
                walk(value, f"{name}.")
                continue
            kinds = types_in(hints[key]) if key in hints else types_in(type(value))
            if key not in hints and (value is None or _has_placeholder(value)):
                kinds = ["any"]
            # The default value of a key may have another type than the key's annotation.
            if "any" not in kinds and not _has_placeholder(value):
                kinds = sorted({*kinds, *types_in(type(value))})
            if name in _ADDITIONAL_TYPES and "any" not in kinds:
                kinds = sorted({*kinds, _ADDITIONAL_TYPES[name]})
            keys[name] = {"default": value, "types": kinds}

    walk(typing.cast("dict[str, Any]", OmegaConf.to_container(config, resolve=False)), "")
    return keys


def _has_placeholder(value: object) -> bool:
    """Return True if the value is a text with a placeholder such as `${trainer.nnodes}`.

    The type of such a value is unknown.
    """
    return isinstance(value, str) and "${" in value


def type_faults(config: DictConfig) -> Iterator[str]:
    """Yield a line for each value of a configuration that does not fit the types of its key."""

    def walk(node: Mapping[str, Any], path: str) -> Iterator[str]:
        owner = class_of(node)
        hints = typing.get_type_hints(owner) if owner else {}
        for key, value in node.items():
            if isinstance(value, dict):
                yield from walk(value, f"{path}{key}.")
            elif key in hints and not fits(value, types := tuple(types_in(hints[key]))):
                yield f"{path}{key}: {value!r} is not {' or '.join(types)}"

    yield from walk(typing.cast("dict[str, Any]", OmegaConf.to_container(config)), "")


def own_faults(module: str, config: DictConfig) -> Iterator[str]:
    """Yield the error messages of verl's own checks of a configuration.

    The checks are those of verl's dataclasses and of its function `validate_config`.
    """
    try:
        if module == "verl.trainer.main_ppo":
            checks = importlib.import_module("verl.utils.config")
            needs = importlib.import_module("verl.trainer.ppo.utils")
            checks.validate_config(
                config,
                use_reference_policy=needs.need_reference_policy(config),
                use_critic=needs.need_critic(config),
            )
            instantiate(config.actor_rollout_ref.rollout, _convert_="partial")
        else:
            for part in ("model", "engine", "optim", "checkpoint"):
                instantiate(config[part], _convert_="partial")
    except Exception as error:
        yield f"{module} refuses it: {' '.join(str(error).split())}"


def faults_of(
    folder: Path, module: str, overrides: list[str], env: Mapping[str, str]
) -> Iterator[str]:
    """Yield a line for each fault that verl finds if a program starts with these overrides."""
    os.environ.update(env)
    try:
        config = compose(folder, configuration_of(folder, module), overrides)
    except LookupError as error:
        yield str(error)
    except Exception as error:
        lines = [line for line in str(error).splitlines() if line.strip()]
        yield " ".join(lines[:2])
    else:
        yield from type_faults(config)
        yield from own_faults(module, config)


def main() -> int:
    """Read a question from stdin, and print the answer. The module's docstring has the formats."""
    folder = Path(sys.argv[1])
    question = json.load(sys.stdin)
    stand_ins.install(folder)
    with contextlib.redirect_stdout(sys.stderr):
        models = importlib.import_module("verl.workers.config")
        # Replace this method of verl, because the original method would load the model.
        models.HFModelConfig.__post_init__ = lambda self: None
        entries = {module: configuration_of(folder, module) for module in ENTRIES}
        answer = {
            "entries": entries,
            "configurations": {
                name: keys_of(compose(folder, name, [])) for name in sorted(set(entries.values()))
            },
            "faults": {name: list(faults_of(folder, **start)) for name, start in question.items()},
        }
    json.dump(answer, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main())
