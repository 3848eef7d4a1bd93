"""Where every server of a fleet goes and what it runs: frozen data, checked as a whole.

Ranks are numbered over the whole fleet, engine by engine: rank r is one GPU (one process of the
backend `command`). A server is called by the first of its ranks.
Beside them the numbers of a fleet's health and recovery.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from tasks.spec.rollout import UNLIMITED, Rollout
from tasks.spec.words import commas

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One HTTP request to a server."""

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
    #: It accepts rollout requests, and its answers prove that its engine works. Those of another
    #: one prove only that its process lives.
    is_entrypoint: bool
    host: str
    #: None where it has no API.
    port: int | None
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)

    @property
    def url(self) -> str | None:
        """None where it has no API."""
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
            "engines": [{"ranks": [*one.ranks], "nodes": [*one.nodes]} for one in self.engines],
            "servers": [
                {
                    "rank": slot.rank,
                    "node": slot.node,
                    "argv": [*slot.argv],
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
    ranks: set[int] = set()
    bundles: set[int] = set()
    addresses: set[str] = set()
    for index, engine in enumerate(engines):
        name = f"engine {index}"
        updated: set[int] = set()
        if not engine.ranks:
            yield f"{name}: no ranks"
        yield from _again(f"{name}: a rank is listed twice", engine.ranks, ranks)
        if not engine.servers:
            yield f"{name}: no server"
        elif not any(slot.is_entrypoint for slot in engine.servers):
            yield f"{name}: no entrypoint among its servers {commas(engine.group)}"
        for slot in engine.servers:
            server = f"{name}, server {slot.rank}"
            if slot.rank not in engine.ranks:
                yield f"{server}: is outside its engine's ranks {commas(engine.ranks)}"
            if unknown := set(slot.weight_ranks) - set(engine.ranks):
                what = "updates the weights of ranks that are not its engine's"
                yield f"{server}: {what}: {commas(sorted(unknown))}"
            what = "updates the weights of a rank twice"
            yield from _again(f"{server}: {what}", slot.weight_ranks, updated)
            yield from _again(f"{server}: a bundle is used twice", slot.bundles, bundles)
            if slot.url is not None:
                yield from _again(f"{server}: an address is used twice", (slot.url,), addresses)
        if missing := set(engine.ranks) - updated:
            yield f"{name}: no server updates the weights of ranks {commas(sorted(missing))}"


def _again(fault: str, found: Iterable[T], seen: set[T]) -> Iterator[str]:
    """That some were seen before, or come twice; all of them are seen then."""
    for one in found:
        if one in seen:
            yield f"{fault}: {one}"
        seen.add(one)


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
        """By then a host has answered a `stop`."""
        return self.grace_s + 20.0


#: Recoveries, where a spec does not say how many: an engine may lose its node and come back, even
#: more than once, but one whose server dies at every start is not restarted for ever.
_BUDGET_PER_ENGINE, _LEAST_BUDGET = 3, 10


def settings_of(fleet: Rollout) -> FleetSettings:
    """The numbers of a fleet's spec; what that leaves out, by their defaults."""
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
