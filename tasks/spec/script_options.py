"""Read from the source of a Python script which options and environment variables it uses.

`muster init` uses this module to pass the folder of the checkpoints, the checkpoint to resume from,
the number of steps and the metrics file to a training script. The script is not run.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum

from tasks.spec.script_structure import parse_source


class Purpose(Enum):
    """Meaning of an option or environment variable of a training script.

    Each member's value is a pattern. The pattern must match the whole name in lower case. Before
    the match, leading dashes are removed from the name, and `-` is replaced by `_`.
    """

    #: Folder into which the script saves its checkpoints.
    CHECKPOINTS = (
        r"out|output|out(?:put)?_?dir|output_path|outdir|save|save_(?:dir|path|folder|to)"
        r"|(?:ckpt|checkpoint)s?(?:_(?:dir|folder|out))?|default_root_dir"
    )
    #: Checkpoint from which the script resumes.
    RESUME_FROM = (
        r"resume|resume_(?:from|path|ckpt|checkpoint)|resume_from_(?:checkpoint|ckpt|path)"
        r"|load|load_(?:from|ckpt|checkpoint)|load_from_checkpoint|ckpt_path|restore|restore_from"
        r"|init_from_checkpoint"
    )
    #: Flag without a value, which makes the script resume from the newest checkpoint in its own
    #: folder of checkpoints, if there is one.
    AUTO_RESUME = r"auto_?resume|resume_(?:auto|latest|last)"
    #: Flag without a value that makes the script resume. The name does not say whether the script
    #: accepts the flag if there is no checkpoint yet.
    RESUME_FLAG = r"resume|resume_training|continue|continue_training"
    #: Number of training steps.
    STEPS = (
        r"steps|(?:max|num|total|train|training|n|num_train|num_training|max_train|total_train)"
        r"_(?:steps|iters|iterations|updates)|iters|iterations|updates"
    )
    #: File to which the script writes its metrics as JSON lines.
    METRICS = r"metrics|metrics?_(?:file|path|jsonl|out|output|log)|log_jsonl"


#: Functions and classes that make options from the fields of a dataclass, or from parameters.
_FIELD_PARSERS = ("tyro.cli", "simple_parsing.parse", "HfArgumentParser", "TrlParser")
#: Matches the type of a field that may have several values.
_SEVERAL_VALUES = re.compile(r"(?i)\b(?:list|tuple|set|sequence|dict|mapping)\b")
#: Meanings of options without a value.
_FLAGS = (Purpose.AUTO_RESUME, Purpose.RESUME_FLAG)
#: The meanings of options and variables whose values are paths.
_PATHS = (Purpose.CHECKPOINTS, Purpose.RESUME_FROM, Purpose.METRICS)
#: Matches the type of a number.
_NUMBER_TYPE = re.compile(r"(?:\w+\.)?(?:Optional\[)?(?:int|float|INT|FLOAT)\b.*")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScriptOption:
    """An option or a positional argument of a Python script."""

    #: Longest name of the option, including its dashes, such as `--output-dir`. The name of a
    #: positional argument has no dashes.
    name: str
    #: True if the script fails without the option.
    is_required: bool
    #: Default value if it is a whole number, otherwise None.
    default_number: int | None = None
    #: Default value if it is a text, otherwise "".
    default_text: str = ""
    #: True if the option, such as `--verbose`, takes no value.
    is_flag: bool = False
    #: True if the value is a number, according to its type or its default value.
    is_number: bool = False
    #: Name that the source explicitly gives to the value of the option. Empty if the library makes
    #: this name from the name of the option.
    given_attribute: str = ""

    @property
    def attribute(self) -> str:
        """Name of the option's value in the script, such as `output_dir` for `args.output_dir`."""
        return self.given_attribute or self.name.lstrip("-").replace("-", "_")

    @property
    def purpose(self) -> Purpose | None:
        """Meaning of the option, or None if the name does not show the meaning."""
        if not self.name.startswith("-"):
            return None
        purpose = find_purpose(self.name, is_flag=self.is_flag)
        # A number as in `--save 100` is no path. It may be the number of steps between two saves.
        return None if self.is_number and purpose in _PATHS else purpose


