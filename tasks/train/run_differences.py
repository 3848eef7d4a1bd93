"""Compare two attempts by their specs, code, packages and hosts: `muster show --diff`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from difflib import SequenceMatcher, unified_diff

import yaml

from tasks.record.checkpoints import read_attempt_spec
from tasks.record.code_store import NoCode, hash_files, read_code, read_files
from tasks.record.places import RunPlace
from tasks.record.run_json import AttemptRecord, RunJson
from tasks.spec.errors import BadArgument
from tasks.spec.placeholders import mapping_or_empty
from tasks.spec.run import LIVE_CODE, RunSpec
from tasks.spec.secrets import find_code_secrets, mask_text
from tasks.spec.start_order import START_ORDER_KEY
from tasks.train.finding_runs import find_run
from tasks.train.run_records import find_record
from tasks.train.run_spec_files import find_spec_files, to_plain_data
from tasks.train.runs import Run
from tasks.train.server_url import may_have_prefect_server

#: Name of an attempt, such as `RUN--a02`. The groups contain the run id and the attempt's number.
_ATTEMPT_NAME = re.compile(r"(.+)--a(\d+)")
#: Matches the beginning of an option, such as `--lr`, but not a negative number.
_OPTION = re.compile(r"-{1,2}[A-Za-z]")
#: Matches the name of an option or setting before `=`, such as `--lr` or `trainer.lr`.
_OPTION_NAME = re.compile(r"[-+~]*[A-Za-z_][\w./-]*")
#: Names of the properties of stored code. Each file of the code is a further property, such as
#: `code.train.py`.
_CODE_PROPERTIES = ("tree", "project", "commit", "diff")


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The compared properties of two attempts.

    A run that has not started has no attempt. For this run, the properties of the submitted spec
    and code are compared.
    """

    #: Mapping from dotted property names, such as `spec.env.SEED`, to the values in the first
    #: of the two compared attempts.
    first: Mapping[str, object]
    #: Mapping from dotted property names to the values in the second of the two attempts.
    second: Mapping[str, object]
    #: Sentence for the user about compared runs that have not started. Empty if both have started.
    note: str = ""
    #: For each of the two attempts: True if the spec of the attempt names submitted code.
    have_submitted_code: tuple[bool, bool] = (False, False)

    @property
    def differences(self) -> dict[str, tuple[object, object]]:
        """The properties whose values differ: a mapping from the name to both values.

        A missing property has the value None.
        """
        return {
            key: (self.first.get(key), self.second.get(key))
            for key in dict.fromkeys((*self.first, *self.second))
            if self.first.get(key) != self.second.get(key)
        }

    def describe(self) -> list[str]:
        """Return the differences as lines for people.

        A changed value is a line such as `progress.total 60 -> 80`. For an argument of a command,
        the line begins with the name of the option: `lr 6e-3 -> 7e-3`. Differences of the code have
        the format of `diff -u`.
        """
        differences = self.differences
        lines: list[str] = []
        compared_lists: set[str] = set()
        for key, (old, new) in differences.items():
            parent, _, last = key.rpartition(".")
            if key.startswith("spec.") and last.isdecimal():
                if parent not in compared_lists:
                    compared_lists.add(parent)
                    old_list = _get_list(self.first, parent)
                    lines += _describe_list(parent, old_list, _get_list(self.second, parent))
            elif key == "spec_file" and None in (old, new):
                lines.append(self._describe_start())
            elif not key.startswith("code.") and key not in ("tree", "diff"):
                lines.append(f"{key.removeprefix('spec.')} {_show(old)} -> {_show(new)}")
        return [*lines, *_describe_code(self.first, self.second, differences)]

    def _describe_start(self) -> str:
        """Return a line that says how each of the two runs was started."""
        parts: list[str] = []
        names = ("the first run", "the second run")
        attempts = (self.first, self.second)
        for name, properties, has_code in zip(
            names, attempts, self.have_submitted_code, strict=True
        ):
            if properties.get("spec_file") is not None:
                parts.append(f"{name} was started with muster train")
            elif has_code:
                parts.append(f"{name} was started by a worker (muster submit, or a deployment)")
            else:
                # Earlier versions of Muster did not record the spec file of `muster train`.
                parts.append(f"the record of {name} does not say how the run was started")
        return ", and ".join(parts)


