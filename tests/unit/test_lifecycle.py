"""The states of a run and the moves between them."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest

from tasks.record.run_json import RunRecord
from tasks.record.states import LEGAL_TRANSITIONS, RunState
from tasks.spec.errors import IllegalTransition

#: Components may live in these.
ALIVE = {RunState.STARTING, RunState.RUNNING, RunState.STOPPING}


@pytest.mark.parametrize(("before", "after"), list(itertools.product(RunState, RunState)))
def test_a_move_is_legal_or_raises(before: RunState, after: RunState, tmp_path: Path) -> None:
    record = RunRecord(tmp_path / "run.json", run_id="a-run", flow_run_id="f")
    record.content = record.content.with_changes(state=before)

    if after is before or after in LEGAL_TRANSITIONS[before]:
        record.move(after)
        assert record.state is after
    else:
        with pytest.raises(IllegalTransition, match=f"from {before.value} to {after.value}"):
            record.move(after)


def test_no_run_is_final_with_a_component_alive() -> None:
    for state in ALIVE - {RunState.STOPPING}:
        assert not {after for after in LEGAL_TRANSITIONS[state] if after.is_final}


def test_what_is_final_stays_so_and_every_other_state_leads_there() -> None:
    finals = {RunState.COMPLETED, RunState.FAILED, RunState.CANCELLED}

    assert {state for state in RunState if state.is_final} == finals
    for state in RunState:
        reached = {state}
        for _ in RunState:
            reached |= {after for before in reached for after in LEGAL_TRANSITIONS[before]}
        assert state.is_final or reached >= {RunState.FAILED, RunState.CANCELLED}


def test_only_what_has_run_completes() -> None:
    assert [s for s in RunState if RunState.COMPLETED in LEGAL_TRANSITIONS[s]] == [
        RunState.STOPPING
    ]
