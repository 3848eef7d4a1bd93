"""Read the command-line arguments of a backend from its sources, which are parsed and never run."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.peers.backends.facts import Option

#: Arguments whose value is an integer that vLLM also accepts as 1K, 2M or auto.
#:
#: Source: vLLM 0.33, engine/arg_utils.py, `_compute_kwargs`.
_HUMAN = (
    "--max-model-len",
    "--max-num-batched-tokens",
    "--max-num-scheduled-tokens",
    "--kv-cache-memory-bytes",
    "--safetensors-prefetch-block-size",
    "--max-num-queued-tokens",
)
#: Python annotations that are also names of types in the field `Option.type`.
_SCALARS = ("int", "float", "str")


def options_of(backend: str, folder: Path) -> tuple[Option, ...]:
    """Return all arguments of a backend's server, read from the backend's sources in a folder.

    Raises:
        LookupError: The sources do not have the layout of the known versions.
    """
    readers = {"sglang": _read_sglang, "lmdeploy": _read_lmdeploy, "vllm": _read_vllm}
    options: dict[str, Option] = {}
    for option in readers[backend](folder / backend):
        options.setdefault(option.names[0], option)
    if not options:
        raise LookupError(f"no arguments were found in {backend}'s sources")
    return tuple(sorted(options.values(), key=lambda option: option.names[0].lstrip("-")))


def _read_lmdeploy(folder: Path) -> Iterator[Option]:
    """Yield the arguments of LMDeploy's API server."""
    helper = _find_class(folder / "cli" / "utils.py", "ArgumentHelper")
    methods = _list_functions(helper)
    commands = _list_functions(_find_class(folder / "cli" / "serve.py", "SubCliServe"))

    def read_function(function: ast.AST) -> Iterator[Option]:
        for call in _list_calls(function):
            name = ast.unparse(call.func)
            if name.endswith(".add_argument"):
                yield _build_option(call)
            elif name.startswith("ArgumentHelper.") and name.partition(".")[2] in methods:
                yield from read_function(methods[name.partition(".")[2]])

    yield from read_function(commands["add_parser_api_server"])


def _read_sglang(folder: Path) -> Iterator[Option]:
    """Yield the arguments of SGLang's server."""
    groups = folder / "srt" / "arg_groups"
    constants = _read_constants(groups / "choices.py")
    for path in sorted((groups / "fields").glob("*.py")):
        for node in ast.walk(_parse_file(path)):
            if isinstance(node, ast.AnnAssign) and isinstance(node.annotation, ast.Subscript):
                yield from _read_sglang_field(node, node.annotation, constants)
    parser = _find_class(folder / "srt" / "server_args.py", "ServerArgs")
    for call in _list_calls(_list_functions(parser)["add_cli_args"]):
        if ast.unparse(call.func) == "parser.add_argument":
            yield _build_option(call)


def _read_sglang_field(
    node: ast.AnnAssign, annotation: ast.Subscript, constants: Mapping[str, Any]
) -> Iterator[Option]:
    """Yield the command-line argument of a field in SGLang's settings class.

    Yield nothing if the field has no command-line argument.
    """
    if ast.unparse(annotation.value) not in ("A", "Annotated"):
        return
    parts = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else []
    definition = next(
        (part for part in parts[1:] if isinstance(part, ast.Call | ast.Constant)), None
    )
    if definition is None:
        return
    keywords = _get_keywords(definition) if isinstance(definition, ast.Call) else {}
    if _evaluate_literal(keywords.get("no_cli")) is True:
        return
    name = (
        _evaluate_literal(keywords.get("cli_name"))
        or f"--{ast.unparse(node.target).replace('_', '-')}"
    )
    names = (name, *(_evaluate_literal(keywords.get("aliases")) or ()))
    takes, kind, choices = _analyze_annotation(parts[0])
    if "action" in keywords:
        yield Option(names=names, takes="any")
        return
    if "type_parser" in keywords:
        takes = "one" if takes == "many" else takes
        kind = "any"
    if "nargs" in keywords:
        takes = _convert_nargs(_evaluate_literal(keywords["nargs"]))
    if "choices" in keywords:
        choices_node = keywords["choices"]
        choices = tuple(
            _evaluate_literal(choices_node) or constants.get(ast.unparse(choices_node), ())
        )
    yield Option(names=names, takes=takes, type=kind, choices=choices)


