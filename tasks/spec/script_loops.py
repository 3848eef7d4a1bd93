"""Read the number of training steps from a loop in a Python script.

`muster init` uses this module if neither an option nor a setting of the script, such as
`max_steps=60`, contains the number of steps.
"""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tasks.spec.script_structure import parse_source

#: Matches the name of the variable of a loop over the training steps.
_STEP_VARIABLE = re.compile(r"(?:global_|train_|training_)?(?:step|iteration|iter|it)")
#: Matches the name of a variable that counts training steps, such as `global_step`.
_STEP_COUNTER = re.compile(r"(?i)(?:\w*_)?(?:steps?|iterations?|iters?|it|updates?)")
#: Matches the name of a variable that counts the steps of the whole training, and not those of an
#: episode.
_GLOBAL_COUNTER = re.compile(r"(?i)_*(?:global|total)_\w+")
#: Matches the names of functions and classes whose loops do not train, such as `evaluate`,
#: `run_validation` or `PolicyEvaluator`. The names are in lower case, with underscores.
_NO_TRAINING = re.compile(r"(?:^|_)(?:eval|valid|test|sampl|generat|infer|predict|bench|warm)")
#: Matches the position of an underscore that turns `PolicyEvaluator` into `policy_evaluator`.
_NEW_WORD = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
#: Methods of libraries that run a whole training.
_TRAINING_METHODS = (".fit", ".learn")
#: Methods of each PyTorch module. Two calls of `train` need not be calls of the same method.
_MODULE_METHODS = (".train", ".eval")
#: Functions that call a function once, or once in each of several parallel processes.
_STARTERS = ("spawn", "start_processes", "Process", "Fire")
#: Functions that end the program.
_EXITS = ("exit", "quit", ".exit", "._exit")
#: Matches the names of exceptions that end a training without a failure, such as `EarlyStopping`.
_STOP = re.compile(r"(?i)stop|exit|done|finish|interrupt|converge")
#: Statements and expressions that may run their body several times.
_LOOPS = (
    ast.For,
    ast.AsyncFor,
    ast.While,
    ast.ListComp,
    ast.SetComp,
    ast.DictComp,
    ast.GeneratorExp,
    ast.Lambda,
)
#: Definition of a function or method.
_Function = ast.FunctionDef | ast.AsyncFunctionDef


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLoop:
    """A loop over all steps of a training, with a known number of steps."""

    #: Number of training steps.
    total: int
    #: Number of the last training step. This is `total` if the loop counts from 1, and `total - 1`
    #: if it counts from 0.
    last_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Use:
    """A place in a script that calls a function, or that passes the function on.

    The names of methods begin with a dot, such as `.train`. The class of the object is unknown, so
    all methods with the same name count as one method.
    """

    #: Name of the function or method.
    name: str
    #: Name of the function or method that contains this place, or "" at the top level.
    caller: str
    #: True if this place may call the function several times each time that `caller` runs.
    is_repeated: bool


def find_step_loop(source: str) -> StepLoop | None:
    """Return the loop over the training steps in a Python script.

    The end of the loop must be known: a number, a name that the script sets once to a number, or a
    sum or difference of these. Examples are `for step in range(1, 21):` and
    `for step in range(STEPS):`.

    Args:
        source: Source text of the script.

    Returns:
        None if the number of steps is not clear. Examples are a loop with a `break`, a loop in
        another loop, a loop in a function that may run several times, and a second loop that may
        train. A loop in a function such as `evaluate`, or in a class such as `Evaluator`, does not
        count.
    """
    tree = parse_source(source)
    if tree is None:
        return None
    try:
        functions = [*_list_functions(tree)]
        uses = [*_list_uses(tree)]
        repeated = _list_repeated_functions(functions, uses)
        loops = [*_list_step_loops(tree, repeated)]
        if len(loops) != 1:
            return None
        loop, is_repeated = loops[0]
        if is_repeated or _may_end_early(loop) or _has_other_training(tree, loop, functions, uses):
            return None
        return _read_loop(loop, _read_constants(tree))
    except RecursionError:
        return None


def _list_step_loops(
    node: ast.AST, repeated: set[str], is_repeated: bool = False, is_class: bool = False
) -> Iterator[tuple[ast.For, bool]]:
    """Yield each loop over training steps, and True if the loop may run several times.

    Args:
        node: Node of the syntax tree whose children are searched.
        repeated: Names of the functions that may run several times.
        is_repeated: True if the code in `node` may run several times.
        is_class: True if a function in `node` is a method.
    """
    for child in ast.iter_child_nodes(node):
        if _is_no_training(child):
            continue
        if isinstance(child, ast.For) and _is_over_steps(child):
            yield child, is_repeated
        is_child_repeated = is_repeated or isinstance(child, _LOOPS)
        is_method = is_class
        if isinstance(child, _Function):
            is_child_repeated = _name_function(child, is_class) in repeated
            is_method = False
        elif isinstance(child, ast.ClassDef):
            is_method = True
        yield from _list_step_loops(child, repeated, is_child_repeated, is_method)


