"""Process supervisors of others, as real processes with configurations as their users write them.

They come with the extra `bench`. None of them ends everything when one component dies, except for
honcho, so that the others are told to with their own means: an event listener for supervisord, a
hook for circus.
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

#: In the environment of all that one of them starts, and of itself.
_PLACE = "MUSTER_BENCH_PLACE"
_STOP_WITHIN_S = 30.0
#: Of the file descriptors that supervisord wants to have: three a component, and its own.
_FDS_EACH, _FDS_OWN = 4, 1000

#: When a supervisor has heard of a death, in nanoseconds of CLOCK_MONOTONIC; not honcho's.
HEARD = ("death", "heard")
_NOTE = f"""\
import os, signal, sys, time

def note():
    path = "{".".join(HEARD)}"
    if not os.path.exists(path):
        with open(path, "w") as f:
            f.write(str(time.monotonic_ns()))
"""
#: Ends supervisord with the first event that it gets.
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
_HOOK = f"""\
{_NOTE}
def end_all(watcher, arbiter, hook_name, **kwargs):
    note()
    os.kill(os.getpid(), signal.SIGTERM)
    return True
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What a supervisor is to run."""

    #: Its configuration and its logs lie here.
    place: Path
    #: `commands[name]`, in the order of their start.
    commands: Mapping[str, Sequence[str]]
    #: The end of one is the end of all.
    ends_together: bool
    #: From SIGTERM to SIGKILL; honcho's own is fixed at 5 s.
    grace_s: float = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Peer:
    """One supervisor."""

    #: As its process is called.
    name: str
    #: Where it comes from.
    package: str
    #: Writes the configuration; returns the arguments of Python.
    configure: Callable[[Job], Sequence[str]]

    @property
    def version(self) -> str:
        """Raises: NotHere."""
        try:
            return version(self.package)
        except PackageNotFoundError:
            raise NotHere(f"{self.package} is not installed: `make bench` does it") from None


def present() -> tuple[list[Peer], list[Missing]]:
    """Those that are installed, and what is to be said of the others."""
    found, missing = [], []
    for peer in PEERS:
        try:
            _ = peer.version
        except NotHere as reason:
            missing.append(Missing(way=peer.name, why=str(reason)))
        else:
            found.append(peer)
    return found, missing


@contextmanager
def running(peer: Peer, job: Job) -> Iterator[subprocess.Popen[bytes]]:
    """The supervisor's process; nothing of it is left afterwards."""
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
        for pid in _left(job.place):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def said(job: Job) -> str:
    """The last that a supervisor wrote, for an error's message."""
    return (job.place / "supervisor.out").read_text(errors="replace")[-2000:]


def _left(place: Path) -> Iterator[int]:
    wanted = f"{_PLACE}={place}".encode()
    for entry in Path("/proc").iterdir():
        with suppress(OSError):
            if entry.name.isdigit() and wanted in (entry / "environ").read_bytes().split(b"\0"):
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
