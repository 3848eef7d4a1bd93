"""Random histories of a fleet, of hours, held against what must always be so."""

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
from tests.support.fleet_fakes import Stage, loops, plan_of

G = GroupState
#: Of one history; every one is told whole by its seed.
EVENTS = 60


@dataclass(slots=True)
class Witness:
    """Sees every change of a fleet, and says what was wrong."""

    stage: Stage
    dice: Random
    #: Weights that were sent so far.
    pushes: int = 0
    wrong: list[str] = field(default_factory=list)
    #: Groups in which something was broken by the history, since their last start.
    hurt: set[int] = field(default_factory=set)
    #: Of what servers have generated.
    pieces: int = 0
    #: By rank: how often requests have failed since the last of those.
    failed: Counter[int] = field(default_factory=Counter)
    #: From the begin of a sync to its end.
    is_syncing: bool = False
    #: By group, the incarnation and the version that were committed last; nothing before the first.
    committed: dict[int, tuple[int, int]] | None = None
    #: By incarnation of a server, how the weights that it has came there.
    loaded: dict[tuple[int, int], int] = field(default_factory=dict)

    def watch(self) -> None:
        self.stage.fleet.registry.listen(self._see)

    def _see(self, before: GroupView, after: GroupView) -> None:
        view = self.stage.fleet.registry.view
        if (
            before.state is not after.state
            and after.state not in LEGAL_GROUP_TRANSITIONS[before.state]
        ):
            self.wrong.append(f"{before.state} became {after.state}")
        if after.state in SERVING_STATES and after.version != view.version:
            now = view.groups[after.index]
            if now.state in SERVING_STATES and now.version != view.version:
                self.wrong.append(f"group {after.index} serves version {after.version}")
        if after.state is G.INACTIVE and before.is_running and after.index not in self.hurt:
            self.wrong.append(f"group {after.index} failed and nothing was broken: {after.cause}")
        if after.epoch > max(1, before.epoch) and before.index not in self.hurt:
            self.wrong.append(f"group {after.index} is restarted and never failed")
        if before.state is G.RECOVERING and after.state in (G.ACTIVE, G.STALE):
            self.hurt.discard(after.index)

    def look(self) -> None:
        """What must be so at any moment."""
        fleet = self.stage.fleet
        for one in fleet.router.entrypoints:
            group = fleet.registry.view.groups[fleet.registry.group_of(one.rank)]
            if group.state not in SERVING_STATES or group.epoch != one.epoch:
                self.wrong.append(f"rank {one.rank} is routed and {group.state}")
            if group.version != fleet.registry.view.version:
                self.wrong.append(f"rank {one.rank} is routed with version {group.version}")
            self._judge_answer(one)

    def _judge_answer(self, one: Entrypoint) -> None:
        """What a generation of this server would be made with, as the servers themselves know."""
        if self.is_syncing and self.stage.fleet.router.is_closed:
            return
        group = self.stage.fleet.registry.group_of(one.rank)
        has = self.loaded.get((group, one.epoch), 0)
        due = (one.epoch, 0) if self.committed is None else self.committed.get(group)
        if due != (one.epoch, has):
            self.wrong.append(f"rank {one.rank}, epoch {one.epoch}, answers with {has}, not {due}")

    # What may happen.

    def dies(self) -> None:
        rank = self._rank()
        self._hurt(rank)
        self.stage.host.die(rank)

    def mass_death(self) -> None:
        for rank in self.dice.sample(sorted(self.stage.host.servers), 4):
            self._hurt(rank)
            self.stage.host.die(rank)

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
            if self.is_syncing:
                self._hurt(rank)
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
        if self.failed[rank] > self.stage.settings.health.misses:
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
        """One of the trainer's: new weights, of which some fail, some are late, some given up."""
        fleet, dice = self.stage.fleet, self.dice
        if dice.random() < 0.3:
            await fleet.check()
        taken = (
            [fleet.router.pick(None)] if fleet.router.entrypoints and dice.random() < 0.5 else []
        )
        for one in taken:
            after_s = dice.uniform(0, 50)
            asyncio.get_running_loop().call_later(after_s, fleet.router.done, one)
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
        fleet, dice, sync = self.stage.fleet, self.dice, begun["sync"]
        version = fleet.registry.view.version + dice.choice([0, 1, 3])
        self.pushes += 1
        mark = self.pushes
        # From the network's wrong side, a server that can't be brought weights has to go.
        for server in self.stage.host.servers.values():
            if server.answers != "yes":
                self.hurt.add(fleet.registry.group_of(server.rank))
        for server in self.stage.host.servers.values():
            if dice.random() < 0.1:
                self.hurt.add(fleet.registry.group_of(server.rank))
                self.stage.prober.statuses[server.rank] = dice.choice([None, 500])
        ask = Ask(method="POST", path="/load", body={"version": mark})
        try:
            answers = (await fleet.syncs.broadcast(sync, ask, dice.choice([1.0, 20.0])))["answers"]
        finally:
            self.stage.prober.statuses.clear()
        # Whoever was sent it may have it, whatever it answered.
        for one in answers:
            self.loaded[one["engine"], one["epoch"]] = mark
        await asyncio.sleep(dice.uniform(0, 40))
        took = [one for one in answers if one["status"] == 200]
        named = {one["engine"]: one["epoch"] for one in took if dice.random() < 0.9}
        # A trainer that names what it should not.
        named |= {one["engine"]: one["epoch"] for one in answers if dice.random() < 0.1}
        end = dice.choice(["commit", "commit", "commit", "give up", "die"])
        if end == "give up":
            await fleet.syncs.give_up(sync)
        elif end == "commit":
            await fleet.syncs.commit(sync, version, named)
            good = {one["engine"] for one in took}
            epochs = {engine: epoch for engine, epoch in named.items() if engine in good}
            self.committed = {engine: (epoch, mark) for engine, epoch in epochs.items()}
        else:
            await asyncio.sleep(601.0)

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
        backoff_s=dice.choice([0.1, 1.0, 10.0]),
        parallel=dice.choice([1, 2, 5]),
    )
    witness = Witness(stage, dice)
    await stage.fleet.start()
    witness.watch()
    happenings = [
        *(witness.dies, witness.mass_death, witness.hangs),
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
    await stage.sync()
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
    return witness, now_s() - began_s - stage.stop_within_s


def check(seed: int) -> None:
    witness, over_s = run(history(seed))

    assert witness.wrong == []
    assert witness.stage.host.faults == []
    assert over_s < 1.5
    begun = [one["id"] for one in witness.stage.told("rollout.recovery.begun")]
    ended = [one["id"] for one in witness.stage.told("rollout.recovery.ended")]
    assert sorted(begun) == sorted(ended)


@pytest.mark.parametrize("seed", range(25))
def test_fleet_keeps_its_promises_in_random_histories(seed: int) -> None:
    check(seed)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(100, 600))
def test_fleet_keeps_its_promises_in_many_random_histories(seed: int) -> None:
    check(seed)
