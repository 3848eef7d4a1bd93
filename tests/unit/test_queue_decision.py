"""Decisions of a scheduling pass, and the validity of grants, without a server or a cluster."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import pytest
from prefect.client.schemas.objects import (
    FlowRun,
    State,
    StateType,
    WorkPool,
    WorkQueue,
    WorkQueueStatus,
)

from flows.train import train
from tasks.queue.decision import SchedulingPass, find_overgranted
from tasks.queue.deployment_limits import DeploymentLimit
from tasks.queue.grants import (
    Grant,
    SchedulerProcess,
    expected_end_labels,
    grant_of,
    handover_labels,
    is_handed_over,
    no_grant_labels,
    requeue_labels,
)
from tasks.queue.ledger import Ledger, Pool, QueueEntry, find_spec_fault, parse_request
from tasks.queue.settings import PoolSettings, merge_settings
from tasks.ray.usage import Cluster, ClusterNode
from tasks.server.flow_runs import make_process_tag
from tasks.spec.loading import parse_spec

BEGAN = datetime(2026, 1, 2, 12, tzinfo=UTC)
DEPLOYMENT = uuid4()
NOW = BEGAN.timestamp() + 3600
TWO_NODES = (ClusterNode(name="n1", gpus=8), ClusterNode(name="n2", gpus=8))
QUEUE = WorkQueue(id=uuid4(), name="default", priority=2, work_pool_id=uuid4())


def flow_run(
    gpus: int | None = 8,
    *,
    nodes: int = 1,
    number: int = 0,
    type: StateType = StateType.SCHEDULED,
    name: str = "Scheduled",
    labels: dict[str, Any] | None = None,
    spec: dict[str, Any] | None = None,
    **more: Any,
) -> FlowRun:
    """Return a flow run of the work pool. Flow runs are submitted in the order of `number`."""
    submitted = BEGAN + timedelta(seconds=number)
    gang = None if gpus is None else {"nodes": nodes, "gpus_per_node": gpus}
    written = {"name": f"run{number}", "workload": "grpo", "gang": gang, **(spec or {})}
    return FlowRun(
        id=UUID(int=number + 1),
        flow_id=uuid4(),
        name=f"run{number}",
        created=submitted,
        expected_start_time=submitted,
        next_scheduled_start_time=submitted,
        state=State(id=uuid4(), type=type, name=name, timestamp=submitted),
        parameters={"spec": written},
        labels=labels or {},
        work_queue_id=QUEUE.id,
        **more,
    )


def entry(run: FlowRun, pool: str = "gang") -> QueueEntry:
    return QueueEntry(
        flow_run=run,
        request=parse_request(run),
        grant=grant_of(run),
        pool=pool,
        queue="default",
        priority=2,
    )


def holder(nodes: dict[str, int], number: int, **more: Any) -> QueueEntry:
    """Return the queue's entry of a flow run that is running on the given nodes."""
    granted = Grant(nodes=nodes, state_id="", at=NOW, by=None).label()
    run = flow_run(
        max(nodes.values()),
        nodes=len(nodes),
        number=number,
        type=StateType.RUNNING,
        name="Running",
        labels=granted,
        **more,
    )
    return entry(run)


def run_pass(
    waiting: list[QueueEntry],
    holding: list[QueueEntry] | None = None,
    *,
    limit: int | None = None,
    queue: WorkQueue = QUEUE,
    paused: bool = False,
    nodes: tuple[ClusterNode, ...] = (
        ClusterNode(name="n1", gpus=8),
        ClusterNode(name="n2", gpus=8),
    ),
    hosts: frozenset[str] = frozenset(),
    clusters: dict[str, Cluster] | None = None,
    deployment_limit: DeploymentLimit | None = None,
    **settings: Any,
) -> SchedulingPass:
    holding = holding or []
    work_pool = WorkPool(
        id=uuid4(), name="gang", type="gang", concurrency_limit=limit, is_paused=paused
    )
    pool = Pool(work_pool=work_pool, queues={queue.id: queue}, hosts=hosts)
    ledger = Ledger(
        at=datetime.now(UTC),
        pools={"gang": pool},
        waiting=tuple(waiting),
        holding=tuple(holding),
        is_cut=False,
        deployment_limits={DEPLOYMENT: deployment_limit} if deployment_limit else {},
    )
    table = [{"name": node.name, "gpus": node.gpus} for node in nodes]
    of_pool = PoolSettings.model_validate({"nodes": table, **settings})
    clusters = clusters or {"": Cluster(nodes=nodes)}
    return SchedulingPass(
        at=NOW,
        ledger=ledger,
        settings={"gang": of_pool},
        rules=dict.fromkeys(clusters, of_pool),
        queue=waiting,
        clusters=clusters,
    ).decide()


