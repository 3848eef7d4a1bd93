"""Find the metrics file that a Python script writes.

`muster init` uses this module for scripts that write their own metrics. The module reads the source
of the script, and does not run the script.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass
from itertools import chain

from tasks.spec.script_paths import PathReader, get_called_name
from tasks.spec.script_structure import adds_one, parse_source

#: Matches the name of a file with metrics.
_METRICS_NAME = re.compile(r"(?:metrics?|stats|history|progress|(?:train(?:ing)?_)?logs?)\.jsonl")


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenMetrics:
    """A metrics file that a script opens for writing."""

    #: Path of the metrics file, relative to the folder in `folder_attribute`. Example:
    #: `metrics.jsonl`.
    name: str
    #: Attribute of the parsed options that contains the path of the folder, such as `output_dir`
    #: for `args.output_dir`. Empty if the folder is unknown.
    folder_attribute: str = ""


def find_written_metrics(reader: PathReader) -> WrittenMetrics | None:
    """Return the metrics file that a Python script opens for writing.

    Args:
        reader: Reader of the script, and of the project's modules that the script imports.

    Returns:
        None if the script opens no such file, or several different files.
    """
    found = set(_find_files(reader))
    return found.pop() if len(found) == 1 else None


def find_json_keys(reader: PathReader) -> frozenset[str]:
    """Return the keys of all objects that a Python script writes as JSON.

    Args:
        reader: Reader of the script, and of the project's modules that the script imports.
    """
    return frozenset(key for key, _ in _list_json_items(reader))


def adds_one_to(key: str, reader: PathReader) -> bool:
    """Return True if the value of a JSON key is an expression such as `step + 1`.

    If a script with a loop over `range(20)` writes `{"step": step + 1}`, its last step is step 20.

    Args:
        key: Key of the objects that the script writes as JSON.
        reader: Reader of the script, and of the project's modules that the script imports.
    """
    values = [value for found_key, value in _list_json_items(reader) if found_key == key]
    return bool(values) and all(adds_one(value) for value in values)


def may_skip_steps(key: str, sources: Iterable[str]) -> bool:
    """Return True if a Python script may write a JSON key for only some of its steps.

    Example: the script writes `{"step": step}` after `if step % 10 == 0:`. The last written step is
    then often an earlier step than the last one of the training.

    Args:
        key: Key of the objects that the script writes as JSON, such as `step`.
        sources: Source texts of the script, and of the project's modules that the script imports. A
            text that is not valid Python is ignored.
    """
    trees = [tree for tree in map(parse_source, sources) if tree is not None]
    nodes = [node for tree in trees for node in ast.walk(tree)]
    functions = [node for node in nodes if isinstance(node, ast.FunctionDef)]
    # Functions that write the key, and functions that call such a function.
    writers: set[str] = set()
    while True:
        found = {node.name for node in functions if _writes(node.body, key, writers)}
        if found <= writers:
            break
        writers |= found
    return any(
        isinstance(node, ast.If) and _has_modulo(node.test) and _writes(node.body, key, writers)
        for node in nodes
    )


def _writes(statements: Iterable[ast.stmt], key: str, writers: Set[str]) -> bool:
    """Return True if statements write a JSON key, or call one of the functions that write it."""
    nodes = chain.from_iterable(map(ast.walk, statements))
    return any(
        isinstance(node, ast.Call)
        and (
            get_called_name(node) in writers
            or any(found_key == key for found_key, _ in _list_written_items(node))
        )
        for node in nodes
    )


def _has_modulo(test: ast.expr) -> bool:
    """Return True for a condition such as `step % 10 == 0`."""
    return any(
        isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mod) for node in ast.walk(test)
    )


def _list_json_items(reader: PathReader) -> Iterator[tuple[str, ast.expr]]:
    """Yield each key, with its value, of the objects that a Python script writes as JSON."""
    for expression, _ in reader.expressions:
        yield from _list_written_items(expression)


def _list_written_items(expression: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    """Yield each key, with its value, of the object that a call such as `json.dumps` writes."""
    match expression:
        case ast.Call(func=ast.Attribute(attr="dumps" | "dump"), args=[content, *_]):
            yield from _list_items(content)


def _list_items(content: ast.expr) -> Iterator[tuple[str, ast.expr]]:
    """Yield the keys and values of an object, such as `{"step": step}` or `dict(step=step)`."""
    match content:
        case ast.Dict(keys=keys, values=values):
            for key, value in zip(keys, values, strict=True):
                if isinstance(key, ast.Constant):
                    yield str(key.value), value
        case ast.Call(func=ast.Name(id="dict"), keywords=keywords):
            yield from ((item.arg, item.value) for item in keywords if item.arg is not None)


def _find_files(reader: PathReader) -> Iterator[WrittenMetrics]:
    """Yield the metrics files that a script and its modules open for writing."""
    for expression, scope in reader.expressions:
        opened = _find_opened_path(expression)
        if opened is None:
            continue
        path = reader.read(opened, scope)
        if not path.parts or not _METRICS_NAME.fullmatch(path.parts[-1]):
            continue
        if path.option and not path.suffix and path.fixed_parts == path.parts:
            yield WrittenMetrics(name="/".join(path.parts), folder_attribute=path.option)
        else:
            yield WrittenMetrics(name=path.parts[-1])


def _find_opened_path(node: ast.AST) -> ast.expr | None:
    """Return the path of a file that an expression opens for writing, or None."""
    match node:
        case ast.Call(func=ast.Name(id="open"), args=[path, *modes], keywords=keywords):
            pass
        case ast.Call(func=ast.Attribute(value=path, attr="open"), args=modes, keywords=keywords):
            pass
        case _:
            return None
    modes = [*modes[:1], *(keyword.value for keyword in keywords if keyword.arg == "mode")]
    is_written = any(
        isinstance(mode, ast.Constant) and re.match("[awx]", str(mode.value)) for mode in modes
    )
    return path if is_written else None
