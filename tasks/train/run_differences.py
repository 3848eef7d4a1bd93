"""Compare two attempts by their specs, code, packages and hosts: `muster show --diff`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import suppress

from tasks.record.checkpoints import read_attempt_spec
from tasks.record.code_store import NoCode, hash_files
from tasks.record.places import RunPlace
from tasks.record.run_json import AttemptRecord
from tasks.spec.errors import BadArgument
from tasks.train.finding_runs import find_run
from tasks.train.run_records import require_record

#: Name of an attempt, such as `RUN--a02`. The groups are the run id and the attempt's number.
_ATTEMPT_NAME = re.compile(r"(.+)--a(\d+)")


def compare_attempts(first_name: str, second_name: str) -> dict[str, tuple[object, object]]:
    """Return the differences between two attempts: the two values of each differing property.

    Args:
        first_name: Name of an attempt, such as `RUN--a02`, or of a run. A run stands for its last
            attempt.
        second_name: Name of the attempt or run to compare with.

    Returns:
        `(first value, second value)` by dotted property name, such as `spec.env.SEED`. A value is
        None if the attempt does not have the property.

    Raises:
        BadArgument: An attempt has no record on this machine or on the server.
    """
    first = _read_properties(first_name)
    second = _read_properties(second_name)
    return {
        key: (first.get(key), second.get(key))
        for key in dict.fromkeys((*first, *second))
        if first.get(key) != second.get(key)
    }


def _read_properties(name: str) -> dict[str, object]:
    """Return the recorded spec, code, packages and host of an attempt, by dotted property name."""
    match = _ATTEMPT_NAME.fullmatch(name)
    run = find_run(match[1] if match else name)
    record = require_record(run)
    attempts = record.attempts
    if match:
        attempts = tuple(attempt for attempt in attempts if attempt.number == int(match[2]))
    if not attempts:
        raise BadArgument(
            f"{name} has no such attempt in the record: see `muster explain {run.run_id}`"
        )
    attempt = attempts[-1]

    spec = {
        key: value
        for key, value in _flatten(_read_comparable_spec(run.place, attempt), "spec")
        if key != "spec.code"
    }
    provenance = {**(record.provenance or {}), **attempt.provenance}
    files: dict[str, str] = {}
    with suppress(NoCode, OSError):
        files = hash_files(str(provenance.get("tree")))
    if files:
        # The hashes of all files are more exact than the recorded diff of the project.
        provenance.pop("diff", None)
    return {**spec, **dict(_flatten({**provenance, "code": files}))}


def _read_comparable_spec(place: RunPlace, attempt: AttemptRecord) -> object:
    """Return the spec of an attempt, with placeholders for the attempt's paths, id and ports.

    These values differ between any two attempts, so they must not count as differences.
    """
    placeholders = {
        str(place.attempt(attempt.number).directory): "${attempt.dir}",
        str(place.directory): "${run.dir}",
        place.run_id: "${run.id}",
    }
    for port_name, port in attempt.ports.items():
        placeholders[str(port)] = f"${{{port_name}}}"
    alternatives = "|".join(map(re.escape, placeholders))
    pattern = re.compile(rf"(?<!\w)({alternatives})(?!\w)")

    def replace_in(node: object) -> object:
        if isinstance(node, Mapping):
            return {key: replace_in(value) for key, value in node.items()}
        if isinstance(node, list):
            return [replace_in(value) for value in node]
        if isinstance(node, str):
            return pattern.sub(lambda match: placeholders[match[1]], node)
        return node

    return replace_in(read_attempt_spec(place, attempt.number))


def _flatten(node: object, path: str = "") -> Iterator[tuple[str, object]]:
    """Yield the leaves of nested mappings with their dotted paths.

    Below the path `spec`, each item of a list is a separate leaf. Any other list is one leaf.
    """
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield from _flatten(value, f"{path}.{key}".lstrip("."))
    elif isinstance(node, list) and path.startswith("spec"):
        yield from _flatten(dict(enumerate(node)), path)
    else:
        yield path, node
