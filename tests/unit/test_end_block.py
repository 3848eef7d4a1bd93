"""Tests of the text that the terminal shows at the end of a run.

The text has the final state of the run, the first failure, and the files to read next.
"""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import yaml

from tasks.record.final_record import FLOW_LOST
from tasks.record.places import RunPlace
from tasks.record.ranks import RankFailure
from tasks.record.run_json import RunJson
from tasks.show import next_start
from tasks.show.lines import end_block, summarize_run
from tasks.spec.failure_kinds import FailureKind
from tasks.spec.watch import NOT_FINITE_ADVICE

FAILURE = {
    "kind": "RUNTIME_ERROR",
    "component": "trainer",
    "exit_code": None,
    "signal": "SIGSEGV",
    "message": "trainer (pid 8) killed by SIGSEGV after 3.1 s",
    "rule": "segfault",
    "line": "",
    "hint": "native code crashed",
    "log_tail": "\n".join(f"line {n}" for n in range(1, 31)),
}
#: A safetensors file without tensors: the length of its header, and the header.
EMPTY_TENSORS = (2).to_bytes(8, "little") + b"{}"
MESSAGE = f"RUNTIME_ERROR: {FAILURE['message']}"


def attempt(number: int, failure: dict[str, Any] | None = None, state: str = "failed") -> dict:
    return {"number": number, "state": state, "failure": failure}


@pytest.fixture
def run_record(tmp_path: Path) -> Path:
    """Return the record of a run that failed in its first attempt."""
    return written(tmp_path, attempt(1, FAILURE))


def written(folder: Path, *attempts: dict[str, Any]) -> Path:
    path = folder / "run.json"
    content = {
        "run_id": "x-grpo-20260102-030405-abcd91c2",
        "state": "failed",
        "started_at": 1000.0,
        "ended_at": 1081.5,
        "attempts": list(attempts),
    }
    path.write_text(json.dumps(content))
    return path


def block(**fields: Any) -> list[str]:
    return [line.plain for line in end_block(**fields)]


def test_failed_run_shows_its_first_failure_the_remedy_and_the_files(run_record: Path) -> None:
    shown = block(
        state="failed", message=MESSAGE, record_path=run_record, page="http://h/runs/flow-run/1"
    )

    log = run_record.parent / "attempt-01" / "trainer.log"
    assert shown == [
        "",
        "failed: RUNTIME_ERROR: trainer (pid 8) killed by SIGSEGV after 3.1 s",
        "  first failure      trainer: killed by SIGSEGV",
        "  what to do         native code crashed",
        f"  log                {log}",
        "  what happens next  Muster decides about a retry when all processes have ended",
        "  last log lines     | line 19",
        *(f"                     | line {n}" for n in range(20, 31)),
        "  run                x-grpo-20260102-030405-abcd91c2",
        "  started            1970-01-01 00:16:40 UTC",
        "  took               1 min 22 s, 1 attempt",
        f"  record             {run_record}",
        "  page               http://h/runs/flow-run/1",
    ]


def test_first_failure_shows_the_exit_code(tmp_path: Path) -> None:
    record = written(tmp_path, attempt(1, FAILURE | {"signal": None, "exit_code": 3}))

    assert "  first failure      trainer: exit code 3" in block(
        state="failed", message=MESSAGE, record_path=record
    )


@pytest.mark.parametrize(
    ("rank", "shown_rank"),
    [
        (
            RankFailure(name="rank 1", rank=1, pid=9, exit_code=-9),
            "rank 1 (pid 9) was killed by SIGKILL first",
        ),
        (
            RankFailure(name="rank 1", rank=1, pid=9, exit_code=3, alive=(0,)),
            "rank 1 (pid 9) ended first, with exit code 3",
        ),
        (
            RankFailure(name="rank 1", rank=1, pid=9, exit_code=0),
            "rank 1 (pid 9) ended first, with exit code 0",
        ),
        (
            RankFailure(name="rank 1", child="a data loader worker", pid=9, exit_code=-11),
            "a data loader worker of rank 1 (pid 9) was killed by SIGSEGV first",
        ),
        (
            RankFailure(name="local rank 1", exit_code=-64),
            "local rank 1 was killed by SIGRTMAX first",
        ),
        (RankFailure(name="Process-2:1"), "Process-2:1 failed first"),
    ],
)
@pytest.mark.parametrize("cause", ["", ": ValueError: the worker failed first: gave up"])
def test_first_failure_names_the_rank_that_failed_first(
    tmp_path: Path, rank: RankFailure, shown_rank: str, cause: str
) -> None:
    message = f"trainer (pid 8) ended with exit code 1 after 3.1 s: {rank}{cause}"
    failure = FAILURE | {"signal": None, "exit_code": 1, "message": message}
    record = written(tmp_path, attempt(1, failure))

    shown = " ".join(" ".join(block(state="failed", message=message, record_path=record)).split())

    assert f"first failure trainer: {shown_rank}; the launcher: exit code 1 " in shown


