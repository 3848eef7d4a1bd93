"""Reports of `muster reconcile`: their line, summary, artifact and event payload."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.show.markdown import escape_markdown
from tasks.upkeep.report import Report, RunReport

LOST = RunReport(
    name="quickstart-grpo-20260101-000000-abcd91c2",
    flow_run_id="1b4e28ba-2fa1-4d3b-a3f5-ef19b5a7633b",
    found="the flow process (pid 812) was gone",
    killed=(813, 814),
    removed=(Path("/dev/shm/a"), Path("/tmp/b")),
    record="failed",
    server="Crashed",
)
WAITING = RunReport(
    name="b",
    found="the flow process (pid 9) was gone",
    open="guardian processes are still ending their components",
)


@pytest.mark.parametrize(
    ("run", "has_changes"),
    [
        (LOST, True),
        # `reconcile` changed nothing for this run, so no event is emitted
        (WAITING, False),
        # a change in any field of the report causes an event
        (RunReport(name="a", found="x", killed=(1,)), True),
        (RunReport(name="a", found="x", nodes=("checked node b",)), True),
        (RunReport(name="a", found="x", removed=(Path("/tmp/a"),)), True),
        (RunReport(name="a", found="x", record="failed"), True),
        (RunReport(name="a", found="x", server="Crashed"), True),
        # only the registry entry of an ended run was removed, which does not count as a change
        (RunReport(name="a", found="x"), False),
    ],
)
def test_report_has_changes_if_a_field_is_set(run: RunReport, has_changes: bool) -> None:
    assert run.has_changes is has_changes


def test_text_of_a_report_contains_all_fields() -> None:
    assert str(LOST) == (
        "quickstart-grpo-20260101-000000-abcd91c2: the flow process (pid 812) was gone; ended pid "
        "813, 814; removed /dev/shm/a, /tmp/b; run.json: failed; Prefect: Crashed"
    )
    assert str(WAITING) == (
        "b: the flow process (pid 9) was gone; still open: guardian processes are still ending "
        "their components"
    )


@pytest.mark.parametrize(
    ("runs", "summary"),
    [
        ((), "nothing to do"),
        ((LOST,), "a-host: 1 of 1 lost runs reconciled"),
        ((LOST, WAITING), "a-host: 1 of 2 lost runs reconciled, 1 still open"),
    ],
)
def test_summary_counts_runs(runs: tuple[RunReport, ...], summary: str) -> None:
    assert Report(host="a-host", runs=runs).summary == summary


def test_artifact_contains_only_changed_runs() -> None:
    written = Report(host="a-host", runs=(LOST, WAITING)).as_markdown()

    assert written.splitlines() == ["Reconciled on **a-host**", "", f"- {escape_markdown(LOST)}"]


def test_text_is_escaped_in_markdown() -> None:
    run = RunReport(name="a", found="x *y\n<z>", record="failed")

    line = Report(host="h", runs=(run,)).as_markdown().splitlines()[-1]

    assert line == "- a: x \\*y &lt;z&gt;; run.json: failed"


def test_payload_is_plain_data() -> None:
    assert LOST.as_payload() == {
        "found": "the flow process (pid 812) was gone",
        "killed": [813, 814],
        "jobs": [],
        "nodes": [],
        "removed": ["/dev/shm/a", "/tmp/b"],
        "record": "failed",
        "server": "Crashed",
        "open": "",
    }
