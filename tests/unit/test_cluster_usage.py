"""Snapshots of a Ray cluster name the users of its resources.

The last tests use clusters that are slow, gone or moved, and a server that is no cluster.
"""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import grpc
import pytest
import pytest_asyncio
from ray._private.authentication import authentication_utils
from ray._private.authentication import grpc_authentication_client_interceptor as interceptor
from ray.core.generated import autoscaler_pb2 as autoscaler_messages
from ray.core.generated import autoscaler_pb2_grpc as autoscaler_services
from ray.core.generated import gcs_service_pb2 as messages
from ray.core.generated import gcs_service_pb2_grpc as services

from tasks.ray import usage
from tasks.ray.dashboard import Credentials, Denied, NoAnswer
from tasks.ray.usage import (
    ActorReport,
    Cluster,
    ClusterReader,
    NodeReport,
    compute_usage,
    run_id_of_submission,
)

RUN = "trial-sft-20260102-030405-0a1b91c2"
ONE, TWO = "0a1b2c3d" * 7, "4e5f6071" * 7
#: Name of the gRPC metadata entry that contains Ray's token.
TOKEN = "authorization"
JOB, FOREIGN_JOB = "01000000", "02000000"
SUBMISSIONS = {JOB: f"{RUN}--a01", FOREIGN_JOB: ""}
#: Deadlines in seconds. LONG_S is for clusters that answer, even on a busy machine. SHORT_S is for
#: clusters that do not answer.
LONG_S, SHORT_S = 30.0, 0.5


def node(node_id: str = ONE, name: str = "n1", used: dict[str, float] | None = None) -> NodeReport:
    """Return the report of a node with 8 GPUs and 32 CPUs.

    `used` maps the name of a resource to the amount in use.
    """
    own = {"GPU": 8.0, "CPU": 32.0, "worker_node": 100.0, "memory": 1e9, "node:10.0.0.5": 1.0}
    free = {key: amount - (used or {}).get(key, 0.0) for key, amount in own.items()}
    return NodeReport(node_id=node_id, name=name, own=own, available=free)


def with_group(node: NodeReport, job: str, *bundles: dict[str, float]) -> NodeReport:
    """Return the report of a node after a Ray job has created a placement group on the node.

    The report then also lists the resources of the placement group, under Ray's names.
    """
    group = "0f" * 14 + job
    made = {**node.grouped, f"bundle_group_{group}": 1000.0 * len(bundles)}
    available = dict(node.available)
    for index, bundle in enumerate(bundles):
        for key, amount in bundle.items():
            made[f"{key}_group_{index}_{group}"] = amount
            made[f"{key}_group_{group}"] = made.get(f"{key}_group_{group}", 0.0) + amount
            available[key] = available.get(key, 0.0) - amount
    return replace(node, available=available, grouped=made)


def actor(job: str = JOB, name: str = "", node_id: str = ONE, **resources: float) -> ActorReport:
    return ActorReport(node_id=node_id, name=name, job_id=job, resources=resources)


def test_all_resources_of_an_idle_cluster_are_free() -> None:
    use = compute_usage([node()], [], {})

    [found] = use.nodes
    assert (found.name, found.gpus, found.cpus) == ("n1", 8, 32)
    assert (found.others_gpus, found.others_cpus) == (0, 0)
    assert found.resources == {"worker_node": 100, "node:10.0.0.5": 1}
    assert (use.used, use.accelerator) == ({}, "GPU")


def test_placement_groups_belong_to_the_run_of_their_job() -> None:
    mine = with_group(node(), JOB, {"CPU": 1}, {"GPU": 4, "CPU": 12})
    both = with_group(mine, FOREIGN_JOB, {"GPU": 1, "CPU": 1})

    use = compute_usage([both], [], SUBMISSIONS)

    assert use.used == {RUN: {"n1": 4}}
    assert use.nodes[0].others_gpus == 1
    # `others_cpus` is the number of CPUs that the queue cannot grant: the CPU of the foreign job,
    # and the CPU of the bundle `{"CPU": 1}`, because this bundle has no GPUs.
    assert use.nodes[0].others_cpus == 2


