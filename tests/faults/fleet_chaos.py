"""Run a rollout fleet under random faults: `python -m tests.faults.fleet_chaos [--minutes 10]`.

Eight server processes run behind the real gateway, each under its guardian. Clients send requests
all the time. A trainer sends new weights. It commits, aborts or abandons each weight update, and
some weights break a server. Every few seconds a random fault hits a server: it is killed, stopped
or slowed down, it answers 503, garbage or nothing, or another program takes its port.

At the end, the results of the clients and the records of the servers must show that:

- each request had exactly one result, and no request was answered twice;
- each answer was made with weights that the fleet had committed;
- no server was restarted without a serious fault.

The seed is printed. The same seed draws the same faults, but the timing of the machine differs.
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
from tests.support.supervised_components import free_port

_ENGINES = 8
_CLIENTS = 24
_HEALTH = {"interval_s": 1.0, "timeout_s": 2.0, "misses": 2}
_RECOVERY = {"budget": "unlimited", "backoff_s": 0.1, "max_backoff_s": 1.0, "parallel": 4}
#: A request without a complete answer after this time, in seconds, counts as lost.
_ANSWER_WITHIN_S = 60.0
#: Time limit, in seconds, within which all engines must be ready.
_READY_WITHIN_S = 60.0
#: Duration, in seconds, of the last part of the test. No fault is injected in this part.
_LAST_FAULT_BEFORE_S = 10.0
#: Time limit, in seconds, on one request to a server.
_PUSH_WITHIN_S = 2.0
#: Time before and after an answer, in seconds. If the server fails within this time, the answer has
#: possibly not reached the gateway.
_SAME_MOMENT_S = 0.2
#: Faults that justify a restart of the server. The server must survive all other faults.
_GRAVE = frozenset({"kill", "stop", "hang", "503", "garbage", "steal", "broken weights"})
#: Pattern of a comment line in a stream of server-sent events. The gateway sends this line at the
#: end of the stream, to report the weight version.
_VERSION_COMMENT = re.compile(r"^: X-Muster-Version: (\d+)$", re.MULTILINE)
_FAULTS = ("kill", "stop", "hang", "503", "garbage", "steal", "slow", "4xx")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Result of one request, as its client saw it."""

    #: Request id.
    id: str
    #: Kind of the result: "answered", "refused" (the request may be retried), "cut" (the connection
    #: broke during the answer), "passed on" (a server's own error), "lost" (no answer in time) or
    #: "other".
    kind: str
    #: Start of the request, in UTC epoch seconds.
    began: float
    #: Duration of the request, in seconds.
    took_s: float
    #: Rank of the server that answered. -1 if no server answered.
    rank: int = -1
    #: Weight versions that the server reports in the pieces of the answer.
    versions: frozenset[int] = frozenset()
    #: Weight versions that the gateway reports in the header and at the end of a stream.
    gateway_versions: frozenset[int] = frozenset()
    #: Empty for a correct answer. Otherwise a description of the error, for example the body of the
    #: response.
    text: str = ""


