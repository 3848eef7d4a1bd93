"""The arguments of a backend's command line, from its sources, which are parsed and never run."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tests.peers.backends.facts import Option

#: Whole numbers that vLLM also takes as 1K, 2M or auto.
#: Source: vLLM 0.33, engine/arg_utils.py, `_compute_kwargs`
_HUMAN = (
    *("--max-model-len", "--max-num-batched-tokens", "--max-num-scheduled-tokens"),
    *("--kv-cache-memory-bytes", "--safetensors-prefetch-block-size", "--max-num-queued-tokens"),
)
#: The annotations whose name is also that of the type on a command line.
_SCALARS = ("int", "float", "str")


def options_of(backend: str, folder: Path) -> tuple[Option, ...]:
    """Every argument that a server of the backend takes, by its unpacked package.

    Raises:
        LookupError: The sources are not laid out as in the versions that are known.
    """
    readers = {"sglang": _sglang, "lmdeploy": _lmdeploy, "vllm": _vllm}
    found: dict[str, Option] = {}
    for option in readers[backend](folder / backend):
        found.setdefault(option.names[0], option)
    if not found:
        raise LookupError(f"no arguments were found in {backend}'s sources")
    return tuple(sorted(found.values(), key=lambda option: option.names[0].lstrip("-")))


def _lmdeploy(folder: Path) -> Iterator[Option]:
    helper = _class_in(folder / "cli" / "utils.py", "ArgumentHelper")
    methods = _functions_in(helper)
    commands = _functions_in(_class_in(folder / "cli" / "serve.py", "SubCliServe"))

    def of(function: ast.AST) -> Iterator[Option]:
        for call in _calls_in(function):
            name = ast.unparse(call.func)
            if name.endswith(".add_argument"):
                yield _option_of(call)
            elif name.startswith("ArgumentHelper.") and name.partition(".")[2] in methods:
                yield from of(methods[name.partition(".")[2]])

    yield from of(commands["add_parser_api_server"])


def _sglang(folder: Path) -> Iterator[Option]:
    groups = folder / "srt" / "arg_groups"
    constants = _constants_in(groups / "choices.py")
    for path in sorted((groups / "fields").glob("*.py")):
        for node in ast.walk(_tree_of(path)):
            if isinstance(node, ast.AnnAssign) and isinstance(node.annotation, ast.Subscript):
                yield from _field_of_sglang(node, node.annotation, constants)
    parser = _class_in(folder / "srt" / "server_args.py", "ServerArgs")
    for call in _calls_in(_functions_in(parser)["add_cli_args"]):
        if ast.unparse(call.func) == "parser.add_argument":
            yield _option_of(call)


def _field_of_sglang(
    node: ast.AnnAssign, annotation: ast.Subscript, constants: Mapping[str, Any]
) -> Iterator[Option]:
    if ast.unparse(annotation.value) not in ("A", "Annotated"):
        return
    parts = annotation.slice.elts if isinstance(annotation.slice, ast.Tuple) else []
    more = next((one for one in parts[1:] if isinstance(one, ast.Call | ast.Constant)), None)
    if more is None:
        return
    keywords = _keywords_of(more) if isinstance(more, ast.Call) else {}
    if _literal(keywords.get("no_cli")) is True:
        return
    name = _literal(keywords.get("cli_name")) or f"--{ast.unparse(node.target).replace('_', '-')}"
    names = (name, *(_literal(keywords.get("aliases")) or ()))
    takes, kind, choices = _shape(parts[0])
    if "action" in keywords:
        yield Option(names=names, takes="any")
        return
    if "type_parser" in keywords:
        takes, kind = ("one" if takes == "many" else takes), "any"
    if "nargs" in keywords:
        takes = _takes(_literal(keywords["nargs"]))
    if "choices" in keywords:
        written = keywords["choices"]
        choices = tuple(_literal(written) or constants.get(ast.unparse(written), ()))
    yield Option(names=names, takes=takes, type=kind, choices=choices)


def _vllm(folder: Path) -> Iterator[Option]:
    configs = {
        node.name: node
        for path in sorted((folder / "config").glob("*.py"))
        for node in ast.walk(_tree_of(path))
        if isinstance(node, ast.ClassDef)
    }
    arguments = folder / "engine" / "arg_utils.py"
    for name in ("EngineArgs", "AsyncEngineArgs"):
        function = _functions_in(_class_in(arguments, name))["add_cli_args"]
        groups = {
            ast.unparse(node.targets[0]): ast.unparse(node.value.args[0])
            for node in ast.walk(function)
            if isinstance(node, ast.Assign)
            and isinstance(node.value, ast.Call)
            and ast.unparse(node.value.func) == "get_kwargs"
        }
        for call in _calls_in(function):
            if ast.unparse(call.func).endswith(".add_argument"):
                yield from _as_vllm_has_it(
                    _option_of(call, _annotation_of(call, groups, configs)), call
                )
    frontend = folder / "entrypoints" / "common" / "cli_args.py"
    for name in ("BaseFrontendArgs", "FrontendArgs"):
        for node in _class_in(frontend, name).body:
            if isinstance(node, ast.AnnAssign):
                takes, kind, choices = _shape(node.annotation)
                flag = f"--{ast.unparse(node.target).replace('_', '-')}"
                names = (flag, f"--no-{flag[2:]}") if takes == "none" else (flag,)
                yield Option(names=names, takes=takes, type=kind, choices=choices)
    for call in _calls_in(_functions_in(_tree_of(frontend))["make_arg_parser"]):
        if ast.unparse(call.func) == "parser.add_argument":
            yield _option_of(call)


def _annotation_of(
    call: ast.Call, groups: Mapping[str, str], configs: Mapping[str, ast.ClassDef]
) -> ast.expr | None:
    """Of the field that `**model_kwargs["dtype"]` stands for."""
    for keyword in call.keywords:
        value = keyword.value
        if keyword.arg is None and isinstance(value, ast.Subscript):
            owner = configs.get(groups.get(ast.unparse(value.value), ""))
            for node in owner.body if owner else []:
                if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == _literal(
                    value.slice
                ):
                    return node.annotation
    return None


def _as_vllm_has_it(option: Option, call: ast.Call) -> Iterator[Option]:
    """A switch can be written with `--no-` too, and some numbers as a person would."""
    action = _keywords_of(call).get("action")
    is_switch = action is None or ast.unparse(action).endswith("BooleanOptionalAction")
    if option.takes == "none" and is_switch:
        long = [f"--no-{name[2:]}" for name in option.names if name.startswith("--")]
        option = Option(names=(*option.names, *long), takes="none", type=option.type)
    yield replace(option, type="any") if option.names[0] in _HUMAN else option


def _option_of(call: ast.Call, annotation: ast.expr | None = None) -> Option:
    """What a call of `add_argument` defines; `annotation` is of the field that it takes over."""
    names = tuple(str(_literal(one)) for one in call.args)
    keywords = _keywords_of(call)
    action = keywords.get("action")
    if annotation is not None:
        takes, kind, choices = _shape(annotation)
    elif any(keyword.arg is None for keyword in call.keywords):
        takes, kind, choices = "any", "any", ()
    else:
        takes, kind, choices = "one", "any", ()
    if action is not None:
        is_flag = ast.unparse(action) in ("'store_true'", "'store_false'") or ast.unparse(
            action
        ).endswith(("BooleanOptionalAction", "StoreTrueAction"))
        takes, kind = ("none", "any") if is_flag else ("any", kind)
    if "type" in keywords:
        written = ast.unparse(keywords["type"])
        kind = written if written in _SCALARS else "any"
    if "nargs" in keywords and takes != "none":
        takes = _takes(_literal(keywords["nargs"]))
    if "choices" in keywords:
        choices = tuple(_literal(keywords["choices"]) or ())
    return Option(names=names, takes=takes, type=kind, choices=choices)


def _shape(annotation: ast.expr) -> tuple[str, str, tuple[Any, ...]]:
    """What a field of this type takes, its type, and its choices."""
    parts = [part for part in _parts(annotation) if part != "None"]
    if "bool" in parts:
        return ("none", "any", ()) if len(parts) == 1 else ("optional", "any", ())
    literal = next((part for part in parts if part.startswith("Literal[")), None)
    if literal is not None and len(parts) == 1:
        choices = ast.literal_eval(f"({literal.removeprefix('Literal[').removesuffix(']')},)")
        return "one", "int" if isinstance(choices[0], int) else "str", choices
    if any(part.lower().startswith(("list[", "tuple[", "set[")) for part in parts):
        return "many", "any", ()
    return "one", parts[0] if len(parts) == 1 and parts[0] in _SCALARS else "any", ()


def _parts(annotation: ast.expr) -> list[str]:
    """The types that an annotation allows, without `Optional`, `Union` and `|`."""
    if isinstance(annotation, ast.BinOp):
        return [*_parts(annotation.left), *_parts(annotation.right)]
    if isinstance(annotation, ast.Constant) and isinstance(annotation.value, str):
        return _parts(ast.parse(annotation.value, mode="eval").body)
    if isinstance(annotation, ast.Subscript):
        name, inner = ast.unparse(annotation.value), annotation.slice
        items = inner.elts if isinstance(inner, ast.Tuple) else [inner]
        if name == "Optional" or name == "Union":
            return [part for item in items for part in _parts(item)]
        if name == "Literal":
            return [f"Literal[{', '.join(ast.unparse(item) for item in items)}]"]
    return [ast.unparse(annotation)]


def _takes(nargs: object) -> str:
    return {"?": "optional", "+": "many", "*": "any"}.get(str(nargs), "any")


def _tree_of(path: Path) -> ast.Module:
    try:
        return ast.parse(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise LookupError(f"its sources have no {path.name} where it was") from error


def _class_in(path: Path, name: str) -> ast.ClassDef:
    for node in ast.walk(_tree_of(path)):
        if isinstance(node, ast.ClassDef) and node.name == name:
            return node
    raise LookupError(f"{path.name} has no class {name}")


def _functions_in(node: ast.ClassDef | ast.Module) -> dict[str, ast.FunctionDef]:
    return {one.name: one for one in node.body if isinstance(one, ast.FunctionDef)}


def _calls_in(node: ast.AST) -> list[ast.Call]:
    return [one for one in ast.walk(node) if isinstance(one, ast.Call)]


def _keywords_of(call: ast.Call) -> dict[str, ast.expr]:
    return {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}


def _constants_in(path: Path) -> dict[str, Any]:
    found = {}
    for node in _tree_of(path).body:
        if isinstance(node, ast.Assign) and (value := _literal(node.value)) is not None:
            found[ast.unparse(node.targets[0])] = value
    return found


def _literal(node: ast.expr | None) -> Any:
    """The value of a literal; None where it is no literal."""
    try:
        return None if node is None else ast.literal_eval(node)
    except ValueError:
        return None
