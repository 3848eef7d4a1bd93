"""Tests of loading run specs, of `--set`, and of writing a spec as YAML."""

from __future__ import annotations

import datetime
import io
import os
import pickle
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tasks.spec.errors import Fault, InvalidSpec
from tasks.spec.loading import (
    dump_spec,
    find_project_root,
    load_spec,
    parse_spec,
    parse_yaml,
)
from tasks.spec.run import RunSpec
from tasks.spec.secrets import MASK
from tasks.spec.standard_input import STANDARD_INPUT

LEAST = """\
name: least
workload: grpo
components:
  trainer:
    command: [python, train.py]
"""

#: Complete run spec from the first design of Muster.
EXAMPLE = """\
name: quickstart                 # [a-z][a-z0-9-]{0,31}
workload: grpo                   # ppo | grpo | sft
tags: [demo]
env: {HF_HUB_OFFLINE: "1"}       # given to every component
cwd: .                           # where components run; relative to the project's root
gang:                            # left out: no GPUs are asked for
  nodes: 2
  gpus_per_node: 8
  cpus_per_gpu: 3                # verl asks for 3
  hours: 24                      # an estimate for backfill; it never ends a run
ray: {address: "http://127.0.0.1:8265"}     # only where something uses Ray
on_lost_flow: stop               # stop | adopt: what becomes of Ray jobs whose flow process died
containment: auto                # auto | namespace: see docs/supervision.md
components:                      # started in this order, stopped in reverse
  api:
    command: [run-api, --host, 127.0.0.1, --port, "${api.port}"]
    ready: {http: "http://127.0.0.1:${api.port}/info", within_s: 60}
  rollout:                       # a fleet of inference servers
    backend: command
    command: [serve, --port, "${server.port}"]
  trainer:
    launcher: process            # process (default) | ray_job
    command: [python, deployments/quickstart/trainer.py, --api, "http://127.0.0.1:${api.port}", \
--port, "${trainer.port}"]
    env: {}
    cwd: .
    ready: {http: "http://127.0.0.1:${api.port}/info", json: {batch_size: {not: -1}}, within_s: 120}
    live: {http: "http://127.0.0.1:${trainer.port}/health", every_s: 10, timeout_s: 5, misses: 3}
    on_exit_zero: complete       # complete | drain | fail
    stop: {signal: SIGTERM, grace_s: 10}
  environment:
    command: [python, deployments/quickstart/environment.py, serve, ...]
    on_exit_zero: drain
progress: {http: "http://127.0.0.1:${api.port}/status", step: current_step, total: 60}
success: {step: 60}              # evidence beyond exit 0; left out: exit 0 is enough
stall_after_s: 1800              # no new step for so long: STALLED; left out: off
retry: {INSUFFICIENT_RESOURCES: {delay_s: 60, max_delay_s: 600}}     # kinds that are tried again
"""


def faults_of(data: object, *overrides: str) -> list[Fault]:
    with pytest.raises(InvalidSpec) as raised:
        parse_spec(data, overrides)
    return list(raised.value.faults)


def load_text(tmp_path: Path, text: str | bytes, *overrides: str) -> RunSpec:
    file = tmp_path / "spec.yaml"
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    return load_spec(file, overrides)


def file_faults(tmp_path: Path, text: str | bytes, *overrides: str) -> list[tuple[str, str]]:
    with pytest.raises(InvalidSpec) as raised:
        load_text(tmp_path, text, *overrides)
    assert raised.value.source == str(tmp_path / "spec.yaml")
    return [(fault.path, fault.problem) for fault in raised.value.faults]


FLEET = {"backend": "command", "command": ["serve", "${server.port}"]}
JOB = {"launcher": "ray_job", "command": ["python", "train.py"]}


def least() -> dict[str, Any]:
    data: dict[str, Any] = yaml.safe_load(LEAST)
    return data


def test_example_spec_of_the_design_loads(tmp_path: Path) -> None:
    spec = load_text(tmp_path, EXAMPLE)

    assert list(spec.components) == ["api", "rollout", "trainer", "environment"]
    assert list(spec.processes) == ["api", "trainer", "environment"]
    assert spec.fleet is not None and spec.fleet.backend == "command"
    ready = spec.processes["trainer"].ready
    assert ready is not None
    assert ready.json_ == {"batch_size": {"not": -1}}
    assert spec.on_exit_zero("environment") == "drain"


