"""Generate the reference of a spec, from the pydantic models that validate the spec.

The reference has a section with a table for each mapping of the spec.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import yaml
from pydantic import BaseModel

from tasks.show.markdown import markdown_table
from tasks.spec.values import list_key_schemas

Schema = Mapping[str, Any]

#: Path of the top-level mapping of a spec.
ROOT = ""
#: Mapping from a key to the placeholder for its subkeys. The user chooses the names of the subkeys.
#: For example, the path of a component is `components.NAME`.
_NAME_PLACEHOLDERS = {"components": "NAME", "retry": "KIND", "rules": "NAME", "evals": "NAME"}
#: Text that stands for the index of a list item in the path of a spec key.
_ITEM_PLACEHOLDER = "N"
#: Mapping from the ending of a key, such as `_s`, to the unit of its value.
_UNITS = {"_s": "seconds", "hours": "hours"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A mapping that a spec may contain. The mapping has its own section in the documentation."""

    #: Path of the mapping in the spec, for example `components.NAME.ready`. The top-level mapping
    #: has an empty path.
    path: str
    #: Other paths in the spec. The mappings at these paths have the same keys as the mapping at
    #: `path`.
    also: tuple[str, ...]
    #: JSON schema of this part of the spec.
    schema: Schema


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """An example value of a key in the documentation of a spec."""

    #: Path of the mapping that contains the key.
    part: str
    key: str
    value: object


def build_reference(model: type[BaseModel]) -> str:
    """Return Markdown about all keys of a spec. `model` is the pydantic model of the spec."""
    return "\n\n".join(_Section(model, part).text() for part in parts(model))


def examples(model: type[BaseModel]) -> Iterator[Example]:
    """Yield every example value in the documentation of a spec."""
    for part in parts(model):
        for key, schema in list_key_schemas(part.schema).items():
            for value in schema.get("examples", ())[:1]:
                yield Example(part=part.path, key=key, value=value)


@functools.cache
def parts(model: type[BaseModel]) -> tuple[Part, ...]:
    """Return the mappings of a spec. A mapping comes before the mappings that it contains.

    Mappings with the same pydantic model are one item, which lists the paths of these mappings.
    """
    root = model.model_json_schema()
    #: Mapping from the name of a pydantic model to the paths of the spec that this model validates.
    paths_of_model: dict[str, list[str]] = {}

    def visit(path: str, schema: Schema) -> None:
        for key, value_schema in list_key_schemas(schema).items():
            for suffix, name in _models_in(value_schema, root):
                value_path = f"{path}.{key}{suffix}" if path else f"{key}{suffix}"
                paths = paths_of_model.setdefault(name, [])
                paths.append(value_path)
                if len(paths) == 1:
                    visit(value_path, root["$defs"][name])

    visit(ROOT, root)
    top = Part(path=ROOT, also=(), schema=root)
    others = (
        Part(path=first, also=tuple(other_paths), schema=root["$defs"][name])
        for name, (first, *other_paths) in paths_of_model.items()
    )
    return (top, *others)


def _models_in(schema: Schema, root: Schema) -> Iterator[tuple[str, str]]:
    """Yield the pydantic models that the value of a key contains.

    These are the models of the value itself, of its list items and of its dictionary values.

    Args:
        schema: JSON schema of the value.
        root: JSON schema of the spec.

    Yields:
        Pairs: the place that the model validates, relative to the key, and the name of the model.
        The place is empty for the value itself, and `.N` for the items of a list.
    """
    if (name := _model_of(schema, root)) is not None:
        yield "", name
    item = _model_of(schema.get("items", {}), root)
    if item is not None:
        yield f".{_ITEM_PLACEHOLDER}", item
    other_values = schema.get("additionalProperties")
    if isinstance(other_values, Mapping) and (name := _model_of(other_values, root)) is not None:
        yield f".{_NAME_PLACEHOLDERS[schema['title']]}", name
        for key, value_schema in schema.get("properties", {}).items():
            special = _model_of(value_schema, root)
            if special is not None and special != name:
                yield f".{key}", special


def _lower_first_letter(text: str) -> str:
    """Return the text with a lower-case first letter, unless it begins with an abbreviation."""
    return text if text[1:2].isupper() else text[:1].lower() + text[1:]


def _model_of(schema: Schema, root: Schema) -> str | None:
    """Return the name of the pydantic model that validates a value, or None if there is no model.

    Args:
        schema: JSON schema of the value.
        root: JSON schema of the spec.
    """
    value_schema = _without_null(schema)
    if "$ref" not in value_schema:
        return None
    name = str(value_schema["$ref"].rpartition("/")[2])
    return name if "properties" in root["$defs"][name] else None