def started(scheduling_pass: SchedulingPass) -> list[str]:
    return [entry.flow_run.name for entry, _gpus in scheduling_pass.admitted]


def test_runs_start_in_order_on_fitting_nodes() -> None:
    waiting = [entry(flow_run(8, number=0)), entry(flow_run(5, number=1))]

    scheduling_pass = run_pass(waiting)

    assert [dict(gpus) for _entry, gpus in scheduling_pass.admitted] == [{"n1": 8}, {"n2": 5}]
    assert {node.name: node.free_gpus for node in scheduling_pass.nodes[""]} == {"n1": 0, "n2": 3}


def test_no_run_passes_the_first_of_the_queue() -> None:
    waiting = [entry(flow_run(8, nodes=2, number=1)), entry(flow_run(1, number=2))]

    scheduling_pass = run_pass(waiting, [holder({"n1": 8}, 0)])

    assert started(scheduling_pass) == []
    first, second = (scheduling_pass.messages[one.id].text for one in waiting)
    assert first.startswith("needs 2 nodes with 8 GPUs each; waits for run0-grpo-")
    assert "waits behind run1-grpo-" in second
    assert second.endswith("; free now: 8 on 1 node, 0 on 1 node")


def test_run_without_a_gang_does_not_wait_for_gpus() -> None:
    waiting = [entry(flow_run(8, nodes=2, number=1)), entry(flow_run(None, number=2))]

    scheduling_pass = run_pass(waiting, [holder({"n1": 8}, 0)])

    assert started(scheduling_pass) == ["run2"]


def test_pool_limit_is_kept() -> None:
    waiting = [entry(flow_run(1, number=number)) for number in (1, 2, 3)]

    scheduling_pass = run_pass(waiting, [holder({"n1": 1}, 0)], limit=2)

    assert started(scheduling_pass) == ["run1"]
    assert "is at its limit of 2 runs" in scheduling_pass.messages[waiting[1].id].text


def test_limit_of_a_pools_queue_is_kept() -> None:
    waiting = [entry(flow_run(1, number=number)) for number in (1, 2, 3)]
    queue = QUEUE.model_copy(update={"concurrency_limit": 2})

    scheduling_pass = run_pass(waiting, [holder({"n1": 1}, 0)], limit=8, queue=queue)

    assert started(scheduling_pass) == ["run1"]
    assert "gang/default is at its limit of 2 runs" in scheduling_pass.messages[waiting[1].id].text


def test_limit_of_a_deployment_is_kept() -> None:
    of_deployment = {"deployment_id": DEPLOYMENT}
    waiting = [entry(flow_run(1, number=number, **of_deployment)) for number in (1, 2, 3)]
    waiting.append(entry(flow_run(1, number=4)))

    scheduling_pass = run_pass(
        waiting,
        [holder({"n1": 1}, 0, **of_deployment)],
        deployment_limit=DeploymentLimit(limit=2),
    )

    assert started(scheduling_pass) == ["run1", "run4"]
    message = scheduling_pass.messages[waiting[1].id]
    assert (
        message.text
        == "needs 1 node with 1 GPU; waits because its deployment has reached its limit of 2 runs"
    )


