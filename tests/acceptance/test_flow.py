"""The flow `train` as the Prefect server and a worker call it, from parameters to a state."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.train import train
from tasks.spec.run import RunSpec


@pytest.fixture(autouse=True)
def _use_server(api: str) -> Iterator[None]:
    """Make the Prefect client in this process use the Prefect server of the tests."""
    with temporary_settings({PREFECT_API_URL: api}):
        yield


def test_message_about_missing_programs_names_all_of_them(
    build_gang_spec: Callable, muster_home: Path
) -> None:
    spec = build_gang_spec("pass")
    spec["components"]["api"]["command"] = ["no-such-program-here"]
    spec["components"]["trainer"]["command"] = ["python", "no_such_script.py", "${nobody.port}"]

    state = train(RunSpec.model_validate(spec), return_state=True)

    assert state.is_failed()
    assert state.message.startswith("USER_ERROR: ")
    for path in ("components.api.command.0", "components.trainer.command.1", "${nobody.port}"):
        assert path in state.message
    [record] = [json.loads(path.read_text()) for path in muster_home.glob("runs/*/run.json")]
    assert (record["state"], record["attempts"]) == ("failed", [])


def test_invalid_parameter_fails_with_the_faults_of_the_spec(
    build_gang_spec: Callable, muster_home: Path
) -> None:
    spec = build_gang_spec("pass", workload="gppo")
    spec["components"]["trainer"] = {"comand": ["python"]}

    state = train(spec, return_state=True)

    assert state.is_failed()
    assert "workload: must be ppo, grpo, sft, dpo, rm, pretrain, other or step" in state.message
    assert "components.trainer.comand: unknown key (did you mean `command`?" in state.message
    assert not (muster_home / "runs").exists()


def list_open_files() -> dict[str, str]:
    """Return the targets of this process's file descriptors, by descriptor number."""
    targets = {}
    for number in os.listdir("/proc/self/fd"):
        # One of the listed descriptors was opened by `listdir`, and is closed now.
        with suppress(FileNotFoundError):
            targets[number] = os.readlink(f"/proc/self/fd/{number}")
    return targets


def test_flow_leaks_no_file_descriptors(build_gang_spec: Callable, muster_home: Path) -> None:
    before = list_open_files()

    states = [
        train(RunSpec.model_validate(build_gang_spec("pass")), return_state=True) for _ in range(2)
    ]

    assert all(state.is_completed() for state in states)
    new = [target for number, target in list_open_files().items() if before.get(number) != target]
    sockets = [target for target in new if target.startswith("socket:")]
    locks = [target for target in new if target.endswith("/lock")]
    # Two kinds of new descriptors are no leaks: a few open connections of Prefect's API client, and
    # one lock for each run. This process holds the locks until the process ends.
    assert len(sockets) <= 4, new
    assert len(locks) == len(states)
    assert len(new) == len(sockets) + len(locks), new