@pytest.mark.parametrize(
    ("changes", "path", "problem"),
    [
        # a component is a Ray job, but the spec has no Ray cluster
        ({"ray": None}, "ray", "because trainer is a Ray job"),
        # a Ray job runs on another machine, so Muster cannot check its processes
        (
            {"components": {"trainer": {**JOB, "live": {"processes": "x"}}}},
            "components.trainer.live.processes",
            "where Muster cannot watch its processes",
        ),
        (
            {"components": {"trainer": {**JOB, "ready": {"notify": True}}}},
            "components.trainer.ready.notify",
            "cannot send READY=1 to this machine",
        ),
        # the component `api` runs on this machine, and ends together with the flow process. So the
        # next flow process cannot adopt this component
        (
            {"components": {"trainer": JOB, "api": {"command": ["a"]}}, "on_lost_flow": "adopt"},
            "on_lost_flow",
            "the component api is a process on this machine",
        ),
    ],
)
def test_keys_that_a_ray_job_cannot_have_are_rejected(
    changes: dict[str, Any], path: str, problem: str
) -> None:
    ray = {"address": "http://127.0.0.1:8265"}
    data = {**least(), "ray": ray, "components": {"trainer": JOB}, **changes}

    [fault] = faults_of({key: value for key, value in data.items() if value is not None})

    assert fault.path == path
    assert problem in fault.problem
    assert fault.remedy


def test_run_with_only_ray_jobs_may_use_adopt() -> None:
    ray = {"address": "http://127.0.0.1:8265"}
    gang = {"gpus_per_node": 8}
    data = {"ray": ray, "gang": gang, "components": {"trainer": JOB}, "on_lost_flow": "adopt"}

    spec = parse_spec({**least(), **data})

    assert spec.on_lost_flow == "adopt"


def test_fleet_on_ray_needs_the_key_ray() -> None:
    data = {**least(), "components": {"rollout": {**FLEET, "placement": "ray"}}}

    [fault] = faults_of(data)

    assert fault.path == "ray"
    assert fault.problem == "missing: the run needs a Ray cluster, because rollout is placed on Ray"


def test_all_faults_are_reported_together() -> None:
    text = """\
workload: grpoo
components:
  trainer:
    live: {}
    command: [python, "${trainer.prot}", true]
  api: {}
  rollout: {}
retry: {CUDA_OOM: {}}
success: {step: 0}
tags: [""]
"""

    faults = faults_of(yaml.safe_load(text), "components.api.ports=[A]")

    assert {fault.path for fault in faults} == {
        "workload",
        "components.trainer.live",
        "components.trainer.command.1",
        "components.trainer.command.2",
        "components.api.ports.0",
        "components.api.command",  # this key is missing
        "components.rollout.backend",
        "retry.CUDA_OOM.attempts",
        "success",
        "success.step",
        "tags.0",
        "name",  # this key is missing
    }


def test_faults_have_a_stable_order() -> None:
    data = {"name": 1, "x": 2, "y": 3, "components": {"a": {"q": 1}, "b": {"r": 1}}}

    assert faults_of(data) == faults_of(deepcopy(data))


def test_invalid_spec_lists_all_faults_and_survives_pickling(tmp_path: Path) -> None:
    with pytest.raises(InvalidSpec) as raised:
        load_text(tmp_path, LEAST + "stall_after_s: 0\nnme: 1\n")

    assert str(raised.value).splitlines()[:2] == [
        f"{tmp_path / 'spec.yaml'} has 2 faults:",
        "  - stall_after_s: must be more than 0, found 0",
    ]
    assert str(pickle.loads(pickle.dumps(raised.value))) == str(raised.value)


