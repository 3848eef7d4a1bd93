"""`muster queue` and `muster why`: their output, their changes on the server, and exit codes."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import httpx
import pytest
from cyclopts import App
from prefect.client.schemas.actions import WorkPoolUpdate
from prefect.client.schemas.objects import FlowRun, State, StateType, Variable, WorkPool
from prefect.exceptions import ObjectNotFound, PrefectException
from prefect.settings import PREFECT_API_URL, temporary_settings

from tasks.queue import command as queue_command
from tasks.queue.packing import Demand
from tasks.queue.pool_copies import variable_name
from tasks.queue.scheduling_pass import QueuedRun, QueueView
from tasks.queue.settings import PoolSettings, TableNode, settings_of, with_settings
from tasks.ray.dashboard import ListedCluster
from tasks.ray.usage import ClusterNode
from tasks.show.arguments import run

NOW = datetime(2026, 1, 2, 13, 5, 30, tzinfo=UTC)
WAITING, RUNNING, UNKNOWN = (UUID(int=number) for number in (1, 2, 3))

VIEW = QueueView(
    at=NOW.timestamp(),
    pool="gang",
    policy="fifo",
    is_paused=False,
    limit=8,
    running=1,
    line=(
        QueuedRun(
            number=1,
            flow_run_id=str(WAITING),
            name="waiting-run",
            demand=Demand(nodes=2, gpus_per_node=8, cpus_per_gpu=3),
            cluster="",
            queue="default",
            waiting_since=NOW.timestamp() - 600,
            reason="waits for running-run to end",
            starts_at=NOW.timestamp() + 4500,
            tags=("team-a",),
        ),
    ),
    nodes=(
        ClusterNode(cluster="", name="gpu-1", gpus=8, held={"running-run": 8}),
        ClusterNode(cluster="", name="gpu-2", gpus=8),
    ),
)

RAY = "http://10.0.0.1:8265"
KNOWN = ListedCluster(address="http://known:8265", headers={"X-Key": "${env.KEY}"})
SET = PoolSettings(
    nodes=(TableNode(name="gpu-1", gpus=8),),
    clusters=(KNOWN,),
    limits={"team-a": 8},
    drained=("gpu-9",),
)
TEMPLATE = {
    "job_configuration": {"env": "{{ env }}"},
    "variables": {"properties": {"env": {"type": "object"}}},
}


def make_not_found() -> ObjectNotFound:
    return ObjectNotFound(http_exc=Exception("404"))


class Server:
    """A fake client of a Prefect server with one work pool."""

    def __init__(self) -> None:
        self.pool = WorkPool(
            name="gang", type="gang", base_job_template=with_settings(TEMPLATE, SET)
        )
        self.flow_runs: dict[UUID, FlowRun] = {}
        self.view = VIEW
        #: Each event as a tuple: the name of the event, the node, the pool and the user.
        self.events: list[tuple[str, str, str, str]] = []
        self.takes_events = True

    @property
    def settings(self) -> PoolSettings:
        return settings_of(self.pool.base_job_template)

    def add_flow_run(self, id: UUID, name: str, kind: StateType, **more: Any) -> FlowRun:
        state = State(type=kind, timestamp=NOW - timedelta(minutes=5), message=more.pop("says", ""))
        fields = {"flow_id": uuid4(), "work_pool_name": "gang", **more}
        self.flow_runs[id] = FlowRun(id=id, name=name, state=state, **fields)
        return self.flow_runs[id]

    async def read_view(self, pool: str) -> QueueView:
        return replace(self.view, pool=pool)

    async def read_work_pool(self, name: str) -> WorkPool:
        if name != self.pool.name:
            raise make_not_found()
        return self.pool

    async def read_work_pools(self) -> list[WorkPool]:
        return [self.pool]

    async def read_variable_by_name(self, name: str) -> Variable | None:
        value = {"pool_id": str(self.pool.id)}
        is_copy_of_deleted_pool = name == variable_name("deleted-pool")
        return Variable(id=uuid4(), name=name, value=value) if is_copy_of_deleted_pool else None

    async def update_work_pool(self, name: str, update: WorkPoolUpdate) -> None:
        assert name == self.pool.name
        self.pool = self.pool.model_copy(update=update.model_dump(exclude_unset=True))

    async def request(self, method: str, path: str, json: list[dict[str, Any]]) -> None:
        assert (method, path) == ("POST", "/events")
        if not self.takes_events:
            raise httpx.ReadTimeout("no answer")
        for event in json:
            output = event["payload"]
            self.events.append((event["event"], output["node"], output["pool"], output["by"]))

    async def read_flow_run(self, id: UUID) -> FlowRun:
        if id not in self.flow_runs:
            raise make_not_found()
        return self.flow_runs[id]


@pytest.fixture
def server() -> Server:
    return Server()


@pytest.fixture
def command(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Run a command of `muster` against the fake server; return its exit code and its output."""
    why = App(name="why", default_command=queue_command.why)

    @asynccontextmanager
    async def connect() -> AsyncIterator[Any]:
        yield server

    monkeypatch.setattr(queue_command, "connected", connect)
    monkeypatch.setattr(
        queue_command, "read_queue_view", lambda _client, pool: server.read_view(pool)
    )

    def command(*arguments: str) -> tuple[int, str]:
        is_why = arguments[:1] == ("why",)
        code = run(why, arguments[1:]) if is_why else run(queue_command.app, arguments)
        output = capsys.readouterr()
        return code, output.out + output.err

    return command


