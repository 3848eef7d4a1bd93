"""Reading YAML without its traps: what was written is what is meant, or a fault.

Unlike plain PyYAML a key that is written twice and a date are faults, `022`, `0x10`, `1_000` and
`12:30` are texts, and a number remembers how it was written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import yaml

from tasks.spec.errors import Fault, InvalidSpec
from tasks.spec.values import WrittenFloat

_FLOAT = re.compile(r"[-+]?(?:[0-9]+\.[0-9]*(?:[eE][-+][0-9]+)?|\.[0-9]+(?:[eE][-+][0-9]+)?)")
_NO_NUMBER = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")
_INT = re.compile(r"0|-?[1-9][0-9]*")

_TAG = "tag:yaml.org,2002:"


class _Loader(yaml.SafeLoader):
    """SafeLoader with plain decimal numbers only."""


# A table of its own: SafeLoader's is shared by every program in the process.
_Loader.yaml_implicit_resolvers = {
    letter: [(tag, rule) for tag, rule in rules if tag not in (f"{_TAG}int", f"{_TAG}float")]
    for letter, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(f"{_TAG}int", re.compile(f"(?:{_INT.pattern})$"), list("-0123456789"))
_Loader.add_implicit_resolver(
    f"{_TAG}float",
    re.compile(f"(?:{_FLOAT.pattern}|{_NO_NUMBER.pattern})$"),
    list("-+.0123456789"),
)


def _written_float(loader: _Loader, node: yaml.ScalarNode) -> float:
    return WrittenFloat.of(node.value, loader.construct_yaml_float(node))


_Loader.add_constructor(f"{_TAG}float", _written_float)


def read_text(path: Path) -> str:
    """The text of a file.

    Raises:
        InvalidSpec: It is not there, not a file, may not be read, or is not UTF-8.
    """
    try:
        return path.read_bytes().decode("utf-8-sig")
    except FileNotFoundError:
        fault = Fault(path="", problem="there is no such file")
    except IsADirectoryError:
        fault = Fault(path="", problem="it is a directory", remedy="name the YAML file in it")
    except OSError as error:
        fault = Fault(path="", problem=f"it cannot be read: {error.strerror}")
    except UnicodeDecodeError as error:
        problem = f"not UTF-8: byte {error.object[error.start]:#04x} at offset {error.start}"
        fault = Fault(path="", problem=problem, remedy="save it as UTF-8")
    raise InvalidSpec((fault,), str(path))


def parse(text: str) -> tuple[object, tuple[Fault, ...]]:
    """The plain data of a YAML text, and what can be said against it although it was read.

    Nothing is read where the text is no YAML: then the data are None and there is one fault.
    """
    loader: _Loader | None = None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:
            return None, (Fault(path="", problem="it is empty"),)
        faults = tuple(_traps(node, "", set()))
        return loader.construct_document(node), faults
    except yaml.YAMLError as error:
        return None, (_syntax_fault(error, text),)
    except RecursionError:
        return None, (Fault(path="", problem="it is nested too deeply"),)
    except (ValueError, TypeError, AttributeError) as error:
        # PyYAML's constructors let these through: the 31st of February, !!float on a word.
        return None, (Fault(path="", problem=f"a value cannot be read: {error}"),)
    finally:
        if loader is not None:
            loader.dispose()


def _traps(node: yaml.Node, path: str, seen: set[int]) -> Iterator[Fault]:
    """Keys that are written twice: PyYAML keeps the last and says nothing."""
    if id(node) in seen:  # an alias
        return
    seen.add(id(node))
    if isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            yield from _traps(item, _joined(path, str(index)), seen)
    if isinstance(node, yaml.MappingNode):
        lines: dict[str, int] = {}
        for key, value in node.value:
            name = key.value if isinstance(key, yaml.ScalarNode) else ""
            line = key.start_mark.line + 1
            below = _joined(path, name)
            if name and name in lines:
                problem = f"written twice, in lines {lines[name]} and {line}"
                yield Fault(path=below, problem=problem, remedy="keep one")
            lines.setdefault(name, line)
            yield from _traps(value, below, seen)


def _joined(path: str, key: str) -> str:
    return f"{path}.{key}" if path else key


def _syntax_fault(error: yaml.YAMLError, text: str) -> Fault:
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    if mark is None:
        return Fault(path="", problem=f"not YAML: {' '.join(str(error).split())}")
    lines = text.splitlines()
    line = lines[mark.line] if mark.line < len(lines) else ""
    place = f"line {mark.line + 1}, column {mark.column + 1}"
    if "\t" in line[: mark.column + 1]:
        return Fault(path="", problem=f"{place}: a tab", remedy="indent with spaces")
    said = getattr(error, "problem", None) or getattr(error, "context", None) or "not YAML"
    remedy = ""
    if "single document" in str(getattr(error, "context", "")):
        said, remedy = "a second document begins here", "keep one to a file"
    elif re.search(r"(?<![\"'\w])\$\{", line):
        remedy = 'quote what has a placeholder: "${api.port}"'
    return Fault(path="", problem=f"{place}: {said}", remedy=remedy)
