"""The nodes on which the queue places gangs, and errors when they cannot be read."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from tasks.processes import devices
from tasks.processes.devices import DeviceLease, Devices
from tasks.processes.identity import host_name
from tasks.queue.nodes import Capacity, NoCapacity, mark_drained
from tasks.queue.settings import PoolSettings, TableNode
from tasks.ray.dashboard import Credentials, Denied, ListedCluster, NoAnswer
from tasks.ray.usage import Cluster, ClusterNode
from tests.support.fake_nvml import FakeNvml, Gpu

pytestmark = pytest.mark.asyncio

RAY = "http://ray:8265"
ONE, TWO = "10.0.0.5/0a1b2c3d", "10.0.0.5/4e5f6071"
WITHIN_S = 30.0


def node(name: str, *, is_drained: bool = False) -> ClusterNode:
    return ClusterNode(
        name=name,
        gpus=8,
        cpus=32.0,
        others_gpus=1.5,
        others_cpus=4.0,
        resources={"worker_node": 100.0},
        is_drained=is_drained,
    )


USE = Cluster(
    nodes=(node(ONE), node(TWO), node("far", is_drained=True)),
    used={"run": {ONE: 4.0}},
    accelerator="NPU",
)


class FakeReader:
    """A fake reader that returns scripted results instead of reading a cluster."""

    def __init__(self) -> None:
        self.credentials = Credentials(has_token=False)
        self.answer: Cluster | Exception = USE
        #: Set while the cluster answers. While this event is not set, every read ends with a
        #: time-out.
        self.answers = asyncio.Event()
        self.answers.set()
        self.reads = 0

    async def look(self, *, within_s: float) -> Cluster:
        self.reads += 1
        try:
            async with asyncio.timeout(within_s):
                await self.answers.wait()
        except TimeoutError:
            raise NoAnswer("no answer in time") from None
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    async def close(self) -> None:
        pass


@pytest_asyncio.fixture
async def reader() -> FakeReader:
    return FakeReader()


@pytest_asyncio.fixture
async def capacity(reader: FakeReader) -> AsyncIterator[Capacity]:
    capacity = Capacity(within_s=0.05, make_reader=lambda *_: reader)  # type: ignore[arg-type, return-value]
    yield capacity
    await capacity.close()


async def test_cluster_is_returned_with_its_usage(capacity: Capacity) -> None:
    cluster = await capacity.read_cluster(RAY, {})

    assert cluster == USE


@pytest.mark.parametrize(
    ("drained", "found"),
    [
        # the list of drained nodes is empty, but the node `far` counts as drained, because Ray
        # itself is draining this node
        ((), {"far"}),
        ((ONE,), {ONE, "far"}),
        # an address without a node id stands for all nodes at this address
        (("10.0.0.5",), {ONE, TWO, "far"}),
        # no node has the node id `ffffffff` or the name `gone`, so only the node `far` is drained
        (("10.0.0.5/ffffffff", "gone"), {"far"}),
    ],
)
async def test_nodes_are_drained_by_name_and_by_host(
    capacity: Capacity, drained: tuple[str, ...], found: set[str]
) -> None:
    cluster = mark_drained(await capacity.read_cluster(RAY, {}), drained)

    assert {node.name for node in cluster.nodes if node.is_drained} == found


async def test_runs_without_a_cluster_use_the_node_table(capacity: Capacity) -> None:
    table = (TableNode(name="n1", gpus=8), TableNode(name="n2", gpus=4, cpus=16))

    cluster = await capacity.read_cluster("", {"gang": PoolSettings(nodes=table)})

    assert cluster == Cluster(
        nodes=(
            ClusterNode(name="n1", gpus=8, devices=tuple(range(8))),
            ClusterNode(name="n2", gpus=4, cpus=16.0, devices=tuple(range(4))),
        )
    )


async def test_missing_node_table_is_explained(capacity: Capacity) -> None:
    with pytest.raises(NoCapacity, match=r"lists no nodes.*`muster queue set node.[^ ]+=N`"):
        await capacity.read_cluster("", {})


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (NoAnswer("no answer from http://ray:8265: refused"), "ray:8265: refused"),
        (Denied("401; Ray's token is read from ..."), "token"),
        # the program at the address is not the dashboard of a Ray cluster
        (KeyError("summary"), "http://ray:8265 does not come from a Ray cluster"),
    ],
)
async def test_unreadable_cluster_raises_with_the_reason(
    capacity: Capacity, reader: FakeReader, error: Exception, words: str
) -> None:
    reader.answer = error

    with pytest.raises(NoCapacity, match=words):
        await capacity.read_cluster(RAY, {})
    reader.answer = USE

    assert await capacity.read_cluster(RAY, {}) == USE


@pytest.mark.parametrize(
    ("listed", "own", "said"),
    [
        (
            (),
            "",
            "^401. The work pool .* autoscaler: muster queue set cluster.http://ray:8265=0",
        ),
        ((), RAY, "^401"),
        ((RAY,), "", "^401"),
    ],
)
async def test_refusal_suggests_listing_the_cluster_if_it_is_unlisted(
    reader: FakeReader, listed: tuple[str, ...], own: str, said: str
) -> None:
    reader.answer = Denied("401")
    asked: list[Credentials] = []

    def make(_address: str, credentials: Credentials) -> Any:
        asked.append(credentials)
        return reader

    clusters = tuple(ListedCluster(address=address, headers={"X": "1"}) for address in listed)
    with pytest.raises(NoCapacity, match=said):
        await Capacity(make_reader=make, own_cluster=own).read_cluster(
            RAY, {"gang": PoolSettings(clusters=clusters)}
        )

    assert [one.has_token for one in asked] == [bool(listed or own)]
    assert [dict(one.headers) for one in asked] == [{"X": "1"} if listed else {}]


async def test_changed_credentials_are_used_by_the_next_read(reader: FakeReader) -> None:
    asked: list[bool] = []

    def make(_address: str, credentials: Credentials) -> Any:
        asked.append(credentials.has_token)
        reader.credentials = credentials
        return reader

    capacity = Capacity(make_reader=make)
    listed = PoolSettings(clusters=(ListedCluster(address=RAY),))
    for settings in (PoolSettings(), PoolSettings(), listed, listed):
        await capacity.read_cluster(RAY, {"gang": settings})

    assert asked == [False, True]


async def test_silent_cluster_delays_a_caller_only_once(
    capacity: Capacity, reader: FakeReader
) -> None:
    reader.answers.clear()

    for _ in range(3):
        with pytest.raises(NoCapacity, match="no answer in time"):
            await capacity.read_cluster(RAY, {})
        await asyncio.sleep(0)
    looks_while_silent = reader.reads
    reader.answers.set()
    cluster = await _answer(capacity)

    # Three callers asked while the cluster did not answer. But Muster sent only two requests to the
    # cluster: one request for the first caller, and one request in the background.
    assert looks_while_silent == 2
    assert cluster == USE


async def _answer(capacity: Capacity) -> Cluster:
    async with asyncio.timeout(WITHIN_S):
        while True:
            try:
                return await capacity.read_cluster(RAY, {})
            except NoCapacity:
                await asyncio.sleep(0)


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch, muster_home: Path) -> FakeNvml:
    """A fake GPU driver with two GPUs."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.delenv("MUSTER_GPUS", raising=False)
    monkeypatch.setattr(devices, "_PREFIX", f"muster/test-{os.getpid()}/")
    return FakeNvml.install(monkeypatch, [Gpu(), Gpu()])


