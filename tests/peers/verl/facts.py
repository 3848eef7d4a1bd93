"""The programs and configuration keys of a version of verl, for checks without verl.

The programs and keys are in a JSON file next to this module. `make verl-check` makes the file from
verl's wheel. verl has the Apache-2.0 licence.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: The version of verl that the run specs use.
VERSION = "0.9.1"
FOLDER = Path(__file__).resolve().parent

#: Name of each Python type that a YAML value can have. Every other type has the name `any`.
TYPE_NAMES: dict[type, str] = {
    type(None): "null",
    bool: "bool",
    int: "int",
    float: "float",
    str: "str",
    list: "list",
    dict: "dict",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """A key of verl's configuration that has a value, and no keys below it."""

    #: Default value from the sources of verl. A text may contain placeholders such as `${...}`.
    default: Any
    #: Names of the types that the value may have. Each type is a name from `TYPE_NAMES`, or `any`.
    types: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The programs and configurations of one version of verl."""

    version: str
    #: Mapping from the module of a program of verl to the name of its Hydra configuration.
    entries: Mapping[str, str]
    #: Keys of each Hydra configuration, as `configurations[name][dotted key]`.
    configurations: Mapping[str, Mapping[str, Key]]


def fits(value: object, types: tuple[str, ...]) -> bool:
    """Return True if the value has one of the types."""
    name = TYPE_NAMES.get(type(value), "any")
    # A text with a placeholder such as `${trainer.nnodes}` gets its value from another key, so the
    # type of the value is unknown.
    has_placeholder = isinstance(value, str) and "${" in value
    return (
        "any" in types or has_placeholder or name in types or (name == "int" and "float" in types)
    )


def load(version: str = VERSION) -> Facts:
    """Return the programs and keys of a version of verl, from the JSON file in this checkout.

    Raises:
        FileNotFoundError: There is no file for this version.
    """
    content = json.loads(path_of(version).read_text(encoding="utf-8"))
    return Facts(
        version=content["verl"],
        entries=content["entries"],
        configurations={
            name: {
                key: Key(default=entry["default"], types=tuple(entry["types"]))
                for key, entry in keys.items()
            }
            for name, keys in content["configurations"].items()
        },
    )


def path_of(version: str) -> Path:
    """Return the path of the JSON file with the programs and keys of a version of verl."""
    return FOLDER / f"verl-{version}.json"


def as_text(version: str, sha256: str, answer: Mapping[str, Any]) -> str:
    """Return the content of the JSON file for a version of verl, with one line per key.

    With one key per line, two versions are easy to compare.

    Args:
        version: Version of verl.
        sha256: Checksum of the wheel that the programs and keys come from.
        answer: Answer of the module `compose`.
    """
    lines = [
        "{",
        f'"verl": {json.dumps(version)},',
        f'"from": {json.dumps(f"verl-{version}-py3-none-any.whl, sha256 {sha256}")},',
        '"licence": "Apache-2.0, Copyright 2024 Bytedance Ltd. and/or its affiliates",',
        f'"entries": {json.dumps(answer["entries"])},',
        '"configurations": {',
    ]
    for name, keys in answer["configurations"].items():
        lines.append(f"{json.dumps(name)}: {{")
        lines += [f"{json.dumps(key)}: {json.dumps(entry)}," for key, entry in keys.items()]
        lines[-1] = lines[-1].removesuffix(",")
        lines.append("},")
    lines[-1] = "}"
    return "\n".join([*lines, "}", "}", ""])