def test_stopping_run_counts_for_the_limit_of_its_deployment() -> None:
    stopping = holder({"n1": 1}, 0, deployment_id=DEPLOYMENT)
    cancelling = State(id=uuid4(), type=StateType.CANCELLING, name="Cancelling")
    stopping.flow_run.state = cancelling.model_copy(update={"timestamp": stopping.state_since})
    waiting = [entry(flow_run(1, number=1, deployment_id=DEPLOYMENT))]

    scheduling_pass = run_pass(waiting, [stopping], deployment_limit=DeploymentLimit(limit=1))

    assert started(scheduling_pass) == []


def test_run_that_only_the_server_counts_keeps_its_deployment_at_the_limit() -> None:
    waiting = [entry(flow_run(1, number=1, deployment_id=DEPLOYMENT))]

    scheduling_pass = run_pass(waiting, deployment_limit=DeploymentLimit(limit=1, active=1))

    assert started(scheduling_pass) == []


ONE_AT_A_TIME = DeploymentLimit(limit=1, skips=True)


def of_deployment(number: int, **more: Any) -> QueueEntry:
    """Return the queue's entry of a waiting run that was created from the deployment DEPLOYMENT."""
    return entry(flow_run(1, number=number, deployment_id=DEPLOYMENT, **more))


def skipped(scheduling_pass: SchedulingPass) -> dict[str, str]:
    """Return a mapping from the name of each skipped flow run to the reason."""
    return {run.entry.flow_run.name: run.message for run in scheduling_pass.skipped}


def test_deployment_skips_a_run_while_the_last_run_is_running() -> None:
    running = holder({"n1": 1}, 0, deployment_id=DEPLOYMENT)

    scheduling_pass = run_pass([of_deployment(1)], [running], deployment_limit=ONE_AT_A_TIME)

    assert skipped(scheduling_pass) == {
        "run1": "skipped: the deployment allows 1 run at a time, and "
        f"{running.request.name} has not ended"
    }
    assert started(scheduling_pass) == []


def test_deployment_skips_a_run_while_the_last_run_waits() -> None:
    waiting = [of_deployment(number) for number in (1, 2, 3)]
    full = [holder({"n1": 8}, 8), holder({"n2": 8}, 9)]

    scheduling_pass = run_pass(waiting, full, deployment_limit=ONE_AT_A_TIME)

    assert [*skipped(scheduling_pass)] == ["run2", "run3"]
    assert [entry.flow_run.name for entry in scheduling_pass.waiting] == ["run1"]


def test_deployment_never_skips_a_requeued_run() -> None:
    running = holder({"n1": 1}, 0, deployment_id=DEPLOYMENT)
    waiting = [of_deployment(1), of_deployment(2, run_count=1)]

    while_running = run_pass(waiting, [running], deployment_limit=ONE_AT_A_TIME)
    while_free = run_pass(waiting, deployment_limit=ONE_AT_A_TIME)

    assert [*skipped(while_running)] == ["run1"]
    assert started(while_running) == []
    assert [*skipped(while_free)] == ["run1"]
    assert started(while_free) == ["run2"]


def test_deployment_without_an_active_run_skips_nothing() -> None:
    scheduling_pass = run_pass([of_deployment(1)], deployment_limit=ONE_AT_A_TIME)

    assert skipped(scheduling_pass) == {}
    assert started(scheduling_pass) == ["run1"]


def test_full_pool_does_not_block_a_run_with_a_process() -> None:
    """A waiting run that has a process is already counted towards the pool's concurrency limit.

    The start of this run does not increase the count. So the run may start although the limit is
    reached.
    """
    in_process = flow_run(8, number=2, type=StateType.RUNNING, name="PendingResources")
    waiting = [entry(flow_run(8, number=1)), entry(in_process)]

    scheduling_pass = run_pass(waiting, [holder({"n1": 8}, 0)], limit=2)

    assert started(scheduling_pass) == ["run2"]