def compare_attempts(first_name: str, second_name: str) -> Comparison:
    """Compare two attempts.

    If a run has not started, only its submitted spec and code are compared.

    Args:
        first_name: Name of an attempt, such as `RUN--a02`. The name of a run means its last
            attempt.
        second_name: Name of the attempt or run to compare with.

    Raises:
        BadArgument: The run has no such attempt. Or the run has not started, and the server does
            not answer.
        InvalidSpec: The run has not started, and its spec has faults.
    """
    pair = [_find_attempt(first_name), _find_attempt(second_name)]
    waiting = [found.run for found in pair if found.attempt is None]
    if not waiting:
        first, second = (_read_properties(found) for found in pair)
        specs = [_read_run_spec(found.run.place) for found in pair]
        comparison = _compare(first, second, specs)
        has_first_code, has_second_code = (_has_submitted_code(found) for found in pair)
        return replace(comparison, have_submitted_code=(has_first_code, has_second_code))
    states = [f"{run.run_id} has not started: it is {run.state}." for run in waiting]
    submitted_specs = [_read_submitted_spec(found) for found in pair]
    first, second = (
        _read_submitted_properties(found, spec)
        for found, spec in zip(pair, submitted_specs, strict=True)
    )
    specs = [
        to_plain_data(spec) if spec is not None else _read_run_spec(found.run.place)
        for found, spec in zip(pair, submitted_specs, strict=True)
    ]
    note = f"{' '.join(states)} Only the spec and the submitted code are compared."
    return _compare(first, second, specs, note)


def _compare(
    first: dict[str, object],
    second: dict[str, object],
    specs: Sequence[object],
    note: str = "",
) -> Comparison:
    """Return the comparison of two attempts.

    The spec files of the two runs are left out, because the values of the specs are compared.

    If a component is in only one of the specs, the start orders of the components are left out,
    because the keys of this component already show the difference.

    Args:
        first: Properties of the first attempt.
        second: Properties of the second attempt.
        specs: The specs of the two runs as plain data. None for an unknown spec.
        note: See `Comparison.note`.
    """
    left_out = _find_spec_properties(first, second, specs)
    first, second = (
        {key: value for key, value in properties.items() if key not in left_out}
        for properties in (first, second)
    )
    if _list_components(first) != _list_components(second):
        first, second = (
            {
                key: value
                for key, value in properties.items()
                if not key.startswith(f"spec.{START_ORDER_KEY}.")
            }
            for properties in (first, second)
        )
    return Comparison(first=first, second=second, note=note)


def _find_spec_properties(
    first: Mapping[str, object], second: Mapping[str, object], specs: Sequence[object]
) -> set[str]:
    """Return the names of the properties, such as `code.muster.yaml`, for the runs' spec files.

    Only the files that differ between the two attempts are searched.

    Args:
        first: Properties of the first attempt.
        second: Properties of the second attempt.
        specs: The specs of the two runs as plain data. None for an unknown spec.
    """
    names = [
        key.removeprefix("code.")
        for key in {*first, *second}
        if key.startswith("code.") and first.get(key) != second.get(key)
    ]
    return {
        f"code.{name}"
        for properties, spec in zip((first, second), specs, strict=True)
        for name in find_spec_files(properties, spec, names)
    }


def _list_components(properties: Mapping[str, object]) -> set[str]:
    """Return the names of the components in the spec of an attempt."""
    return {key.split(".")[2] for key in properties if key.startswith("spec.components.")}


def _show(value: object) -> str:
    if value is None:
        return "(none)"
    return str(value) or "(empty)"


def _get_list(properties: Mapping[str, object], path: str) -> list[str]:
    """Return a list in the spec, whose items are the properties `PATH.0`, `PATH.1` and so on."""
    items: list[str] = []
    while f"{path}.{len(items)}" in properties:
        items.append(str(properties[f"{path}.{len(items)}"]))
    return items


