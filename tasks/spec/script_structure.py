"""Read from the source of a Python script how the script runs, without running the script.

`muster init` uses this module to choose the command that starts a training.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import TypeGuard

#: Functions that start the ranks of a training as processes.
_RANK_STARTER = re.compile(
    r"torch\.multiprocessing\.(?:spawn|start_processes)"
    r"|torch_xla\.distributed\.xla_multiprocessing\.spawn"
)
#: Classes and functions that run a Python function in another process.
_PROCESS_STARTER = re.compile(r"(?:.*\.)?(?:Process|Pool|ProcessPoolExecutor)|os\.fork", re.DOTALL)
#: Functions that start another program.
_PROGRAM_STARTER = re.compile(
    r"subprocess\.(?:run|call|check_call|check_output|Popen)|os\.(?:system|popen|posix_spawnp?)"
    r"|asyncio\.create_subprocess_(?:exec|shell)"
)
#: Matches calls of functions that run a training.
_RUN_CALL = re.compile(r"\b(?:main|run|train|fit|learn|launch)\(")
#: Environment variables that tell a process its rank.
_RANK_VARIABLES = ("RANK", "LOCAL_RANK")
#: Matches a shell command that sets the rank of a process.
_RANK_IN_SHELL = re.compile(r"(?:^|\s)(?:LOCAL_)?RANK=")
#: Matches a shell command that runs torchrun. Also matches a single argument of a command, such as
#: `torchrun` or the module `torch.distributed.run`.
_TORCHRUN = re.compile(r"(?:\S*/)?torchrun(?:\s.*)?|torch\.distributed\.(?:run|launch)", re.DOTALL)


@lru_cache(maxsize=2)
def parse_source(source: str) -> ast.Module | None:
    """Return the syntax tree of a Python script, or None if the source is not valid Python.

    Callers often ask several questions about one script, so the last trees are cached. Do not
    change a returned tree.
    """
    try:
        with warnings.catch_warnings():
            # Python may print a warning about the script, for example about an invalid escape
            # sequence. Do not show this warning in the output of Muster.
            warnings.simplefilter("ignore")
            # Some editors write a byte order mark at the beginning of a file.
            return ast.parse(source.removeprefix("\ufeff"))
    except (SyntaxError, ValueError, RecursionError):
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Imports:
    """Modules that a Python script imports."""

    #: Top-level names of the modules that are imported by their full names. For `import a.b`, the
    #: name is `a`.
    names: frozenset[str]
    #: Largest number of leading dots of a relative import such as `from ..a import b`, or 0.
    level: int


def read_imports(source: str) -> Imports:
    """Return the modules that a Python script imports.

    Args:
        source: Source text of the script. If it is not valid Python, the result is empty.
    """
    tree = parse_source(source)
    names: set[str] = set()
    level = 0
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.Import):
            names |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            level = max(level, node.level)
            if not node.level:
                names.add((node.module or "").partition(".")[0])
    return Imports(names=frozenset(names), level=level)


def only_defines(source: str) -> bool:
    """Return True if a Python file only imports modules and defines names.

    Such a file is a helper module: to run it as a script would have no effect.

    Args:
        source: Source text of the file. If it is not valid Python, the result is False.
    """
    tree = parse_source(source)
    return tree is not None and all(map(_is_definition, tree.body))


def only_imports(source: str) -> bool:
    """Return True if a Python file consists of imports.

    Such a file may have an effect as a script, because an import runs the imported module.

    Args:
        source: Source text of the file. If it is empty or not valid Python, the result is False.
    """
    tree = parse_source(source)
    if tree is None or not tree.body:
        return False
    return all(isinstance(statement, ast.Import | ast.ImportFrom) for statement in tree.body)


def _is_definition(statement: ast.stmt) -> bool:
    match statement:
        case ast.Import() | ast.ImportFrom() | ast.Pass():
            return True
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            return True
        case ast.Assign() | ast.AnnAssign() | ast.AugAssign():
            # An assignment may also run the training, as in `result = trainer.train()`.
            return _RUN_CALL.search(ast.unparse(statement)) is None
        # A docstring, or another constant
        case ast.Expr(value=ast.Constant()):
            return True
        # A helper module may contain `try`, for example to import a package that may be missing.
        case ast.If() | ast.Try():
            handlers = statement.handlers if isinstance(statement, ast.Try) else []
            blocks = [statement.body, statement.orelse, *(handler.body for handler in handlers)]
            return all(map(_is_definition, chain.from_iterable(blocks)))
    return False


def starts_own_ranks(sources: Iterable[str]) -> bool:
    """Return True if a Python script itself starts the ranks (processes) of its training.

    Such a script must not be started with torchrun: torchrun would start the whole script once for
    each rank. The function recognises these scripts:

    - scripts that call `torch.multiprocessing.spawn`
    - scripts that start processes and give a rank to each process, in a variable such as RANK or as
      an argument of a function that calls `init_process_group`
    - scripts that start torchrun

    Args:
        sources: Source texts of the script, and of the modules of the project that it imports. A
            text that is not valid Python is ignored.
    """
    trees = (parse_source(source) for source in sources)
    files = [[*ast.walk(tree)] for tree in trees if tree is not None]
    rank_functions = set(chain.from_iterable(map(_list_rank_functions, files)))
    return any(_starts_ranks(nodes, rank_functions) for nodes in files)


def _starts_ranks(nodes: Sequence[ast.AST], rank_functions: Set[str]) -> bool:
    """Return True if a file starts the ranks of a training.

    Args:
        nodes: All nodes of the syntax tree of the file.
        rank_functions: Names of the functions, in this and other files, that use a parameter as the
            rank of a process.
    """
    imported = _list_imported_names(nodes)
    calls = [(node, _resolve_name(node.func, imported)) for node in nodes if _is_call(node)]
    if any(_RANK_STARTER.fullmatch(name) for _, name in calls):
        return True

    if any(_PROCESS_STARTER.fullmatch(name) for _, name in calls):
        usable_functions = _list_rank_functions(nodes) | (
            rank_functions & _list_foreign_names(nodes)
        )
        if usable_functions:
            return True

    program_starts = [call for call, name in calls if _PROGRAM_STARTER.fullmatch(name)]
    if not program_starts:
        return False
    has_env = any(keyword.arg == "env" for call in program_starts for keyword in call.keywords)
    loops = (node for node in nodes if isinstance(node, ast.For))
    return (
        (has_env and any(map(_sets_rank_in_mapping, nodes)))
        or any(_uses_rank(loop, _list_names(loop.target)) for loop in loops)
        or any(
            _starts_ranks_by_command(argument) for argument in _list_words(nodes, program_starts)
        )
    )


def _is_call(node: ast.AST) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call)


def _list_imported_names(nodes: Iterable[ast.AST]) -> dict[str, str]:
    """Return a mapping from the imported names in a script to their full names.

    Example: `import torch.multiprocessing as mp` gives `{"mp": "torch.multiprocessing"}`.
    """
    names: dict[str, str] = {}
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names |= {
                alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names
            }
    return names


def _list_foreign_names(nodes: Sequence[ast.AST]) -> set[str]:
    """Return the names that a script uses from other modules.

    For example, the line `from a import b` adds `b`. The lines `import a` and `a.c()` add `c`.
    """
    names: set[str] = set()
    modules: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            modules |= {alias.asname or alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.name for alias in node.names}
            modules |= {alias.asname or alias.name for alias in node.names}
    attributes = (node for node in nodes if isinstance(node, ast.Attribute))
    names |= {node.attr for node in attributes if _resolve_name(node.value, {}) in modules}
    return names


def _resolve_name(function: ast.expr, imported: Mapping[str, str]) -> str:
    """Return the full name of a called function, such as `torch.multiprocessing.spawn`."""
    if isinstance(function, ast.Name):
        return imported.get(function.id, function.id)
    if isinstance(function, ast.Attribute):
        return f"{_resolve_name(function.value, imported)}.{function.attr}"
    return ""


def _list_rank_functions(nodes: Iterable[ast.AST]) -> set[str]:
    """Return the names of the functions that use a parameter as the rank of a process."""
    functions = (node for node in nodes if isinstance(node, ast.FunctionDef))
    return {node.name for node in functions if _uses_rank(node, _list_parameters(node))}


def _list_parameters(function: ast.FunctionDef) -> set[str]:
    return {argument.arg for argument in function.args.args}


def _list_names(expression: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(expression) if isinstance(node, ast.Name)}


def _uses_rank(block: ast.AST, names: set[str]) -> bool:
    """Return True if a function or loop uses a variable as the rank of a process.

    Args:
        block: The function or the loop.
        names: Names of the function's parameters, or of the loop's variables.
    """
    for node in ast.walk(block):
        # Example: `init_process_group("nccl", rank=rank)`
        if isinstance(node, ast.Call):
            name = _resolve_name(node.func, {}).rpartition(".")[2]
            values = [keyword.value for keyword in node.keywords if keyword.arg == "rank"]
            if name == "init_process_group" and any(_list_names(value) & names for value in values):
                return True
        # Example: `os.environ["RANK"] = str(rank)`
        elif isinstance(node, ast.Assign) and _list_names(node.value) & names:
            has_rank_target = any(map(_is_rank_item, node.targets))
            if has_rank_target:
                return True
    return False


def _is_rank_item(target: ast.AST) -> bool:
    """Return True for an expression such as `os.environ["RANK"]`."""
    return (
        isinstance(target, ast.Subscript)
        and isinstance(target.slice, ast.Constant)
        and target.slice.value in _RANK_VARIABLES
    )


def _sets_rank_in_mapping(node: ast.AST) -> bool:
    """Return True if a node puts the rank of a process into a mapping of environment variables.

    `os.environ` does not count, because a script may set its own rank there.
    """
    if isinstance(node, ast.Assign):
        targets = (target for target in node.targets if _is_rank_item(target))
        return any("environ" not in ast.unparse(target) for target in targets)
    pairs: list[tuple[object, ast.expr]] = []
    if isinstance(node, ast.Dict):
        keys = (key.value if isinstance(key, ast.Constant) else None for key in node.keys)
        pairs = [*zip(keys, node.values, strict=True)]
    elif isinstance(node, ast.Call):
        pairs = [(keyword.arg, keyword.value) for keyword in node.keywords]
    return any(
        key in _RANK_VARIABLES and not isinstance(value, ast.Constant) for key, value in pairs
    )


def _list_words(nodes: Iterable[ast.AST], program_starts: Sequence[ast.Call]) -> Iterator[str]:
    """Yield the texts in lists and tuples of a script, and in calls that start a program.

    Only the beginning of an f-string is returned.
    """
    groups = [call.args for call in program_starts]
    groups += [node.elts for node in nodes if isinstance(node, ast.List | ast.Tuple)]
    for expression in chain.from_iterable(groups):
        if isinstance(expression, ast.JoinedStr) and expression.values:
            expression = expression.values[0]
        if isinstance(expression, ast.Constant) and isinstance(expression.value, str):
            yield expression.value


def _starts_ranks_by_command(text: str) -> bool:
    """Return True if a shell command runs torchrun, or sets the rank of a process.

    Args:
        text: The shell command, or one argument of a command, such as `torchrun`.
    """
    return _TORCHRUN.fullmatch(text) is not None or _RANK_IN_SHELL.search(text) is not None


def adds_one(expression: ast.expr) -> bool:
    """Return True for an expression such as `start + 1`."""
    match expression:
        case ast.BinOp(op=ast.Add(), right=ast.Constant(value=1)):
            return True
        case ast.BinOp(op=ast.Add(), left=ast.Constant(value=1)):
            return True
    return False
