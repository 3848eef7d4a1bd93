"""Tests of the list of runs, the search for a run by name, and verbs for existing runs."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from uuid import UUID, uuid4

import prefect
import pytest
import yaml
from cyclopts import App
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun, State
from prefect.client.schemas.responses import SetStateStatus
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Cancelled, Completed, Crashed, Running, Scheduled

from tasks.pipeline.stage_specs import CannotBegin, require_deployment
from tasks.processes.identity import ProcessId, host_name
from tasks.processes.registry import Owner
from tasks.record.cancellation_note import take_note
from tasks.record.code_store import read_code, store_project
from tasks.record.events import Event
from tasks.record.final_record import describe_cleanup_after_loss
from tasks.record.places import RunPlace
from tasks.record.run_json import RunJson
from tasks.server.flow_runs import TYPED_NAME_LABEL
from tasks.show.arguments import run as run_verb
from tasks.spec.errors import BadArgument, Fault, InvalidSpec, MusterError
from tasks.spec.loading import dump_spec, parse_spec
from tasks.spec.watch import NOT_FINITE_ADVICE
from tasks.train import run_cancellation, run_verbs, server_runs
from tasks.train.finding_runs import find_run, list_runs
from tasks.train.run_records import describe_lost_process
from tasks.train.run_verbs import cancel, explain, ls, show, why
from tasks.train.runs import Run
from tasks.train.server_runs import make_run
from tests.support.web import serving

# Run ids, from the oldest run to the newest. A run id contains the start time of the run.
OLD = "sft-20260101-000000-aaaa91c2"
FAILED = "trial-grpo-20260102-000000-bbbb91c2"
LIVE = "trial-grpo-20260102-000000-bbcc91c2"
FLOW_RUNS = {
    OLD: "11111111-0000-4000-8000-000000000000",
    FAILED: "22222222-0000-4000-8000-000000000000",
    LIVE: "22333333-0000-4000-8000-000000000000",
}
STATES = {OLD: "completed", FAILED: "failed", LIVE: "running"}

LS = App(name="ls", default_command=ls)
SHOW = App(name="show", default_command=show)


def write_record(run_id: str, /, **changes: Any) -> None:
    """Write the `run.json` of a run of the test. The keyword arguments replace keys of the file."""
    number = list(FLOW_RUNS).index(run_id)
    record = {
        "run_id": run_id,
        "flow_run_id": FLOW_RUNS[run_id],
        "state": STATES[run_id],
        "message": f"it is {STATES[run_id]}\nand more",
        "tags": ["demo"],
        "started_at": 1000.0 + number,
        "ended_at": None if STATES[run_id] == "running" else 2000.0,
        "attempts": [{"number": n, "state": "failed"} for n in range(1, number + 2)],
        **changes,
    }
    place = RunPlace.of(record["run_id"])
    place.directory.mkdir(parents=True)
    place.record.write_text(json.dumps(record))


@pytest.fixture
def records(muster_home: Path) -> Path:
    """Create the records of three runs, a directory without a record, and a damaged record."""
    for run_id in FLOW_RUNS:
        write_record(run_id)
    (muster_home / "runs" / "no-record").mkdir()
    (muster_home / "runs" / "torn-20260103-000000-dddd").mkdir()
    (muster_home / "runs" / "torn-20260103-000000-dddd" / "run.json").write_text("{")
    return muster_home


@pytest.mark.parametrize(
    ("name", "run_id"),
    [
        (OLD, OLD),
        # the name is the beginning of only one run id
        ("sft", OLD),
        ("trial-grpo-20260102-000000-bbb", FAILED),
        # the name is the id of a flow run, or the beginning of only one flow run id
        (FLOW_RUNS[LIVE], LIVE),
        ("1", OLD),
        ("223", LIVE),
        # the name is the end of only one run id
        ("bbbb91c2", FAILED),
        # only one run id contains the searched text
        ("bbcc", LIVE),
        ("20260101", OLD),
        # `latest` stands for the newest run
        ("latest", LIVE),
    ],
)
def test_run_is_found_by_id_unique_part_or_latest(records: Path, name: str, run_id: str) -> None:
    run = find_run(name)

    assert (run.run_id, run.flow_run_id) == (run_id, FLOW_RUNS[run_id])
    assert run.state == STATES[run_id]


def test_complete_id_wins_over_longer_ids_with_the_same_beginning(muster_home: Path) -> None:
    for run_id in (OLD, LIVE):
        write_record(run_id)
    write_record(FAILED, run_id=OLD + "-again")

    assert find_run(OLD).run_id == OLD


@pytest.mark.parametrize(
    ("name", "run_id"),
    [
        # a run whose whole name is the searched text is preferred to runs with longer names
        ("trainer", "trainer-sft-20260101-000000-aaaaaaaa"),
        # a run whose name begins with the searched text is preferred to a run whose name contains
        # the text in the middle
        ("b", "big-trainer-sft-20260102-000000-cccccccc"),
        ("big", "big-trainer-sft-20260102-000000-cccccccc"),
        # the searched text occurs in the name of only one run
        ("second", "trainer-second-sft-20260103-000000-bbbbbbbb"),
        ("er-sec", "trainer-second-sft-20260103-000000-bbbbbbbb"),
        # a run id ends with a random part. The searched text is the end of a run id, or the
        # beginning of the random part
        ("cc", "big-trainer-sft-20260102-000000-cccccccc"),
        ("-bbb", "trainer-second-sft-20260103-000000-bbbbbbbb"),
    ],
)
def test_unique_part_of_name_or_id_finds_the_run(muster_home: Path, name: str, run_id: str) -> None:
    write_record(OLD, run_id="trainer-sft-20260101-000000-aaaaaaaa")
    write_record(FAILED, run_id="big-trainer-sft-20260102-000000-cccccccc")
    write_record(LIVE, run_id="trainer-second-sft-20260103-000000-bbbbbbbb")

    assert find_run(name).run_id == run_id


@pytest.mark.parametrize(
    ("states", "expected_run"),
    [
        (("failed", "running"), LIVE),
        (("running", "failed"), FAILED),
        (("failed", "completed"), LIVE),
        (("queued", "completed"), FAILED),
        (("running", "queued"), None),
    ],
)
def test_name_of_several_runs_means_the_active_run_or_else_the_newest_run(
    records: Path, states: tuple[str, str], expected_run: str | None
) -> None:
    for run_id, state in zip((FAILED, LIVE), states, strict=True):
        record = RunPlace.of(run_id).record
        record.write_text(json.dumps({**json.loads(record.read_text()), "state": state}))

    if expected_run is None:
        with pytest.raises(BadArgument, match=r"^trial matches 2 runs"):
            find_run("trial")
    else:
        assert find_run("trial").run_id == expected_run


@pytest.mark.parametrize("name", ["trial-grpo-20260102-000000-bb", "22", "grpo", "0102-000000"])
def test_ambiguous_part_is_rejected_with_all_matches(records: Path, name: str) -> None:
    with pytest.raises(BadArgument, match=f"^{name} matches 2 runs") as error_info:
        find_run(name)

    assert FAILED in str(error_info.value) and LIVE in str(error_info.value)
    assert OLD not in str(error_info.value)
    assert error_info.value.exit_code == 2


@pytest.mark.parametrize("name", ["nobody", "dddd", "last", OLD + "x", "no-record", "torn"])
def test_unknown_name_is_rejected_with_a_hint_to_the_list(records: Path, name: str) -> None:
    with pytest.raises(
        BadArgument, match=f"there is no run {name}: list the runs with `muster ls`"
    ):
        find_run(name)


@pytest.mark.parametrize("name", ["latest", "any"])
def test_search_without_any_run_says_how_to_start_a_run(muster_home: Path, name: str) -> None:
    with pytest.raises(BadArgument, match="there is no run yet: muster train SPEC"):
        find_run(name)


def test_json_list_has_all_keys_and_is_sorted_newest_first(
    records: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run_verb(LS, ["--json"])

    listed = json.loads(capsys.readouterr().out)
    assert code == 0
    assert [run["run_id"] for run in listed] == [LIVE, FAILED, OLD]
    assert listed[1] == {
        "run_id": FAILED,
        "flow_run_id": FLOW_RUNS[FAILED],
        "state": "failed",
        "message": "it is failed\nand more",
        "tags": ["demo"],
        "created_at": 1001.0,
        "started_at": 1001.0,
        "ended_at": 2000.0,
        "attempts": 2,
        "host": host_name(),
        "step": None,
        "total": None,
        "metric": "",
        "value": None,
    }
    assert listed[0]["ended_at"] is None
    assert all(run.keys() == listed[1].keys() for run in listed)


@pytest.mark.parametrize(
    ("arguments", "listed"),
    [
        (["--limit", "2"], [LIVE, FAILED]),
        (["--state", "completed"], [OLD]),
        (["--state", "completed", "--state", "running"], [LIVE, OLD]),
        # the limit counts only runs with the requested state
        (["--state", "completed", "--limit", "1"], [OLD]),
        (["--state", "cancelled"], []),
    ],
)
def test_list_contains_only_the_requested_runs(
    records: Path, arguments: list[str], listed: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    code = run_verb(LS, [*arguments, "--json"])

    assert code == 0
    assert [run["run_id"] for run in json.loads(capsys.readouterr().out)] == listed


def test_limited_list_contains_the_newest_runs(records: Path) -> None:
    assert [run.run_id for run in list_runs(at_most=3)] == [LIVE, FAILED]


def test_list_without_a_terminal_has_one_complete_line_per_run(
    records: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_verb(LS, [])

    rows = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    assert [(row[0], row[1], row[4]) for row in rows] == [
        (run_id, STATES[run_id], f"it is {STATES[run_id]}") for run_id in (LIVE, FAILED, OLD)
    ]


def test_list_shows_the_first_fault_of_a_spec(
    muster_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    faults = (Fault(path="name", problem="missing"), Fault(path="cwd", problem="does not exist"))
    write_record(FAILED, message=f"USER_ERROR: {InvalidSpec(faults, 'the spec')}")

    run_verb(LS, [])

    row = capsys.readouterr().out.splitlines()[0].split("\t")
    assert row[4] == "USER_ERROR: the spec has 2 faults: name: missing"


def write_run_with_two_problems() -> tuple[str, str]:
    """Write the record of a completed run with two warnings, and return the warnings."""
    folder = RunPlace.of(OLD).directory
    problems = (
        f"warning: trainer ended, but {folder}/attempt-01/metrics.jsonl does not exist",
        f"warning: no checkpoint was found in {folder}/checkpoints",
    )
    attempts = [{"number": 1, "state": "completed"}]
    write_record(OLD, message="\n".join(problems), attempts=attempts)
    return problems


def test_list_on_a_terminal_shows_the_first_problem_of_a_run(
    muster_home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run_with_two_problems()
    monkeypatch.setattr(run_verbs, "is_on_terminal", lambda: True)
    monkeypatch.setenv("COLUMNS", "300")

    run_verb(LS, [])

    line = capsys.readouterr().out.splitlines()[1]
    assert line.endswith(
        "warning: trainer ended, but attempt-01/metrics.jsonl does not exist (and 1 more)"
    )


def test_list_without_a_terminal_has_all_problems_of_a_run_in_one_line(
    muster_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, second = write_run_with_two_problems()

    run_verb(LS, [])

    [line] = capsys.readouterr().out.splitlines()
    assert line.split("\t")[4] == f"{first}; {second.removeprefix('warning: ')}"


@pytest.mark.parametrize("verb", [why, show, explain])
def test_each_problem_of_a_run_is_on_its_own_line(
    verb: Callable[..., object], muster_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    problems = write_run_with_two_problems()

    run_verb(App(name="verb", default_command=verb), [OLD])

    lines = capsys.readouterr().out.splitlines()
    assert [[line.endswith(problem) for line in lines].count(True) for problem in problems] == [
        1,
        1,
    ]


@pytest.fixture
def training(muster_home: Path) -> str:
    """A run that has reached step 7 of 60. Its `run.json` is older than its event log."""
    trainer = {"pid": 8, "started_at": 1000.0, "ready_at": 1001.0}
    attempt = {"number": 1, "state": "running", "step": 2, "components": {"trainer": trainer}}
    write_record(LIVE, attempts=[attempt])
    place = RunPlace.of(LIVE).attempt(1)
    place.directory.mkdir()
    spec = {
        "name": "trial",
        "workload": "grpo",
        "cwd": str(place.directory),
        "components": {"trainer": {"command": ["true"]}},
        "progress": {"jsonl": "metrics.jsonl", "step": "step", "total": 60},
    }
    place.spec.write_text(yaml.safe_dump(spec))
    events = [
        Event(at=1000.0, name="attempt.begun", fields={"attempt": 1}),
        Event(at=1001.0, name="attempt.ready"),
        Event(at=1002.0, name="run.progress", fields={"step": 7}),
    ]
    place.events.write_text("".join(f"{event.as_line()}\n" for event in events))
    rows = [{"step": step, "loss": 1.0, "reward": step / 10} for step in range(1, 8)]
    (place.directory / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return LIVE


def test_list_has_the_current_step_and_the_last_reward(
    training: str, capsys: pytest.CaptureFixture[str]
) -> None:
    run_verb(LS, [])
    [row] = [line.split("\t") for line in capsys.readouterr().out.splitlines()]
    run_verb(LS, ["--json"])
    [listed] = json.loads(capsys.readouterr().out)

    assert row[5:7] == ["7/60", "reward 0.7"]
    assert {key: listed[key] for key in ("step", "total", "metric", "value")} == {
        "step": 7.0,
        "total": 60.0,
        "metric": "reward",
        "value": 0.7,
    }


def test_show_of_a_run_on_this_machine_has_the_step_of_its_last_event(
    training: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run_verb(SHOW, [training])

    text = capsys.readouterr().out
    assert code == 0
    assert "Progress: step 7 of 60" in text
    assert ["trainer", "ready", "pid", "8"] in [line.split()[:4] for line in text.splitlines()]
    assert not {"*", "|", "#"} & {*text}


def test_list_and_show_have_the_step_that_was_recorded_after_a_killed_flow_process(
    training: str, capsys: pytest.CaptureFixture[str]
) -> None:
    place = RunPlace.of(training)
    record = json.loads(place.record.read_text())
    ended = {"number": 1, "state": "failed", "step": 8, "ended_at": 1003.0}
    changes = {"state": "failed", "attempts": [ended]}
    place.record.write_text(json.dumps({**record, **changes}))

    run_verb(LS, [])
    row = capsys.readouterr().out.split("\t")
    run_verb(SHOW, [training])

    assert row[5] == "8/60"
    assert "Progress: step 8 of 60" in capsys.readouterr().out


def test_empty_list_exits_with_zero(muster_home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    codes = [run_verb(LS, []), run_verb(LS, ["--json"])]

    out, err = capsys.readouterr()
    assert codes == [0, 0]
    assert out == "[]\n"
    assert "run `muster train SPEC`" in err


@pytest.mark.parametrize(
    ("name", "message"),
    [(OLD, "has ended: it is completed"), ("grpo", "matches 2 runs"), (LIVE, "Ctrl-C")],
)
def test_impossible_cancellation_is_rejected_with_a_reason(
    records: Path, name: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run_verb(App(name="cancel", default_command=cancel), [name])

    assert code == (1 if name == LIVE else 2)
    assert message in capsys.readouterr().err


def test_diff_shows_differences_in_spec_code_packages_and_host(
    muster_home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trees = []
    for word in ("old", "new"):
        (tmp_path / "project").mkdir(exist_ok=True)
        (tmp_path / "project" / "train.py").write_text(word)
        trees.append(read_code(store_project(tmp_path / "project")).tree)
    same: dict[str, Any] = {"project": "/p", "host": "a", "packages": {"torch": "2.7", "trl": "1"}}
    second = {"number": 2, "state": "failed", "provenance": {"host": "b"}, "ports": {"x.port": 41}}
    attempts = [{"number": 1, "state": "failed", "ports": {"x.port": 40}}, second]
    write_record(OLD, provenance={**same, "tree": trees[0]})
    changed = {"tree": trees[1], "packages": {"torch": "2.8", "trl": "1"}}
    write_record(FAILED, provenance={**same, **changed}, attempts=attempts)
    for run_id, number, port, rate in ((OLD, 1, 7, 1), (FAILED, 1, 40, 2), (FAILED, 2, 41, 2)):
        place = RunPlace.of(run_id).attempt(number)
        place.directory.mkdir()
        place.spec.write_text(
            f"cwd: {place.directory}\nc: [x, {rate}, 'h:{port}']\nid: {{run: {run_id}}}\n"
        )

    codes = [
        run_verb(SHOW, ["--diff", f"{FAILED}--a01", f"{FAILED}--a02"]),
        run_verb(SHOW, ["--diff", FAILED, f"{FAILED}--a02"]),
        run_verb(SHOW, ["--diff", "--json", OLD, f"{FAILED}--a01"]),
        run_verb(SHOW, ["--diff", OLD]),
        run_verb(SHOW, ["--diff", OLD, f"{FAILED}--a03"]),
    ]

    out, err = capsys.readouterr()
    [attempts_differ, same_attempt, *runs_differ] = out.splitlines()
    differences = json.loads("\n".join(runs_differ))
    assert codes == [0, 0, 0, 2, 2]
    assert (attempts_differ, same_attempt) == (
        "host a -> b",
        "The records of the two attempts do not differ.",
    )
    assert differences.keys() == {"spec.c.1", "spec.c.2", "tree", "packages.torch", "code.train.py"}
    assert (differences["packages.torch"], differences["spec.c.1"]) == (["2.7", "2.8"], [1, 2])
    assert "muster show --diff RUN RUN" in err and f"{FAILED} has no attempt 3" in err


def answer_as_another_server(method: str, path: str, body: bytes) -> tuple[int, object]:
    """Answer like a Prefect server that knows none of the runs."""
    if path.endswith("/filter"):
        return 200, []
    if path.endswith("/admin/version"):
        return 200, prefect.__version__
    return 404, {"detail": "not found"}


def test_every_verb_works_on_a_record_whose_server_was_temporary(
    muster_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_record(OLD)
    verbs = [
        App(name=function.__name__, default_command=function) for function in (show, why, explain)
    ]

    with (
        serving(answer_as_another_server) as url,
        temporary_settings({PREFECT_API_URL: f"{url}/api"}),
    ):
        codes = {verb.name[0]: run_verb(verb, [OLD]) for verb in verbs}

    output = capsys.readouterr()
    assert codes == {"show": 0, "why": 0, "explain": 0}
    assert output.err == ""
    assert output.out.count(OLD) >= len(verbs)


def test_why_works_on_a_record_if_the_server_does_not_answer(
    muster_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_record(OLD)

    with temporary_settings({PREFECT_API_URL: "http://127.0.0.1:9/api"}):
        code = run_verb(App(name="why", default_command=why), [OLD])

    assert code == 0
    assert OLD in capsys.readouterr().out


def diff_text(capsys: pytest.CaptureFixture[str]) -> str:
    """Return the output of `muster show --diff` for the runs OLD and FAILED."""
    return diff_of(capsys, OLD, FAILED)


def diff_of(capsys: pytest.CaptureFixture[str], first: str, second: str) -> str:
    """Return the output of `muster show --diff` for two runs."""
    assert run_verb(SHOW, ["--diff", first, second]) == 0
    return capsys.readouterr().out


def write_specs(first: str, second: str) -> None:
    """Write `spec.yaml` of two runs' last attempts: `first` for OLD, and `second` for FAILED."""
    for run_id, number, text in ((OLD, 1, first), (FAILED, 2, second)):
        place = RunPlace.of(run_id).attempt(number)
        place.directory.mkdir()
        place.spec.write_text(text)


