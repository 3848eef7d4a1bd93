"""Processes in the context `Guards.running`: registered before their start, ended at its end."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tasks.processes import tree
from tasks.processes.guarded import Command
from tasks.processes.guards import Guards
from tasks.processes.registry import EntryWriter, ProcessEntry
from tasks.record.disk import DiskThread
from tests.support.supervised_components import (
    DEADLINE_S,
    FOREVER,
    RUN_ID,
    ComponentHarness,
    is_alive,
    sh,
)

pytestmark = pytest.mark.asyncio

#: A shell script whose child starts a new session. Only the guardian, the process that owns the
#: script's process tree, can still find this child.
WITH_DAEMON = sh("setsid sleep 600 & echo $! > child; exec sleep 600")


class Home:
    """A process registry in the test's directory, and a `Guards` object that starts processes."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.registry = EntryWriter(directory, DiskThread("disk"))
        self.guards = Guards(RUN_ID, 1, self.registry)

    def command(self, argv: tuple[str, ...] = FOREVER, grace_s: float = 0.3) -> Command:
        env = {"PATH": os.environ["PATH"], "MUSTER_RUN_ID": RUN_ID}
        log = self.directory / "log"
        return Command(argv=argv, env=env, cwd=self.directory, log=log, grace_s=grace_s)

    def entries(self) -> list[str]:
        """Wait until the registry is written to disk, and return the names of its entries."""
        assert self.registry.entry_disk.flush(DEADLINE_S)
        prefix = ProcessEntry.file_of("")[: -len(".json")]
        return sorted(
            path.stem.removeprefix(prefix) for path in self.directory.glob(f"{prefix}*.json")
        )

    async def until_written(self, name: str) -> str:
        async with asyncio.timeout(DEADLINE_S):
            while not (path := self.directory / name).exists() or not path.read_text():
                await asyncio.sleep(0.01)
        return path.read_text()


@pytest_asyncio.fixture
async def home(tmp_path: Path, harness: ComponentHarness) -> AsyncIterator[Home]:
    """Yield a `Home`, which starts and registers processes. No process may outlive the test."""
    tree.become_subreaper()
    home = Home(tmp_path)
    yield home
    await home.guards.close()
    assert harness.list_survivors() == {}


@pytest.mark.parametrize(("part", "name"), [("", "api"), ("r0", "api.r0")])
async def test_process_is_registered_before_its_program_is_executed(
    home: Home, part: str, name: str
) -> None:
    lists_entries = sh("ls > seen; exec sleep 600")

    async with home.guards.running("api", part, home.command(lists_entries)):
        seen = await home.until_written("seen")

    assert ProcessEntry.file_of(name) in seen.split()
    assert home.entries() == []


async def test_end_of_the_context_ends_the_whole_process_tree(home: Home) -> None:
    async with home.guards.running("api", "", home.command(WITH_DAEMON)) as process:
        child = int(await home.until_written("child"))
        first = process.pid or 0

    assert not is_alive(child) and not is_alive(first)
    assert process.leftover_pids == ()


async def test_error_in_the_context_ends_the_process_and_is_raised(home: Home) -> None:
    with pytest.raises(RuntimeError, match="a bug"):
        async with home.guards.running("api", "", home.command()) as process:
            raise RuntimeError("a bug")

    assert not is_alive(process.pid or 0)
    assert home.entries() == []


async def test_program_that_cannot_be_executed_leaves_no_entry(home: Home) -> None:
    with pytest.raises(FileNotFoundError):
        async with home.guards.running("api", "", home.command(("no-such-program",))):
            raise AssertionError("the program does not exist")

    assert home.entries() == []


async def test_process_that_cannot_be_registered_is_not_executed(home: Home) -> None:
    home.registry.directory = home.directory / "not-there"

    with pytest.raises(FileNotFoundError):
        async with home.guards.running("api", "", home.command(sh("touch ran"))):
            raise AssertionError("the process is not registered")

    assert not (home.directory / "ran").exists()


async def test_close_waits_for_a_process_whose_context_was_cancelled_twice(home: Home) -> None:
    saves = sh("trap 'sleep 0.5; echo yes > saved; exit' TERM; echo up > up; sleep 600 & wait")
    entered = asyncio.Event()

    async def run() -> None:
        async with home.guards.running("api", "", home.command(saves, grace_s=DEADLINE_S)):
            entered.set()
            await asyncio.Event().wait()

    running = asyncio.create_task(run())
    await entered.wait()
    await home.until_written("up")
    running.cancel()
    await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait([running])
    left = await home.guards.close()

    assert left == {}
    assert (home.directory / "saved").read_text() == "yes\n"
    assert home.entries() == []


async def test_close_waits_for_the_end_of_the_guardian(home: Home) -> None:
    async with home.guards.running("api", "", home.command()) as process:
        guardian = process.guardian_pid

    await home.guards.close()

    assert not is_alive(guardian)
    assert process.unended_pids == ()


async def test_entry_of_a_later_process_is_kept_when_an_earlier_process_ends(home: Home) -> None:
    early = home.guards.prepare("worker")
    async with home.guards.running("worker", "", home.command()):
        home.guards.prepare("worker")
        async with home.guards.running("worker", "", home.command()):
            early.kill()
            await home.guards.end(early, DEADLINE_S)

            assert home.entries() == ["worker"]


async def test_guardian_without_a_command_ends(home: Home) -> None:
    process = home.guards.prepare("api")

    await home.guards.dismiss("api")

    assert process.leftover_pids == ()