def _read_vllm(folder: Path) -> Iterator[Option]:
    """Yield the arguments of `vllm serve`."""
    configs = {
        node.name: node
        for path in sorted((folder / "config").glob("*.py"))
        for node in ast.walk(_parse_file(path))
        if isinstance(node, ast.ClassDef)
    }
    arguments = folder / "engine" / "arg_utils.py"
    for name in ("EngineArgs", "AsyncEngineArgs"):
        function = _list_functions(_find_class(arguments, name))["add_cli_args"]
        groups = {
            ast.unparse(node.targets[0]): ast.unparse(node.value.args[0])
            for node in ast.walk(function)
            if isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Call)
            and ast.unparse(node.value.func) == "get_kwargs"
        }
        for call in _list_calls(function):
            if ast.unparse(call.func).endswith(".add_argument"):
                yield from _extend_for_vllm(
                    _build_option(call, _find_annotation(call, groups, configs)), call
                )
    frontend = folder / "entrypoints" / "common" / "cli_args.py"
    for name in ("BaseFrontendArgs", "FrontendArgs"):
        for node in _find_class(frontend, name).body:
            if isinstance(node, ast.AnnAssign):
                takes, kind, choices = _analyze_annotation(node.annotation)
                flag = f"--{ast.unparse(node.target).replace('_', '-')}"
                names = (flag, f"--no-{flag[2:]}") if takes == "none" else (flag,)
                yield Option(names=names, takes=takes, type=kind, choices=choices)
    for call in _list_calls(_list_functions(_parse_file(frontend))["make_arg_parser"]):
        if ast.unparse(call.func) == "parser.add_argument":
            yield _build_option(call)


def _find_annotation(
    call: ast.Call, groups: Mapping[str, str], configs: Mapping[str, ast.ClassDef]
) -> ast.expr | None:
    """Find the settings field that a call of `add_argument` names; return its annotation.

    In vLLM's source, the argument `**group["dtype"]` of such a call names the field `dtype`.

    Return None if the call does not refer to a field.
    """
    for keyword in call.keywords:
        value = keyword.value
        if keyword.arg is None and isinstance(value, ast.Subscript):
            owner = configs.get(groups.get(ast.unparse(value.value), ""))
            for node in owner.body if owner else []:
                if isinstance(node, ast.AnnAssign) and ast.unparse(
                    node.target
                ) == _evaluate_literal(value.slice):
                    return node.annotation
    return None


def _extend_for_vllm(option: Option, call: ast.Call) -> Iterator[Option]:
    """Yield an argument, with additional spellings and values that vLLM accepts.

    vLLM also accepts the prefix `--no-` before the name of a switch, and a unit after some numbers.
    """
    action = _get_keywords(call).get("action")
    is_switch = action is None or ast.unparse(action).endswith("BooleanOptionalAction")
    if option.takes == "none" and is_switch:
        negated_names = [f"--no-{name[2:]}" for name in option.names if name.startswith("--")]
        option = Option(names=(*option.names, *negated_names), takes="none", type=option.type)
    yield replace(option, type="any") if option.names[0] in _HUMAN else option


def _build_option(call: ast.Call, annotation: ast.expr | None = None) -> Option:
    """Return the argument that a call of `add_argument` defines.

    Args:
        call: The call of `add_argument`.
        annotation: Type annotation of the matching field in the settings class. None if the call
            itself defines the type of the argument.
    """
    names = tuple(str(_evaluate_literal(argument)) for argument in call.args)
    keywords = _get_keywords(call)
    action = keywords.get("action")
    if annotation is not None:
        takes, kind, choices = _analyze_annotation(annotation)
    elif any(keyword.arg is None for keyword in call.keywords):
        takes = "any"
        kind = "any"
        choices = ()
    else:
        takes = "one"
        kind = "any"
        choices = ()
    if action is not None:
        is_flag = ast.unparse(action) in ("'store_true'", "'store_false'") or ast.unparse(
            action
        ).endswith(("BooleanOptionalAction", "StoreTrueAction"))
        takes, kind = ("none", "any") if is_flag else ("any", kind)
    if "type" in keywords:
        type_name = ast.unparse(keywords["type"])
        kind = type_name if type_name in _SCALARS else "any"
    if "nargs" in keywords and takes != "none":
        takes = _convert_nargs(_evaluate_literal(keywords["nargs"]))
    if "choices" in keywords:
        choices = tuple(_evaluate_literal(keywords["choices"]) or ())
    return Option(names=names, takes=takes, type=kind, choices=choices)