@pytest.mark.parametrize(
    ("text", "path", "problem"),
    [
        ("", "", "must be a mapping, found nothing"),
        ("---\n", "", "must be a mapping, found nothing"),
        ("- a\n- b\n", "", "must be a mapping, found a list"),
        ("just text\n", "", "must be a mapping, found the text 'just text'"),
        (
            "name: a\n\tworkload: b\n",
            "",
            "line 2, column 1: while scanning for the next token, found character",
        ),
        ("name: [a\n", "", "line 2, column 1: while parsing a flow sequence, expected"),
        ("name: a: b\n", "", "line 1, column 8: mapping values are not allowed here"),
        (
            "name: a\n---\nname: b\n",
            "",
            "line 2, column 1: the file must contain a single YAML document",
        ),
        ("name: !!python/none x\n", "", "line 1, column 7: could not determine a constructor"),
        ("name: *x\n", "", "line 1, column 7: found undefined alias"),
        ("name: a\0b\n", "", "not valid YAML: unacceptable character #x0000"),
        ("name: 2024-02-31\n", "", "a value cannot be read: day is out of range"),
        (b"name: \xff\n", "", "the file must be UTF-8, found byte 0xff at offset 6"),
        (LEAST.encode("utf-16"), "", "the file must be UTF-8, found byte 0xff at offset 0"),
        (LEAST + "name: again\n", "", "line 6, column 1: the key name is already in line 1"),
        (
            LEAST + "env: {A: a, B: b, A: a}\n",
            "",
            "line 6, column 19: the key A is already in line 6",
        ),
        (LEAST + "env: {D: 2024-01-01}\n", "env.D", "must be text, found the date 2024-01-01"),
        (LEAST + "stall_after_s: .nan\n", "stall_after_s", "must be a finite number, found .nan"),
        (LEAST + "stall_after_s: 1:30\n", "stall_after_s", "must be a number, found the text '1"),
        (LEAST + "env: {A: yes}\n", "env.A", "must be text, found yes, which YAML"),
        (LEAST + "env: &e {A: *e}\n", "env.A", "must be text, found a mapping"),  # contains itself
    ],
)
def test_malformed_file_has_one_fault(
    tmp_path: Path, text: str | bytes, path: str, problem: str
) -> None:
    [fault] = file_faults(tmp_path, text)

    assert fault[0] == path
    assert fault[1].startswith(problem)


@pytest.mark.parametrize("key", ["on", "yes", "True", "null", "~", "5", "1.5", "2024-01-01"])
def test_keys_are_texts_as_the_file_spells_them(tmp_path: Path, key: str) -> None:
    spec = load_text(tmp_path, LEAST + f"env: {{{key}: a}}\n")

    assert spec.env == {key: "a"}


@pytest.mark.parametrize("key", ["on", "no", "12"])
def test_unknown_key_is_named_as_the_file_spells_it(tmp_path: Path, key: str) -> None:
    [(path, problem)] = file_faults(tmp_path, LEAST + f"{key}: a\n")

    assert (path, problem) == (key, "unknown key")


@pytest.mark.parametrize(
    "text",
    [LEAST + "---\n", LEAST + "---\n---\n", LEAST + "...\n---\n# end\n", "---\n---\n" + LEAST],
)
def test_empty_documents_are_ignored(tmp_path: Path, text: str) -> None:
    assert load_text(tmp_path, text) == load_text(tmp_path, LEAST)


