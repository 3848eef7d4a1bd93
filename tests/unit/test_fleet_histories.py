"""Random histories of a fleet, of hours, held against what must always be so."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

import pytest

from tasks.record.states import MOVES, SERVING, GroupState
from tasks.rollout.registry import GroupView
from tests.support.fleet_clock import now_s, run
from tests.support.fleet_fakes import Stage, loops, plan_of

G = GroupState
#: Of one history; every one is told whole by its seed.
EVENTS = 60


@dataclass(slots=True)
class Witness:
    """Sees every change of a fleet, and says what was wrong."""

    stage: Stage
    dice: Random
    wrong: list[str] = field(default_factory=list)
    #: Groups in which something was broken by the history, since their last start.
    hurt: set[int] = field(default_factory=set)
    #: Between a barrier and its restore.
    is_held: bool = False
    #: Of what servers have generated.
    pieces: int = 0
    #: By rank: how often requests have failed since the last of those.
    failed: Counter[int] = field(default_factory=Counter)

    def watch(self) -> None:
        self.stage.fleet.registry.listen(self._see)

    def _see(self, before: GroupView, after: GroupView) -> None:
        view = self.stage.fleet.registry.view
        if before.state is not after.state and after.state not in MOVES[before.state]:
            self.wrong.append(f"{before.state} became {after.state}")
        if after.state in SERVING and after.version != view.version:
            now = view.groups[after.index]
            if now.state in SERVING and now.version != view.version:
                self.wrong.append(f"group {after.index} serves version {after.version}")
        if after.state is G.INACTIVE and before.is_running and after.index not in self.hurt:
            self.wrong.append(f"group {after.index} failed and nothing was broken: {after.cause}")
        if after.epoch > before.epoch:
            if self.is_held:
                self.wrong.append(f"group {after.index} begins between barrier and restore")
            if after.epoch > 1 and before.index not in self.hurt:
                self.wrong.append(f"group {after.index} is restarted and never failed")
        if before.state is G.RECOVERING and after.state in (G.ACTIVE, G.STALE):
            self.hurt.discard(after.index)

    def look(self) -> None:
        """What must be so at any moment."""
        fleet = self.stage.fleet
        for one in fleet.router.entrypoints:
            group = fleet.registry.view.groups[fleet.registry.group_of(one.rank)]
            if group.state not in SERVING or group.epoch != one.epoch:
                self.wrong.append(f"rank {one.rank} is routed and {group.state}")
            if group.version != fleet.registry.view.version:
                self.wrong.append(f"rank {one.rank} is routed with version {group.version}")

    # What may happen.

    def dies(self) -> None:
        rank = self._rank()
        self._hurt(rank)
        self.stage.host.die(rank)

    def mass_death(self) -> None:
        for rank in self.dice.sample(sorted(self.stage.host.servers), 4):
            self._hurt(rank)
            self.stage.host.die(rank)

    def dies_silently(self) -> None:
        rank = self._rank()
        self._hurt(rank)
        self.stage.host[rank].is_alive = False

    def hangs(self) -> None:
        server = self.stage.host[self._rank()]
        self._hurt(server.rank)
        server.answers = server.at_home = "hang"

    def sickens(self) -> None:
        server = self.stage.host[self._rank()]
        self._hurt(server.rank)
        server.answers = server.at_home = "503"

    def network_cut(self) -> None:
        ranks = self.dice.sample(sorted(self.stage.host.servers), 3)
        well = [rank for rank in ranks if self.stage.host[rank].answers == "yes"]
        for rank in well:
            self.stage.host[rank].answers = "hang"
        heal_after_s = self.dice.uniform(1, 400)
        loop = asyncio.get_running_loop()
        epochs = {rank: self.stage.host[rank].epoch for rank in well}

        def heal() -> None:
            for rank in well:
                server = self.stage.host[rank]
                if server.epoch == epochs[rank] and server.at_home == "yes":
                    server.answers = "yes"

        loop.call_later(heal_after_s, heal)

    def start_trouble(self) -> None:
        server = self.stage.host[self._rank()]
        server.start_errors = ["no GPU"] * self.dice.randrange(4)
        server.loads_for_s = self.dice.choice([0.0, 3.0, 40.0, 150.0])

    def requests_fail(self) -> None:
        rank = self._rank()
        epoch = self.dice.choice([1, self.stage.host[rank].epoch])
        for _ in range(self.dice.randrange(20)):
            self.stage.fleet.note_failure(rank, epoch, "reset")
        # So often with no token between is enough.
        self.failed[rank] += 1
        if self.failed[rank] > self.stage.settings.misses:
            self._hurt(rank)

    def requests_succeed(self) -> None:
        rank = self._rank()
        self.failed[rank] = 0
        self.pieces += 1
        self.stage.fleet.note_tokens(rank, self.stage.host[rank].epoch, self.pieces)

    def port_stolen(self) -> None:
        self.stage.host.foreign_ports.add(8000 + self._rank())

    def stops_are_slow(self) -> None:
        self.stage.host.stop_takes_s = self.dice.choice([0.0, 0.0, 4.0, 1000.0])

    async def turn(self) -> None:
        """One of the trainer's: barrier, step, restore, weights."""
        await self.stage.fleet.barrier()
        self.is_held = True
        await asyncio.sleep(self.dice.uniform(0, 100))
        self.is_held = False
        answer = await self.stage.fleet.restore()
        await asyncio.sleep(self.dice.uniform(0, 5))
        epochs = {int(rank): epoch for rank, epoch in answer["metadata"]["epochs"].items()}
        self.stage.fleet.weights(self.stage.fleet.registry.view.version + 1, None, epochs)

    def _rank(self) -> int:
        return self.dice.choice(sorted(self.stage.host.servers))

    def _hurt(self, rank: int) -> None:
        if self.stage.host[rank].is_alive:
            self.hurt.add(self.stage.fleet.registry.group_of(rank))


