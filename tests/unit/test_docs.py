"""The documents say what is so: links lead somewhere, examples validate, commands exist."""

from __future__ import annotations

import ast
import asyncio
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import yaml

from tasks.processes.probes import until_yes
from tasks.record.causes import RULES, find_cause, read_rules
from tasks.record.states import RunState
from tasks.rollout.backends import BACKENDS
from tasks.rollout.topology import planned
from tasks.spec.errors import InvalidSpec
from tasks.spec.failure_kinds import FailureKind
from tasks.spec.loading import parse_spec
from tasks.spec.pipeline import PipelineSpec, load_pipeline
from tasks.spec.rollout import Rollout
from tasks.spec.run import RunSpec
from tests.documents import listed_runs, spec_reference
from tests.documents.__main__ import documents as made_documents
from tests.support.documents import ROOT, Block, Document, documents
from tests.support.typed import muster_verbs

DOCUMENTS = documents()
DOCS = ROOT / "docs"

each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=str)

#: What a part of a spec is put into.
BASE: Mapping[str, Any] = {
    "name": "example",
    "workload": "grpo",
    "components": {
        "api": {"command": ["run-api", "--port", "${api.port}"]},
        "trainer": {"command": ["python", "train.py", "--port", "${trainer.port}"]},
    },
}


def document(name: str) -> Document:
    return next(one for one in DOCUMENTS if str(one) == name)


def marked(mark: str) -> list[Any]:
    """The blocks with a mark, of all documents."""
    return [
        pytest.param(block, id=f"{one}:{block.line}")
        for one in DOCUMENTS
        for block in one.blocks
        if block.info == mark
    ]


