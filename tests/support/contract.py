"""Public interface of Muster: spec keys, record keys, event names, exit codes, file names, verbs.

`python -m tests.support.contract` adds new keys to `tests/data/contract.json`. It refuses to
remove or change a key, because users' files and scripts would break without a warning.
"""

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from tasks.command import VERBS
from tasks.record.events import PAYLOADS
from tasks.record.places import RunPlace
from tasks.record.run_json import RunJson
from tasks.record.states import RunState
from tasks.server import flow_process
from tasks.spec.failure_kinds import FailureKind
from tasks.spec.pipeline import PipelineSpec
from tasks.spec.run import RunSpec
from tasks.spec.values import list_key_schemas

ROOT = Path(__file__).resolve().parents[2]
SAVED = ROOT / "tests" / "data" / "contract.json"


def current_contract() -> dict[str, Any]:
    """Return the current public interface of Muster, for example its verbs and exit codes.

    Each key begins with the name of a group, for example `verb: submit`.
    """
    contract: dict[str, Any] = {}
    for group, model in (("run spec", RunSpec), ("pipeline spec", PipelineSpec)):
        for path, value in _schema_keys(model):
            contract[f"{group}: {path}"] = value
    for path, _ in _schema_keys(RunJson):
        contract[f"run.json: {path}"] = True
    for event, keys in PAYLOADS.items():
        contract[f"Prefect event: {event}"] = sorted(keys)
    for event in _documented_run_events():
        contract[f"events.jsonl: {event}"] = True
    for kind in FailureKind:
        contract[f"failure kind: {kind.value}"] = True
    for state in RunState:
        contract[f"run state: {state.value}"] = True
    for name, value in vars(flow_process).items():
        if name.startswith("EXIT_"):
            contract[f"exit code: {name}"] = value
    contract |= {f"file: {name}": True for name in _file_names()}
    for verb, parameters in _verbs():
        contract[f"verb: {verb}"] = True
        contract |= {f"verb: {verb} {parameter}": True for parameter in parameters}
    return contract


def broken_promises(saved: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Return a line for each incompatible change of the public interface.

    A change is incompatible if a key of `saved` is missing in `current` or has another value there.
    An additional allowed value for a key is a compatible change.
    """
    broken = []
    for key, value in saved.items():
        if key not in current:
            broken.append(f"{key} is gone")
        elif current[key] != value and not _is_wider_choice(value, current[key]):
            broken.append(f"{key} was {value!r} and is {current[key]!r}")
    return broken


def _is_wider_choice(saved: Any, current: Any) -> bool:
    """Return True if the current `enum` schema allows all saved values and at least one more."""
    if not isinstance(saved, dict) or not isinstance(current, dict):
        return False
    values = saved.get("enum")
    wider = current.get("enum")
    if values is None or wider is None or not set(values) < set(wider):
        return False
    return {**saved, "enum": wider} == current


def _schema_keys(model: type[BaseModel]) -> Iterator[tuple[str, Any]]:
    """Yield each key of a pydantic model: the dotted name, and the JSON schema of the key.

    The JSON schema contains only the type, the default value and the allowed values.
    """
    schema = model.model_json_schema()
    definitions = schema.get("$defs", {})

    def walk(node: Any, path: str, seen: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
        if not isinstance(node, dict):
            return
        if reference := node.get("$ref"):
            if reference in seen:
                return
            name = reference.rpartition("/")[2]
            yield from walk(definitions[name], path, (*seen, reference))
            return
        for choice in ("anyOf", "oneOf", "allOf"):
            for option in node.get(choice, ()):
                yield from walk(option, path, seen)
        key_schemas = list_key_schemas(node) if "properties" in node else {}
        for key, value in key_schemas.items():
            own = f"{path}.{key}".lstrip(".")
            simple = {name: value[name] for name in ("type", "enum", "default") if name in value}
            yield own, simple
            yield from walk(value, own, seen)
        yield from walk(node.get("additionalProperties"), f"{path}.*", seen)
        yield from walk(node.get("items"), f"{path}[]", seen)

    yield from walk(schema, "", ())


def _documented_run_events() -> list[str]:
    """Return the event names in the table about `events.jsonl` in docs/events.md.

    `tests/unit/test_event_catalogue.py` checks that the table lists every event of the code.
    """
    page = (ROOT / "docs" / "events.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| ((?:`[a-z_.]+`(?:, )?)+) \|", page, flags=re.MULTILINE)
    names = {name for row in rows for name in re.findall(r"`([a-z_]+(?:\.[a-z_]+)+)`", row)}
    return sorted(name for name in names if not name.startswith("muster."))


def _file_names() -> list[str]:
    run = RunPlace.of("RUN", Path("HOME"))
    attempt = run.attempt(1)
    paths = [
        run.record,
        run.evaluations,
        run.lineage,
        attempt.spec,
        attempt.events,
        attempt.submission,
        attempt.fleet_events,
        attempt.log("trainer"),
    ]
    return [str(path) for path in paths]


def _verbs() -> Iterator[tuple[str, list[str]]]:
    for verbs in VERBS.values():
        for verb in verbs:
            module, _, attribute = verb.function.partition(":")
            function = getattr(importlib.import_module(module), attribute)
            if inspect.isfunction(function):
                parameters = sorted(inspect.signature(function).parameters)
            else:
                parameters = sorted(f"{word}" for word in function if not word.startswith("-"))
            for name in (verb.name, *verb.former_names):
                yield name, parameters


def main() -> None:
    current = current_contract()
    saved = json.loads(SAVED.read_text(encoding="utf-8")) if SAVED.exists() else {}
    if broken := broken_promises(saved, current):
        raise SystemExit("\n".join(broken))
    rows = [
        f"{json.dumps(key)}: {json.dumps(value, default=str)}"
        for key, value in sorted({**saved, **current}.items())
    ]
    text = ",\n".join(rows)
    SAVED.write_text(f"{{\n{text}\n}}\n", encoding="utf-8")
    print(f"{len(current)} keys, {len(set(current) - set(saved))} of them new")


if __name__ == "__main__":
    main()