def find_purpose(name: str, *, is_flag: bool = False) -> Purpose | None:
    """Return the meaning of an option, variable or key, or None if its name does not show it."""
    plain_name = name.lstrip("-").replace("-", "_").lower()
    for purpose in Purpose:
        if (purpose in _FLAGS) == is_flag and re.fullmatch(purpose.value, plain_name):
            return purpose
    return None


def read_variables(sources: Iterable[str]) -> dict[Purpose, str]:
    """Return the environment variables through which a Python script gets paths.

    The function recognises `os.environ["NAME"]`, `os.environ.get("NAME")` and `os.getenv("NAME")`.

    Args:
        sources: Source texts of the script, and of the project's modules that the script imports.
            A text that is not valid Python is ignored.

    Returns:
        Mapping from the purpose of a variable, such as the folder of the checkpoints, to the name
        of the variable. If several variables have the same purpose, the first is returned.
    """
    variables: dict[Purpose, str] = {}
    for tree in map(parse_source, sources):
        for node in ast.walk(tree) if tree is not None else ():
            name = _find_variable(node)
            purpose = find_purpose(name)
            if name.isupper() and purpose in _PATHS:
                variables.setdefault(purpose, name)
    return variables


def _find_variable(node: ast.AST) -> str:
    """Return the name of the environment variable that an expression reads, or ""."""
    match node:
        case ast.Subscript(value=ast.Attribute(attr="environ"), slice=key, ctx=ast.Load()):
            return _read_text(key)
        case ast.Call(
            func=ast.Attribute(value=ast.Attribute(attr="environ"), attr="get"), args=[key, *_]
        ):
            return _read_text(key)
        case ast.Call(func=ast.Attribute(attr="getenv") | ast.Name(id="getenv"), args=[key, *_]):
            return _read_text(key)
    return ""


def read_options(source: str) -> list[ScriptOption]:
    """Return the options of a Python script, in the order of the source.

    The function reads the calls of argparse's `add_argument`, and of Click's `option` and
    `argument`. It also reads the dataclasses and functions from which tyro, simple_parsing or
    transformers' `HfArgumentParser` makes options. Options that may have several values are left
    out.

    Args:
        source: Source text of the script. If it is not valid Python, the result is empty.
    """
    tree = parse_source(source)
    return [*_find_options(tree), *_find_field_options(tree)] if tree is not None else []


def _find_options(tree: ast.Module) -> Iterator[ScriptOption]:
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for call in sorted(calls, key=lambda node: (node.lineno, node.col_offset)):
        function = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        if function not in ("add_argument", "option", "argument"):
            continue
        texts = [text for argument in call.args if (text := _read_text(argument))]
        # Click writes a flag and its opposite as one text: `--resume/--no-resume`.
        names = [text.partition("/")[0].strip() for text in texts]
        has_opposite = any(text.startswith("-") and "/" in text for text in texts)
        if not names:
            continue
        # The arguments of Click's `option` may include a name without dashes, the name of a Python
        # parameter. This name is not part of the command line.
        dashed_names = [name for name in names if name.startswith("-")]
        name = max(dashed_names, key=len) if dashed_names else names[0]
        keywords = {keyword.arg: keyword.value for keyword in call.keywords}
        long_names = [name for name in dashed_names if name.startswith("--")]
        plain_names = [name for name in names if not name.startswith("-")]
        attributes = [_read_text(keywords.get("dest")), *plain_names, *long_names, name]
        attribute = next(filter(None, attributes)).lstrip("-").replace("-", "_")
        action = keywords.get("action")
        is_flag = (
            has_opposite
            or _read_text(action) == "store_true"
            or (isinstance(action, ast.Attribute) and action.attr == "BooleanOptionalAction")
            or _is_true(keywords.get("is_flag"))
        )
        if not is_flag and not keywords.keys().isdisjoint(("action", "is_flag", "nargs")):
            # `nargs`, and actions such as `append`, may mean several values.
            continue
        is_positional = not name.startswith("-")
        has_default = "default" in keywords
        yield ScriptOption(
            name=name,
            is_required=_is_true(keywords.get("required")) or (is_positional and not has_default),
            default_number=_read_number(keywords.get("default")),
            default_text=_read_text(keywords.get("default")),
            is_flag=is_flag,
            is_number=_is_number(keywords.get("type"), keywords.get("default")),
            given_attribute=attribute,
        )