@dataclass(frozen=True, slots=True)
class _Section:
    """The section of the documentation about one mapping of the spec."""

    model: type[BaseModel]
    part: Part

    def text(self) -> str:
        """Return the Markdown of the section."""
        part = self.part
        lines = [f"### {f'`{part.path}`' if part.path else 'The top'}", ""]
        if part.path:
            description = inspect.cleandoc(part.schema.get("description", ""))
            first_paragraph = " ".join(description.partition("\n\n")[0].split())
            meaning, _, further_sentences = first_paragraph.partition(". ")
            meaning = _lower_first_letter(meaning.removesuffix("."))
            introduction = (
                f"The table lists the keys of `{part.path}` in the spec. "
                f"Meaning of `{part.path}`: {meaning}. "
            )
            lines += [(introduction + further_sentences).strip(), ""]
        if part.also:
            other_paths = ", ".join(f"`{path}`" for path in part.also)
            lines += [f"The same keys are allowed below {other_paths}.", ""]
        required = part.schema.get("required", ())
        rows = [
            (
                f"`{key}`",
                self._describe_value(key, schema),
                _describe_default(schema, key in required),
                _describe_meaning(schema),
            )
            for key, schema in list_key_schemas(part.schema).items()
        ]
        return "\n".join([*lines, markdown_table(("key", "value", "default", "meaning"), rows)])

    def _describe_value(self, key: str, schema: Schema) -> str:
        """Return a description of the values that a key may have, for example `whole number`."""
        alternatives = [item for item in schema.get("anyOf", ()) if item.get("type") != "null"]
        if len(alternatives) > 1:
            return ", ".join(self._describe_value(key, item) for item in alternatives)
        value_schema = _without_null(schema)
        match value_schema:
            case {"$ref": ref}:
                path = self._path_of(ref)
                return f"[mapping](#{make_anchor(path)})" if path else "a kind of failure"
            case {"enum": allowed}:
                return ", ".join(f"`{value}`" for value in allowed)
            case {"const": value}:
                return "`true`" if value is True else f"`{value}`"
            case {"type": "boolean"}:
                return "`true`, `false`"
            case {"type": "integer"}:
                return f"whole number{_describe_bounds(value_schema)}"
            case {"type": "number"}:
                units = (unit for ending, unit in _UNITS.items() if key.endswith(ending))
                return f"{next(units, 'number')}{_describe_bounds(value_schema)}"
            case {"type": "string", "pattern": pattern}:
                return f"text like `{pattern[1:-1]}`"
            case {"type": "string"}:
                return "text"
            case {"type": "array", "items": {"$ref": ref}}:
                return f"[list of mappings](#{make_anchor(self._path_of(ref) or ROOT)})"
            case {"type": "array"}:
                return "list of texts"
            case {"type": "object"}:
                return self._describe_mapping(key, value_schema)
        return "any"

    def _path_of(self, ref: str) -> str | None:
        """Return the path of the mapping that a `$ref` of a JSON schema names. None if unknown."""
        title = ref.rpartition("/")[2]
        all_parts = parts(self.model)
        return next((part.path for part in all_parts if part.schema.get("title") == title), None)

    def _describe_mapping(self, key: str, schema: Schema) -> str:
        """Return a description of a mapping with keys that the user chooses, such as names."""
        if key in _NAME_PLACEHOLDERS:
            path = ".".join(filter(None, [self.part.path, key, _NAME_PLACEHOLDERS[key]]))
            return f"[mapping by name](#{make_anchor(path)})"
        values = schema.get("additionalProperties")
        # A value that may be a text or a reference to a secret is described here as a text. The
        # description of the key explains the reference.
        alternatives = [values, *values.get("anyOf", ())] if isinstance(values, Mapping) else []
        types = {item.get("type") for item in alternatives} - {None}
        if "string" in types:
            return "mapping of texts"
        return "mapping of numbers" if types else "mapping of values"


def _describe_meaning(schema: Schema) -> str:
    """Return the description of a key, with its example value."""
    text = str(schema.get("description", ""))
    text = re.sub(r"(\$\{[^}]*\}|\b[A-Z]+_[A-Z_]+\b)(?!`)", r"`\1`", text)
    if example_values := schema.get("examples"):
        text = f"{text} Example: `{format_on_one_line(example_values[0])}`"
    return text


def _describe_default(schema: Schema, is_required: bool) -> str:
    """Return the default value of a key as Markdown; an empty string if the key has no default."""
    if is_required:
        return "**required**"
    value = schema.get("default")
    return "" if value is None or value == [] else f"`{format_on_one_line(value)}`"


def _describe_bounds(schema: Schema) -> str:
    """Return the lower bound of a number, or an empty string if there is no lower bound."""
    if "minimum" in schema:
        return f", {schema['minimum']:g} or more"
    return f" above {schema['exclusiveMinimum']:g}" if "exclusiveMinimum" in schema else ""


def _without_null(schema: Schema) -> Schema:
    """Return the first alternative of a schema that is not null.

    A schema without alternatives is returned unchanged.
    """
    alternatives = [item for item in schema.get("anyOf", ()) if item.get("type") != "null"]
    return alternatives[0] if alternatives else schema


def make_anchor(path: str) -> str:
    """Return the HTML anchor that GitHub makes for a section of the spec reference.

    Args:
        path: Dotted path of the mapping that the section describes. Empty for the whole spec.
    """
    return path.lower().replace(".", "") if path else "the-top"


def format_on_one_line(value: object) -> str:
    """Return a value as YAML on one line."""
    text: str = yaml.safe_dump(value, default_flow_style=True, width=2**31, sort_keys=False)
    text = text.removesuffix("...\n").strip()
    # PyYAML writes single quotes around texts with braces. The documents use double quotes.
    return re.sub(r"'([^'\"]*)'", r'"\1"', text)
