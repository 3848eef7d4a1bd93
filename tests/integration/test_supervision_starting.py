"""Components start in order, each when the previous component is ready; deaths are noticed."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tasks.processes.ports import PortsReserved
from tasks.processes.supervisor import Supervisor
from tasks.record.outcome import Verdict
from tasks.record.states import RunState
from tasks.spec.errors import RunEnded
from tasks.spec.failure_kinds import FailureKind
from tasks.spec.probes import ReadyProbe
from tests.support.process_trees import SHAPES
from tests.support.supervised_components import (
    DEADLINE_S,
    FOREVER,
    ComponentHarness,
    free_port,
    python,
    sh,
    wait_until,
)

UP = ReadyProbe(log="up", within_s=DEADLINE_S)
NEVER = ReadyProbe(log="never", within_s=DEADLINE_S)

#: Template of a server that answers any GET with 200 and `{}`. The template needs two values: the
#: seconds before the server binds its port, and the port.
SERVER = """
import socket, time
time.sleep(%s)
server = socket.socket()
server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
server.bind(("127.0.0.1", %d))
server.listen(50)
while True:
    connection, _ = server.accept()
    connection.recv(65536)
    connection.sendall(b"HTTP/1.0 200 OK\\r\\nContent-Type: application/json\\r\\n\\r\\n{}")
    connection.close()
