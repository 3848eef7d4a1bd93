"""Tests of the documents: links, named files, examples, keys and states match the code."""

from __future__ import annotations

import ast
import asyncio
import errno
import re
import socket
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import yaml

from tasks.processes.probes import wait_for_success
from tasks.record.causes import RULES, find_cause, read_rules
from tasks.record.states import RunState
from tasks.rollout.backends import BACKENDS
from tasks.rollout.topology import plan_topology
from tasks.spec.errors import InvalidSpec
from tasks.spec.failure_kinds import FailureKind, NodeBlame, make_properties
from tasks.spec.loading import parse_spec
from tasks.spec.pipeline import PipelineSpec, load_pipeline
from tasks.spec.rollout import Rollout
from tasks.spec.run import RunSpec
from tasks.spec.values import list_key_schemas
from tests.documents import listed_runs, spec_reference
from tests.documents.__main__ import documents as made_documents
from tests.support.command_checks import muster_verbs
from tests.support.documents import ROOT, Block, Document, list_documents

DOCUMENTS = list_documents()
DOCS = ROOT / "docs"

each_document = pytest.mark.parametrize("document", DOCUMENTS, ids=str)

#: Complete run spec. To check a partial spec from a document, a test merges it into this spec.
BASE: Mapping[str, Any] = {
    "name": "example",
    "workload": "grpo",
    "components": {
        "api": {"command": ["run-api", "--port", "${api.port}"]},
        "trainer": {"command": ["python", "train.py", "--port", "${trainer.port}"]},
    },
}


def document(name: str) -> Document:
    return next(document for document in DOCUMENTS if str(document) == name)


def blocks_with(info: str) -> list[Any]:
    """Return the code blocks with this info string in all documents, as pytest parameters.

    The info string is the text after the opening fence, for example "yaml".
    """
    return [
        pytest.param(block, id=f"{page}:{block.line}")
        for page in DOCUMENTS
        for block in page.blocks
        if block.info == info
    ]