def _is_no_training(node: ast.AST) -> bool:
    """Return True for a function or class whose loops do not train, such as `evaluate`."""
    if not isinstance(node, _Function | ast.ClassDef):
        return False
    return _NO_TRAINING.search(_NEW_WORD.sub("_", node.name).lower()) is not None


def _name_function(function: _Function, is_method: bool) -> str:
    return f".{function.name}" if is_method else function.name


def _may_end_early(loop: ast.For) -> bool:
    """Return True if the body of a loop may end the loop before its last step.

    An exception that means a failure does not count. A loop with `yield` may end early, too,
    because the caller decides on the number of steps.
    """
    return any(_is_end(statement, is_inner=False) for statement in loop.body)


def _is_end(node: ast.AST, is_inner: bool) -> bool:
    """Return True if a node, or a part of it, may end a loop.

    Args:
        node: A node in the body of the loop.
        is_inner: True if the node is in an inner loop, so that `break` ends the inner loop.
    """
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef() | ast.Lambda():
            return False
        case ast.Break():
            return not is_inner
        case ast.Return() | ast.Yield() | ast.YieldFrom():
            return True
        case ast.Raise(exc=ast.expr() as exception) if _STOP.search(ast.unparse(exception)):
            return True
        # An exit with a constant such as 1 means a failure.
        case ast.Call(args=[ast.Constant(value=value), *_]) if value:
            pass
        case ast.Call() if _read_called(node)[0] in _EXITS:
            return True
        case ast.For() | ast.AsyncFor() | ast.While():
            # A `break` in the block `else` of an inner loop ends the outer loop.
            return any(_is_end(statement, is_inner=True) for statement in node.body) or any(
                _is_end(statement, is_inner) for statement in node.orelse
            )
    return any(_is_end(child, is_inner) for child in ast.iter_child_nodes(node))


def _has_other_training(
    tree: ast.Module,
    loop: ast.For,
    functions: Sequence[tuple[str, _Function]],
    uses: Sequence[_Use],
) -> bool:
    """Return True if a script may train outside a certain loop.

    The loop may be a warm-up. Signs of another training are a `while` loop, a loop over epochs, a
    loop that computes gradients, a counter of steps, and a method such as `fit`.

    Args:
        tree: Syntax tree of the script.
        loop: The loop.
        functions: All functions of the script.
        uses: All uses of functions in the script.
    """
    inner = _add_called({use.name for use in _list_uses(loop)}, uses)
    if any(map(_is_sign_of_training, _list_nodes_outside(tree, loop, inner))):
        return True
    # The loop may also be a loop over rollouts, each with several steps.
    statements = [statement for statement in loop.body if not _find_counter(statement)]
    blocks = [*statements, *(function for name, function in functions if name in inner)]
    counters = {_find_counter(node) for block in blocks for node in ast.walk(block)}
    return any(map(_GLOBAL_COUNTER.fullmatch, counters))


def _list_nodes_outside(
    node: ast.AST, loop: ast.For, inner: set[str], is_class: bool = False
) -> Iterator[ast.AST]:
    """Yield the nodes below a node that may belong to a training outside a loop.

    Args:
        node: Node of the syntax tree.
        loop: The loop.
        inner: Names of the functions that the loop calls.
        is_class: True if a function in `node` is a method.
    """
    for child in ast.iter_child_nodes(node):
        if child is loop or _is_no_training(child):
            continue
        is_method = isinstance(child, ast.ClassDef) or is_class
        if isinstance(child, _Function):
            if _name_function(child, is_class) in inner:
                continue
            is_method = False
        yield child
        yield from _list_nodes_outside(child, loop, inner, is_method)


def _is_sign_of_training(node: ast.AST) -> bool:
    if _find_counter(node):
        return True
    if isinstance(node, ast.Call):
        return _read_called(node)[0] in _TRAINING_METHODS
    if not isinstance(node, ast.For | ast.AsyncFor | ast.While):
        return False
    parts = [*ast.walk(node)]
    # An iterator over data often has an endless loop with `yield`.
    if any(isinstance(part, ast.Yield | ast.YieldFrom) for part in parts):
        return False
    if isinstance(node, ast.While) or "epoch" in _write_header(node).lower():
        return True
    called = [_read_called(part)[0] for part in parts if isinstance(part, ast.Call)]
    return any(name == ".backward" or (name[:1] != "." and "train" in name) for name in called)


def _write_header(loop: ast.For | ast.AsyncFor) -> str:
    return f"{ast.unparse(loop.target)} {ast.unparse(loop.iter)}"


def _find_counter(node: ast.AST) -> str:
    """Return the name of the counter of steps that a statement increases, or ""."""
    match node:
        case ast.AugAssign(target=target, op=ast.Add()):
            pass
        case ast.Assign(targets=[target], value=ast.BinOp(left=left, op=ast.Add())) if ast.unparse(
            target
        ) == ast.unparse(left):
            pass
        case _:
            return ""
    name = ast.unparse(target).rpartition(".")[2]
    return name if _STEP_COUNTER.fullmatch(name) else ""


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


