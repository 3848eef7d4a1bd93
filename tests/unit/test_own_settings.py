"""Muster's environment variables: a wrong value is an error, an unknown variable a warning."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cyclopts import App

from tasks.processes.containment import Level, probe
from tasks.show.arguments import run
from tasks.spec.errors import InvalidSpec
from tasks.spec.loading import parse_spec
from tasks.spec.own_settings import (
    COMPONENT_VARIABLES,
    INTERNAL_VARIABLES,
    MAX_CONTAINMENT,
    SETTINGS,
    InvalidVariable,
    find_setting_problems,
    find_unknown_variables,
)
from tasks.train.spec_check import check_spec
from tests.support.house import ROOT

#: Environment variables with values that Muster rejects.
BAD_VALUES = [
    ("MUSTER_MAX_CONTAINMENT", "l2"),
    ("MUSTER_MAX_CONTAINMENT", "2"),
    ("MUSTER_MAX_CONTAINMENT", "L5"),
    ("MUSTER_MAX_CONTAINMENT", "L2,L3"),
    ("MUSTER_MAX_CONTAINMENT", "none"),
    ("MUSTER_UMASK", "group"),
    ("MUSTER_UMASK", "088"),
    ("MUSTER_UMASK", "-1"),
    ("MUSTER_GPUS", "gpu0"),
    ("MUSTER_GPUS", "7-4"),
    ("MUSTER_GPUS", "all"),
    ("MUSTER_HOST", "my host"),
    ("MUSTER_SERVER_USERS", "alice bob"),
    ("MUSTER_CODE_MIB", "50MB"),
    ("MUSTER_CODE_MIB", "-1"),
    ("MUSTER_CODE_MIB", "nan"),
    ("MUSTER_PRUNE_DAYS", "-1"),
    ("MUSTER_PRUNE_DAYS", "two weeks"),
    ("MUSTER_PRUNE_OUTPUTS", "perhaps"),
    ("MUSTER_RAY_CLUSTERS", "http://127.0.0.1:8265"),
    ("MUSTER_RAY_CLUSTERS", '["http://127.0.0.1:8265"]'),
]
#: Environment variables of Muster, each with a valid value.
GOOD_VALUES = [
    ("MUSTER_MAX_CONTAINMENT", "L1"),
    ("MUSTER_MAX_CONTAINMENT", ""),
    ("MUSTER_UMASK", "0027"),
    ("MUSTER_GPUS", "0,1,4-7"),
    ("MUSTER_HOST", "node-1.example.org"),
    ("MUSTER_SERVER_USERS", "alice, 1000"),
    ("MUSTER_CODE_MIB", "0.5"),
    ("MUSTER_PRUNE_DAYS", "inf"),
    ("MUSTER_PRUNE_OUTPUTS", "TRUE"),
    ("MUSTER_RAY_CLUSTERS", '[{"address": "http://127.0.0.1:8265"}]'),
]
#: Variables that Kubernetes sets in a pod if the services `muster` and `muster-queue` exist.
KUBERNETES = {
    "MUSTER_PORT": "tcp://10.0.0.1:8080",
    "MUSTER_PORT_8080_TCP": "tcp://10.0.0.1:8080",
    "MUSTER_PORT_8080_TCP_PROTO": "tcp",
    "MUSTER_PORT_8080_TCP_PORT": "8080",
    "MUSTER_PORT_8080_TCP_ADDR": "10.0.0.1",
    "MUSTER_SERVICE_HOST": "10.0.0.1",
    "MUSTER_SERVICE_PORT": "8080",
    "MUSTER_SERVICE_PORT_HTTP": "8080",
    "MUSTER_QUEUE_PORT": "udp://10.0.0.2:53",
    "MUSTER_QUEUE_PORT_53_UDP_ADDR": "10.0.0.2",
    "MUSTER_QUEUE_SERVICE_HOST": "10.0.0.2",
}


def run_command(monkeypatch: pytest.MonkeyPatch, **variables: str) -> int:
    """Run a command with further environment variables, and return its exit code."""
    app = App(name="muster")

    @app.default
    def command() -> int:
        print("the command has run")
        return 0

    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return run(app, [])


@pytest.mark.parametrize(("name", "value"), BAD_VALUES)
def test_invalid_value_is_an_error(name: str, value: str) -> None:
    [problem] = find_setting_problems({name: value})

    assert problem.startswith(f"{name}={value} is not valid: ")


@pytest.mark.parametrize(("name", "value"), GOOD_VALUES)
def test_valid_value_is_no_error(name: str, value: str) -> None:
    assert find_setting_problems({name: value}) == ()


@pytest.mark.parametrize("value", ["l2", "2", "L0"])
def test_unknown_limit_of_containment_is_an_error(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("MUSTER_MAX_CONTAINMENT", value)

    with pytest.raises(InvalidVariable, match=f"MUSTER_MAX_CONTAINMENT={value} .* L1, L2, L3, L4"):
        probe()


@pytest.mark.parametrize("value", ["L1", "L2"])
def test_containment_has_at_most_the_allowed_level(
    monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv("MUSTER_MAX_CONTAINMENT", value)

    containment = probe(namespace=True)

    assert containment.level is Level(value)
    higher_levels = {level for level in Level if level.value > value}
    assert set(containment.missing) == higher_levels
    assert set(containment.missing.values()) == {f"MUSTER_MAX_CONTAINMENT is {value}"}


def test_levels_of_the_setting_are_the_levels_of_containment() -> None:
    for level in Level:
        assert MAX_CONTAINMENT.parse(level.value) == level.value


def test_spec_is_refused_while_a_setting_is_not_valid(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = parse_spec(
        {"name": "a", "workload": "sft", "components": {"trainer": {"command": ["true"]}}}
    )
    monkeypatch.setenv("MUSTER_MAX_CONTAINMENT", "l2")

    with pytest.raises(InvalidSpec, match="MUSTER_MAX_CONTAINMENT=l2"):
        check_spec(spec)


def test_variables_of_kubernetes_services_are_not_reported() -> None:
    assert find_unknown_variables(KUBERNETES) == ()


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("MUSTER_MAX_CONTAINMENTS", "MUSTER_MAX_CONTAINMENT"),
        ("MUSTER_MAX_CONTAIMENT", "MUSTER_MAX_CONTAINMENT"),
        ("MUSTER_GPU", "MUSTER_GPUS"),
        ("MUSTER_HOMES", "MUSTER_HOME"),
        ("MUSTER_PORT", ""),
    ],
)
def test_unknown_variable_is_reported_with_the_most_similar_setting(
    name: str, suggestion: str
) -> None:
    [warning] = find_unknown_variables({name: "4200"})

    assert warning.startswith(f"The environment variable {name} is no setting of Muster")
    assert suggestion in warning
    assert "docs/settings.md" in warning


def test_variables_that_muster_sets_are_not_reported() -> None:
    """Muster itself sets these variables for components, so `muster` must not warn about them."""
    variables = dict.fromkeys((*COMPONENT_VARIABLES, *INTERNAL_VARIABLES), "x")

    assert find_unknown_variables(variables) == ()


def test_all_variables_in_the_code_are_in_the_table() -> None:
    names = {
        name
        for folder in ("tasks", "flows", "deployments")
        for path in (ROOT / folder).rglob("*.py")
        for name in re.findall(r"\"(MUSTER_[A-Z][A-Z_]*[A-Z])\"", path.read_text("utf-8"))
    }

    assert find_unknown_variables(dict.fromkeys(names, "x")) == ()
    assert {setting.name for setting in SETTINGS} <= names


def test_no_variable_of_the_tests_counts_as_unknown() -> None:
    names = {
        name
        for path in (ROOT / "tests").rglob("*.py")
        for name in re.findall(
            r"(?:environ(?:\.get\(|\[)|setenv\(|getenv\()\s*\"(MUSTER_[A-Z_]*[A-Z])\"",
            path.read_text("utf-8"),
        )
    }

    assert find_unknown_variables(dict.fromkeys(names, "x")) == ()


def test_command_refuses_a_wrong_value(
    muster_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    exit_code = run_command(monkeypatch, MUSTER_MAX_CONTAINMENT="l2", MUSTER_UMASK="group")

    output = capsys.readouterr()
    assert exit_code == 2
    assert "MUSTER_MAX_CONTAINMENT=l2 is not valid: choose from L1, L2, L3, L4" in output.err
    assert "MUSTER_UMASK=group is not valid: " in output.err
    assert "the command has run" not in output.out


def test_command_warns_of_an_unknown_variable_and_works(
    muster_home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    variables = {"MUSTER_MAX_CONTAIMENT": "L2", "MUSTER_RUN_ID": "a-run", **KUBERNETES}

    exit_code = run_command(monkeypatch, **variables)

    output = capsys.readouterr()
    assert exit_code == 0
    assert "the command has run" in output.out
    [line] = [line for line in output.err.splitlines() if "MUSTER_" in line]
    assert "MUSTER_MAX_CONTAIMENT" in line and "`MUSTER_MAX_CONTAINMENT`" in line