@pytest.mark.parametrize(
    ("key", "text", "remedy"),
    [
        ("stall_after_s", "1.0e3", "write 1000 or 1.0e+3"),
        ("stall_after_s", "1e-3", "write 0.001 or 1.0e-3"),
        ("stall_after_s", "'30'", "write 30 without quotes"),
        (
            "stall_after_s",
            "'1e3'",
            "write 1000 without quotes, because YAML 1.1 reads 1e3 as text",
        ),
        ("stall_after_s", "1_000.50", "write 1000.5"),
        ("gang.cpus_per_gpu", "1e3", "write 1000"),
        ("gang.cpus_per_gpu", "0x10", "write 16"),
        ("gang.cpus_per_gpu", "010", "write 10"),
        ("gang.cpus_per_gpu", "'2.5'", "write a number without quotes, for example 10"),
        ("gang.cpus_per_gpu", "4.0", "write 4"),
        ("gang.cpus_per_gpu", "1.5", "write a whole number, for example 10"),
        ("gang.cpus_per_gpu", "true", "write a whole number, for example 10"),
        ("stall_after_s", "[30]", "write a number, for example 1.5"),
        ("stall_after_s", "soon", "write a number, for example 1.5"),
        ("stall_after_s", "1.0e999", "write a number, for example 1.5"),
    ],
)
def test_remedy_for_a_number_is_a_number_that_loads(
    tmp_path: Path, key: str, text: str, remedy: str
) -> None:
    section, _, name = key.rpartition(".")
    line = f"{section}: {{gpus_per_node: 1, {name}: {text}}}" if section else f"{name}: {text}"

    with pytest.raises(InvalidSpec) as raised:
        load_text(tmp_path, f"{LEAST}{line}\n")

    [fault] = raised.value.faults
    assert (fault.path, fault.remedy) == (key, remedy)
    if remedy.startswith("write a "):
        return
    # The advice is `write NUMBER`, or `write NUMBER or NUMBER`.
    for suggested in remedy.removeprefix("write ").split(" without ")[0].split(" or "):
        assert load_text(tmp_path, f"{LEAST}{line.replace(text, suggested)}\n")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (
            "stall_after_s: 1.0e3",
            "stall_after_s: must be a number, found 1.0e3, which YAML 1.1 reads as text "
            "(write 1000 or 1.0e+3)",
        ),
        (
            "env: {A: on}",
            'env.A: must be text, found on, which YAML 1.1 reads as true (write "on")',
        ),
        (
            "env: {A.B: No}",
            'env.A.B: must be text, found No, which YAML 1.1 reads as false (write "No")',
        ),
        ("env: {A: true}", 'env.A: must be text, found true (write "true")'),
        (
            "stall_after_s: yes",
            "stall_after_s: must be a number, found yes, which YAML 1.1 reads as true "
            "(write a number, for example 1.5)",
        ),
        (
            "code: off",
            'code: must be text, found off, which YAML 1.1 reads as false (write "off")',
        ),
        (
            "evals: {a: {command: [python, no]}}",
            'evals.a.command.1: must be text, found no, which YAML 1.1 reads as false (write "no")',
        ),
    ],
)
def test_fault_quotes_the_value_as_the_file_spells_it(
    tmp_path: Path, line: str, message: str
) -> None:
    with pytest.raises(InvalidSpec) as raised:
        load_text(tmp_path, f"{LEAST}{line}\n")

    assert message in map(str, raised.value.faults)


def test_fault_quotes_the_value_as_an_override_spells_it(tmp_path: Path) -> None:
    (tmp_path / "spec.yaml").write_text(f"{LEAST}env: {{A: on}}\n")

    with pytest.raises(InvalidSpec) as raised:
        load_spec(tmp_path / "spec.yaml", ["env.A=No", "stall_after_s=2e3"])

    assert [str(fault) for fault in raised.value.faults] == [
        'env.A: must be text, found No, which YAML 1.1 reads as false (write "No")',
        "stall_after_s: must be a number, found 2e3, which YAML 1.1 reads as text "
        "(write 2000 or 2.0e+3)",
    ]


def test_message_about_a_fault_in_plain_data_explains_how_yaml_reads_the_value() -> None:
    faults = faults_of({**least(), "env": {"A": True}, "stall_after_s": "1.0e3"})

    assert [str(fault) for fault in faults] == [
        "env.A: must be text, found true "
        "(write a text in quotes, because YAML 1.1 reads on and yes as true)",
        "stall_after_s: must be a number, found the text '1.0e3' "
        "(write 1000 without quotes, because YAML 1.1 reads 1.0e3 as text)",
    ]


@pytest.mark.parametrize(
    ("kind", "remedy"),
    [
        ("OOM", "did you mean `HOST_OOM` or `CUDA_OOM`?"),
        ("timeout", "did you mean `START_TIMEOUT` or `COLLECTIVE_TIMEOUT`?"),
        ("node_lost", "did you mean `NODE_LOST`?"),
        ("HSTOOM", "did you mean `HOST_OOM`?"),
    ],
)
def test_wrong_kind_of_failure_suggests_similar_kinds(
    tmp_path: Path, kind: str, remedy: str
) -> None:
    with pytest.raises(InvalidSpec) as raised:
        load_text(tmp_path, LEAST + f"retry: {{{kind}: {{attempts: 3}}}}\n")

    [fault] = raised.value.faults
    assert (fault.path, fault.remedy) == (f"retry.{kind}", remedy)


