"""Tests of the final state of an attempt, for given histories of its components.

The processes of the components are fakes that follow a script.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from tasks.processes.attempt import SupervisedAttempt
from tasks.processes.component import AttemptPlan, ComponentPlan, forever
from tasks.processes.guarded import Command, GuardedProcess
from tasks.processes.ports import PortsReserved
from tasks.record.outcome import Exit, GiveUpReason, Verdict
from tasks.record.states import RunState
from tasks.spec.errors import RunEnded
from tasks.spec.failure_kinds import FailureKind
from tasks.spec.probes import LiveProbe, ReadyProbe
from tasks.spec.run import Progress
from tasks.spec.watch import Watch

pytestmark = pytest.mark.asyncio

#: Start of each scripted history of events, in seconds of the monotonic clock. The start is 1,000 s
#: ago, so that no event of the history is in the future.
ORIGIN_S = time.monotonic() - 1000


class ScriptedProcess:
    """A fake `GuardedProcess`. Only the test, or the clean-up after the test, ends the process."""

    made: dict[str, ScriptedProcess]
    refuses: dict[str, OSError]

    def __init__(self, name: str) -> None:
        loop = asyncio.get_running_loop()
        self.name = name
        self.pid: int | None = None
        self.guardian_pid = 0
        self.stuck: tuple[int, ...] = ()
        self.requests: list[str] = []
        self.stragglers: tuple[str, ...] = ()
        self.was_killed = False
        self.exited: asyncio.Future[Exit] = loop.create_future()
        self.empty: asyncio.Future[None] = loop.create_future()
        self.ended = self.empty
        self.has_survivors: asyncio.Future[None] = loop.create_future()

    @classmethod
    def prepare(cls, name: str, **more: object) -> ScriptedProcess:
        cls.made[name] = cls(name)
        return cls.made[name]

    async def launch(self, command: Command, **more: object) -> int:
        if self.name in self.refuses:
            self.empty.set_result(None)
            raise self.refuses[self.name]
        self.pid = 100 + list(self.made).index(self.name)
        return self.pid

    def ends(self, at_s: float, code: int | None = None, signal: int | None = None) -> None:
        self.exited.set_result(Exit(exit_code=code, signal=signal, at_monotonic_s=ORIGIN_S + at_s))
        self.empty.set_result(None)

    def stop(self) -> None:
        """End the process a moment later, unless the test ends the process first."""
        self.requests.append("stop")
        asyncio.get_running_loop().call_later(0.02, self._end_politely)

    def _end_politely(self) -> None:
        if not self.empty.done():
            self.ends(time.monotonic() - ORIGIN_S, signal=15)

    def processes(self) -> list[int]:
        return []

    def kill(self) -> None:
        self.requests.append("kill")

    def dismiss(self) -> None:
        self.requests.append("dismiss")
        if not self.empty.done():
            self.empty.set_result(None)

    end = GuardedProcess.end
    _wait_for_end = GuardedProcess._wait_for_end
    leftover_pids = GuardedProcess.leftover_pids
    unended_pids = GuardedProcess.unended_pids

    def abandon_guardian(self) -> None:
        self.requests.append("abandon")


@pytest.fixture(autouse=True)
def scripted(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr("tasks.processes.guards.GuardedProcess", ScriptedProcess)
    monkeypatch.setattr("tasks.processes.progress._LAST_STEP_WITHIN_S", 0.2)
    ScriptedProcess.made, ScriptedProcess.refuses = {}, {}
    yield


Events = list[tuple[str, str | None]]
MakeAttempt = Callable[..., Awaitable[SupervisedAttempt]]


@pytest.fixture
def events() -> Events:
    return []


@pytest.fixture
def begin(tmp_path: Path, events: Events) -> MakeAttempt:
    """Return a function that starts an attempt.

    The function takes the components as further keyword arguments. The keyword is the name of the
    component, and the value is the component's setting `on_exit_zero`.
    """

    async def begin(
        plan: Mapping[str, Any] | None = None,
        live: Mapping[str, LiveProbe] | None = None,
        start: bool = True,
        find_checkpoint: Callable[[], tuple[int | None, float] | None] | None = None,
        **components: str,
    ) -> SupervisedAttempt:
        plans = tuple(
            ComponentPlan(
                name=name,
                command=Command(argv=("x",), env={}, cwd=tmp_path, log=tmp_path / f"{name}.log"),
                ready=None,
                live=(live or {}).get(name),
                on_exit_zero=on_exit_zero,  # type: ignore[arg-type]
                find_checkpoint=find_checkpoint,
            )
            for name, on_exit_zero in components.items()
        )
        attempt = SupervisedAttempt(
            AttemptPlan(run_id="r", number=1, cwd=tmp_path, components=plans, **(plan or {})),
            PortsReserved([]),
            lambda name, component=None, **fields: events.append((name, component)),
        )
        attempt.prepare()
        for name in components if start else ():
            await attempt.start(name)
        return attempt

    return begin


async def verdict_of(attempt: SupervisedAttempt) -> Verdict:
    await asyncio.wait_for(attempt.decided.wait(), 30)
    return await attempt.teardown()


def process(name: str) -> ScriptedProcess:
    return ScriptedProcess.made[name]


async def reports_arrive() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.mark.parametrize("first_reported", ["api", "trainer"])
@pytest.mark.parametrize(
    ("api", "trainer", "cause"),
    [
        # two components fail: the earlier failure is the cause, even if Muster first receives the
        # report of the other failure
        ((2.0, 1), (1.0, 1), "trainer"),
        # the trainer completes and `api` fails: the run fails only if `api` failed first
        ((2.0, 1), (1.0, 0), None),
        ((1.0, 1), (2.0, 0), "api"),
    ],
)
async def test_earliest_event_decides_in_any_order_of_reports(
    begin: MakeAttempt,
    api: tuple[float, int],
    trainer: tuple[float, int],
    cause: str | None,
    first_reported: str,
) -> None:
    attempt = await begin(api="fail", trainer="complete")
    ends = {"api": api, "trainer": trainer}

    for name in sorted(ends, key=lambda name: name != first_reported):
        at_s, code = ends[name]
        process(name).ends(at_s, code=code)
        await reports_arrive()
    verdict = await verdict_of(attempt)

    assert (verdict.failure and verdict.failure.component) == cause
    assert verdict.state is (RunState.FAILED if cause else RunState.COMPLETED)


async def test_server_that_exits_fails_the_run(begin: MakeAttempt) -> None:
    attempt = await begin(api="fail", trainer="complete")

    process("api").ends(1.0, code=0)
    verdict = await verdict_of(attempt)

    assert "ended with exit code 0 after" in verdict.message
    assert "although the run still needed it" in verdict.message


@pytest.mark.parametrize(("code", "state"), [(0, RunState.COMPLETED), (1, RunState.FAILED)])
async def test_exit_before_an_interrupt_decides_even_if_reported_later(
    begin: MakeAttempt, code: int, state: RunState
) -> None:
    attempt = await begin(api="fail", trainer="complete")
    process("trainer").stop = lambda: None  # type: ignore[method-assign]

    attempt.interrupt("enough")
    process("trainer").ends(1.0, code=code)
    verdict = await verdict_of(attempt)

    assert verdict.state is state


async def test_exit_after_an_interrupt_does_not_decide(begin: MakeAttempt) -> None:
    attempt = await begin(api="fail", trainer="complete")

    attempt.interrupt("enough")
    process("trainer").ends(time.monotonic() - ORIGIN_S, code=1)
    verdict = await verdict_of(attempt)

    assert (verdict.state, verdict.message) == (RunState.CANCELLED, "enough")


async def test_no_component_is_started_after_the_decision(begin: MakeAttempt) -> None:
    attempt = await begin(start=False, api="fail", trainer="complete")
    await attempt.start("api")

    attempt.interrupt("enough")
    with pytest.raises(RunEnded):
        await attempt.start("trainer")
    await verdict_of(attempt)

    assert process("trainer").pid is None
    assert process("trainer").requests == ["dismiss"]


async def test_run_completes_only_when_all_are_drained(begin: MakeAttempt, events: Events) -> None:
    attempt = await begin(trainer="drain", environment="drain")

    process("environment").ends(1.0, code=0)
    await reports_arrive()
    assert not attempt.decided.is_set()
    process("trainer").ends(2.0, code=0)
    verdict = await verdict_of(attempt)

    assert verdict.state is RunState.COMPLETED
    assert ("component.drained", "environment") in events


NO_STEP = {
    "progress": Progress(jsonl="metrics.jsonl", step="step", total=60, every_s=0.001),
    "success_step": 60,
}


@pytest.mark.parametrize("meanwhile", ["interrupt", "silence of the api", "teardown", "crash"])
async def test_events_during_the_check_for_success_do_not_decide(
    begin: MakeAttempt, tmp_path: Path, meanwhile: str
) -> None:
    live = LiveProbe(file="none", every_s=0.001, misses=1)
    attempt = await begin(NO_STEP, trainer="complete", api="fail", live={"api": live})

    process("trainer").ends(1.0, code=0)
    await reports_arrive()
    if meanwhile == "interrupt":
        attempt.interrupt("enough")
    if meanwhile == "teardown":
        ended = asyncio.create_task(attempt.teardown())
        await reports_arrive()
    (tmp_path / "metrics.jsonl").write_text('{"step": 60}\n')
    if meanwhile == "crash":
        attempt.crash(RuntimeError("a bug"))
    verdict = await verdict_of(attempt)

    if meanwhile == "teardown":
        assert await ended == verdict
    assert verdict.state is (RunState.FAILED if meanwhile == "crash" else RunState.COMPLETED)


async def test_exit_zero_without_the_required_step_is_a_failure(begin: MakeAttempt) -> None:
    attempt = await begin(NO_STEP, api="fail", trainer="complete")

    process("trainer").ends(1.0, code=0)
    verdict = await verdict_of(attempt)

    assert verdict.failure is not None and verdict.failure.rule == "success-not-reached"
    assert (
        "exit code 0" in verdict.message
        and "`success` in the spec requires step 60" in verdict.message
    )


async def test_exit_zero_before_the_required_step_says_that_only_an_earlier_step_was_reached(
    begin: MakeAttempt, tmp_path: Path
) -> None:
    metrics = tmp_path / "metrics.jsonl"
    attempt = await begin(NO_STEP, trainer="complete")
    metrics.write_text('{"step": 12}\n')

    process("trainer").ends(1.0, code=0)
    verdict = await verdict_of(attempt)

    assert (
        "exit code 0, but only step 12 was reached: `success` in the spec requires step 60"
        in verdict.message
    )


@pytest.mark.parametrize(
    ("line", "remedy"),
    [
        (
            '{"stpe": 12, "loss": 0.5}\n',
            "Set `progress.step` in the spec to the name that FILE uses for the training step. The "
            "file has numbers with these names: stpe and loss.",
        ),
        (
            '{"step": 12, "loss": 0.5}\n',
            "Read the end of the component's log to see why trainer ended at step 12. If the "
            "training is complete at this step, write `success: {step: 12}` into the spec.",
        ),
    ],
)
async def test_remedy_for_a_missing_step_fits_the_metrics_file(
    begin: MakeAttempt, tmp_path: Path, line: str, remedy: str
) -> None:
    metrics = tmp_path / "metrics.jsonl"
    attempt = await begin(NO_STEP, trainer="complete")
    metrics.write_text(line)

    process("trainer").ends(1.0, code=0)
    verdict = await verdict_of(attempt)

    assert verdict.failure is not None
    assert verdict.failure.hint == remedy.replace("FILE", str(metrics))


async def test_remedy_for_a_wrong_metrics_path_names_the_file_with_the_steps(
    begin: MakeAttempt, tmp_path: Path
) -> None:
    progress = Progress(jsonl="no/metrics.jsonl", step="step", total=60, every_s=0.001)
    attempt = await begin({"progress": progress, "success_step": 60}, trainer="complete")
    metrics = tmp_path / "out" / "steps.jsonl"
    metrics.parent.mkdir()
    metrics.write_text('{"step": 60}\n')

    process("trainer").ends(1.0, code=0)
    verdict = await verdict_of(attempt)

    assert verdict.failure is not None
    assert verdict.message.endswith(f"but {metrics} has steps of this attempt")
    assert '`jsonl: "out/steps.jsonl"`' in verdict.failure.hint
    assert "Change the training" not in verdict.failure.hint


async def test_variable_rank_that_prevents_metrics_is_named(
    begin: MakeAttempt, tmp_path: Path
) -> None:
    attempt = await begin(NO_STEP, trainer="complete")
    (tmp_path / "trainer.log").write_text(
        "muster_metrics: this process writes no metrics, because RANK is 3. If the training has "
        "only one process, remove the variable: unset RANK\nepoch 1\n"
    )

    process("trainer").ends(1.0, code=0)
    verdict = await verdict_of(attempt)

    assert verdict.failure is not None
    assert "because its variable RANK is 3" in verdict.message
    assert "`unset RANK`" in verdict.failure.hint


async def test_remedy_for_a_needed_component_that_ends_names_the_key_of_the_spec(
    begin: MakeAttempt,
) -> None:
    attempt = await begin(api="fail", trainer="complete")

    process("api").ends(1.0, code=0)
    verdict = await verdict_of(attempt)

    assert verdict.failure is not None
    assert "`on_exit_zero: drain` into `components.api`" in verdict.failure.hint


@pytest.mark.parametrize("is_readable", [True, False])
async def test_crash_after_the_last_step_completes_only_if_checkpoints_can_be_listed(
    begin: MakeAttempt, tmp_path: Path, is_readable: bool
) -> None:
    def find_checkpoint() -> None:
        if not is_readable:
            raise OSError("the store does not answer")

    progress = Progress(jsonl="metrics.jsonl", step="step", every_s=0.05, total=7)
    attempt = await begin(
        {"progress": progress, "success_step": 7},
        find_checkpoint=find_checkpoint,
        trainer="complete",
    )
    await reports_arrive()

    (tmp_path / "metrics.jsonl").write_text('{"step": 7}\n')
    process("trainer").ends(1.0, signal=11)
    verdict = await verdict_of(attempt)

    expected = RunState.COMPLETED if is_readable else RunState.FAILED
    assert verdict.state is expected


async def test_last_step_of_a_trainer_that_dies_counts(
    begin: MakeAttempt, events: Events, tmp_path: Path
) -> None:
    seldom = Progress(jsonl="metrics.jsonl", step="step", every_s=3600.0)
    attempt = await begin({"progress": seldom}, trainer="complete")
    await reports_arrive()

    (tmp_path / "metrics.jsonl").write_text('{"step": 7}\n')
    process("trainer").ends(1.0, code=1)
    await verdict_of(attempt)

    assert events.index(("run.progress", None)) < events.index(("teardown.ended", None))


async def test_gpu_utilisation_of_a_run_is_published(
    begin: MakeAttempt, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpus = [
        {"index": n, "uuid": f"GPU-{n}", "busy_percent": use} for n, use in enumerate((100, 40, 60))
    ]
    seen = {"gpus": [*gpus, {"index": 3, "uuid": "GPU-3", "busy_percent": None}], "processes": []}
    monkeypatch.setattr("tasks.processes.attempt.read_gpus", lambda: seen)
    monkeypatch.setattr("tasks.processes.progress._SAMPLED_EVERY_S", 0.001)
    published_use = asyncio.Queue[Mapping[str, float]]()
    cluster = iter([{"n1": 0.1}])
    is_collecting = asyncio.Event()

    async def of_cluster() -> Mapping[str, float]:
        # Publish values only after the test has started to collect them. Otherwise the test would
        # miss some values.
        await is_collecting.wait()
        # The cluster answers only the first call. Later calls raise KeyError, as if the cluster did
        # not answer.
        return next(cluster, None) or {}["no answer"]

    attempt = await begin({"devices": (1, 2, 3), "gpu_use": of_cluster}, trainer="complete")
    attempt._emit = lambda name, *_, **fields: published_use.put_nowait(fields.get("gpus", {}))
    is_collecting.set()

    samples = [[*(await asyncio.wait_for(published_use.get(), 10)).values()] for _ in range(2)]

    assert samples == [[0.5, 0.1], [0.5]]


async def test_bug_in_the_check_for_success_fails_the_run(
    begin: MakeAttempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = await begin(NO_STEP, api="fail", trainer="complete")

    async def broken() -> None:
        raise RuntimeError("a bug")

    monkeypatch.setattr(attempt._progress, "_read", broken)
    process("trainer").ends(1.0, code=0)
    verdict = await verdict_of(attempt)

    assert verdict.failure is not None and verdict.failure.rule == "internal-error"


async def test_bug_in_a_watcher_fails_the_run(
    begin: MakeAttempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.processes.progress._READ_EVERY_S", 0.001)
    attempt = await begin({"stall_after_s": 60.0}, api="fail")

    def broken(step: float | None) -> float:
        raise RuntimeError("a bug")

    monkeypatch.setattr(attempt._progress.silence, "seconds_without_work", broken)
    verdict = await verdict_of(attempt)

    assert verdict.failure is not None and verdict.failure.rule == "internal-error"


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (FileNotFoundError(2, "No such file or directory: x"), FailureKind.USER_ERROR),
        (PermissionError(13, "Permission denied: x"), FailureKind.USER_ERROR),
        (OSError(8, "Exec format error: x"), FailureKind.USER_ERROR),
        (OSError(7, "Argument list too long: x"), FailureKind.USER_ERROR),
        # The command is invalid, so Python starts no process. The user made this error.
        (OSError(0, "ValueError('embedded null byte')"), FailureKind.USER_ERROR),
        (OSError(28, "No space left on device: x.log"), FailureKind.STORAGE),
        # The machine has too few resources, so this is no error of the user.
        (OSError(24, "Too many open files"), FailureKind.UNKNOWN),
        (OSError(12, "Cannot allocate memory"), FailureKind.UNKNOWN),
        (BlockingIOError(11, "Resource temporarily unavailable"), FailureKind.UNKNOWN),
        (ChildProcessError("its guardian process (pid 7) was killed"), FailureKind.UNKNOWN),
        (TimeoutError(), FailureKind.UNKNOWN),
    ],
)
async def test_failure_names_a_program_that_cannot_be_started(
    begin: MakeAttempt, error: OSError, kind: FailureKind
) -> None:
    ScriptedProcess.refuses = {"trainer": error}
    attempt = await begin(start=False, api="fail", trainer="complete")
    await attempt.start("api")

    with pytest.raises(RunEnded):
        await attempt.start("trainer")
    verdict = await verdict_of(attempt)

    assert verdict.failure is not None and verdict.failure.component == "trainer"
    assert verdict.failure.kind is kind
    what = error.strerror or str(error) or "its guardian process does not answer"
    assert f"trainer can't be started: {what}" in verdict.message


async def test_verdict_names_a_tree_that_cannot_be_ended(
    begin: MakeAttempt, events: Events, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.processes.guarded.KILL_WITHIN_S", 0.05)
    attempt = await begin(trainer="complete")
    stuck = process("trainer")
    stuck.stuck = (os.getpid(),)
    stuck.has_survivors.set_result(None)
    stuck.stop = lambda: None  # type: ignore[method-assign]
    attempt.components["trainer"].plan = dataclasses.replace(
        attempt.components["trainer"].plan,
        command=dataclasses.replace(attempt.components["trainer"].plan.command, grace_s=0.0),
    )

    stuck.exited.set_result(Exit(exit_code=0, signal=None, at_monotonic_s=ORIGIN_S))
    verdict = await verdict_of(attempt)

    assert verdict.state is RunState.FAILED
    [survivor] = verdict.left["trainer"]
    assert str(survivor).startswith(f"pid {os.getpid()} (")
    assert ("component.stuck", "trainer") in events


@pytest.mark.parametrize("failing", ["api", "rollout", "trainer"])
async def test_component_whose_end_raises_an_error_does_not_keep_the_others_alive(
    begin: MakeAttempt, failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = await begin(api="fail", rollout="fail", trainer="complete")

    async def fail() -> tuple[str, ...]:
        raise RuntimeError("a bug")

    monkeypatch.setattr(attempt.components[failing], "end", fail)
    attempt.interrupt("cancelled", RunState.CANCELLED)
    verdict = await verdict_of(attempt)

    assert "kill" in process(failing).requests
    assert all(
        process(name).empty.done() for name in ("api", "rollout", "trainer") if name != failing
    )
    assert verdict.state is RunState.FAILED
    assert verdict.left[failing][-1] == "RuntimeError('a bug')"


async def test_verdict_names_machines_that_were_not_checked(begin: MakeAttempt) -> None:
    attempt = await begin(trainer="complete")
    attempt.components["trainer"].unseen = ("node 10.0.0.5 could not be checked",)

    process("trainer").ends(1.0, code=0)
    verdict = await verdict_of(attempt)

    assert verdict.state is RunState.COMPLETED
    assert "trainer: node 10.0.0.5 could not be checked" in verdict.message
    assert verdict.unseen == {"trainer": ("node 10.0.0.5 could not be checked",)}


@pytest.mark.parametrize(
    ("step", "code", "state"),
    [
        (20, 0, RunState.COMPLETED),
        # the trainer has ended before the last step (20), or with an exit code other than 0
        (19, 0, RunState.CANCELLED),
        (20, 1, RunState.CANCELLED),
    ],
)
async def test_interrupted_attempt_is_completed_if_its_trainer_ends_after_the_last_step(
    begin: MakeAttempt, tmp_path: Path, step: int, code: int, state: RunState
) -> None:
    attempt = await begin(
        {"progress": Progress(jsonl="steps", step="step", total=20)}, trainer="complete"
    )
    (tmp_path / "steps").write_text(f'{{"step": {step}}}\n')

    attempt.interrupt("interrupted by SIGTERM")
    process("trainer").ends(time.monotonic() - ORIGIN_S, code=code)
    verdict = await verdict_of(attempt)

    assert verdict.state is state
    message = "step 20 of 20 reached; trainer has ended"
    assert verdict.message == (message if state is RunState.COMPLETED else "interrupted by SIGTERM")


async def test_silence_starts_with_the_start_of_a_component(
    begin: MakeAttempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [0.0]
    attempt = await begin({"stall_after_s": 10.0}, start=False, trainer="complete")
    monkeypatch.setattr(attempt._progress.silence, "_clock", lambda: clock[0])
    attempt._progress.silence.restart()

    clock[0] = 100.0
    await attempt.start("trainer")

    assert attempt._progress.silence.seconds_without_work(None) == 0.0
    attempt.interrupt("enough")
    await verdict_of(attempt)


async def test_pending_component_is_not_silent(begin: MakeAttempt) -> None:
    attempt = await begin({"stall_after_s": 60.0}, start=False, api="fail")
    may_go = asyncio.Event()
    launched = process("api").launch

    async def launch_slowly(command: Command, **more: object) -> int:
        await may_go.wait()
        return await launched(command, **more)

    process("api").launch = launch_slowly  # type: ignore[method-assign]
    starting = asyncio.create_task(attempt.start("api"))
    await reports_arrive()

    assert attempt._is_quiet()
    may_go.set()
    await starting
    assert not attempt._is_quiet()
    attempt.interrupt("enough")
    await verdict_of(attempt)


async def test_readiness_is_asked_once_more_at_the_deadline(
    begin: MakeAttempt, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A supervisor was suspended by a signal, and continues after the readiness deadline.

    Meanwhile, the component has become ready. So the supervisor must probe the component once more.
    """
    attempt = await begin(start=False, trainer="complete")
    component = attempt.components["trainer"]
    ready = ReadyProbe(file="registered", within_s=0.01)
    component.plan = dataclasses.replace(component.plan, ready=ready)

    async def late(*arguments: object, **more: object) -> None:
        (tmp_path / "registered").touch()
        await asyncio.sleep(60)

    monkeypatch.setattr("tasks.processes.component.wait_for_success", late)
    await attempt.start("trainer")

    assert component.is_ready
    attempt.interrupt("enough")
    await verdict_of(attempt)


