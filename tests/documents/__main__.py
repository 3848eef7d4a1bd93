"""Generate the parts of docs/*.md that come from the code: `python -m tests.documents`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from tasks.spec.pipeline import PipelineSpec
from tasks.spec.run import RunSpec
from tests.documents import failures, listed_runs, own_settings, spec_reference
from tests.documents.blocks import fill_blocks

ROOT = Path(__file__).resolve().parents[2]
#: Mapping from the name of a generated block to the function that returns its Markdown.
MAKERS: Mapping[str, Callable[[], str]] = {
    "spec-reference": partial(spec_reference.build_reference, RunSpec),
    "pipeline-reference": partial(spec_reference.build_reference, PipelineSpec),
    "moves": failures.draw_transitions,
    "failure-kinds": failures.list_failure_kinds,
    "failure-sections": failures.sections,
    "cause-rules": failures.list_rules,
    "listed-runs": listed_runs.list_keys,
    "settings": own_settings.list_settings,
    "component-variables": own_settings.list_component_variables,
}
#: Exit code if all documents agree with the code, or were updated.
EXIT_OK = 0
#: Exit code of --check if a document is outdated: the generated blocks do not agree with the code.
EXIT_STALE = 1


def documents(root: Path = ROOT) -> Iterator[tuple[Path, str]]:
    """Yield the path of each document in `docs/`, and its text with newly generated blocks."""
    for path in sorted((root / "docs").glob("*.md")):
        yield path, fill_blocks(path.read_text(encoding="utf-8"), MAKERS)


def main(arguments: Sequence[str] | None = None) -> int:
    """Update the generated blocks of all documents. With --check, only report outdated documents.

    Returns:
        The exit code: `EXIT_STALE` if --check finds an outdated document, otherwise `EXIT_OK`.
    """
    options = _parser().parse_args(arguments)
    stale = [(path, text) for path, text in documents() if path.read_text("utf-8") != text]
    for path, text in stale:
        name = path.relative_to(ROOT)
        if options.check:
            print(f"{name} is not current: `make docs` writes it", file=sys.stderr)
        else:
            path.write_text(text, encoding="utf-8")
            print(f"wrote {name}")
    if not stale:
        print("docs/ is current")
    return EXIT_STALE if stale and options.check else EXIT_OK


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.documents",
        description="Write the parts of docs/*.md that are made from the code: the references of "
        "the specs, the run states, the failure kinds with their rules, the JSON of runs, and the "
        "environment variables.",
        epilog="Exit: 0 all documents are current, or were written; 1 with --check, a document is "
        "not current.",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="write nothing, and list the documents that are not current",
    )
    return parser


if __name__ == "__main__":
    raise SystemExit(main())
