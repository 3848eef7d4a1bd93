"""A fleet under faults drawn at random: `python -m tests.faults.fleet_chaos [--minutes 10]`.

Eight real servers behind the real gateway, each under its guardian. Clients send requests all the
time. A trainer brings new weights, which it commits, gives up or forgets, and some of which break a
server. Every few seconds a server is killed, stopped, made slow, made to answer 503 or garbage or
nothing, or has its port stolen. In the end, by the words of the clients and of the servers' own
ledger: every request had one end, none was answered twice, none with weights that were not the
fleet's, and no group was restarted that had done nothing wrong.

The seed is printed, and repeats the draw; the machine's timing can't be repeated.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random, SystemRandom
from typing import Any

import aiohttp

from tasks.processes import tree
from tasks.processes.ports import listeners
from tasks.rollout.component import FleetPlan
from tasks.spec.rollout import Rollout
from tests.support.help import HelpFormatter
from tests.support.stage import free_port

_ENGINES = 8
_CLIENTS = 24
_HEALTH = {"interval_s": 1.0, "timeout_s": 2.0, "misses": 2}
_RECOVERY = {"budget": "unlimited", "backoff_s": 0.1, "max_backoff_s": 1.0, "parallel": 4}
#: A client that has heard nothing by then never will.
_ANSWER_WITHIN_S = 60.0
_READY_WITHIN_S = 60.0
_LAST_FAULT_BEFORE_S = 10.0
_PUSH_WITHIN_S = 2.0
#: Between the end of an answer and the failure of its server, which keeps it from being heard.
_SAME_MOMENT_S = 0.2
#: Faults after which a group may be restarted; the others it has to bear.
_GRAVE = frozenset({"kill", "stop", "hang", "503", "garbage", "steal", "broken weights"})
#: What the gateway says at the end of a stream.
_AT_THE_END = re.compile(r"^: X-Muster-Version: (\d+)$", re.MULTILINE)
_FAULTS = ("kill", "stop", "hang", "503", "garbage", "steal", "slow", "4xx")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How one request ended, as its client saw it."""

    id: str
    #: `answered`, `refused` (it may be sent again), `cut` (begun, and broken off), `other`, `lost`.
    kind: str
    began: float
    took_s: float
    rank: int = -1
    #: Of the weights that each piece of the answer was made with, as its server says.
    versions: frozenset[int] = frozenset()
    #: The same, as the gateway says at the head and, of a stream, at the end.
    told: frozenset[int] = frozenset()
    text: str = ""


