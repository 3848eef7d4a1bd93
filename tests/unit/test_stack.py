"""The commands of the stack, its files and its environment, without starting a stack."""

from __future__ import annotations

import asyncio
import errno
import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from zoneinfo import ZoneInfo

import pytest
import yaml
from cyclopts import App
from prefect.server.schemas.schedules import CronSchedule

from deployments import worker
from deployments.stack import command as stack
from deployments.stack.env import ROOT, STACK_VARIABLE, client_env
from deployments.stack.nodes import Fleet
from deployments.stack.plan import build_blueprint
from deployments.stack.state import Stack, StackError, StackPart, StackPlace, processes_of
from tasks.processes.identity import ProcessId
from tasks.record.code_store import read_code
from tasks.show.arguments import run
from tasks.spec.errors import InvalidSpec
from tasks.spec.loading import load_spec
from tasks.train import deploying

STACK = App(name="muster")
for verb in (stack.up, stack.down, stack.status):
    STACK.command(verb)

RUNS = sorted((ROOT / "deployments" / "runs").glob("*.yaml"))


def read_deployments() -> list[dict[str, Any]]:
    """Return the deployments of prefect.yaml."""
    project = yaml.safe_load((ROOT / "prefect.yaml").read_text())
    entries: list[dict[str, Any]] = project["deployments"]
    return entries


def make_stack(**changes: Any) -> Stack:
    """Return a running stack whose supervisor is this process.

    Args:
        changes: Values of fields that differ from the default.
    """
    fields: dict[str, Any] = {
        "stack_id": "0" * 32,
        "state": "up",
        "started_at": 0.0,
        "supervisor": ProcessId.of(os.getpid()),
        "port": 4200,
        "api_url": "http://127.0.0.1:4200/api",
        "ui_url": "http://127.0.0.1:4200",
        "ray_dashboard": "http://127.0.0.1:8265",
        "ray_address": "127.0.0.1:6379",
        "ray_temp": Path("/nowhere"),
        "worker": "here",
        "worker_health": "http://127.0.0.1:8080/health",
    }
    return Stack.model_validate({**fields, **changes})


def make_ended_process() -> ProcessId:
    """Return the identity of a process that has ended and whose pid is reused."""
    return ProcessId.of(os.getpid()).model_copy(update={"start_ticks": 1})


@pytest.fixture
def place(muster_home: Path) -> StackPlace:
    """Return the directory of the stack, in an empty MUSTER_HOME."""
    place = StackPlace.of_home()
    place.directory.mkdir()
    return place


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """Start a process with the stack id `fff...` in its environment."""
    process = subprocess.Popen(("sleep", "300"), env=os.environ | {STACK_VARIABLE: "f" * 32})
    yield process
    process.kill()
    process.wait()


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.stem)
def test_every_run_spec_has_its_deployment(run: Path) -> None:
    (entry,) = [entry for entry in read_deployments() if entry["name"] == run.stem]

    (step,) = entry["build"]
    assert step == {
        "tasks.train.deploying.load_run_spec": {"id": run.stem, "path": str(run.relative_to(ROOT))}
    }
    assert entry["parameters"] == {"spec": f"{{{{ {run.stem}.spec }}}}"}


def read_schedules() -> list[tuple[str, dict[str, Any]]]:
    """Return the schedules of prefect.yaml, each with the name of its deployment."""
    return [
        (entry["name"], schedule)
        for entry in read_deployments()
        for schedule in entry.get("schedules", [])
    ]


def test_no_training_has_an_active_schedule() -> None:
    active = {name for name, schedule in read_schedules() if schedule["active"]}

    assert active == {"by-worker"}


@pytest.mark.parametrize(("name", "schedule"), read_schedules(), ids=lambda value: str(value)[:20])
def test_schedule_has_a_slug_and_uses_utc(name: str, schedule: dict[str, Any]) -> None:
    zone = ZoneInfo(schedule["timezone"])
    times = CronSchedule(cron=schedule["cron"], timezone=schedule["timezone"])

    # Prefect identifies a schedule by its slug. Without a slug, a second `prefect deploy` would add
    # the same schedule again.
    assert schedule["slug"]
    # UTC has no daylight saving time. In a time zone with daylight saving time, a nightly run could
    # be skipped or repeated.
    assert {zone.utcoffset(datetime(2026, month, 1)) for month in range(1, 13)} == {timedelta(0)}
    dates = asyncio.run(times.get_dates(n=2, start=datetime(2026, 3, 29, tzinfo=UTC)))
    interval = {"nightly": timedelta(days=1), "each-15-minutes": timedelta(minutes=15)}
    assert dates[1] - dates[0] == interval[schedule["slug"]]