def test_rank_of_the_first_failure_is_not_read_from_a_log_line(tmp_path: Path) -> None:
    message = (
        "trainer (pid 8) ended with exit code 1 after 3 s: ValueError: the worker failed first"
    )
    failure = FAILURE | {"signal": None, "exit_code": 1, "message": message}

    shown = block(
        state="failed", message=message, record_path=written(tmp_path, attempt(1, failure))
    )

    assert "  first failure      trainer: exit code 1" in shown


def test_stalled_component_shows_a_hang_report_and_no_exit_code(tmp_path: Path) -> None:
    stalled = FAILURE | {"kind": "STALLED", "signal": None, "hint": "", "log_tail": ""}
    record = written(tmp_path, attempt(1, stalled) | {"decision": "final: no retry"})
    hang = tmp_path / "attempt-01" / "trainer.hang.txt"
    hang.parent.mkdir()
    hang.touch()

    shown = block(state="failed", message="STALLED: no progress", record_path=record)

    assert "  first failure      trainer: never started" in shown
    assert f"  hang report        {hang}" in shown
    [remedy] = [line for line in shown if line.startswith("  what to do")]
    assert remedy.startswith(f"  what to do         Read the file {hang}. The file shows the line")
    assert not any("last log lines" in line for line in shown)


def test_stalled_component_without_a_hang_report_does_not_name_one(tmp_path: Path) -> None:
    stalled = FAILURE | {"kind": "STALLED", "signal": None, "hint": ""}
    record = written(tmp_path, attempt(1, stalled) | {"decision": "final: no retry"})

    shown = block(state="failed", message="STALLED: no progress", record_path=record)

    [remedy] = [line for line in shown if line.startswith("  what to do")]
    assert remedy.startswith("  what to do         Read the end of the component's log.")


def test_completed_run_shows_no_failure_of_an_earlier_attempt(tmp_path: Path) -> None:
    record = written(
        tmp_path, attempt(1, FAILURE | {"kind": "NODE_LOST"}), attempt(2, None, "completed")
    )

    assert block(state="completed", message="step 60 of 60", record_path=record) == [
        "",
        "completed: step 60 of 60",
        "  run                x-grpo-20260102-030405-abcd91c2",
        "  started            1970-01-01 00:16:40 UTC",
        "  took               1 min 22 s, 2 attempts (NODE_LOST and completed)",
        "  attempt            2, after 1 failed attempt",
        f"  record             {record}",
    ]


@pytest.mark.parametrize(
    ("states", "text"),
    [
        (["cancelled"], "1 cancelled attempt"),
        (["failed", "failed", "cancelled"], "2 failed attempts and 1 cancelled attempt"),
        (["completed", "running"], "1 completed attempt and 1 unfinished attempt"),
    ],
)
def test_earlier_attempts_are_counted_by_their_state(
    tmp_path: Path, states: list[str], text: str
) -> None:
    earlier = [
        attempt(number, FAILURE if state == "failed" else None, state)
        for number, state in enumerate(states, start=1)
    ]
    record = written(tmp_path, *earlier, attempt(len(earlier) + 1, None, "completed"))

    shown = block(state="completed", message="step 60 of 60", record_path=record)

    assert f"  attempt            {len(earlier) + 1}, after {text}" in shown


def test_failure_kinds_of_only_the_first_five_attempts_are_shown(tmp_path: Path) -> None:
    many = [attempt(n, FAILURE | {"kind": "START_TIMEOUT"}) for n in range(1, 10)]
    record = written(tmp_path, *many, attempt(10, FAILURE))

    shown = block(state="failed", message=MESSAGE, record_path=record)

    [took] = [line for line in shown if line.startswith("  took")]
    named = ", ".join(["START_TIMEOUT"] * 5)
    assert took == f"  took               1 min 22 s, 10 attempts ({named} and 5 more)"