@dataclass(slots=True, kw_only=True)
class Chaos:
    """One run of it."""

    port: int
    random: Random
    directory: Path
    until: float
    client: aiohttp.ClientSession
    outcomes: list[Outcome] = field(default_factory=list)
    #: By rank: what was done to it, and when, UTC.
    faults: list[tuple[float, int, str]] = field(default_factory=list)
    #: When the gateway had taken a version as the fleet's, UTC.
    synced: list[tuple[float, int]] = field(default_factory=list)
    #: The moments in which a sync ended the requests that were under way: their begins and ends.
    aborted: list[tuple[float, float]] = field(default_factory=list)
    #: How the syncs ended.
    ends: Counter[str] = field(default_factory=Counter)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def is_over(self) -> bool:
        return time.time() > self.until

    async def snapshot(self) -> dict[str, Any]:
        async with self.client.get(f"{self.url}/muster/rollout") as answer:
            seen: dict[str, Any] = await answer.json()
        return seen

    async def ask(self, number: int) -> None:
        """A client: one request after the other, half of them streams, some with a session."""
        random = Random(f"{self.random.random()} {number}")
        count = 0
        while not self.is_over:
            count += 1
            id = f"c{number}-{count}"
            body: dict[str, Any] = {"max_tokens": random.randint(1, 20), "prompt": "1"}
            body["stream"] = random.random() < 0.5
            headers = {"X-Request-Id": id}
            if random.random() < 0.5:
                headers["X-Session-Id"] = f"s{number}"
            self.outcomes.append(await self._one(id, body, headers))
            if self.outcomes[-1].kind != "answered":
                await asyncio.sleep(random.uniform(0, 0.2))

    async def _one(self, id: str, body: dict[str, Any], headers: dict[str, str]) -> Outcome:
        began = time.time()

        def outcome(kind: str, **more: Any) -> Outcome:
            return Outcome(id=id, kind=kind, began=began, took_s=time.time() - began, **more)

        has_head = False
        try:
            async with (
                asyncio.timeout(_ANSWER_WITHIN_S),
                self.client.post(f"{self.url}/generate", json=body, headers=headers) as answer,
            ):
                has_head = answer.status == 200
                text = (await answer.read()).decode("utf-8", "replace")
                status = answer.status
        except TimeoutError:
            return outcome("lost", text=f"no end within {_ANSWER_WITHIN_S:g} s")
        except aiohttp.ClientError as error:
            return outcome("cut" if has_head else "other", text=repr(error))
        if status == 200:
            pieces = _pieces(text)
            if not pieces or any(piece["id"] != id for piece in pieces):
                return outcome("other", text=text[-300:])
            versions = frozenset(piece["version"] for piece in pieces)
            told = {answer.headers["X-Muster-Version"], *_AT_THE_END.findall(text)}
            if body["stream"] and "[DONE]" not in text:
                return outcome("other", text=text[-300:])
            return outcome(
                "answered",
                rank=pieces[0]["rank"],
                versions=versions,
                told=frozenset(map(int, told)),
            )
        if status in (502, 503) and '"retryable": true' in text:
            return outcome("refused", text=text)
        # What a server itself has answered is its client's to see.
        own = status in (404, 500, 503) and "told to answer" in text
        return outcome("passed on" if own else "other", text=f"{status} {text[:300]}")

    async def train(self) -> None:
        """A trainer: each time new weights, and not each time to a good end."""
        version = 0
        while not self.is_over:
            await asyncio.sleep(self.random.uniform(0.5, 3.0))
            version += 1
            self.ends[await self._sync(version)] += 1

    async def _sync(self, version: int) -> str:
        """How it ended."""
        random = self.random
        in_flight = random.choice(["wait", "abort"])
        began = time.time()
        status, begun = await self._order(
            "POST", "sync", {"timeout_s": random.choice([3.0, 20.0]), "in_flight": in_flight}
        )
        if in_flight == "abort":
            self.aborted.append((began, time.time()))
        if status != 200:
            return "refused"
        sync = f"sync/{begun['sync']}"
        engines = [one["engine"] for one in begun["targets"]]
        broken = [random.choice(engines)] if engines and random.random() < 0.15 else []
        self.faults += [(time.time(), engine, "broken weights") for engine in broken]
        order = {
            "path": "/weights",
            "body": {"version": version, "broken_for": broken},
            "timeout_s": _PUSH_WITHIN_S,
        }
        status, sent = await self._order("POST", f"{sync}/broadcast", order)
        end = random.choice(["commit"] * 8 + ["give up", "forget"])
        if status != 200:
            return "late"
        if end == "forget":
            # Its deadline ends it, or the next one is refused until then.
            return end
        if end == "give up":
            status, _ = await self._order("DELETE", sync)
            return end if status == 200 else "late"
        # One that answered 500 is named too: it must not serve all the same.
        took = [one for one in sent["answers"] if one["status"] is not None]
        epochs = {str(one["engine"]): one["epoch"] for one in took if random.random() < 0.95}
        status, _ = await self._order(
            "POST", f"{sync}/commit", {"version": version, "epochs": epochs}
        )
        if status == 200:
            self.synced.append((time.time(), version))
        return end if status == 200 else "late"

    async def _order(
        self, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> tuple[int, dict[str, Any]]:
        async with self.client.request(
            method, f"{self.url}/muster/rollout/{path}", json=body
        ) as answer:
            return answer.status, await answer.json()

    async def disturb(self) -> None:
        """Something to some server, every few seconds."""
        while time.time() < self.until - _LAST_FAULT_BEFORE_S:
            await asyncio.sleep(self.random.uniform(0.5, 3.0))
            server = self.random.choice((await self.snapshot())["servers"])
            kind = self.random.choice(_FAULTS)
            if server["state"] in ("starting", "recovering", "inactive") and kind != "kill":
                continue
            at = time.time()
            if await self._do(kind, server):
                self.faults.append((at, server["rank"], kind))

    async def _do(self, kind: str, server: dict[str, Any]) -> bool:
        """Whether it could be done."""
        match kind:
            case "kill" | "steal" | "stop":
                return self._signal(kind, server["port"])
            case "slow":
                order: dict[str, Any] = {"kind": "slow", "delay_s": 0.05, "times": 100}
            case "hang" | "garbage":
                order = {"kind": kind, "health": True}
            case "503":
                order = {"kind": "status", "status": 503, "health": True}
            case _:
                order = {"kind": "status", "status": 404, "times": 50}
        try:
            async with (
                asyncio.timeout(_PUSH_WITHIN_S),
                self.client.post(f"{server['url']}/misbehave", json=order) as answer,
            ):
                return answer.status == 200
        except (TimeoutError, aiohttp.ClientError):
            return False

    def _signal(self, kind: str, port: int) -> bool:
        # A port that was stolen is held here.
        pids = [one.pid for one in listeners(port) if one.pid != os.getpid()]
        with contextlib.suppress(ProcessLookupError):
            for pid in pids:
                os.kill(pid, signal.SIGSTOP if kind == "stop" else signal.SIGKILL)
        if kind == "steal" and pids:
            task = asyncio.create_task(_hold(port, self.random.uniform(2, 8)))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)
        return bool(pids)