def _describe_list(path: str, first: Sequence[str], second: Sequence[str]) -> Iterator[str]:
    """Yield a line for each difference between two lists, such as the arguments of a command."""
    place = path.removeprefix("spec.")
    if place == START_ORDER_KEY:
        yield f"{place} {', '.join(first)} -> {', '.join(second)}"
        return
    old_units = _group_arguments(first)
    new_units = _group_arguments(second)
    removed: list[_Argument] = []
    added: list[_Argument] = []
    matcher = SequenceMatcher(None, old_units, new_units, autojunk=False)
    for kind, start, end, other_start, other_end in matcher.get_opcodes():
        if kind == "equal":
            continue
        olds = old_units[start:end]
        news = new_units[other_start:other_end]
        if len(olds) == len(news) and not any(unit.option for unit in (*olds, *news)):
            pairs = zip(olds, news, strict=True)
            yield from (f"{old.text} -> {new.text}  ({place})" for old, new in pairs)
        else:
            removed += olds
            added += news
    for old in removed:
        candidates = [new for new in added if new.option == old.option or new == old]
        if not candidates or not (old.option or old in candidates):
            yield f"{old.text} removed  ({place})"
            continue
        new = old if old in candidates else candidates[0]
        added.remove(new)
        yield f"{_describe_change(old, new)}  ({place})"
    yield from (f"{new.text} added  ({place})" for new in added)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Argument:
    """An option of a command with its values, or another argument of the command."""

    #: Name of the option with its dashes, such as `--lr`. For an argument such as `lr=6e-3`, the
    #: text before the equals sign. Empty for another argument.
    option: str = ""
    #: Values of the option. If the argument is not an option, the tuple contains only the argument.
    values: tuple[str, ...] = ()
    #: True if the option and its value are one word, such as `--lr=6e-3`.
    is_one_word: bool = False

    @property
    def text(self) -> str:
        """The words of the argument, as in a command line."""
        if self.is_one_word:
            return f"{self.option}={self.values[0]}"
        words = (self.option, *self.values) if self.option else self.values
        return " ".join(word or '""' for word in words)


def _group_arguments(words: Sequence[str]) -> list[_Argument]:
    """Return the arguments of a command. The words that follow an option are its values."""
    arguments: list[_Argument] = []
    for word in words:
        name, equals, value = word.partition("=")
        last = arguments[-1] if arguments else None
        if equals and _OPTION_NAME.fullmatch(name):
            arguments.append(_Argument(option=name, values=(value,), is_one_word=True))
        elif _OPTION.match(word):
            arguments.append(_Argument(option=word))
        elif last is not None and last.option and not last.is_one_word:
            arguments[-1] = replace(last, values=(*last.values, word))
        else:
            arguments.append(_Argument(values=(word,)))
    return arguments


def _describe_change(old: _Argument, new: _Argument) -> str:
    """Return a text such as `lr 6e-3 -> 7e-3` about an option that is in both commands.

    Args:
        old: The option in the first attempt.
        new: The same option in the second attempt. If its values are the same, the option has
            another position.
    """
    if old == new:
        return f"{old.text} moved"
    if old.values == new.values:
        # Only the spelling has changed, such as from `--lr=1e-3` to `--lr 1e-3`.
        return f"{old.text} -> {new.text}"
    old_values = old.values
    new_values = new.values
    if len(old_values) == len(new_values) and old_values[1:] == new_values[1:]:
        # Only the first value has changed. The words after this value may be other arguments.
        old_values = old_values[:1]
        new_values = new_values[:1]
    old_text, new_text = (_show(" ".join(values)) for values in (old_values, new_values))
    return f"{old.option.lstrip('-')} {old_text} -> {new_text}"


