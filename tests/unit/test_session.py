"""A run in its process, without a flow around it."""

from __future__ import annotations

from pathlib import Path
from uuid import uuid4

import pytest

from tasks.record.states import RunState
from tasks.spec.failure_kinds import FailureKind
from tasks.spec.loading import parse_spec
from tasks.train.session import RunSession


def test_a_directory_of_another_flow_run_is_refused_and_left_as_it_is(muster_home: Path) -> None:
    spec = parse_spec(
        {"name": "x", "workload": "sft", "components": {"trainer": {"command": ["true"]}}}
    )
    run_id, first, second = "x-sft-20260101-000000-abcd91c2", uuid4(), uuid4()
    run = RunSession(spec, run_id=run_id, flow_run_id=first)
    run.close()
    before = run.place.record.read_bytes()

    with pytest.raises(FileExistsError) as refused:
        RunSession(spec, run_id=run_id, flow_run_id=second)

    assert str(first) in str(refused.value) and str(second) in str(refused.value)
    assert run.place.record.read_bytes() == before


def test_an_error_of_our_own_before_an_attempt_fails_the_run(muster_home: Path) -> None:
    spec = parse_spec(
        {"name": "x", "workload": "sft", "components": {"trainer": {"command": ["true"]}}}
    )
    run = RunSession(spec, run_id="x-sft-20260101-000000-abcd91c2", flow_run_id=uuid4())

    run.crash(RuntimeError("the gate is broken"))
    verdict = run.close()

    assert verdict.state is RunState.FAILED
    assert verdict.failure is not None
    assert verdict.failure.kind is FailureKind.UNKNOWN
    assert "the gate is broken" in verdict.message
    assert run.record.state is RunState.FAILED