def test_reconcile_of_a_worker_runs_in_the_idle_queue() -> None:
    (entry,) = [entry for entry in read_deployments() if entry["name"] == "by-worker"]

    assert entry["entrypoint"] == "flows/reconcile.py:reconcile"
    assert "parameters" not in entry
    assert entry["work_pool"] == {"name": "gang", "work_queue_name": "idle"}
    assert "reconcile/<host>" in entry["description"]


@pytest.mark.usefixtures("muster_home")
def test_deployment_contains_its_run_spec_and_the_code_of_its_project() -> None:
    output = deploying.load_run_spec("deployments/runs/quickstart.yaml")

    order = ["api", "trainer", "environment"]
    written = load_spec(ROOT / "deployments/runs/quickstart.yaml").written()
    code = output["spec"].pop("code")
    assert output["spec"] == {**written, "start_order": order}
    assert read_code(code).project == str(ROOT)
    assert list(output["spec"]["components"]) == order


def test_deploy_of_an_invalid_run_spec_fails(tmp_path: Path) -> None:
    (tmp_path / "bad.yaml").write_text("name: x\n")

    with pytest.raises(InvalidSpec, match="components: missing"):
        deploying.load_run_spec(str(tmp_path / "bad.yaml"))


@pytest.mark.parametrize(
    ("url", "port"),
    [
        (None, 4200),
        ("", 4200),
        ("http://127.0.0.1:4300/api", 4300),
        ("http://localhost:4300/api", 4300),
        # the URL has no port, so the default port 4200 of `muster up` is used
        ("http://127.0.0.1/api", 4200),
        # the URL names a server on another machine, so the port in the URL is not used
        ("http://prefect.example:4300/api", 4200),
        # the URL is invalid, so it is ignored
        ("http://127.0.0.1:many/api", 4200),
    ],
)
def test_default_port_is_the_port_of_a_local_server_or_4200(
    url: str | None, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    if url is not None:
        monkeypatch.setenv("PREFECT_API_URL", url)

    assert stack._default_port() == port


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["up", "--gpus", "0x8"], "1 to 16 nodes"),
        (["up", "--gpus", "2x0"], "1 to 16 GPUs each"),
        (["up", "--gpus", "99x99"], "1 to 16 nodes"),
        (["up", "--gpus", "17"], "1 to 16 GPUs each"),
        (["up", "--gpus", "ax8"], "is not a number of nodes and GPUs"),
        (["up", "--gpus", "2x"], "write 2x8"),
        (["up", "--gpus=-1x8"], "is not a number of nodes and GPUs"),
        (["up", "--gpus", "²x8"], "is not a number of nodes and GPUs"),
        (["up", "--port", "0"], "--port. Must be >= 1"),
        (["up", "--port", "65536"], "--port. Must be <= 65535"),
        (["down", "--port", "x"], "--port"),
        (["status", "--port", "-1"], "--port"),
        (["up", "--ray-dashboard", "65536"], "--ray-dashboard. Must be <= 65535"),
        (["down", "--gpus", "2x8"], "--gpus"),
    ],
)
def test_wrong_options_are_rejected(
    arguments: list[str],
    complaint: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # Simulate a wide terminal, so that error messages are not split into several lines.
    monkeypatch.setenv("COLUMNS", "200")

    code = run(STACK, arguments)

    assert code == 2
    assert complaint in capsys.readouterr().err


@pytest.mark.parametrize(("command", "code"), [("down", 0), ("status", 1)])
def test_commands_report_that_no_stack_is_running(
    command: str, code: int, muster_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exit_code = run(STACK, [command])

    assert exit_code == code
    assert (
        f"No Muster stack with the home directory {muster_home} is running"
        in capsys.readouterr().out
    )


def test_error_about_a_taken_port_names_the_process(
    muster_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        code = run(STACK, ["up", "--port", str(port)])

    assert code == 1
    assert f"port {port} is already used by pid {os.getpid()} (" in capsys.readouterr().err
    assert not (muster_home / "stack" / "stack.json").exists()


def test_port_that_differs_from_the_running_stack_is_rejected(
    place: StackPlace, capsys: pytest.CaptureFixture[str]
) -> None:
    place.save(make_stack(port=4200))

    codes = [run(STACK, [command, "--port", "4300"]) for command in ("up", "down", "status")]

    assert codes == [1, 1, 1]
    assert capsys.readouterr().err.count("uses port 4200, not 4300") == 3


def test_down_does_not_signal_a_process_that_reuses_the_supervisors_pid(
    place: StackPlace, sleeper: subprocess.Popen[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    sleeper_id = ProcessId.of(sleeper.pid)
    earlier_process = sleeper_id.model_copy(update={"start_ticks": sleeper_id.start_ticks - 1})
    part = StackPart(name="worker", state="ready", guardians=(earlier_process,))
    place.save(make_stack(supervisor=earlier_process, parts=(part,)))

    code = run(STACK, ["down"])

    assert code == 0
    assert sleeper.poll() is None
    assert place.load() is None


SERVER_DIED = StackPart(
    name="prefect-server",
    state="ready",
    deaths=3,
    died_at=1_700_000_000.0,
    reason="prefect-server (pid 812) was killed by SIGKILL, 50 s after its start",
)


def test_status_shows_deaths_of_a_process_with_number_time_and_reason(
    place: StackPlace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stack, "check_parts", lambda stack: [])
    place.save(make_stack(parts=(SERVER_DIED, StackPart(name="worker", state="ready"))))

    run(STACK, ["status"])

    output = capsys.readouterr().out
    assert (
        "prefect-server  died 3 times, last at 2023-11-14 22:13:20 UTC, now ready: prefect-server "
        "(pid 812) was killed by SIGKILL, 50 s after its start" in output
    )
    assert "worker" not in output


@pytest.mark.parametrize(
    ("state", "message", "reason"),
    [
        ("up", "", "the supervisor of the stack was killed"),
        ("stopping", "stopped by SIGTERM", "the supervisor of the stack was killed"),
        ("failed", "worker could not be started again", "worker could not be started again"),
    ],
)
def test_status_shows_the_reason_for_the_end_of_a_stack(
    place: StackPlace, capsys: pytest.CaptureFixture[str], state: str, message: str, reason: str
) -> None:
    place.save(
        make_stack(
            supervisor=make_ended_process(), state=state, message=message, parts=(SERVER_DIED,)
        )
    )

    code = run(STACK, ["status"])

    output = capsys.readouterr().out
    assert code == 1
    assert f"The stack has ended: {reason}." in output
    assert "prefect-server  died 3 times" in output


@pytest.mark.parametrize(
    ("change", "is_alive"),
    [
        ({}, True),
        # an earlier process with the same pid was recorded, and has ended
        ({"start_ticks": 1}, False),
        # a process with the same pid and start time was recorded before a restart of the machine
        ({"boot_id": "another"}, False),
        # the start time 0 was recorded, because the process had already ended
        ({"start_ticks": 0}, False),
    ],
)
def test_reused_pid_is_not_mistaken_for_the_old_process(
    change: dict[str, Any], is_alive: bool, sleeper: subprocess.Popen[bytes]
) -> None:
    process = ProcessId.of(sleeper.pid).model_copy(update=change)

    assert process.is_alive() is is_alive
    assert process.send(0) is is_alive
    assert process.is_gone_within(0.0) is not is_alive


def test_killed_process_is_gone(sleeper: subprocess.Popen[bytes]) -> None:
    process = ProcessId.of(sleeper.pid)

    process.send(signal.SIGKILL)

    assert process.is_gone_within(10.0)
    assert not process.is_alive()


def test_clear_kills_a_process_that_outlived_its_guardian(
    place: StackPlace, sleeper: subprocess.Popen[bytes]
) -> None:
    place.save(make_stack(stack_id="f" * 32, supervisor=make_ended_process()))
    assert processes_of("f" * 32) == [sleeper.pid]

    place.clear()

    assert sleeper.wait(10) == -signal.SIGKILL
    assert place.load() is None


def test_clear_deletes_only_directories_with_the_name_of_rays_directory(
    place: StackPlace, tmp_path: Path
) -> None:
    ray_directory = tmp_path / "muster-ray-x"
    other_directory = tmp_path / "precious"
    for directory in (ray_directory, other_directory):
        directory.mkdir()
        stack_record = make_stack(
            stack_id="e" * 32, supervisor=make_ended_process(), ray_temp=directory
        )
        place.save(stack_record)
        place.clear()

    assert not ray_directory.exists()
    assert other_directory.exists()


def test_error_about_an_unreadable_state_file_names_the_file(
    place: StackPlace, capsys: pytest.CaptureFixture[str]
) -> None:
    (place.directory / "stack.json").write_text("{")

    code = run(STACK, ["down"])

    assert code == 1
    assert str(place.directory / "stack.json") in capsys.readouterr().err


def test_second_command_waits_for_the_first_command(place: StackPlace) -> None:
    waiting = threading.Event()
    order: list[str] = []

    def run_second_command() -> None:
        with place.locked(waiting.set, 60):
            order.append("second")

    with place.locked(lambda: None, 1):
        thread = threading.Thread(target=run_second_command)
        thread.start()
        assert waiting.wait(60)
        order.append("first")
    thread.join(60)

    assert order == ["first", "second"]


def test_file_system_without_locks_is_named(
    place: StackPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)

    with (
        pytest.raises(StackError, match=r"No locks available.*file system /.*has no locks"),
        place.locked(lambda: None, 0.1),
    ):
        pass


def test_wait_for_another_command_is_limited(place: StackPlace) -> None:
    with (
        place.locked(lambda: None, 1),
        pytest.raises(StackError, match=r"has locked .*lock, and"),
        place.locked(lambda: None, 0.1),
    ):
        pass


def test_logs_of_the_previous_stack_are_kept(place: StackPlace) -> None:
    for number in (1, 2, 3):
        place.begin_logs()
        place.log("worker").write_text(str(number))
    place.begin_logs()

    assert not place.log("worker").exists()
    assert (place.directory / "logs-before" / "worker.log").read_text() == "3"


def test_programs_of_the_stack_get_no_address_of_another_server(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PREFECT_API_KEY", "of another server")
    monkeypatch.setenv("RAY_ADDRESS", "of another cluster")
    monkeypatch.setenv("MUSTER_RUN_ID", "of the run around it")
    monkeypatch.setenv("NO_PROXY", "internal.example")
    monkeypatch.setenv("PATH", "/usr/bin")

    env = client_env(tmp_path, "http://127.0.0.1:4200/api")

    assert not {"PREFECT_API_KEY", "RAY_ADDRESS", "MUSTER_RUN_ID"} & env.keys()
    assert env["PREFECT_API_URL"] == "http://127.0.0.1:4200/api"
    assert env["MUSTER_HOME"] == str(tmp_path)
    assert env["NO_PROXY"] == "internal.example"
    assert env["PATH"] == f"{Path(sys.executable).parent}:/usr/bin"


@pytest.mark.parametrize(
    ("text", "nodes", "gpus", "cpus"),
    [
        ("2x8", 2, 8, 32),
        # the option has only a number of GPUs, and so means one node
        ("8", 1, 8, 32),
        # each node gets at least 24 CPUs, because a run of verl needs 24 CPUs on each node
        ("4x2", 4, 2, 24),
        ("16x16", 16, 16, 64),
    ],
)
def test_option_gpus_gives_nodes_gpus_and_cpus(text: str, nodes: int, gpus: int, cpus: int) -> None:
    fleet = Fleet.parsed(text)

    assert (fleet.nodes, fleet.gpus, fleet.cpus) == (nodes, gpus, cpus)
    assert str(fleet) == f"{nodes}x{gpus}"


def test_nodes_start_after_the_head_and_have_their_own_ports(place: StackPlace) -> None:
    blueprint = build_blueprint(place, 4200, ray_dashboard=0, fleet=Fleet(nodes=3, gpus=4))
    blueprint.ports.close()
    blueprint.stack.ray_temp.rmdir()

    names = [component.name for component in blueprint.plan.components]
    assert names[2:-3] == ["ray-head", "ray-node-1", "ray-node-2", "ray-node-3"]
    numbers = blueprint.ports.numbers
    assert len({numbers[f"{name}.agent"] for name in names[2:-3]}) == 4
    assert [node.gpus for node in blueprint.stack.nodes] == [4, 4, 4]
    for component in blueprint.plan.components[2:-3]:
        # Ray's subreaper must be off, because it hides crashes. With the subreaper, a crashed child
        # process seems to have exited with code 0.
        env = component.command.env
        assert env["RAY_kill_child_processes_on_worker_exit_with_raylet_subreaper"] == "false"
        assert env["RAY_process_group_cleanup_enabled"] == "true"


def test_fleet_that_differs_from_the_running_stack_is_rejected(
    place: StackPlace, capsys: pytest.CaptureFixture[str]
) -> None:
    place.save(make_stack(fleet="2x8"))

    code = run(STACK, ["up", "--gpus", "4x8"])

    assert code == 1
    assert "Run `muster down`, then `muster up --gpus 4x8`" in capsys.readouterr().err


def test_all_parts_of_a_stack_are_set_to_listen_on_loopback(place: StackPlace) -> None:
    blueprint = build_blueprint(place, 4200, ray_dashboard=0)
    blueprint.ports.close()
    blueprint.stack.ray_temp.rmdir()

    components = {component.name: component.command for component in blueprint.plan.components}
    parts = ["prefect-server", "deployments", "ray-head", "upkeep", "pipelines", "worker"]
    assert list(components) == parts
    assert "127.0.0.1" in components["prefect-server"].argv
    # Without this variable, Ray would listen on all network addresses. An integration test checks
    # the open ports of Ray.
    assert components["ray-head"].env["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] == "0"
    assert components["worker"].env["PREFECT_WORKER_WEBSERVER_HOST"] == "127.0.0.1"
    stack_ids = {command.env[STACK_VARIABLE] for command in components.values()}
    assert stack_ids == {blueprint.stack.stack_id}


@pytest.mark.parametrize(
    ("variables", "added_variables"),
    [
        ({}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": "{home}/ray-token"}),
        ({"RAY_AUTH_MODE": "token"}, {"RAY_AUTH_TOKEN_PATH": "{home}/ray-token"}),
        # The user sets a token, for example the token of another cluster.
        ({"RAY_AUTH_TOKEN": "f" * 64}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "f" * 64}),
        ({"RAY_AUTH_TOKEN_PATH": "/own"}, {"RAY_AUTH_MODE": "token"}),
        # The user switches tokens off, so the stack uses no token.
        ({"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_MODE": "disabled"}),
    ],
)
def test_all_parts_of_a_stack_get_the_token_of_the_ray_cluster(
    place: StackPlace,
    monkeypatch: pytest.MonkeyPatch,
    variables: dict[str, str],
    added_variables: dict[str, str],
) -> None:
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    blueprint = build_blueprint(place, 4200, ray_dashboard=0)
    blueprint.ports.close()
    blueprint.stack.ray_temp.rmdir()

    home = place.directory.parent
    expected = variables | {
        name: value.format(home=home) for name, value in added_variables.items()
    }
    for component in blueprint.plan.components:
        env = component.command.env
        assert {name: env[name] for name in env if name.startswith("RAY_AUTH")} == expected
    assert "RAY_AUTH_TOKEN" not in blueprint.stack.ray_auth
    file = home / "ray-token"
    assert file.exists() is (str(file) in expected.values())
    assert not file.exists() or (file.stat().st_mode & 0o777, len(file.read_text())) == (0o600, 65)


def test_worker_does_not_keep_an_ignored_sigint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONSAFEPATH", "")
    handlers: list[object] = []
    monkeypatch.setattr(worker, "reconcile_host", lambda: None)
    monkeypatch.setattr(worker, "publish", lambda report: None)
    monkeypatch.setattr(os, "execv", lambda *_: handlers.append(signal.getsignal(signal.SIGINT)))
    # Simulate a shell that starts this program in the background, and lets the program ignore
    # SIGINT.
    original_handler = signal.signal(signal.SIGINT, signal.SIG_IGN)

    try:
        worker.main()
    finally:
        signal.signal(signal.SIGINT, original_handler)

    # The worker must not ignore SIGINT, because Prefect's worker ends itself with this signal.
    assert handlers == [signal.SIG_DFL]


def test_each_stack_of_a_home_has_a_new_password(place: StackPlace) -> None:
    passwords = []
    for _ in range(2):
        blueprint = build_blueprint(place, 4200, ray_dashboard=0)
        blueprint.ports.close()
        blueprint.stack.ray_temp.rmdir()
        envs = {component.name: component.command.env for component in blueprint.plan.components}
        password = envs["prefect-server"]["PREFECT_SERVER_API_AUTH_STRING"]
        passwords.append(password)
        assert blueprint.stack.has_own_password
        assert envs["worker"]["PREFECT_API_AUTH_STRING"] == password
        assert envs["upkeep"]["PREFECT_API_AUTH_STRING"] == password

    assert passwords[0] != passwords[1]