Command = Callable[..., tuple[int, str]]


@pytest.mark.parametrize("arguments", [(), ("--pool", "gang"), ("--pool=gang",)])
def test_output_is_plain_without_a_terminal(command: Command, arguments: tuple[str, ...]) -> None:
    code, output = command(*arguments)

    assert code == 0
    assert "work pool gang, fifo: 1 of at most 8 running, 1 waiting; 8 of 16 GPUs" in output
    assert "waits for running-run to end" in output
    assert "running-run: 8" in output
    assert "\x1b" not in output


@pytest.mark.parametrize("arguments", [("--json",), ("--json", "--pool", "gang")])
def test_json_output_has_the_names_of_waiting_runs(
    command: Command, arguments: tuple[str, ...]
) -> None:
    code, output = command(*arguments)

    assert code == 0
    assert json.loads(output)["line"][0]["name"] == "waiting-run"


def test_holders_of_a_deleted_pool_are_named(command: Command) -> None:
    code, output = command("--pool", "deleted-pool")

    assert code == 0
    assert "problem: the work pool deleted-pool was deleted" in output
    assert "running-run: 8" in output


def test_why_explains_a_waiting_run(command: Command, server: Server) -> None:
    server.add_flow_run(WAITING, "any", StateType.SCHEDULED)

    code, output = command("why", str(WAITING))

    assert code == 0
    assert output.splitlines() == [
        "The run waiting-run waits at position 1 of 1 in the queue.",
        "  needs          2 nodes with 8 GPUs each",
        "  reason         waits for running-run to end",
        "  waiting since  2026-01-02 12:55 UTC",
        "  expected start 2026-01-02 14:20 UTC",
        "  queue          default",
        "  tags           team-a",
    ]


@pytest.mark.parametrize(
    ("kind", "more", "expected"),
    [
        (StateType.RUNNING, {}, "running-run has been Running since 2026-01-02 13:00 UTC."),
        (StateType.COMPLETED, {}, "running-run has been Completed since 2026-01-02 13:00 UTC."),
        # the run is scheduled for a later time, so it does not wait for GPUs yet
        (
            StateType.SCHEDULED,
            {"next_scheduled_start_time": NOW + timedelta(hours=2)},
            "running-run is scheduled to start at 2026-01-02 15:05 UTC.",
        ),
        # no scheduler has read the run yet, so the reason for waiting is not known
        (
            StateType.SCHEDULED,
            {"next_scheduled_start_time": NOW},
            "running-run has been Scheduled since 2026-01-02 13:00 UTC.",
        ),
    ],
)
def test_why_describes_a_run_that_does_not_wait(
    command: Command, server: Server, kind: StateType, more: dict[str, Any], expected: str
) -> None:
    server.add_flow_run(RUNNING, "running-run", kind, **more)

    _, lines = command("why", str(RUNNING))

    assert lines.splitlines()[0] == expected


def test_why_names_held_gpus_and_state(command: Command, server: Server) -> None:
    other_node = ClusterNode(cluster="", name="gpu-3", gpus=8, held={"running-run": 1})
    server.view = replace(server.view, nodes=(*server.view.nodes, other_node))
    server.add_flow_run(
        RUNNING, "running-run", StateType.RUNNING, says="running: trainer\nand more"
    )

    _, output = command("why", str(RUNNING))

    assert output.splitlines()[1:] == [
        "  holds          gpu-1 (8 GPUs), gpu-3 (1 GPU)",
        "  message        running: trainer",
        "                 and more",
    ]


def test_unknown_run_is_reported(command: Command) -> None:
    code, output = command("why", str(UNKNOWN))

    assert code == 1
    assert f"no flow run with the id {UNKNOWN}" in output