def test_spec_is_read_from_standard_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pyproject.toml").touch()
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir(tmp_path / "folder")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(LEAST.encode())))

    spec = load_spec(STANDARD_INPUT)

    assert spec == load_text(tmp_path, LEAST)
    assert find_project_root(STANDARD_INPUT) == tmp_path


def test_faults_of_standard_input_name_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"name: [a\n")))

    with pytest.raises(InvalidSpec, match="standard input has 1 fault"):
        load_spec(STANDARD_INPUT)


def test_unquoted_placeholder_gets_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(InvalidSpec, match="write a placeholder in quotes") as raised:
        load_text(tmp_path, LEAST.replace("train.py", "${trainer.port}"))

    assert len(raised.value.faults) == 1


def test_deep_nesting_is_a_fault_instead_of_a_crash(tmp_path: Path) -> None:
    [fault] = file_faults(tmp_path, "a: " + "[" * 5000 + "]" * 5000)

    assert fault == ("", "the lists and mappings of the file are nested too deeply")


def test_missing_file_has_one_fault(tmp_path: Path) -> None:
    with pytest.raises(InvalidSpec, match="No such file or directory"):
        load_spec(tmp_path / "none.yaml")
    with pytest.raises(InvalidSpec, match="Is a directory"):
        load_spec(tmp_path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_unreadable_file_has_one_fault(tmp_path: Path) -> None:
    file = tmp_path / "spec.yaml"
    file.write_text(LEAST)
    file.chmod(0)

    with pytest.raises(InvalidSpec, match="the file cannot be read: Permission denied"):
        load_spec(file)


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("60", "60"),
        ("-1", "-1"),
        ("12.10", "12.10"),  # a version number, different from 12.1
        ("1.0e-4", "1.0e-4"),
        ("1e-4", "1e-4"),
        ("022", "022"),  # PyYAML alone would read the number 18
        ("0x10", "0x10"),
        ("1_000", "1_000"),
        ("12:30", "12:30"),  # PyYAML alone would read the number 750
        ("+5", "+5"),
        ('"yes"', "yes"),
        ("a=b", "a=b"),
        ("$HOME", "$HOME"),
    ],
)
def test_values_reach_the_command_as_they_are_written(
    tmp_path: Path, written: str, meant: str
) -> None:
    spec = load_text(tmp_path, LEAST.replace("train.py", written) + f"env: {{X: {written}}}\n")

    assert spec.processes["trainer"].command == ("python", meant)
    assert spec.env == {"X": meant}


def test_yaml_anchors_and_merges_are_supported(tmp_path: Path) -> None:
    text = LEAST + (
        "  api: &server {command: [run-api], stop: {grace_s: 1}}\n"
        "  judge: {<<: *server, command: [judge]}\n"
    )

    spec = load_text(tmp_path, text)

    assert spec.processes["judge"].command == ("judge",)
    assert spec.processes["judge"].stop.grace_s == 1


def test_byte_order_mark_is_accepted(tmp_path: Path) -> None:
    assert load_text(tmp_path, LEAST.encode("utf-8-sig")).name == "least"


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("name=other", {"name": "other"}),
        ("success.step=20", {"success": {"step": 20}}),  # the mapping is created
        ("env.A=b=c", {"env": {"A": "b=c"}}),  # only the first = counts
        ('env.A=""', {"env": {"A": ""}}),
        ("env.A=12.10", {"env": {"A": "12.10"}}),
        (" stall_after_s = 5", {"stall_after_s": 5}),
        ("tags=[a, b]", {"tags": ["a", "b"]}),
        ("stall_after_s=", {}),  # an empty value counts as omitted
    ],
)
def test_override_sets_a_value(override: str, expected: dict[str, Any]) -> None:
    data = {**least(), "progress": {"jsonl": "m", "step": "s"}}

    spec = parse_spec(data, [override])

    assert spec.written() == {**data, **expected}
    assert data == {**least(), "progress": {"jsonl": "m", "step": "s"}}


