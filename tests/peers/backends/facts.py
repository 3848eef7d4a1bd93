"""The command-line arguments that a version of an inference backend accepts.

The arguments are in a JSON file next to this module. `make backends-check` makes the file from the
backend's package: it parses the sources and does not import them. All three backends have the
Apache-2.0 licence.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

#: Version of each inference backend whose command lines Muster's fleets use.
VERSIONS = {"sglang": "0.5.23", "lmdeploy": "0.18.0", "vllm": "0.33.0"}
FOLDER = Path(__file__).resolve().parent

#: Mapping from a backend to the beginnings of the commands that start its server. If several
#: beginnings match a command, the longest beginning counts.
_PROGRAMS = {
    "sglang": (("python", "-m", "sglang.launch_server"),),
    "lmdeploy": (("lmdeploy", "serve", "api_server"), ("serve", "api_server")),
    "vllm": (("vllm", "serve"),),
}
_TYPES: Mapping[str, type] = {"int": int, "float": float}


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One argument of a command line."""

    #: All spellings of the argument; a positional argument has a name without dashes.
    names: tuple[str, ...]
    #: Number of values that follow the argument: `none` (a flag), `one`, `optional` (at most one),
    #: `many` (at least one) or `any` (unknown).
    takes: str
    #: Type of a value: int, float or str, or any if the type is unknown.
    type: str = "any"
    #: The accepted values; an empty tuple if any value is accepted or the values are unknown.
    choices: tuple[Any, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return this command-line argument as a JSON object. Omit an empty list `choices`."""
        content: dict[str, Any] = {
            "names": list(self.names),
            "takes": self.takes,
            "type": self.type,
        }
        return content | ({"choices": list(self.choices)} if self.choices else {})


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """The command-line arguments that one version of a backend accepts."""

    backend: str
    version: str
    options: tuple[Option, ...]


class _Refused(Exception):
    """The parser refused the arguments. The message of the exception is argparse's message."""


class _Parser(argparse.ArgumentParser):
    """A parser that raises an exception instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise _Refused(message)


def load(backend: str, version: str | None = None) -> Facts:
    """Return the command-line arguments of a backend, from the JSON file in this checkout.

    Args:
        backend: Name of the backend.
        version: Version of the backend, or None for the version in VERSIONS.

    Raises:
        FileNotFoundError: There is no file for this version.
    """
    content = json.loads(path_of(backend, version).read_text(encoding="utf-8"))
    options = tuple(
        Option(
            names=tuple(option["names"]),
            takes=option["takes"],
            type=option["type"],
            choices=tuple(option.get("choices", ())),
        )
        for option in content["options"]
    )
    return Facts(backend=backend, version=content["version"], options=options)


def path_of(backend: str, version: str | None = None) -> Path:
    """Return the path of the JSON file with the arguments of one version of a backend.

    Without the argument `version`, the version in VERSIONS is used.
    """
    return FOLDER / f"{backend}-{version or VERSIONS[backend]}.json"


def as_text(backend: str, version: str, source: str, options: Sequence[Option]) -> str:
    """Return the content of the JSON file for a version, with one line per argument.

    With one argument per line, two versions are easy to compare.

    Args:
        backend: Name of the backend.
        version: Version of the backend.
        source: File name and checksum of the package that the arguments come from.
        options: Arguments as the module `reading` returns them.
    """
    lines = [json.dumps(option.as_json()) for option in options]
    head = {"backend": backend, "version": version, "from": source, "licence": "Apache-2.0"}
    begin = [f"{json.dumps(key)}: {json.dumps(value)}," for key, value in head.items()]
    return "\n".join(["{", *begin, '"options": [', ",\n".join(lines), "]", "}", ""])


def faults_in(argv: Sequence[str], known: Facts) -> Iterator[str]:
    """Yield a message for each argument in `argv` that the inference server does not accept."""
    arguments = _strip_program(argv, known.backend)
    if arguments is None:
        yield f"{known.backend}: does not start a server: {' '.join(argv[:3])}"
        return
    try:
        _, unknown_words = _build_parser(known).parse_known_args(arguments)
    except _Refused as error:
        yield f"{known.backend} {known.version}: {error}"
        return
    for word in unknown_words:
        yield f"{known.backend} {known.version}: has no argument {word}"


def _strip_program(argv: Sequence[str], backend: str) -> list[str] | None:
    """Remove the program from the command of an inference server, and return the arguments.

    Args:
        argv: The command, which begins with the program, for example `vllm serve`.
        backend: Name of the backend, for example `vllm`.

    Returns:
        The arguments, or None if the command does not start a server of the backend.
    """
    words = list(argv)
    if words[:2] == ["python", "-c"]:
        words = words[3:]
    for program in _PROGRAMS[backend]:
        if tuple(words[: len(program)]) == program:
            return words[len(program) :]
    return None


def _build_parser(known: Facts) -> argparse.ArgumentParser:
    """Return an argparse parser that accepts the same command-line arguments as a backend program.

    Args:
        known: The arguments that one version of the backend accepts.
    """
    # If two arguments have the same spelling, the parser uses the later argument, as the backends
    # do.
    parser = _Parser(
        prog=known.backend, add_help=False, allow_abbrev=False, conflict_handler="resolve"
    )
    nargs = {"optional": "?", "many": "+", "any": "*"}
    for index, option in enumerate(known.options):
        settings: dict[str, Any] = {}
        if option.takes == "none":
            settings["action"] = "store_true"
        else:
            settings["type"] = _TYPES.get(option.type, str)
            if option.takes in nargs:
                settings["nargs"] = nargs[option.takes]
            if option.choices:
                settings["choices"] = option.choices
        if option.names[0].startswith("-"):
            settings["dest"] = f"option_{index}"
        parser.add_argument(*option.names, **settings)
    return parser