def test_drain_keeps_other_settings_and_names_running_runs(
    command: Command, server: Server
) -> None:
    code, output = command("drain", "gpu-1", "gpu-2", "gpu-1")

    assert code == 0
    assert server.settings == SET.model_copy(update={"drained": ("gpu-9", "gpu-1", "gpu-2")})
    kept = server.pool.base_job_template
    assert kept["job_configuration"] == TEMPLATE["job_configuration"]
    assert "env" in kept["variables"]["properties"]
    assert output.splitlines()[1:3] == [
        "gpu-1 gets no new runs. Still running there: running-run.",
        "gpu-2 gets no new runs.",
    ]


def test_drain_names_running_runs_of_each_cluster(command: Command, server: Server) -> None:
    others = ClusterNode(cluster="http://ray", name="gpu-1", gpus=8, held={"another-run": 4})
    idle = ClusterNode(cluster="http://ray-2", name="gpu-1", gpus=8)
    server.view = replace(VIEW, nodes=(*VIEW.nodes, others, idle))

    _code, output = command("drain", "gpu-1")

    assert "\ngpu-1 gets no new runs. Still running there: another-run, running-run.\n" in output


def test_changes_of_an_operator_are_emitted_as_events(command: Command, server: Server) -> None:
    for arguments in (
        ("drain", "gpu-1", "gpu-9"),
        ("undrain", "gpu-1"),
        ("set", "policy=backfill"),
    ):
        command(*arguments)

    assert [(event, what, pool) for event, what, pool, _who in server.events] == [
        # gpu-9 was drained before this command, so there is no event about gpu-9
        ("muster.node.drained", "gpu-1", "gang"),
        ("muster.node.undrained", "gpu-1", "gang"),
    ]
    assert all("@" in who for *_, who in server.events)


def test_rejected_event_does_not_prevent_a_drain(command: Command, server: Server) -> None:
    server.takes_events = False

    code, _output = command("drain", "gpu-1")

    assert code == 0
    assert server.settings.drained == ("gpu-9", "gpu-1")


def test_undrain_removes_a_node_that_no_longer_exists(command: Command, server: Server) -> None:
    code, output = command("undrain", "gpu-9")

    assert code == 0
    assert server.settings.drained == ()
    assert output.endswith("}\ngpu-9 may get new runs.\n")


@pytest.mark.parametrize("verb", ["drain", "undrain"])
def test_unknown_node_is_refused_with_the_known_names(
    command: Command, server: Server, verb: str
) -> None:
    code, output = command(verb, "gpu-1", "gpu-7")

    assert code == 1
    assert server.settings == SET
    assert "there is no node gpu-7; the nodes are: gpu-1, gpu-2, gpu-9." in output
    assert "in the UI" in output


@pytest.mark.parametrize(
    ("arguments", "after"),
    [
        (("set", "policy=backfill"), {"policy": "backfill"}),
        (("set", "limit.team-b=16"), {"limits": {"team-a": 8, "team-b": 16}}),
        (("set", "limit.team-a=0", "policy=fifo"), {"limits": {"team-a": 0}}),
        # the name of a tag may contain dots and equals signs
        (("set", "limit.a.b=c=4"), {"limits": {"team-a": 8, "a.b=c": 4}}),
        (("unset", "limit.team-a", "policy"), {"limits": {}}),
        (("set", "node.gpu-1=4"), {"nodes": (TableNode(name="gpu-1", gpus=4),)}),
        (("set", "node.a.b=2"), {"nodes": (*SET.nodes, TableNode(name="a.b", gpus=2))}),
        (("unset", "node.gpu-1"), {"nodes": ()}),
        (("set", f"cluster.{RAY}/=0"), {"clusters": (KNOWN, ListedCluster(address=RAY))}),
        # only the maximum number of nodes changes; the other settings of this cluster stay the same
        (
            ("set", "cluster.http://known:8265=4"),
            {"clusters": (KNOWN.model_copy(update={"max_nodes": 4}),)},
        ),
        (("unset", "cluster.http://known:8265"), {"clusters": ()}),
    ],
)
def test_settings_are_changed_and_printed(
    command: Command, server: Server, arguments: tuple[str, ...], after: dict[str, Any]
) -> None:
    code, output = command(*arguments)

    assert code == 0
    assert server.settings == SET.model_copy(update=after)
    assert output.startswith("Settings of the work pool gang: {")
    assert json.loads(output.partition(": ")[2]).get("limits", {}) == server.settings.limits
    assert "KEY" not in output


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("set", "policy=lifo"), "policy: Input should be 'fifo' or 'backfill'"),
        (("set", "limit.team-a=many"), "the value must be a whole number"),
        (("set", "limit.team-a=-1"), "the value must be a whole number"),
        (("set", "limit.=1"), "limit.: no such setting"),
        (("set", "node.gpu-1=some"), "the value must be a whole number"),
        (("set", "node.=1"), "node.: no such setting"),
        (("unset", "node.gpu-7"), "the work pool has no node with this name. It has only: gpu-1"),
        (("set", "colour=3"), "colour: no such setting; the settings are: policy, limit.TAG"),
        (("set", "policy"), "write policy=VALUE"),
        (
            ("unset", "limit.team-b"),
            "the work pool has no limit with this name. It has only: team-a",
        ),
        (("unset", "nodes"), "nodes: no such setting"),
        (("set", "cluster.head:8265=0"), "clusters.1.address: must be an http address"),
        (
            ("unset", f"cluster.{RAY}"),
            "the work pool has no cluster with this name. It has only: http://known:8265",
        ),
    ],
)
def test_invalid_setting_is_refused(
    command: Command, server: Server, arguments: tuple[str, ...], expected: str
) -> None:
    code, lines = command(*arguments)

    assert code == 2
    assert server.settings == SET
    assert expected in lines
    assert lines.endswith("Nothing was done.\n")


