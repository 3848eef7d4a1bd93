"""One fault, in one phase, at one level: what a case is, and the scene on which it is played.

A run of three components, `api`, `trainer` and `environment`, has a flow process under the oracle,
beside a process tree that has nothing to do with it. It is brought into the phase, the fault is
injected, the run ends, by itself or told to, and the oracle waits for its emptiness. Then
`run.json`, the Prefect server and the registry must say the same of it, once all that needs a
reconcile has had one.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from tasks.processes import tree
from tasks.spec.probes import ReadyProbe
from tests.support.forkserver import ForkServer
from tests.support.shapes import SHAPES
from tests.support.stage import DEADLINE_S, Stage, is_alive, sh, wait_until
from tests.support.witness import Testimony, Witness, bystander

NAMES = ("api", "trainer", "environment")
LEVELS = ("L2", "L3", "L4")
UP = ReadyProbe(log="up", within_s=DEADLINE_S)
NEVER = ReadyProbe(log="never", within_s=DEADLINE_S)
#: Once told to end, it stays in its grace period until the scene lets it go.
_HOLDS = sh("trap 'echo stopping' TERM; echo up; while [ ! -e release ]; do sleep 0.02; done")
_ROOT = Path(__file__).parents[2]


class Phase(Enum):
    """Where the run stands when the fault comes."""

    IDLE = "before the start"
    START_API = "starting api"
    START_TRAINER = "starting trainer"
    START_ENVIRONMENT = "starting environment"
    RUNNING = "running"
    #: The environment is within its grace period, nothing else was told to end yet.
    STOPPING = "stopping"
    AFTER = "after the run"

    @property
    def starting(self) -> str:
        """The component that is not ready yet; empty in other phases."""
        return self.value.removeprefix("starting ") if self.name.startswith("START_") else ""

    def __str__(self) -> str:
        return self.value


STARTING = (Phase.START_API, Phase.START_TRAINER, Phase.START_ENVIRONMENT)
ALIVE = (*STARTING, Phase.RUNNING, Phase.STOPPING)


def phases_with(component: str) -> tuple[Phase, ...]:
    """Those in which a component's process is there."""
    return ALIVE[NAMES.index(component) :]


@dataclass(frozen=True, slots=True, kw_only=True)
class Expected:
    """The verdict that is the true one. What is None, or empty, may be anything."""

    #: completed | failed | cancelled; empty: there is none, as the flow process was killed.
    state: str
    component: str | None = None
    kind: str | None = None
    signal: str | None = None
    exit_code: int | None = None
    #: Part of the message.
    says: str = ""
    #: The component of which something outlives SIGKILL, or ANYTHING.
    left: str = ""


#: Of whatever component.
ANYTHING = "*"
CANCELLED = Expected(state="cancelled")
#: The flow process has no word on it any more.
KILLED = Expected(state="")


def failed(component: str, **more: Any) -> Expected:
    return Expected(state="failed", component=component, **more)


