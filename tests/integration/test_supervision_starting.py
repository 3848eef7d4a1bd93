"""Components start in order, each when the one before is ready; any death on the way is seen."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tasks.processes.ports import PortsReserved
from tasks.processes.supervisor import Supervisor
from tasks.record.outcome import Verdict
from tasks.record.states import RunState
from tasks.spec.errors import RunEnded
from tasks.spec.failure_kinds import FailureKind
from tasks.spec.probes import ReadyProbe
from tests.support.shapes import SHAPES
from tests.support.stage import DEADLINE_S, FOREVER, Stage, free_port, python, sh, wait_until

UP = ReadyProbe(log="up", within_s=DEADLINE_S)
NEVER = ReadyProbe(log="never", within_s=DEADLINE_S)

#: Answers any GET with 200 `{}`: `SERVER % (seconds before it binds, port)`.
SERVER = """
import socket, time
time.sleep(%s)
s = socket.socket()
s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
s.bind(("127.0.0.1", %d))
s.listen(50)
while True:
    c, _ = s.accept()
    c.recv(65536)
    c.sendall(b"HTTP/1.0 200 OK\\r\\nContent-Type: application/json\\r\\n\\r\\n{}")
    c.close()
"""


def test_components_start_when_the_one_before_is_ready_and_end_in_reverse(stage: Stage) -> None:
    polite = sh("trap 'sleep 0.1; exit' TERM; echo up; while :; do sleep 0.02; done")
    names = ["api", "trainer", "environment"]
    supervisor = stage.running(
        *(stage.component(name, polite, ready=UP, grace_s=DEADLINE_S) for name in names)
    )

    stage.end(supervisor)

    assert [e for e in stage.story() if e.startswith("component.")] == [
        *(
            f"component.{what} {name}"
            for name in names
            for what in ("starting", "spawned", "ready")
        ),
        *(f"component.{what} {name}" for name in reversed(names) for what in ("exited", "stopped")),
    ]
    assert "attempt.ready" in stage.story()


@pytest.mark.parametrize(
    ("argv", "ready"),
    [
        # No probe: ready as soon as it runs.
        (FOREVER, None),
        (sh("sleep 0.05; echo service is up; exec sleep 600"), ReadyProbe(log="is up$")),
        # The line grows while it is looked at.
        (sh("printf 'service '; sleep 0.1; printf 'is up'; exec sleep 600"), UP),
        (sh("sleep 0.05; touch registered; exec sleep 600"), ReadyProbe(file="registered")),
        (FOREVER, ReadyProbe(alive_s=0.2)),
        (
            python(
                "import os, socket, time\n"
                "s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
                "s.connect('\\0' + os.environ['NOTIFY_SOCKET'][1:])\n"
                "s.send(b'STATUS=loading'); s.send(b'READY=1'); time.sleep(600)"
            ),
            ReadyProbe(notify=True),
        ),
    ],
)
def test_component_is_ready_when_its_probe_says_so(
    stage: Stage, argv: tuple[str, ...], ready: ReadyProbe | None
) -> None:
    supervisor = stage.running(stage.component("trainer", argv, ready=ready))

    assert stage.seen("component.ready", "trainer")
    assert stage.end(supervisor).state is RunState.CANCELLED


@pytest.mark.parametrize("said", ["READY=1", "STATUS=x"])
def test_who_says_more_than_ready_is_heard_to_the_end(stage: Stage, said: str) -> None:
    speaks = python(
        "import os, socket\n"
        "s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
        "s.connect('\\0' + os.environ['NOTIFY_SOCKET'][1:])\n"
        "s.send(b'READY=1')\n"
        "for i in range(3000): s.send(b'STATUS=step %d\\n' % i)\n"
        f"s.send(b'{said}')\n"
        "print('said all')\n"
    )

    verdict = stage.run(
        stage.component("trainer", speaks, ready=ReadyProbe(notify=True), on_exit_zero="complete")
    )

    assert verdict.state is RunState.COMPLETED
    assert "said all" in stage.text_of("trainer")
    last = "x" if said == "STATUS=x" else "step 2999"
    told = [event.fields["message"] for event in stage.seen("component.status")]
    assert told[-1] == last and len(told) < 100


@pytest.mark.parametrize("question", ["http", "tcp"])
def test_component_is_ready_when_its_port_answers(stage: Stage, question: str) -> None:
    ports = PortsReserved(["api.port"])
    port = ports.numbers["api.port"]
    asked = {"http": f"http://127.0.0.1:{port}/", "tcp": f"127.0.0.1:{port}"}[question]
    api = stage.component(
        "api", python(SERVER % (0.1, port)), ready=ReadyProbe.model_validate({question: asked})
    )

    supervisor = stage.running(api, ports=ports)

    assert stage.seen("component.ready", "api")
    stage.end(supervisor)


@pytest.mark.parametrize(
    ("end", "how", "on_exit_zero"),
    [
        ("kill -SEGV $$", "killed by SIGSEGV before it was ready", "fail"),
        ("exit 0", "ended with exit code 0 before it was ready", "complete"),
        ("exit 0", "ended with exit code 0 before it was ready", "drain"),
    ],
)
def test_component_that_ends_before_it_is_ready_is_the_cause(
    stage: Stage, end: str, how: str, on_exit_zero: str
) -> None:
    verdict = stage.run(
        stage.component("api"),
        stage.component("trainer", sh(end), ready=NEVER, on_exit_zero=on_exit_zero),  # type: ignore[arg-type]
    )

    assert verdict.state is RunState.FAILED
    assert verdict.failure is not None and verdict.failure.component == "trainer"
    assert how in verdict.failure.message


def test_a_file_of_an_earlier_one_is_no_readiness_whatever_its_time(stage: Stage) -> None:
    old = stage.directory / "registered"
    old.touch()
    os.utime(old, (4e9, 4e9))
    registers = "until [ -e go ]; do sleep 0.01; done; touch -d @1 registered; exec sleep 600"
    supervisor = stage.supervise(
        stage.component("trainer", sh(registers), ready=ReadyProbe(file="registered"))
    )
    starting = threading.Thread(target=supervisor.start, args=["trainer"])
    starting.start()

    refused = stage.until("probe.failed", "trainer")
    (stage.directory / "go").touch()
    starting.join(DEADLINE_S)

    assert "older than the component" in refused.fields["reason"]
    assert stage.seen("component.ready", "trainer")
    stage.end(supervisor)


def test_component_that_leaves_at_once_was_ready_when_its_log_says_so(stage: Stage) -> None:
    verdict = stage.run(
        stage.component("trainer", sh("echo up"), ready=UP, on_exit_zero="complete")
    )

    assert verdict.state is RunState.COMPLETED


@pytest.mark.parametrize(
    ("ready", "reason"),
    [
        ({"log": "never"}, "no such line yet"),
        ({"file": "nothing"}, "No such file or directory"),
        ({"tcp": "PORT"}, "Connect call failed"),
        ({"http": "http://127.0.0.1:PORT/health"}, "GET http://127.0.0.1:PORT/health: "),
        ({"notify": True}, "not yet"),
    ],
)
def test_component_that_never_gets_ready_fails_with_the_last_reason(
    stage: Stage, ready: dict[str, object], reason: str
) -> None:
    port = str(free_port())
    asked = {k: v.replace("PORT", port) if isinstance(v, str) else v for k, v in ready.items()}
    probe = ReadyProbe.model_validate({**asked, "within_s": 0.3})

    verdict = stage.run(stage.component("api"), stage.component("trainer", ready=probe))

    assert verdict.failure is not None and verdict.failure.kind is FailureKind.NOT_READY
    assert verdict.failure.component == "trainer"
    assert reason.replace("PORT", port) in verdict.failure.message
    assert stage.seen("probe.failed", "trainer")


@pytest.mark.parametrize(
    ("argv", "what"),
    [
        (("/no/such/program",), "No such file or directory: /no/such/program"),
        (("no-such-program-anywhere",), "No such file or directory"),
        (("/etc/passwd",), "Permission denied: /etc/passwd"),
        (("/",), "Permission denied: /"),
        (("sleep", "nul\0byte"), "embedded null byte"),
        (("/no/\udcff",), "No such file or directory"),
    ],
)
def test_what_cannot_be_started_is_the_users_to_mend(
    stage: Stage, argv: tuple[str, ...], what: str
) -> None:
    verdict = stage.run(stage.component("api"), stage.component("trainer", argv))

    assert verdict.failure is not None and verdict.failure.kind is FailureKind.USER_ERROR
    assert verdict.failure.component == "trainer"
    assert what in verdict.failure.message


def test_working_directory_that_is_not_there_is_named(stage: Stage) -> None:
    verdict = stage.run(stage.component("trainer", cwd=Path("/no/such/place")))

    assert verdict.failure is not None and verdict.failure.kind is FailureKind.USER_ERROR
    assert "No such file or directory: /no/such/place" in verdict.failure.message


def test_log_that_cannot_be_written_is_named(stage: Stage) -> None:
    verdict = stage.run(stage.component("trainer", log=Path("/proc/no.log")))

    assert verdict.state is RunState.FAILED
    assert "/proc/no.log" in verdict.message


@pytest.fixture
def foreign_server(stage: Stage) -> Iterator[Callable[[int], None]]:
    """Starts servers that are not of any run, outside every supervisor's tree of components."""
    servers: list[subprocess.Popen[bytes]] = []

    def start(port: int) -> None:
        servers.append(subprocess.Popen([sys.executable, "-I", "-S", "-c", SERVER % (0, port)]))
        stage.others.add(servers[-1].pid)
        wait_until(lambda: accepts(port), "the foreign server listens")

    yield start
    for server in servers:
        server.kill()
        server.wait()