async def test_error_survived_by_later_steps_is_no_cause(
    begin: MakeAttempt, tmp_path: Path
) -> None:
    attempt = await begin(NO_STEP, trainer="complete")
    consequences = "NCCL WARN Socket recv failed while polling\n" * 5_000
    (tmp_path / "trainer.log").write_text("CUDA out of memory, smaller batches\n" + consequences)

    for step in range(1, 8):
        with (tmp_path / "metrics.jsonl").open("a") as metrics:
            metrics.write(f'{{"step": {step}}}\n')
        while attempt._progress.step != step:
            await asyncio.sleep(0.001)
    with (tmp_path / "trainer.log").open("a") as log:
        log.write(consequences)
    process("trainer").ends(1.0, code=1)
    verdict = await verdict_of(attempt)

    assert verdict.failure is not None
    assert verdict.failure.kind is FailureKind.COLLECTIVE_TIMEOUT


@pytest.mark.parametrize("code", [0, 1])
async def test_component_that_ends_at_once_is_not_reported_as_ready_and_as_not_ready(
    begin: MakeAttempt, events: Events, code: int
) -> None:
    attempt = await begin(start=False, trainer="fail")
    launch = process("trainer").launch

    async def launch_and_end(command: Command, **more: object) -> int:
        pid = await launch(command, **more)
        process("trainer").ends(1.0, code=code)
        return pid

    process("trainer").launch = launch_and_end  # type: ignore[method-assign]
    with contextlib.suppress(RunEnded):
        await attempt.start("trainer")
    verdict = await verdict_of(attempt)

    was_reported_ready = ("component.ready", "trainer") in events
    assert was_reported_ready != ("before it was ready" in verdict.message)


