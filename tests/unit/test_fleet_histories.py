"""Tests of a fleet in random histories of many virtual hours, against rules that always hold."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import pytest

from tasks.record.states import LEGAL_GROUP_TRANSITIONS, SERVING_STATES, GroupState
from tasks.rollout.backends import Ask
from tasks.rollout.probing import FleetRefused
from tasks.rollout.registry import GroupView
from tasks.rollout.router import Entrypoint
from tasks.rollout.sync import InFlight, NoSuchSync
from tests.support.fleet_clock import now_s, run
from tests.support.fleet_fakes import FleetHarness, list_fleet_tasks, make_topology

G = GroupState
#: Number of random events in one history. The seed of a history determines all its events.
EVENTS = 60


@dataclass(slots=True)
class HistoryChecker:
    """Causes random events in a fleet, and records each violation of a rule."""

    harness: FleetHarness
    dice: Random
    #: Number of broadcasts so far. Each broadcast sends new weights.
    broadcasts: int = 0
    #: Descriptions of the violated rules.
    violations: list[str] = field(default_factory=list)
    #: Lifecycle groups (servers that start and stop together) that the random events have damaged
    #: since their last start. Only these groups may fail.
    damaged: set[int] = field(default_factory=set)
    #: Number of answer pieces that the servers have generated.
    pieces: int = 0
    #: Mapping from server rank to the number of failed requests since the server last generated a
    #: piece of an answer.
    failed: Counter[int] = field(default_factory=Counter)
    #: True between the begin and the end of a weight sync.
    is_syncing: bool = False
    #: Lifecycle groups in the last commit of weights: a mapping from the index of a group to a pair
    #: `(epoch, broadcast)`. The epoch is the number of starts of the group, and `broadcast` is the
    #: number of the weight broadcast. None before the first commit.
    committed: dict[int, tuple[int, int]] | None = None
    #: Mapping from `(engine, epoch)` to the number of the last weight broadcast that the engine
    #: received. The epoch counts the starts of the engine.
    loaded: dict[tuple[int, int], int] = field(default_factory=dict)

    def watch(self) -> None:
        self.harness.fleet.registry.listen(self._see)

    def _see(self, before: GroupView, after: GroupView) -> None:
        view = self.harness.fleet.registry.view
        if (
            before.state is not after.state
            and after.state not in LEGAL_GROUP_TRANSITIONS[before.state]
        ):
            self.violations.append(f"{before.state} became {after.state}")
        if after.state in SERVING_STATES and after.version != view.version:
            now = view.groups[after.index]
            if now.state in SERVING_STATES and now.version != view.version:
                self.violations.append(f"group {after.index} serves version {after.version}")
        if after.state is G.INACTIVE and before.is_running and after.index not in self.damaged:
            self.violations.append(
                f"group {after.index} failed and nothing was broken: {after.cause}"
            )
        if after.epoch > max(1, before.epoch) and before.index not in self.damaged:
            self.violations.append(f"group {after.index} is restarted and never failed")
        if before.state is G.RECOVERING and after.state in (G.ACTIVE, G.STALE):
            self.damaged.discard(after.index)

    def check_rules(self) -> None:
        """Record each server that gets requests but must not get requests.

        A server may get requests only if the server has the committed weights and the server's
        group is in a serving state. The router must know the group's epoch, which counts the starts
        of the group.
        """
        fleet = self.harness.fleet
        for entrypoint in fleet.router.entrypoints:
            group = fleet.registry.view.groups[fleet.registry.group_of(entrypoint.rank)]
            if group.state not in SERVING_STATES or group.epoch != entrypoint.epoch:
                self.violations.append(f"rank {entrypoint.rank} is routed and {group.state}")
            if group.version != fleet.registry.view.version:
                self.violations.append(
                    f"rank {entrypoint.rank} is routed with version {group.version}"
                )
            self._check_weights(entrypoint)

    def _check_weights(self, entrypoint: Entrypoint) -> None:
        """Record a violation if a server that gets requests has weights that are not committed."""
        if self.is_syncing and self.harness.fleet.router.is_closed:
            return
        rank = entrypoint.rank
        epoch = entrypoint.epoch
        group = self.harness.fleet.registry.group_of(rank)
        loaded = self.loaded.get((group, epoch), 0)
        expected = (epoch, 0) if self.committed is None else self.committed.get(group)
        if expected != (epoch, loaded):
            self.violations.append(
                f"rank {rank}, epoch {epoch}, answers with {loaded}, not {expected}"
            )

    # The following methods cause random events.

    def kill_server(self) -> None:
        rank = self._random_rank()
        self._note_damage(rank)
        self.harness.host.die(rank)

    def kill_four_servers(self) -> None:
        for rank in self.dice.sample(sorted(self.harness.host.servers), 4):
            self._note_damage(rank)
            self.harness.host.die(rank)

    def hang_server(self) -> None:
        server = self.harness.host[self._random_rank()]
        self._note_damage(server.rank)
        server.answers = server.at_home = "hang"

    def break_server(self) -> None:
        server = self.harness.host[self._random_rank()]
        self._note_damage(server.rank)
        server.answers = server.at_home = "503"

    def cut_network(self) -> None:
        ranks = self.dice.sample(sorted(self.harness.host.servers), 3)
        healthy = [rank for rank in ranks if self.harness.host[rank].answers == "yes"]
        for rank in healthy:
            self.harness.host[rank].answers = "hang"
            if self.is_syncing:
                self._note_damage(rank)
        heal_after_s = self.dice.uniform(1, 400)
        loop = asyncio.get_running_loop()
        epochs = {rank: self.harness.host[rank].epoch for rank in healthy}

        def heal() -> None:
            for rank in healthy:
                server = self.harness.host[rank]
                if server.epoch == epochs[rank] and server.at_home == "yes":
                    server.answers = "yes"

        loop.call_later(heal_after_s, heal)

    def hinder_next_start(self) -> None:
        server = self.harness.host[self._random_rank()]
        server.start_errors = ["no GPU"] * self.dice.randrange(4)
        server.loads_for_s = self.dice.choice([0.0, 3.0, 40.0, 150.0])

    def fail_requests(self) -> None:
        rank = self._random_rank()
        epoch = self.dice.choice([1, self.harness.host[rank].epoch])
        for _ in range(self.dice.randrange(20)):
            self.harness.fleet.note_failure(rank, epoch, "reset")
        # The fleet may restart an engine after more than `health.misses` failed requests without a
        # generated token in between. So count the engine as damaged.
        self.failed[rank] += 1
        if self.failed[rank] > self.harness.settings.health.misses:
            self._note_damage(rank)

    def generate_tokens(self) -> None:
        rank = self._random_rank()
        self.failed[rank] = 0
        self.pieces += 1
        self.harness.fleet.note_tokens(rank, self.harness.host[rank].epoch, self.pieces)

    def take_port(self) -> None:
        self.harness.host.foreign_ports.add(8000 + self._random_rank())

    def slow_down_stops(self) -> None:
        self.harness.host.stop_takes_s = self.dice.choice([0.0, 0.0, 4.0, 1000.0])

    async def act_as_trainer(self) -> None:
        """Act as the trainer: send new weights. Some syncs fail, are late or are not committed."""
        fleet, dice = self.harness.fleet, self.dice
        if dice.random() < 0.3:
            await fleet.check()
        taken = (
            [fleet.router.pick(None)] if fleet.router.entrypoints and dice.random() < 0.5 else []
        )
        for entrypoint in taken:
            after_s = dice.uniform(0, 50)
            asyncio.get_running_loop().call_later(after_s, fleet.router.done, entrypoint)
        try:
            begun = await fleet.begin_sync(dice.choice([1.0, 30.0, 600.0]), InFlight.WAIT)
        except FleetRefused:
            return
        self.is_syncing = True
        try:
            await self._sync(begun)
        except NoSuchSync:
            pass
        finally:
            self.is_syncing = False

    async def _sync(self, begun: dict[str, Any]) -> None:
        fleet, dice, sync = self.harness.fleet, self.dice, begun["sync"]
        version = fleet.registry.view.version + dice.choice([0, 1, 3])
        self.broadcasts += 1
        broadcast_number = self.broadcasts
        # A server that does not answer receives no weights, and the fleet may restart the server's
        # engine. So count the engine as damaged.
        for server in self.harness.host.servers.values():
            if server.answers != "yes":
                self.damaged.add(fleet.registry.group_of(server.rank))
        for server in self.harness.host.servers.values():
            if dice.random() < 0.1:
                self.damaged.add(fleet.registry.group_of(server.rank))
                self.harness.prober.statuses[server.rank] = dice.choice([None, 500])
        ask = Ask(method="POST", path="/load", body={"version": broadcast_number})
        try:
            answers = (await fleet.syncs.broadcast(sync, ask, dice.choice([1.0, 20.0])))["answers"]
        finally:
            self.harness.prober.statuses.clear()
        # Each engine that received the broadcast may have the new weights, even if the engine
        # answered with an error.
        for answer in answers:
            self.loaded[answer["engine"], answer["epoch"]] = broadcast_number
        await asyncio.sleep(dice.uniform(0, 40))
        successes = [answer for answer in answers if answer["status"] == 200]
        named = {answer["engine"]: answer["epoch"] for answer in successes if dice.random() < 0.9}
        # Simulate an error of the trainer: the commit sometimes contains an engine that may not
        # have received the new weights.
        named |= {answer["engine"]: answer["epoch"] for answer in answers if dice.random() < 0.1}
        end = dice.choice(["commit", "commit", "commit", "give up", "die"])
        if end == "give up":
            await fleet.syncs.give_up(sync)
        elif end == "commit":
            await fleet.syncs.commit(sync, version, named)
            loaded_engines = {answer["engine"] for answer in successes}
            self.committed = {
                engine: (epoch, broadcast_number)
                for engine, epoch in named.items()
                if engine in loaded_engines
            }
        else:
            await asyncio.sleep(601.0)

    def _random_rank(self) -> int:
        return self.dice.choice(sorted(self.harness.host.servers))

    def _note_damage(self, rank: int) -> None:
        if self.harness.host[rank].is_alive:
            self.damaged.add(self.harness.fleet.registry.group_of(rank))


def rebinding(ports: dict[int, int]) -> Callable[[int], Awaitable[list[Any]]]:
    """Return a function that gives new ports to the servers of an engine.

    Args:
        ports: Mapping from the index of an engine to the current base port of the engine. The port
            of a server is the sum of base port and rank. Each call of the function changes the base
            port.
    """

    async def rebind(group: int) -> list[Any]:
        ports[group] = ports.get(group, 8000) + 100
        engine = make_topology(5, 2).engines[group]
        return [replace(slot, port=ports[group] + slot.rank) for slot in engine.servers]

    return rebind


async def play_history(seed: int) -> tuple[HistoryChecker, float]:
    """Cause random events in a fleet, check the fleet's rules after each event, and stop the fleet.

    Returns:
        The `HistoryChecker` with the recorded violations, and the duration of the stop minus the
        time limit for the stop, in seconds.
    """
    dice = Random(seed)
    harness = FleetHarness(
        make_topology(5, 2),
        seed=seed,
        rebind=rebinding({}),
        misses=dice.choice([1, 2, 3]),
        budget=dice.choice([None, None, 5, 20]),
        backoff_s=dice.choice([0.1, 1.0, 10.0]),
        parallel=dice.choice([1, 2, 5]),
    )
    checker = HistoryChecker(harness, dice)
    await harness.fleet.start()
    checker.watch()
    random_events = [
        checker.kill_server,
        checker.kill_four_servers,
        checker.hang_server,
        checker.break_server,
        checker.cut_network,
        checker.hinder_next_start,
        checker.fail_requests,
        checker.generate_tokens,
        checker.take_port,
        checker.slow_down_stops,
    ]
    trainer_tasks: set[asyncio.Task[None]] = set()
    for _ in range(EVENTS):
        await asyncio.sleep(dice.choice([0.0, 0.01, 0.5, 5.0, 60.0, 300.0]))
        checker.check_rules()
        if not trainer_tasks and dice.random() < 0.15:
            trainer_task = asyncio.create_task(checker.act_as_trainer())
            trainer_tasks.add(trainer_task)
            trainer_task.add_done_callback(trainer_tasks.discard)
        else:
            dice.choice(random_events)()
        checker.check_rules()
    if trainer_tasks:
        await asyncio.wait(trainer_tasks)
    # Repair all servers and networks, so that each group can recover.
    harness.host.stop_takes_s = 0.0
    harness.host.foreign_ports.clear()
    for server in harness.host.servers.values():
        server.start_errors, server.loads_for_s = [], 0.0
        if server.answers != "yes" and server.at_home == "yes":
            server.answers = "yes"
    await asyncio.sleep(1000.0)
    await harness.sync()
    final = {G.ACTIVE, G.RETIRED}
    for group in harness.fleet.registry.view.groups:
        if group.state not in final or group.unreachable:
            checker.violations.append(f"group {group.index} ends as {group.state}: {group.cause}")
    began_s = now_s()
    checker.damaged.update(range(5))
    harness.host.stop_takes_s = dice.choice([0.0, 1e6])
    await harness.fleet.stop()
    if remaining_tasks := list_fleet_tasks():
        checker.violations.append(f"left: {remaining_tasks}")
    return checker, now_s() - began_s - harness.stop_within_s


def check(seed: int) -> None:
    checker, over_s = run(play_history(seed))

    assert checker.violations == []
    assert checker.harness.host.faults == []
    assert over_s < 1.5
    begun = [event["id"] for event in checker.harness.list_events("rollout.recovery.begun")]
    ended = [event["id"] for event in checker.harness.list_events("rollout.recovery.ended")]
    assert sorted(begun) == sorted(ended)


@pytest.mark.parametrize("seed", range(25))
def test_fleet_keeps_its_promises_in_random_histories(seed: int) -> None:
    check(seed)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(100, 600))
def test_fleet_keeps_its_promises_in_many_random_histories(seed: int) -> None:
    check(seed)
