"""Find the paths that a Python script builds, without running the script.

`muster init` uses this module to find the files that a script writes. The reader follows simple
assignments, and the arguments of the script's own functions.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tasks.spec.script_structure import parse_source

#: Functions that return the path in their first argument. Further arguments are appended.
_PATH_FUNCTIONS = ("Path", "PurePath", "str", "fspath", "join", "abspath", "realpath")
#: Methods of a path that return the same path in another form.
_SAME_PATH_METHODS = ("absolute", "resolve", "as_posix")
#: Largest number of nested expressions that are followed. Without this limit, the reader would
#: follow `x = x / "a"` without end.
_MAX_DEPTH = 20
#: Text in the place of a value that is unknown.
_UNKNOWN = "?"
#: Character before the name of an option's value, as in `${output_dir}` for `args.output_dir`.
_OPTION = "$"
#: Matches the first part of a path that begins with the value of an option.
_OPTION_PART = re.compile(r"\$\{(?P<option>[^\W\d]\w*)\}(?P<suffix>[^?$]*)")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptPath:
    """A path that a script builds."""

    #: Name of the value with which the path begins. There are three kinds of names:
    #:
    #: - an attribute of the parsed options, such as `output_dir` for `args.output_dir / "a"`
    #: - the key of a setting, such as `out` for `cfg["out"]`
    #: - the name of an environment variable
    #:
    #: Empty if the path begins with another value.
    option: str
    #: Text directly after this value, such as `-x` for `f"{args.output_dir}-x/a"`. Empty if the
    #: value is the whole name of a folder or file.
    suffix: str = ""
    #: Names of the folders and of the file after the beginning, such as `("a", "step-?")`. A
    #: question mark or a name with a dollar sign stands for a value that only the script knows.
    parts: tuple[str, ...]

    @property
    def fixed_parts(self) -> tuple[str, ...]:
        """The parts of the path before the first part with an unknown value."""
        for index, part in enumerate(self.parts):
            if not is_fixed(part):
                return self.parts[:index]
        return self.parts


def is_fixed(part: str) -> bool:
    """Return True if a part of a path contains no unknown value."""
    return _UNKNOWN not in part and _OPTION not in part


def get_called_name(call: ast.Call) -> str:
    """Return the name of the called function, without the module or object before the name.

    Return "" if the called function has no name."""
    match call.func:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""


@dataclass(slots=True, eq=False)
class Scope:
    """Variables of a module, class or function."""

    parent: Scope | None = None
    #: Values that are assigned to each variable, each with the scope of the value. None stands for
    #: an unknown value, such as that of the variable of a loop.
    assigned: dict[str, list[tuple[ast.expr, Scope] | None]] = field(default_factory=dict)
    #: Parameters of the function. The values are the arguments of the calls, with their scopes.
    arguments: dict[str, list[tuple[ast.expr, Scope]]] = field(default_factory=dict)

    def assign(self, name: str, value: tuple[ast.expr, Scope] | None) -> None:
        self.assigned.setdefault(name, []).append(value)

    def find(self, name: str) -> Scope | None:
        """Return the innermost scope that contains a variable, or None."""
        scope: Scope | None = self
        while scope is not None and name not in scope.assigned and name not in scope.arguments:
            scope = scope.parent
        return scope


@dataclass(frozen=True, slots=True, eq=False)
class _Function:
    """A function of the script."""

    #: Names of the parameters that a call may give by their position, without `self`.
    parameters: tuple[str, ...]
    scope: Scope


class PathReader:
    """Reads the paths in a script, and in the project's modules that the script imports."""

    def __init__(self, sources: Iterable[str]) -> None:
        """
        Args:
            sources: Source texts of the script and of the modules. A text that is not valid Python
                is ignored.
        """
        #: All expressions of the source texts, each with its scope.
        self.expressions: list[tuple[ast.expr, Scope]] = []
        #: Names of the classes of the source texts.
        self.classes: set[str] = set()
        #: Mapping from a name to the functions with this name. For the name of a class, the
        #: function is the constructor of the class.
        self._functions: dict[str, list[_Function]] = {}
        #: Cache of the texts that were found for variables, by scope and name of the variable.
        self._texts: dict[tuple[Scope, str], str] = {}
        #: Variables whose values are being read. This prevents an endless recursion for an
        #: assignment such as `x = Path(x)`.
        self._active: set[tuple[Scope, str]] = set()
        #: Mapping from the name of an attribute, such as `out` for `args.out`, to the values that
        #: the source texts assign to it. Each value has its scope, or is None if it is unknown.
        self._new_values: dict[str, list[tuple[ast.expr, Scope] | None]] = {}
        #: Names of the options to which the source texts assign another path.
        self._changed_options: frozenset[str] = frozenset()
        for tree in map(parse_source, sources):
            if tree is not None:
                self._collect(tree)
        for expression, scope in self.expressions:
            if isinstance(expression, ast.Call):
                self._bind_arguments(expression, scope)
        self._changed_options = self._find_changed_options()
        # The changed options were unknown when these texts were read, so the texts may be wrong.
        self._texts.clear()

    def read(self, expression: ast.expr, scope: Scope) -> ScriptPath:
        """Return the path that an expression stands for.

        Args:
            expression: An expression of one of the source texts.
            scope: The expression's scope.
        """
        text = self._read_text(expression, scope, _MAX_DEPTH)
        if "://" in text:
            # A URL such as `s3://bucket/out` is no path.
            text = _UNKNOWN
        parts = tuple(part for part in text.split("/") if part not in ("", "."))
        if text.startswith("/") and parts:
            # Put the slash of an absolute path before the first part. Otherwise the path would look
            # relative.
            parts = (f"/{parts[0]}", *parts[1:])
        match = _OPTION_PART.fullmatch(parts[0]) if text.startswith(_OPTION) else None
        if match is not None and ".." not in parts:
            return ScriptPath(option=match["option"], suffix=match["suffix"], parts=parts[1:])
        return ScriptPath(option="", parts=parts)

    def _collect(self, tree: ast.Module) -> None:
        """Collect the expressions, functions and variables of a module."""
        module = Scope()
        constructors: dict[ast.AST, str] = {}
        simple_targets: set[ast.AST] = set()
        #: Attributes that get a value only if the user does not give the option.
        defaults: set[ast.AST] = set()
        # A loop, because the nodes of a long expression may be nested too deep for a recursion.
        nodes: list[tuple[ast.AST, Scope]] = [(tree, module)]
        while nodes:
            node, scope = nodes.pop()
            inner = scope
            match node:
                case ast.Assign(targets=[target], value=ast.expr() as value) | (
                    ast.AnnAssign(target=target, value=ast.expr() as value)
                    | ast.NamedExpr(target=target, value=value)
                ):
                    simple_targets.add(target)
                    if isinstance(target, ast.Attribute) and target not in defaults:
                        self._assign_attribute(target, (value, scope))
                    if name := _name_variable(target):
                        (scope if "." not in name else module).assign(name, (value, scope))
                case ast.Name(ctx=ast.Store(), id=name) if node not in simple_targets:
                    scope.assign(name, None)
                case ast.Attribute(ctx=ast.Store()) if not (
                    node in simple_targets or node in defaults
                ):
                    self._assign_attribute(node, None)
                case ast.If():
                    defaults |= _list_defaults(node)
                case ast.ClassDef(name=name, body=body):
                    self.classes.add(name)
                    constructors |= dict.fromkeys(body, name)
                    inner = Scope(parent=scope)
                case (
                    ast.FunctionDef(name=name, args=arguments)
                    | ast.AsyncFunctionDef(name=name, args=arguments)
                ):
                    inner = Scope(parent=scope)
                    parameters = _list_parameters(arguments)
                    inner.arguments.update((name, []) for name in parameters)
                    inner.arguments.update((each.arg, []) for each in arguments.kwonlyargs)
                    if name == "__init__":
                        name = constructors.get(node, "")
                    function = _Function(parameters=parameters, scope=inner)
                    self._functions.setdefault(name, []).append(function)
                case ast.Lambda(args=arguments):
                    inner = Scope(parent=scope)
                    inner.arguments.update((name, []) for name in _list_parameters(arguments))
            if isinstance(node, ast.expr):
                self.expressions.append((node, scope))
            nodes += [(child, inner) for child in ast.iter_child_nodes(node)]

    def _assign_attribute(
        self, target: ast.Attribute, value: tuple[ast.expr, Scope] | None
    ) -> None:
        """Note a value of an attribute. An attribute of `self` is a variable and no option."""
        if not _name_variable(target):
            self._new_values.setdefault(target.attr, []).append(value)

    def _find_changed_options(self) -> frozenset[str]:
        """Return the options to which the source texts assign another path.

        An option with the same path in another form is left out, as in `args.out = Path(args.out)`.
        Any object may be the parsed options, because a function may receive the options under
        another name. So attributes with the same name are not distinguished.
        """
        return frozenset(
            name
            for name, values in self._new_values.items()
            if any(
                value is None or self._read_text(*value, _MAX_DEPTH) != _write_option(name)
                for value in values
            )
        )

    def _bind_arguments(self, call: ast.Call, scope: Scope) -> None:
        """Add the arguments of a call to the parameters of the called function."""
        functions = self._functions.get(get_called_name(call), [])
        if len(functions) != 1:
            return
        arguments = functions[0].scope.arguments
        for name, value in zip(functions[0].parameters, call.args, strict=False):
            arguments[name].append((value, scope))
        for keyword in call.keywords:
            if keyword.arg in arguments:
                arguments[keyword.arg].append((keyword.value, scope))

    def _read_text(self, node: ast.expr, scope: Scope, depth: int) -> str:
        """Return the text of a path.

        In the text, `_UNKNOWN` stands for an unknown value. The result of `_write_option` stands
        for the value of an option.

        Args:
            node: Expression with the path, or with a part of the path.
            scope: Scope of the expression.
            depth: Number of nested expressions that may still be followed.
        """
        if depth == 0:
            return _UNKNOWN

        def read_all(nodes: Sequence[ast.expr]) -> list[str]:
            return [self._read_text(each, scope, depth - 1) for each in nodes]

        match node:
            case ast.Constant(value=str(text)):
                return text
            case ast.Name(id=name):
                return self._read_variable(name, scope, depth - 1)
            case (
                ast.Subscript(slice=ast.Constant(value=str(name)))
                | ast.Call(
                    func=ast.Attribute(attr="get" | "getenv") | ast.Name(id="getenv"),
                    args=[ast.Constant(value=str(name)), *_],
                )
            ):
                return _write_option(name)
            case ast.Attribute(attr=name):
                variable = _name_variable(node)
                if variable and scope.find(variable) is not None:
                    return self._read_variable(variable, scope, depth - 1)
                return _UNKNOWN if name in self._changed_options else _write_option(name)
            case ast.BinOp(left=left, op=ast.Div(), right=right):
                return "/".join(read_all([left, right]))
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return "".join(read_all([left, right]))
            case ast.JoinedStr(values=values):
                return "".join(read_all(values))
            case ast.FormattedValue(value=value) | ast.BoolOp(op=ast.Or(), values=[value, *_]):
                return read_all([value])[0]
            case (
                ast.Call(
                    func=ast.Attribute(attr="expanduser") | ast.Name("expanduser"), args=[path]
                )
                | ast.Call(func=ast.Attribute(value=path, attr="expanduser"), args=[])
            ):
                # Muster does not expand `~` in a run spec, so write the path of the home directory.
                return os.path.expanduser(read_all([path])[0])
            case ast.Call(func=ast.Attribute(value=path, attr="joinpath"), args=parts):
                return "/".join(read_all([path, *parts]))
            case ast.Call(func=ast.Attribute(value=path, attr=name), args=[]) if (
                name in _SAME_PATH_METHODS
            ):
                return read_all([path])[0]
            case ast.Call(args=[_, *_] as parts) if get_called_name(node) in _PATH_FUNCTIONS:
                return "/".join(read_all(parts))
        return _UNKNOWN

    def _read_variable(self, name: str, scope: Scope, depth: int) -> str:
        """Return the text of the path in a variable."""
        owner = scope.find(name)
        if owner is None:
            return _UNKNOWN
        key = owner, name
        if key not in self._texts:
            is_parameter = name in owner.arguments
            if is_parameter and (name not in owner.assigned or key in self._active):
                return self._read_parameter(name, owner, depth)
            if key in self._active:
                return _UNKNOWN
            self._active.add(key)
            values = owner.assigned[name]
            texts = {_UNKNOWN if each is None else self._read_text(*each, depth) for each in values}
            self._active.discard(key)
            self._texts[key] = texts.pop() if len(texts) == 1 else _UNKNOWN
        return self._texts[key]

    def _read_parameter(self, name: str, function: Scope, depth: int) -> str:
        """Return the text of the path that a parameter of a function contains.

        If no call of the function was found, the parameter may be an option, as in
        `def main(output_dir)` with Click. Then the text is `${output_dir}`. Arguments with an
        unknown value are ignored, because the call may be a call of another function with the same
        name. Example: `torch.save` and a function `save` of the script.
        """
        if not function.arguments[name]:
            return _write_option(name)
        key = function, f"argument {name}"
        if key not in self._texts:
            if key in self._active:
                return _UNKNOWN
            self._active.add(key)
            texts = {self._read_text(*each, depth) for each in function.arguments[name]}
            self._active.discard(key)
            texts.discard(_UNKNOWN)
            self._texts[key] = texts.pop() if len(texts) == 1 else _UNKNOWN
        return self._texts[key]


