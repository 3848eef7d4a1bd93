"""A Prefect server that wants a password: everybody who asks it is told what to set, and no
component gets to know it."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from pathlib import Path

import httpx
import pytest
from prefect.plugins import HookContext
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

from deployments import worker
from deployments.stack import plugin
from deployments.stack.env import auth_string, client_env, renew_password
from tasks.queue.command import app as queue
from tasks.record.places import server_password
from tasks.server.flow_runs import ServerAway, ServerRefuses, talking_to
from tasks.server.server import NoServer, prefect_server
from tasks.server.trusted_clients import GUARDED_PREFECT, RenewedPassword, as_header
from tasks.show.arguments import run
from tasks.spec.run import RunSpec
from tasks.train.plan import component_env
from tasks.upkeep import reconcile
from tasks.upkeep.prune import prune_host
from tests.support.house import ROOT, files, imports
from tests.support.web import serving

PASSWORD = "operator:correct-horse"
REMEDY = "set PREFECT_API_AUTH_STRING to what its server has as PREFECT_SERVER_API_AUTH_STRING"
SPEC = RunSpec.model_validate(
    {
        "name": "trial",
        "workload": "grpo",
        "components": {"trainer": {"command": ["python"], "env": {"ASKED": "for"}}},
    }
)


@pytest.fixture(scope="module")
def refusing() -> Iterator[str]:
    with (
        serving(lambda *_: (401, None)) as url,
        temporary_settings({PREFECT_API_URL: f"{url}/api"}),
    ):
        yield f"{url}/api"


@pytest.mark.parametrize(
    ("password", "who"),
    [
        (None, "does not let in who has no password (HTTP 401)"),
        ("wrong", "does not let in the PREFECT_API_AUTH_STRING of this process (HTTP 401)"),
    ],
)
def test_a_run_is_told_what_to_set(refusing: str, password: str | None, who: str) -> None:
    with (
        temporary_settings({PREFECT_API_AUTH_STRING: password}),
        pytest.raises(NoServer) as caught,
        prefect_server(),
    ):
        raise AssertionError("it was let in")

    assert str(caught.value) == f"the Prefect server at {refusing} {who}: {REMEDY}"


def test_the_queue_s_command_says_so(refusing: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(queue, []) == 1

    assert REMEDY in capsys.readouterr().err


def test_a_reconcile_says_that_it_saw_no_flow_runs(
    refusing: str, muster_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reconcile.reconcile() == 1

    assert REMEDY in capsys.readouterr().out


def test_a_prune_removes_nothing(refusing: str, muster_home: Path) -> None:
    pruned = prune_host()

    assert REMEDY in pruned.open
    assert REMEDY in pruned.summary


def test_a_worker_does_not_start(refusing: str, muster_home: Path) -> None:
    with pytest.raises(SystemExit, match="PREFECT_SERVER_API_AUTH_STRING"):
        worker.main()


def test_another_error_of_a_server_is_no_refusal() -> None:
    with (
        serving(lambda *_: (500, None)) as url,
        pytest.raises(ServerAway) as caught,
        talking_to(f"{url}/api") as client,
    ):
        client.hello().raise_for_status()

    assert not isinstance(caught.value, ServerRefuses)


@pytest.mark.parametrize(
    "name",
    [
        "PREFECT_API_AUTH_STRING",
        "PREFECT_SERVER_API_AUTH_STRING",
        "PREFECT_API_KEY",
        "PREFECT_SERVER_DATABASE_PASSWORD",
        "PREFECT_SERVER_DATABASE_CONNECTION_URL",
    ],
)
def test_no_component_gets_a_key_to_the_server(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv(name, PASSWORD)
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:4200/api")
    monkeypatch.setenv("HF_TOKEN", "theirs")

    env = component_env(SPEC, "trainer", "trial-1", 1)

    assert name not in env
    assert PASSWORD not in env.values()
    assert env["PREFECT_API_URL"] == "http://127.0.0.1:4200/api"
    assert env["HF_TOKEN"] == "theirs"


def test_a_stack_for_which_none_is_set_has_one_of_its_own(muster_home: Path) -> None:
    env = client_env(muster_home, "http://127.0.0.1:4200/api")

    assert env["PREFECT_API_AUTH_STRING"] == server_password() != ""


def test_each_start_of_a_stack_gets_a_new_password(muster_home: Path) -> None:
    before = auth_string()

    renew_password()

    assert server_password() not in ("", before)
    assert auth_string() == server_password()
    assert (muster_home / "password").stat().st_mode & 0o777 == 0o600


def test_password_that_the_operator_sets_is_not_renewed(
    muster_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = auth_string()
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", PASSWORD)

    renew_password()

    assert server_password() == before


def test_training_that_outlives_a_stack_is_let_in_by_the_next_one(muster_home: Path) -> None:
    flow = RenewedPassword(auth_string()).auth_flow(
        httpx.Request("GET", "http://here", headers={"Authorization": as_header(auth_string())})
    )
    next(flow)
    renew_password()

    again = flow.send(httpx.Response(401))

    assert again.headers["Authorization"] == as_header(server_password())


def test_prefect_s_own_commands_are_given_the_password_of_a_stack(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lacks = {"PREFECT_API_AUTH_STRING": PASSWORD}
    monkeypatch.setattr(plugin, "to_reach_stack", lambda url: lacks if url == "here" else {})

    def given(url: str | None) -> Mapping[str, str] | None:
        about = HookContext(prefect_version="", api_url=url, logger_factory=logging.getLogger)
        found = plugin.setup_environment(ctx=about)
        return found and found.env

    assert [given(url) for url in ("here", "elsewhere", None)] == [lacks, None, None]


def test_no_component_gets_the_password_by_the_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in GUARDED_PREFECT.items():
        monkeypatch.setenv(name, value)

    env = component_env(SPEC, "trainer", "trial-1", 1)

    assert env["PREFECT_PLUGINS_ENABLED"] == "false"
    assert "PREFECT_PLUGINS_ALLOW" not in env


def test_every_module_that_makes_a_client_guards_it() -> None:
    makers = {
        one.path: {other.target for other in imports(ROOT, one.path)}
        for path in files(ROOT, "tasks", "flows", "deployments")
        for one in imports(ROOT, path)
        if one.target == "prefect.client.orchestration.get_client"
    }

    unguarded = [
        path
        for path, targets in makers.items()
        if not path.startswith("tasks/server/")
        and not any(target.startswith("tasks.server") for target in targets)
    ]

    assert len(makers) >= 8
    assert unguarded == []


def test_a_component_gets_what_its_spec_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", PASSWORD)
    spec = SPEC.model_copy(update={"env": {"PREFECT_API_AUTH_STRING": "its own"}})

    assert component_env(spec, "trainer", "trial-1", 1)["PREFECT_API_AUTH_STRING"] == "its own"


@pytest.mark.parametrize("name", ["PREFECT_API_AUTH_STRING", "PREFECT_SERVER_API_AUTH_STRING"])
def test_a_stack_takes_the_password_of_its_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    monkeypatch.setenv(name, PASSWORD)

    env = client_env(tmp_path, "http://127.0.0.1:4200/api")

    assert auth_string() == PASSWORD
    assert env["PREFECT_API_AUTH_STRING"] == PASSWORD
    assert "PREFECT_SERVER_API_AUTH_STRING" not in env
