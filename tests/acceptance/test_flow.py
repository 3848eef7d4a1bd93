"""The flow `train` as the server and a worker see it: parameters in, a state out."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows.train import train
from tasks.spec.run import RunSpec


@pytest.fixture(autouse=True)
def _on_the_server(api: str) -> Iterator[None]:
    with temporary_settings({PREFECT_API_URL: api}):
        yield


def test_a_spec_of_what_is_not_there_fails_with_all(gang_of: Callable, muster_home: Path) -> None:
    spec = gang_of("pass")
    spec["components"]["api"]["command"] = ["no-such-program-here"]
    spec["components"]["trainer"]["command"] = ["python", "no_such_script.py", "${nobody.port}"]

    state = train(RunSpec.model_validate(spec), return_state=True)

    assert state.is_failed()
    assert state.message.startswith("USER_ERROR: ")
    for path in ("components.api.command.0", "components.trainer.command.1", "${nobody.port}"):
        assert path in state.message
    [record] = [json.loads(path.read_text()) for path in muster_home.glob("runs/*/run.json")]
    assert (record["state"], record["attempts"]) == ("failed", [])


def test_a_parameter_that_is_no_spec_fails_plainly(gang_of: Callable, muster_home: Path) -> None:
    spec = gang_of("pass", workload="gppo")
    spec["components"]["trainer"] = {"comand": ["python"]}

    state = train(spec, return_state=True)

    assert state.is_failed()
    assert "workload: must be ppo, grpo or sft" in state.message
    assert "components.trainer.comand: unknown key (did you mean `command`?" in state.message
    assert not (muster_home / "runs").exists()


def test_the_flow_leaves_its_process_as_it_was(gang_of: Callable, muster_home: Path) -> None:
    handles = set(os.listdir("/proc/self/fd"))

    states = [train(RunSpec.model_validate(gang_of("pass")), return_state=True) for _ in range(2)]

    assert all(state.is_completed() for state in states)
    assert len(set(os.listdir("/proc/self/fd")) - handles) <= 4  # the API client's own
