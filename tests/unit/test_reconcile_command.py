"""`muster reconcile`: its output and its exit code."""

from __future__ import annotations

import pytest

from tasks.upkeep import reconcile
from tasks.upkeep.report import Report, RunReport

DONE = RunReport(name="a-run", found="the flow process (pid 7) was gone", record="failed")
OPEN = RunReport(name="b-run", found="the flow process (pid 8) was gone", open="the server is away")


@pytest.mark.parametrize(
    ("runs", "code", "last"),
    [
        ((), 0, "nothing to do"),
        ((DONE,), 0, "here: 1 of 1 lost runs reconciled"),
        ((DONE, OPEN), 1, "here: 1 of 2 lost runs reconciled, 1 still open"),
    ],
)
def test_runs_are_printed_and_exit_code_shows_open_runs(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    runs: tuple[RunReport, ...],
    code: int,
    last: str,
) -> None:
    report = Report(host="here", runs=runs)
    monkeypatch.setattr(reconcile, "reconcile_host", lambda: report)
    monkeypatch.setattr(reconcile, "publish", lambda report: None)

    assert reconcile.reconcile() == code

    *told, summary = capsys.readouterr().out.splitlines()
    assert told == [str(run) for run in runs]
    assert summary == last
