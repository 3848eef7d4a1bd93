"""Other process supervisors, which run as real processes with ordinary configurations.

The extra `bench` installs supervisord, circus and honcho. If a component dies, only honcho ends the
other components by itself. The other supervisors are configured to end the components, too:
supervisord by an event listener, circus by a hook.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from tests.benchmarks.report import Missing, NotHere

#: Environment variable with the folder of a `Job`. A supervisor and all its descendants have this
#: variable, so that leftover processes can be found.
_PLACE = "MUSTER_BENCH_PLACE"
#: Time limit on the stop of a supervisor, in seconds.
_STOP_WITHIN_S = 30.0
#: Numbers of file descriptors that supervisord needs: for each component, and for itself.
_FDS_EACH, _FDS_OWN = 4, 1000

#: Name and suffix of the file `death.heard`. The file contains the time at which supervisord or
#: circus noticed the death of a component, in nanoseconds of CLOCK_MONOTONIC.
DEATH_NOTICE = ("death", "heard")
_NOTE = f"""\
import os, signal, sys, time

def note():
    path = "{".".join(DEATH_NOTICE)}"
    if not os.path.exists(path):
        with open(path, "w") as f:
            f.write(str(time.monotonic_ns()))
"""
#: Event listener of supervisord. The listener ends supervisord at the first event, which is the end
#: of a component.
_LISTENER = f"""\
{_NOTE}
while True:
    print("READY", flush=True)
    head = dict(word.split(":", 1) for word in sys.stdin.readline().split())
    sys.stdin.read(int(head["len"]))
    note()
    os.kill(os.getppid(), signal.SIGTERM)
    sys.stdout.write("RESULT 2\\nOK")
"""
#: Hook that ends circus at the first death of a component.
_HOOK = f"""\
{_NOTE}
def end_all(watcher, arbiter, hook_name, **kwargs):
    note()
    os.kill(os.getpid(), signal.SIGTERM)
    return True
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """Components that a supervisor runs."""

    #: Folder for the supervisor's configuration and logs.
    place: Path
    #: Mapping from the name of a component to its command, in the order of the start.
    commands: Mapping[str, Sequence[str]]
    #: True if the end of one component ends all components.
    ends_together: bool
    #: Seconds from SIGTERM to SIGKILL. honcho ignores this value and always waits 5 s.
    grace_s: float = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """A process supervisor with which Muster is compared, for example supervisord."""

    #: Name of the supervisor's process.
    name: str
    #: Name of the supervisor's Python package.
    package: str
    #: Function that writes the configuration of a job, and returns the arguments with which Python
    #: runs the supervisor.
    configure: Callable[[Job], Sequence[str]]

    @property
    def version(self) -> str:
        """Version of the supervisor's Python package.

        Raises:
            NotHere: The package is not installed.
        """
        try:
            return version(self.package)
        except PackageNotFoundError:
            raise NotHere(f"{self.package} is not installed: `make bench` does it") from None


def find_installed() -> tuple[list[Peer], list[Missing]]:
    """Return the installed supervisors of other projects, and the missing ones with a reason."""
    installed: list[Peer] = []
    missing: list[Missing] = []
    for peer in PEERS:
        try:
            _ = peer.version
        except NotHere as reason:
            missing.append(Missing(way=peer.name, why=str(reason)))
        else:
            installed.append(peer)
    return installed, missing


@contextmanager
def running(peer: Peer, job: Job) -> Iterator[subprocess.Popen[bytes]]:
    """Start a supervisor and yield its process. Kill its whole tree when the context ends."""
    with (job.place / "supervisor.out").open("wb") as output:
        popen = subprocess.Popen(
            [sys.executable, *peer.configure(job)],
            cwd=job.place,
            env={**os.environ, _PLACE: str(job.place), "PYTHONPATH": str(job.place)},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield popen
    finally:
        popen.terminate()
        with suppress(subprocess.TimeoutExpired):
            popen.wait(_STOP_WITHIN_S)
        popen.kill()
        popen.wait()
        for pid in _leftovers(job.place):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def read_output(job: Job) -> str:
    """Return the last 2000 characters of a supervisor's output, for an error message."""
    return (job.place / "supervisor.out").read_text(errors="replace")[-2000:]


def _leftovers(place: Path) -> Iterator[int]:
    """Yield the ids of running processes with the folder of the job in their environment."""
    variable = f"{_PLACE}={place}".encode()
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and variable in (entry / "environ").read_bytes().split(b"\0"):
                yield int(entry.name)


def _supervisord(job: Job) -> Sequence[str]:
    minfds = _FDS_OWN + _FDS_EACH * len(job.commands)
    lines = [
        "[supervisord]",
        "nodaemon=true",
        f"logfile={job.place}/supervisord.log",
        f"pidfile={job.place}/supervisord.pid",
        f"minfds={minfds}",
    ]
    for name, argv in job.commands.items():
        lines += [
            f"[program:{name}]",
            f"command={_quoted(argv).replace('%', '%%')}",
            "autorestart=false",
            "startsecs=0",
            f"stopwaitsecs={job.grace_s:.0f}",
            "stopasgroup=true",
            "killasgroup=true",
            "redirect_stderr=true",
            "stdout_logfile=NONE",
        ]
    if job.ends_together:
        listener = job.place / "listener.py"
        listener.write_text(_LISTENER)
        lines += [
            "[eventlistener:end]",
            f"command={_quoted((sys.executable, '-I', '-S', str(listener)))}",
            "events=PROCESS_STATE_EXITED,PROCESS_STATE_FATAL",
        ]
    config = job.place / "supervisord.conf"
    config.write_text("\n".join(lines) + "\n")
    return ("-m", "supervisor.supervisord", "-c", str(config))


def _circus(job: Job) -> Sequence[str]:
    lines = [
        "[circus]",
        f"endpoint = ipc://{job.place}/endpoint",
        f"pubsub_endpoint = ipc://{job.place}/pubsub",
        "statsd = false",
    ]
    for name, argv in job.commands.items():
        lines += [
            f"[watcher:{name}]",
            f"cmd = {_quoted(argv)}",
            "copy_env = true",
            "respawn = false",
            f"graceful_timeout = {job.grace_s:.0f}",
            "stop_children = true",
        ]
        if job.ends_together:
            lines.append("hooks.after_reap = ending.end_all")
    (job.place / "ending.py").write_text(_HOOK)
    config = job.place / "circus.ini"
    config.write_text("\n".join(lines) + "\n")
    return ("-m", "circus.circusd", str(config))


def _honcho(job: Job) -> Sequence[str]:
    procfile = job.place / "Procfile"
    procfile.write_text(
        "".join(f"{name}: exec {_quoted(argv)}\n" for name, argv in job.commands.items())
    )
    return ("-m", "honcho", "start", "-f", str(procfile), "-d", str(job.place))


def _quoted(argv: Sequence[str]) -> str:
    return shlex.join(argv)


PEERS = (
    Peer(name="supervisord", package="supervisor", configure=_supervisord),
    Peer(name="circus", package="circus", configure=_circus),
    Peer(name="honcho", package="honcho", configure=_honcho),
)
