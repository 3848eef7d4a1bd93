"""Tests that the commands in the documents exist, with their options.

The tests in `tests/acceptance` execute these commands.
"""

from __future__ import annotations

import re

import pytest

from tests.support.command_checks import (
    find_command_error,
    make_targets,
    muster_verbs,
    program_file,
)
from tests.support.documents import ROOT, Document, DocumentCommand, list_documents

DOCUMENTS = list_documents()
#: Suffixes of the files that may contain commands for a reader to type.
SOURCES = frozenset((".py", ".yaml", ".service", ".timer", ".sh", ".env"))

#: Allowed languages of code blocks. Blocks with `console` and `sh` contain commands. A test runs
#: the commands of `console` blocks.
LANGUAGES = frozenset(
    ("", "console", "sh", "text", "yaml", "python", "json", "toml", "ini", "mermaid", "sql")
)


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_every_block_has_a_known_language(document: Document) -> None:
    unknown = [f"line {block.line}" for block in document.blocks if block.language not in LANGUAGES]

    assert not unknown


def commands() -> list[tuple[Document, DocumentCommand]]:
    """Return the commands in the code blocks of all documents."""
    return [(page, command) for page in DOCUMENTS for command in page.commands("console", "sh")]


@pytest.mark.parametrize(
    "command",
    [pytest.param(command.command, id=f"{page}:{command.line}") for page, command in commands()],
)
def test_commands_in_blocks_are_valid(command: str) -> None:
    assert not find_command_error(command)


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_commands_within_sentences_exist(document: Document) -> None:
    wrong = []
    for line, code in document.codes:
        for module in re.findall(r"\bpython -m ((?:flows|tasks|deployments|tests)[\w.]*)", code):
            if program_file(module.rstrip(".")) is None:
                wrong.append(f"line {line}: there is no program {module}")
        for target in re.findall(r"^make ([a-z-]+)", code):
            if target not in make_targets():
                wrong.append(f"line {line}: there is no `make {target}`")
        if code.startswith("muster "):
            # A sentence may contain only the name of a command of `muster`. Then missing arguments
            # are no error. A command with an option (`--`) must be complete.
            complaint = find_command_error(code)
            if complaint and not ("--" not in code and "requires an argument" in complaint):
                wrong.append(f"line {line}: {complaint}")

    assert not wrong


def test_commands_in_the_code_exist() -> None:
    folders = [ROOT / name for name in ("tasks", "flows", "deployments")]
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in SOURCES]

    wrong = []
    for path in (*files, ROOT / "prefect.yaml"):
        text = path.read_text(encoding="utf-8")
        for module in re.findall(r"\bpython -m ((?:flows|tasks|deployments)[\w.]*\w)", text):
            if program_file(module) is None:
                wrong.append(f"{path.relative_to(ROOT)}: there is no program {module}")
        for verb in re.findall(r"`muster ([a-z]+)", text):
            if verb not in muster_verbs():
                wrong.append(f"{path.relative_to(ROOT)}: there is no `muster {verb}`")

    assert not wrong


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        ("make trian", "there is no `make trian`"),
        ("make soak ARGS='--no-such 1'", "unrecognized arguments: --no-such 1"),
        ("python -m flows.train deployments/runs/quickstart.yaml --set a.b=c", ""),
        ("python -m flows.train --st a.b=c SPEC.yaml", "Unknown option: --st"),
        ("python -m flows.prune", "there is no program flows.prune"),
        ("python -m tests.documents stop", "unrecognized arguments: stop"),
        ("python -m deployments.worker --pol gang", "Unknown option"),
        ("prefect deployment runn x", "Unknown command"),
        ("MUSTER_HOME=/tmp/x make up && make downn", "there is no `make downn`"),
        ("cp deployments/runs/quack*.yaml /tmp", "there is no deployments/runs/quack*.yaml"),
        (".venv/bin/muster submit SPEC.yaml --watch --set a.b=c", ""),
        ("muster logs latest -f", ""),
        ("muster stop", "muster has no command 'stop'"),
        ("muster queue set policy=fifo --pol gang", "muster: Unknown option: --pol"),
        ("muster cancel", "requires an argument"),
        ("muster ls --limit many", "many"),
        ("make prune ARGS=--no-such", "muster: Unknown option: --no-such"),
        ("mustard up", "no test knows the program mustard"),
    ],
)
def test_invalid_commands_are_detected(command: str, complaint: str) -> None:
    reported = find_command_error(command)

    assert complaint in reported
    assert bool(reported) == bool(complaint)
