"""Tests of the requests and the output of `muster submit` and `muster deploy`."""

from __future__ import annotations

import re
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import yaml
from cyclopts import App
from prefect.client.schemas.objects import ConcurrencyOptions, DeploymentSchedule, State
from prefect.client.schemas.responses import DeploymentResponse
from prefect.client.schemas.schedules import CronSchedule, IntervalSchedule, RRuleSchedule
from prefect.settings import PREFECT_API_URL, temporary_settings
from prefect.states import Cancelled, Completed, Failed, Running, Scheduled

from tasks.processes.identity import host_name
from tasks.record.code_store import read_code, store_project
from tasks.server.deployments import find_next_start
from tasks.server.server import read_configured_secrets
from tasks.show.arguments import run
from tasks.spec.errors import InvalidSpec
from tasks.spec.loading import load_spec, parse_spec
from tasks.train import deploying, submit_matrix
from tests.support.submitting import SubmitServer
from tests.support.web import serving

pytestmark = pytest.mark.usefixtures("muster_home")

MUSTER = App(name="muster")
for verb in (deploying.submit, deploying.deploy):
    MUSTER.command(verb)

SPEC = {
    "name": "trial",
    "workload": "sft",
    "tags": ["demo"],
    "components": {"trainer": {"command": ["python", "none.py"]}},
}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> SubmitServer:
    server = SubmitServer()
    monkeypatch.setattr(deploying, "connect_to_configured_server", lambda: nullcontext(server))
    monkeypatch.setattr(deploying, "_POLL_EVERY_S", 0)
    return server


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    """Return the path of a spec file in a folder of a project."""
    (tmp_path / ".git").mkdir()
    (tmp_path / "runs").mkdir()
    path = tmp_path / "runs" / "spec.yaml"
    path.write_text(yaml.safe_dump(SPEC))
    return path