def rebinding(ports: dict[int, int]) -> Callable[[int], Awaitable[list[Any]]]:
    """New ports for a group of two, each time others."""

    async def rebind(group: int) -> list[Any]:
        ports[group] = ports.get(group, 8000) + 100
        [engine] = [one for one in plan_of(5, 2).engines if one.ranks[0] == 2 * group]
        return [replace(slot, port=ports[group] + slot.rank) for slot in engine.servers]

    return rebind


async def history(seed: int) -> tuple[Witness, float]:
    dice = Random(seed)
    stage = Stage(
        plan_of(5, 2),
        seed=seed,
        rebind=rebinding({}),
        misses=dice.choice([1, 2, 3]),
        budget=dice.choice([None, None, 5, 20]),
        backoff_s=dice.choice([0.0, 1.0, 10.0]),
        parallel=dice.choice([1, 2, 5]),
    )
    witness = Witness(stage, dice)
    await stage.fleet.start()
    witness.watch()
    happenings = [
        *(witness.dies, witness.mass_death, witness.dies_silently, witness.hangs),
        *(witness.sickens, witness.network_cut, witness.start_trouble, witness.requests_fail),
        *(witness.requests_succeed, witness.port_stolen, witness.stops_are_slow),
    ]
    turns: set[asyncio.Task[None]] = set()
    for _ in range(EVENTS):
        await asyncio.sleep(dice.choice([0.0, 0.01, 0.5, 5.0, 60.0, 300.0]))
        witness.look()
        if not turns and dice.random() < 0.15:
            turn = asyncio.create_task(witness.turn())
            turns.add(turn)
            turn.add_done_callback(turns.discard)
        else:
            dice.choice(happenings)()
        witness.look()
    if turns:
        await asyncio.wait(turns)
    # It heals: whatever may be recovered is.
    stage.host.stop_takes_s = 0.0
    stage.host.foreign_ports.clear()
    for server in stage.host.servers.values():
        server.start_errors, server.loads_for_s = [], 0.0
        if server.answers != "yes" and server.at_home == "yes":
            server.answers = "yes"
    await asyncio.sleep(1000.0)
    stage.fleet.weights(stage.fleet.registry.view.version + 1)
    final = {G.ACTIVE, G.RETIRED}
    for group in stage.fleet.registry.view.groups:
        if group.state not in final or group.unreachable:
            witness.wrong.append(f"group {group.index} ends as {group.state}: {group.cause}")
    began_s = now_s()
    witness.hurt.update(range(5))
    stage.host.stop_takes_s = dice.choice([0.0, 1e6])
    await stage.fleet.stop()
    if left := loops():
        witness.wrong.append(f"left: {left}")
    return witness, now_s() - began_s - stage.settings.stop_within_s


def check(seed: int) -> None:
    witness, over_s = run(history(seed))

    assert witness.wrong == []
    assert witness.stage.host.faults == []
    assert over_s < 1.5
    begun = [one["id"] for one in witness.stage.told("rollout.recovery.begun")]
    ended = [one["id"] for one in witness.stage.told("rollout.recovery.ended")]
    assert sorted(begun) == sorted(ended)
    begun_incidents = witness.stage.told("rollout.incident.begun")
    ended_incidents = witness.stage.told("rollout.incident.ended")
    assert len(begun_incidents) - len(ended_incidents) in (0, 1)


@pytest.mark.parametrize("seed", range(25))
def test_whatever_happens_the_fleet_keeps_its_promises(seed: int) -> None:
    check(seed)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(100, 600))
def test_whatever_else_happens_the_fleet_keeps_its_promises(seed: int) -> None:
    check(seed)
