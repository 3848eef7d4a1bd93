"""What a version of an inference backend takes on its command line, in a file beside this one.

`make backends-check` makes the files from the packages, whose sources it parses without importing
them. All three are under the Apache-2.0 licence.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

#: The versions that the fleet's topology is written for, by backend.
VERSIONS = {"sglang": "0.5.23", "lmdeploy": "0.18.0", "vllm": "0.33.0"}
FOLDER = Path(__file__).resolve().parent

#: Before the arguments, what starts a server of the backend; the longest that fits counts.
_PROGRAMS = {
    "sglang": (("python", "-m", "sglang.launch_server"),),
    "lmdeploy": (("lmdeploy", "serve", "api_server"), ("serve", "api_server")),
    "vllm": (("vllm", "serve"),),
}
_TYPES: Mapping[str, type] = {"int": int, "float": float}


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One argument of a command line."""

    #: All its spellings; a name without a dash for a positional argument.
    names: tuple[str, ...]
    #: none: a flag · one: a value · optional: a value or none · many: one or more · any: unknown
    takes: str
    #: int | float | str, or any where it cannot be said.
    type: str = "any"
    #: The only values that it takes; empty: any, or it cannot be said.
    choices: tuple[Any, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Without what is as usual."""
        found: dict[str, Any] = {"names": list(self.names), "takes": self.takes, "type": self.type}
        return found | ({"choices": list(self.choices)} if self.choices else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """One version of a backend."""

    backend: str
    version: str
    options: tuple[Option, ...]


class _Refused(Exception):
    """What argparse says of arguments."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _Refused(message)


def load(backend: str, version: str | None = None) -> Facts:
    """The facts of a backend that are in this checkout.

    Raises:
        FileNotFoundError: There are none of this version.
    """
    written = json.loads(path_of(backend, version).read_text(encoding="utf-8"))
    options = tuple(
        Option(
            names=tuple(one["names"]),
            takes=one["takes"],
            type=one["type"],
            choices=tuple(one.get("choices", ())),
        )
        for one in written["options"]
    )
    return Facts(backend=backend, version=written["version"], options=options)


def path_of(backend: str, version: str | None = None) -> Path:
    return FOLDER / f"{backend}-{version or VERSIONS[backend]}.json"


def as_text(backend: str, version: str, source: str, options: Sequence[Option]) -> str:
    """The file of a version: a line for each option, so that versions can be compared.

    Args:
        backend: Its name.
        version: Of it.
        source: The package that it was made from, with its checksum.
        options: From `reading`.
    """
    lines = [json.dumps(option.as_json()) for option in options]
    head = {"backend": backend, "version": version, "from": source, "licence": "Apache-2.0"}
    begin = [f"{json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
    return "\n".join(["{", *begin, '"options": [', ",\n".join(lines), "]", "}", ""])


def faults_in(argv: Sequence[str], known: Facts) -> Iterator[str]:
    """What the backend's own command line has against a server's, a line each."""
    arguments = _arguments(argv, known.backend)
    if arguments is None:
        yield f"{known.backend}: does not start a server: {' '.join(argv[:3])}"
        return
    try:
        _, rest = _parser(known).parse_known_args(arguments)
    except _Refused as error:
        yield f"{known.backend} {known.version}: {error}"
        return
    for word in rest:
        yield f"{known.backend} {known.version}: has no argument {word}"


def _arguments(argv: Sequence[str], backend: str) -> list[str] | None:
    words = list(argv)
    if words[:2] == ["python", "-c"]:
        words = words[3:]
    for program in _PROGRAMS[backend]:
        if tuple(words[: len(program)]) == program:
            return words[len(program) :]
    return None


def _parser(known: Facts) -> argparse.ArgumentParser:
    # A spelling that two share is the later one's, as the backends have it too.
    parser = _Parser(
        prog=known.backend, add_help=False, allow_abbrev=False, conflict_handler="resolve"
    )
    nargs = {"optional": "?", "many": "+", "any": "*"}
    for index, option in enumerate(known.options):
        more: dict[str, Any] = {}
        if option.takes == "none":
            more["action"] = "store_true"
        else:
            more["type"] = _TYPES.get(option.type, str)
            if option.takes in nargs:
                more["nargs"] = nargs[option.takes]
            if option.choices:
                more["choices"] = option.choices
        if option.names[0].startswith("-"):
            more["dest"] = f"option_{index}"
        parser.add_argument(*option.names, **more)
    return parser
