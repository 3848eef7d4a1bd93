"""Tests of the placeholders `${...}` in a run spec."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.spec.errors import Fault, InvalidSpec
from tasks.spec.loading import list_required_ports, parse_spec, resolve
from tasks.spec.placeholders import (
    find_placeholder_faults,
    has_placeholders,
    list_known_names,
    substitute,
)
from tasks.spec.run import RunSpec

ROOT = Path("/project")
ALWAYS = {"run.id", "run.dir", "attempt.number", "attempt.dir", "attempt.resume_from"}


def spec_of(component: dict[str, Any] | None = None, **keys: object) -> RunSpec:
    trainer = {"command": ["python"], **(component or {})}
    return RunSpec.model_validate(
        {"name": "a", "workload": "grpo", "components": {"trainer": trainer}, **keys}
    )


def faults_of(spec: RunSpec) -> list[Fault]:
    return list(find_placeholder_faults(spec.written()))


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("${a}", "<a>"),
        ("x${a}y${b.c}", "x<a>y<b.c>"),
        ("$${a}", "${a}"),  # an escaped placeholder
        ("$$${a}", "$${a}"),  # a dollar sign, then an escaped placeholder
        ("$${${a}}", "${<a>}"),
        ("$", "$"),
        ("$HOME $1 $$", "$HOME $1 $$"),
        ("{a}", "{a}"),
        ("${", "${"),  # unchanged, and reported as a fault
        ("${}", "<>"),
    ],
)
def test_placeholders_are_replaced(text: str, result: str) -> None:
    assert substitute(text, lambda name: f"<{name}>") == result


@pytest.mark.parametrize(
    ("text", "templated"), [("${a}", True), ("${", True), ("$${a}", False), ("$a", False)]
)
def test_escaped_placeholder_is_not_a_placeholder(text: str, templated: bool) -> None:
    assert has_placeholders(text) is templated


def test_names_of_run_attempt_and_ports_are_known() -> None:
    components = {"api": {"command": ["a"], "ports": ["metrics"]}, "trainer": {"command": ["b"]}}

    assert list_known_names(spec_of(components=components).written()) == ALWAYS | {
        "api.port",
        "api.ports.metrics",
        "trainer.port",
    }


def test_step_counts_are_names_if_they_are_set() -> None:
    progress = {"jsonl": "m", "step": "s"}

    assert "progress.total" not in list_known_names(spec_of(progress=progress).written())
    assert {"progress.total", "success.step"} <= list_known_names(
        spec_of(progress={**progress, "total": 60}, success={"step": 50}).written()
    )


def test_size_of_the_gang_replaces_its_placeholders() -> None:
    command = ["torchrun", "--nproc-per-node=${gang.gpus_per_node}", "--nnodes", "${gang.nodes}"]
    trainer = {"command": command, "launcher": "ray_job"}
    spec = spec_of(trainer, gang={"nodes": 2, "gpus_per_node": 8}, ray={})

    filled = resolve(spec, {}, ROOT).processes["trainer"]

    assert find_placeholder_faults(spec.written()) == ()
    assert filled.command == ("torchrun", "--nproc-per-node=8", "--nnodes", "2")


def test_gang_without_a_number_of_nodes_has_one_node() -> None:
    spec = spec_of({"env": {"NODES": "${gang.nodes}"}}, gang={"gpus_per_node": 8})

    assert find_placeholder_faults(spec.written()) == ()
    assert resolve(spec, {}, ROOT).processes["trainer"].env == {"NODES": "1"}


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        (
            "gang.gpus_per_node",
            "write `gang: {gpus_per_node: NUMBER}`, or leave out the placeholder",
        ),
        ("gang.nodes", "write `gang: {nodes: NUMBER}`, or leave out the placeholder"),
        ("success.step", "write `success: {step: NUMBER}`, or leave out the placeholder"),
    ],
)
def test_placeholder_of_a_number_that_the_spec_lacks_is_a_fault(name: str, remedy: str) -> None:
    [fault] = faults_of(spec_of({"env": {"A": f"${{{name}}}"}}))

    assert fault.path == "components.trainer.env.A"
    assert fault.problem == (
        f"the placeholder `${{{name}}}` has no value, because the spec has no key `{name}`"
    )
    assert fault.remedy == remedy


@pytest.mark.parametrize("total", [100.0, "1.0e+2", True, -1])
def test_placeholder_of_a_wrong_number_has_no_fault_of_its_own(total: object) -> None:
    trainer = {"command": ["true", "${progress.total}"]}
    progress = {"jsonl": "metrics.jsonl", "step": "step", "total": total}
    components = {"trainer": trainer}
    data = {"name": "a", "workload": "sft", "components": components, "progress": progress}

    with pytest.raises(InvalidSpec) as raised:
        parse_spec(data)

    assert [fault.path for fault in raised.value.faults] == ["progress.total"]


FLEET = {"backend": "command", "command": ["serve", "--port", "${server.port}"]}


def test_gateway_port_is_reserved_without_a_placeholder() -> None:
    spec = spec_of(components={"rollout": FLEET})

    assert "rollout.url" in list_known_names(spec.written())
    assert list_required_ports(spec) == ("rollout.port",)


def test_run_leaves_server_placeholders_to_the_fleet() -> None:
    fleet = {
        **FLEET,
        "args": ["--out", "${run.dir}/${server.rank}", "$${HOME}"],
        "env": {"PEER": "${api.port}"},
    }
    spec = spec_of(components={"api": {"command": ["a"]}, "rollout": fleet})

    filled = resolve(spec, {"run.dir": "/runs/x", "api.port": "15000"}, ROOT).fleet

    assert find_placeholder_faults(spec.written()) == ()
    assert filled is not None
    assert filled.command == ("serve", "--port", "${server.port}")
    # `${server.rank}` and `$${` remain, because Muster replaces them later, for each server.
    assert filled.args == ("--out", "/runs/x/${server.rank}", "$${HOME}")
    assert filled.env == {"PEER": "15000"}


def test_engine_list_becomes_several_words_only_in_a_command() -> None:
    trainer = {
        "command": ["train", "--engines", "${rollout.engines}", "--all=${rollout.engines}", "--x"],
        "env": {"ENGINES": "${rollout.engines}"},
    }
    spec = spec_of(components={"rollout": FLEET, "trainer": trainer})

    filled = resolve(spec, {"rollout.engines": "h:1,h:2"}, ROOT).processes["trainer"]

    assert find_placeholder_faults(spec.written()) == ()
    assert filled.command == ("train", "--engines", "h:1", "h:2", "--all=h:1,h:2", "--x")
    assert filled.env == {"ENGINES": "h:1,h:2"}


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("api.port", "known names: "),
        ("server.prt", "did you mean `${server.port}`?"),
        ("server.x", ""),
    ],
)
def test_unknown_name_in_a_fleet_is_a_fault(name: str, remedy: str) -> None:
    fleet = {**FLEET, "args": [f"${{{name}}}"]}

    [fault] = faults_of(spec_of(components={"rollout": fleet}))

    assert fault.path == "components.rollout.args.0"
    assert fault.problem == f"unknown name `${{{name}}}`"
    assert remedy in fault.remedy


def test_server_names_are_unknown_outside_the_fleet() -> None:
    trainer = {"command": ["train", "${server.port}"]}

    [fault] = faults_of(spec_of(components={"rollout": FLEET, "trainer": trainer}))

    assert fault.path == "components.trainer.command.1"


@pytest.mark.parametrize(
    ("component", "keys", "path"),
    [
        ({"command": ["a", "${x.y}"]}, {}, "components.trainer.command.1"),
        ({"env": {"A": "${x.y}"}}, {}, "components.trainer.env.A"),
        ({"cwd": "${x.y}"}, {}, "components.trainer.cwd"),
        ({"ready": {"http": "http://h:${x.y}/"}}, {}, "components.trainer.ready.http"),
        ({"ready": {"tcp": "${x.y}"}}, {}, "components.trainer.ready.tcp"),
        ({"ready": {"log": "${x.y}"}}, {}, "components.trainer.ready.log"),
        ({"ready": {"file": "${x.y}"}}, {}, "components.trainer.ready.file"),
        (
            {"ready": {"http": "http://h", "json": {"k": "${x.y}"}}},
            {},
            "components.trainer.ready.json.k",
        ),
        (
            {"live": {"http": "http://h", "json": {"k": {"not": "${x.y}"}}}},
            {},
            "components.trainer.live.json.k.not",
        ),
        ({"live": {"processes": "${x.y}"}}, {}, "components.trainer.live.processes"),
        ({}, {"env": {"A": "${x.y}"}}, "env.A"),
        ({}, {"cwd": "${x.y}"}, "cwd"),
        ({}, {"progress": {"http": "http://h/${x.y}", "step": "s"}}, "progress.http"),
        ({}, {"progress": {"jsonl": "${x.y}", "step": "s"}}, "progress.jsonl"),
    ],
)
def test_unknown_name_is_a_fault_in_each_place(
    component: dict[str, Any], keys: dict[str, Any], path: str
) -> None:
    [fault] = faults_of(spec_of(component, **keys))

    assert (fault.path, fault.problem) == (path, "unknown name `${x.y}`")


@pytest.mark.parametrize(
    ("text", "problem", "remedy"),
    [
        ("${trainer.prot}", "unknown name `${trainer.prot}`", "did you mean `${trainer.port}`?"),
        ("${ trainer.port }", "unknown name `${ trainer.port }`", "`${trainer.port}`?"),
        (
            "${HOME}",
            "unknown name `${HOME}`",
            "for a variable of the shell, write `$${HOME}`",
        ),
        ("${X:-1}", "unknown name `${X:-1}`", "`$${X:-1}`; known names: attempt.dir, "),
        ("${}", "unknown name `${}`", ""),
        (
            "${trainer.port",
            "a placeholder begins with `${`, but has no closing `}`",
            "write `$${` if the text should",
        ),
        ("${a${run.id}}", "a placeholder begins with `${`, but has no closing `}`", ""),
        # the placeholder has no value, because the spec does not set `progress.total`
        (
            "${progress.total}",
            "`${progress.total}` has no value",
            "write `progress: {total: NUMBER}`",
        ),
        ("${trainer.ports.metrics}", "unknown name", ""),  # the component has no such port
    ],
)
def test_invalid_placeholder_gets_a_remedy(text: str, problem: str, remedy: str) -> None:
    [fault] = faults_of(spec_of({"command": ["sh", text]}))

    assert fault.path == "components.trainer.command.1"
    assert problem in fault.problem
    assert remedy in fault.remedy


def test_each_invalid_placeholder_is_reported_once() -> None:
    faults = faults_of(spec_of({"command": ["a", "${x} ${y} ${x}"]}))

    assert [fault.problem for fault in faults] == ["unknown name `${x}`", "unknown name `${y}`"]


def test_placeholder_faults_are_reported_with_other_faults() -> None:
    data = {"name": "A", "workload": "grpo", "components": {"t": {"command": ["${x}", None]}}}

    with pytest.raises(InvalidSpec) as raised:
        parse_spec(data)

    assert {fault.path for fault in raised.value.faults} == {
        "name",
        "components.t.command.0",
        "components.t.command.1",
    }


def test_placeholders_in_other_places_are_plain_text() -> None:
    assert faults_of(spec_of(tags=["${x}"])) == []


def test_used_and_listed_ports_are_reserved() -> None:
    components = {
        # this component uses its own port, so a port is reserved
        "api": {"command": ["a"], "ready": {"tcp": "${api.port}"}},
        # no component uses the port of this component, so no port is reserved for it
        "judge": {
            "command": ["b"],
            "env": {"PEER": "${trainer.port}"},
        },
        # the component `judge` uses the default port of `trainer`, which also has two named ports
        "trainer": {
            "command": ["c"],
            "ports": ["metrics", "dash"],
        },
    }

    assert list_required_ports(spec_of(components=components)) == (
        "api.port",
        "trainer.port",
        "trainer.ports.metrics",
        "trainer.ports.dash",
    )


def test_escaped_placeholder_needs_no_port() -> None:
    assert list_required_ports(spec_of({"command": ["sh", "$${trainer.port}"]})) == ()


def test_resolving_fills_in_all_places() -> None:
    spec = spec_of(
        {
            "command": [
                "python",
                "--port",
                "${trainer.port}",
                "--steps=${progress.total}",
                "$${A}",
            ],
            "env": {"DIR": "${attempt.dir}/x"},
            "cwd": "${run.dir}",
            "ready": {
                "http": "http://127.0.0.1:${trainer.port}/",
                "json": {"id": "${run.id}", "n": {"not": -1}},
            },
            "live": {"tcp": "${trainer.port}"},
        },
        env={"RUN": "${run.id}"},
        cwd="${run.dir}",
        progress={"jsonl": "${attempt.dir}/m.jsonl", "step": "s", "total": 60},
    )
    names = {
        "trainer.port": "8123",
        "run.id": "a-grpo",
        "run.dir": "/runs/a",
        "attempt.dir": "/runs/a/attempt-01",
    }

    trainer = resolve(spec, names, ROOT).processes["trainer"]

    assert trainer.command == ("python", "--port", "8123", "--steps=60", "${A}")
    assert trainer.env == {"DIR": "/runs/a/attempt-01/x"}
    assert trainer.cwd == "/runs/a"
    assert trainer.ready is not None and trainer.live is not None
    assert trainer.ready.http == "http://127.0.0.1:8123/"
    assert trainer.ready.json_ == {"id": "a-grpo", "n": {"not": -1}}
    assert trainer.live.address == ("127.0.0.1", 8123)
    resolved = resolve(spec, names, ROOT)
    assert (resolved.env, resolved.cwd) == ({"RUN": "a-grpo"}, "/runs/a")
    assert resolved.progress is not None
    assert resolved.progress.jsonl == "/runs/a/attempt-01/m.jsonl"


def test_value_in_a_regular_expression_is_escaped() -> None:
    spec = spec_of({"ready": {"log": r"^saved in ${run.dir}/\d+$"}})

    ready = resolve(spec, {"run.dir": "/runs/a+b (1)"}, ROOT).processes["trainer"].ready

    assert ready is not None and ready.log is not None
    assert re.search(ready.log, "saved in /runs/a+b (1)/42")


def test_resolving_fails_if_a_value_is_missing_or_unsuitable() -> None:
    spec = spec_of({"ready": {"tcp": "${trainer.port}"}})

    with pytest.raises(KeyError, match=r"trainer\.port"):
        resolve(spec, {}, ROOT)
    with pytest.raises(InvalidSpec, match=r"components\.trainer\.ready\.tcp"):
        resolve(spec, {"trainer.port": "none"}, ROOT)


def test_resolving_adds_no_omitted_keys() -> None:
    spec = spec_of()

    assert resolve(spec, {}, ROOT).written() == {**spec.written(), "cwd": str(ROOT)}


texts = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=20)


@settings(deadline=None)
@given(texts)
def test_any_text_can_be_escaped(text: str) -> None:
    escaped = re.sub(r"\$(?=\$*\{)", "", text) if "$${" in text else text
    written = escaped.replace("${", "$${")

    assert substitute(written, lambda _name: "never") == escaped


@settings(deadline=None)
@given(texts, texts, st.from_regex(r"[^${}]{0,9}", fullmatch=True))
def test_value_is_inserted_unchanged(value: str, other: str, around: str) -> None:
    values = {"a.b": value, "c": other}

    result = substitute(f"{around}${{a.b}}{around}${{c}}", values.__getitem__)

    assert result == f"{around}{value}{around}{other}"