def test_runs_without_ray_start_only_on_hosts_with_a_worker() -> None:
    waiting = [entry(flow_run(5, number=number)) for number in (1, 2)]

    scheduling_pass = run_pass(waiting, hosts=frozenset({"n2"}))

    assert [dict(gpus) for _entry, gpus in scheduling_pass.admitted] == [{"n2": 5}]
    text = scheduling_pass.messages[waiting[1].id].text
    assert (
        "the run would fit on nodes without a worker: n1 (start a worker there: prefect worker "
        "start --pool gang)" in text
    )


def test_run_that_waits_in_its_process_starts_only_on_its_host() -> None:
    here = {"type": StateType.RUNNING, "name": "PendingResources"}
    labels = {"muster.gang.host": "n2"}
    waiting = [entry(flow_run(4, number=number, labels=labels, **here)) for number in (1, 2, 3)]

    scheduling_pass = run_pass(waiting, hosts=frozenset({"n1"}))

    assert [dict(gpus) for _entry, gpus in scheduling_pass.admitted] == [{"n2": 4}] * 2


def test_runs_on_a_host_get_free_devices() -> None:
    node = ClusterNode(name="n1", gpus=8, devices=tuple(range(8)), leased={2: "foreign-run"})
    grant = Grant(nodes={"n1": 2}, devices={"n1": (0, 5)}, state_id="", at=NOW, by=None)
    other = replace(holder({"n1": 2}, 0), grant=grant)
    waiting = [entry(flow_run(2, number=1)), entry(flow_run(3, number=2))]

    scheduling_pass = run_pass(waiting, [other], nodes=(node,))

    assert [dict(scheduling_pass.devices[entry.id]) for entry in waiting] == [
        {"n1": (1, 3)},
        {"n1": (4, 6, 7)},
    ]


def test_program_with_a_lease_and_without_a_grant_is_named() -> None:
    deleted_run = str(uuid4())
    leased = {0: str(UUID(int=1)), 1: deleted_run, 2: deleted_run, 3: "another-lease", 4: ""}
    node = ClusterNode(
        name="n1",
        gpus=8,
        devices=tuple(range(8)),
        leased=leased,
        run_ids={deleted_run: "by-hand-sft-20260101-000000-aaaa91c2"},
    )

    scheduling_pass = run_pass([], [holder({"n1": 1}, 0)], nodes=(node,))

    [shown] = scheduling_pass.nodes[""]
    assert shown.held == {"run0-grpo-20260102-120000-00000001": 1}
    assert shown.other_holders == {
        "by-hand-sft-20260101-000000-aaaa91c2": 2,
        "another-lease": 1,
        "an unknown program": 1,
    }
    assert shown.free_gpus == 3


def test_run_without_a_grant_on_a_ray_cluster_is_named() -> None:
    used = {"orphan-sft-20260101-000000-aaaa91c2": {"n1": 4.0}}
    cluster = Cluster(nodes=(ClusterNode(name="n1", gpus=8),), used=used)

    scheduling_pass = run_pass([], clusters={"http://ray": cluster})

    [shown] = scheduling_pass.nodes["http://ray"]
    assert shown.other_holders == {"orphan-sft-20260101-000000-aaaa91c2": 4.0}
    assert shown.free_gpus == 4


def test_run_without_a_work_pool_says_so_and_delays_no_other_run() -> None:
    lost = entry(flow_run(8, number=0), pool="")
    later = entry(flow_run(8, number=1))

    scheduling_pass = run_pass([lost, later], nodes=(ClusterNode(name="n1", gpus=8),))

    assert started(scheduling_pass) == ["run1"]
    assert "its work queue was deleted" in scheduling_pass.messages[lost.id].text


def test_grant_round_trips() -> None:
    grant = Grant(
        nodes={"fe80::1": 2, "n2": 1},
        devices={"fe80::1": (0, 5), "n2": (3,)},
        state_id="",
        at=NOW,
        by=None,
    )

    read = grant_of(flow_run(2, labels=grant.label(), type=StateType.RUNNING, name="Running"))

    assert read == grant


