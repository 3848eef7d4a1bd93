"""The final state of a run: completed only if its success is proven, otherwise failed.

A failed run names the first cause of the failure.
"""

from __future__ import annotations

import os
import signal

import pytest

from tasks.record.states import RunState
from tasks.spec.failure_kinds import FailureKind
from tasks.spec.probes import LiveProbe, ReadyProbe
from tasks.spec.run import Progress
from tasks.spec.watch import Watch
from tests.support.stage import (
    DEADLINE_S,
    FOREVER,
    Stage,
    free_port,
    is_alive,
    python,
    sh,
    wait_until,
)

UP = ReadyProbe(log="up", within_s=DEADLINE_S)

#: A server that answers any GET with 200 and `{"step": N}`, and logs each request as uvicorn does.
#:
#: N is the content of the file `step`. `SERVER % port` is the program.
SERVER = """
import os, socket
server = socket.socket()
server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
server.bind(("127.0.0.1", %d))
server.listen(50)
while True:
    connection, _ = server.accept()
    request = connection.recv(65536).split(b" HTTP")[0].decode()
    if request:
        os.write(1, b'INFO: 127.0.0.1 - "%%s HTTP/1.1" 200 OK\\n' %% request.encode())
        step = open("step").read() if os.path.exists("step") else "0"
        connection.sendall(b"HTTP/1.0 200 OK\\r\\n\\r\\n" + b'{"step": %%s}' %% step.encode())
    connection.close()
"""


def test_leftovers_of_a_drained_component_are_ended_at_once(stage: Stage) -> None:
    supervisor = stage.running(
        stage.component("api"),
        stage.component("environment", sh("setsid sleep 600 & exit 0"), on_exit_zero="drain"),
    )

    stage.until("component.drained", "environment")
    process = supervisor._attempt.components["environment"].process
    wait_until(process.empty.done, "the component's process tree is empty")

    assert stage.seen("teardown.begun") == []
    stage.end(supervisor)