async def test_this_machine_has_the_gpus_of_its_driver(nvml: FakeNvml) -> None:
    capacity = Capacity(includes_this_machine=True)

    cluster = await capacity.read_cluster("", {"gang": PoolSettings(drained=("other",))})

    assert cluster == Cluster(nodes=(ClusterNode(name=host_name(), gpus=2, devices=(0, 1)),))


async def test_node_table_overrides_this_machine(nvml: FakeNvml) -> None:
    capacity = Capacity(includes_this_machine=True)

    cluster = await capacity.read_cluster(
        "", {"gang": PoolSettings(nodes=(TableNode(name="n1", gpus=8),))}
    )

    assert [(node.name, node.devices) for node in cluster.nodes] == [("n1", tuple(range(8)))]


async def test_only_grantable_devices_of_this_machine_count(
    nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MUSTER_GPUS", "1")
    table = PoolSettings(nodes=(TableNode(name=host_name(), gpus=8),))

    [node] = (await Capacity().read_cluster("", {"gang": table})).nodes

    assert (node.gpus, node.devices) == (1, (1,))


async def test_leases_of_other_runs_are_reported(nvml: FakeNvml) -> None:
    lease = DeviceLease(Devices.here(), (1,), "somebody")
    try:
        [node] = (await Capacity(includes_this_machine=True).read_cluster("", {})).nodes
    finally:
        lease.close()

    assert node.leased == {1: "somebody"}


async def test_silent_driver_is_an_error_and_not_a_machine_without_gpus(nvml: FakeNvml) -> None:
    nvml.is_silent = True

    with pytest.raises(NoCapacity, match=r"can't be counted: NVML: Driver Not Loaded"):
        await Capacity(includes_this_machine=True).read_cluster("", {})