def merged(base: Mapping[str, Any], part: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with the keys of `part`. Nested mappings are merged in the same way."""
    result = dict(base)
    for key, value in part.items():
        both = isinstance(value, Mapping) and isinstance(result.get(key), Mapping)
        result[key] = merged(result[key], value) if both else value
    return result


@each_document
def test_every_link_has_a_target(document: Document) -> None:
    broken = [
        f"line {line}: {link}" for line, link in document.links if not has_target(document, link)
    ]

    assert not broken


def has_target(document: Document, link: str) -> bool:
    """Return True if the file and the heading of a link exist, or if the link is a web address."""
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
def test_every_named_file_exists(document: Document) -> None:
    tops = ("tasks/", "flows/", "deployments/", "tests/", "docs/")
    named = [
        (line, code)
        for line, code in document.codes
        if code.startswith(tops) and re.fullmatch(r"[\w./-]+", code)
    ]

    missing = [f"line {line}: {code}" for line, code in named if not (ROOT / code).exists()]

    assert not missing


def test_index_names_every_page() -> None:
    named = {link for _, link in document("docs/README.md").links}

    missing = [path.name for path in DOCS.glob("*.md") if path.name not in {"README.md", *named}]

    assert not missing


def test_every_generated_part_is_current() -> None:
    stale = [path.name for path, text in made_documents() if path.read_text("utf-8") != text]

    assert not stale, "`make docs` writes them"


@pytest.mark.parametrize("block", blocks_with("yaml run-spec"))
def test_example_run_specs_are_valid(block: Block) -> None:
    parse_spec(yaml.safe_load(block.text))


@pytest.mark.parametrize("block", blocks_with("yaml pipeline"))
def test_example_pipelines_are_valid(block: Block, tmp_path: Path) -> None:
    path = tmp_path / "pipeline.yaml"
    path.write_text(block.text, encoding="utf-8")
    # The example names spec files relative to the root of the project.
    (tmp_path / "deployments").symlink_to(ROOT / "deployments")

    load_pipeline(path)


@pytest.mark.parametrize("block", blocks_with("yaml run-spec-part"))
def test_example_parts_of_a_run_spec_are_valid(block: Block) -> None:
    parse_spec(complete_spec(yaml.safe_load(block.text)))


def complete_spec(part: Mapping[str, Any]) -> dict[str, Any]:
    """Return a complete run spec that contains this part of a spec."""
    spec = merged(BASE, part)
    jobs = part.get("components", {})
    if part.get("on_lost_flow") == "adopt":
        # A run with the key `on_lost_flow: adopt` may only have components that are Ray jobs.
        spec["components"] = dict(jobs)
    return spec


@pytest.mark.parametrize("block", blocks_with("yaml run-spec-faulty"))
def test_documented_faults_of_a_faulty_spec_are_reported(block: Block) -> None:
    [shown] = [
        following.text
        for page in DOCUMENTS
        for index, following in enumerate(page.blocks)
        if index and page.blocks[index - 1] is block
    ]

    with pytest.raises(InvalidSpec) as error_info:
        parse_spec(yaml.safe_load(block.text))

    assert [str(fault) for fault in error_info.value.faults] == shown.splitlines()


#: Parts of a run spec with checkpoints and two evaluations.
EVALUATED: Mapping[str, Any] = {
    "components": {"trainer": {"checkpoints": "checkpoints"}},
    "evals": {"math": {"command": ["true"]}, "trainer": {"command": ["true"]}},
}
#: Mapping from a part of a run spec, for example `components.NAME.stop`, to further keys of the
#: spec. The documented examples of this part are valid only together with these keys.
SPECS: Mapping[str, Mapping[str, Any]] = {
    "start_from": {
        "start_from": {
            "run": "x-sft-20260101-120000-0123abcd",
            "checkpoint": "/data/step_20",
        },
        "env": {"START": "${attempt.resume_from}"},
    },
    "progress": {"progress": {"step": "step"}},
    "success": {"progress": {"step": "step", "jsonl": "metrics.jsonl"}},
    "components.NAME.ready": {"components": {"trainer": {"ready": {}}}},
    "components.NAME.live": {"components": {"trainer": {"live": {}}}},
    "components.NAME.stop": {"components": {"trainer": {"checkpoints": "checkpoints"}}},
    "ray": {"ray": {"address": "http://10.0.0.1:8265"}, "gang": {"gpus_per_node": 8}},
    "gang": {"gang": {"gpus_per_node": 8}},
    "watch": {"progress": {"jsonl": "metrics.jsonl", "step": "step"}},
    "watch.rules.NAME": {"progress": {"jsonl": "metrics.jsonl", "step": "step"}},
    "": EVALUATED,
    "keep_best": EVALUATED,
    "evals.NAME": EVALUATED,
    "evals.NAME.resources": merged(
        EVALUATED,
        {"ray": {"address": "http://10.0.0.1:8265"}, "evals": {"trainer": {"on": "ray"}}},
    ),
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
    """Return the spec `base` with the example value of a key.

    If the key requires other keys in the spec, these keys are also set.
    """
    # The rule `kl` is predefined, so a spec that sets only one key of this rule is valid.
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
    [
        pytest.param(example, id=f"{example.part}.{example.key}")
        for example in spec_reference.examples(RunSpec)
    ],
)
def test_examples_of_keys_are_valid(example: spec_reference.Example) -> None:
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
def test_every_key_has_a_description(model: type[RunSpec | PipelineSpec]) -> None:
    undescribed = [
        f"{part.path}.{key}"
        for part in spec_reference.parts(model)
        for key, schema in list_key_schemas(part.schema).items()
        if not schema.get("description")
    ]

    assert not undescribed


def test_every_key_of_a_listed_run_has_a_description() -> None:
    assert not re.findall(r"^.*\| +\|$", listed_runs.list_keys(), re.MULTILINE)


def test_page_of_commands_lists_every_verb() -> None:
    page = document("docs/commands.md")
    named = re.findall(r"^\| `muster ([a-z]+)", page.text, re.MULTILINE)

    assert sorted({*named}) == sorted(muster_verbs())


def test_every_state_and_every_kind_of_failure_is_explained() -> None:
    page = document("docs/states-and-failures.md")
    states = re.findall(r"^\| `([a-z_]+)` \|", page.text, re.MULTILINE)
    titles = [line.removeprefix("### ") for _, line in page.prose if line.startswith("### ")]

    assert [state.value for state in RunState] == states[: len(RunState)]
    assert [title for title in titles if title.isupper()] == [kind.value for kind in FailureKind]


def test_every_failure_rule_is_explained() -> None:
    text = document("docs/states-and-failures.md").text
    source = "\n".join(path.read_text("utf-8") for path in (ROOT / "tasks").rglob("*.py"))
    # The source contains the name of a rule as a keyword argument, or as an argument of the
    # supervisor's methods.
    rules = set(re.findall(r'\brule="([a-z-]+)"', source))
    rules |= set(re.findall(r'FLOW_LOST = "([a-z-]+)"', source))
    rules |= set(
        re.findall(r'self\._(?:fail|refused)\(\s*[^"]*?(?:f?"[^"]*",\s*)?"([a-z-]+)"', source)
    )

    missing = sorted(rule for rule in rules if f"`{rule}`" not in text)

    assert {"exit", "stall", "flow-lost", "contact-lost"} <= rules
    assert not missing


def example_of(mark: str) -> ModuleType:
    """Return a module with the code of an example in docs/extending.md.

    Args:
        mark: Name of the example.
    """
    blocks = document("docs/extending.md").blocks
    [block] = [block for block in blocks if block.info == f"python {mark}"]
    module = ModuleType(mark)
    exec(compile(block.text, f"docs/extending.md, {mark}", "exec"), vars(module))
    return module


def test_example_backend_plans_a_fleet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BACKENDS, "sglang", example_of("backend").LlamaCpp)  # type: ignore[arg-type]
    fleet = Rollout.model_validate({"backend": "sglang", "model": "m.gguf", "engines": 2})

    plan = plan_topology(fleet)

    assert [server.argv[:3] for server in plan.servers] == [
        ("llama-server", "--model", "m.gguf"),
        ("llama-server", "--model", "m.gguf"),
    ]
    assert [server.argv[-1] for server in plan.servers] == [
        str(server.port) for server in plan.servers
    ]
    assert all(server.is_entrypoint for server in plan.servers)


def test_example_probe_gives_a_reason_until_it_succeeds(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    probe = example_of("probe").UnixProbe(path)
    reasons: list[str] = []

    with socket.socket(socket.AF_UNIX) as listener:

        def listen(reason: str) -> None:
            reasons.append(reason)
            listener.bind(str(path))
            listener.listen()

        asyncio.run(asyncio.wait_for(wait_for_success(probe, every_s=0.01, on_no=listen), 30))

    assert reasons == [f"connect to {path}: No such file or directory"]


def test_example_rule_explains_a_log() -> None:
    blocks = document("docs/extending.md").blocks
    [block] = [block for block in blocks if block.info == "toml rule"]
    [example] = read_rules(block.text)
    log = "step 3\nERROR No license server is reachable at 10.0.0.9:27000\n"

    cause = find_cause(log, (*RULES, example))

    assert cause is not None
    assert cause.rule is example


def test_example_failure_kind_is_a_valid_table() -> None:
    blocks = document("docs/extending.md").blocks
    [block] = [block for block in blocks if block.info == "toml failure-kind"]
    [(name, table)] = tomllib.loads(block.text).items()

    properties = make_properties(table)

    assert name not in FailureKind.__members__
    assert properties.blames_node is NodeBlame.NEVER
    assert all(hasattr(errno, error_name) for error_name in properties.errnos)


def test_unreleased_changes_are_in_the_order_that_contributing_explains() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    [headings, subjects] = [
        names.split(", ")
        for names in re.findall(r"(?:headings are|by subject:) ([^.]+), in this order", text)
    ]
    changelog = (ROOT / "CHANGELOG.md").read_text("utf-8")
    unreleased = changelog.partition("## [Unreleased]")[2].partition("\n## [")[0]

    sections = re.split(r"^### ", unreleased, flags=re.MULTILINE)[1:]
    used_headings = [section.partition("\n")[0] for section in sections]

    assert used_headings == [heading for heading in headings if heading in used_headings]
    for section in sections:
        used_subjects = re.findall(r"^#### (.+)$", section, re.MULTILINE)
        assert used_subjects == [subject for subject in subjects if subject in used_subjects]


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


def test_documented_messages_of_waiting_runs_exist_in_the_code() -> None:
    modules = ("reasons.py", "nodes.py")
    texts = " | ".join(
        node.value
        for module in modules
        for node in ast.walk(ast.parse((ROOT / "tasks" / "queue" / module).read_text("utf-8")))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    )
    text = document("docs/queue.md").text.partition("## Why a run waits")[2].partition("\n## ")[0]
    messages = re.findall(r"^\| `([^`]+)` \|", text, re.MULTILINE)

    # Names and numbers in the documents differ from the names and numbers in the code. So only the
    # text between names and numbers is compared.
    ends = r"\b[A-Z]+\b|[\d:]*\d|(?:as )?\bthe work pool gang\b|\.\.\.|[,;:]"
    clauses = [clause.strip() for message in messages for clause in re.split(ends, message)]
    clauses = [clause for clause in clauses if " " in clause]

    assert len(messages) > 8
    assert [clause for clause in clauses if clause not in texts] == []


def test_contributing_guide_names_every_make_target() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    named = {
        name
        for _, code in document("CONTRIBUTING.md").codes
        for name in re.findall(r"\bmake ([a-z-]+)", code)
    }

    assert targets - {"help"} <= named


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "Makefile", "README.md"])
def test_documented_words_select_tests(name: str) -> None:
    words = re.findall(r"ARGS='-k ([\w-]+)'", (ROOT / name).read_text())
    test_names = [
        test_name
        for file in (ROOT / "tests").rglob("test_*.py")
        for test_name in (
            file.name,
            *re.findall(r"^def (test_\w+)", file.read_text(), re.MULTILINE),
        )
    ]

    # In `pytest -k name`, `name` is only a placeholder for a word that the reader chooses.
    for word in set(words) - {"name"}:
        assert any(word in test_name for test_name in test_names), word
