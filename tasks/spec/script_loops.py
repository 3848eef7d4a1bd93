"""Read the number of training steps from a loop in a Python script.

`muster init` uses this module if neither an option nor a setting of the script, such as
`max_steps=60`, contains the number of steps. A wrong number is worse than none. So the rules are
strict, and a script with an unusual structure has no number.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from tasks.spec.script_structure import adds_one, parse_source

#: Matches the name of the variable of a loop over the training steps.
_STEP_VARIABLE = re.compile(r"(?:global_|train_|training_)?(?:step|iteration|iter|it)")
#: Matches the head of a loop that may train, but is no loop over steps. Example:
#: `epoch in range(3)`.
_TRAINING_LOOP = re.compile(r"epoch|batch|step|iter|update|loader")
#: Matches the names of functions and classes whose loops do not train, such as `evaluate`.
_NO_TRAINING = re.compile(
    r"(?i)(?:^|_)(?:eval|valid|test|sampl|generat|infer|predict|bench|warm)|Evaluat|Inference"
)
#: Methods that train a model.
_TRAINING_METHODS = ("backward", "fit", "learn")
#: Functions that start another function once, or once for each rank.
_STARTERS = ("Fire", "Process", "remote", "run", "spawn", "start_processes")
_LOOPS = (ast.For, ast.AsyncFor, ast.While)
#: Statements and expressions that run their code several times.
_REPEATING = (*_LOOPS, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.Lambda)
_Function = ast.FunctionDef | ast.AsyncFunctionDef


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
        None if the number of steps is not clear. Examples are a loop in another loop, a loop with
        a `break`, a loop in a function that may be called several times, and a script with a second
        loop that may train. Loops in functions such as `evaluate` do not count.
    """
    tree = parse_source(source)
    if tree is None:
        return None
    try:
        loops = [loop for loop in _list_outer_loops(tree) if _may_train(loop)]
        if len(loops) != 1 or _may_end_early(loops[0]) or _trains_elsewhere(tree, loops[0]):
            return None
        return _read_loop(loops[0], _read_constants(tree))
    except RecursionError:
        return None


def may_end_early(source: str) -> bool:
    """Return True if a loop over the steps of a Python script has a `break` or `return`.

    A `while` loop counts, too.
    """
    tree = parse_source(source)
    if tree is None:
        return False
    return any(
        (isinstance(node, ast.While) or (isinstance(node, ast.For) and _is_over_steps(node)))
        and _may_end_early(node)
        for node in ast.walk(tree)
    )


def _list_outer_loops(tree: ast.Module) -> Iterator[ast.stmt]:
    """Yield each loop that is in no other loop, and that the script starts at most once.

    A loop in a function is left out if another loop calls the function, if the script mentions the
    function several times, or if the script uses the function as a value, such as an argument.
    """
    started = {*_list_started(tree)}
    uses: dict[str, list[bool]] = {}
    for node, is_repeated in _list_uses(tree):
        uses.setdefault(_get_name(node), []).append(node in started and not is_repeated)

    def search(node: ast.AST) -> Iterator[ast.stmt]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, _LOOPS):
                yield child
            elif isinstance(child, _Function | ast.ClassDef):
                is_repeated = isinstance(child, _Function) and uses.get(child.name) != [True]
                if not is_repeated and not _NO_TRAINING.search(child.name):
                    yield from search(child)
            else:
                yield from search(child)

    yield from search(tree)


def _list_started(tree: ast.Module) -> Iterator[ast.expr]:
    """Yield each called function, and each function that is started in another way.

    Example: `Process(target=train)` and `train.remote()` start the function `train`.
    """
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call):
            continue
        yield call.func
        if _get_name(call.func) in _STARTERS:
            yield from call.args
            yield from (keyword.value for keyword in call.keywords)
            if isinstance(call.func, ast.Attribute):
                yield call.func.value


