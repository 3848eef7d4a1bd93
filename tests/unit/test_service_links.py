"""Tests of the variables that Kubernetes sets for services, and of invalid settings of Prefect."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.record.causes import find_cause
from tasks.spec.service_links import drop_service_variables


def run_queue_command(home: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run `muster queue`, which needs Prefect, with further environment variables.

    Returns:
        The exit code and the output of the command.
    """
    return subprocess.run(
        (sys.executable, "-m", "tasks.command", "queue"),
        cwd=home,
        env={**os.environ, "MUSTER_HOME": str(home), **variables},
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_variables_of_a_kubernetes_service_do_not_disturb_a_command(tmp_path: Path) -> None:
    done = run_queue_command(
        tmp_path,
        PREFECT_SERVER_API_PORT="tcp://10.0.0.1:4200",
        PREFECT_SERVER_API_PORT_4200_TCP="tcp://10.0.0.1:4200",
        PREFECT_SERVER_API_SERVICE_HOST="10.0.0.1",
        PREFECT_WORKER_WEBSERVER_PORT="tcp://10.0.0.2:8080",
    )

    assert done.returncode == 1
    assert done.stderr.startswith("no Prefect server is set: ")


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("PREFECT_SERVER_API_PORT", "four"),
        ("PREFECT_API_REQUEST_TIMEOUT", "1 minute"),
        ("PREFECT_CLIENT_MAX_RETRIES", "tcp://10.0.0.1:4200"),
    ],
)
def test_invalid_setting_of_prefect_is_named_in_one_line(
    tmp_path: Path, variable: str, value: str
) -> None:
    done = run_queue_command(tmp_path, **{variable: value})

    message, last_line = done.stderr.splitlines()
    assert done.returncode == 2
    assert message.startswith(f"{variable} has the value {value!r}: ")
    assert message.endswith(f"correct or unset {variable}")
    assert last_line == "Nothing was done."


def test_only_ports_of_services_are_removed() -> None:
    environment = {
        "PREFECT_SERVER_API_PORT": "4200",
        "PREFECT_PORT": "udp://10.0.0.1:53",
        "PREFECT_API_URL": "tcp://10.0.0.1:4200",
        "VLLM_PORT": "tcp://10.0.0.1:8000",
    }

    drop_service_variables(environment)

    assert environment.keys() == {"PREFECT_SERVER_API_PORT", "PREFECT_API_URL", "VLLM_PORT"}


@pytest.mark.parametrize(
    "line",
    [
        "ValueError: VLLM_PORT 'tcp://10.0.0.1:8000' appears to be a URI. This may be caused by a "
        "Kubernetes service discovery issue,check the warning in: https://docs.vllm.ai",
        "ValueError: invalid literal for int() with base 10: 'tcp://10.96.0.1:80'",
    ],
)
def test_death_by_a_variable_of_a_service_has_the_advice_for_the_pod(line: str) -> None:
    cause = find_cause(f"Traceback (most recent call last):\n  File x\n{line}\n")

    assert cause is not None
    assert "enableServiceLinks: false" in cause.rule.hint
