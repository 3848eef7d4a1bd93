"""Where every server of a fleet goes and what it runs: frozen data, checked as a whole.

Ranks are numbered over the whole fleet, engine by engine: rank r is one GPU (one process of the
backend `command`). A server is called by the first of its ranks.
Beside them the numbers of a fleet's health and recovery.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from tasks.spec.rollout import UNLIMITED, Rollout
from tasks.spec.words import commas


class Answers(Enum):
    """What an answer over HTTP of a server proves."""

    #: That its engine works.
    ENGINE = "engine"
    #: Only that its process lives, whatever became of the engine.
    PROCESS = "process"
    #: It has no API.
    NONE = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One HTTP request by which a server is judged."""

    method: str
    #: Begins with `/`.
    path: str
    #: Sent as JSON; None: no body.
    body: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Questions:
    """What the servers of a fleet are asked."""

    #: 200 says that the server may be sent requests.
    ready: Ask
    #: 200 says that a token was generated just now; None where the backend has no such request.
    token: Ask | None
    #: Until when the backend itself says yes or no to any of them, in seconds; 0: at once.
    own_timeout_s: float = 0.0
    #: By which it stops where it is, with what it generates, and goes on later; None: it can't.
    pause: Ask | None = None
    resume: Ask | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSlot:
    """The planned place of one server process."""

    rank: int
    #: Index into the plan's engines.
    engine: int
    #: Index into the fleet's nodes.
    node: int
    #: One for each of its GPUs, of the one placement group of the fleet.
    bundles: tuple[int, ...]
    #: Ranks whose weights are updated through it; none for one that only takes part.
    weight_ranks: tuple[int, ...]
    #: It accepts rollout requests.
    is_entrypoint: bool
    answers: Answers
    host: str
    #: None where it has no API.
    port: int | None
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str | None:
        """`http://host:port`; None where it has no API."""
        return None if self.port is None else f"http://{self.host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One logical inference instance. Its servers are one lifecycle group."""

    ranks: tuple[int, ...]
    #: Indexes of the nodes that it spans, in the order of its ranks.
    nodes: tuple[int, ...]
    #: `host:port`, where its processes on several nodes meet; None where nothing does.
    dist_init: str | None
    servers: tuple[ServerSlot, ...]

    @property
    def group(self) -> tuple[int, ...]:
        """The ranks of its servers, which are stopped and started together."""
        return tuple(server.rank for server in self.servers)


@dataclass(frozen=True, slots=True, kw_only=True)
class TopologyPlan:
    """All engines of a fleet.

    Raises: ValueError, where it does not hold together, with each fault by its engine and ranks.
    """

    engines: tuple[Engine, ...]
    questions: Questions
    #: local | ray
    placement: str

    def __post_init__(self) -> None:
        if faults := list(_faults(self.engines)):
            raise ValueError("; ".join(faults))

    @property
    def servers(self) -> tuple[ServerSlot, ...]:
        """All servers, by their ranks."""
        slots = (slot for engine in self.engines for slot in engine.servers)
        return tuple(sorted(slots, key=lambda slot: slot.rank))

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """`groups[engine]`: the ranks of the servers that live and die together."""
        return tuple(engine.group for engine in self.engines)

    @property
    def training_mesh(self) -> tuple[tuple[int, ...], ...]:
        """`training_mesh[entry]`: the ranks whose weights a trainer syncs through one server."""
        return tuple(slot.weight_ranks for slot in self.servers if slot.weight_ranks)

    def as_json(self) -> dict[str, Any]:
        """Plain data, as `muster plan --json` prints it."""
        return {
            "engines": [
                {"ranks": list(engine.ranks), "nodes": list(engine.nodes)}
                for engine in self.engines
            ],
            "servers": [
                {
                    "rank": slot.rank,
                    "node": slot.node,
                    "argv": list(slot.argv),
                    "env": dict(slot.env),
                    "entrypoint": slot.is_entrypoint,
                    "group": slot.engine,
                    "bundles": list(slot.bundles),
                }
                for slot in self.servers
            ],
            "groups": [list(group) for group in self.groups],
            "training_mesh": [list(ranks) for ranks in self.training_mesh],
        }