def test_pool_without_a_job_template_is_explained(command: Command, server: Server) -> None:
    server.pool = server.pool.model_copy(update={"base_job_template": {}})

    code, output = command("set", "policy=backfill")

    assert code == 1
    assert server.pool.base_job_template == {}
    assert "no job template yet" in output
    assert "prefect worker start --pool gang" in output


def test_pool_of_another_type_is_pointed_out(command: Command, server: Server) -> None:
    server.pool = server.pool.model_copy(update={"type": "process"})

    _, output = command("set", "policy=backfill")

    assert "the work pool is of type process" in output


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"policy": "lifo"}, "policy:"),
        ({"ray": RAY}, "ray: Extra inputs are not permitted"),
    ],
)
def test_invalid_settings_are_not_overwritten(
    command: Command, server: Server, settings: dict[str, Any], expected: str
) -> None:
    invalid_template = {"variables": {"properties": {"gang": {"default": settings}}}}
    server.pool = server.pool.model_copy(update={"base_job_template": invalid_template})

    code, lines = command("drain", "gpu-1")

    assert code == 1
    assert server.pool.base_job_template == invalid_template
    assert "settings of the work pool gang can't be read: " in lines
    assert expected in " ".join(lines.split())


@pytest.mark.parametrize(
    "arguments",
    [
        ("--pool", "other"),
        ("drain", "gpu-1", "--pool", "other"),
        ("undrain", "--pool=other", "gpu-1"),
        ("set", "policy=fifo", "--pool", "other"),
        ("unset", "policy", "--pool", "other"),
    ],
)
def test_unknown_pool_is_reported_with_the_remedy(
    command: Command, arguments: tuple[str, ...]
) -> None:
    code, output = command(*arguments)

    assert code == 1
    assert "no work pool other. Choose one of its work pools with --pool: gang" in output
    assert "prefect work-pool create other --type gang" in output


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        (None, "no Prefect server is set"),
        ("http://127.0.0.1:9/api", "no Prefect server answers at http://127.0.0.1"),
        ("nonsense", "no Prefect server answers at nonsense"),
    ],
)
@pytest.mark.parametrize("arguments", [[], ["drain", "gpu-1"], ["set", "policy=fifo"]])
def test_missing_server_is_reported(
    capsys: pytest.CaptureFixture[str], arguments: list[str], url: str | None, expected: str
) -> None:
    with temporary_settings({PREFECT_API_URL: url}):
        code = run(queue_command.app, arguments)

    error_output = capsys.readouterr().err
    assert code == 1
    assert expected in error_output
    assert "muster up" in error_output
    assert len(error_output.splitlines()) == 1


def test_server_error_is_reported_in_one_line(
    command: Command, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(name: str, update: WorkPoolUpdate) -> None:
        raise PrefectException("the pool is\nbeing deleted")

    monkeypatch.setattr(server, "update_work_pool", refuse)

    code, output = command("set", "policy=backfill")

    assert code == 1
    assert output == "the request to the Prefect server failed: the pool is being deleted\n"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("drain",), "NODE requires an argument"),
        (("undrain",), "NODE requires an argument"),
        (("set",), "KEY=VALUE requires an argument"),
        (("unset",), "KEY requires an argument"),
        (("dran", "gpu-1"), "queue has no command 'dran': did you mean `drain`?"),
        (("sideways",), "queue has no command 'sideways': choose from drain, undrain, set, unset"),
    ],
)
def test_wrong_arguments_are_refused(
    command: Command, server: Server, arguments: tuple[str, ...], expected: str
) -> None:
    code, output = command(*arguments)

    assert code == 2
    assert expected in output
    assert server.settings == SET