async def test_start_waits_for_the_end_of_the_tasks_that_it_cancels(begin: MakeAttempt) -> None:
    attempt = await begin(start=False, trainer="complete")
    ended: list[str] = []
    has_begun = asyncio.Event()

    async def until_ready() -> None:
        has_begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0.05)
            ended.append("until_ready")

    attempt.components["trainer"].until_ready = until_ready  # type: ignore[method-assign]
    starting = asyncio.create_task(attempt.start("trainer"))
    await has_begun.wait()
    attempt.interrupt("enough")
    with pytest.raises(RunEnded):
        await starting

    assert ended == ["until_ready"]
    await verdict_of(attempt)


async def test_watch_over_a_component_has_ended_before_the_component_is_stopped(
    begin: MakeAttempt,
) -> None:
    attempt = await begin(start=False, api="fail", trainer="complete")
    order: list[str] = []

    async def until_unresponsive() -> GiveUpReason:
        try:
            return await forever()
        finally:
            await asyncio.sleep(0.05)
            order.append("watch has ended")

    attempt.components["api"].until_unresponsive = until_unresponsive  # type: ignore[method-assign]
    for name in ("api", "trainer"):
        await attempt.start(name)
    stop = process("api").stop
    process("api").stop = lambda: (order.append("stop"), stop())  # type: ignore
    await reports_arrive()
    attempt.interrupt("enough")
    await verdict_of(attempt)

    assert order[:2] == ["watch has ended", "stop"]