async def _hold(port: int, seconds: float) -> None:
    """Listen on a port that was just left, as another program would."""
    with socket.socket() as thief:
        thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        for _ in range(200):
            with contextlib.suppress(OSError):
                thief.bind(("127.0.0.1", port))
                break
            await asyncio.sleep(0.002)
        else:
            return
        thief.listen()
        await asyncio.sleep(seconds)


def _pieces(text: str) -> list[dict[str, Any]]:
    """What each piece of an answer says of itself."""
    try:
        if text.startswith("data:"):
            lines = [line[6:] for line in text.split("\n\n") if line.startswith("data: {")]
            return [json.loads(line)["meta_info"] for line in lines]
        return [json.loads(text)["meta_info"]]
    except (ValueError, KeyError):
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """What is to be said of it all."""

    faults: list[str]
    summary: str


def judge(chaos: Chaos, ledger: Path, events: Path) -> Judgement:
    """Every claim, by what clients, servers and the fleet's record say."""
    outcomes = chaos.outcomes
    found = [
        f"{one.id}: {one.kind} after {one.took_s:.1f} s: {one.text}"
        for one in outcomes
        if one.kind in ("lost", "other")
    ]
    lines = [json.loads(line) for line in ledger.read_text().splitlines()]
    noted = {line["id"] for line in lines}
    found += _answered_twice(lines, events, chaos.aborted)
    found += [
        f"{one.id}: answered by nobody"
        for one in outcomes
        if one.kind == "answered" and one.id not in noted
    ]
    for one in outcomes:
        if one.kind == "answered" and (wrong := _wrong_weights(one, chaos.synced)):
            found.append(f"{one.id}: rank {one.rank}, {wrong}")
    restarts = _restarts(events)
    before: dict[int, float] = {}
    for at, rank, cause in restarts:
        # A fault is one of the process that it struck: it explains no more than one restart.
        since, before[rank] = before.get(rank, 0.0), at
        grave = [when for when, hit, kind in chaos.faults if hit == rank and kind in _GRAVE]
        if not any(since < when < at for when in grave):
            found.append(f"rank {rank} was restarted, and nothing was done to it: {cause}")
    kinds = Counter(one.kind for one in outcomes)
    done = Counter(kind for _, _, kind in chaos.faults)
    waits = sorted(one.took_s for one in outcomes)
    summary = (
        f"{len(outcomes)} requests: {_listed(kinds)}; {len(chaos.faults)} faults: {_listed(done)}; "
        f"{len(restarts)} restarts, syncs of weights: {_listed(chaos.ends)}; a request took "
        f"{1000 * waits[len(waits) // 2]:.0f} ms at the median, {waits[-1]:.1f} s at most"
    )
    return Judgement(faults=found, summary=summary)


def _wrong_weights(one: Outcome, synced: Sequence[tuple[float, int]]) -> str:
    """What is wrong with the weights of an answer; empty: nothing."""
    if len(one.versions) != 1:
        return f"its pieces have the versions {sorted(one.versions)}"
    [version] = one.versions
    least = max((version for at, version in synced if at < one.began), default=0)
    if one.told != one.versions:
        return f"version {version}, and the gateway said {sorted(one.told)}"
    if version not in {0, *(version for _, version in synced)}:
        return f"version {version}, which was never committed"
    return f"version {version}, and {least} was committed before" if version < least else ""


def _answered_twice(
    lines: Sequence[Mapping[str, Any]], events: Path, aborted: Sequence[tuple[float, float]]
) -> list[str]:
    """Requests that two servers have answered, though the first could have been heard.

    What a server wrote in the moment in which it failed may have come no further than its socket;
    then another one is rightly asked.
    """
    failed = [
        (line["at"], line["ranks"])
        for line in map(json.loads, events.read_text().splitlines())
        if line["event"] == "rollout.group.state" and line["after"] == "inactive"
    ]
    answers: dict[str, list[Mapping[str, Any]]] = {}
    for line in sorted(lines, key=lambda line: float(line["at"])):
        answers.setdefault(line["id"], []).append(line)
    return [
        f"{id}: answered {len(given)} times, first by rank {one['rank']} at {one['at']:.3f}"
        for id, given in answers.items()
        for one in given[:-1]
        if not any(
            one["rank"] in ranks and abs(at - one["at"]) < _SAME_MOMENT_S for at, ranks in failed
        )
        and not any(began <= one["at"] <= ended + _SAME_MOMENT_S for began, ended in aborted)
    ]


