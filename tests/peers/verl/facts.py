"""What is known of a version of verl without having it: its programs and the keys of its
configuration, in a file beside this one.

`make verl-check` makes the file from verl's wheel. verl is under the Apache-2.0 licence.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: The version that the run specs are written for.
VERSION = "0.9.1"
FOLDER = Path(__file__).resolve().parent

#: Types that a value of YAML can have; what has another is `any`.
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
    """One key of a configuration that is no mapping of further keys."""

    #: As verl writes it, so perhaps with `${...}` in it.
    default: Any
    #: Names of `TYPE_NAMES` that its value may have, or `any`.
    types: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """One version of verl."""

    version: str
    #: The configuration that a program begins with, by the program's module.
    entries: Mapping[str, str]
    #: By configuration, then by the dotted name of the key.
    configurations: Mapping[str, Mapping[str, Key]]


def fits(value: object, types: tuple[str, ...]) -> bool:
    """Whether a value may stand where these types are asked for."""
    name = TYPE_NAMES.get(type(value), "any")
    # What is filled in from elsewhere in the configuration may be anything.
    is_open = isinstance(value, str) and "${" in value
    return "any" in types or is_open or name in types or (name == "int" and "float" in types)


def load(version: str = VERSION) -> Facts:
    """The facts of a version that are in this checkout.

    Raises:
        FileNotFoundError: there are none of this version.
    """
    written = json.loads(path_of(version).read_text(encoding="utf-8"))
    return Facts(
        version=written["verl"],
        entries=written["entries"],
        configurations={
            name: {
                key: Key(default=one["default"], types=tuple(one["types"]))
                for key, one in keys.items()
            }
            for name, keys in written["configurations"].items()
        },
    )


def path_of(version: str) -> Path:
    return FOLDER / f"verl-{version}.json"


def as_text(version: str, sha256: str, answer: Mapping[str, Any]) -> str:
    """The file of a version: a line for each key, so that versions can be compared.

    Args:
        version: Of verl.
        sha256: Of the wheel that it was made from.
        answer: From `compose`.
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
        lines += [f"{json.dumps(key)}: {json.dumps(one)}," for key, one in keys.items()]
        lines[-1] = lines[-1].removesuffix(",")
        lines.append("},")
    lines[-1] = "}"
    return "\n".join([*lines, "}", "}", ""])