@pytest.mark.parametrize(
    ("lines", "state"),
    [
        ('{"step": 60}\n', RunState.COMPLETED),
        # The last line lacks its newline, but its object is complete.
        ('{"step": 59}\n{"step": 60}', RunState.COMPLETED),
        ('{"step": 61, "loss": NaN}\n', RunState.COMPLETED),
        # An incomplete line does not count.
        ('{"step": 59}\n{"step": 6', RunState.FAILED),
        ('{"step": "60"}\n', RunState.FAILED),
        ("", RunState.FAILED),
    ],
)
def test_exit_code_zero_completes_a_run_only_if_the_success_step_was_reached(
    stage: Stage, lines: str, state: RunState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.processes.progress._LAST_STEP_WITHIN_S", 0.3)
    trainer = sh(f"printf '%s' '{lines}' > metrics.jsonl")

    verdict = stage.run(
        stage.component("trainer", trainer, on_exit_zero="complete"),
        progress=Progress(jsonl="metrics.jsonl", step="step", total=60),
        success_step=60,
    )

    assert verdict.state is state
    if verdict.failure is not None:
        assert verdict.failure.rule == "success-not-reached"
        assert "success" in verdict.message


def test_steps_of_an_earlier_process_are_not_counted(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.processes.progress._LAST_STEP_WITHIN_S", 0.3)
    (stage.directory / "metrics.jsonl").write_text('{"step": 60}\n')
    os.utime(stage.directory / "metrics.jsonl", (1, 1))

    verdict = stage.run(
        stage.component("trainer", sh("exit 0"), on_exit_zero="complete"),
        progress=Progress(jsonl="metrics.jsonl", step="step", total=60),
        success_step=60,
    )

    assert verdict.state is RunState.FAILED
    assert "no step is known" in verdict.message


def test_completed_run_warns_of_a_wrong_key_of_the_step(stage: Stage) -> None:
    lines = "".join(f'{{"step": {step}}}\n' for step in range(12))
    (stage.directory / "lines").write_text(lines)

    verdict = stage.run(
        stage.component("trainer", sh("cat lines > metrics.jsonl"), on_exit_zero="complete"),
        progress=Progress(jsonl="metrics.jsonl", step="global_step"),
    )

    assert verdict.state is RunState.COMPLETED
    explanation = f"{stage.directory}/metrics.jsonl has no `global_step`; it has step"
    assert f"no step is known: {explanation}" in verdict.message
    assert explanation in stage.seen("run.warning")[0].message


def test_completed_run_warns_of_a_loss_that_ends_as_nan(stage: Stage) -> None:
    lines = '{"step": 1, "loss": 0.5}\n{"step": 2, "loss": NaN}\n'
    (stage.directory / "lines").write_text(lines)

    verdict = stage.run(
        stage.component("trainer", sh("cat lines > metrics.jsonl"), on_exit_zero="complete"),
        progress=Progress(jsonl="metrics.jsonl", step="step", total=2),
        alarms=Watch().choose_rules("sft"),
    )

    assert verdict.state is RunState.COMPLETED
    assert verdict.message == "warning: step 2 of 2, but loss is nan since step 2"


@pytest.mark.parametrize(("step", "state"), [(60, RunState.COMPLETED), (59, RunState.FAILED)])
def test_step_can_be_read_from_another_component(
    stage: Stage, step: int, state: RunState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.processes.progress._LAST_STEP_WITHIN_S", 0.5)
    port = free_port()

    verdict = stage.run(
        stage.component("api", python(SERVER % port), ready=ReadyProbe(tcp=str(port))),
        stage.component("trainer", sh(f"printf {step} > step"), on_exit_zero="complete"),
        progress=Progress(http=f"http://127.0.0.1:{port}/status", step="step", total=60),
        success_step=60,
    )

    assert verdict.state is state


def test_liveness_probe_that_recovers_in_time_is_no_failure(stage: Stage) -> None:
    live = LiveProbe(file="alive", every_s=0.02, misses=100_000)
    (stage.directory / "alive").touch()
    supervisor = stage.running(stage.component("trainer", live=live))

    (stage.directory / "alive").unlink()
    stage.until("probe.failed", "trainer")
    (stage.directory / "alive").touch()
    misses = len(stage.seen("probe.failed"))
    (stage.directory / "alive").unlink()
    wait_until(lambda: len(stage.seen("probe.failed")) > misses + 1, "the probe fails again")

    counts = [event.fields["misses"] for event in stage.seen("probe.failed")]
    assert counts.count(1) >= 1
    assert stage.end(supervisor).state is RunState.CANCELLED


def test_run_without_new_steps_and_output_is_stalled(stage: Stage) -> None:
    verdict = stage.run(
        stage.component("api"),
        stage.component("trainer", sh("echo step 1; exec sleep 600")),
        stall_after_s=0.5,
    )

    assert verdict.failure is not None and verdict.failure.kind is FailureKind.STALLED
    assert verdict.failure.component == "trainer"


def test_run_at_its_time_limit_is_stopped_with_its_grace_period(stage: Stage) -> None:
    trainer = sh("trap 'echo saved; exit 0' TERM; echo up; while :; do sleep 0.1; done")

    verdict = stage.run(
        stage.component("trainer", trainer, ready=UP, on_exit_zero="complete"), time_limit_s=1.0
    )

    assert verdict.state is RunState.FAILED
    assert verdict.failure is not None and verdict.failure.kind is FailureKind.TIME_LIMIT
    assert "gang.max_hours" in verdict.message
    assert "saved" in stage.text_of("trainer")


def test_log_lines_about_musters_own_requests_are_no_progress(stage: Stage) -> None:
    port = free_port()
    api = python(SERVER % port)

    verdict = stage.run(
        stage.component("api", api, ready=ReadyProbe(tcp=str(port))),
        progress=Progress(http=f"http://127.0.0.1:{port}/status", step="step"),
        stall_after_s=1.5,
    )

    assert verdict.failure is not None and verdict.failure.kind is FailureKind.STALLED
    assert "GET /status" in stage.text_of("api")


def test_log_output_of_a_server_does_not_hide_a_stalled_training(
    stage: Stage,
) -> None:
    script = "while :; do echo GET /health from port $$$RANDOM; echo up; sleep 0.05; done"

    verdict = stage.run(
        stage.component("rollout", sh(script), ready=UP),
        stage.component("trainer", sh("echo '{\"step\": 5}' > steps; exec sleep 600")),
        progress=Progress(jsonl="steps", step="step"),
        stall_after_s=2.0,
    )

    assert verdict.failure is not None and verdict.failure.component == "trainer"
    assert "no new step since step 5" in verdict.message


def test_run_with_new_output_is_not_stalled(stage: Stage) -> None:
    script = "for i in one two three four five six seven; do echo line $i; sleep 0.2; done"

    verdict = stage.run(
        stage.component("trainer", sh(script), on_exit_zero="complete"), stall_after_s=1.2
    )

    assert verdict.state is RunState.COMPLETED


def test_components_that_fail_during_the_teardown_are_not_the_cause(stage: Stage) -> None:
    failing_script = sh(
        "trap 'echo CUDA out of memory; exit 1' TERM; echo up; while :; do sleep 0.02; done"
    )
    supervisor = stage.running(
        stage.component("api", failing_script, ready=UP, grace_s=DEADLINE_S),
        stage.component("trainer", FOREVER),
        stage.component("environment", failing_script, ready=UP, grace_s=DEADLINE_S),
    )

    os.kill(stage.pid_of("trainer"), signal.SIGABRT)
    verdict = stage.verdict_of(supervisor)

    assert verdict.failure is not None and verdict.failure.component == "trainer"
    assert verdict.failure.signal == "SIGABRT"
    assert verdict.failure.kind is FailureKind.RUNTIME_ERROR
    exits = {event.component: event.fields for event in stage.seen("component.exited")}
    assert exits["api"]["exit_code"] == 1 and exits["environment"]["exit_code"] == 1


def test_first_death_is_the_cause_even_if_its_guardian_reports_it_late(
    stage: Stage,
) -> None:
    supervisor = stage.running(
        stage.component("api", sh("mkfifo pipe; echo up; exec sleep 600 3> pipe"), ready=UP),
        stage.component("trainer", sh("exec 3< pipe; echo up; cat <&3; exit 1"), ready=UP),
    )
    guardian = supervisor._attempt.components["api"].process.guardian_pid

    os.kill(guardian, signal.SIGSTOP)
    os.kill(stage.pid_of("api"), signal.SIGKILL)
    stage.until("component.exited", "trainer")
    os.kill(guardian, signal.SIGCONT)
    verdict = stage.verdict_of(supervisor)

    assert verdict.failure is not None
    assert (verdict.failure.component, verdict.failure.signal) == ("api", "SIGKILL")


def test_failure_carries_the_last_lines_of_the_log_and_a_hint(stage: Stage) -> None:
    verdict = stage.run(
        stage.component("api"),
        stage.component("trainer", sh("echo begins; echo CUDA out of memory >&2; exit 1")),
    )

    assert verdict.failure is not None and verdict.failure.kind is FailureKind.CUDA_OOM
    assert verdict.failure.exit_code == 1
    assert verdict.failure.line == "CUDA out of memory"
    assert verdict.failure.log_tail == "begins\nCUDA out of memory"
    assert verdict.failure.hint


def test_readable_part_of_a_binary_log_is_shown(stage: Stage) -> None:
    garbage = r"printf '\377\376ok\200\n\000\n'; exit 1"

    verdict = stage.run(stage.component("trainer", sh(garbage)))

    assert verdict.failure is not None and "ok" in verdict.failure.log_tail


@pytest.mark.parametrize("name", ["api", "trainer"])
def test_component_whose_end_raises_an_error_leaves_no_process(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    supervisor = stage.running(stage.component("api"), stage.component("trainer"))
    pids = [stage.pid_of("api"), stage.pid_of("trainer")]

    async def fail() -> tuple[int | str, ...]:
        raise RuntimeError("a bug")

    monkeypatch.setattr(supervisor._attempt.components[name], "end", fail)
    supervisor.interrupt("enough")
    verdict = stage.end(supervisor)

    assert not any(is_alive(pid) for pid in pids)
    assert verdict.state is RunState.FAILED
    assert verdict.left == {name: ("RuntimeError('a bug')",)}


def test_components_end_if_the_examination_of_one_raises_an_error(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor = stage.running(stage.component("api"), stage.component("trainer"))
    pids = [stage.pid_of("api"), stage.pid_of("trainer")]

    async def fail() -> None:
        raise RuntimeError("a bug")

    trainer = supervisor._attempt.components["trainer"]
    trainer.is_hung = True
    monkeypatch.setattr(trainer, "examine", fail)
    supervisor.interrupt("enough")
    verdict = stage.end(supervisor)

    assert not any(is_alive(pid) for pid in pids)
    assert verdict.state is RunState.CANCELLED
