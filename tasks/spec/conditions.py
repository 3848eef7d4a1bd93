"""Parse and evaluate the key `when` of a pipeline's stage, such as `${stage.eval.result.x} > 0.6`.

A condition is a small part of Python: literals, comparisons, `and`, `or`, `not`, `in`, arithmetic
of numbers, and placeholders. It has no names, no attributes and no calls, so evaluating a condition
never runs code of its author.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tasks.spec.placeholders import substitute
from tasks.spec.values import describe_value, is_number, shorten

#: Longest allowed condition, in characters. This also limits how deeply parentheses can be nested.
MAX_LENGTH = 500
#: Beginning of the variable names that replace placeholders before the condition is parsed.
_VARIABLE = "stage_value_"
#: Values of the words `true`, `false` and `null`, which a condition may contain.
_CONSTANTS: Mapping[str, object] = {"true": True, "false": False, "null": None}

_ARITHMETIC: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
_ORDERINGS: Mapping[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_HELP = "write for example ${stage.eval.result.score} > 0.6"


class InvalidCondition(ValueError):
    """A condition uses forbidden Python syntax, or its operators do not fit its values.

    Args:
        problem: Description of the mistake, with the value that was found.
        remedy: Correct form that the user should write instead.
    """

    def __init__(self, problem: str, remedy: str = _HELP) -> None:
        super().__init__(problem)
        self.problem = problem
        self.remedy = remedy


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """A parsed condition in which placeholders do not have values yet."""

    #: The condition as the user wrote it.
    text: str
    #: Names in the placeholders of the condition, such as `stage.eval.result.score`.
    names: tuple[str, ...]
    #: Syntax tree of the condition. The variable `stage_value_N` stands for the N-th name in
    #: `names`.
    tree: ast.expr

    def evaluate(self, value_of: Callable[[str], object]) -> bool:
        """Return True if the condition is true.

        Args:
            value_of: Function that returns the value of a placeholder with a certain name, as plain
                JSON data.

        Raises:
            InvalidCondition: The values do not fit the operators. For example, a text is compared
                with a number.
        """
        values = {f"{_VARIABLE}{index}": value_of(name) for index, name in enumerate(self.names)}
        return bool(_evaluate(self.tree, {**_CONSTANTS, **values}))


def parse_condition(text: str) -> Condition:
    """Return the parsed condition of a pipeline stage.

    Args:
        text: Value of the stage's key `when`, such as `${stage.eval.result.score} > 0.6`.

    Raises:
        InvalidCondition: The text is not a condition.
    """
    if len(text) > MAX_LENGTH:
        raise InvalidCondition(f"must have at most {MAX_LENGTH} characters, found {len(text)}")
    if "$${" in text:
        raise InvalidCondition(
            "must not contain `$${`", "write ${NAME} to use the value of a placeholder"
        )
    if _VARIABLE in text:
        raise InvalidCondition(f"must not contain the name {_VARIABLE}, which only Muster uses")
    names: list[str] = []

    def make_variable(name: str) -> str:
        names.append(name)
        return f" {_VARIABLE}{len(names) - 1} "

    python_text = substitute(text, make_variable)
    if "${" in python_text:
        raise InvalidCondition(
            "a placeholder begins with `${`, but has no closing `}`", "add the `}`"
        )
    try:
        tree = ast.parse(python_text.strip(), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        reason = error.msg if isinstance(error, SyntaxError) else str(error)
        raise InvalidCondition(f"must be a condition, found {shorten(text)!r}: {reason}") from None
    _check_node(tree)
    return Condition(text=text, names=tuple(names), tree=tree)


def _check_node(node: ast.AST) -> None:
    """Raise InvalidCondition if a node of the syntax tree is not allowed in conditions."""
    match node:
        case ast.Constant(value=value):
            if isinstance(value, str) and _VARIABLE in value:
                raise InvalidCondition(
                    "a placeholder is in quotes", "write the placeholder without quotes"
                )
            if not isinstance(value, bool | int | float | str | None):
                raise InvalidCondition(
                    f"the literal {value!r} is not allowed",
                    "write a number, a text, true, false or null",
                )
        case ast.Name(id=name):
            if name not in _CONSTANTS and not name.startswith(_VARIABLE):
                raise InvalidCondition(
                    f"the name {name!r} is not allowed",
                    "put a text in quotes, and write a value of a stage as "
                    "${stage.NAME.result.KEY}",
                )
        case ast.BoolOp(values=operands) | ast.List(elts=operands) | ast.Tuple(elts=operands):
            for operand in operands:
                _check_node(operand)
        case ast.UnaryOp(op=ast.Not() | ast.USub() | ast.UAdd(), operand=operand):
            _check_node(operand)
        case ast.BinOp(left=left, op=operation, right=right) if type(operation) in _ARITHMETIC:
            _check_node(left)
            _check_node(right)
        case ast.Compare(left=left, ops=operations, comparators=others):
            if any(isinstance(operation, ast.Is | ast.IsNot) for operation in operations):
                raise InvalidCondition("`is` is not allowed", "write ==")
            for operand in (left, *others):
                _check_node(operand)
        case _:
            raise InvalidCondition(
                f"`{shorten(ast.unparse(node))}` is not allowed in a condition",
                "use only comparisons, arithmetic, literals, placeholders, `and`, `or`, `not` and "
                "`in`",
            )


def _evaluate(node: ast.expr, values: Mapping[str, object]) -> Any:
    """Return the value of a part of a condition. The syntax of the part was checked before.

    Args:
        node: Part of the syntax tree.
        values: Mapping from the names of variables, and of constants such as `true`, to values.
    """
    match node:
        case ast.Constant(value=value):
            return value
        case ast.Name(id=name):
            return values[name]
        case ast.List(elts=items) | ast.Tuple(elts=items):
            return [_evaluate(item, values) for item in items]
        case ast.BoolOp(op=ast.And(), values=operands):
            return all(_evaluate(operand, values) for operand in operands)
        case ast.BoolOp(values=operands):
            return any(_evaluate(operand, values) for operand in operands)
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return not _evaluate(operand, values)
        case ast.UnaryOp(op=operation, operand=operand):
            number = _require_number(_evaluate(operand, values))
            return -number if isinstance(operation, ast.USub) else number
        case ast.BinOp(left=left, op=operation, right=right):
            first = _require_number(_evaluate(left, values))
            second = _require_number(_evaluate(right, values))
            try:
                return _ARITHMETIC[type(operation)](first, second)
            except (ZeroDivisionError, OverflowError) as error:
                raise InvalidCondition(
                    f"`{ast.unparse(node)}` cannot be computed: {error}"
                ) from None
        case ast.Compare(left=left, ops=operations, comparators=others):
            operands = [_evaluate(operand, values) for operand in (left, *others)]
            pairs = zip(operations, operands[:-1], operands[1:], strict=True)
            return all(_compare(operation, first, second) for operation, first, second in pairs)
    raise AssertionError(
        f"fault of Muster: the condition was evaluated, but never checked: {ast.dump(node)}"
    )


def _compare(operation: ast.cmpop, first: Any, second: Any) -> bool:
    """Return the result of one comparison.

    Raises:
        InvalidCondition: The values cannot be compared by this operator.
    """
    if isinstance(operation, ast.Eq):
        return bool(first == second)
    if isinstance(operation, ast.NotEq):
        return bool(first != second)
    if isinstance(operation, ast.In | ast.NotIn):
        if not isinstance(second, list | Mapping) and not (
            isinstance(first, str) and isinstance(second, str)
        ):
            problem = f"{describe_value(first)} cannot be searched in {describe_value(second)}"
            raise InvalidCondition(problem)
        is_contained = first in list(second) if not isinstance(second, str) else first in second
        return is_contained is isinstance(operation, ast.In)
    are_texts = isinstance(first, str) and isinstance(second, str)
    if not are_texts and not (is_number(first) and is_number(second)):
        problem = f"{describe_value(first)} cannot be compared with {describe_value(second)}"
        raise InvalidCondition(problem)
    return _ORDERINGS[type(operation)](first, second)


def _require_number(value: object) -> float:
    """Return the value if it is a number, otherwise raise InvalidCondition."""
    if not is_number(value):
        raise InvalidCondition(f"arithmetic needs numbers, found {describe_value(value)}")
    return value
