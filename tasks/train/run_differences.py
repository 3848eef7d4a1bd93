"""Compare two attempts by their specs, code, packages and hosts: `muster show --diff`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from difflib import SequenceMatcher, unified_diff

from tasks.record.checkpoints import read_attempt_spec
from tasks.record.code_store import NoCode, hash_files, read_files
from tasks.record.places import RunPlace
from tasks.record.run_json import AttemptRecord
from tasks.spec.errors import BadArgument
from tasks.spec.secrets import find_code_secrets, mask_text
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
    return _compare_properties(_read_properties(first_name), _read_properties(second_name))


def describe_differences(first_name: str, second_name: str) -> list[str]:
    """Return the differences between two attempts as lines for people.

    A changed value is a line such as `progress.total 60 -> 80`. For an argument of a command, the
    name of its option stands before the values: `lr 6e-3 -> 7e-3`. The code is compared as in
    `diff -u`.

    Args:
        first_name: Name of an attempt or run, see `compare_attempts`.
        second_name: Name of the attempt or run to compare with.

    Raises:
        BadArgument: An attempt has no record on this machine or on the server.
    """
    first = _read_properties(first_name)
    second = _read_properties(second_name)
    differences = _compare_properties(first, second)

    lines: list[str] = []
    compared_lists: set[str] = set()
    for key, (old, new) in differences.items():
        parent, _, last = key.rpartition(".")
        if key.startswith("spec.") and last.isdecimal():
            if parent not in compared_lists:
                compared_lists.add(parent)
                lines += _describe_list(parent, _get_list(first, parent), _get_list(second, parent))
        elif not key.startswith("code.") and key not in ("tree", "diff"):
            lines.append(f"{key.removeprefix('spec.')} {_show(old)} -> {_show(new)}")
    return [*lines, *_describe_code(first, second, differences)]


def _compare_properties(
    first: Mapping[str, object], second: Mapping[str, object]
) -> dict[str, tuple[object, object]]:
    """Return the two values of each property that differs. None stands for a missing property."""
    return {
        key: (first.get(key), second.get(key))
        for key in dict.fromkeys((*first, *second))
        if first.get(key) != second.get(key)
    }


def _show(value: object) -> str:
    return "(none)" if value is None else str(value)


def _get_list(properties: Mapping[str, object], path: str) -> list[str]:
    """Return a list of the spec, whose items are the properties `PATH.0`, `PATH.1`, ..."""
    items: list[str] = []
    while f"{path}.{len(items)}" in properties:
        items.append(str(properties[f"{path}.{len(items)}"]))
    return items


def _describe_list(path: str, first: Sequence[str], second: Sequence[str]) -> Iterator[str]:
    """Yield a line for each difference between two lists, such as the arguments of a command."""
    place = path.removeprefix("spec.")
    matcher = SequenceMatcher(None, first, second, autojunk=False)
    for kind, start, end, other_start, other_end in matcher.get_opcodes():
        if kind == "equal":
            continue
        removed = first[start:end]
        added = second[other_start:other_end]
        if len(removed) == len(added):
            for offset, (old, new) in enumerate(zip(removed, added, strict=True)):
                position = start + offset
                option = first[position - 1] if position else ""
                yield f"{_describe_argument(option, old, new)}  ({place})"
        else:
            yield from (f"{word} removed  ({place})" for word in removed)
            yield from (f"{word} added  ({place})" for word in added)


def _describe_argument(option: str, old: str, new: str) -> str:
    """Return the change of one argument, with the name of its option if there is one.

    Args:
        option: The argument before the changed argument. It may be an option such as `--lr`.
        old: Text of the argument in the first attempt.
        new: Text of the argument in the second attempt.
    """
    old_name, old_equals, old_value = old.partition("=")
    new_name, new_equals, new_value = new.partition("=")
    if old_equals and new_equals and old_name == new_name:
        return f"{old_name.lstrip('-')} {old_value} -> {new_value}"
    if option.startswith("-") and "=" not in option and not old.startswith("--"):
        return f"{option.lstrip('-')} {old} -> {new}"
    return f"{old} -> {new}"


def _describe_code(
    first: Mapping[str, object],
    second: Mapping[str, object],
    differences: Mapping[str, tuple[object, object]],
) -> Iterator[str]:
    """Yield the lines of a unified diff between the code of two attempts, with secrets masked.

    Args:
        first: Properties of the first attempt.
        second: Properties of the second attempt.
        differences: The differences between the two.
    """
    names = [key.removeprefix("code.") for key in differences if key.startswith("code.")]
    try:
        old_files = read_files(str(first.get("tree")))
        new_files = read_files(str(second.get("tree")))
    except (NoCode, OSError):
        # The stored code of one of the runs is missing. It was pruned, or it was never stored: an
        # earlier release of Muster stored no code for runs that used the project's files directly.
        if {"diff", "tree"} & differences.keys() or names:
            yield "the code differs, but the files of at least one run are not stored here"
            patches = [str(properties.get("diff") or "") for properties in (first, second)]
            yield from _diff_texts("uncommitted changes", *patches)
        elif not (first.get("tree") and second.get("tree")):
            yield "the code of at least one run was not recorded, so it cannot be compared"
        return
    for name in sorted(names):
        old_mode, old_content = old_files.get(name, (0, b""))
        new_mode, new_content = new_files.get(name, (0, b""))
        if old_mode and new_mode and old_mode != new_mode:
            yield f"mode of {name} {old_mode:o} -> {new_mode:o}"
        try:
            yield from _diff_texts(
                name,
                old_content.decode(),
                new_content.decode(),
                is_new=name not in old_files,
                is_deleted=name not in new_files,
            )
        except UnicodeDecodeError:
            yield (
                f"{name}: not a text file; its size changes from {len(old_content)} to "
                f"{len(new_content)} bytes"
            )


def _diff_texts(
    name: str, old: str, new: str, *, is_new: bool = False, is_deleted: bool = False
) -> Iterator[str]:
    """Yield the lines of a unified diff between two texts, with secrets masked.

    Args:
        name: Name of the file.
        old: The first text.
        new: The second text.
        is_new: True if the first attempt did not have the file.
        is_deleted: True if the second attempt did not have the file.
    """
    secrets = find_code_secrets(old) | find_code_secrets(new)
    lines = unified_diff(
        old.splitlines(),
        new.splitlines(),
        "/dev/null" if is_new else f"a/{name}",
        "/dev/null" if is_deleted else f"b/{name}",
        lineterm="",
    )
    return (mask_text(line, secrets) for line in lines)


def _read_properties(name: str) -> dict[str, object]:
    """Return the recorded spec, code, packages and host of an attempt, by dotted property name."""
    match = _ATTEMPT_NAME.fullmatch(name)
    run = find_run(match[1] if match else name)
    record = require_record(run)
    attempts = record.attempts
    if match:
        attempts = tuple(attempt for attempt in attempts if attempt.number == int(match[2]))
    if not attempts:
        wanted = f"attempt {int(match[2])}" if match else "attempt yet"
        raise BadArgument(
            f"{run.run_id} has no {wanted}. To see the attempts: muster explain {run.run_id}"
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
        # Leave out the recorded diff of the project. The hashes of all files show the differences
        # of the code more exactly: a long diff was cut.
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
