"""Read the command-line options of a Python script from its source, without running the script.

`muster init` uses this module to pass the folder of the checkpoints, the checkpoint to resume from,
the number of steps and the metrics file to a training script.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from tasks.spec.script_structure import parse_source


class Purpose(Enum):
    """Meaning of an option of a training script. Each member's value is a pattern.

    The pattern must match the whole name of the option. Before the match, leading dashes are
    removed from the name, and `-` is replaced by `_`.
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
    #: Number of training steps.
    STEPS = (
        r"steps|(?:max|num|total|train|training|n|num_train|num_training|max_train|total_train)"
        r"_(?:steps|iters|iterations|updates)|iters|iterations|updates"
    )
    #: File to which the script writes its metrics as JSON lines.
    METRICS = r"metrics|metrics?_(?:file|path|jsonl|out|output|log)|log_jsonl"


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

    @property
    def purpose(self) -> Purpose | None:
        """Meaning of the option, or None if the name does not show the meaning."""
        plain_name = self.name.lstrip("-").replace("-", "_").lower()
        if not self.name.startswith("-"):
            return None
        for purpose in Purpose:
            if re.fullmatch(purpose.value, plain_name):
                return purpose
        return None


def read_options(source: str) -> list[ScriptOption]:
    """Return the options of a Python script that have a value, in the order of the source.

    The function reads the calls of argparse's `add_argument`, and of Click's `option` and
    `argument`.

    Args:
        source: Source text of the script. If it is not valid Python, the result is empty.
    """
    tree = parse_source(source)
    return list(_find_options(tree)) if tree is not None else []


def _find_options(tree: ast.Module) -> Iterator[ScriptOption]:
    calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
    for call in sorted(calls, key=lambda node: (node.lineno, node.col_offset)):
        function = call.func.attr if isinstance(call.func, ast.Attribute) else ""
        if function not in ("add_argument", "option", "argument"):
            continue
        names = [name for argument in call.args if (name := _read_text(argument))]
        if not names:
            continue
        # Click's `option` may also have the name of the function's parameter, without dashes. This
        # name is not part of the command line.
        dashed_names = [name for name in names if name.startswith("-")]
        name = max(dashed_names, key=len) if dashed_names else names[0]
        keywords = {keyword.arg: keyword.value for keyword in call.keywords}
        if "action" in keywords or "is_flag" in keywords or "nargs" in keywords:
            # Skip an option that does not have exactly one value. A flag such as `store_true` has
            # no value, and `nargs` may mean several values.
            continue
        is_positional = not name.startswith("-")
        has_default = "default" in keywords
        yield ScriptOption(
            name=name,
            is_required=_is_true(keywords.get("required")) or (is_positional and not has_default),
            default_number=_read_number(keywords.get("default")),
        )


def _read_text(node: ast.expr) -> str:
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return str(node.value) if is_text and isinstance(node, ast.Constant) else ""


def _read_number(node: ast.expr | None) -> int | None:
    if isinstance(node, ast.Constant) and type(node.value) is int and node.value > 0:
        return node.value
    return None


def _is_true(node: ast.expr | None) -> bool:
    return isinstance(node, ast.Constant) and node.value is True