def _restarts(events: Path) -> list[tuple[float, int, str]]:
    """When a recovery began, of which rank, and why; without its further tries."""
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    return [
        (line["at"], rank, line["cause"])
        for line in lines
        if line["event"] == "rollout.recovery.begun" and line["try"] == 1
        for rank in line["ranks"]
    ]


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))


def plan_in(directory: Path, ledger: Path) -> FleetPlan:
    command = [sys.executable, "-m", "tests.faults.chaos_server"]
    command += ["--port", "${server.port}", "--rank", "${server.rank}", "--ledger", str(ledger)]
    return FleetPlan(
        run_id="chaos",
        attempt=1,
        fleet=Rollout.model_validate(
            {
                "backend": "command",
                "engines": _ENGINES,
                "command": command,
                "health": {**_HEALTH, "token": {"path": "/health_generate"}},
                "recovery": _RECOVERY,
                "stop": {"grace_s": 1},
                "start_within_s": _READY_WITHIN_S,
            }
        ),
        port=free_port(),
        ports={f"server.{rank}": free_port() for rank in range(_ENGINES)},
        cwd=Path.cwd(),
        directory=directory,
    )


@contextlib.asynccontextmanager
async def serving(plan: FleetPlan) -> AsyncIterator[asyncio.subprocess.Process]:
    """The process of the fleet; it has ended after."""
    with (plan.directory / "rollout.log").open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tasks.rollout.process"),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            env={**os.environ, "MUSTER_RUN_ID": plan.run_id, **plan.env},
            start_new_session=True,
        )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(30):
                    await process.wait()
        if process.returncode is None:
            process.kill()
            await process.wait()


async def storm(minutes: float, seed: int, directory: Path) -> Judgement:
    """All of it, and what is to be said of it."""
    ledger = directory / "ledger.jsonl"
    ledger.touch()
    plan = plan_in(directory, ledger)
    no_limit = aiohttp.TCPConnector(limit=0, force_close=True)
    async with (
        serving(plan) as process,
        aiohttp.ClientSession(connector=no_limit, trust_env=False) as client,
    ):
        chaos = Chaos(
            port=plan.port, random=Random(seed), directory=directory, until=0.0, client=client
        )
        await _until_ready(chaos)
        chaos.until = time.time() + 60 * minutes
        await asyncio.gather(
            chaos.train(), chaos.disturb(), *(chaos.ask(number) for number in range(_CLIENTS))
        )
        faults = []
        if process.returncode is not None:
            faults.append(f"the fleet's process has ended: {process.returncode}")
        else:
            try:
                await _until_ready(chaos)
            except (TimeoutError, aiohttp.ClientError) as error:
                faults.append(f"it did not come back: {error!r}")
    judgement = judge(chaos, ledger, directory / "rollout.jsonl")
    return Judgement(faults=faults + judgement.faults, summary=judgement.summary)


async def _until_ready(chaos: Chaos) -> None:
    """Every group serves, or waits for no more than the next sync."""
    async with asyncio.timeout(_READY_WITHIN_S):
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                engines = (await chaos.snapshot())["engines"]
                if all(one["state"] in ("active", "suspect", "stale") for one in engines):
                    return
            await asyncio.sleep(0.1)


def left() -> list[int]:
    """Processes below this one, a subreaper: what nobody has ended."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(-1, os.WNOHANG)
        if not (pids := tree.descendants(os.getpid())):
            return []
        time.sleep(0.05)
    return list(pids)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults.fleet_chaos",
        description=__doc__,
        epilog="Exit: 0 no promise was broken; 1 one was; 2 the arguments are wrong.",
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=10.0, help="under faults")
    parser.add_argument("--seed", type=int, default=None, help="of the draw; else a new one")
    parser.add_argument("--keep", action="store_true", help="keep all files, even if all is well")
    options = parser.parse_args(arguments)
    seed = options.seed if options.seed is not None else SystemRandom().randrange(1 << 32)
    print(f"seed {seed}, {options.minutes:g} minutes, {_ENGINES} servers", flush=True)
    tree.become_subreaper()
    directory = Path(tempfile.mkdtemp(prefix="muster-chaos-"))
    judgement = asyncio.run(storm(options.minutes, seed, directory))
    faults = [*judgement.faults, *(f"left: pid {pid}" for pid in left())]
    print(judgement.summary)
    for fault in faults[:50]:
        print(f"  fault: {fault}")
    print(f"{len(faults)} FAULTS" if faults else "all is well", flush=True)
    if faults or options.keep:
        print(f"all of it is kept in {directory}")
    else:
        shutil.rmtree(directory, ignore_errors=True)
    return int(bool(faults))


if __name__ == "__main__":
    sys.exit(main())