@dataclass(slots=True, kw_only=True)
class Chaos:
    """One test run of the rollout fleet: its clients, its trainer, and the injected faults."""

    #: Port of the gateway.
    port: int
    #: Random generator for all random decisions of the test.
    random: Random
    #: Directory with the files of the fleet.
    directory: Path
    #: Time after which the clients send no requests and no faults are injected, in UTC epoch
    #: seconds.
    until: float
    #: HTTP client that all tasks share.
    client: aiohttp.ClientSession
    #: Results of all requests.
    outcomes: list[Outcome] = field(default_factory=list)
    #: Injected faults: time in UTC epoch seconds, rank of the server, kind of the fault.
    faults: list[tuple[float, int, str]] = field(default_factory=list)
    #: Committed weight versions, each with the time of its commit in UTC epoch seconds.
    synced: list[tuple[float, int]] = field(default_factory=list)
    #: Start and end, in UTC epoch seconds, of each call that aborted the running requests because
    #: a weight update began.
    aborted: list[tuple[float, float]] = field(default_factory=list)
    #: Mapping from a result of `_sync` to the number of weight updates with this result.
    ends: Counter[str] = field(default_factory=Counter)
    #: Running tasks of the fault "steal". Each task listens on the port of a killed server.
    tasks: set[asyncio.Task[None]] = field(default_factory=set)

    @property
    def url(self) -> str:
        """Base URL of the gateway."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def is_over(self) -> bool:
        """True if the clients must send no more requests, because the time of the test is over."""
        return time.time() > self.until

    async def snapshot(self) -> dict[str, Any]:
        """Return the gateway's status document with the state of all servers and engines."""
        async with self.client.get(f"{self.url}/muster/rollout") as response:
            snapshot: dict[str, Any] = await response.json()
        return snapshot

    async def ask(self, number: int) -> None:
        """Act as one client: send requests one by one until the time of the test is over.

        Two random choices decide for each request whether it asks for a stream, and whether it
        belongs to a session.
        """
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
            self.outcomes.append(await self._send_request(id, body, headers))
            if self.outcomes[-1].kind != "answered":
                await asyncio.sleep(random.uniform(0, 0.2))

    async def _send_request(
        self, id: str, body: dict[str, Any], headers: dict[str, str]
    ) -> Outcome:
        """Send one generation request to the gateway and return its result."""
        began = time.time()

        def outcome(kind: str, **fields: Any) -> Outcome:
            return Outcome(id=id, kind=kind, began=began, took_s=time.time() - began, **fields)

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
            gateway_versions = {
                answer.headers["X-Muster-Version"],
                *_VERSION_COMMENT.findall(text),
            }
            if body["stream"] and "[DONE]" not in text:
                return outcome("other", text=text[-300:])
            return outcome(
                "answered",
                rank=pieces[0]["rank"],
                versions=versions,
                gateway_versions=frozenset(map(int, gateway_versions)),
            )
        if status in (502, 503) and '"retryable": true' in text:
            return outcome("refused", text=text)
        # The gateway must pass the error of a server on to the client.
        is_error_of_server = status in (404, 500, 503) and "told to answer" in text
        kind = "passed on" if is_error_of_server else "other"
        return outcome(kind, text=f"{status} {text[:300]}")

    async def train(self) -> None:
        """Act as the trainer: send new weights until the time of the test is over."""
        version = 0
        while not self.is_over:
            await asyncio.sleep(self.random.uniform(0.5, 3.0))
            version += 1
            self.ends[await self._sync(version)] += 1

    async def _sync(self, version: int) -> str:
        """Act as the trainer: update the engines to a weight version, and return the result.

        Returns:
            "refused" if the gateway did not begin the update. "late" if a later request of the
            update failed. Otherwise the way in which the trainer ended the update: "commit",
            "give up" (an abort) or "forget" (the trainer sent no further request).
        """
        random = self.random
        in_flight = random.choice(["wait", "abort"])
        began = time.time()
        status, begun_sync = await self._order(
            "POST", "sync", {"timeout_s": random.choice([3.0, 20.0]), "in_flight": in_flight}
        )
        if in_flight == "abort":
            self.aborted.append((began, time.time()))
        if status != 200:
            return "refused"
        sync = f"sync/{begun_sync['sync']}"
        engines = [target["engine"] for target in begun_sync["targets"]]
        broken = [random.choice(engines)] if engines and random.random() < 0.15 else []
        self.faults += [(time.time(), engine, "broken weights") for engine in broken]
        order = {
            "path": "/weights",
            "body": {"version": version, "broken_for": broken},
            "timeout_s": _PUSH_WITHIN_S,
        }
        status, broadcast = await self._order("POST", f"{sync}/broadcast", order)
        end = random.choice(["commit"] * 8 + ["give up", "forget"])
        if status != 200:
            return "late"
        if end == "forget":
            # The trainer abandons the weight update without a message to the gateway. The gateway
            # refuses all other updates until the time limit of this update is over.
            return end
        if end == "give up":
            status, _ = await self._order("DELETE", sync)
            return end if status == 200 else "late"
        # The request that commits the weight update also names engines that could not load the new
        # weights (HTTP status 500). Although the trainer names these engines, the gateway must not
        # send requests to them.
        answers = [answer for answer in broadcast["answers"] if answer["status"] is not None]
        epochs = {
            str(answer["engine"]): answer["epoch"] for answer in answers if random.random() < 0.95
        }
        status, _ = await self._order(
            "POST", f"{sync}/commit", {"version": version, "epochs": epochs}
        )
        if status == 200:
            self.synced.append((time.time(), version))
        return end if status == 200 else "late"

    async def _order(
        self, method: str, path: str, body: Mapping[str, Any] | None = None
    ) -> tuple[int, dict[str, Any]]:
        """Send a request to the gateway's weight update API; return the status and the body."""
        async with self.client.request(
            method, f"{self.url}/muster/rollout/{path}", json=body
        ) as response:
            return response.status, await response.json()

    async def disturb(self) -> None:
        """Inject a random fault into a random server every few seconds."""
        while time.time() < self.until - _LAST_FAULT_BEFORE_S:
            await asyncio.sleep(self.random.uniform(0.5, 3.0))
            server = self.random.choice((await self.snapshot())["servers"])
            kind = self.random.choice(_FAULTS)
            if server["state"] in ("starting", "recovering", "inactive") and kind != "kill":
                continue
            at = time.time()
            if await self._inject(kind, server):
                self.faults.append((at, server["rank"], kind))

    async def _inject(self, kind: str, server: dict[str, Any]) -> bool:
        """Inject one fault into a server, and return True if the fault could be injected."""
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
        """Kill or stop the process that listens on the port.

        Return True if a process listened on the port.

        For the kind "steal", kill the process, and then listen on the port for some seconds.
        """
        # After the fault "steal", this program itself may listen on the port, and must not get the
        # signal.
        pids = [listener.pid for listener in listeners(port) if listener.pid != os.getpid()]
        with contextlib.suppress(ProcessLookupError):
            for pid in pids:
                os.kill(pid, signal.SIGSTOP if kind == "stop" else signal.SIGKILL)
        if kind == "steal" and pids:
            task = asyncio.create_task(_hold_port(port, self.random.uniform(2, 8)))
            self.tasks.add(task)
            task.add_done_callback(self.tasks.discard)
        return bool(pids)


