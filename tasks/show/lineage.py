"""The lineage of a run as an artifact, and as a tree of lines on the terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tasks.record.lineage import Lineage, LineageInput, LineageOutput
from tasks.show.markdown import code_block, inline_code, markdown_table
from tasks.show.output import one_line
from tasks.show.run_view import Shown
from tasks.spec.formatting import format_count

#: Key of the Prefect artifact that shows the lineage of a run.
LINEAGE = "lineage"
#: Heading before the JSON in the artifact. Programs read this JSON.
_JSON_HEADING = "### JSON"
#: Largest number of outputs in the table of the artifact. The JSON lists all outputs.
_MAX_ROWS = 50
#: Largest number of values, such as `score=0.71`, that are shown for one evaluation.
_MAX_FIGURES = 5


def show_lineage(lineage: Lineage) -> Shown:
    """Return the artifact with the inputs and the outputs of a run."""
    headline = ", ".join(
        [
            format_count(len(lineage.inputs), "input"),
            format_count(len(lineage.outputs), "output"),
        ]
    )
    inputs = [
        [data.kind.value, inline_code(data.uri), inline_code(data.run) if data.run else ""]
        for data in lineage.inputs
    ]
    outputs = [
        [
            output.kind.value,
            _format_step(output.step),
            inline_code(output.path or output.uri),
            _format_figures(output),
        ]
        for output in reversed(lineage.outputs[-_MAX_ROWS:])
    ]
    parts = []
    if inputs:
        parts += ["### Made from", markdown_table(["kind", "data", "made by"], inputs)]
    if outputs:
        parts += ["### Made", markdown_table(["kind", "step", "data", "metrics"], outputs)]
    content = json.dumps(lineage.as_json(), indent=1)
    parts += [_JSON_HEADING, code_block(content)]
    return Shown(headline=headline, data="\n\n".join(parts))


def parse_lineage(data: str) -> Lineage | None:
    """Return the lineage in an artifact from `show_lineage`, or None if the artifact is invalid.

    Args:
        data: Markdown of the artifact.
    """
    block = data.rpartition(f"{_JSON_HEADING}\n\n")[2]
    content = block.partition("\n")[2].rpartition("\n")[0]
    try:
        lineage = Lineage.model_validate_json(content)
    except ValueError:
        return None
    return lineage if lineage.run_id else None


@dataclass(kw_only=True)
class TreeNode:
    """A line of a tree, and the lines below it."""

    text: str
    children: list[TreeNode] = field(default_factory=list)

    def add(self, text: str) -> TreeNode:
        """Add a line below this line of the tree, and return the new line."""
        child = TreeNode(text=text)
        self.children.append(child)
        return child


def format_tree(root: TreeNode) -> Iterator[str]:
    """Yield the lines of a tree, with characters that draw its branches."""
    yield one_line(root.text)
    yield from _format_branches(root.children, "")


def _format_branches(nodes: Sequence[TreeNode], indent: str) -> Iterator[str]:
    for node in nodes:
        is_last = node is nodes[-1]
        yield f"{indent}{'└── ' if is_last else '├── '}{one_line(node.text)}"
        below = "    " if is_last else "│   "
        yield from _format_branches(node.children, indent + below)


def describe_input(data: LineageInput) -> str:
    """Return an input as one line, such as `checkpoint /data/step_20 (step 20)`."""
    step = f" ({_format_step(data.step)})" if data.step is not None else ""
    return f"{data.kind.value} {data.uri}{step}"


def describe_output(output: LineageOutput) -> str:
    """Return an output as one line, such as `evaluation score=0.71`."""
    parts = [output.kind.value, _format_step(output.step), _format_figures(output)]
    uri = output.path or output.uri
    return " ".join(part for part in (*parts, uri) if part)


def _format_step(step: float | None) -> str:
    return "" if step is None else f"step {step:g}"


def _format_figures(output: LineageOutput) -> str:
    figures = [*output.figures.items()][:_MAX_FIGURES]
    return " ".join(f"{name}={value:g}" for name, value in figures)
