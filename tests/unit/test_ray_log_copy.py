"""Copies of the logs of Ray jobs, from a fake dashboard."""

from __future__ import annotations

import random
import re
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tasks.ray.log_copy import LogCopy


class GrowingLog:
    """A dashboard with the log of one job."""

    def __init__(self) -> None:
        self.content = b""
        #: Number of bytes that were sent.
        self.sent_bytes = 0

    async def log(
        self, submission_id: str, node_id: str, *, last_lines: int | None = None
    ) -> AsyncIterator[bytes]:
        lines = re.findall(rb"[^\n]*\n|[^\n]+$", self.content)
        content = b"".join(lines if last_lines is None else lines[-last_lines:])
        self.sent_bytes += len(content)
        for start in range(0, len(content), 1000):
            yield content[start : start + 1000]


@pytest.fixture
def remote() -> GrowingLog:
    return GrowingLog()


def make_copy(remote: GrowingLog, path: Path) -> LogCopy:
    dashboard: Any = remote
    return LogCopy(dashboard, "r--a01", path)


@pytest.mark.parametrize(
    ("known", "chunks", "log"),
    [
        (b"", [b"abc"], b"abc"),
        (b"ab", [b"abc"], b"abc"),
        (b"abc", [b"abc"], b"abc"),
        # the local copy `known` already has the first chunk from the server and a part of the last
        # chunk
        (b"abcde", [b"abc", b"", b"def"], b"abcdef"),
    ],
)
@pytest.mark.asyncio
async def test_only_missing_bytes_of_a_log_are_copied(
    tmp_path: Path, known: bytes, chunks: list[bytes], log: bytes
) -> None:
    async def log_chunks(*_: object, **__: object) -> AsyncIterator[bytes]:
        for chunk in chunks:
            yield chunk

    dashboard: Any = SimpleNamespace(log=log_chunks)
    path = tmp_path / "trainer.log"
    path.write_bytes(known)

    problem = await LogCopy(dashboard, "r--a01", path).complete("node")

    assert (path.read_bytes(), problem) == (log, "")


@pytest.mark.parametrize("rotation", ["move", "truncate", "remove"])
@pytest.mark.asyncio
async def test_copy_continues_after_the_local_log_was_rotated(
    tmp_path: Path, rotation: str
) -> None:
    remote_log = b"first\n"

    async def read_log(*_: object, **__: object) -> AsyncIterator[bytes]:
        yield remote_log

    dashboard: Any = SimpleNamespace(log=read_log)
    path = tmp_path / "trainer.log"
    log_copy = LogCopy(dashboard, "r--a01", path)
    await log_copy.complete("node")
    match rotation:
        case "move":
            path.rename(tmp_path / "trainer.log.1")
        case "truncate":
            path.write_bytes(b"")
        case "remove":
            path.unlink()
    remote_log += b"second\n"

    problem = await log_copy.complete("node")

    assert (path.read_bytes(), problem) == (b"second\n", "")


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param([b""], [b"a\n"], id="first line"),
        pytest.param([b"a\n"], [b"b\n"], id="short log"),
        pytest.param([b"a\nb"], [b"c\n"], id="line that was incomplete"),
        pytest.param(
            [b"step %d\n" % n for n in range(3000)],
            [b"step %d\n" % n for n in range(3000, 3010)],
            id="long log",
        ),
        pytest.param(
            [b"step %d\n" % n for n in range(3000)],
            [b"step %d\n" % n for n in range(3000, 9000)],
            id="more new lines than are requested",
        ),
        pytest.param([b"same\n"] * 3000, [b"same\n"] * 5, id="equal lines"),
        pytest.param([b"a\n", b"b\n"] * 2000, [b"a\n", b"b\n"] * 700, id="repeated lines"),
        pytest.param([b"\r10 %" * 5000], [b"\r20 %\n"], id="progress bar"),
        pytest.param([b"\xff\xfe\n"] * 1500, [b"\xfa\n"], id="no text"),
    ],
)
@pytest.mark.parametrize("is_new_process", [False, True])
@pytest.mark.asyncio
async def test_growing_log_is_copied_exactly(
    remote: GrowingLog,
    tmp_path: Path,
    first: list[bytes],
    second: list[bytes],
    is_new_process: bool,
) -> None:
    path = tmp_path / "trainer.log"
    copy = make_copy(remote, path)
    remote.content = b"".join(first)
    await copy._copy_new_bytes("node")
    if is_new_process:
        copy = make_copy(remote, path)
    remote.content += b"".join(second)

    await copy._copy_new_bytes("node")

    assert path.read_bytes() == remote.content


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.asyncio
async def test_log_that_grows_at_random_is_copied_exactly(
    remote: GrowingLog, tmp_path: Path, seed: int
) -> None:
    draw = random.Random(seed)
    path = tmp_path / "trainer.log"
    copy = make_copy(remote, path)
    for _ in range(30):
        words = [b"a", b"b", b"\n", b"\n", b"step %d\n" % draw.randrange(5), b"\r"]
        remote.content += b"".join(draw.choices(words, k=draw.choice((0, 1, 50, 3000))))
        if draw.random() < 0.2:
            copy = make_copy(remote, path)
        await copy._copy_new_bytes("node")

        assert path.read_bytes() == remote.content


@pytest.mark.asyncio
async def test_only_the_last_lines_of_a_long_log_are_requested(
    remote: GrowingLog, tmp_path: Path
) -> None:
    copy = make_copy(remote, tmp_path / "trainer.log")
    remote.content = b"".join(b"step %d of the training\n" % n for n in range(100_000))
    await copy._copy_new_bytes("node")
    remote.sent_bytes = 0

    for n in range(10):
        remote.content += b"another line %d\n" % n
        await copy._copy_new_bytes("node")

    assert (tmp_path / "trainer.log").read_bytes() == remote.content
    assert remote.sent_bytes < len(remote.content) / 5