def merged(base: Mapping[str, Any], part: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(base)
    for key, value in part.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = merged(result[key], value) if both else value
    return result


@each_document
def test_every_link_leads_somewhere(document: Document) -> None:
    broken = [f"line {line}: {link}" for line, link in document.links if not leads(document, link)]

    assert not broken


def leads(document: Document, link: str) -> bool:
    parts = urlsplit(link)
    if parts.scheme:
        return parts.scheme in ("http", "https") and bool(parts.hostname)
    path = document.path.parent / unquote(parts.path) if parts.path else document.path
    if not path.exists() or ROOT not in path.resolve().parents:
        return False
    if not parts.fragment:
        return True
    return path.suffix == ".md" and parts.fragment in Document(path).anchors


@each_document
def test_every_file_that_is_named_is_there(document: Document) -> None:
    tops = ("tasks/", "flows/", "deployments/", "tests/", "docs/")
    named = [
        (line, code)
        for line, code in document.codes
        if code.startswith(tops) and re.fullmatch(r"[\w./-]+", code)
    ]

    missing = [f"line {line}: {code}" for line, code in named if not (ROOT / code).exists()]

    assert not missing


def test_the_index_names_every_page() -> None:
    named = {link for _, link in document("docs/README.md").links}

    missing = [path.name for path in DOCS.glob("*.md") if path.name not in {"README.md", *named}]

    assert not missing


def test_every_part_that_is_made_from_the_code_is_current() -> None:
    stale = [path.name for path, text in made_documents() if path.read_text("utf-8") != text]

    assert not stale, "`make docs` writes them"


@pytest.mark.parametrize("block", marked("yaml run-spec"))
def test_an_example_of_a_run_spec_is_valid(block: Block) -> None:
    parse_spec(yaml.safe_load(block.text))


@pytest.mark.parametrize("block", marked("yaml pipeline"))
def test_an_example_of_a_pipeline_is_valid(block: Block, tmp_path: Path) -> None:
    path = tmp_path / "pipeline.yaml"
    path.write_text(block.text, encoding="utf-8")
    # The files that it names start from its project.
    (tmp_path / "deployments").symlink_to(ROOT / "deployments")

    load_pipeline(path)


@pytest.mark.parametrize("block", marked("yaml run-spec-part"))
def test_a_part_of_a_run_spec_is_valid_within_one(block: Block) -> None:
    parse_spec(in_a_spec(yaml.safe_load(block.text)))


def in_a_spec(part: Mapping[str, Any]) -> dict[str, Any]:
    spec = merged(BASE, part)
    jobs = part.get("components", {})
    if part.get("on_lost_flow") == "adopt":
        spec["components"] = dict(jobs)  # of nothing but Ray jobs
    return spec


@pytest.mark.parametrize("block", marked("yaml run-spec-faulty"))
def test_the_faults_of_a_faulty_spec_are_those_that_are_shown(block: Block) -> None:
    [shown] = [
        one.text
        for page in DOCUMENTS
        for index, one in enumerate(page.blocks)
        if index and page.blocks[index - 1] is block
    ]

    with pytest.raises(InvalidSpec) as found:
        parse_spec(yaml.safe_load(block.text))

    assert [str(fault) for fault in found.value.faults] == shown.splitlines()


#: Into which the example of a key is put, where the usual spec has no place for it.
SPECS: Mapping[str, Mapping[str, Any]] = {
    "progress": {"progress": {"step": "step"}},
    "success": {"progress": {"step": "step", "jsonl": "metrics.jsonl"}},
    "components.NAME.ready": {"components": {"trainer": {"ready": {}}}},
    "components.NAME.live": {"components": {"trainer": {"live": {}}}},
    "ray": {"ray": {"address": "http://10.0.0.1:8265"}},
    "gang": {"gang": {"gpus_per_node": 8}},
    "watch": {"progress": {"jsonl": "metrics.jsonl", "step": "step"}},
    "watch.rules.NAME": {"progress": {"jsonl": "metrics.jsonl", "step": "step"}},
    "components.NAME": {
        "gang": {"gpus_per_node": 8},
        "components": {"trainer": {"checkpoints": "checkpoints"}},
    },
}
SGLANG = {"components": {"rollout": {"backend": "sglang", "model": "M", "tensor_parallel": 8}}}
COMMAND = {
    "components": {
        "rollout": {"backend": "command", "command": ["python", "serve.py", "${server.port}"]}
    }
}


def with_example(base: Mapping[str, Any], example: spec_reference.Example) -> dict[str, Any]:
    # The rule is one of a preset's, so that no key of it must be there.
    names = {"NAME": "kl" if "rules" in example.part else "trainer", "KIND": "NODE_LOST"}
    steps = [] if example.part == spec_reference.ROOT else example.part.split(".")
    part: dict[str, Any] = {example.key: example.value}
    if example.key == "json" and steps[-1] in ("ready", "live"):
        part["http"] = "http://127.0.0.1:${api.port}/info"
    if example.key == "json" and steps[-1] == "token":
        part["path"] = "/generate"
    if example.part == "progress" and example.key not in ("http", "jsonl"):
        part["jsonl"] = "metrics.jsonl"
    for step in reversed(steps):
        part = {names.get(step, step): part}
    return merged(base, part)


@pytest.mark.parametrize(
    "example",
    [pytest.param(one, id=f"{one.part}.{one.key}") for one in spec_reference.examples(RunSpec)],
)
def test_the_example_of_a_key_is_valid(example: spec_reference.Example) -> None:
    own = SPECS.get(example.part, {})
    fleets = [SGLANG, COMMAND] if ".rollout" in example.part else [{}]

    faults = []
    for fleet in fleets:
        try:
            parse_spec(with_example(merged(merged(BASE, own), fleet), example))
            return
        except InvalidSpec as error:
            faults.append(str(error))

    pytest.fail("\n".join(faults))


@pytest.mark.parametrize("model", [RunSpec, PipelineSpec])
def test_every_key_has_a_meaning(model: type[RunSpec | PipelineSpec]) -> None:
    silent = [
        f"{part.path}.{key}"
        for part in spec_reference.parts(model)
        for key, schema in part.schema["properties"].items()
        if not schema.get("description")
    ]

    assert not silent


def test_every_key_of_a_listed_run_has_a_meaning() -> None:
    assert not re.findall(r"^.*\| +\|$", listed_runs.keys(), re.MULTILINE)


def test_every_verb_of_the_command_is_in_its_page() -> None:
    page = document("docs/commands.md")
    named = re.findall(r"^\| `muster ([a-z]+)", page.text, re.MULTILINE)

    assert sorted({*named}) == sorted(muster_verbs())


def test_every_state_and_every_kind_of_failure_is_explained() -> None:
    page = document("docs/states-and-failures.md")
    states = re.findall(r"^\| `([a-z_]+)` \|", page.text, re.MULTILINE)
    titles = [line.removeprefix("### ") for _, line in page.prose if line.startswith("### ")]

    assert [state.value for state in RunState] == states[: len(RunState)]
    assert [title for title in titles if title.isupper()] == [kind.value for kind in FailureKind]


def test_every_rule_by_which_a_failure_is_recognised_is_explained() -> None:
    text = document("docs/states-and-failures.md").text
    source = "\n".join(path.read_text("utf-8") for path in (ROOT / "tasks").rglob("*.py"))
    # As an argument, and as the third one of the supervisor's own verbs.
    rules = set(re.findall(r'\brule="([a-z-]+)"', source))
    rules |= set(re.findall(r'FLOW_LOST = "([a-z-]+)"', source))
    rules |= set(
        re.findall(r'self\._(?:fail|refused)\(\s*[^"]*?(?:f?"[^"]*",\s*)?"([a-z-]+)"', source)
    )

    missing = sorted(rule for rule in rules if f"`{rule}`" not in text)

    assert {"exit", "stall", "flow-lost", "contact-lost"} <= rules
    assert not missing


def example_of(mark: str) -> ModuleType:
    """The code of an example, as a module."""
    [block] = [one for one in document("docs/extending.md").blocks if one.info == f"python {mark}"]
    module = ModuleType(mark)
    exec(compile(block.text, f"docs/extending.md, {mark}", "exec"), vars(module))
    return module


def test_the_example_of_a_backend_plans_a_fleet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, "sglang", example_of("backend").LlamaCpp)  # type: ignore[arg-type]
    fleet = Rollout.model_validate({"backend": "sglang", "model": "m.gguf", "engines": 2})

    plan = planned(fleet)

    assert [server.argv[:3] for server in plan.servers] == [
        ("llama-server", "--model", "m.gguf"),
        ("llama-server", "--model", "m.gguf"),
    ]
    assert [server.argv[-1] for server in plan.servers] == [
        str(server.port) for server in plan.servers
    ]
    assert all(server.is_entrypoint for server in plan.servers)


