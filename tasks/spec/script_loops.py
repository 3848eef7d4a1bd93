"""Read the number of training steps from a loop in a Python script.

`muster init` uses this module if neither an option nor a setting of the script, such as
`max_steps=60`, contains the number of steps.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tasks.spec.script_structure import parse_source

#: Matches the name of the variable of a loop over the training steps.
_STEP_VARIABLE = re.compile(r"(?:global_|train_|training_)?(?:step|iteration|iter|it)")

#: Matches the names of functions whose loops do not train, such as `evaluate` or `run_validation`.
_NO_TRAINING = re.compile(r"(?:^|_)(?:eval|valid|test|sampl|generat|infer|predict|bench|warm)")
#: Statements and expressions that run their body several times.
_LOOPS = (
    ast.For,
    ast.AsyncFor,
    ast.While,
    ast.ListComp,
    ast.SetComp,
    ast.DictComp,
    ast.GeneratorExp,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLoop:
    """A loop over all steps of a training, with a known number of steps."""

    #: Number of training steps.
    total: int
    #: Number of the last training step. This is `total` if the loop counts from 1, and `total - 1`
    #: if it counts from 0.
    last_step: int


def find_step_loop(source: str) -> StepLoop | None:
    """Return the loop over the training steps in a Python script.

    The end of the loop must be known: a number, a name that the script sets once to a number, or a
    sum or difference of these. Examples are `for step in range(1, 21):` and
    `for step in range(STEPS):`.

    Args:
        source: Source text of the script.

    Returns:
        None if the number of steps is not clear. Examples are a loop in another loop, a loop in a
        function that a loop calls (directly or through other functions), and two loops with
        different numbers of steps. A loop in a function such as `evaluate` does not count.
    """
    tree = parse_source(source)
    if tree is None:
        return None
    try:
        constants = _read_constants(tree)
        repeated = _list_repeated_functions(tree)
        loops = {
            None if is_repeated else _read_loop(loop, constants)
            for loop, is_repeated in _list_step_loops(tree, repeated)
        }
    except RecursionError:
        return None
    return loops.pop() if len(loops) == 1 else None


def _list_step_loops(
    node: ast.AST, repeated: set[str], is_repeated: bool = False
) -> Iterator[tuple[ast.For, bool]]:
    """Yield each loop over training steps, and True if the loop may run several times.

    Args:
        node: Node of the syntax tree whose children are searched.
        repeated: Names of the functions that may run several times.
        is_repeated: True if the code in `node` may run several times.
    """
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.For) and _is_over_steps(child):
            yield child, is_repeated
        is_child_repeated = is_repeated or isinstance(child, _LOOPS)
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            if _NO_TRAINING.search(child.name):
                continue
            is_child_repeated = child.name in repeated
        yield from _list_step_loops(child, repeated, is_child_repeated)


def _is_over_steps(loop: ast.For) -> bool:
    is_named = isinstance(loop.target, ast.Name) and _STEP_VARIABLE.fullmatch(loop.target.id)
    return bool(is_named) and _find_range(loop.iter) is not None


def _find_range(expression: ast.expr) -> ast.Call | None:
    """Return the call of `range` in an expression such as `range(20)` or `tqdm(range(20))`."""
    if not isinstance(expression, ast.Call) or not isinstance(expression.func, ast.Name):
        return None
    if expression.func.id == "range":
        return expression
    return _find_range(expression.args[0]) if expression.args else None


def _read_loop(loop: ast.For, constants: Mapping[str, int]) -> StepLoop | None:
    """Return a description of a loop, or None if its number of steps is unknown.

    The first number of the loop may be unknown, for example in `range(start, 20)`. Then assume that
    `start` is 0 in a run without a checkpoint. So `range(start + 1, 21)` begins at 1.
    """
    call = _find_range(loop.iter)
    if call is None or call.keywords or len(call.args) not in (1, 2):
        return None
    stop = _evaluate(call.args[-1], constants)
    first: int | None = 0
    if len(call.args) == 2:
        first = _evaluate(call.args[0], constants)
        if first is None:
            first = 1 if _adds_one(call.args[0]) else 0
    if stop is None or first not in (0, 1) or stop <= first:
        return None
    return StepLoop(total=stop - first, last_step=stop - 1)


def _adds_one(expression: ast.expr) -> bool:
    """Return True for an expression such as `start + 1`."""
    match expression:
        case ast.BinOp(op=ast.Add(), right=ast.Constant(value=1)):
            return True
        case ast.BinOp(op=ast.Add(), left=ast.Constant(value=1)):
            return True
    return False


def _evaluate(expression: ast.expr, constants: Mapping[str, int]) -> int | None:
    """Return the value of a number, of a constant, or of a sum or difference. None if unknown."""
    match expression:
        case ast.Constant(value=bool()):
            return None
        case ast.Constant(value=int(value)):
            return value
        case ast.Name(id=name):
            return constants.get(name)
        case ast.BinOp(left=left, op=ast.Add() | ast.Sub() as operator, right=right):
            first = _evaluate(left, constants)
            second = _evaluate(right, constants)
            if first is None or second is None:
                return None
            return first + second if isinstance(operator, ast.Add) else first - second
    return None


def _read_constants(tree: ast.Module) -> dict[str, int]:
    """Return the names that a script sets exactly once, at its top level, to a whole number."""
    stored = [
        node.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load)
    ]
    stored += [node.arg for node in ast.walk(tree) if isinstance(node, ast.arg)]
    constants: dict[str, int] = {}
    for statement in tree.body:
        match statement:
            case (
                ast.Assign(targets=[ast.Name(id=name)], value=value)
                | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value)
            ):
                number = _evaluate(value, {})
                if number is not None and stored.count(name) == 1:
                    constants[name] = number
    return constants


def _list_repeated_functions(tree: ast.Module) -> set[str]:
    """Return the names of all functions and methods that loops call, directly or indirectly."""
    called_by: dict[str, set[str]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            called_by.setdefault(node.name, set()).update(_list_calls(node))
    repeated: set[str] = set()
    new = {
        name for loop in ast.walk(tree) if isinstance(loop, _LOOPS) for name in _list_calls(loop)
    }
    while new:
        repeated |= new
        new = set().union(*(called_by.get(name, ()) for name in new)) - repeated
    return repeated


def _list_calls(node: ast.AST) -> Iterator[str]:
    """Yield the name of each function or method that the code in a node calls."""
    for call in ast.walk(node):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name | ast.Attribute):
            yield call.func.id if isinstance(call.func, ast.Name) else call.func.attr