def _find_field_options(tree: ast.Module) -> Iterator[ScriptOption]:
    """Yield the options that a library makes from fields of dataclasses, or from parameters."""
    definitions = {
        node.name: node
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef | ast.FunctionDef)
    }
    for call in ast.walk(tree):
        if not isinstance(call, ast.Call) or not call.args:
            continue
        parser = ast.unparse(call.func)
        if parser not in _FIELD_PARSERS:
            continue
        first = call.args[0]
        sources = first.elts if isinstance(first, ast.Tuple | ast.List) else [first]
        for source in sources:
            definition = definitions.get(source.id) if isinstance(source, ast.Name) else None
            for name, annotation, default in _list_fields(definition):
                # tyro writes `--run-dir` for the field `run_dir`. The other libraries write
                # `--run_dir`.
                word = name.replace("_", "-") if parser == "tyro.cli" else name
                type_name = ast.unparse(annotation) if annotation is not None else ""
                if _SEVERAL_VALUES.search(type_name):
                    continue
                yield ScriptOption(
                    name=f"--{word}",
                    is_required=default is None,
                    default_number=_read_number(default),
                    default_text=_read_text(default),
                    is_flag=type_name == "bool",
                    is_number=_is_number(annotation, default),
                    given_attribute=name,
                )


def _list_fields(
    definition: ast.ClassDef | ast.FunctionDef | None,
) -> Iterator[tuple[str, ast.expr | None, ast.expr | None]]:
    """Yield the name, type and default value of each field of a class, or of each parameter."""
    if isinstance(definition, ast.FunctionDef):
        arguments = definition.args
        parameters = [*arguments.posonlyargs, *arguments.args]
        missing = [None] * (len(parameters) - len(arguments.defaults))
        values = [*missing, *arguments.defaults, *arguments.kw_defaults]
        parameters += arguments.kwonlyargs
        for parameter, value in zip(parameters, values, strict=True):
            yield parameter.arg, parameter.annotation, value
    for statement in definition.body if isinstance(definition, ast.ClassDef) else ():
        match statement:
            case ast.AnnAssign(
                target=ast.Name(id=name), annotation=annotation, value=ast.Call(keywords=keywords)
            ) if defaults := [each for each in keywords if "default" in (each.arg or "")]:
                # `dataclasses.field(default=...)` or `field(default_factory=...)`
                yield name, annotation, defaults[0].value
            case ast.AnnAssign(target=ast.Name(id=name), annotation=annotation, value=value):
                is_bare_field = isinstance(value, ast.Call) and ast.unparse(value.func) in (
                    "field",
                    "dataclasses.field",
                )
                yield name, annotation, None if is_bare_field else value


def _read_text(node: ast.expr | None) -> str:
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return str(node.value) if is_text and isinstance(node, ast.Constant) else ""


def _read_number(node: ast.expr | None) -> int | None:
    if isinstance(node, ast.Constant) and type(node.value) is int and node.value > 0:
        return node.value
    return None


def _is_number(type_node: ast.expr | None, default: ast.expr | None) -> bool:
    """Return True if the value of an option is a number, according to its type or default."""
    if type_node is not None and _NUMBER_TYPE.fullmatch(ast.unparse(type_node)):
        return True
    return isinstance(default, ast.Constant) and type(default.value) in (int, float)


def _is_true(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is True