@dataclass(slots=True)
class Scene:
    """A run in a phase, and what a case may do to it."""

    phase: Phase
    #: The level that is asked for.
    level: str
    directory: Path
    stack: contextlib.ExitStack
    forkserver: ForkServer
    #: `cast[name]`: arguments of `Stage.component`; a case changes them before the run begins.
    cast: dict[str, dict[str, Any]] = field(default_factory=dict)
    #: Arguments of the Witness.
    more: dict[str, Any] = field(default_factory=dict)
    #: `(pids, what)` that must live on.
    bystanders: list[tuple[tuple[int, ...], str]] = field(default_factory=list)
    has_stopped: bool = False
    injected_at: float = 0.0
    #: A name for what lies outside the scene's directory.
    tag: str = field(default_factory=lambda: os.urandom(4).hex())
    witness: Witness = field(init=False)

    def set(self) -> None:
        """The cast of the phase: all are polite, and the one that is starting never gets ready."""
        for name in NAMES:
            self.cast[name] = {"argv": SHAPES["polite"], "ready": UP}
        if self.phase.starting:
            self.cast[self.phase.starting]["ready"] = NEVER
        if self.phase is Phase.STOPPING:
            self.cast["environment"] |= {"argv": _HOLDS, "grace_s": DEADLINE_S}

    def begin(self) -> None:
        components = Stage(self.directory).component
        cast = [components(name, **arguments) for name, arguments in self.cast.items()]
        self.witness = Witness(
            self.forkserver, self.directory, *cast, level=self.level, **self.more
        )
        self.stack.callback(self.witness.clear)

    def reach_phase(self) -> None:
        if starting := self.phase.starting:
            self.until("component.spawned", starting)
            self.until_log(starting, "up")
        elif self.phase is Phase.IDLE:
            self.until("gate.reached", "api")
        else:
            self.until("attempt.ready")
        if self.phase is Phase.STOPPING:
            self.stop()
            self.until("teardown.begun")
            self.until_log("environment", "stopping")

    # What cases do.

    @property
    def until(self) -> Callable[..., dict[str, Any]]:
        return self.witness.until

    def until_log(self, name: str, text: str) -> None:
        log = self.directory / f"{name}.log"
        wait_until(lambda: log.exists() and text in log.read_text(errors="replace"), text)

    def until_gone(self, pid: int) -> None:
        wait_until(lambda: not is_alive(pid), f"{pid} is gone")

    def pid(self, name: str) -> int:
        pid: int = self.until("component.spawned", name)["pid"]
        return pid

    def guardian(self, name: str) -> int:
        """Of a component, or an idle one."""
        if self.witness.seen("component.spawned", name):
            return tree.parent_of(self.pid(name))
        [guardian, *_] = self.guardians(name)
        return guardian

    def guardians(self, name: str) -> list[int]:
        """Every process that is a guardian of a component, as the command lines say."""
        found = []
        for pid in tree.descendants(self.witness.pid):
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
                if any(word.endswith("/guardian.py") for word in words) and name in words:
                    found.append(pid)
        return found

    def signal(self, name: str, signum: int = signal.SIGKILL) -> None:
        os.kill(self.pid(name), signum)

    def stop(self) -> None:
        """Have the run end as cancelled."""
        self.has_stopped = True
        self.witness.end()

    def touch(self, file: str) -> None:
        (self.directory / file).touch()

    def until_verdict(self) -> None:
        wait_until((self.directory / "verdict.json").exists, "the verdict is there")

    @property
    def reconcile(self) -> Callable[[], dict[str, Any]]:
        return self.witness.reconcile


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One fault of shared/facts/supervision.md."""

    number: int
    title: str
    phases: tuple[Phase, ...]
    inject: Callable[[Scene], None] = lambda scene: None
    expect: Expected
    #: In the phase STOPPING a run is cancelled already, whatever comes later.
    expect_stopping: Expected = CANCELLED
    #: Changes the cast, or what surrounds it, before the run begins.
    cast: Callable[[Scene], None] = lambda scene: None
    #: More that must hold, once all has ended.
    check: Callable[[Scene], None] = lambda scene: None
    levels: tuple[str, ...] = LEVELS
    #: The level in force is below the one that was asked for.
    drops: bool = False
    #: The fault shows by itself in the phase: nothing is waited for before `inject`.
    is_at_once: bool = False
    #: Nothing of the registry or of the cgroups may be left; not so where it takes a reconcile.
    is_tidy: bool = True
    #: Why it can't be injected here; empty where it can.
    obstacle: Callable[[], str] = lambda: ""

    def expected(self, phase: Phase) -> Expected:
        return self.expect_stopping if phase is Phase.STOPPING else self.expect

    def __str__(self) -> str:
        return f"{self.number} {self.title}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of one run: a row of the table."""

    #: What the run said of itself.
    verdict: str
    #: From the fault, or the decision on the run's end, to an empty tree.
    empty_after_s: float
    oracles: tuple[str, ...]


def play(case: Case, phase: Phase, level: str, directory: Path, forkserver: ForkServer) -> Outcome:
    """Raises: AssertionError, when anything is not as it must be."""
    with contextlib.ExitStack() as stack:
        scene = Scene(
            phase=phase, level=level, directory=directory, stack=stack, forkserver=forkserver
        )
        scene.bystanders.append((stack.enter_context(bystander()), "an unrelated tree"))
        scene.set()
        case.cast(scene)
        scene.begin()
        if not case.is_at_once:
            scene.reach_phase()
        scene.injected_at = time.time()
        case.inject(scene)
        expected = case.expected(phase)
        if phase is Phase.STOPPING:
            scene.touch("release")
        elif expected.state == "cancelled" and not scene.has_stopped:
            scene.stop()
        testimony = scene.witness.testimony()

        assert testimony.left == (), "outlived the run"
        for pids, what in scene.bystanders:
            assert all(is_alive(pid) for pid in pids), f"{what} was hurt"
        verdict = _judge(scene, expected, testimony)
        if expected.state:
            _judge_flow_run(scene, expected)
        case.check(scene)
        if expected.state and case.is_tidy:
            assert testimony.cgroups == (), "cgroups are left"
            assert not any(scene.witness.home.glob("live/*")), "the registry is left"
        _judge_record(scene, expected)
        _judge_flow_run(scene, expected)
        found = scene.witness.seen("containment")
        # A flow may be killed before it has told.
        assert len(found) == 1 or not (found or expected.state), found
        for containment in found:
            assert (containment["level"] != level) == case.drops, containment
        if case.drops:
            [containment] = found
            verdict += f" (at {containment['level']})"
        return Outcome(
            verdict=verdict,
            empty_after_s=testimony.empty_at - _ending_since(scene),
            oracles=testimony.oracles,
        )


