"""`--set a.b=c`: changes to a spec from the command line."""

from __future__ import annotations

from typing import Any

from tasks.spec.errors import Fault
from tasks.spec.secrets import MASK, looks_secret
from tasks.spec.values import shown
from tasks.spec.written_yaml import parse


def apply_override(data: dict[str, Any], override: str) -> tuple[Fault, ...]:
    """Sets one value in a written spec, in place; returns what is wrong with the override.

    Args:
        data: The spec's plain data, changed only where the override is good.
        override: `a.b=VALUE`. VALUE is YAML; mappings on the way are made where they are missing;
            an item of a list goes by its index (`components.trainer.command.3=20`).
    """
    path, equals, text = override.partition("=")
    path = path.strip()
    steps = path.split(".")
    if not equals:
        return (_fault("", override, "has no `=`", "write --set success.step=20"),)
    if not all(steps):
        return (_fault("", override, "has no key before `=`", "write --set success.step=20"),)

    value, faults = parse(text) if text.strip() else (None, ())
    said = f"{path}={MASK if looks_secret(steps[-1]) else text}"
    if faults:
        return tuple(_fault(path, said, str(fault)) for fault in faults)
    return _set(data, steps, value, said)


def apply_value(data: dict[str, Any], path: str, value: object) -> tuple[Fault, ...]:
    """Sets one value in a written spec, in place; returns what is wrong with its path.

    Args:
        path: `a.b`, as in `apply_override`.
        value: Plain data.
    """
    return _set(data, path.split("."), value, path)


def _set(data: dict[str, Any], steps: list[str], value: object, said: str) -> tuple[Fault, ...]:
    node: Any = data
    for depth, step in enumerate(steps):
        path, above = ".".join(steps[: depth + 1]), ".".join(steps[:depth])
        key: str | int = step
        if isinstance(node, list):
            if not (step.isdecimal() and step.isascii() and int(step) < len(node)):
                problem = f"`{above}` is a list of {len(node)} and has no item {step}"
                return (_fault(path, said, problem, "count from 0"),)
            key = int(step)
        elif not isinstance(node, dict):
            problem = f"`{above}` holds {shown(node)}, which has no keys"
            return (_fault(path, said, problem, f"set `{above}` itself"),)
        if depth == len(steps) - 1:
            node[key] = value
        elif isinstance(node, dict) and node.get(key) is None:
            node[key] = {}
        node = node[key]
    return ()


def _fault(path: str, override: str, problem: str, remedy: str = "") -> Fault:
    return Fault(path=path, problem=f"--set {override}: {problem}", remedy=remedy)