def test_the_example_of_a_probe_says_why_not_and_then_yes(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    probe = example_of("probe").UnixProbe(path)
    reasons: list[str] = []

    with socket.socket(socket.AF_UNIX) as listener:

        def listen(reason: str) -> None:
            reasons.append(reason)
            listener.bind(str(path))
            listener.listen()

        asyncio.run(asyncio.wait_for(until_yes(probe, every_s=0.01, on_no=listen), 30))

    assert reasons == [f"connect to {path}: No such file or directory"]


def test_the_example_of_a_rule_explains_a_log() -> None:
    [block] = [one for one in document("docs/extending.md").blocks if one.info == "toml rule"]
    [example] = read_rules(block.text)
    log = "step 3\nERROR No license server is reachable at 10.0.0.9:27000\n"

    cause = find_cause(log, (*RULES, example))

    assert cause is not None
    assert cause.rule is example


def test_names_in_the_tables_about_extending_exist() -> None:
    table_rows = re.findall(r"^\|.*\|$", document("docs/extending.md").text, re.MULTILINE)
    places = [
        (path, name)
        for row in table_rows
        for path, names in re.findall(r"`([\w/]+\.py)`: ((?:`\w+`(?:, )?)+)", row)
        for name in re.findall(r"\w+", names)
    ]

    missing = [
        f"{path}: {name}"
        for path, name in places
        if not re.search(rf"\b{name}\b", (ROOT / path).read_text("utf-8"))
    ]

    assert len(places) > 15
    assert missing == []


def test_what_a_waiting_run_is_said_to_say_it_says() -> None:
    source = ast.parse((ROOT / "tasks" / "queue" / "reasons.py").read_text("utf-8"))
    texts = " | ".join(
        node.value
        for node in ast.walk(source)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    text = document("docs/queue.md").text.partition("## Why a run waits")[2].partition("\n## ")[0]
    messages = re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)

    # What stands for names and figures ends a clause.
    ends = r"\b[A-Z]+\b|[\d:]*\d|(?:as )?\bthe work pool gang\b|\.\.\.|[,;:]"
    clauses = [clause.strip() for message in messages for clause in re.split(ends, message)]
    clauses = [clause for clause in clauses if " " in clause]

    assert len(messages) > 8
    assert [clause for clause in clauses if clause not in texts] == []


def test_contributing_names_every_target_of_make() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    named = {
        name
        for _, code in document("CONTRIBUTING.md").codes
        for name in re.findall(r"\bmake ([a-z-]+)", code)
    }

    assert targets - {"help"} <= named
