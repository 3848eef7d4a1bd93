"""Show wrong values in the faults of a spec as the YAML file spells them.

YAML 1.1 reads `on` as true and `1.0e3` as text. A fault that only names the value that was read
would confuse a user who wrote `on`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import yaml

from tasks.spec.errors import Fault, InvalidSpec
from tasks.spec.values import EXPONENT, describe_value, explain_boolean, suggest_number

#: YAML tags of Booleans and of texts.
_BOOL = "tag:yaml.org,2002:bool"
_STR = "tag:yaml.org,2002:str"
#: Matches the problem of a fault if a number is expected.
_EXPECTS_NUMBER = re.compile(r"must be a (?P<whole>whole )?number")
#: Spellings that YAML 1.1 reads as true, in lower case. Other spellings of Booleans mean false.
_TRUE = ("true", "yes", "on")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spelling:
    """A value without quotes in a YAML file."""

    #: Text in the file, such as `on`.
    text: str
    #: Value that YAML reads, such as True. If the value is a text, it equals `text`.
    value: bool | str


def list_spellings(node: yaml.Node | None) -> dict[str, Spelling]:
    """Return the Booleans and the texts without quotes in a YAML document, by their dotted paths.

    Args:
        node: Root node of the document, or None. If a value is an alias of another value, only one
            of the two paths is included.
    """
    spellings: dict[str, Spelling] = {}
    visited: set[int] = set()
    nodes: list[tuple[str, yaml.Node | None]] = [("", node)]
    while nodes:
        path, current = nodes.pop()
        if id(current) in visited:
            continue
        visited.add(id(current))
        if isinstance(current, yaml.MappingNode):
            nodes += [
                (f"{path}.{key.value}" if path else str(key.value), value)
                for key, value in current.value
                if isinstance(key, yaml.ScalarNode)
            ]
        elif isinstance(current, yaml.SequenceNode):
            nodes += [(f"{path}.{index}", item) for index, item in enumerate(current.value)]
        elif isinstance(current, yaml.ScalarNode) and current.style is None:
            text = current.value
            if current.tag == _BOOL:
                spellings[path] = Spelling(text=text, value=text.lower() in _TRUE)
            elif current.tag == _STR:
                spellings[path] = Spelling(text=text, value=text)
    return spellings


@contextmanager
def quote_spellings(read_spellings: Callable[[], Mapping[str, Spelling]]) -> Iterator[None]:
    """Catch an `InvalidSpec`, and raise a copy that quotes the values as in the file.

    Args:
        read_spellings: Function that returns the spellings in the spec, by their dotted paths. It
            is called only if the spec has faults.

    Raises:
        InvalidSpec: The spec has faults.
    """
    try:
        yield
    except InvalidSpec as error:
        spellings = read_spellings()
        faults = (_quote_spelling(fault, spellings.get(fault.path)) for fault in error.faults)
        raise InvalidSpec(tuple(faults), error.source) from None


def _quote_spelling(fault: Fault, spelling: Spelling | None) -> Fault:
    """Return a fault with the spelling of the wrong value, or the fault itself.

    The spelling is used only if the fault names the value from the file. If the value was replaced
    after the file was read, the fault names the new value, and is returned unchanged.
    """
    if spelling is None:
        return fault
    found = f"found {describe_value(spelling.value)}"
    if found not in fault.problem:
        return fault
    if isinstance(spelling.value, bool):
        meaning = describe_value(spelling.value)
        quoted = f"found {spelling.text}, which YAML 1.1 reads as {meaning}"
        if spelling.text.lower() == meaning:
            quoted = found
        old_remedy = explain_boolean(spelling.value)
        new_remedy = f'write "{spelling.text}"'
    elif expected := _EXPECTS_NUMBER.search(fault.problem):
        quoted = found
        if EXPONENT.fullmatch(spelling.text):
            quoted = f"found {spelling.text}, which YAML 1.1 reads as text"
        is_whole = expected["whole"] is not None
        old_remedy = suggest_number(spelling.text, is_whole=is_whole)
        new_remedy = suggest_number(spelling.text, is_whole=is_whole, has_quotes=False)
    else:
        return fault
    # In a fault about a matrix, the text of the problem contains the remedy.
    problem = fault.problem.replace(found, quoted).replace(old_remedy, new_remedy)
    return replace(fault, problem=problem, remedy=fault.remedy.replace(old_remedy, new_remedy))