@pytest.mark.parametrize(
    ("first", "second", "line"),
    [
        ("c: [t.py, --lr, 6e-3, x]", "c: [t.py, --lr, 7e-3, x]", "lr 6e-3 -> 7e-3  (c)"),
        ("c: [t.py, --lr=6e-3]", "c: [t.py, --lr=7e-3]", "lr 6e-3 -> 7e-3  (c)"),
        ("c: [t.py, lr=6e-3]", "c: [t.py, lr=7e-3]", "lr 6e-3 -> 7e-3  (c)"),
        ("c: [a.py, --x]", "c: [b.py, --x]", "a.py -> b.py  (c)"),
        ("c: [t.py, --x, --y]", "c: [t.py, --new, --x, --y]", "--new added  (c)"),
        ("c: [t.py, --old, --y]", "c: [t.py, --y]", "--old removed  (c)"),
        ("c: [t.py, --break, kill]", "c: [t.py]", "--break kill removed  (c)"),
        ("c: [t.py]", "c: [t.py, --break, kill]", "--break kill added  (c)"),
        ("c: [t.py, --ids, 1, 2, 3]", "c: [t.py, --ids, 1, 5]", "ids 1 2 3 -> 1 5  (c)"),
        ("c: [t.py, --shift, '-1']", "c: [t.py, --shift, '-2']", "shift -1 -> -2  (c)"),
        ("c: [t.py, --load, '']", "c: [t.py, --load, x]", "load (empty) -> x  (c)"),
        ("c: [t.py, --a, 1, --b]", "c: [t.py, --b, --a, 1]", "--b moved  (c)"),
        ("c: [t.py, x, y]", "c: [t.py, y]", "x removed  (c)"),
        ("c: [t.py, --lr=6e-3]", "c: [t.py, --lr, 6e-3]", "--lr=6e-3 -> --lr 6e-3  (c)"),
        ("progress: {total: 60}", "progress: {total: 80}", "progress.total 60 -> 80"),
        ("env: {A: x}", "env: {}", "env.A x -> (none)"),
    ],
)
def test_diff_shows_changed_values_with_their_names(
    muster_home: Path, capsys: pytest.CaptureFixture[str], first: str, second: str, line: str
) -> None:
    write_record(OLD)
    write_record(FAILED)
    write_specs(first, second)

    assert diff_text(capsys).splitlines()[:-1] == [line]