def _describe_code(
    first: Mapping[str, object],
    second: Mapping[str, object],
    differences: Mapping[str, tuple[object, object]],
) -> Iterator[str]:
    """Yield the lines of a unified diff between the code of two attempts, with secrets masked.

    Args:
        first: Properties of the first attempt.
        second: Properties of the second attempt.
        differences: The differences between these properties.
    """
    names = [key.removeprefix("code.") for key in differences if key.startswith("code.")]
    try:
        old_files = read_files(str(first.get("tree")))
        new_files = read_files(str(second.get("tree")))
    except (NoCode, OSError):
        # The stored code of one of the runs is missing. It was deleted, or it was never stored: an
        # earlier version of Muster did not store the code of runs that used the project's files
        # directly.
        if {"diff", "tree"} & differences.keys() or names:
            yield (
                "the code of the runs differs, but this machine does not have the code files of "
                "both runs"
            )
            patches = [str(properties.get("diff") or "") for properties in (first, second)]
            yield from _diff_texts("uncommitted changes", *patches)
        elif not (first.get("tree") and second.get("tree")):
            yield (
                "the code of the runs cannot be compared, because this machine does not have the "
                "code files of both runs"
            )
        return
    for name in sorted(names):
        old_mode, old_content = old_files.get(name, (0, b""))
        new_mode, new_content = new_files.get(name, (0, b""))
        if old_mode and new_mode and old_mode != new_mode:
            yield f"mode of {name} {old_mode:o} -> {new_mode:o}"
        try:
            lines = [
                *_diff_texts(
                    name,
                    old_content.decode(),
                    new_content.decode(),
                    is_new=name not in old_files,
                    is_deleted=name not in new_files,
                )
            ]
            yield from lines
            if not lines and name not in old_files:
                yield f"{name}: new empty file"
            elif not lines and name not in new_files:
                yield f"{name}: empty file removed"
            elif not lines and old_content != new_content:
                yield f"{name}: only the line ends differ"
        except UnicodeDecodeError:
            yield (
                f"{name}: not a text file; its size changes from {len(old_content)} to "
                f"{len(new_content)} bytes"
            )


