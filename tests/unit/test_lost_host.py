"""Tests of `muster reconcile --lost-host`: only a known and silent other host can be given up."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from cyclopts import App
from prefect.client.schemas.objects import FlowRun
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL, temporary_settings

from tasks.processes.identity import host_name
from tasks.show.arguments import run
from tasks.spec.errors import BadArgument
from tasks.upkeep import reconcile
from tasks.upkeep.reconcile import give_up_host
from tasks.upkeep.report import Report

NOW = datetime(2026, 11, 22, 12, tzinfo=UTC)
API = "http://127.0.0.1:9/api"


class Server:
    """Fake Prefect server that knows some hosts.

    A host may have workers, runs, and a deployment with the name `reconcile/HOST`.
    """

    def __init__(self) -> None:
        self.workers: dict[str, list[tuple[str, float]]] = {}
        self.upkeeps: dict[str, float] = {}
        self.hosts_of_runs: list[str] = []

    def read_work_pools(self) -> list[Any]:
        return [SimpleNamespace(name=name) for name in self.workers]

    def read_workers_for_work_pool(self, pool: str) -> list[Any]:
        return [
            SimpleNamespace(name=name, last_heartbeat_time=NOW - timedelta(seconds=age_s))
            for name, age_s in self.workers[pool]
        ]

    def read_deployment_by_name(self, name: str) -> Any:
        if name not in self.upkeeps:
            raise ObjectNotFound(Exception(name))
        return SimpleNamespace(last_polled=NOW - timedelta(seconds=self.upkeeps[name]))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, muster_home: object) -> Iterator[Server]:
    server = Server()

    @contextmanager
    def connect_to_server(_api_url: str) -> Iterator[Server]:
        yield server

    def list_runs(_client: Server) -> list[FlowRun]:
        labels = [{"prefect.worker.name": name} for name in server.hosts_of_runs]
        return [FlowRun(flow_id=uuid4(), labels=run_labels) for run_labels in labels]

    monkeypatch.setattr(reconcile, "connect_to_server", connect_to_server)
    monkeypatch.setattr(reconcile, "read_held_flow_runs", list_runs)
    monkeypatch.setattr(reconcile, "read_server_time", lambda _client: NOW)
    monkeypatch.setattr(reconcile, "reconcile_host", lambda lost: Report(host=lost))
    with temporary_settings({PREFECT_API_URL: API}):
        yield server


def test_silent_host_is_given_up(server: Server) -> None:
    server.workers = {"gang": [("there", 120.0), ("other", 1.0)], "pipelines": []}
    server.upkeeps = {"reconcile/there": 500.0}

    assert give_up_host("there") == Report(host="there")


def test_host_known_only_by_a_run_is_given_up(server: Server) -> None:
    server.hosts_of_runs = ["there"]

    assert give_up_host("there") == Report(host="there")


@pytest.mark.parametrize(
    ("workers", "upkeeps", "message"),
    [
        ({"gang": [("there", 12.0)]}, {}, "its worker of the pool gang last reported 12 s ago"),
        ({"pipelines": [("there", 119.0)]}, {}, "its worker of the pool pipelines last reported"),
        # the worker's clock is ahead of the server's clock, so the last report seems to come from
        # the future: 0 s is shown
        ({"gang": [("there", -3.0)]}, {}, "its worker of the pool gang last reported 0 s ago"),
        (
            {"gang": [("there", 500.0)]},
            {"reconcile/there": 7.0},
            "its upkeep (`reconcile/there`) last reported 7 s ago",
        ),
    ],
)
def test_host_that_has_reported_recently_is_refused(
    server: Server,
    workers: dict[str, list[tuple[str, float]]],
    upkeeps: dict[str, float],
    message: str,
) -> None:
    server.workers, server.upkeeps = workers, upkeeps

    with pytest.raises(BadArgument) as refused:
        give_up_host("there")

    assert message in str(refused.value)
    assert "run this command again after 120 s" in str(refused.value)


def test_unknown_host_is_refused_with_the_known_names(server: Server) -> None:
    server.hosts_of_runs = ["b", "a", host_name()]

    with pytest.raises(
        BadArgument, match=r"of a host with the name 'their'\. The hosts with runs are: a, b$"
    ):
        give_up_host("their")


def test_this_host_is_refused(server: Server) -> None:
    with pytest.raises(
        BadArgument, match=r"is this host\. .* `muster reconcile` without --lost-host"
    ):
        give_up_host(host_name())


def test_giving_up_a_host_needs_a_server() -> None:
    with (
        temporary_settings(restore_defaults={PREFECT_API_URL}),
        pytest.raises(BadArgument, match="PREFECT_API_URL is not set"),
    ):
        give_up_host("there")


def test_command_reports_an_unknown_host_with_exit_code_2(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run(App(default_command=reconcile.reconcile), ["--lost-host", "their"])

    output = capsys.readouterr().err
    assert code == 2
    assert "the Prefect server has no worker and no run of a host with the name 'their'" in output
    assert output.endswith("Nothing was done.\n")