def _list_uses(node: ast.AST, *, is_repeated: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    """Yield each node that reads a name or an attribute.

    The second item of each pair is True if the node may run several times.

    Args:
        node: Node of the syntax tree whose children are searched.
        is_repeated: True if the code in `node` may run several times.
    """
    is_repeated = is_repeated or isinstance(node, _REPEATING)
    for child in ast.iter_child_nodes(node):
        # A call such as `model.train()` only sets the mode of the model.
        if _get_name(child) and not (
            isinstance(child, ast.Attribute) and child.attr in ("train", "eval")
        ):
            yield child, is_repeated
        yield from _list_uses(child, is_repeated=is_repeated)


def _get_name(node: ast.AST) -> str:
    """Return the name of the variable or attribute that a node reads, such as `c` for `a.b.c`.

    Return "" for any other node."""
    match node:
        case ast.Name(id=name, ctx=ast.Load()) | ast.Attribute(attr=name, ctx=ast.Load()):
            return name
    return ""


def _may_train(loop: ast.stmt) -> bool:
    """Return True if the head or the body of a loop shows that the loop may train a model."""
    if isinstance(loop, ast.While) or _is_training_call_in(loop):
        return True
    assert isinstance(loop, ast.For | ast.AsyncFor)
    head = f"{ast.unparse(loop.target)} in {ast.unparse(loop.iter)}"
    return _is_over_steps(loop) or _TRAINING_LOOP.search(head) is not None


def _is_training_call_in(node: ast.AST) -> bool:
    return any(
        isinstance(child, ast.Attribute) and child.attr in _TRAINING_METHODS
        for child in ast.walk(node)
    )


def _trains_elsewhere(tree: ast.Module, loop: ast.stmt) -> bool:
    """Return True if the script also trains a model outside a loop, as in a call of `fit`."""
    nodes_of_loop = set(ast.walk(loop))
    return any(
        node not in nodes_of_loop
        and (
            (isinstance(node, ast.Attribute) and node.attr in ("fit", "learn"))
            or (
                isinstance(node, _LOOPS)
                and loop not in ast.walk(node)
                and _is_training_call_in(node)
            )
        )
        for node in ast.walk(tree)
    )


def _may_end_early(loop: ast.AST, *, is_inner: bool = False) -> bool:
    """Return True if a loop contains a `break`, `return` or `yield` of its own.

    Args:
        loop: The loop, or a node in the loop.
        is_inner: True if the node is in an inner loop, to which a `break` would belong.
    """
    for child in ast.iter_child_nodes(loop):
        if isinstance(child, _Function | ast.Lambda):
            continue
        if isinstance(child, ast.Return | ast.Yield | ast.YieldFrom):
            return True
        if isinstance(child, ast.Break) and not is_inner:
            return True
        if _may_end_early(child, is_inner=is_inner or isinstance(child, _LOOPS)):
            return True
    return False


def _is_over_steps(loop: ast.stmt) -> bool:
    return (
        isinstance(loop, ast.For)
        and isinstance(loop.target, ast.Name)
        and _STEP_VARIABLE.fullmatch(loop.target.id) is not None
        and _find_range(loop.iter) is not None
    )


def _find_range(expression: ast.expr) -> ast.Call | None:
    """Return the call of `range` in an expression such as `range(20)` or `tqdm(range(20))`."""
    if not isinstance(expression, ast.Call) or not isinstance(expression.func, ast.Name):
        return None
    if expression.func.id == "range":
        return expression
    return _find_range(expression.args[0]) if expression.args else None


def _read_loop(loop: ast.stmt, constants: Mapping[str, int]) -> StepLoop | None:
    """Return a description of a loop, or None if its number of steps is unknown.

    The first number of the loop may be unknown, for example in `range(start, 20)`. Then assume that
    `start` is 0 in a run without a checkpoint. So `range(start + 1, 21)` begins at 1.
    """
    if not isinstance(loop, ast.For) or not _is_over_steps(loop):
        return None
    call = _find_range(loop.iter)
    if call is None or call.keywords or len(call.args) not in (1, 2):
        return None
    stop = _evaluate(call.args[-1], constants)
    first: int | None = 0
    if len(call.args) == 2:
        first = _evaluate(call.args[0], constants)
        if first is None:
            first = 1 if adds_one(call.args[0]) else 0
    if stop is None or first not in (0, 1) or stop <= first:
        return None
    return StepLoop(total=stop - first, last_step=stop - 1)


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