async def _hold_port(port: int, seconds: float) -> None:
    """Listen on a port as soon as the port is free, and release the port after `seconds`."""
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
    """Return the metadata of each chunk of a streamed answer.

    The list is empty if the answer is not valid.
    """
    try:
        if text.startswith("data:"):
            lines = [line[6:] for line in text.split("\n\n") if line.startswith("data: {")]
            return [json.loads(line)["meta_info"] for line in lines]
        return [json.loads(text)["meta_info"]]
    except (ValueError, KeyError):
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class Judgement:
    """Result of the checks after the fleet has run under faults."""

    #: Violated requirements, one sentence each. Empty if the fleet met all requirements.
    faults: list[str]
    #: Numbers of requests, faults, restarts and weight updates.
    summary: str


def judge(chaos: Chaos, ledger: Path, events: Path) -> Judgement:
    """Check all requirements that the module's docstring lists.

    Args:
        chaos: The run, with the results of its clients.
        ledger: File in which the servers have recorded their generations.
        events: File with the events of the fleet.
    """
    outcomes = chaos.outcomes
    faults = [
        f"{outcome.id}: {outcome.kind} after {outcome.took_s:.1f} s: {outcome.text}"
        for outcome in outcomes
        if outcome.kind in ("lost", "other")
    ]
    generations = [json.loads(line) for line in ledger.read_text().splitlines()]
    generated_ids = {generation["id"] for generation in generations}
    faults += _answered_twice(generations, events, chaos.aborted)
    faults += [
        f"{outcome.id}: answered, but no server has recorded it"
        for outcome in outcomes
        if outcome.kind == "answered" and outcome.id not in generated_ids
    ]
    for outcome in outcomes:
        if outcome.kind == "answered" and (error := _wrong_weights(outcome, chaos.synced)):
            faults.append(f"{outcome.id}: rank {outcome.rank}, {error}")

    restarts = _restarts(events)
    last_restarts: dict[int, float] = {}
    for at, rank, cause in restarts:
        # A fault affects only the current process of a server. So the fault explains only the next
        # restart of this server.
        last_restart = last_restarts.get(rank, 0.0)
        last_restarts[rank] = at
        fault_times = [
            fault_at
            for fault_at, fault_rank, kind in chaos.faults
            if fault_rank == rank and kind in _GRAVE
        ]
        if not any(last_restart < fault_at < at for fault_at in fault_times):
            faults.append(f"rank {rank} was restarted, and nothing was done to it: {cause}")

    request_counts = Counter(outcome.kind for outcome in outcomes)
    fault_counts = Counter(kind for _, _, kind in chaos.faults)
    durations = sorted(outcome.took_s for outcome in outcomes)
    summary = (
        f"{len(outcomes)} requests: {_listed(request_counts)}; "
        f"{len(chaos.faults)} faults: {_listed(fault_counts)}; "
        f"{len(restarts)} restarts, syncs of weights: {_listed(chaos.ends)}; a request took "
        f"{1000 * durations[len(durations) // 2]:.0f} ms at the median, "
        f"{durations[-1]:.1f} s at most"
    )
    return Judgement(faults=faults, summary=summary)


