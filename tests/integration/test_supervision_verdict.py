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
from tests.support.supervised_components import (
    DEADLINE_S,
    FOREVER,
    ComponentHarness,
    free_port,
    is_alive,
    python,
    sh,
    wait_until,
)

UP = ReadyProbe(log="up", within_s=DEADLINE_S)

#: Template of a server that answers any GET with 200 and `{"step": N}`, and logs each request as
#: uvicorn does. `SERVER % port` is the program.
#:
#: N is the content of the file `step`.
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


def test_leftovers_of_a_drained_component_are_ended_at_once(harness: ComponentHarness) -> None:
    supervisor = harness.start_all(
        harness.component("api"),
        harness.component("environment", sh("setsid sleep 600 & exit 0"), on_exit_zero="drain"),
    )

    harness.wait_for_event("component.drained", "environment")
    process = supervisor._attempt.components["environment"].process
    wait_until(process.empty.done, "the component's process tree is empty")

    assert harness.list_events("teardown.begun") == []
    harness.end(supervisor)


@pytest.mark.parametrize(
    ("lines", "state"),
    [
        ('{"step": 60}\n', RunState.COMPLETED),
        # The last line has no newline, but contains a complete JSON object.
        ('{"step": 59}\n{"step": 60}', RunState.COMPLETED),
        ('{"step": 61, "loss": NaN}\n', RunState.COMPLETED),
        # The incomplete last line is ignored, so the last step is 59.
        ('{"step": 59}\n{"step": 6', RunState.FAILED),
        ('{"step": "60"}\n', RunState.FAILED),
        ("", RunState.FAILED),
    ],
)
def test_exit_code_zero_completes_a_run_only_if_the_success_step_was_reached(
    harness: ComponentHarness, lines: str, state: RunState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.processes.progress._LAST_STEP_WITHIN_S", 0.3)
    trainer = sh(f"printf '%s' '{lines}' > metrics.jsonl")

    verdict = harness.run(
        harness.component("trainer", trainer, on_exit_zero="complete"),
        progress=Progress(jsonl="metrics.jsonl", step="step", total=60),
        success_step=60,
    )

    assert verdict.state is state
    if verdict.failure is not None:
        assert verdict.failure.rule == "success-not-reached"
        assert "success" in verdict.message


def test_steps_of_an_earlier_process_are_not_counted(
    harness: ComponentHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.processes.progress._LAST_STEP_WITHIN_S", 0.3)
    (harness.directory / "metrics.jsonl").write_text('{"step": 60}\n')
    os.utime(harness.directory / "metrics.jsonl", (1, 1))

    verdict = harness.run(
        harness.component("trainer", sh("exit 0"), on_exit_zero="complete"),
        progress=Progress(jsonl="metrics.jsonl", step="step", total=60),
        success_step=60,
    )

    assert verdict.state is RunState.FAILED
    assert "no step of the training is known" in verdict.message


def test_completed_run_warns_of_a_wrong_key_of_the_step(harness: ComponentHarness) -> None:
    lines = "".join(f'{{"step": {step}}}\n' for step in range(12))
    (harness.directory / "lines").write_text(lines)

    verdict = harness.run(
        harness.component("trainer", sh("cat lines > metrics.jsonl"), on_exit_zero="complete"),
        progress=Progress(jsonl="metrics.jsonl", step="global_step"),
    )

    assert verdict.state is RunState.COMPLETED
    explanation = f"{harness.directory}/metrics.jsonl has no number `global_step`, but has step"
    assert f"no step of its training is known: {explanation}" in verdict.message
    assert explanation in harness.list_events("run.warning")[0].message


def test_completed_run_warns_of_a_loss_that_ends_as_nan(harness: ComponentHarness) -> None:
    lines = '{"step": 1, "loss": 0.5}\n{"step": 2, "loss": NaN}\n'
    (harness.directory / "lines").write_text(lines)

    verdict = harness.run(
        harness.component("trainer", sh("cat lines > metrics.jsonl"), on_exit_zero="complete"),
        progress=Progress(jsonl="metrics.jsonl", step="step", total=2),
        alarms=Watch().choose_rules("sft"),
    )

    assert verdict.state is RunState.COMPLETED
    assert verdict.message == "warning: step 2 of 2, but loss is nan since step 2"
    assert verdict.not_finite == ("nan",)


@pytest.mark.parametrize(("step", "state"), [(60, RunState.COMPLETED), (59, RunState.FAILED)])
def test_step_can_be_read_from_another_component(
    harness: ComponentHarness, step: int, state: RunState, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.processes.progress._LAST_STEP_WITHIN_S", 0.5)
    port = free_port()

    verdict = harness.run(
        harness.component("api", python(SERVER % port), ready=ReadyProbe(tcp=str(port))),
        harness.component("trainer", sh(f"printf {step} > step"), on_exit_zero="complete"),
        progress=Progress(http=f"http://127.0.0.1:{port}/status", step="step", total=60),
        success_step=60,
    )

    assert verdict.state is state


def test_liveness_probe_that_recovers_in_time_is_no_failure(harness: ComponentHarness) -> None:
    live = LiveProbe(file="alive", every_s=0.02, misses=100_000)
    (harness.directory / "alive").touch()
    supervisor = harness.start_all(harness.component("trainer", live=live))

    (harness.directory / "alive").unlink()
    harness.wait_for_event("probe.failed", "trainer")
    (harness.directory / "alive").touch()
    misses = len(harness.list_events("probe.failed"))
    (harness.directory / "alive").unlink()
    wait_until(
        lambda: len(harness.list_events("probe.failed")) > misses + 1, "the probe fails again"
    )

    counts = [event.fields["misses"] for event in harness.list_events("probe.failed")]
    assert counts.count(1) >= 1
    assert harness.end(supervisor).state is RunState.CANCELLED


def test_run_without_new_steps_and_output_is_stalled(harness: ComponentHarness) -> None:
    verdict = harness.run(
        harness.component("api"),
        harness.component("trainer", sh("echo step 1; exec sleep 600")),
        stall_after_s=0.5,
    )

    assert verdict.failure is not None and verdict.failure.kind is FailureKind.STALLED
    assert verdict.failure.component == "trainer"


def test_training_that_is_still_importing_is_not_described_as_a_hang(
    harness: ComponentHarness,
) -> None:
    imports = python("import time; time.sleep(600)  # as long as a slow import")

    verdict = harness.run(
        harness.component("trainer", imports, on_exit_zero="complete"),
        progress=Progress(jsonl="steps", step="step"),
        stall_after_s=1.5,
    )

    assert verdict.failure is not None and verdict.failure.kind is FailureKind.STALLED
    assert "no first step within " in verdict.message
    assert "hangs" not in verdict.message
    assert "imports" in verdict.failure.hint
    assert "raise `stall_after_s` in the spec (now 1.5 s)" in verdict.failure.hint


def test_run_at_its_time_limit_is_stopped_with_its_grace_period(harness: ComponentHarness) -> None:
    trainer = sh("trap 'echo saved; exit 0' TERM; echo up; while :; do sleep 0.1; done")

    verdict = harness.run(
        harness.component("trainer", trainer, ready=UP, on_exit_zero="complete"), time_limit_s=1.0
    )

    assert verdict.state is RunState.FAILED
    assert verdict.failure is not None and verdict.failure.kind is FailureKind.TIME_LIMIT
    assert "gang.max_hours" in verdict.message
    assert "saved" in harness.read_log("trainer")


def test_log_lines_about_musters_own_requests_are_no_progress(harness: ComponentHarness) -> None:
    port = free_port()
    api = python(SERVER % port)

    verdict = harness.run(
        harness.component("api", api, ready=ReadyProbe(tcp=str(port))),
        progress=Progress(http=f"http://127.0.0.1:{port}/status", step="step"),
        stall_after_s=1.5,
    )

    assert verdict.failure is not None and verdict.failure.kind is FailureKind.STALLED
    assert "GET /status" in harness.read_log("api")


def test_log_output_of_a_server_does_not_hide_a_stalled_training(
    harness: ComponentHarness,
) -> None:
    script = "while :; do echo GET /health from port $$$RANDOM; echo up; sleep 0.05; done"

    verdict = harness.run(
        harness.component("rollout", sh(script), ready=UP),
        harness.component("trainer", sh("echo '{\"step\": 5}' > steps; exec sleep 600")),
        progress=Progress(jsonl="steps", step="step"),
        stall_after_s=2.0,
    )

    assert verdict.failure is not None and verdict.failure.component == "trainer"
    assert "no new step since step 5" in verdict.message


def test_run_with_new_output_is_not_stalled(harness: ComponentHarness) -> None:
    script = "for i in one two three four five six seven; do echo line $i; sleep 0.2; done"

    verdict = harness.run(
        harness.component("trainer", sh(script), on_exit_zero="complete"), stall_after_s=1.2
    )

    assert verdict.state is RunState.COMPLETED


def test_components_that_fail_during_the_teardown_are_not_the_cause(
    harness: ComponentHarness,
) -> None:
    failing_script = sh(
        "trap 'echo CUDA out of memory; exit 1' TERM; echo up; while :; do sleep 0.02; done"
    )
    supervisor = harness.start_all(
        harness.component("api", failing_script, ready=UP, grace_s=DEADLINE_S),
        harness.component("trainer", FOREVER),
        harness.component("environment", failing_script, ready=UP, grace_s=DEADLINE_S),
    )

    os.kill(harness.wait_for_pid("trainer"), signal.SIGABRT)
    verdict = harness.wait_for_verdict(supervisor)

    assert verdict.failure is not None and verdict.failure.component == "trainer"
    assert verdict.failure.signal == "SIGABRT"
    assert verdict.failure.kind is FailureKind.RUNTIME_ERROR
    exits = {event.component: event.fields for event in harness.list_events("component.exited")}
    assert exits["api"]["exit_code"] == 1 and exits["environment"]["exit_code"] == 1


def test_first_death_is_the_cause_even_if_its_guardian_reports_it_late(
    harness: ComponentHarness,
) -> None:
    supervisor = harness.start_all(
        harness.component("api", sh("mkfifo pipe; echo up; exec sleep 600 3> pipe"), ready=UP),
        harness.component("trainer", sh("exec 3< pipe; echo up; cat <&3; exit 1"), ready=UP),
    )
    guardian = supervisor._attempt.components["api"].process.guardian_pid

    os.kill(guardian, signal.SIGSTOP)
    os.kill(harness.wait_for_pid("api"), signal.SIGKILL)
    harness.wait_for_event("component.exited", "trainer")
    os.kill(guardian, signal.SIGCONT)
    verdict = harness.wait_for_verdict(supervisor)

    assert verdict.failure is not None
    assert (verdict.failure.component, verdict.failure.signal) == ("api", "SIGKILL")


def test_failure_carries_the_last_lines_of_the_log_and_a_hint(harness: ComponentHarness) -> None:
    verdict = harness.run(
        harness.component("api"),
        harness.component("trainer", sh("echo begins; echo CUDA out of memory >&2; exit 1")),
    )

    assert verdict.failure is not None and verdict.failure.kind is FailureKind.CUDA_OOM
    assert verdict.failure.exit_code == 1
    assert verdict.failure.line == "CUDA out of memory"
    assert verdict.failure.log_tail == "begins\nCUDA out of memory"
    assert verdict.failure.hint


def test_readable_part_of_a_binary_log_is_shown(harness: ComponentHarness) -> None:
    garbage = r"printf '\377\376ok\200\n\000\n'; exit 1"

    verdict = harness.run(harness.component("trainer", sh(garbage)))

    assert verdict.failure is not None and "ok" in verdict.failure.log_tail


@pytest.mark.parametrize("name", ["api", "trainer"])
def test_component_whose_end_raises_an_error_leaves_no_process(
    harness: ComponentHarness, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    supervisor = harness.start_all(harness.component("api"), harness.component("trainer"))
    pids = [harness.wait_for_pid("api"), harness.wait_for_pid("trainer")]

    async def fail() -> tuple[int | str, ...]:
        raise RuntimeError("a bug")

    monkeypatch.setattr(supervisor._attempt.components[name], "end", fail)
    supervisor.interrupt("enough")
    verdict = harness.end(supervisor)

    assert not any(is_alive(pid) for pid in pids)
    assert verdict.state is RunState.FAILED
    assert verdict.left == {name: ("RuntimeError('a bug')",)}


def test_components_end_if_the_examination_of_a_component_raises_an_error(
    harness: ComponentHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    supervisor = harness.start_all(harness.component("api"), harness.component("trainer"))
    pids = [harness.wait_for_pid("api"), harness.wait_for_pid("trainer")]

    async def fail() -> None:
        raise RuntimeError("a bug")

    trainer = supervisor._attempt.components["trainer"]
    trainer.is_hung = True
    monkeypatch.setattr(trainer, "examine", fail)
    supervisor.interrupt("enough")
    verdict = harness.end(supervisor)

    assert not any(is_alive(pid) for pid in pids)
    assert verdict.state is RunState.CANCELLED