def test_queue_without_a_worker_reserves_nothing() -> None:
    waiting = [entry(flow_run(8, nodes=2, number=1))]
    queue = QUEUE.model_copy(update={"status": WorkQueueStatus.NOT_READY})

    scheduling_pass = run_pass(waiting, queue=queue)

    assert started(scheduling_pass) == []
    assert "no worker serves the queue default of the work pool gang" in (
        scheduling_pass.messages[waiting[0].id].text
    )


def test_tag_limit_counts_over_all_clusters() -> None:
    spec = {"tags": ["red"], "ray": {"address": "http://a:8265"}}
    other = {"tags": ["red"], "ray": {"address": "http://b:8265"}}
    waiting = [
        entry(flow_run(4, number=1, spec=spec)),
        entry(flow_run(4, number=2, spec=other)),
        entry(flow_run(4, number=3, spec={**other, "tags": []})),
    ]
    clusters = {f"http://{name}:8265": Cluster(nodes=TWO_NODES) for name in "ab"}

    scheduling_pass = run_pass(waiting, clusters=clusters, limits={"red": 6})

    assert started(scheduling_pass) == ["run1", "run3"]
    assert (
        "waits because all runs with the tag red together may use at most 6 GPUs"
        in scheduling_pass.messages[waiting[1].id].text
    )


def test_unreadable_cluster_blocks_only_its_own_runs() -> None:
    away = entry(flow_run(8, number=1, spec={"ray": {"address": "http://away:8265"}}))
    here = entry(flow_run(8, number=2))

    scheduling_pass = run_pass([away, here])

    assert started(scheduling_pass) == ["run2"]
    assert "waits for its Ray cluster, http://away:8265" in scheduling_pass.messages[away.id].text


def test_only_late_grants_are_removed() -> None:
    def granted(number: int, at: float, **nodes: int) -> QueueEntry:
        grant = Grant(nodes=nodes, state_id="", at=at, by=None)
        run = flow_run(max(nodes.values()), number=number)
        return replace(entry(run), grant=grant)

    late = [granted(2, NOW + 2, n1=8), granted(3, NOW + 3, n1=1)]
    others = [granted(1, NOW + 1, n1=8), granted(4, NOW + 4, n2=8)]

    assert find_overgranted([*late, *others], {"": Cluster(nodes=TWO_NODES)}) == late


def test_early_grant_is_kept_and_does_not_make_a_later_grant_void() -> None:
    def granted(number: int, **more: Any) -> QueueEntry:
        grant = Grant(nodes={"n1": 8}, at=NOW + number, **more)
        return replace(entry(flow_run(8, number=number)), grant=grant)

    overgranted = find_overgranted(
        [granted(1, is_early=True), granted(2)], {"": Cluster(nodes=TWO_NODES)}
    )

    assert overgranted == []


def test_pools_of_one_cluster_share_queue_drains_and_smaller_limit() -> None:
    first = PoolSettings(policy="backfill", drained=("n1",), limits={"red": 8})
    other = PoolSettings(policy="fifo", drained=("n2",), limits={"red": 4, "blue": 2})

    both = merge_settings([first, other])

    assert (both.policy, both.drained, both.limits) == ("fifo", ("n1", "n2"), {"red": 4, "blue": 2})
    assert merge_settings([first, first]).policy == "backfill"


def test_node_tables_of_pools_are_merged_by_host_name() -> None:
    tables = [{"n1": 4, "n2": 8}, {"n1": 8, "n3": 2}]
    settings = [
        PoolSettings.model_validate({"nodes": [{"name": n, "gpus": g} for n, g in table.items()]})
        for table in tables
    ]

    merged = {node.name: node.gpus for node in merge_settings(settings).nodes}

    assert merged == {"n1": 8, "n2": 8, "n3": 2}


