"""Tests of the states of a run and the transitions between them."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tasks.record.run_json import RunRecord
from tasks.record.states import LEGAL_TRANSITIONS, RunState
from tasks.spec.errors import IllegalTransition

#: States of a run in which its components may be running.
ALIVE = {RunState.STARTING, RunState.RUNNING, RunState.STOPPING}


@pytest.mark.parametrize(("before", "after"), list(itertools.product(RunState, RunState)))
def test_illegal_transitions_raise_an_error(
    before: RunState, after: RunState, tmp_path: Path
) -> None:
    record = RunRecord(tmp_path / "run.json", run_id="a-run", flow_run_id="f")
    record.content = record.content.with_changes(state=before)

    if after is before or after in LEGAL_TRANSITIONS[before]:
        record.move(after)
        assert record.state is after
    else:
        with pytest.raises(IllegalTransition, match=f"from {before.value} to {after.value}"):
            record.move(after)


def test_run_with_running_components_must_stop_before_its_final_state() -> None:
    for state in ALIVE - {RunState.STOPPING}:
        assert not {after for after in LEGAL_TRANSITIONS[state] if after.is_final}


def test_every_state_can_reach_failed_and_cancelled() -> None:
    finals = {RunState.COMPLETED, RunState.FAILED, RunState.CANCELLED}

    assert {state for state in RunState if state.is_final} == finals
    for state in RunState:
        reached = {state}
        for _ in RunState:
            reached |= {after for before in reached for after in LEGAL_TRANSITIONS[before]}
        assert state.is_final or reached >= {RunState.FAILED, RunState.CANCELLED}


def test_only_a_stopping_run_can_complete() -> None:
    sources = [state for state in RunState if RunState.COMPLETED in LEGAL_TRANSITIONS[state]]

    assert sources == [RunState.STOPPING]
