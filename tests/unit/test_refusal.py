"""Tests with a Prefect server that requires a password.

Each client gets a message with the setting that is missing, and no component gets the password.
"""

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
from tasks.server.flow_runs import ServerAway, ServerRefuses, connect_to_server
from tasks.server.server import NoServer, prefect_server
from tasks.server.trusted_clients import GUARDED_PREFECT, RenewedPassword, make_auth_header
from tasks.show.arguments import run
from tasks.spec.run import RunSpec
from tasks.train.plan import component_env
from tasks.upkeep import reconcile
from tasks.upkeep.prune import prune_host
from tests.support.house import ROOT, files, imports
from tests.support.web import serving

PASSWORD = "operator:correct-horse"
REMEDY = "set PREFECT_API_AUTH_STRING to the value of PREFECT_SERVER_API_AUTH_STRING of the server"
SPEC = RunSpec.model_validate(
    {
        "name": "trial",
        "workload": "grpo",
        "components": {"trainer": {"command": ["python"], "env": {"ASKED": "for"}}},
    }
)


@pytest.fixture(scope="module")
def refusing() -> Iterator[str]:
    """Yield the API URL of a fake Prefect server that answers each request with HTTP 401.

    During the tests, this URL is also the PREFECT_API_URL of this process.
    """
    with (
        serving(lambda *_: (401, None)) as url,
        temporary_settings({PREFECT_API_URL: f"{url}/api"}),
    ):
        yield f"{url}/api"


@pytest.mark.parametrize(
    ("password", "refusal"),
    [
        (None, "rejects requests without a password (HTTP 401)"),
        ("wrong", "rejects requests with the PREFECT_API_AUTH_STRING of this process (HTTP 401)"),
    ],
)
def test_run_names_the_setting_for_the_password(
    refusing: str, password: str | None, refusal: str
) -> None:
    with (
        temporary_settings({PREFECT_API_AUTH_STRING: password}),
        pytest.raises(NoServer) as error_info,
        prefect_server(),
    ):
        raise AssertionError("it was let in")

    assert str(error_info.value) == f"the Prefect server at {refusing} {refusal}: {REMEDY}"


def test_queue_command_names_the_setting_for_the_password(
    refusing: str, capsys: pytest.CaptureFixture[str]
) -> None:
    exit_code = run(queue, [])

    assert exit_code == 1
    assert REMEDY in capsys.readouterr().err


def test_reconcile_names_the_setting_for_the_password(
    refusing: str, muster_home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    exit_code = reconcile.reconcile()

    assert exit_code == 1
    assert REMEDY in capsys.readouterr().out


def test_prune_names_the_setting_for_the_password(refusing: str, muster_home: Path) -> None:
    pruned = prune_host()

    assert REMEDY in pruned.open
    assert REMEDY in pruned.summary


def test_worker_does_not_start_without_the_password(refusing: str, muster_home: Path) -> None:
    with pytest.raises(SystemExit, match="PREFECT_SERVER_API_AUTH_STRING"):
        worker.main()


def test_other_errors_of_a_server_are_not_refusals() -> None:
    with (
        serving(lambda *_: (500, None)) as url,
        pytest.raises(ServerAway) as error_info,
        connect_to_server(f"{url}/api") as client,
    ):
        client.hello().raise_for_status()

    assert not isinstance(error_info.value, ServerRefuses)


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
def test_components_do_not_get_secrets_of_the_server(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setenv(name, PASSWORD)
    monkeypatch.setenv("PREFECT_API_URL", "http://127.0.0.1:4200/api")
    monkeypatch.setenv("HF_TOKEN", "theirs")

    env = component_env(SPEC, "trainer", "trial-1", 1)

    assert name not in env
    assert PASSWORD not in env.values()
    assert env["PREFECT_API_URL"] == "http://127.0.0.1:4200/api"
    assert env["HF_TOKEN"] == "theirs"


def test_stack_without_a_configured_password_creates_one(muster_home: Path) -> None:
    env = client_env(muster_home, "http://127.0.0.1:4200/api")

    assert env["PREFECT_API_AUTH_STRING"] == server_password() != ""


def test_each_start_of_a_stack_gets_a_new_password(muster_home: Path) -> None:
    previous_password = auth_string()

    renew_password()

    assert server_password() not in ("", previous_password)
    assert auth_string() == server_password()
    assert (muster_home / "password").stat().st_mode & 0o777 == 0o600


def test_password_that_the_operator_sets_is_not_renewed(
    muster_home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    previous_password = auth_string()
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", PASSWORD)

    renew_password()

    assert server_password() == previous_password


def test_training_that_outlives_a_stack_uses_the_next_stack_s_password(muster_home: Path) -> None:
    flow = RenewedPassword(auth_string()).auth_flow(
        httpx.Request(
            "GET", "http://here", headers={"Authorization": make_auth_header(auth_string())}
        )
    )
    next(flow)
    renew_password()

    second_request = flow.send(httpx.Response(401))

    assert second_request.headers["Authorization"] == make_auth_header(server_password())


def test_prefect_commands_get_the_password_of_the_stack(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = {"PREFECT_API_AUTH_STRING": PASSWORD}
    monkeypatch.setattr(plugin, "to_reach_stack", lambda url: settings if url == "here" else {})

    def environment_for(url: str | None) -> Mapping[str, str] | None:
        """Return the environment variables that Muster's Prefect plugin sets for a command.

        Args:
            url: URL of the Prefect API that the command uses.
        """
        context = HookContext(prefect_version="", api_url=url, logger_factory=logging.getLogger)
        result = plugin.setup_environment(ctx=context)
        return result and result.env

    environments = [environment_for(url) for url in ("here", "elsewhere", None)]

    assert environments == [settings, None, None]


def test_components_do_not_run_the_password_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in GUARDED_PREFECT.items():
        monkeypatch.setenv(name, value)

    env = component_env(SPEC, "trainer", "trial-1", 1)

    assert env["PREFECT_PLUGINS_ENABLED"] == "false"
    assert "PREFECT_PLUGINS_ALLOW" not in env


def test_every_module_with_a_client_guards_it() -> None:
    makers = {
        client_import.path: {other.target for other in imports(ROOT, client_import.path)}
        for path in files(ROOT, "tasks", "flows", "deployments")
        for client_import in imports(ROOT, path)
        if client_import.target == "prefect.client.orchestration.get_client"
    }

    unguarded = [
        path
        for path, targets in makers.items()
        if not path.startswith("tasks/server/")
        and not any(target.startswith("tasks.server") for target in targets)
    ]

    assert len(makers) >= 8
    assert unguarded == []


def test_component_gets_the_password_in_its_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", PASSWORD)
    spec = SPEC.model_copy(update={"env": {"PREFECT_API_AUTH_STRING": "its own"}})

    env = component_env(spec, "trainer", "trial-1", 1)

    assert env["PREFECT_API_AUTH_STRING"] == "its own"


@pytest.mark.parametrize("name", ["PREFECT_API_AUTH_STRING", "PREFECT_SERVER_API_AUTH_STRING"])
def test_stack_uses_the_password_in_its_environment(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    monkeypatch.setenv(name, PASSWORD)

    env = client_env(tmp_path, "http://127.0.0.1:4200/api")

    assert auth_string() == PASSWORD
    assert env["PREFECT_API_AUTH_STRING"] == PASSWORD
    assert "PREFECT_SERVER_API_AUTH_STRING" not in env