def test_cancelled_run_says_that_all_processes_have_ended(run_record: Path) -> None:
    shown = block(state="cancelled", message="interrupted by SIGINT", record_path=run_record)

    assert shown[1] == "cancelled: interrupted by SIGINT; all its processes have ended"
    assert not any("first failure" in line for line in shown)


def test_run_without_an_attempt_shows_the_remedy(tmp_path: Path) -> None:
    shown = block(
        state="failed",
        message="INFEASIBLE: asks for 3 nodes; there are 2",
        record_path=written(tmp_path),
    )

    assert "  took               1 min 22 s, 0 attempts" in shown
    assert f"  what to do         {FailureKind.INFEASIBLE.properties.remedy}" in shown


@pytest.mark.parametrize("content", [None, "", "{"])
def test_final_state_is_shown_without_a_readable_record(
    tmp_path: Path, content: str | None
) -> None:
    record = tmp_path / "run.json"
    if content is not None:
        record.write_text(content)

    shown = block(state="crashed", message="Flow run crashed", record_path=record)

    assert shown == ["", "crashed: Flow run crashed", f"  record             {record}"]


@pytest.mark.parametrize("kind", FailureKind)
def test_every_failure_kind_has_a_remedy(kind: FailureKind) -> None:
    assert kind.properties.remedy


@pytest.mark.parametrize(
    ("unseen", "said"),
    [
        ([], "cancelled: SIGINT; all its processes have ended"),
        # processes of the run may still run on a node that could not be checked, so the message
        # does not say that all processes have ended
        (["node 10.0.0.5 could not be checked"], "cancelled: SIGINT"),
    ],
)
def test_processes_are_said_to_have_ended_only_if_all_nodes_were_checked(
    tmp_path: Path, unseen: list[str], said: str
) -> None:
    ray = {"submission_id": "x--a01", "component": "trainer", "unseen": unseen}
    record = written(tmp_path, attempt(1, None, "cancelled") | {"ray": ray})

    assert said in block(state="cancelled", message="SIGINT", record_path=record)


def write_run(
    folder: Path, ended: dict[str, Any], steps: tuple[int, ...] = (), **trainer: Any
) -> Path:
    """Write the record, the spec and the checkpoints of a run, and return the record's path.

    Args:
        folder: Directory of the run.
        ended: The last attempt. The run gets the state of this attempt.
        steps: Steps of the checkpoints, in the subfolder `out`.
        trainer: Keys of the component `trainer` in the spec.
    """
    record = written(folder, ended)
    content = json.loads(record.read_text()) | {"state": ended["state"]}
    record.write_text(json.dumps(content))
    for step in steps:
        checkpoint = folder / "out" / f"checkpoint-{step}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "trainer_state.json").write_text(json.dumps({"global_step": step}))
        (checkpoint / "model.safetensors").write_bytes(EMPTY_TENSORS)
    spec = {
        "name": "x",
        "workload": "sft",
        "cwd": str(folder),
        "components": {"trainer": {"command": ["true"], **trainer}},
        "progress": {"jsonl": "metrics.jsonl", "step": "step", "total": 20},
    }
    text = yaml.safe_dump(spec)
    (folder / "spec.yaml").write_text(text)
    (folder / "attempt-01").mkdir()
    # In the spec of an attempt, the placeholders are replaced.
    resolved = text.replace("${attempt.resume_from}", "''")
    (folder / "attempt-01" / "spec.yaml").write_text(resolved)
    return record


#: Spec of a component with the folder of checkpoints `out`. The argument of its command is the path
#: of the checkpoint from which it starts.
PASSES: dict[str, Any] = {"command": ["true", "${attempt.resume_from}"], "checkpoints": "out"}