def test_actors_outside_placement_groups_belong_to_their_driver() -> None:
    busy = node(used={"GPU": 5.5, "CPU": 10})
    actors = [
        actor(GPU=2, CPU=3),
        actor(GPU=0.5),
        actor(FOREIGN_JOB, GPU=1),
        # an actor in a placement group is ignored: its resources already count for the group
        actor(**{f"GPU_group_0_{'0f' * 14}{JOB}": 1}),
        # the driver of this actor is unknown, so the actor's GPU does not count as used by the run
        actor("03000000", GPU=1),
    ]

    use = compute_usage([busy], actors, SUBMISSIONS)

    assert use.used == {RUN: {"n1": 2.5}}
    # A plain Ray task uses a GPU. This GPU counts as used by others, because the task's owner is
    # unknown.
    assert use.nodes[0].others_gpus == 3
    assert use.nodes[0].others_cpus == 7


def test_gpus_of_an_entrypoint_belong_to_the_run() -> None:
    name = f"_ray_internal_job_actor_{RUN}--a02"

    use = compute_usage([node(used={"GPU": 1})], [actor("05000000", name, GPU=1)], {})

    assert use.used == {RUN: {"n1": 1}}
    assert use.nodes[0].others_gpus == 0


def test_actor_newer_than_the_node_report_takes_nothing_from_others() -> None:
    use = compute_usage([node()], [actor(GPU=2)], SUBMISSIONS)

    assert use.used == {RUN: {"n1": 2}}
    assert use.nodes[0].others_gpus == 0


def test_node_without_a_report_of_free_resources_counts_as_used() -> None:
    use = compute_usage([replace(node(), available={})], [], {})

    assert (use.nodes[0].gpus, use.nodes[0].others_gpus) == (8, 8)


def test_nodes_with_equal_names_get_a_suffix() -> None:
    reports = [node(TWO, "host"), node(ONE, "host"), node("ff" * 28, "alone")]

    use = compute_usage(reports, [actor(node_id=TWO, GPU=1)], SUBMISSIONS)

    assert [one.name for one in use.nodes] == ["alone", "host/0a1b2c3d", "host/4e5f6071"]
    assert use.used == {RUN: {"host/4e5f6071": 1}}


@pytest.mark.parametrize(
    ("has", "accelerator"),
    [
        (({"NPU": 8.0},), "NPU"),
        # a cluster with NPUs and GPUs counts as a cluster with GPUs
        (({"NPU": 8.0}, {"GPU": 1.0}), "GPU"),
        (({"HPU": 8.0}, {"TPU": 4.0}), "HPU"),
        (({"TPU": 4.0},), "TPU"),
        (({},), "GPU"),
    ],
)
def test_accelerator_of_a_cluster_is_the_accelerator_of_its_nodes(
    has: tuple[dict[str, float], ...], accelerator: str
) -> None:
    nodes = [
        NodeReport(node_id=f"{index:056x}", name=f"n{index}", own=own, available=own)
        for index, own in enumerate(has)
    ]

    assert compute_usage(nodes, [], {}).accelerator == accelerator


@pytest.mark.parametrize(
    ("submission_id", "run_id"),
    [
        (f"{RUN}--a01", RUN),
        (f"{RUN}--a123", RUN),
        (f"{RUN}--a01-trainer", RUN),
        # `--a02` separates the run id from the attempt. The run's name also contains `--a01`, which
        # is no separator
        (f"x--a01-{RUN}--a02-reward--a03", f"x--a01-{RUN}"),
        ("raysubmit_AbCdEfGh12345678", ""),
        (RUN, ""),
        (f"{RUN}--a1", ""),
        ("mine--a01", ""),
        ("", ""),
    ],
)
def test_run_id_is_read_from_the_submission_id(submission_id: str, run_id: str) -> None:
    assert run_id_of_submission(submission_id) == run_id