#: Last log lines that torchrun (torch 2.13) writes after SIGTERM.
LINES_OF_STOP = """\
W1127 08:23:06.903000 17254 torch/distributed/elastic/agent/server/api.py:753] Received 15 death \
signal, shutting down workers
Traceback (most recent call last):
  File "/venv/bin/torchrun", line 8, in <module>
    sys.exit(main())
torch.distributed.elastic.multiprocessing.api.SignalException: Process 17254 got signal: 15
"""


def write_lines_at_stop(tmp_path: Path) -> None:
    """Make the process `trainer` write torchrun's last log lines when Muster stops the process."""
    trainer = process("trainer")
    log = tmp_path / "trainer.log"
    stop = trainer.stop

    def write_and_stop() -> None:
        with log.open("a") as f:
            f.write(LINES_OF_STOP)
        stop()

    trainer.stop = write_and_stop  # type: ignore[method-assign]


async def test_messages_after_the_stop_of_an_alarm_are_no_evidence(
    begin: MakeAttempt, tmp_path: Path
) -> None:
    rules = Watch.model_validate({"then": "stop"}).choose_rules("sft")
    attempt = await begin(plan={"alarms": rules}, trainer="complete")
    (tmp_path / "trainer.log").write_text("step 8 loss nan\n")
    write_lines_at_stop(tmp_path)

    attempt._check_alarms(8, {"step": 8, "loss": float("nan")})
    verdict = await verdict_of(attempt)

    failure = verdict.failure
    assert failure is not None and failure.kind is FailureKind.ALARM
    assert failure.message == "rule loss_not_finite: the metric loss is nan (step 8)"
    assert failure.line == ""
    assert failure.hint.startswith("The training diverged: a metric is NaN or infinite.")
    assert failure.log_tail == "step 8 loss nan"