@pytest.mark.parametrize(
    ("steps", "trainer", "phrase"),
    [
        ((10, 20), PASSES, "continues from step 20 (checkpoint-20)"),
        ((), PASSES, "starts from the beginning, because the run has no complete checkpoint"),
        (
            (10,),
            {"checkpoints": "out"},
            "passes no checkpoint to the trainer, because the spec does not use "
            "${attempt.resume_from}. The trainer itself probably loads step 10 (checkpoint-10)",
        ),
        (
            (),
            {},
            "starts without a checkpoint, because no component of the spec has the key "
            "`checkpoints`",
        ),
    ],
)
def test_cancelled_and_killed_runs_say_where_a_retry_starts(
    tmp_path: Path, steps: tuple[int, ...], trainer: dict[str, Any], phrase: str
) -> None:
    cancelled, killed = tmp_path / "cancelled", tmp_path / "killed"
    cancelled.mkdir()
    killed.mkdir()
    path = write_run(cancelled, attempt(1, None, "cancelled"), steps, **trainer)
    loss = {"kind": "UNKNOWN", "message": "killed", "rule": FLOW_LOST, "hint": "The advice."}
    ended = attempt(1, loss) | {"decision": "final: it was lost"}
    record = RunJson.read(write_run(killed, ended, steps, **trainer))

    shown = block(state="cancelled", message="interrupted by SIGINT", record_path=path)
    summaries = [
        [*summarize_run(RunJson.read(path), RunPlace(directory=cancelled))],
        [*summarize_run(record, RunPlace(directory=killed))],
    ]

    retry = "`muster retry x-grpo-20260102-030405-abcd91c2`"
    assert f"  to continue        {retry} {phrase}" in shown
    assert f"{retry} {phrase}" in summaries[0]
    assert f"what to do: The advice. The next attempt {phrase}." in summaries[1]


def test_advice_after_a_loss_without_a_readable_spec_names_the_condition(tmp_path: Path) -> None:
    loss = {"kind": "UNKNOWN", "message": "killed", "rule": FLOW_LOST, "hint": "The advice."}
    ended = attempt(1, loss) | {"decision": "final: it was lost"}
    record = written(tmp_path, ended)

    shown = block(state="failed", message="UNKNOWN: killed", record_path=record)

    assert (
        "  what to do         The advice. If the spec has the key `checkpoints`, the next attempt "
        "resumes from the last complete checkpoint." in shown
    )


@pytest.mark.parametrize("state", ["cancelled", "failed"])
def test_checkpoints_whose_file_system_does_not_answer_are_searched_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    loss = {"kind": "UNKNOWN", "message": "killed", "rule": FLOW_LOST, "hint": "The advice."}
    ended = attempt(1, loss if state == "failed" else None, state)
    path = write_run(tmp_path, ended | {"decision": "final: it has ended"}, (10,), **PASSES)
    searches: list[object] = []
    is_over = threading.Event()

    def search(*arguments: object) -> None:
        searches.append(arguments)
        is_over.wait()

    monkeypatch.setattr(next_start, "plan_resume", search)
    monkeypatch.setattr(next_start, "_SEARCH_WITHIN_S", 0.1)

    shown = "\n".join(line.plain for line in end_block(state, "the end", path))
    is_over.set()

    assert len(searches) == 1
    subject = f"`muster retry {RunJson.read(path).run_id}`"
    if state == "failed":
        subject = "the next attempt"
    assert (
        "Muster could not read the checkpoints (their file system has not answered for 0.1 s), so "
        f"the checkpoint for {subject} is unknown" in shown
    )


def test_error_of_the_search_for_checkpoints_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_run(tmp_path, attempt(1, None, "cancelled"), (10,), **PASSES)

    def fail(*_: object) -> None:
        raise ValueError("the step is not a number")

    monkeypatch.setattr(next_start, "plan_resume", fail)

    shown = "\n".join(block(state="cancelled", message="the end", record_path=path))

    assert "Muster could not read the checkpoints (ValueError: the step is not a number)" in shown
    assert "has not answered" not in shown


def test_cancelled_run_says_that_its_checkpoints_cannot_be_read(tmp_path: Path) -> None:
    path = write_run(tmp_path, attempt(1, None, "cancelled"), (), **PASSES)
    # Make the folder of the checkpoints unreadable: replace it by a symbolic link to itself.
    (tmp_path / "out").symlink_to("out")

    shown = block(state="cancelled", message="the end", record_path=path)

    [line] = [line for line in shown if line.startswith("  to continue")]
    assert "Muster could not read the checkpoints (" in line
    assert str(tmp_path / "out") in line
    assert "so the checkpoint for `muster retry " in line