def _faults(engines: tuple[Engine, ...]) -> Iterator[str]:
    if not engines:
        yield "no engines"
    taken: set[int] = set()
    bundles: set[int] = set()
    addresses: dict[tuple[str, int], int] = {}
    for index, engine in enumerate(engines):
        name = f"engine {index}"
        if not engine.ranks:
            yield f"{name}: no ranks"
        if twice := _twice(engine.ranks):
            yield f"{name}: lists a rank twice: {_listed(twice)}"
        if shared := taken.intersection(engine.ranks):
            yield f"{name}: ranks of another engine too: {_listed(shared)}"
        taken.update(engine.ranks)
        yield from _faults_of_servers(name, index, engine)
        for slot in engine.servers:
            if reused := _twice(slot.bundles) + tuple(bundles.intersection(slot.bundles)):
                yield f"{name}, server {slot.rank}: a bundle is used twice: {_listed(reused)}"
            bundles.update(slot.bundles)
            if slot.port is None:
                continue
            other = addresses.setdefault((slot.host, slot.port), slot.rank)
            if other != slot.rank:
                yield f"servers {other} and {slot.rank}: both at {slot.host}:{slot.port}"


def _faults_of_servers(name: str, index: int, engine: Engine) -> Iterator[str]:
    if not engine.servers:
        yield f"{name}: no server"
        return
    if not any(slot.is_entrypoint for slot in engine.servers):
        yield f"{name}: no entrypoint among its servers {_listed(engine.group)}"
    if twice := _twice(engine.group):
        yield f"{name}: two servers of one rank: {_listed(twice)}"
    covered: set[int] = set()
    for slot in engine.servers:
        server = f"{name}, server {slot.rank}"
        if slot.engine != index:
            yield f"{server}: says that it is of engine {slot.engine}"
        if slot.rank not in engine.ranks:
            yield f"{server}: is outside its engine's ranks {_listed(engine.ranks)}"
        if slot.is_entrypoint and slot.port is None:
            yield f"{server}: is an entrypoint without a port"
        if unknown := set(slot.weight_ranks) - set(engine.ranks):
            yield f"{server}: updates the weights of ranks that are not its engine's: " + _listed(
                unknown
            )
        if again := _twice(slot.weight_ranks) + tuple(covered.intersection(slot.weight_ranks)):
            yield f"{server}: updates the weights of a rank twice: {_listed(again)}"
        covered.update(slot.weight_ranks)
    if missing := set(engine.ranks) - covered:
        yield f"{name}: no server updates the weights of ranks {_listed(missing)}"


def _twice(numbers: Iterable[int]) -> tuple[int, ...]:
    return tuple(number for number, count in Counter(numbers).items() if count > 1)


def _listed(numbers: Iterable[int]) -> str:
    return commas(sorted(numbers))


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings:
    """As its spec has them, with what was left out filled in."""

    #: Between two questions to a server.
    interval_s: float = 30.0
    #: An answer that takes longer is a miss; less than the interval, or detection takes longer.
    timeout_s: float = 15.0
    #: So many in a row end a server's group; 0: no periodic questions, barriers ask nevertheless.
    misses: int = 3
    #: From when a server began to serve to its first question; None: one interval.
    first_after_s: float | None = None
    #: Recoveries in all, an incident of many groups counted once; None: no limit.
    budget: int | None = None
    #: Before the second recovery in a row of one group; it then grows.
    backoff_s: float = 1.0
    #: No pause between tries is longer.
    max_backoff_s: float = 60.0
    #: Groups that recover at once.
    parallel: int = 4
    #: Fewer groups that serve: the run has failed; None: while any can be recovered, it has not.
    min_active: int | None = None
    #: From the start of a group to its first token, at most.
    start_within_s: float = 1800.0
    #: From the stop signal to SIGKILL.
    grace_s: float = 10.0
    #: Requests that one entrypoint takes at once; None: any number.
    concurrency: int | None = None

    @property
    def first_s(self) -> float:
        """From when a server began to serve to its first question."""
        return self.interval_s if self.first_after_s is None else self.first_after_s

    @property
    def stop_within_s(self) -> float:
        """By then a host has answered a `stop`; its own bound is shorter."""
        return self.grace_s + 20.0


#: Recoveries, where a spec does not say how many: an engine may lose its node and come back, even
#: more than once, but one whose server dies at every start is not restarted for ever.
_BUDGET_PER_ENGINE, _LEAST_BUDGET = 3, 10


def settings_of(fleet: Rollout) -> FleetSettings:
    """The numbers of a fleet, as its spec says them; what that leaves out, by their defaults."""
    budget = fleet.recovery.budget or max(_LEAST_BUDGET, _BUDGET_PER_ENGINE * fleet.engines)
    given: dict[str, Any] = {
        **fleet.health.model_dump(exclude={"path", "token"}),
        **fleet.recovery.model_dump(),
        "budget": None if budget == UNLIMITED else budget,
        "start_within_s": fleet.start_within_s,
        "grace_s": fleet.stop.grace_s,
        "concurrency": fleet.concurrency,
    }
    return FleetSettings(**{name: one for name, one in given.items() if one is not None})