def test_estimate_counts_from_the_grant_and_overrun_ends_now() -> None:
    def first_start(at: float, **gang: Any) -> float | None:
        grant = Grant(nodes={"n1": 8}, state_id="", at=at, by=None)
        running = flow_run(number=0, type=StateType.RUNNING, labels=grant.label(), spec=gang)
        waiting = entry(flow_run(8, number=1))
        scheduling_pass = run_pass([waiting], [entry(running)], nodes=TWO_NODES[:1])
        return scheduling_pass.messages[waiting.id].starts_at

    hour = {"gang": {"gpus_per_node": 8, "hours": 1}}
    limited = {"gang": {"gpus_per_node": 8, "hours": 4, "max_hours": 2}}
    # The expected duration of the run is counted from the time at which the run received its GPUs,
    # not from the time at which its state became RUNNING.
    assert first_start(NOW - 60, **hour) == NOW - 60 + 3600
    assert first_start(NOW - 60, **limited) == NOW - 60 + 7200
    assert first_start(NOW - 3 * 3600, **hour) == NOW


def test_paused_pool_starts_nothing_and_says_so() -> None:
    waiting = [entry(flow_run(1, number=1))]

    scheduling_pass = run_pass(waiting, paused=True)

    assert started(scheduling_pass) == []
    assert "the work pool gang is paused" in scheduling_pass.messages[waiting[0].id].text


def test_requeued_run_blocks_later_runs_until_its_retry() -> None:
    requeued = flow_run(1, number=1, labels=requeue_labels(not_before=NOW + 5))
    waiting = [entry(requeued), entry(flow_run(1, number=2))]

    scheduling_pass = run_pass(waiting)

    assert started(scheduling_pass) == []
    assert "was requeued" in scheduling_pass.messages[waiting[0].id].text


def test_drained_node_gets_no_new_runs_and_keeps_running_runs() -> None:
    nodes = (ClusterNode(name="n1", gpus=8, is_drained=True), ClusterNode(name="n2", gpus=8))
    waiting = [entry(flow_run(4, number=number)) for number in (1, 2, 3)]

    scheduling_pass = run_pass(waiting, [holder({"n1": 4}, 0)], nodes=nodes)

    assert [dict(gpus) for _entry, gpus in scheduling_pass.admitted] == [{"n2": 4}, {"n2": 4}]
    assert list(scheduling_pass.held.values()) == [{"n1": 4}]


def held_on_missing_nodes(scheduling_pass: SchedulingPass) -> dict[str, dict[str, int]]:
    """Return the GPUs that runs hold on missing nodes: `{node_name: {run_name: gpus}}`."""
    return {
        node.name: {run_id.split("-")[0]: gpus for run_id, gpus in node.held.items()}
        for node in scheduling_pass.list_missing_nodes()
    }


def test_holders_are_named_if_the_nodes_of_their_cluster_are_unknown() -> None:
    cluster = {"ray": {"address": "http://away:8265"}}
    holding = [
        holder({"n1": 2}, 0),
        holder({"n1": 1}, 1),
        holder({"a": 8, "b": 8}, 2, spec=cluster),
    ]

    scheduling_pass = run_pass([], holding, clusters={"http://other:8265": Cluster(nodes=())})

    assert held_on_missing_nodes(scheduling_pass) == {
        "n1": {"run0": 2, "run1": 1},
        "a": {"run2": 8},
        "b": {"run2": 8},
    }
    [_, missing] = [node for node in scheduling_pass.list_missing_nodes() if node.name in "ab"]
    assert (missing.cluster, missing.gpus, missing.free_gpus) == ("http://away:8265", 8, 0)


def test_holder_on_a_node_that_the_pool_no_longer_lists_is_named() -> None:
    scheduling_pass = run_pass([], [holder({"n1": 2}, 0), holder({"gone": 4}, 1)])

    assert held_on_missing_nodes(scheduling_pass) == {"gone": {"run1": 4}}


def test_holder_without_a_flow_run_is_named_on_a_machine_that_no_pool_lists() -> None:
    known = holder({"here": 1}, 0)
    machine = ClusterNode(
        name="here",
        gpus=8,
        devices=tuple(range(8)),
        leased={0: str(known.id), 3: "flow-run-of-nobody"},
        run_ids={"flow-run-of-nobody": "deleted-run"},
    )

    scheduling_pass = run_pass([], [known])

    [node] = scheduling_pass.list_missing_nodes(machine)
    assert node.held == {known.request.name: 1}
    assert node.other_holders == {"deleted-run": 1}
    listed = replace(machine, name="n1")
    assert [node.name for node in scheduling_pass.list_missing_nodes(listed)] == ["here"]