def accepts(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize("question", ["http", "tcp"])
def test_foreign_server_that_takes_the_port_first_is_never_taken_for_the_component(
    stage: Stage, foreign_server: Callable[[int], None], question: str
) -> None:
    ports = PortsReserved(["api.port"])
    port = ports.numbers["api.port"]
    asked = {"http": f"http://127.0.0.1:{port}/", "tcp": f"127.0.0.1:{port}"}[question]
    supervisor = stage.supervise(
        stage.component("api", ready=ReadyProbe.model_validate({question: asked})), ports=ports
    )

    verdict = taken_by_another(stage, supervisor, lambda: foreign_server(port))

    assert verdict.failure is not None and verdict.failure.kind is FailureKind.PORT_CONFLICT
    assert stage.seen("component.ready") == []


def taken_by_another(stage: Stage, supervisor: Supervisor, take: Callable[[], None]) -> Verdict:
    """Another takes the port once the api was spawned, which ends the run."""

    def wait_and_take() -> None:
        stage.until("component.spawned")
        take()

    threading.Thread(target=wait_and_take).start()
    with pytest.raises(RunEnded):
        supervisor.start("api")
    return stage.end(supervisor)


def test_component_that_loses_the_race_for_its_port_is_a_port_conflict(
    stage: Stage, foreign_server: Callable[[int], None]
) -> None:
    ports = PortsReserved(["api.port"])
    port = ports.numbers["api.port"]
    supervisor = stage.supervise(
        stage.component("api", python(SERVER % (1.0, port)), ready=NEVER), ports=ports
    )

    verdict = taken_by_another(stage, supervisor, lambda: foreign_server(port))

    assert verdict.failure is not None and verdict.failure.kind is FailureKind.PORT_CONFLICT
    assert "Address already in use" in verdict.failure.line


@pytest.mark.parametrize(
    ("at", "shape"), [(0, "polite"), (1, "leader-ignores-term"), (2, "scrubbed-daemon")]
)
def test_stop_during_a_start_starts_nothing_later(stage: Stage, shape: str, at: int) -> None:
    names = ["api", "trainer", "environment"]
    supervisor = stage.supervise(
        *(
            stage.component(name, SHAPES[shape], ready=NEVER if i == at else UP)
            for i, name in enumerate(names)
        )
    )

    def interrupt() -> None:
        stage.until("component.starting", names[at])
        supervisor.interrupt("enough")

    threading.Thread(target=interrupt).start()
    for name in names:
        with_ending = (
            pytest.raises(RunEnded) if names.index(name) >= at else contextlib.nullcontext()
        )
        with with_ending:
            supervisor.start(name)
    verdict = stage.end(supervisor)

    assert verdict.state is RunState.CANCELLED
    begun = stage.story().index("teardown.begun")
    assert not [e for e in stage.story()[begun:] if e.startswith("component.starting")]
    assert all(stage.seen("component.starting", name) == [] for name in names[at + 1 :])


def test_stop_before_anything_was_started_leaves_nothing(stage: Stage) -> None:
    supervisor = stage.supervise(stage.component("api"), stage.component("trainer"))

    supervisor.interrupt("enough")
    with pytest.raises(RunEnded):
        supervisor.start("api")
    verdict = stage.end(supervisor)

    assert verdict.state is RunState.CANCELLED
    assert stage.story() == ["teardown.begun", "teardown.ended"]


def test_teardown_may_be_asked_for_by_anyone_any_number_of_times(stage: Stage) -> None:
    supervisor = stage.running(stage.component("api", SHAPES["leader-ignores-term"], ready=UP))

    verdicts: list[object] = []
    threads = [
        threading.Thread(target=lambda: verdicts.append(supervisor.teardown())) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    supervisor.interrupt("late")
    supervisor.hurry()
    for thread in threads:
        thread.join()
    with supervisor:
        verdicts.append(supervisor.teardown())
    supervisor.interrupt("later than its end")
    supervisor.hurry()

    assert all(verdict == verdicts[0] for verdict in verdicts)
    assert stage.story().count("teardown.begun") == 1
    assert stage.left() == {}