class Store(
    services.NodeInfoGcsServiceServicer,
    services.NodeResourceInfoGcsServiceServicer,
    services.ActorInfoGcsServiceServicer,
    services.JobInfoGcsServiceServicer,
    services.InternalKVGcsServiceServicer,
    autoscaler_services.AutoscalerStateServiceServicer,
):
    """Fake control store with one node, on which a Muster job has an actor with 2 GPUs."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        #: Entries that were written to the key-value table. Version 1 of Ray's autoscaler reads
        #: this table.
        self.keys: dict[bytes, Any] = {}
        #: Requests to version 2 of Ray's autoscaler, as pairs: resources of a bundle, number of
        #: bundles.
        self.constraints: list[tuple[dict[str, float], int]] = []
        #: Ray tokens in the received requests.
        self.received_tokens: list[str] = []
        #: The control store answers requests while this event is set.
        self.answers = threading.Event()
        self.answers.set()
        self.refuses: grpc.StatusCode | None = None
        self.head = ONE
        self.run_id = RUN
        self._server = grpc.server(ThreadPoolExecutor(8))
        services.add_NodeInfoGcsServiceServicer_to_server(self, self._server)
        services.add_NodeResourceInfoGcsServiceServicer_to_server(self, self._server)
        services.add_ActorInfoGcsServiceServicer_to_server(self, self._server)
        services.add_JobInfoGcsServiceServicer_to_server(self, self._server)
        services.add_InternalKVGcsServiceServicer_to_server(self, self._server)
        autoscaler_services.add_AutoscalerStateServiceServicer_to_server(self, self._server)
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def stop(self) -> None:
        self.answers.set()
        self._server.stop(None).wait()

    def GetAllResourceUsage(self, request: Any, context: grpc.ServicerContext) -> Any:
        self._note("usage", context)
        reply = messages.GetAllResourceUsageReply()
        entry = reply.resource_usage_data.batch.add(node_id=bytes.fromhex(self.head))
        entry.resources_total.update({"GPU": 8})
        entry.resources_available.update({"GPU": 6})
        return reply

    def GetClusterId(self, request: Any, context: grpc.ServicerContext) -> Any:
        self._note("id", context)
        return messages.GetClusterIdReply(cluster_id=bytes.fromhex(self.head))

    def GetAllNodeInfo(self, request: Any, context: grpc.ServicerContext) -> Any:
        self._note("nodes", context)
        reply = messages.GetAllNodeInfoReply()
        for node_id in (self.head, "ee" * 28):
            entry = reply.node_info_list.add(node_id=bytes.fromhex(node_id), node_name="n1")
            entry.resources_total.update({"GPU": 8, "node:__internal_head__": 1})
        return reply

    def GetAllActorInfo(self, request: Any, context: grpc.ServicerContext) -> Any:
        self._note("actors", context)
        reply = messages.GetAllActorInfoReply()
        if request.filters.state == 2:
            entry = reply.actor_table_data.add(job_id=bytes.fromhex(JOB))
            entry.address.node_id = bytes.fromhex(self.head)
            entry.required_resources.update({"GPU": 2})
        elif request.filters.state == 1:
            # This actor is still pending, so it has no node yet.
            reply.actor_table_data.add().required_resources.update({"GPU": 1})
        return reply

    def GetAllJobInfo(self, request: Any, context: grpc.ServicerContext) -> Any:
        self._note("jobs", context)
        reply = messages.GetAllJobInfoReply()
        job = reply.job_info_list.add(job_id=bytes.fromhex(request.job_or_submission_id))
        job.config.metadata["job_submission_id"] = f"{self.run_id}--a01"
        return reply

    def InternalKVPut(self, request: Any, context: grpc.ServicerContext) -> Any:
        self._note("put", context)
        self.keys[request.key] = json.loads(request.value)
        assert request.overwrite
        return messages.InternalKVPutReply()

    def RequestClusterResourceConstraint(self, request: Any, context: grpc.ServicerContext) -> Any:
        self._note("constraint", context)
        requests = request.cluster_resource_constraint.resource_requests
        self.constraints = [(dict(one.request.resources_bundle), one.count) for one in requests]
        return autoscaler_messages.RequestClusterResourceConstraintReply()

    def _note(self, what: str, context: grpc.ServicerContext) -> None:
        self.asked.append(what)
        self.received_tokens += [
            str(value) for key, value in context.invocation_metadata() if key == TOKEN
        ]
        self.answers.wait()
        if self.refuses is not None:
            context.abort(self.refuses, "no")


class FakeDashboard:
    """Fake Ray dashboard that reports the address of Ray's control store."""

    def __init__(self, gcs_address: str) -> None:
        self.now = gcs_address
        self.asked = 0

    async def gcs_address(self) -> str:
        self.asked += 1
        return self.now

    async def aclose(self) -> None:
        pass


@pytest.fixture
def make_store() -> Iterator[Callable[[], Store]]:
    made: list[Store] = []

    def make() -> Store:
        made.append(Store())
        return made[-1]

    yield make
    for store in made:
        store.stop()


@pytest.fixture
def store(make_store: Callable[[], Store]) -> Store:
    return make_store()


@pytest.fixture
def dashboard(store: Store, monkeypatch: pytest.MonkeyPatch) -> FakeDashboard:
    dashboard = FakeDashboard(store.address)
    monkeypatch.setattr(usage, "Dashboard", lambda *_, **__: dashboard)
    return dashboard


@pytest_asyncio.fixture
async def look(dashboard: FakeDashboard) -> AsyncIterator[ClusterReader]:
    look = ClusterReader("http://ray:8265", Credentials(has_token=True))
    yield look
    await look.close()