def _analyze_annotation(annotation: ast.expr) -> tuple[str, str, tuple[Any, ...]]:
    """Describe the values that a command-line argument accepts.

    Args:
        annotation: Type annotation of the field that defines the argument.

    Returns:
        The attributes `takes`, `type` and `choices` of the argument's `Option`.
    """
    names = [name for name in _split_annotation(annotation) if name != "None"]
    if "bool" in names:
        return ("none", "any", ()) if len(names) == 1 else ("optional", "any", ())
    literal = next((name for name in names if name.startswith("Literal[")), None)
    if literal is not None and len(names) == 1:
        choices = ast.literal_eval(f"({literal.removeprefix('Literal[').removesuffix(']')},)")
        return "one", "int" if isinstance(choices[0], int) else "str", choices
    if any(name.lower().startswith(("list[", "tuple[", "set[")) for name in names):
        return "many", "any", ()
    return "one", names[0] if len(names) == 1 and names[0] in _SCALARS else "any", ()


def _split_annotation(annotation: ast.expr) -> list[str]:
    """Return the names of the types that an annotation like `Union[...]` or `... | None` allows."""
    if isinstance(annotation, ast.BinOp):
        return [*_split_annotation(annotation.left), *_split_annotation(annotation.right)]
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return _split_annotation(ast.parse(annotation.value, mode="eval").body)
    if isinstance(annotation, ast.Subscript):
        name = ast.unparse(annotation.value)
        inner = annotation.slice
        items = inner.elts if isinstance(inner, ast.Tuple) else [inner]
        if name == "Optional" or name == "Union":
            return [part for item in items for part in _split_annotation(item)]
        if name == "Literal":
            return [f"Literal[{', '.join(ast.unparse(item) for item in items)}]"]
    return [ast.unparse(annotation)]


def _convert_nargs(nargs: object) -> str:
    """Return the value of `Option.takes` that corresponds to a value of argparse's `nargs`."""
    return {"?": "optional", "+": "many", "*": "any"}.get(str(nargs), "any")


def _parse_file(path: Path) -> ast.Module:
    """Return the syntax tree of a file; raise LookupError if the file does not exist."""
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise LookupError(f"the sources have no file {path}") from error


def _find_class(path: Path, name: str) -> ast.ClassDef:
    """Return a class of a file; raise LookupError if the file has no such class."""
    for node in ast.walk(_parse_file(path)):
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node
    raise LookupError(f"{path.name} has no class {name}")


def _list_functions(node: ast.ClassDef | ast.Module) -> dict[str, ast.FunctionDef]:
    """Return a mapping from name to function, with the functions of a class or module."""
    return {
        function.name: function for function in node.body if isinstance(function, ast.FunctionDef)
    }


def _list_calls(node: ast.AST) -> list[ast.Call]:
    """Return all function calls below a node of a syntax tree."""
    return [call for call in ast.walk(node) if isinstance(call, ast.Call)]


def _get_keywords(call: ast.Call) -> dict[str, ast.expr]:
    """Return a mapping from name to value, with the keyword arguments of a call."""
    return {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}


def _read_constants(path: Path) -> dict[str, Any]:
    """Return a mapping from name to value, with the literal constants of a Python module."""
    constants = {}
    for node in _parse_file(path).body:
        if isinstance(node, ast.Assign) and (value := _evaluate_literal(node.value)) is not None:
            constants[ast.unparse(node.targets[0])] = value
    return constants


def _evaluate_literal(node: ast.expr | None) -> Any:
    """Return the value of a literal, or None if the node is no literal."""
    try:
        return None if node is None else ast.literal_eval(node)
    except ValueError:
        return None