def test_override_can_address_list_items_and_components() -> None:
    spec = parse_spec(
        least(),
        [
            "components.trainer.command.1=other.py",
            "components.trainer.stop.grace_s=0",
            "components.api.command=[run-api]",
        ],
    )

    assert spec.processes["trainer"].command == ("python", "other.py")
    assert spec.processes["trainer"].stop.grace_s == 0
    assert list(spec.components) == ["trainer", "api"]


def test_overrides_are_applied_in_order() -> None:
    assert parse_spec(least(), ["name=a", "name=b"]).name == "b"


@pytest.mark.parametrize(
    ("override", "path", "problem"),
    [
        ("name", "", "--set name: has no `=`"),
        ("=5", "", "--set =: has no key before `=`"),
        ("a..b=5", "", "--set a..b: has no key before `=`"),
        ("name.x=5", "name.x", "--set name.x: `name` is the text 'least', which has no keys"),
        (
            "components.trainer.command.2=x",
            "components.trainer.command.2",
            "--set components.trainer.command.2: `components.trainer.command` is a list of 2 items "
            "and has no item 2",
        ),
        (
            "components.trainer.command.-1=x",
            "components.trainer.command.-1",
            "--set components.trainer.command.-1: `components.trainer.command` is a list of 2 "
            "items and has no item -1",
        ),
        ("tags=[a", "tags", "--set tags: line 1, column 3: while parsing"),
        # `--set` creates the misspelt key, and the validation of the spec then rejects this key
        (
            "succes.step=20",
            "succes",
            "unknown key",
        ),
        ("env.A=true", "env.A", "must be text, found true"),
        ("env.A=yes", "env.A", "must be text, found yes, which YAML 1.1 reads as true"),
        ("env.API_KEY.x=hunter22", "env.API_KEY", "must be text, found a mapping"),
    ],
)
def test_invalid_override_is_reported_by_its_path(override: str, path: str, problem: str) -> None:
    [fault] = faults_of(least(), override)

    assert fault.path == path
    assert fault.problem.startswith(problem)


def test_invalid_override_does_not_reveal_its_value() -> None:
    [fault] = faults_of({**least(), "env": {"A": "a"}}, "env.A.API_KEY=hunter22")

    assert "hunter22" not in str(fault)


def test_faults_of_overrides_and_of_the_file_are_reported_together() -> None:
    faults = faults_of({**least(), "x": 1}, "nothing", "name.a=1", "tags.b=2")

    assert {fault.path for fault in faults} == {"", "name.a", "x", "tags"}


def test_spec_from_a_parameter_is_checked_completely() -> None:
    spec = RunSpec.model_validate({**least(), "cwd": "${run.dri}"})

    assert [fault.path for fault in faults_of(spec)] == ["cwd"]
    assert parse_spec(RunSpec.model_validate(least())) == RunSpec.model_validate(least())


def test_date_in_plain_data_is_a_fault() -> None:
    [fault] = faults_of({**least(), "name": datetime.date(2024, 1, 1)})

    assert (fault.path, fault.problem) == ("name", "must be text, found the date 2024-01-01")


def test_spec_is_written_in_order_and_without_omitted_keys() -> None:
    spec = parse_spec({**least(), "env": {"A": "1", "B": "x"}, "tags": ["demo"]})

    assert dump_spec(spec) == (
        "name: least\n"
        "workload: grpo\n"
        "tags: [demo]\n"
        "env: {A: '1', B: x}\n"
        "components:\n"
        "  trainer:\n"
        "    command: [python, train.py]\n"
    )


def test_secrets_are_masked_everywhere_in_the_spec() -> None:
    data = least()
    data["env"] = {"HF_TOKEN": "hf_abcdef", "TOKENIZERS_PARALLELISM": "false"}
    data["components"]["trainer"] |= {
        "command": ["python", "train.py", "--key=k3y-value"],
        "env": {"WANDB_API_KEY": "k3y-value"},
    }

    text = dump_spec(parse_spec(data), secrets=())

    assert yaml.safe_load(text)["env"] == {"HF_TOKEN": "***", "TOKENIZERS_PARALLELISM": "false"}
    assert yaml.safe_load(text)["components"]["trainer"] == {
        "command": ["python", "train.py", "--key=***"],
        "env": {"WANDB_API_KEY": "***"},
    }