def _diff_texts(
    name: str, old: str, new: str, *, is_new: bool = False, is_deleted: bool = False
) -> Iterator[str]:
    """Yield the lines of a unified diff between two versions of a file, with secrets masked.

    Args:
        name: Name of the file.
        old: Content of the file in the first attempt.
        new: Content of the file in the second attempt.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class _FoundAttempt:
    """An attempt that was found by its name."""

    run: Run
    #: Content of the run's `run.json`. None if the run has no record yet.
    record: RunJson | None
    #: The attempt. None if the run has not started.
    attempt: AttemptRecord | None


def _find_attempt(name: str) -> _FoundAttempt:
    """Return the attempt with a name such as `RUN--a02`, or the last attempt of a run.

    Raises:
        BadArgument: There is no such run, or the run has no such attempt.
    """
    match = _ATTEMPT_NAME.fullmatch(name)
    run = find_run(match[1] if match else name)
    record = find_record(run)
    attempts = record.attempts if record is not None else ()
    if match is None:
        return _FoundAttempt(run=run, record=record, attempt=attempts[-1] if attempts else None)
    for attempt in attempts:
        if attempt.number == int(match[2]):
            return _FoundAttempt(run=run, record=record, attempt=attempt)
    raise BadArgument(
        f"{run.run_id} has no attempt {int(match[2])}. To see the attempts: muster explain "
        f"{run.run_id}"
    )


def _has_submitted_code(found: _FoundAttempt) -> bool:
    """Return True if the spec of an attempt names submitted code.

    `muster submit` and deployments write the name of the code into the spec. The value `live` does
    not count, because a user can write `live` into any spec.
    """
    assert found.attempt is not None
    code = read_attempt_spec(found.run.place, found.attempt.number).get("code")
    return code not in (None, LIVE_CODE)


def _read_properties(found: _FoundAttempt) -> dict[str, object]:
    """Return the recorded spec, code, packages and host of an attempt.

    The result is a mapping from dotted property names to values.
    """
    assert found.record is not None and found.attempt is not None
    provenance = {**(found.record.provenance or {}), **found.attempt.provenance}
    project = str(provenance.get("project") or "")
    spec = _read_comparable_spec(found.run.place, found.attempt, project)
    return {**_flatten_spec(spec), **_flatten_provenance(provenance)}


def _read_run_spec(place: RunPlace) -> object:
    """Return the spec that a run stored in its directory, as plain data. None if unreadable.

    The placeholders in the spec are not replaced, and the secrets are masked.
    """
    with suppress(OSError, UnicodeDecodeError, yaml.YAMLError):
        return yaml.safe_load(place.spec.read_text(encoding="utf-8"))
    return None


def _read_submitted_spec(found: _FoundAttempt) -> RunSpec | None:
    """Return the submitted spec of a run, or None if no server sends the spec.

    Raises:
        InvalidSpec: The spec has faults.
    """
    if not may_have_prefect_server():
        return None
    # Import this module only if needed, because it imports Prefect, which takes seconds.
    from tasks.train.server_runs import read_submitted_spec

    return read_submitted_spec(found.run)


def _read_submitted_properties(found: _FoundAttempt, spec: RunSpec | None) -> dict[str, object]:
    """Return the submitted spec and code of a run.

    The result is a mapping from dotted property names to values.

    Args:
        found: The run.
        spec: The submitted spec, or None if no server sends the spec.

    Raises:
        BadArgument: The run has not started, and its spec is unknown.
    """
    recorded = _read_properties(found) if found.attempt is not None else {}
    if spec is None and not recorded:
        raise BadArgument(
            f"{found.run.run_id} has not started, and the Prefect server does not send the spec "
            "of the run"
        )
    if recorded:
        code = {
            key: value
            for key, value in recorded.items()
            if key in _CODE_PROPERTIES or key.startswith("code.")
        }
    else:
        code = _flatten_provenance(_read_submitted_code(spec.code if spec is not None else None))
    if spec is None:
        return {**{key: recorded[key] for key in recorded if key.startswith("spec.")}, **code}
    return {**_flatten_spec(to_plain_data(spec)), **code}


def _read_submitted_code(name: str | None) -> dict[str, object]:
    """Return the properties of submitted code, or an empty dict if this machine lacks the code.

    Args:
        name: Name of the code in the spec.
    """
    if name in (None, LIVE_CODE):
        return {}
    with suppress(NoCode, OSError):
        return asdict(read_code(name))
    return {}


def _flatten_spec(spec: object) -> dict[str, object]:
    """Return a mapping from dotted names, such as `spec.env.SEED`, to the values of a spec.

    The result contains neither the name of the stored code nor the run id. It always contains the
    order in which the components start. If the spec has no key for this order, the components start
    in the order of the spec.
    """
    left_out = ("spec.code", "spec.run_id")
    if isinstance(spec, Mapping):
        components = mapping_or_empty(spec.get("components"))
        order = [name for name, component in components.items() if component is not None]
        spec = {**spec, START_ORDER_KEY: spec.get(START_ORDER_KEY) or order}
    return {key: value for key, value in _flatten(spec, "spec") if key not in left_out}


def _flatten_provenance(provenance: Mapping[str, object]) -> dict[str, object]:
    """Return the code, packages and host of an attempt as a mapping from dotted names to values.

    An example of a name is `code.train.py`.
    """
    properties = dict(provenance)
    files: dict[str, str] = {}
    with suppress(NoCode, OSError):
        files = hash_files(str(properties.get("tree")))
    if files:
        # Leave out the recorded diff of the project: if the diff was long, only its beginning was
        # recorded. The hashes of all files show the differences exactly.
        properties.pop("diff", None)
    return dict(_flatten({**properties, "code": files}))


def _read_comparable_spec(place: RunPlace, attempt: AttemptRecord, project: str) -> object:
    """Return the spec of an attempt, with placeholders instead of paths, ports and the run id.

    Two equal specs can still differ in paths, ports and run ids. A comparison must not list these
    differences, so these values are replaced. A submitted run works in a copy of the project: the
    path of the project replaces the path of the copy. An empty text replaces the path of the
    checkpoint from which an attempt resumes, as in an attempt that does not resume.

    Args:
        place: Paths of the run's files.
        attempt: The attempt.
        project: Path of the project. Empty if unknown.
    """
    placeholders = {str(place.code): project} if project else {}
    if attempt.resume_from:
        # The value of `${attempt.resume_from}` is empty in an attempt that does not resume. Use an
        # empty text for an attempt that resumes, too, to make both kinds of attempts comparable.
        # This entry must come first, because the path of the checkpoint often starts with the path
        # of the run.
        placeholders = {attempt.resume_from: "", **placeholders}
    placeholders |= {
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
    """Yield the dotted path and the value of each leaf in nested mappings.

    Under the path `spec`, each item of a list is a leaf. Any other list is a single leaf.
    """
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield from _flatten(value, f"{path}.{key}".lstrip("."))
    elif isinstance(node, list) and path.startswith("spec"):
        yield from _flatten(dict(enumerate(node)), path)
    else:
        yield path, node