@pytest.mark.parametrize(
    ("values", "advice"),
    [
        (["nan"], NOT_FINITE_ADVICE),
        (["-inf", "null"], NOT_FINITE_ADVICE),
        (["null"], "A metric is null, which often stands for NaN."),
    ],
)
def test_completed_run_with_a_metric_that_is_not_finite_has_advice(
    tmp_path: Path, values: list[str], advice: str
) -> None:
    record = written(tmp_path, attempt(1, None, "completed") | {"not_finite": values})
    message = "the message"
    content = json.loads(record.read_text()) | {"state": "completed", "message": message}
    record.write_text(json.dumps(content))

    shown = block(state="completed", message=message, record_path=record)
    summary = [*summarize_run(RunJson.read(record), RunPlace(directory=tmp_path))]

    assert any(line.startswith(f"  what to do         {advice}") for line in shown)
    assert any(line.startswith(f"what to do: {advice}") for line in summary)


def test_completed_run_names_its_step_and_its_last_checkpoint(tmp_path: Path) -> None:
    ended = attempt(1, None, "completed") | {"step": 20}
    checkpoints = tmp_path / "out"
    record = write_run(tmp_path, ended, (10, 20), checkpoints=str(checkpoints))

    shown = block(state="completed", message="step 20 of 20", record_path=record)

    assert "  progress           step 20 of 20" in shown
    assert f"  last checkpoint    {checkpoints / 'checkpoint-20'}" in shown


@pytest.mark.parametrize(("state", "is_shown"), [("cancelled", True), ("completed", False)])
def test_stopped_run_says_that_it_has_no_checkpoint(
    tmp_path: Path, state: str, is_shown: bool
) -> None:
    record = written(tmp_path, attempt(1, None, state))
    record.write_text(json.dumps(json.loads(record.read_text()) | {"state": state}))
    trainer = {"command": ["true"], "checkpoints": "out"}
    spec = {
        "name": "x",
        "workload": "sft",
        "cwd": str(tmp_path),
        "components": {"trainer": trainer},
    }
    (tmp_path / "attempt-01").mkdir()
    (tmp_path / "attempt-01" / "spec.yaml").write_text(yaml.safe_dump(spec))

    shown = block(state=state, message="the end", record_path=record)

    line = (
        f"  last checkpoint    none: no checkpoint was found in {tmp_path / 'out'}, which does not "
        "exist"
    )
    # The message of a completed run says the same, so the end block does not repeat it.
    assert (line in shown) == is_shown
    assert any("last checkpoint" in one for one in shown) == is_shown


@pytest.mark.parametrize("state", ["completed", "failed", "cancelled"])
def test_record_without_the_end_of_the_run_is_named(tmp_path: Path, state: str) -> None:
    path = written(tmp_path, attempt(1, state="running"))
    content = {**json.loads(path.read_text()), "state": "running", "ended_at": None}
    path.write_text(json.dumps(content))

    lines = block(state=state, message="60/60 steps", record_path=path)

    text = "\n".join(lines)
    assert f"the file {path} lacks the final state of the run" in text
    assert "muster reconcile" in text
    assert "not ended" not in text


def test_each_warning_of_a_completed_run_is_on_its_own_line(tmp_path: Path) -> None:
    message = "warning: step 9 of 9, but loss is nan\nwarning: no checkpoint was found"

    shown = block(state="completed", message=message)

    assert shown == [
        "",
        "completed: warning: step 9 of 9, but loss is nan",
        "           warning: no checkpoint was found",
    ]


def test_complete_record_is_not_called_incomplete(run_record: Path) -> None:
    lines = block(state="failed", message=MESSAGE, record_path=run_record)

    assert not any("incomplete" in line for line in lines)


def test_warning_that_the_message_of_the_run_contains_is_not_repeated(tmp_path: Path) -> None:
    problem = "metrics.jsonl has no number `stpe`, but has step"
    last = {
        "number": 1,
        "state": "completed",
        "warnings": [
            f"the training step is not known yet: {problem}",
            "trainer: the disk is nearly full",
        ],
    }
    record = written(tmp_path, last)
    message = f"warning: trainer ended with exit code 0, but its step is unknown: {problem}"
    content = {**json.loads(record.read_text()), "state": "completed", "message": message}
    record.write_text(json.dumps(content))

    shown = block(state="completed", message=message, record_path=record)

    assert sum(problem in line for line in shown) == 1
    assert "  warning            trainer: the disk is nearly full" in shown