def test_starts_of_a_pass_count_for_tag_limits() -> None:
    waiting = [entry(flow_run(6, number=number, tags=["team"])) for number in (1, 2)]

    scheduling_pass = run_pass(waiting, limits={"team": 8})

    assert started(scheduling_pass) == ["run1"]
    assert scheduling_pass.count_gpus_of_tag("team") == 6
    assert "together may use at most 8 GPUs" in scheduling_pass.messages[waiting[1].id].text


def test_grant_is_void_after_its_state() -> None:
    run = flow_run(8)
    assert run.state is not None
    granted = Grant(
        nodes={"n1": 8}, state_id=str(run.state.id), at=NOW, by=SchedulerProcess.current()
    )
    run.labels = granted.label()

    grant_before = grant_of(run)
    old_state = run.state
    run.state = State(id=uuid4(), type=StateType.SCHEDULED, name="PendingResources")

    assert grant_before == granted
    assert grant_of(run) is None
    run.state = State(id=uuid4(), type=StateType.PENDING, name="Pending")
    assert grant_of(run) == granted
    run.state = old_state
    run.labels = {**run.labels, **no_grant_labels()}
    assert grant_of(run) is None


def test_grant_supports_node_names_with_colons() -> None:
    run = flow_run(8, type=StateType.RUNNING)
    run.labels = Grant(nodes={"fe80::1": 8}, state_id="", at=NOW, by=None).label()

    granted = grant_of(run)

    assert granted is not None
    assert granted.nodes == {"fe80::1": 8}


def test_running_jobs_hold_their_gang_without_a_process() -> None:
    run = flow_run(8, name="AwaitingRetry", run_count=1)
    granted = Grant(nodes={"n1": 8}, state_id="an earlier state", at=NOW, by=None)
    run.labels = {**granted.label(), **handover_labels(run)}

    before = (is_handed_over(run), grant_of(run))
    run.run_count = 2

    assert before == (True, granted)
    # The flow run was retried and got another process after the grant, so the grant is no longer
    # valid.
    assert (is_handed_over(run), grant_of(run)) == (False, None)


@pytest.mark.parametrize(
    ("spec", "fault"),
    [
        ({"gang": {"gpus_per_node": "many"}}, "gang.gpus_per_node: must be a whole number"),
        ({"gang": {"gpus": 8}}, "gang.gpus: unknown key"),
    ],
)
def test_invalid_gang_is_a_fault(spec: dict[str, Any], fault: str) -> None:
    run = flow_run(spec=spec)

    assert fault in parse_request(run).fault
    assert fault in find_spec_fault(run)


@pytest.mark.parametrize(
    ("command", "fault"), [("true", ""), ("${rollout.port}", "unknown name `${rollout.port}`")]
)
def test_component_left_out_by_the_form_is_absent(command: str, fault: str) -> None:
    components = {"rollout": None, "trainer": {"command": [command]}}
    order = ["rollout", "trainer"]

    message = find_spec_fault(flow_run(spec={"components": components, "start_order": order}))

    assert fault in message and bool(fault) == bool(message)


def test_spec_with_all_default_values_is_valid() -> None:
    """`muster train` stores the spec on the Prefect server with the default values of all keys."""
    component = {"command": ["true"], "stop": {"grace_s": 2}}
    spec = parse_spec({"name": "trial", "workload": "grpo", "components": {"trainer": component}})
    run = flow_run()

    run.parameters = train.serialize_parameters({"spec": spec})

    assert find_spec_fault(run) == ""


def test_unknown_parameter_beside_the_spec_is_a_fault() -> None:
    run = flow_run()
    run.parameters = {**run.parameters, "seed": 1}

    assert find_spec_fault(run).startswith("unknown parameter seed: the flow train accepts only")