def test_diff_shows_one_line_per_changed_option(
    muster_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_record(OLD)
    write_record(FAILED)
    write_specs("c: [t.py, --steps, 20, --break, kill]", "c: [t.py, --steps, 30]")

    assert diff_text(capsys).splitlines()[:-1] == [
        "steps 20 -> 30  (c)",
        "--break kill removed  (c)",
    ]


@pytest.mark.parametrize("is_resumed_first", [True, False])
def test_diff_leaves_out_the_checkpoint_from_which_an_attempt_resumes(
    muster_home: Path, capsys: pytest.CaptureFixture[str], is_resumed_first: bool
) -> None:
    resumed, fresh = (OLD, FAILED) if is_resumed_first else (FAILED, OLD)
    checkpoint = RunPlace.of(resumed).directory / "checkpoints" / "step-10"
    write_record(fresh)
    write_record(resumed)
    path = RunPlace.of(resumed).record
    content = json.loads(path.read_text())
    content["attempts"][-1]["resume_from"] = str(checkpoint)
    path.write_text(json.dumps(content))
    template = "env: {RESUME_FROM: 'PATH'}\nc: [t.py, --resume, 'PATH', '--load=PATH/model']"
    with_checkpoint = template.replace("PATH", str(checkpoint))
    without_checkpoint = template.replace("PATH", "")
    texts = {resumed: with_checkpoint, fresh: without_checkpoint}
    write_specs(texts[OLD], texts[FAILED])

    assert diff_text(capsys).splitlines()[:-1] == []


@pytest.mark.parametrize(
    ("train_env", "lines"),
    [("{}", []), ("{A: x}", ["env.A x -> (none)"])],
)
def test_diff_of_a_train_run_and_a_submitted_run_shows_only_changes_of_the_user(
    muster_home: Path, capsys: pytest.CaptureFixture[str], train_env: str, lines: list[str]
) -> None:
    write_record(OLD, provenance={"project": "/p", "spec_file": "/p/muster.yaml"})
    write_record(FAILED, provenance={"project": "/p"})
    code = RunPlace.of(FAILED).directory / "code"
    components = "components: {api: {command: [a]}, trainer: {command: [t]}}"
    write_specs(
        f"cwd: /p/sub\nenv: {train_env}\n{components}",
        f"cwd: {code}/sub\nenv: {{}}\ncode: abc\nstart_order: [api, trainer]\n{components}",
    )

    shown = diff_text(capsys).splitlines()[:-1]

    start = (
        "the first run was started with muster train, and the second run was started by a worker "
        "(muster submit, or a deployment)"
    )
    assert shown == [*lines, start]


@pytest.mark.parametrize("code", ["", "code: live\n"])
@pytest.mark.parametrize("is_known_first", [True, False])
def test_diff_does_not_guess_how_a_run_without_a_recorded_spec_file_was_started(
    muster_home: Path, capsys: pytest.CaptureFixture[str], code: str, is_known_first: bool
) -> None:
    known, unknown = (OLD, FAILED) if is_known_first else (FAILED, OLD)
    write_record(known, provenance={"project": "/p", "spec_file": "/p/muster.yaml"})
    write_record(unknown, provenance={"project": "/p"})
    texts = {known: "cwd: /p", unknown: f"{code}cwd: /p"}
    write_specs(texts[OLD], texts[FAILED])

    [line] = diff_text(capsys).splitlines()[:-1]

    names = {True: "the first run", False: "the second run"}
    start = f"{names[is_known_first]} was started with muster train"
    no_start = f"the record of {names[not is_known_first]} does not say how the run was started"
    assert set(line.split(", and ")) == {start, no_start}


@pytest.mark.parametrize(
    ("second", "lines"),
    [
        (
            "start_order: [b, a]\ncomponents: {b: {command: [b]}, a: {command: [a]}}",
            ["start_order a, b -> b, a"],
        ),
        ("components: {a: {command: [a]}}", ["b removed  (components.b.command)"]),
    ],
)
def test_diff_shows_the_start_order_only_if_the_components_are_the_same(
    muster_home: Path, capsys: pytest.CaptureFixture[str], second: str, lines: list[str]
) -> None:
    write_record(OLD)
    write_record(FAILED)
    write_specs("components: {a: {command: [a]}, b: {command: [b]}}", second)

    assert diff_text(capsys).splitlines()[:-1] == lines


def test_diff_says_if_the_code_of_a_run_was_not_recorded(
    muster_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_record(OLD)
    write_record(FAILED)

    assert diff_text(capsys).splitlines()[-1].startswith("the code of the runs cannot be compared")


def submitted_run(run_id: str, flow_run_id: str, **changes: Any) -> FlowRun:
    """Return the flow run of a submitted run that still waits.

    Keyword arguments change the run's spec.
    """
    spec = {
        "name": "trial",
        "workload": "sft",
        "run_id": run_id,
        "components": {"trainer": {"command": ["python", "t.py", "--lr", "6e-3"]}},
        **changes,
    }
    return FlowRun(
        id=UUID(flow_run_id),
        flow_id=uuid4(),
        name=run_id,
        state=Scheduled(),
        parameters={"spec": spec},
    )


@contextmanager
def serving_flow_runs(*flow_runs: FlowRun) -> Iterator[None]:
    """Run a fake Prefect server with only these flow runs. `muster` uses this server."""
    by_path = {
        f"/flow_runs/{flow_run.id}": flow_run.model_dump(mode="json") for flow_run in flow_runs
    }

    def answer(method: str, path: str, body: bytes) -> tuple[int, object]:
        if path.endswith("/flow_runs/filter"):
            return 200, [*by_path.values()]
        for suffix, content in by_path.items():
            if path.endswith(suffix):
                return 200, content
        return answer_as_another_server(method, path, body)

    with serving(answer) as url, temporary_settings({PREFECT_API_URL: f"{url}/api"}):
        yield


def store_code(project: Path, text: str) -> str:
    """Store a project with the file `train.py`, and return the name of the stored code."""
    project.mkdir(exist_ok=True)
    (project / "train.py").write_text(text)
    return store_project(project)


WAITING = "trial-sft-20260104-000000-cccc91c2"
WAITING_ID = "44444444-0000-4000-8000-000000000000"


@pytest.mark.parametrize("has_submitted_spec", [True, False])
def test_diff_compares_a_waiting_run_by_its_submitted_spec_and_code(
    muster_home: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    has_submitted_spec: bool,
) -> None:
    old_code = store_code(tmp_path / "project", "lr = 6\n")
    new_code = store_code(tmp_path / "project", "lr = 7\n")
    write_record(FAILED, provenance={"tree": read_code(old_code).tree, "python": "3.11"})
    place = RunPlace.of(FAILED).attempt(2)
    place.directory.mkdir()
    flow_runs = (
        [submitted_run(FAILED, FLOW_RUNS[FAILED], code=old_code)] if has_submitted_spec else []
    )
    spec = submitted_run(FAILED, FLOW_RUNS[FAILED]).parameters["spec"]
    place.spec.write_text(yaml.safe_dump(spec))
    command = ["python", "t.py", "--lr", "7e-3"]
    secret = {"HF_TOKEN": "secret-value"}
    waiting = submitted_run(
        WAITING,
        WAITING_ID,
        code=new_code,
        env=secret,
        components={"trainer": {"command": command}},
    )

    with serving_flow_runs(waiting, *flow_runs):
        codes = [
            run_verb(SHOW, ["--diff", FAILED, WAITING]),
            run_verb(SHOW, ["--diff", FAILED, WAITING, "--json"]),
        ]

    output = capsys.readouterr()
    text, _, as_json = output.out.partition("\n{\n")
    assert codes == [0, 0], output.err
    assert text.splitlines()[0] == (
        f"{WAITING} has not started: it is queued. Only the spec and the submitted code are "
        "compared."
    )
    assert "lr 6e-3 -> 7e-3  (components.trainer.command)" in text
    assert "-lr = 6\n+lr = 7" in text
    assert "python 3.11" not in text
    assert "secret-value" not in text + as_json
    assert json.loads("{" + as_json)["spec.components.trainer.command.3"] == ["6e-3", "7e-3"]
    assert "has not started" in output.err


def test_diff_of_two_waiting_runs_with_the_same_spec_says_that_they_do_not_differ(
    muster_home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = store_code(tmp_path / "project", "lr = 6\n")
    other_id = "55555555-0000-4000-8000-000000000000"
    other = WAITING.replace("cccc", "dddd")

    with serving_flow_runs(
        submitted_run(WAITING, WAITING_ID, code=code), submitted_run(other, other_id, code=code)
    ):
        exit_code = run_verb(SHOW, ["--diff", WAITING, other])

    lines = capsys.readouterr().out.splitlines()
    assert exit_code == 0
    assert lines[-1] == "The specs and the submitted code do not differ."
    assert WAITING in lines[0] and other in lines[0]


def test_diff_shows_the_code_as_a_unified_diff(
    muster_home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    project = tmp_path / "project"
    project.mkdir()
    trees = []
    for rate, token in ((6, "first"), (7, "second")):
        (project / "train.py").write_text(f"a = 1\nlr = {rate}\nHF_TOKEN = '{token}-value'\n")
        (project / "data.bin").write_bytes(bytes([255, rate]))
        trees.append(read_code(store_project(project)).tree)
        (project / f"added{rate}.py").write_text("new = 1\n")
    for run_id, tree in ((OLD, trees[0]), (FAILED, trees[1])):
        write_record(run_id, provenance={"tree": tree})

    text = diff_text(capsys)

    assert "--- a/train.py\n+++ b/train.py\n" in text
    assert "\n-lr = 6\n" in text and "\n+lr = 7\n" in text
    assert "--- /dev/null\n+++ b/added6.py\n" in text and "\n+new = 1\n" in text
    assert "data.bin: not a text file; its size changes from 2 to 2 bytes" in text
    assert "first-value" not in text and "second-value" not in text
    assert trees[0] not in text


def test_diff_names_files_that_differ_only_in_their_line_ends_or_are_empty(
    muster_home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    project = tmp_path / "project"
    project.mkdir()
    (project / "run.sh").write_bytes(b"python train.py\r\n")
    (project / "end.py").write_text("a = 1")
    (project / "old.py").touch()
    trees = [read_code(store_project(project)).tree]
    (project / "run.sh").write_bytes(b"python train.py\n")
    (project / "end.py").write_text("a = 1\n")
    (project / "old.py").unlink()
    (project / "new.py").touch()
    trees.append(read_code(store_project(project)).tree)
    for run_id, tree in ((OLD, trees[0]), (FAILED, trees[1])):
        write_record(run_id, provenance={"tree": tree})

    lines = diff_text(capsys).splitlines()

    assert {
        "run.sh: only the line ends differ",
        "end.py: only the line ends differ",
        "old.py: empty file removed",
        "new.py: new empty file",
    } <= set(lines)


SPEC_TEXT = """
name: trial
workload: sft
env: {HF_TOKEN: secret-value}
components:
  trainer: {command: [python, train.py, --lr, RATE], stop: {grace_s: 2.50}}
  evaluator: {command: [python, evaluate.py]}
"""


def store_two_states_of_a_project(project: Path) -> list[str]:
    """Store a project before and after a change of all its files, and return both stored codes.

    In the first state, `muster.yaml` is a spec with the learning rate 6e-3, and `other.yaml` is
    missing. In the second state, `other.yaml` is a spec with the learning rate 7e-3.
    """
    first, second, third, fourth = (SPEC_TEXT.replace("RATE", f"{n}e-3") for n in range(6, 10))
    states = [
        {"muster.yaml": first, "third.yaml": third, "settings.yaml": "lr: 6\n"},
        {"muster.yaml": fourth, "third.yaml": fourth, "settings.yaml": "lr: 7\n"},
    ]
    states[1]["other.yaml"] = second
    codes: list[str] = []
    project.mkdir()
    for files in states:
        for name, text in files.items():
            (project / name).write_text(text)
        codes.append(store_project(project))
    return codes


@pytest.mark.parametrize("is_recorded", [True, False])
def test_diff_leaves_out_only_the_spec_files_of_the_two_runs(
    muster_home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], is_recorded: bool
) -> None:
    project = tmp_path / "project"
    codes = store_two_states_of_a_project(project)
    for run_id, code, name, rate in (
        (OLD, codes[0], "muster.yaml", "6e-3"),
        (FAILED, codes[1], "other.yaml", "7e-3"),
    ):
        spec_file = {"spec_file": str(project / name)} if is_recorded else {}
        tree = read_code(code).tree
        write_record(run_id, provenance={"project": str(project), "tree": tree, **spec_file})
        written = yaml.safe_load(SPEC_TEXT.replace("RATE", rate))
        # The Prefect server stores the spec of a submitted run as JSON.
        submitted = json.loads(json.dumps(parse_spec(written).to_server_data()))
        spec = parse_spec({**submitted, "code": code, "run_id": WAITING})
        RunPlace.of(run_id).spec.write_text(dump_spec(spec))

    text = diff_text(capsys)
    run_verb(SHOW, ["--diff", OLD, FAILED, "--json"])

    shown_files = {line.split("/")[-1] for line in text.splitlines() if line.startswith("+++ ")}
    differences = json.loads(capsys.readouterr().out)
    assert shown_files == {"third.yaml", "settings.yaml"}
    assert {key for key in differences if key.startswith("code.")} == {
        "code.third.yaml",
        "code.settings.yaml",
    }


def test_diff_of_waiting_runs_leaves_out_their_spec_files(
    muster_home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    codes = store_two_states_of_a_project(tmp_path / "project")
    specs = [yaml.safe_load(SPEC_TEXT.replace("RATE", rate)) for rate in ("6e-3", "7e-3")]
    other_id = "55555555-0000-4000-8000-000000000000"
    other = WAITING.replace("cccc", "dddd")

    with serving_flow_runs(
        submitted_run(WAITING, WAITING_ID, **{**specs[0], "code": codes[0]}),
        submitted_run(other, other_id, **{**specs[1], "code": codes[1]}),
    ):
        text = diff_of(capsys, WAITING, other)

    assert "lr 6e-3 -> 7e-3  (components.trainer.command)" in text
    assert "+++ b/third.yaml" in text
    assert "muster.yaml" not in text and "other.yaml" not in text


@pytest.mark.parametrize("content", ["[", "- 1", "x: 1\nx: 2", "\xff", "components: {a: 1}"])
def test_diff_shows_a_yaml_file_that_is_no_spec(
    muster_home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    project = tmp_path / "project"
    trees = [read_code(store_code(project, "lr = 6\n")).tree]
    (project / "settings.yaml").write_bytes(content.encode("latin-1"))
    trees.append(read_code(store_code(project, "lr = 6\n")).tree)
    for run_id, tree in ((OLD, trees[0]), (FAILED, trees[1])):
        write_record(run_id, provenance={"tree": tree})
        RunPlace.of(run_id).spec.write_text(SPEC_TEXT)

    assert "settings.yaml" in diff_text(capsys)


@pytest.mark.parametrize("host", ["here", "there", None])
def test_local_record_is_ignored_if_another_host_resumed_the_run(
    muster_home: Path, host: str | None
) -> None:
    write_record(LIVE, attempts=[{"number": 1, "state": "failed", "host": "there"}])
    place = RunPlace.of(LIVE)
    record = json.loads(place.record.read_text())
    place.record.write_text(json.dumps({**record, "state": "pending_resources"}))
    tags = [f"process:{host}:1"] if host else []
    flow_run = FlowRun(flow_id=uuid4(), name=LIVE, tags=tags, state=Running(), parameters={})

    run = make_run(flow_run, RunJson.read(place.record))

    assert run.state == ("running" if host == "here" else "pending_resources")


def test_cancellation_of_a_run_unknown_to_the_server_says_where_to_end_it(
    records: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Server:
        def set_flow_run_state(self, *_: object, **_options: object) -> None:
            raise ObjectNotFound(http_exc=Exception("404"))

    monkeypatch.setattr(run_cancellation, "connect_to_server", lambda _: nullcontext(Server()))
    record = RunJson.read(RunPlace.of(LIVE).record)

    with (
        temporary_settings({PREFECT_API_URL: "http://a/api"}),
        pytest.raises(MusterError, match="no process of the run"),
    ):
        run_cancellation.cancel_run(Run.of_record(record))


@pytest.mark.parametrize(
    ("is_now", "states"),
    [(False, ["Cancelling"]), (True, ["Cancelling", "CancellingNow"])],
)
def test_name_of_the_cancelling_state_says_whether_grace_periods_are_skipped(
    records: Path, monkeypatch: pytest.MonkeyPatch, is_now: bool, states: list[str]
) -> None:
    sent_states: list[State[Any]] = []

    class Server:
        def set_flow_run_state(
            self, _id: object, state: State[Any], *, force: bool = False
        ) -> SimpleNamespace:
            # Like Prefect's server, accept another state after Cancelling only if `force` is True.
            # Source: prefect/server/orchestration, EnforceCancellingToCancelledTransition.
            if force or not sent_states:
                sent_states.append(state)
            return SimpleNamespace(status=SetStateStatus.ACCEPT, state=state)

        def read_flow_run(self, id: UUID) -> FlowRun:
            return FlowRun(id=id, flow_id=uuid4(), name="a-run", state=sent_states[-1])

    monkeypatch.setattr(run_cancellation, "connect_to_server", lambda _: nullcontext(Server()))
    record = RunJson.read(RunPlace.of(LIVE).record)

    with temporary_settings({PREFECT_API_URL: "http://a/api"}):
        run_cancellation.cancel_run(Run.of_record(record), is_now=is_now)

    assert [state.name for state in sent_states] == states
    assert all(state.is_cancelling() for state in sent_states)


def test_cancelled_state_of_a_waiting_run_names_the_user(
    records: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent_states: list[State[Any]] = []

    class Server:
        def set_flow_run_state(
            self, _id: object, state: State[Any], *, force: bool = False
        ) -> SimpleNamespace:
            sent_states.append(state)
            # A waiting run has no process that a worker must end. So Prefect's server replaces the
            # state Cancelling by Cancelled, unless `force` is True.
            # Source: prefect/server/orchestration, BypassCancellingFlowRunsWithNoInfra.
            status = SetStateStatus.ACCEPT if force else SetStateStatus.REJECT
            return SimpleNamespace(status=status, state=Cancelled())

    monkeypatch.setattr(run_cancellation, "connect_to_server", lambda _: nullcontext(Server()))
    monkeypatch.setattr("tasks.processes.identity.getpass.getuser", lambda: "ada")
    record = RunJson.read(RunPlace.of(LIVE).record)

    with temporary_settings({PREFECT_API_URL: "http://a/api"}):
        run_cancellation.cancel_run(Run.of_record(record))

    assert sent_states[-1].is_cancelled()
    message = sent_states[-1].message or ""
    assert message.startswith("cancelled by ada with `muster cancel` on ")


@pytest.mark.parametrize(
    ("state", "recorded_state", "is_recorded_message"),
    [
        (Cancelled(message="Flow run was cancelled successfully."), "cancelled", True),
        # The worker sets this message before the cleanup of the run.
        (Crashed(message="Within a minute, Muster ends the processes."), "failed", True),
        (Crashed(message="Within a minute, Muster ends the processes."), "running", False),
    ],
)
def test_message_of_an_ended_run_is_the_message_of_its_record(
    muster_home: Path, state: State[Any], recorded_state: str, is_recorded_message: bool
) -> None:
    write_record(FAILED, state=recorded_state, message="the message of the record")
    record = RunJson.read(RunPlace.of(FAILED).record)
    flow_run = FlowRun(flow_id=uuid4(), name=record.run_id, state=state)

    message = make_run(flow_run, record).message

    assert message == ("the message of the record" if is_recorded_message else state.message)


def test_why_says_who_cancelled_a_run(
    muster_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_record(FAILED, state="cancelled", message="cancelled by ada")

    assert run_verbs.why(FAILED) == 0

    output = capsys.readouterr().out
    assert "cancelled by ada" in output
    assert f"`muster retry {FAILED}`" in output


def test_why_advises_about_a_metric_that_is_not_finite(
    muster_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    attempt = {"number": 1, "state": "completed", "not_finite": ["nan"]}
    write_record(FAILED, state="completed", attempts=[attempt])

    assert run_verbs.why(FAILED) == 0

    assert NOT_FINITE_ADVICE in capsys.readouterr().out


def test_invalid_deployment_name_is_reported_as_a_missing_deployment() -> None:
    with (
        temporary_settings({PREFECT_API_URL: "http://127.0.0.1:1/api"}),
        get_client(sync_client=True) as client,
        pytest.raises(CannotBegin, match=r"no deployment nope\. .*muster deploy SPEC"),
    ):
        require_deployment(client, "nope")


@pytest.mark.parametrize(
    ("words", "run_ids"),
    [
        (["--tag", "demo"], [LIVE, FAILED, OLD]),
        (["--tag", "demo", "--tag", "other"], [OLD]),
        (["--name", "trial"], [LIVE, FAILED]),
        (["--name", "tri*", "--state", "failed"], [FAILED]),
        (["--name", "tri"], []),
        (["--since", "1970-01-01T00:16:41"], [LIVE, FAILED]),
        (["--since", "7d"], []),
    ],
)
def test_runs_are_selected_by_tag_name_and_time(
    records: Path, capsys: pytest.CaptureFixture[str], words: list[str], run_ids: list[str]
) -> None:
    shutil.rmtree(RunPlace.of(OLD).directory)
    write_record(OLD, tags=["demo", "other"])

    assert run_verb(LS, [*words, "--json"]) == 0

    assert [run["run_id"] for run in json.loads(capsys.readouterr().out)] == run_ids


def test_time_that_cannot_be_read_is_refused(
    records: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_verb(LS, ["--since", "yesterday"]) == 2

    assert "--since yesterday: write an age such as 30m" in capsys.readouterr().err


@pytest.fixture
def working_run(records: Path) -> Iterator[tuple[Run, subprocess.Popen[bytes]]]:
    """Yield a run on this machine, and a `sleep` program in place of the run's flow process."""
    process = subprocess.Popen(["sleep", "60"])
    directory = records / "live" / LIVE
    directory.mkdir(parents=True)
    owner = Owner(run_id=LIVE, host=host_name(), process=ProcessId.of(process.pid))
    (directory / "owner.json").write_text(owner.model_dump_json())
    (directory / "owner.json").chmod(0o600)
    yield Run.of_record(RunJson.read(RunPlace.of(LIVE).record)), process
    process.kill()
    process.wait()


def test_cancellation_of_a_run_with_a_deleted_flow_run_ends_its_process(
    working_run: tuple[Run, subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Server:
        def read_flow_run(self, *_: object) -> None:
            raise ObjectNotFound(http_exc=Exception("404"))

        def set_flow_run_state(self, *_: object, **_options: object) -> None:
            raise ObjectNotFound(http_exc=Exception("404"))

    run, process = working_run
    monkeypatch.setattr(run_cancellation, "connect_to_server", lambda _: nullcontext(Server()))

    with temporary_settings({PREFECT_API_URL: "http://a/api"}):
        run_cancellation.cancel_run(run)

    assert process.wait(timeout=10) == -signal.SIGTERM
    assert "with `muster cancel` on" in take_note(run.place.directory)


def test_run_that_was_set_to_completed_by_hand_can_be_cancelled(
    working_run: tuple[Run, subprocess.Popen[bytes]], monkeypatch: pytest.MonkeyPatch
) -> None:
    sent_states: list[State[Any]] = []

    class Server:
        def set_flow_run_state(
            self, _id: object, state: State[Any], *, force: bool = False
        ) -> SimpleNamespace:
            # Like Prefect's server, accept another state after Completed only if `force` is True.
            # Source: prefect/server/orchestration, HandleFlowTerminalStateTransitions.
            if force:
                sent_states.append(state)
            return SimpleNamespace(status=SetStateStatus.ACCEPT, state=state)

        def read_flow_run(self, id: UUID) -> FlowRun:
            return FlowRun(id=id, flow_id=uuid4(), name="a-run", state=Completed())

    run, _ = working_run
    monkeypatch.setattr(run_cancellation, "connect_to_server", lambda _: nullcontext(Server()))

    with temporary_settings({PREFECT_API_URL: "http://a/api"}):
        run_cancellation.cancel_run(replace(run, state="completed"))

    assert [state.name for state in sent_states] == ["Cancelling"]


def test_run_that_has_ended_is_not_cancelled_while_its_process_exits(
    working_run: tuple[Run, subprocess.Popen[bytes]],
) -> None:
    run, process = working_run
    record = json.loads(run.place.record.read_text())
    run.place.record.write_text(json.dumps({**record, "state": "completed"}))

    with pytest.raises(BadArgument, match="has ended"):
        run_cancellation.cancel_run(replace(run, state="completed"))

    assert process.poll() is None


def test_run_is_found_by_the_name_that_its_user_gave_it(
    records: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flow_run = FlowRun(
        id=UUID(FLOW_RUNS[FAILED]),
        flow_id=uuid4(),
        name=FAILED,
        labels={TYPED_NAME_LABEL: "my first try"},
    )
    monkeypatch.setattr(server_runs, "_read_flow_runs", lambda at_most: iter([flow_run]))

    assert find_run("my first try").run_id == FAILED
    assert find_run("first").run_id == FAILED
    with pytest.raises(BadArgument, match="there is no run my second try"):
        find_run("my second try")


@pytest.mark.parametrize("verb", [show, why])
def test_killed_flow_process_is_reported_from_the_files_of_this_machine(
    working_run: tuple[Run, subprocess.Popen[bytes]],
    verb: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    _, process = working_run
    app = App(name="verb", default_command=verb)
    run_verb(app, [LIVE])
    text_before = capsys.readouterr().out

    process.kill()
    process.wait()
    run_verb(app, [LIVE])

    text = capsys.readouterr().out
    sentence = f"The flow process of this run (pid {process.pid}) was killed. Within a minute"
    assert "was killed" not in text_before
    assert text.count(sentence) == 1
    assert f"muster retry {LIVE}" in text


def test_killed_flow_process_is_not_reported_twice(
    working_run: tuple[Run, subprocess.Popen[bytes]],
) -> None:
    run, process = working_run
    process.kill()
    process.wait()
    text = describe_lost_process(run)

    crashed_run = replace(run, state="crashed", message=f"killed by SIGKILL. {text}")

    assert describe_lost_process(crashed_run) == ""
    assert describe_lost_process(replace(run, state="queued")) == ""


@pytest.fixture
def killed_run(working_run: tuple[Run, subprocess.Popen[bytes]], tmp_path: Path) -> Run:
    """A run with a killed flow process, and with a checkpoint of step 10."""
    run, process = working_run
    checkpoint = tmp_path / "out" / "checkpoint-10"
    checkpoint.mkdir(parents=True)
    (checkpoint / "trainer_state.json").write_text(json.dumps({"global_step": 10}))
    # Write a file in the safetensors format without tensors: the length of the header, then the
    # header.
    (checkpoint / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    trainer = {
        "command": ["python", "train.py"],
        "env": {"RESUME_FROM": "${attempt.resume_from}"},
        "checkpoints": str(tmp_path / "out"),
    }
    spec = {"name": "demo", "workload": "grpo", "components": {"trainer": trainer}}
    run.place.spec.write_text(json.dumps(spec))
    record = json.loads(run.place.record.read_text())
    attempt_place = run.place.attempt(record["attempts"][-1]["number"])
    attempt_place.directory.mkdir(exist_ok=True)
    attempt_place.spec.write_text(json.dumps(spec))
    process.kill()
    process.wait()
    return run


@pytest.mark.parametrize("verb", [show, why])
def test_report_of_a_killed_flow_process_names_the_step_of_the_next_attempt(
    killed_run: Run, verb: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    run_verb(App(name="verb", default_command=verb), [LIVE])

    text = " ".join(capsys.readouterr().out.split())
    assert (
        "The next attempt continues from step 10 (checkpoint-10). To continue the run after this "
        f"cleanup: muster retry {LIVE}" in text
    )


def test_step_of_the_next_attempt_is_added_if_the_message_does_not_name_it(killed_run: Run) -> None:
    message = f"killed by SIGKILL. {describe_cleanup_after_loss(killed_run.run_id)}"

    sentence = describe_lost_process(replace(killed_run, state="crashed", message=message))

    assert sentence == "The next attempt continues from step 10 (checkpoint-10)."


def test_why_prints_the_artifact_of_another_host_as_plain_text(
    records: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    artifact = (
        "A training step takes 2.0 s in my\\_loop\n\n"
        "|  | recent |\n| --- | --- |\n| one step | 2.0 s |"
    )
    monkeypatch.setattr(run_verbs, "read_artifacts", lambda run, *keys: [artifact])

    run_verb(App(name="why", default_command=why), [OLD])

    text = capsys.readouterr().out
    assert "A training step takes 2.0 s in my_loop" in text
    assert "one step  2.0 s" in text
    assert not {"|", "\\"} & {*text}