def _wrong_weights(outcome: Outcome, synced: Sequence[tuple[float, int]]) -> str:
    """Return the error in an answer's weight version, or an empty string for a correct version.

    Args:
        outcome: Result of a request that was answered.
        synced: Committed versions, each with its time in UTC epoch seconds.
    """
    if len(outcome.versions) != 1:
        return f"its pieces have the versions {sorted(outcome.versions)}"
    [version] = outcome.versions
    oldest_allowed = max((version for at, version in synced if at < outcome.began), default=0)
    if outcome.gateway_versions != outcome.versions:
        return f"version {version}, and the gateway said {sorted(outcome.gateway_versions)}"
    if version not in {0, *(version for _, version in synced)}:
        return f"version {version}, which was never committed"
    if version < oldest_allowed:
        return f"version {version}, and {oldest_allowed} was committed before"
    return ""


def _answered_twice(
    generations: Sequence[Mapping[str, Any]], events: Path, aborted: Sequence[tuple[float, float]]
) -> list[str]:
    """Return a message for each request that the gateway sent to a second server without need.

    The gateway may send a request again only if the first answer was lost. An answer may be lost if
    the server failed at about the same time, or if a weight update aborted the request.

    Args:
        generations: Records of the servers.
        events: File with the events of the fleet.
        aborted: Start and end, in UTC epoch seconds, of each call that aborted the running
            requests because a weight update began.
    """
    failed = [
        (line["at"], line["ranks"])
        for line in map(json.loads, events.read_text().splitlines())
        if line["event"] == "rollout.group.state" and line["after"] == "inactive"
    ]
    answers_by_id: dict[str, list[Mapping[str, Any]]] = {}
    for generation in sorted(generations, key=lambda generation: float(generation["at"])):
        answers_by_id.setdefault(generation["id"], []).append(generation)

    def may_be_lost(answer: Mapping[str, Any]) -> bool:
        has_server_failed = any(
            answer["rank"] in ranks and abs(at - answer["at"]) < _SAME_MOMENT_S
            for at, ranks in failed
        )
        was_aborted = any(
            began <= answer["at"] <= ended + _SAME_MOMENT_S for began, ended in aborted
        )
        return has_server_failed or was_aborted

    return [
        f"{id}: answered {len(answers)} times, first by rank {answer['rank']} at {answer['at']:.3f}"
        for id, answers in answers_by_id.items()
        for answer in answers[:-1]
        if not may_be_lost(answer)
    ]


def _restarts(events: Path) -> list[tuple[float, int, str]]:
    """Return the time, the server's rank and the cause of each recovery.

    Further tries of the same recovery are not included.
    """
    lines = [json.loads(line) for line in events.read_text().splitlines()]
    return [
        (line["at"], rank, line["cause"])
        for line in lines
        if line["event"] == "rollout.recovery.begun" and line["try"] == 1
        for rank in line["ranks"]
    ]


def _listed(counts: Counter[str]) -> str:
    """Return counts as text, for example "3 kill, 1 stop"."""
    return ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))


def plan_in(directory: Path, ledger: Path) -> FleetPlan:
    """Return the plan of a fleet of fake inference servers.

    Args:
        directory: Directory of the fleet's files.
        ledger: File to which the servers append a line for each generated answer.
    """
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
    """Start the process of a fleet, yield the process, and end it when the context ends."""
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
    """Start a fleet, inject faults into the fleet, and return the result of the checks.

    Args:
        minutes: Duration of the faults.
        seed: Seed of the random draws.
        directory: Empty directory for the files of the fleet.
    """
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
    """Wait until each engine is ready. An engine that lacks only new weights counts as ready, too.

    Raises:
        TimeoutError: An engine was not ready in time.
    """
    async with asyncio.timeout(_READY_WITHIN_S):
        while True:
            with contextlib.suppress(aiohttp.ClientError):
                engines = (await chaos.snapshot())["engines"]
                ready_states = ("active", "suspect", "stale")
                if all(engine["state"] in ready_states for engine in engines):
                    return
            await asyncio.sleep(0.1)


def leftover_pids() -> list[int]:
    """Wait up to ten seconds until all descendants of this process have ended.

    This process must be a subreaper, so that orphaned descendants become its children.

    Returns:
        The process ids of the descendants that still run.
    """
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
    faults = [*judgement.faults, *(f"left: pid {pid}" for pid in leftover_pids())]
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
