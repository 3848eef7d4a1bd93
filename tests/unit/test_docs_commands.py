"""What the documents tell to type exists, with its options. `tests/acceptance` really types it."""

from __future__ import annotations

import re

import pytest

from tests.support.documents import Document, Said, documents
from tests.support.typed import complaint_about, make_targets, module_file

DOCUMENTS = documents()

#: Languages of blocks. `console` and `sh` are commands, of which the first is run by a test.
LANGUAGES = frozenset(
    ("", "console", "sh", "text", "yaml", "python", "json", "toml", "ini", "mermaid", "sql")
)


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_every_block_is_of_a_language_that_tests_know(document: Document) -> None:
    others = [f"line {one.line}" for one in document.blocks if one.language not in LANGUAGES]

    assert not others


def commands() -> list[tuple[Document, Said]]:
    return [(page, said) for page in DOCUMENTS for said in page.commands("console", "sh")]


@pytest.mark.parametrize(
    "command", [pytest.param(said.command, id=f"{page}:{said.line}") for page, said in commands()]
)
def test_a_command_would_be_understood(command: str) -> None:
    assert not complaint_about(command)


@pytest.mark.parametrize("document", DOCUMENTS, ids=str)
def test_every_command_within_a_sentence_exists(document: Document) -> None:
    wrong = []
    for line, code in document.codes:
        for module in re.findall(r"\bpython -m ((?:flows|tasks|deployments|tests)[\w.]*)", code):
            if module_file(module.rstrip(".")) is None:
                wrong.append(f"line {line}: there is no module {module}")
        for target in re.findall(r"^make ([a-z-]+)", code):
            if target not in make_targets():
                wrong.append(f"line {line}: there is no `make {target}`")

    assert not wrong


@pytest.mark.parametrize(
    ("command", "complaint"),
    [
        ("make trian", "there is no `make trian`"),
        ("make soak ARGS='--no-such 1'", "unrecognized arguments: --no-such 1"),
        ("python -m flows.train deployments/runs/quickstart.yaml --set a.b=c", ""),
        ("python -m tasks.queue stop", "invalid choice: 'stop'"),
        ("python -m deployments.worker --pol gang", "Unknown option"),
        ("prefect deployment runn x", "Unknown command"),
        ("MUSTER_HOME=/tmp/x make up && make downn", "there is no `make downn`"),
        ("cp deployments/runs/quack*.yaml /tmp", "there is no deployments/runs/quack*.yaml"),
        ("muster up", "no test knows the program muster"),
    ],
)
def test_a_command_that_would_not_be_understood_is_found(command: str, complaint: str) -> None:
    found = complaint_about(command)

    assert complaint in found
    assert bool(found) == bool(complaint)