"""


def test_components_start_after_the_previous_component_is_ready_and_end_in_reverse(
    harness: ComponentHarness,
) -> None:
    polite = sh("trap 'sleep 0.1; exit' TERM; echo up; while :; do sleep 0.02; done")
    names = ["api", "trainer", "environment"]
    supervisor = harness.start_all(
        *(harness.component(name, polite, ready=UP, grace_s=DEADLINE_S) for name in names)
    )

    harness.end(supervisor)

    assert [entry for entry in harness.list_event_names() if entry.startswith("component.")] == [
        *(
            f"component.{change} {name}"
            for name in names
            for change in ("starting", "spawned", "ready")
        ),
        *(
            f"component.{change} {name}"
            for name in reversed(names)
            for change in ("exited", "stopped")
        ),
    ]
    assert "attempt.ready" in harness.list_event_names()


@pytest.mark.parametrize(
    ("argv", "ready"),
    [
        # Without a readiness probe, the component is ready as soon as it runs.
        (FOREVER, None),
        (sh("sleep 0.05; echo service is up; exec sleep 600"), ReadyProbe(log="is up$")),
        # The probe also matches a line that is written in two parts.
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
def test_component_is_ready_when_its_probe_succeeds(
    harness: ComponentHarness, argv: tuple[str, ...], ready: ReadyProbe | None
) -> None:
    supervisor = harness.start_all(harness.component("trainer", argv, ready=ready))

    assert harness.list_events("component.ready", "trainer")
    assert harness.end(supervisor).state is RunState.CANCELLED


@pytest.mark.parametrize("last_message", ["READY=1", "STATUS=x"])
def test_status_messages_after_ready_are_read_to_the_last_message(
    harness: ComponentHarness, last_message: str
) -> None:
    program = python(
        "import os, socket\n"
        "s = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)\n"
        "s.connect('\\0' + os.environ['NOTIFY_SOCKET'][1:])\n"
        "s.send(b'READY=1')\n"
        "for i in range(3000): s.send(b'STATUS=step %d\\n' % i)\n"
        f"s.send(b'{last_message}')\n"
        "print('sent all')\n"
    )

    verdict = harness.run(
        harness.component(
            "trainer", program, ready=ReadyProbe(notify=True), on_exit_zero="complete"
        )
    )

    assert verdict.state is RunState.COMPLETED
    assert "sent all" in harness.read_log("trainer")
    expected_status = "x" if last_message == "STATUS=x" else "step 2999"
    statuses = [event.fields["message"] for event in harness.list_events("component.status")]
    assert statuses[-1] == expected_status and len(statuses) < 100


@pytest.mark.parametrize("probe_kind", ["http", "tcp"])
def test_component_is_ready_when_its_port_answers(
    harness: ComponentHarness, probe_kind: str
) -> None:
    ports = PortsReserved(["api.port"])
    port = ports.numbers["api.port"]
    address = {"http": f"http://127.0.0.1:{port}/", "tcp": f"127.0.0.1:{port}"}[probe_kind]
    api = harness.component(
        "api", python(SERVER % (0.1, port)), ready=ReadyProbe.model_validate({probe_kind: address})
    )

    supervisor = harness.start_all(api, ports=ports)

    assert harness.list_events("component.ready", "api")
    harness.end(supervisor)


@pytest.mark.parametrize(
    ("command", "expected_text", "on_exit_zero"),
    [
        ("kill -SEGV $$", "killed by SIGSEGV before it was ready", "fail"),
        ("exit 0", "ended with exit code 0 before it was ready", "complete"),
        ("exit 0", "ended with exit code 0 before it was ready", "drain"),
    ],
)
def test_component_that_ends_before_it_is_ready_is_the_cause_of_the_failure(
    harness: ComponentHarness, command: str, expected_text: str, on_exit_zero: str
) -> None:
    verdict = harness.run(
        harness.component("api"),
        harness.component("trainer", sh(command), ready=NEVER, on_exit_zero=on_exit_zero),  # type: ignore[arg-type]
    )

    assert verdict.state is RunState.FAILED
    assert verdict.failure is not None and verdict.failure.component == "trainer"
    assert expected_text in verdict.failure.message


def test_file_of_an_earlier_process_does_not_make_a_component_ready(
    harness: ComponentHarness,
) -> None:
    old_file = harness.directory / "registered"
    old_file.touch()
    os.utime(old_file, (4e9, 4e9))
    script = "until [ -e go ]; do sleep 0.01; done; touch -d @1 registered; exec sleep 600"
    supervisor = harness.supervise(
        harness.component("trainer", sh(script), ready=ReadyProbe(file="registered"))
    )
    starting = threading.Thread(target=supervisor.start, args=["trainer"])
    starting.start()

    failed_probe = harness.wait_for_event("probe.failed", "trainer")
    (harness.directory / "go").touch()
    starting.join(DEADLINE_S)

    assert "before the component started" in failed_probe.fields["reason"]
    assert harness.list_events("component.ready", "trainer")
    harness.end(supervisor)


def test_component_that_exits_at_once_was_ready_if_its_log_shows_it(
    harness: ComponentHarness,
) -> None:
    verdict = harness.run(
        harness.component("trainer", sh("echo up"), ready=UP, on_exit_zero="complete")
    )

    assert verdict.state is RunState.COMPLETED


def test_next_component_starts_after_all_processes_of_a_preparation_step(
    harness: ComponentHarness,
) -> None:
    # The component `prepare` exits at once. Its child process ignores SIGTERM, and writes the file
    # `prepared` later.
    child = "trap '' TERM; (sleep 0.3; touch prepared) &"
    verdict = harness.run(
        harness.component(
            "prepare",
            sh(f"touch begun; {child} exit 0"),
            ready=ReadyProbe(exit=0),
            on_exit_zero="drain",
            grace_s=DEADLINE_S,
        ),
        harness.component("trainer", sh("ls > seen"), on_exit_zero="complete"),
    )

    assert verdict.state is RunState.COMPLETED
    assert {"begun", "prepared"} <= {*(harness.directory / "seen").read_text().split()}
    assert harness.list_events("component.drained", "prepare")


def test_failed_preparation_step_is_the_cause_of_the_failure(harness: ComponentHarness) -> None:
    verdict = harness.run(
        harness.component(
            "prepare",
            sh("echo 'OSError: [Errno 28] No space left on device'; exit 3"),
            ready=ReadyProbe(exit=0),
            on_exit_zero="drain",
        ),
        harness.component("trainer", sh("touch started")),
    )

    assert verdict.failure is not None
    assert (verdict.failure.component, verdict.failure.exit_code) == ("prepare", 3)
    assert verdict.failure.kind is FailureKind.STORAGE
    assert "before it was ready" not in verdict.failure.message
    assert not (harness.directory / "started").exists()


def test_preparation_step_that_does_not_end_in_time_fails(harness: ComponentHarness) -> None:
    verdict = harness.run(
        harness.component("prepare", FOREVER, ready=ReadyProbe(exit=0, within_s=0.2)),
        harness.component("trainer", sh("touch started")),
    )

    assert verdict.failure is not None
    assert verdict.failure.kind is FailureKind.NOT_READY
    assert "but is still running after" in verdict.failure.message
    assert not (harness.directory / "started").exists()


def test_component_knows_its_working_directory_and_writes_with_its_own_umask(
    harness: ComponentHarness,
) -> None:
    part = harness.component(
        "trainer", sh('echo "$PWD" > place; touch file'), on_exit_zero="complete"
    )
    env = {**part.command.env, "PWD": "/elsewhere"}
    previous_umask = os.umask(0o077)
    try:
        verdict = harness.run(replace(part, command=replace(part.command, env=env, umask=0o022)))
    finally:
        os.umask(previous_umask)

    assert verdict.state is RunState.COMPLETED
    assert (harness.directory / "place").read_text().strip() == str(harness.directory)
    assert (harness.directory / "file").stat().st_mode & 0o777 == 0o644
    assert part.command.log.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    ("ready", "reason"),
    [
        ({"log": "never"}, "no line of the log matches yet"),
        ({"file": "nothing"}, "No such file or directory"),
        ({"tcp": "PORT"}, "Connect call failed"),
        ({"http": "http://127.0.0.1:PORT/health"}, "GET http://127.0.0.1:PORT/health: "),
        ({"notify": True}, "not yet"),
    ],
)
def test_component_that_never_gets_ready_fails_with_the_last_reason(
    harness: ComponentHarness, ready: dict[str, object], reason: str
) -> None:
    port = str(free_port())
    fields = {
        key: value.replace("PORT", port) if isinstance(value, str) else value
        for key, value in ready.items()
    }
    probe = ReadyProbe.model_validate({**fields, "within_s": 0.3})

    verdict = harness.run(harness.component("api"), harness.component("trainer", ready=probe))

    assert verdict.failure is not None and verdict.failure.kind is FailureKind.NOT_READY
    assert verdict.failure.component == "trainer"
    assert reason.replace("PORT", port) in verdict.failure.message
    assert harness.list_events("probe.failed", "trainer")


@pytest.mark.parametrize(
    ("argv", "expected_text"),
    [
        (("/no/such/program",), "No such file or directory: /no/such/program"),
        (("no-such-program-anywhere",), "No such file or directory"),
        (("/etc/passwd",), "Permission denied: /etc/passwd"),
        (("/",), "Permission denied: /"),
        (("sleep", "nul\0byte"), "embedded null byte"),
        (("/no/\udcff",), "No such file or directory"),
    ],
)
def test_command_that_cannot_be_started_is_a_user_error(
    harness: ComponentHarness, argv: tuple[str, ...], expected_text: str
) -> None:
    verdict = harness.run(harness.component("api"), harness.component("trainer", argv))

    assert verdict.failure is not None and verdict.failure.kind is FailureKind.USER_ERROR
    assert verdict.failure.component == "trainer"
    assert expected_text in verdict.failure.message


def test_missing_working_directory_is_named(harness: ComponentHarness) -> None:
    verdict = harness.run(harness.component("trainer", cwd=Path("/no/such/place")))

    assert verdict.failure is not None and verdict.failure.kind is FailureKind.USER_ERROR
    assert "No such file or directory: /no/such/place" in verdict.failure.message


def test_unwritable_log_is_named(harness: ComponentHarness) -> None:
    verdict = harness.run(harness.component("trainer", log=Path("/proc/no.log")))

    assert verdict.state is RunState.FAILED
    assert "/proc/no.log" in verdict.message


@pytest.fixture
def foreign_server(harness: ComponentHarness) -> Iterator[Callable[[int], None]]:
    """Yield a function that starts a server on a port; the server belongs to no run."""
    servers: list[subprocess.Popen[bytes]] = []

    def start_server(port: int) -> None:
        servers.append(subprocess.Popen([sys.executable, "-I", "-S", "-c", SERVER % (0, port)]))
        harness.others.add(servers[-1].pid)
        wait_until(lambda: accepts_connections(port), "the foreign server listens")

    yield start_server
    for server in servers:
        server.kill()
        server.wait()


def accepts_connections(port: int) -> bool:
    """Return True if a program accepts connections on the port."""
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize("probe_kind", ["http", "tcp"])
def test_foreign_server_on_the_port_does_not_make_a_component_ready(
    harness: ComponentHarness, foreign_server: Callable[[int], None], probe_kind: str
) -> None:
    ports = PortsReserved(["api.port"])
    port = ports.numbers["api.port"]
    address = {"http": f"http://127.0.0.1:{port}/", "tcp": f"127.0.0.1:{port}"}[probe_kind]
    supervisor = harness.supervise(
        harness.component("api", ready=ReadyProbe.model_validate({probe_kind: address})),
        ports=ports,
    )

    verdict = start_with_taken_port(harness, supervisor, lambda: foreign_server(port))

    assert verdict.failure is not None and verdict.failure.kind is FailureKind.PORT_CONFLICT
    assert harness.list_events("component.ready") == []


def start_with_taken_port(
    harness: ComponentHarness, supervisor: Supervisor, take: Callable[[], None]
) -> Verdict:
    """Start the component `api` while another program takes its port; return the final state.

    Args:
        harness: Creates the components.
        supervisor: Supervisor of the attempt.
        take: Lets another program listen on the port. Called as soon as the api runs.
    """

    def wait_and_take() -> None:
        harness.wait_for_event("component.spawned")
        take()

    threading.Thread(target=wait_and_take).start()
    with pytest.raises(RunEnded):
        supervisor.start("api")
    return harness.end(supervisor)


def test_component_whose_port_was_bound_first_is_a_port_conflict(
    harness: ComponentHarness, foreign_server: Callable[[int], None]
) -> None:
    ports = PortsReserved(["api.port"])
    port = ports.numbers["api.port"]
    supervisor = harness.supervise(
        harness.component("api", python(SERVER % (1.0, port)), ready=NEVER), ports=ports
    )

    verdict = start_with_taken_port(harness, supervisor, lambda: foreign_server(port))

    assert verdict.failure is not None and verdict.failure.kind is FailureKind.PORT_CONFLICT
    assert "Address already in use" in verdict.failure.line


@pytest.mark.parametrize(
    ("stop_index", "shape"), [(0, "polite"), (1, "leader-ignores-term"), (2, "scrubbed-daemon")]
)
def test_stop_during_the_start_starts_no_later_component(
    harness: ComponentHarness, shape: str, stop_index: int
) -> None:
    names = ["api", "trainer", "environment"]
    supervisor = harness.supervise(
        *(
            harness.component(name, SHAPES[shape], ready=NEVER if index == stop_index else UP)
            for index, name in enumerate(names)
        )
    )

    def interrupt() -> None:
        harness.wait_for_event("component.starting", names[stop_index])
        supervisor.interrupt("enough")

    threading.Thread(target=interrupt).start()
    for name in names:
        expectation = (
            pytest.raises(RunEnded) if names.index(name) >= stop_index else contextlib.nullcontext()
        )
        with expectation:
            supervisor.start(name)
    verdict = harness.end(supervisor)

    assert verdict.state is RunState.CANCELLED
    teardown_index = harness.list_event_names().index("teardown.begun")
    assert not [
        entry
        for entry in harness.list_event_names()[teardown_index:]
        if entry.startswith("component.starting")
    ]
    assert all(
        harness.list_events("component.starting", name) == [] for name in names[stop_index + 1 :]
    )


def test_stop_before_the_first_start_starts_no_process(harness: ComponentHarness) -> None:
    supervisor = harness.supervise(harness.component("api"), harness.component("trainer"))

    supervisor.interrupt("enough")
    with pytest.raises(RunEnded):
        supervisor.start("api")
    verdict = harness.end(supervisor)

    assert verdict.state is RunState.CANCELLED
    assert harness.list_event_names() == ["teardown.begun", "teardown.ended"]


def test_concurrent_and_repeated_teardowns_return_the_same_verdict(
    harness: ComponentHarness,
) -> None:
    supervisor = harness.start_all(
        harness.component("api", SHAPES["leader-ignores-term"], ready=UP)
    )

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
    assert harness.list_event_names().count("teardown.begun") == 1
    assert harness.list_survivors() == {}