async def test_messages_after_the_stop_of_an_unresponsive_component_are_no_evidence(
    begin: MakeAttempt, tmp_path: Path
) -> None:
    attempt = await begin(trainer="complete")
    (tmp_path / "trainer.log").write_text("step 8\n")
    write_lines_at_stop(tmp_path)

    reason = GiveUpReason(kind=None, rule="live", message="no answer")
    attempt._fail_by_loss(attempt.components["trainer"], reason)
    verdict = await verdict_of(attempt)

    failure = verdict.failure
    assert failure is not None and failure.rule == "live"
    assert "SignalException" not in failure.message + failure.log_tail


async def test_unknown_step_and_a_loss_that_is_nan_are_two_warnings(
    begin: MakeAttempt, events: Events, tmp_path: Path
) -> None:
    alarms = Watch().choose_rules("sft")
    progress = Progress(jsonl="metrics.jsonl", step="step", total=20)
    attempt = await begin(plan={"progress": progress, "alarms": alarms}, trainer="complete")
    (tmp_path / "metrics.jsonl").write_text('{"step": 9, "loss": NaN}\n')

    process("trainer").ends(1.0, code=0)
    verdict = await verdict_of(attempt)

    first, second = verdict.message.split("\n")
    assert first.startswith("warning: trainer ended with exit code 0 at step 9 of 20")
    assert second == "warning: loss is nan since step 9"
    assert [name for name, _ in events].count("run.warning") == 2