# All texts that a file can contain, except placeholders, which `test_spec_template` tests.
texts = st.text(
    st.characters(codec="utf-8", exclude_characters="\0"), min_size=1, max_size=20
).filter(lambda text: "${" not in text)
names = st.from_regex(r"[a-z][a-z0-9_-]{0,8}", fullmatch=True).filter(
    lambda name: name != "rollout"
)
numbers = st.floats(min_value=0.001, max_value=1e9) | st.integers(1, 10**6)
scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | texts
finite_scalars = scalars.filter(lambda value: value not in (float("inf"), float("-inf")))
conditions = finite_scalars | st.fixed_dictionaries({"not": finite_scalars})
variables = st.dictionaries(texts.filter(lambda name: "=" not in name), texts, max_size=3)
live_probes = st.one_of(
    st.fixed_dictionaries({"tcp": st.integers(1, 65535)}, optional={"every_s": numbers}),
    st.fixed_dictionaries({"file": texts}),
    st.fixed_dictionaries(
        {
            "http": st.just("http://127.0.0.1:1/x"),
            "json": st.dictionaries(names, conditions, max_size=3),
        }
    ),
)
ready_probes = live_probes | st.fixed_dictionaries({"alive_s": numbers})
components = st.fixed_dictionaries(
    {"command": st.lists(texts, min_size=1, max_size=5)},
    optional={
        "env": variables,
        "cwd": texts,
        "ports": st.lists(names, unique=True, max_size=2),
        "ready": ready_probes,
        "live": live_probes,
        "on_exit_zero": st.sampled_from(["complete", "drain", "fail"]),
        "stop": st.fixed_dictionaries({}, optional={"grace_s": numbers}),
    },
)
specs = st.fixed_dictionaries(
    {
        "name": st.just("any"),
        "workload": st.sampled_from(["ppo", "grpo", "sft"]),
        "components": st.dictionaries(names, components, min_size=1, max_size=3),
    },
    optional={
        "tags": st.lists(texts, max_size=2),
        "env": variables,
        "cwd": texts,
        "progress": st.fixed_dictionaries({"jsonl": texts, "step": names}),
        "stall_after_s": numbers,
        "retry": st.dictionaries(
            st.sampled_from(["NODE_LOST", "START_TIMEOUT"]), st.just({"attempts": 2})
        ),
    },
)


@settings(deadline=None)
@given(specs)
def test_written_spec_loads_to_an_equal_spec(data: dict[str, Any]) -> None:
    spec = parse_spec(data)

    text = dump_spec(spec)
    assume(MASK not in text)  # A masked secret cannot be loaded.

    read = parse_yaml(text, "it")
    again = parse_spec(read)
    assert again == spec
    assert parse_spec(yaml.safe_load(text)) == spec  # PyYAML can read the text, too
    assert dump_spec(again) == text
    assert list(again.components) == list(data["components"])


junk = st.recursive(
    finite_scalars | st.dates() | st.binary(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(finite_scalars | st.sampled_from(list(RunSpec.model_fields)), inner)
        | st.dictionaries(st.sampled_from(["command", "env", "ready", "live", "stop"]), inner)
    ),
    max_leaves=10,
)


@settings(deadline=None)
@given(specs, st.dictionaries(st.sampled_from(list(RunSpec.model_fields)), junk, min_size=1), junk)
def test_random_values_cause_no_message_in_pydantics_words(
    data: dict[str, Any], keys: dict[str, Any], component: object
) -> None:
    data = {**data, **keys, "components": {**data["components"], "trainer": component}}

    try:
        parse_spec(data)
    except InvalidSpec as error:
        text = str(error)
        for jargon in ("Input should", "Value error", "pydantic", "[type=", "valid dictionary"):
            assert jargon not in text


def test_empty_component_in_a_file_is_a_fault(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("name: x\nworkload: grpo\ncomponents:\n  api: {command: [a]}\n  trainer:\n")

    with pytest.raises(InvalidSpec) as raised:
        load_spec(path)

    [fault] = raised.value.faults
    assert (fault.path, fault.problem) == ("components.trainer", "must be a mapping, found nothing")