def test_tags_of_processes_are_no_tags_of_the_run() -> None:
    run = flow_run(spec={"tags": ["demo"]}, tags=["team-a", make_process_tag()])

    assert parse_request(run).tags == {"demo", "team-a"}


def test_flow_run_of_another_flow_needs_no_gpus() -> None:
    run = flow_run(None)
    run.parameters = {"address": "http://127.0.0.1:8265"}

    asked = parse_request(run)

    assert (asked.name, asked.demand, asked.fault, find_spec_fault(run)) == ("run0", None, "", "")


@pytest.mark.parametrize(
    ("durations", "is_assumed"), [({}, True), ({"hours": 24}, False), ({"max_hours": 5}, False)]
)
def test_duration_is_assumed_if_the_spec_names_none(
    durations: dict[str, float], is_assumed: bool
) -> None:
    run = flow_run(spec={"gang": {"gpus_per_node": 8, **durations}})

    assert parse_request(run).is_estimate_assumed is is_assumed


#: Time at which the run reports its expected end: one minute after the run received its GPUs.
REPORTED_AT = NOW + 60.0
HOUR_S = 3600.0


def holder_with_labels(gang: dict[str, Any], labels: dict[str, Any]) -> QueueEntry:
    """Return the queue's entry of a run that holds all GPUs of node n1.

    Args:
        gang: Further keys of the section `gang` of the run's spec.
        labels: Further labels of the flow run.
    """
    granted = Grant(nodes={"n1": 8}, state_id="", at=NOW, by=None).label()
    spec = {"gang": {"nodes": 1, "gpus_per_node": 8, **gang}}
    running = flow_run(
        8, type=StateType.RUNNING, name="Running", labels=granted | labels, spec=spec
    )
    return entry(running)


@pytest.mark.parametrize(
    ("gang", "ends_after_h", "expected_h", "is_assumed"),
    [
        # the run has not reported its expected end, so the end is computed from the spec's key
        # `hours`, by default 24
        ({}, None, 24.0, True),
        ({"hours": 4}, None, 4.0, False),
        # the run has reported an expected end, which replaces the default of 24 hours
        ({}, 2.0, 2.0, False),
        ({}, 30.0, 30.0, False),
        # `hours` and `max_hours` in the spec limit the duration of the run. An expected end after
        # this limit is replaced by the limit
        ({"hours": 4}, 2.0, 2.0, False),
        ({"hours": 4}, 30.0, 4.0, False),
        ({"max_hours": 4}, 30.0, 4.0, False),
    ],
)
def test_expected_start_follows_from_the_progress_of_the_active_run(
    gang: dict[str, Any], ends_after_h: float | None, expected_h: float, is_assumed: bool
) -> None:
    labels = {}
    if ends_after_h is not None:
        labels = expected_end_labels(NOW + ends_after_h * HOUR_S, at=REPORTED_AT)
    waiting = entry(flow_run(8, number=1))

    scheduling_pass = run_pass(
        [waiting], [holder_with_labels(gang, labels)], nodes=(ClusterNode(name="n1", gpus=8),)
    )

    message = scheduling_pass.messages[waiting.id]
    assert message.starts_at == NOW + expected_h * HOUR_S
    assert message.is_start_assumed is is_assumed


@pytest.mark.parametrize(
    "labels",
    [
        expected_end_labels(NOW + 2 * HOUR_S, at=NOW - 60.0),  # of an earlier attempt
        {key: "soon" for key in expected_end_labels(NOW, at=NOW)},
        {key: '{"ends_at": "nan", "at": 1e300}' for key in expected_end_labels(NOW, at=NOW)},
    ],
)
def test_outdated_or_invalid_expected_end_is_ignored(labels: dict[str, Any]) -> None:
    waiting = entry(flow_run(8, number=1))

    scheduling_pass = run_pass(
        [waiting], [holder_with_labels({}, labels)], nodes=(ClusterNode(name="n1", gpus=8),)
    )

    assert scheduling_pass.messages[waiting.id].starts_at == NOW + 24 * HOUR_S