@pytest.mark.parametrize(("reached", "warns"), [(10, False), (11, False), (12, True), (40, True)])
async def test_training_with_more_steps_than_planned_completes_with_a_warning(
    begin: MakeAttempt, tmp_path: Path, reached: int, warns: bool
) -> None:
    progress = Progress(jsonl="metrics.jsonl", step="step", total=10)
    attempt = await begin(plan={"progress": progress}, trainer="complete")
    (tmp_path / "metrics.jsonl").write_text(f'{{"step": {reached}}}\n')

    process("trainer").ends(1.0, code=0)
    verdict = await verdict_of(attempt)

    assert verdict.state is RunState.COMPLETED
    expected = f"warning: trainer reached step {reached}, but `progress.total` in the spec is 10."
    assert verdict.message.startswith(expected) is warns


async def test_end_of_a_training_without_a_known_step_says_why_the_step_is_unknown(
    begin: MakeAttempt, events: Events, tmp_path: Path
) -> None:
    progress = Progress(jsonl="metrics.jsonl", step="stpe", total=20)
    attempt = await begin(plan={"progress": progress}, trainer="complete")
    lines = "".join(f'{{"step": {step}}}\n' for step in range(1, 21))
    (tmp_path / "metrics.jsonl").write_text(lines)

    process("trainer").ends(1.0, code=0)
    verdict = await verdict_of(attempt)

    assert verdict.message == (
        "warning: trainer ended with exit code 0, but the reached training step is unknown (the "
        f"training has 20 steps): {tmp_path}/metrics.jsonl has no number `stpe`, but has step; did "
        "you mean `step`?"
    )
    assert [name for name, _ in events].count("run.warning") == 1
    assert attempt.earliest.decision is not None
    assert attempt.earliest.decision.reason == "trainer ended with exit code 0"
