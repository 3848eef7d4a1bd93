"""What a run of many components, attempts and days may not slow down or break."""

from __future__ import annotations

import os
import resource
import select
import socket
from collections.abc import Iterator

import pytest

from tasks.processes import tree
from tasks.processes.identity import ProcessId
from tasks.processes.probes import HttpProbe, TcpProbe, make_client
from tasks.processes.progress import ProgressWatch, Silence
from tasks.spec.run import Progress


@pytest.fixture
def many_files() -> Iterator[None]:
    """Each descriptor that is opened has a number above what select(2) is for."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 1200:
        pytest.skip("so many files may not be open here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
    opened = []
    try:
        while not opened or opened[-1] <= 1100:
            opened.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
        yield
    finally:
        for fd in opened:
            os.close(fd)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_port_is_looked_at_whatever_the_number_of_its_socket(many_files: None) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

        assert TcpProbe("127.0.0.1", port).glance()
        assert HttpProbe(f"http://127.0.0.1:{port}/", make_client()).glance()


def test_an_end_is_waited_for_whatever_the_number_of_its_pidfd(many_files: None) -> None:
    assert not ProcessId.of(os.getpid()).is_gone_within(0.0)


def test_what_is_ready_is_known_within_the_time() -> None:
    read, write = os.pipe()

    assert not tree.is_ready(read, select.POLLIN)
    os.write(write, b"x")
    assert tree.is_ready(read, select.POLLIN, 60.0)

    os.close(read)
    os.close(write)


@pytest.mark.asyncio
@pytest.mark.parametrize("every_s", [0.01, 600.0])
async def test_progress_is_looked_at_as_often_as_the_spec_says(
    every_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[float] = []

    class Over(Exception):
        pass

    async def sleep(delay_s: float) -> None:
        pauses.append(delay_s)
        if len(pauses) == 3:
            raise Over

    monkeypatch.setattr("tasks.processes.progress.asyncio.sleep", sleep)
    progress = Progress(jsonl="metrics.jsonl", step="step", every_s=every_s)
    watch = ProgressWatch(
        None,
        Silence(()),
        lambda *_, **__: None,
        total=None,
        limit_s=None,
        is_quiet=lambda: False,
        every_s=progress.every_s,
    )

    with pytest.raises(Over):
        await watch.until_stalled()

    assert pauses == [every_s] * 3
