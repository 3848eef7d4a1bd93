"""Read from the source of a Python script to which metrics file the script writes.

`muster init` uses this module for scripts that write their own metrics. The script is not run.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from tasks.spec.script_structure import parse_source

#: Matches the name of a file with metrics.
_METRICS_NAME = re.compile(r"(?:metrics?|stats|history|progress|(?:train(?:ing)?_)?logs?)\.jsonl")
#: Functions that return the path in their first argument. Further arguments are appended.
_PATH_FUNCTIONS = ("Path", "str", "fspath", "join", "abspath", "realpath", "expanduser")
#: Methods of a path that return the same path in another form.
_PATH_METHODS = ("absolute", "resolve", "expanduser")
#: Largest number of nested expressions that are followed, so that `x = x / "a"` ends.
_MAX_DEPTH = 10
#: Part of a path whose value is unknown.
_UNKNOWN = "?"


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenMetrics:
    """A metrics file that a script opens for writing."""

    #: Path of the file relative to the folder, such as `metrics.jsonl`.
    name: str
    #: Attribute with the folder of the file in the parsed options of the script, such as
    #: `output_dir` for `args.output_dir`. Empty if the folder is unknown.
    folder_attribute: str = ""


def find_written_metrics(sources: Iterable[str]) -> WrittenMetrics | None:
    """Return the metrics file that a Python script opens for writing.

    Args:
        sources: Source texts of the script, and of the project's modules that the script imports.
            A text that is not valid Python is ignored.

    Returns:
        None if the script opens no such file, or several different files.
    """
    found: set[WrittenMetrics] = set()
    for tree in map(parse_source, sources):
        if tree is not None:
            found.update(_find_in_tree(tree))
    return found.pop() if len(found) == 1 else None


def _find_in_tree(tree: ast.Module) -> Iterator[WrittenMetrics]:
    """Yield the metrics files that a module opens for writing."""
    assigned = _find_assignments(tree)
    for node in ast.walk(tree):
        path = _find_opened_path(node)
        if path is None:
            continue
        root, *parts = _read_path(path, assigned)
        if not _METRICS_NAME.fullmatch((parts or [root])[-1].rpartition("/")[2]):
            continue
        if root.startswith("$") and not any(part.startswith(("$", _UNKNOWN)) for part in parts):
            yield WrittenMetrics(name="/".join(parts), folder_attribute=root.removeprefix("$"))
        else:
            yield WrittenMetrics(name=(parts or [root])[-1])


def _find_assignments(tree: ast.Module) -> dict[str, ast.expr]:
    """Return the value of each variable that has exactly one assignment, by the variable's name."""
    values: dict[str, list[ast.expr]] = {}
    for node in ast.walk(tree):
        match node:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                values.setdefault(name, []).append(value)
            case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value):
                values.setdefault(name, []).append(value)
    return {name: options[0] for name, options in values.items() if len(options) == 1}


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


def _read_path(
    node: ast.expr, assigned: Mapping[str, ast.expr], depth: int = _MAX_DEPTH
) -> list[str]:
    """Return the parts of a path.

    Args:
        node: Expression with the path.
        assigned: Values of variables, by the name of the variable.
        depth: Number of nested expressions that may still be followed.

    Returns:
        At least one part. A part is a text of the source, `$NAME` for the attribute NAME of a
        variable, or `_UNKNOWN`.
    """
    if depth == 0:
        return [_UNKNOWN]

    def read_all(nodes: Iterable[ast.expr]) -> list[str]:
        return [part for node in nodes for part in _read_path(node, assigned, depth - 1)]

    match node:
        case ast.Constant(value=str(text)) if text:
            return [text.strip("/") or text]
        case ast.Attribute(value=ast.Name(), attr=name):
            return [f"${name}"]
        case ast.Name(id=name) if name in assigned:
            return read_all([assigned[name]])
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            return read_all([left, right])
        case ast.JoinedStr(
            values=[ast.FormattedValue(value=folder), ast.Constant(value=str(text))]
        ):
            return [*read_all([folder]), text.strip("/")] if text[:1] == "/" else [_UNKNOWN]
        case ast.Call(func=ast.Attribute(value=path, attr=name), args=[]) if name in _PATH_METHODS:
            return read_all([path])
        case ast.Call(func=ast.Name(id=name) | ast.Attribute(attr=name), args=[_, *_] as paths) if (
            name in _PATH_FUNCTIONS
        ):
            return read_all(paths)
    return [_UNKNOWN]
