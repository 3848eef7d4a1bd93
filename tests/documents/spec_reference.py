"""The reference of a spec: a section for each part, from the models that validate it."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml
from pydantic import BaseModel

from tasks.spec.formatting import markdown_table

Schema = Mapping[str, Any]

#: The path of the top of a spec.
ROOT = ""
#: How a part is called whose keys are names that the user gives, and one of a list.
_ANY_NAME = {"components": "NAME", "retry": "KIND", "rules": "NAME"}
_ANY_ITEM = "N"
_UNITS = {"_s": "seconds", "hours": "hours"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """One mapping of the spec."""

    #: From the top, `components.NAME.ready`; empty for the top itself.
    path: str
    #: Other paths at which the same mapping stands.
    also: tuple[str, ...]
    schema: Schema


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A value that the reference shows."""

    #: The path of the part that it is in.
    part: str
    key: str
    value: object


def reference(model: type[BaseModel]) -> str:
    """Every part with its keys, as Markdown."""
    return "\n\n".join(_Section(model, part).text() for part in parts(model))


def examples(model: type[BaseModel]) -> Iterator[Example]:
    """Every value that the reference shows as an example."""
    for part in parts(model):
        for key, schema in part.schema["properties"].items():
            for value in schema.get("examples", ())[:1]:
                yield Example(part=part.path, key=key, value=value)


@functools.cache
def parts(model: type[BaseModel]) -> tuple[Part, ...]:
    """The parts of a spec, each once, and after each what is within it."""
    root = model.model_json_schema()
    #: `found[model]`: the paths at which it stands.
    found: dict[str, list[str]] = {}

    def visit(path: str, schema: Schema) -> None:
        for key, one in schema["properties"].items():
            for suffix, name in _models_in(one, root):
                place = f"{path}.{key}{suffix}" if path else f"{key}{suffix}"
                found.setdefault(name, []).append(place)
                if len(found[name]) == 1:
                    visit(place, root["$defs"][name])

    visit(ROOT, root)
    top = Part(path=ROOT, also=(), schema=root)
    others = (
        Part(path=first, also=tuple(more), schema=root["$defs"][name])
        for name, (first, *more) in found.items()
    )
    return (top, *others)


def _models_in(schema: Schema, root: Schema) -> Iterator[tuple[str, str]]:
    """The parts that a key holds: what stands after the key in their path, and their model."""
    if (name := _model_of(schema, root)) is not None:
        yield "", name
    item = _model_of(schema.get("items", {}), root)
    if item is not None:
        yield f".{_ANY_ITEM}", item
    rest = schema.get("additionalProperties")
    if isinstance(rest, Mapping) and (name := _model_of(rest, root)) is not None:
        yield f".{_ANY_NAME[schema['title']]}", name
        for key, one in schema.get("properties", {}).items():
            other = _model_of(one, root)
            if other is not None and other != name:
                yield f".{key}", other


def _model_of(schema: Schema, root: Schema) -> str | None:
    one = _without_null(schema)
    name = one["$ref"].rpartition("/")[2] if "$ref" in one else None
    return name if name is not None and "properties" in root["$defs"][name] else None


@dataclass(frozen=True, slots=True)
class _Section:
    """The section of one part."""

    model: type[BaseModel]
    part: Part

    def text(self) -> str:
        part = self.part
        lines = [f"### {f'`{part.path}`' if part.path else 'The top'}", ""]
        if part.path:
            about = inspect.cleandoc(part.schema.get("description", "")).partition("\n\n")[0]
            lines += [" ".join(about.split()), ""]
        if part.also:
            lines += [f"The same at {', '.join(f'`{path}`' for path in part.also)}.", ""]
        required = part.schema.get("required", ())
        rows = [
            (f"`{key}`", self._kind(key, one), _default(one, key in required), _meaning(one))
            for key, one in part.schema["properties"].items()
        ]
        return "\n".join([*lines, markdown_table(("key", "value", "default", "meaning"), rows)])

    def _kind(self, key: str, schema: Schema) -> str:
        """What a value is, in words."""
        ways = [way for way in schema.get("anyOf", ()) if way.get("type") != "null"]
        if len(ways) > 1:
            return ", ".join(self._kind(key, way) for way in ways)
        one = _without_null(schema)
        match one:
            case {"$ref": ref}:
                place = self._place_of(ref)
                return f"[mapping](#{anchor(place)})" if place else "a kind of failure"
            case {"enum": allowed}:
                return ", ".join(f"`{value}`" for value in allowed)
            case {"const": value}:
                return "`true`" if value is True else f"`{value}`"
            case {"type": "boolean"}:
                return "`true`, `false`"
            case {"type": "integer" | "number" as kind}:
                unit = next((unit for end, unit in _UNITS.items() if key.endswith(end)), "number")
                return f"{'whole number' if kind == 'integer' else unit}{_bounds(one)}"
            case {"type": "string"}:
                return "text" + (f" like `{one['pattern'][1:-1]}`" if "pattern" in one else "")
            case {"type": "array", "items": {"$ref": ref}}:
                return f"[list of mappings](#{anchor(self._place_of(ref) or ROOT)})"
            case {"type": "array"}:
                return "list of texts"
            case {"type": "object"}:
                return self._mapping(key, one)
        return "any"

    def _place_of(self, ref: str) -> str | None:
        """The path of the part that a model is; None where it is none."""
        title = ref.rpartition("/")[2]
        return next((p.path for p in parts(self.model) if p.schema.get("title") == title), None)

    def _mapping(self, key: str, schema: Schema) -> str:
        if key in _ANY_NAME:
            path = ".".join(filter(None, [self.part.path, key, _ANY_NAME[key]]))
            return f"[mapping by name](#{anchor(path)})"
        rest = schema.get("additionalProperties")
        # A text, or the name of a secret, which its description tells of.
        ways = [rest, *rest.get("anyOf", ())] if isinstance(rest, Mapping) else []
        kinds = {way.get("type") for way in ways} - {None}
        return f"mapping of {'texts' if 'string' in kinds else 'numbers' if kinds else 'values'}"


def _meaning(schema: Schema) -> str:
    text = str(schema.get("description", ""))
    text = re.sub(r"(\$\{[^}]*\}|\b[A-Z]+_[A-Z_]+\b)(?!`)", r"`\1`", text)
    if shown := schema.get("examples"):
        text = f"{text} Example: `{in_a_line(shown[0])}`"
    return text


def _default(schema: Schema, is_required: bool) -> str:
    if is_required:
        return "**required**"
    value = schema.get("default")
    return "" if value is None or value == [] else f"`{in_a_line(value)}`"


def _bounds(schema: Schema) -> str:
    if "minimum" in schema:
        return f", {schema['minimum']:g} or more"
    return f" above {schema['exclusiveMinimum']:g}" if "exclusiveMinimum" in schema else ""


def _without_null(schema: Schema) -> Schema:
    ways = [way for way in schema.get("anyOf", ()) if way.get("type") != "null"]
    return ways[0] if ways else schema


def anchor(path: str) -> str:
    """That of the heading of a part, as GitHub makes it."""
    return path.lower().replace(".", "") if path else "the-top"


def in_a_line(value: object) -> str:
    """A value as a spec would write it, on one line."""
    text: str = yaml.safe_dump(value, default_flow_style=True, width=2**31, sort_keys=False)
    text = text.removesuffix("...\n").strip()
    # Braces stand in need of quotes, which the writer of YAML gives as single ones.
    return re.sub(r"'([^'\"]*)'", r'"\1"', text)