def _list_functions(node: ast.AST, is_class: bool = False) -> Iterator[tuple[str, _Function]]:
    """Yield the name and the definition of each function and method below a node.

    Args:
        node: Node of the syntax tree.
        is_class: True if a function in `node` is a method.
    """
    for child in ast.iter_child_nodes(node):
        is_method = isinstance(child, ast.ClassDef) or is_class
        if isinstance(child, _Function):
            yield _name_function(child, is_class), child
            is_method = False
        yield from _list_functions(child, is_method)


def _list_repeated_functions(
    functions: Iterable[tuple[str, _Function]], uses: Sequence[_Use]
) -> set[str]:
    """Return the names of all functions and methods that may run several times.

    These are functions that a loop calls, functions that the script passes to other code, functions
    that the script calls at several places, and functions that these functions call. Other code may
    also call a method that the script itself does not call.

    Args:
        functions: All functions of the script.
        uses: All uses of functions in the script.
    """
    # A method `train` often calls `self.model.train()`. So a use of a function in itself does not
    # count.
    foreign = [use for use in uses if use.name != use.caller]
    numbers = Counter(use.name for use in foreign)
    repeated = {use.name for use in foreign if use.is_repeated}
    repeated |= {
        name for name, number in numbers.items() if number > 1 and name not in _MODULE_METHODS
    }
    methods = {name for name, _ in functions if name.startswith(".")}
    repeated |= {name for name in methods if name not in numbers or name.startswith(".__")}
    return _add_called(repeated, uses)


def _add_called(names: set[str], uses: Iterable[_Use]) -> set[str]:
    """Return functions and all functions that they call, directly or indirectly."""
    called_by: dict[str, set[str]] = {}
    for use in uses:
        called_by.setdefault(use.caller, set()).add(use.name)
    all_names: set[str] = set()
    new = names - {""}
    while new:
        all_names |= new
        new = set().union(*(called_by.get(name, ()) for name in new)) - all_names
    return all_names


def _list_uses(
    node: ast.AST, caller: str = "", is_repeated: bool = False, is_class: bool = False
) -> Iterator[_Use]:
    """Yield each use of a function or method below a node.

    Args:
        node: Node of the syntax tree.
        caller: Name of the function that contains the node, or "".
        is_repeated: True if the code in `node` may run several times each time that `caller` runs.
        is_class: True if a function in `node` is a method.
    """
    # Functions that the code passes on, and not functions that it calls
    passed = [*ast.iter_child_nodes(node)]
    if isinstance(node, ast.Call):
        name, receiver = _read_called(node)
        if name:
            yield _Use(name=name, caller=caller, is_repeated=is_repeated)
        passed = [receiver, *node.args, *node.keywords]
        if name.lstrip(".") in _STARTERS:
            arguments = [*node.args, *(keyword.value for keyword in node.keywords)]
            started = [argument for argument in arguments if _read_name(argument)]
            for argument in started:
                yield _Use(name=_read_name(argument), caller=caller, is_repeated=is_repeated)
            passed = [receiver, *(value for value in arguments if value not in started)]
    for child in passed:
        is_child_repeated = is_repeated or isinstance(child, _LOOPS)
        if isinstance(child, _Function):
            name = _name_function(child, is_class)
            yield from _list_uses(child, name)
            continue
        if isinstance(child, ast.Name | ast.Attribute) and isinstance(child.ctx, ast.Load):
            yield _Use(name=_read_name(child), caller=caller, is_repeated=True)
        is_method = isinstance(child, ast.ClassDef) or is_class
        yield from _list_uses(child, caller, is_child_repeated, is_method)


def _read_called(call: ast.Call) -> tuple[str, ast.expr]:
    """Return the name of the function that a call runs, and the rest of the expression.

    Ray calls a function `f` with `f.remote()` or `f.options(num_gpus=1).remote()`. A class of Ray
    has methods such as `worker.collect.remote()`.

    Returns:
        The name is empty if the called expression has no name. The rest is the object of a method,
        and otherwise the called expression itself, without children.
    """
    function = call.func
    match function:
        case ast.Attribute(
            attr="remote", value=ast.Call(func=ast.Attribute(attr="options", value=value))
        ):
            function = value
        case ast.Attribute(attr="remote", value=value):
            function = value
    match function:
        case ast.Name():
            return function.id, ast.Constant(value=None)
        case ast.Attribute():
            return f".{function.attr}", function.value
    return "", function


def _read_name(expression: ast.expr) -> str:
    """Return the name of a function, or of a method with a leading dot. Otherwise return ""."""
    match expression:
        case ast.Name(id=name):
            return name
        case ast.Attribute(attr=name):
            return f".{name}"
    return ""