def test_missing_secret_block_is_rejected_before_submit_and_deploy(
    server: SubmitServer, spec: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.blocks["here"] = "hf-value"
    there, gone = (f'env.HF_TOKEN={{"secret": "{name}"}}' for name in ("here", "gone"))

    codes = [run(MUSTER, ["submit", str(spec), "--set", one]) for one in (there, gone)]
    codes.append(run(MUSTER, ["deploy", str(spec), "--set", gone]))

    [created] = server.created
    assert codes == [0, 2, 2] and not server.deployed
    assert created["parameters"]["spec"]["env"] == {"HF_TOKEN": {"secret": "here"}}
    _, err = capsys.readouterr()
    assert err.count("env.HF_TOKEN: there is no Prefect Secret block 'gone' on http://a") == 2


def test_each_variable_of_a_secret_block_is_a_fault_without_a_server() -> None:
    parts = {"trainer": {"command": ["true"], "env": {"B": {"secret": "b"}}}}
    data = {**SPEC, "env": {"A": {"secret": "a"}}, "components": parts}

    with pytest.raises(InvalidSpec) as refused:
        read_configured_secrets(parse_spec(data))

    assert [fault.path for fault in refused.value.faults] == ["env.A", "components.trainer.env.B"]
    assert "can't read the Prefect Secret block 'a': no Prefect server is set" in str(refused.value)


def test_live_code_is_not_stored_and_starts_in_the_project_folder(
    server: SubmitServer, spec: Path
) -> None:
    codes = [run(MUSTER, [verb, str(spec), "--set", "code=live"]) for verb in ("submit", "deploy")]

    for asked in (server.created[0], server.deployed[0]):
        assert asked["job_variables"] == {"working_dir": str(spec.parents[1])}
        assert asked["parameters"] == {"spec": load_spec(spec, ["code=live"]).to_server_data()}
    assert (codes, server.artifacts, server.labels) == ([0, 0], [], {})


def test_unknown_code_is_rejected(
    server: SubmitServer, spec: Path, muster_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    known, unknown = store_project(spec.parents[1]), "a" * 64
    spec.with_name("later.py").touch()

    codes = [run(MUSTER, ["submit", str(spec), "--set", f"code={x}"]) for x in (known, unknown)]

    assert codes == [0, 1]
    assert [one["parameters"]["spec"]["code"] for one in server.created] == [known]
    assert "Submit or deploy the run again" in capsys.readouterr().err


def test_submitted_run_has_the_complete_spec_and_a_snapshot_of_the_project(
    server: SubmitServer, spec: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exit_code = run(MUSTER, ["submit", str(spec), "--set", "tags=[other]", "--queue", "urgent"])

    [created] = server.created
    state, kept = created.pop("state"), created["parameters"]["spec"]["code"]
    out, err = capsys.readouterr()
    assert exit_code == 0
    assert state.is_scheduled()
    assert created == {
        "parameters": {"spec": load_spec(spec, ["tags=[other]", f"code={kept}"]).to_server_data()},
        "tags": ("other",),
        "work_queue_name": "urgent",
        "job_variables": {},
    }
    code = read_code(kept)
    assert (code.project, server.labels) == (str(spec.parents[1]), {"muster.code": code.tree})
    assert "is queued" in out and "muster logs trial-sft-" in out and "muster cancel trial" in out
    assert f"project {spec.parents[1]}, files copied as {kept[:12]}, python " in err
    # A file is missing on this machine. The run is still accepted, because the worker's host may
    # have the file.
    assert "has the file: components.trainer.command.1: there is no such" in err


@pytest.mark.parametrize("options", [[], ["--matrix", "env.SEED=1..3"]])
@pytest.mark.parametrize(
    ("workers", "expected_code"),
    [(["HERE", "b@HERE"], 2), (["HERE", "elsewhere"], 0), ([], 0)],
)
def test_missing_file_is_refused_if_all_workers_are_on_this_machine(
    server: SubmitServer,
    spec: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    workers: list[str],
    expected_code: int,
) -> None:
    monkeypatch.setattr(submit_matrix, "require_deployment", lambda client, name: server.any)
    server.workers = [name.replace("HERE", host_name()) for name in workers]

    exit_code = run(MUSTER, ["submit", str(spec), *options])

    err = capsys.readouterr().err
    assert exit_code == expected_code
    assert bool(server.created) is (expected_code == 0)
    assert "components.trainer.command.1: there is no such" in err
    assert err.endswith("Nothing was started.\n") is (expected_code == 2)


def test_missing_file_is_no_fault_if_the_deployment_starts_runs_in_another_pool(
    server: SubmitServer, spec: Path
) -> None:
    # The workers of this pool are not Muster's own, so their hosts are unknown.
    server.workers = [host_name()]
    server.deployments["remote"] = server.any.model_copy(update={"work_pool_name": "remote"})

    deploying.queue_run(server, load_spec(spec), spec.parents[1], deployment="train/remote")  # type: ignore[arg-type]

    assert len(server.created) == 1
    with pytest.raises(InvalidSpec):
        deploying.queue_run(server, load_spec(spec), spec.parents[1])  # type: ignore[arg-type]


def test_program_without_a_folder_is_no_fault_because_the_worker_may_have_another_path(
    server: SubmitServer, spec: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.workers = [host_name()]

    assert run(MUSTER, ["submit", str(spec), "--set", "components.trainer.command=[no-such]"]) == 0

    assert len(server.created) == 1
    assert "has the file: components.trainer.command.0" in capsys.readouterr().err


def test_run_that_fits_on_no_cluster_is_queued_with_a_warning(
    server: SubmitServer,
    spec: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    reason = "the run needs 1 node with 4 GPUs, but the cluster's only node is too small"
    monkeypatch.setattr(deploying, "explain_misfit", lambda spec: reason)

    exit_code = run(MUSTER, ["submit", str(spec)])

    assert exit_code == 0 and len(server.created) == 1
    assert f"warning: the run cannot start: {reason}" in capsys.readouterr().err


def test_wait_for_a_run_without_a_message_ends_with_a_clear_error(
    server: SubmitServer, spec: Path
) -> None:
    run(MUSTER, ["submit", str(spec)])
    server.states = [Running()]

    with pytest.raises(TimeoutError, match=r"the run is still Running after 0 s$"):
        deploying.wait_until_ended(server, uuid4(), within_s=0)  # type: ignore[arg-type]


def test_submitted_matrix_names_the_project_code_and_python_of_its_points(
    server: SubmitServer,
    spec: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(submit_matrix, "require_deployment", lambda client, name: server.any)

    exit_code = run(MUSTER, ["submit", str(spec), "--matrix", "env.SEED=1..3"])

    [created] = server.created
    kept = created["parameters"]["spec"]["stages"][0]["spec"]["code"]
    out, err = capsys.readouterr()
    assert exit_code == 0
    assert "is queued: 3 runs of the matrix" in out
    assert f"project {spec.parents[1]}, files copied as {kept[:12]}, python " in err
    assert "has the file: components.trainer.command.1: there is no such" in err


@pytest.mark.parametrize(
    ("end", "code"), [(Completed(), 0), (Failed(message="CUDA_OOM: x"), 1), (Cancelled(), 130)]
)
def test_watched_run_determines_the_exit_code(
    server: SubmitServer,
    spec: Path,
    capsys: pytest.CaptureFixture[str],
    end: State[Any],
    code: int,
) -> None:
    server.states = [Scheduled(), Running(), Running(), Running(message="trainer"), end]

    found = run(MUSTER, ["submit", str(spec), "--watch"])

    out = capsys.readouterr().out
    shown = re.findall(r"^ *[0-9.]+s (.*)$", out, re.MULTILINE)
    assert found == code
    # A state is printed only when the state has changed.
    assert shown == ["Scheduled", "Running", "Running: trainer"]
    assert any(line.startswith(end.type.value.lower()) for line in out.splitlines())


@pytest.mark.parametrize("verb", ["submit", "deploy"])
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (
            ["--set", "workload=dance"],
            "workload: must be ppo, grpo, sft, dpo, rm, pretrain, other or step",
        ),
        (["--set", "nonsense"], "nonsense"),
    ],
)
def test_invalid_spec_causes_no_request(
    server: SubmitServer,
    spec: Path,
    verb: str,
    arguments: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = run(MUSTER, [verb, str(spec), *arguments])

    out, err = capsys.readouterr()
    assert (code, out) == (2, "")
    assert said in err
    assert err.endswith("Nothing was started.\n")
    assert (server.created, server.deployed) == ([], [])


@pytest.mark.parametrize("verb", ["submit", "deploy"])
def test_missing_deployment_is_rejected_with_the_command_that_creates_it(
    spec: Path, verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server = SubmitServer(has_any=False)
    monkeypatch.setattr(deploying, "connect_to_configured_server", lambda: nullcontext(server))

    code = run(MUSTER, [verb, str(spec)])

    err = capsys.readouterr().err
    assert code == 1
    assert "no deployment train/any" in err and "`muster up`" in err


def test_deployment_has_the_spec_and_requires_no_parameter(
    server: SubmitServer, spec: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["--cron", "0 3 * * *", "--timezone", "Europe/Berlin"]

    code = run(MUSTER, ["deploy", str(spec), "--name", "nightly", *line])

    [deployed] = server.deployed
    [schedule] = deployed["schedules"]
    assert code == 0
    assert deployed["name"] == "nightly"
    kept = deployed["parameters"]["spec"]["code"]
    assert deployed["parameters"] == {"spec": load_spec(spec, [f"code={kept}"]).to_server_data()}
    assert read_code(kept).project == str(spec.parents[1])
    assert deployed["parameter_openapi_schema"]["required"] == []
    assert deployed["job_variables"] == {}
    assert (schedule.schedule.cron, schedule.schedule.timezone) == ("0 3 * * *", "Europe/Berlin")
    command = capsys.readouterr().out.partition("  run       ")[2].strip()
    assert command.endswith("/bin/prefect deployment run train/nightly")


def deploy(spec: Path, *words: str) -> int:
    return run(MUSTER, ["deploy", str(spec), *words])


BERLIN = CronSchedule(cron="0 3 * * *", timezone="Europe/Berlin")


def change_in_the_ui(server: SubmitServer) -> DeploymentResponse:
    """Change all editable settings of the deployment `trial`, and return the deployment."""
    changed = server.deployments["trial"]
    changed.paused = True
    changed.tags = [*changed.tags, "of-the-team"]
    changed.description = "Ask Ada before you touch it."
    changed.concurrency_limit = 1
    changed.work_pool_name = "other-pool"
    changed.work_queue_name = "urgent"
    changed.job_variables = {"env": {"HF_HOME": "/scratch"}}
    changed.enforce_parameter_schema = False
    rules = [
        IntervalSchedule(interval=timedelta(hours=5)),
        RRuleSchedule(rrule="FREQ=WEEKLY;BYDAY=SA", timezone="Asia/Tokyo"),
        CronSchedule(cron="0 12 * * 1", timezone="America/New_York"),
    ]
    changed.schedules += [
        DeploymentSchedule(id=uuid4(), schedule=rule, active=number > 0, parameters={"spec": {}})
        for number, rule in enumerate(rules)
    ]
    changed.schedules[0].active = False
    return changed.model_copy(deep=True)


def test_renewed_deployment_keeps_what_a_person_changed(server: SubmitServer, spec: Path) -> None:
    assert deploy(spec, "--cron", "0 3 * * *", "--timezone", "Europe/Berlin") == 0
    before = change_in_the_ui(server)

    assert deploy(spec, "--set", "tags=[nightly]") == 0

    after = server.deployments["trial"]
    new_spec = after.parameters["spec"]
    assert new_spec["tags"] == ["nightly"]
    assert after.tags == ["nightly", "of-the-team"]
    unchanged = set(DeploymentResponse.model_fields) - {"parameters", "tags"}
    assert after.model_dump(include=unchanged) == before.model_dump(include=unchanged)


def test_new_cron_line_changes_only_the_schedule_from_the_command_line(
    server: SubmitServer, spec: Path
) -> None:
    assert deploy(spec, "--cron", "0 3 * * *", "--timezone", "Europe/Berlin") == 0
    before = change_in_the_ui(server)

    assert deploy(spec, "--cron", "0 4 * * *") == 0

    own, *others = server.deployments["trial"].schedules
    # The command has named no time zone and has not resumed the paused schedule, so both settings
    # are unchanged.
    assert own.schedule == CronSchedule(cron="0 4 * * *", timezone="Europe/Berlin")
    assert not own.active
    assert others == before.schedules[1:]


def test_cron_line_is_added_to_a_deployment_without_a_schedule(
    server: SubmitServer, spec: Path
) -> None:
    assert deploy(spec) == 0
    assert server.deployments["trial"].schedules == []

    assert deploy(spec, "--cron", "0 3 * * *") == 0

    [own] = server.deployments["trial"].schedules
    assert own.schedule == CronSchedule(cron="0 3 * * *", timezone="UTC")


@pytest.mark.parametrize(
    ("overlap", "limit", "strategy"),
    [("skip", 1, "CANCEL_NEW"), ("queue", 1, "ENQUEUE"), ("allow", None, None)],
)
@pytest.mark.parametrize("is_new", [True, False])
def test_overlap_sets_the_concurrency_limit_of_the_deployment(
    server: SubmitServer,
    spec: Path,
    overlap: str,
    limit: int | None,
    strategy: str | None,
    is_new: bool,
) -> None:
    if not is_new:
        assert deploy(spec) == 0
        change_in_the_ui(server)

    assert deploy(spec, "--cron", "0 3 * * *", "--overlap", overlap) == 0

    deployment = server.deployments["trial"]
    assert vars(deployment)["concurrency_limit"] == limit
    if strategy is None:
        assert deployment.concurrency_options is None
    else:
        options = ConcurrencyOptions.model_validate(deployment.concurrency_options)
        assert options.collision_strategy.value == strategy


def test_unknown_overlap_is_refused(server: SubmitServer, spec: Path) -> None:
    assert deploy(spec, "--overlap", "maybe") != 0
    assert server.deployed == []


def test_no_cron_removes_cron_lines_and_nothing_else(server: SubmitServer, spec: Path) -> None:
    assert deploy(spec, "--cron", "0 3 * * *") == 0
    change_in_the_ui(server)

    assert deploy(spec, "--no-cron") == 0

    kinds = [type(one.schedule) for one in server.deployments["trial"].schedules]
    assert kinds == [IntervalSchedule, RRuleSchedule]


def test_deploy_prints_each_schedule_with_its_next_start(
    server: SubmitServer, spec: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    deploy(spec)
    first = capsys.readouterr().out
    deploy(spec, "--cron", "0 3 * * *", "--timezone", "Asia/Tokyo")
    with_cron = capsys.readouterr().out
    server.deployments["trial"].schedules[0].active = False
    deploy(spec)
    with_paused_cron = capsys.readouterr().out

    assert "  schedule  none: runs start only by hand\n" in first
    # Tokyo has no daylight saving time, so the abbreviation of its time zone is always JST.
    told = r'  schedule  cron "0 3 \* \* \*" in Asia/Tokyo; next start \d{4}-\d\d-\d\d 03:00 JST, '
    assert re.search(told + r"which is \d{4}-\d\d-\d\d 18:00 UTC\n", with_cron)
    assert "in Asia/Tokyo; the schedule is paused, so it starts no run" in with_paused_cron


@pytest.mark.parametrize(
    ("rule", "now", "start"),
    [
        (BERLIN, "2026-07-01T00:30+00:00", "2026-07-01T01:00+00:00"),
        (BERLIN, "2026-12-01T02:30+00:00", "2026-12-02T02:00+00:00"),
        (
            RRuleSchedule(rrule="DTSTART:20260101T050000\nRRULE:FREQ=DAILY", timezone="UTC"),
            "2026-07-01T06:00+00:00",
            "2026-07-02T05:00+00:00",
        ),
        (
            IntervalSchedule(
                interval=timedelta(hours=5), anchor_date=datetime(2026, 7, 1, 1, tzinfo=UTC)
            ),
            "2026-07-01T02:00+00:00",
            "2026-07-01T06:00+00:00",
        ),
    ],
)
def test_next_start_is_computed_for_each_kind_of_schedule(rule: Any, now: str, start: str) -> None:
    found = find_next_start(rule, datetime.fromisoformat(now))

    assert found == datetime.fromisoformat(start)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["--cron", "at night"], 'Invalid cron string: "at night"'),
        (
            ["--cron", "0 3 * * *", "--timezone", "Mars/Olympus"],
            'Invalid timezone: "Mars/Olympus"',
        ),
        (["--cron", ""], 'Invalid cron string: ""'),
        (["--cron", "0 3 * * *", "--no-cron"], "use only one of the two"),
        (["--timezone", "Europe/Berlin"], "add --cron LINE"),
    ],
)
def test_invalid_schedule_options_create_no_deployment(
    server: SubmitServer,
    spec: Path,
    line: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    code = run(MUSTER, ["deploy", str(spec), *line])

    err = capsys.readouterr().err
    assert code == 2
    assert err.startswith("--") and said in err
    # The message may quote only options that the user has written.
    assert ("--timezone" in err.replace("add --timezone", "")) is ("--timezone" in line)
    assert len(err.splitlines()) == 2 and err.endswith("Nothing was done.\n")
    assert server.deployed == []


@pytest.mark.parametrize("verb", ["submit", "deploy"])
def test_error_without_a_server_says_how_to_start_a_server(
    spec: Path, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with temporary_settings(restore_defaults={PREFECT_API_URL}):
        code = run(MUSTER, [verb, str(spec)])

    assert code == 1
    assert "muster up" in capsys.readouterr().err


def test_rejection_by_the_server_is_printed_with_its_reason(
    spec: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with (
        serving(lambda *_: (422, {"detail": "no such queue: urgentt"})) as url,
        temporary_settings({PREFECT_API_URL: f"{url}/api"}),
    ):
        code = run(MUSTER, ["submit", str(spec), "--queue", "urgentt"])

    assert code == 1
    assert "rejected the request: no such queue: urgentt" in capsys.readouterr().err


def test_submitted_run_uses_the_environment_that_is_activated_in_the_shell(
    server: SubmitServer, spec: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = tmp_path / "environment" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to("/bin/true")
    monkeypatch.setenv("VIRTUAL_ENV", str(tmp_path / "environment"))

    exit_code = run(MUSTER, ["submit", str(spec)])

    assert exit_code == 0
    environment = {"VIRTUAL_ENV": str(tmp_path / "environment")}
    assert server.created[0]["parameters"]["spec"]["env"] == environment