def expect_two_taken(use: Cluster, run_id: str = RUN) -> None:
    assert use.used == {run_id: {"n1": 2}}
    assert [(node.gpus, node.others_gpus) for node in use.nodes] == [(8, 0)]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("is_listed", "expected_tokens"), [(True, {"Bearer the-token-of-ours"}), (False, set())]
)
async def test_control_store_gets_the_token_only_if_allowed(
    dashboard: FakeDashboard,
    store: Store,
    monkeypatch: pytest.MonkeyPatch,
    is_listed: bool,
    expected_tokens: set[str],
) -> None:
    monkeypatch.setattr(authentication_utils, "is_token_auth_enabled", lambda: True)
    monkeypatch.setattr(
        interceptor,
        "_get_authentication_metadata_tuple",
        lambda: ((TOKEN, "Bearer the-token-of-ours"),),
    )
    look = ClusterReader("http://ray:8265", Credentials(has_token=is_listed))

    use = await look.look(within_s=LONG_S)
    await look.close()

    expect_two_taken(use)
    assert set(store.received_tokens) == expected_tokens


@pytest.mark.asyncio
async def test_both_versions_of_the_autoscaler_get_the_demand(
    look: ClusterReader, store: Store
) -> None:
    await look.look(within_s=LONG_S)
    wanted: list[dict[str, float]] = [{"GPU": 8.0}, {"GPU": 8.0, "CPU": 24.0}]

    await look.show_demand(wanted, within_s=LONG_S)
    shown = store.keys[b"autoscaler_resource_request"], store.constraints
    await look.show_demand([], within_s=LONG_S)

    assert shown == (wanted, [(bundle, 1) for bundle in wanted])
    assert (store.keys[b"autoscaler_resource_request"], store.constraints) == ([], [])


@pytest.mark.asyncio
async def test_unchanging_facts_are_requested_only_once(
    look: ClusterReader, store: Store, dashboard: FakeDashboard
) -> None:
    first = await look.look(within_s=LONG_S)
    store.asked.clear()
    again = await look.look(within_s=LONG_S)

    expect_two_taken(first)
    expect_two_taken(again)
    assert sorted(store.asked) == ["actors", "actors", "actors", "usage"]
    assert dashboard.asked == 1


@pytest.mark.asyncio
async def test_silent_control_store_fails_in_time_and_the_next_read_succeeds(
    look: ClusterReader, store: Store
) -> None:
    await look.look(within_s=LONG_S)
    store.answers.clear()

    with pytest.raises(NoAnswer, match=r"the Ray cluster at \S+ did not answer within 0\.5 s"):
        await look.look(within_s=SHORT_S)
    store.answers.set()

    expect_two_taken(await look.look(within_s=LONG_S))


@pytest.mark.asyncio
async def test_moved_control_store_is_found_by_the_same_read(
    look: ClusterReader, store: Store, dashboard: FakeDashboard, make_store: Callable[[], Store]
) -> None:
    await look.look(within_s=LONG_S)
    dashboard.now = make_store().address
    store.stop()

    expect_two_taken(await look.look(within_s=LONG_S))

    assert dashboard.asked == 2


@pytest.mark.asyncio
async def test_jobs_are_requested_again_for_another_cluster(
    look: ClusterReader, store: Store
) -> None:
    await look.look(within_s=LONG_S)
    store.head, store.run_id = TWO, f"other-{RUN}"

    use = await look.look(within_s=LONG_S)

    expect_two_taken(use, f"other-{RUN}")


@pytest.mark.asyncio
async def test_missing_control_store_raises_no_answer(look: ClusterReader, store: Store) -> None:
    store.stop()

    with pytest.raises(
        NoAnswer, match=f"control store at {store.address} does not answer: UNAVAILABLE"
    ):
        await look.look(within_s=LONG_S)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("code", "error"),
    [
        (grpc.StatusCode.UNAUTHENTICATED, Denied),
        # the control store does not know the method, for example in another Ray release. The error
        # is the same as for a refused request
        (grpc.StatusCode.UNIMPLEMENTED, Denied),
        (grpc.StatusCode.INTERNAL, NoAnswer),
    ],
)
async def test_refusal_is_distinguished_from_failure(
    look: ClusterReader, store: Store, code: grpc.StatusCode, error: type[Exception]
) -> None:
    store.refuses = code

    with pytest.raises(error, match=code.name):
        await look.look(within_s=LONG_S)