def _write_option(name: str) -> str:
    """Return the text that stands for the value of an option in the text of a path."""
    return f"{_OPTION}{{{name}}}"


def _list_parameters(arguments: ast.arguments) -> tuple[str, ...]:
    """Return the names of the parameters that a call may give by their position."""
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    return tuple(names[1:] if names[:1] in (["self"], ["cls"]) else names)


def _list_defaults(statement: ast.If) -> set[ast.AST]:
    """Return the attributes to which a statement assigns a value only if they are empty.

    Example: the attribute `args.out` in `if args.out is None: args.out = "runs"`. The script skips
    this assignment if the user has given the option.
    """
    match statement.test:
        case (
            ast.Compare(
                left=ast.Attribute(attr=name),
                ops=[ast.Is() | ast.Eq()],
                comparators=[ast.Constant(value=None | "")],
            )
            | ast.UnaryOp(op=ast.Not(), operand=ast.Attribute(attr=name))
        ):
            pass
        case _:
            return set()
    return {
        node
        for inner in statement.body
        for node in ast.walk(inner)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr == name
    }


def _name_variable(target: ast.expr) -> str:
    """Return the name of a variable, such as `folder` or `self.folder`.

    Return "" if the target is no such variable."""
    match target:
        case ast.Name(id=name):
            return name
        case ast.Attribute(value=ast.Name(id="self"), attr=name):
            return f"self.{name}"
    return ""