def _judge(scene: Scene, expected: Expected, testimony: Testimony) -> str:
    """What the run said, in words, once it is what it should have said."""
    witness = scene.witness
    if not expected.state:
        assert testimony.exit_code == -signal.SIGKILL, witness.said()
        return "none: its flow was killed"
    verdict = witness.verdict()
    exit_codes = {"completed": 0, "failed": 1, "cancelled": 130}
    assert testimony.exit_code == exit_codes[verdict["state"]], witness.said()
    failure = verdict["failure"] or {}
    words = [verdict["state"], failure.get("kind"), failure.get("component")]
    words.append(failure.get("signal") or failure.get("exit_code"))
    said = " ".join(str(word) for word in words if word is not None)
    assert verdict["state"] == expected.state, f"{said}: {verdict['message']}"
    for what in ("component", "kind", "signal", "exit_code"):
        if (wanted := getattr(expected, what)) is not None:
            assert failure.get(what) == wanted, f"{said}: {verdict['message']}"
    assert expected.says in verdict["message"]
    if expected.left:
        assert expected.left in (ANYTHING, *verdict["left"]), verdict["message"]
    assert bool(verdict["left"]) == bool(expected.left), verdict["message"]
    return said


def _judge_record(scene: Scene, expected: Expected) -> None:
    """What `run.json` and the registry say, once all that needs a reconcile has had one."""
    home, witness = scene.witness.home, scene.witness
    if any(home.glob("live/*")):
        scene.reconcile()
        assert not any(home.glob("live/*")), "the registry is left after a reconcile"
    record = witness.record()
    attempt = record.attempt
    assert attempt is not None and record.state.is_final and attempt.state is record.state
    left = witness.verdict()["left"] if expected.state else {}
    unended = {name for name, one in attempt.components.items() if one.ended_at is None}
    assert unended <= set(left), "one has no end"
    failure = attempt.failure.as_json() if attempt.failure else {}
    if not expected.state:
        assert failure["rule"] == "flow-lost", failure
        return
    said = witness.verdict()
    assert (record.state.value, record.message) == (said["state"], said["message"])
    for key, value in (said["failure"] or {}).items():
        # Of a run whose record did not find room, the log itself has its last lines.
        if key != "log_tail" or failure[key]:
            assert failure[key] == value, key


def _judge_flow_run(scene: Scene, expected: Expected) -> None:
    """What the Prefect server says: as soon as the flow process has ended, where that was not
    killed, and else once a reconcile has been; and nothing changes it later."""
    state = scene.witness.flow_run()["state"]
    said = state["type"], state["name"], state["message"]
    if expected.state:
        verdict = scene.witness.verdict()
        message = verdict["message"]
        if verdict["state"] == "failed":
            assert message.startswith(f"{verdict['failure']['kind']}: "), message
        assert said[:2] == (expected.state.upper(), expected.state.capitalize()), said
        assert state["message"].startswith(message), said
    else:
        assert said[:2] == ("CRASHED", "Crashed"), said
        assert state["message"] in scene.witness.record().message, said


def _ending_since(scene: Scene) -> float:
    begun = scene.witness.seen("teardown.begun")
    if begun and scene.phase is not Phase.STOPPING:
        return float(begun[0]["at"])
    return scene.injected_at


@functools.cache
def missing_levels() -> dict[str, str]:
    """Why a level is not to be had on this machine, of those that are not."""
    code = (
        "import json; from tasks.processes.containment import probe\n"
        "print(json.dumps({k.value: v for k, v in probe(namespace=True).missing.items()}))"
    )
    # The probe makes a process a subreaper: not this one.
    done = subprocess.run([sys.executable, "-c", code], cwd=_ROOT, capture_output=True, check=True)
    missing: dict[str, str] = json.loads(done.stdout)
    return missing


def act(case: Case, phase: Phase, level: str, request: pytest.FixtureRequest) -> None:
    """The test of one row; what is to stand in the table goes to the test's report."""
    note = request.node.user_properties.append
    note(("row", {"case": str(case), "phase": str(phase), "level": level}))
    if why := missing_levels().get(level) or case.obstacle():
        pytest.skip(why)
    places = map(request.getfixturevalue, ("tmp_path", "forkserver"))
    outcome = play(case, phase, level, *places)
    # As plain data: with `-n` a report travels from one process to another.
    note(("outcome", asdict(outcome)))
