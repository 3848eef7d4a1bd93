"""The first process of a run's PID namespace: `python -I -S namespace_init.py ALIVE_FD REPORT_FD`.

It reaps what its namespace leaves, and stays until the last write end of the pipe ALIVE_FD is
closed: those are held by the guardians in the namespace. With its end, whatever way it comes, the
kernel ends every process in the namespace. What was started is a process outside, which waits for
it; to REPORT_FD it writes the first process's pid as seen from outside, once all is ready.

`--probe` makes a namespace, leaves at once, and says on stderr why that failed.

Stdlib only, as the guardian.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys

_CLONE_NEWNS = 0x00020000
_CLONE_NEWUSER = 0x10000000
_CLONE_NEWPID = 0x20000000
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REC, _MS_SLAVE = 2, 4, 8, 1 << 14, 1 << 19
_READY = b"ready"

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    is_probe = sys.argv[1:] == ["--probe"]
    alive_fd, report_fd = (-1, -1) if is_probe else map(int, sys.argv[1:3])
    try:
        _unshare()
    except OSError as error:
        sys.exit(str(error))
    said_read, said_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(said_read)
        try:
            _settle()
        except OSError as error:
            os.write(said_write, str(error).encode())
            os._exit(1)
        os.write(said_write, _READY)
        os.close(said_write)
        if not is_probe:
            os.close(report_fd)
            _keep(alive_fd)
        os._exit(0)
    os.close(said_write)
    if alive_fd >= 0:
        os.close(alive_fd)
    said = os.read(said_read, 4096)
    if said != _READY:
        sys.exit(said.decode() or "the first process of the namespace ended")
    if report_fd >= 0:
        # Only its own end is of use now: whoever wants to end this one ends that one.
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(signum, signal.SIG_IGN)
        os.write(report_fd, str(pid).encode())
        os.close(report_fd)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.waitpid(pid, 0)
    os._exit(0)


def _unshare() -> None:
    """The next child is the first process of a new PID namespace. Raises: OSError."""
    flags = _CLONE_NEWPID | _CLONE_NEWNS
    if _libc.unshare(flags) == 0:
        return
    # Without privileges: in a user namespace in which we are who we were.
    uid, gid = os.geteuid(), os.getegid()
    if _libc.unshare(_CLONE_NEWUSER | flags) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"unshare is refused: {os.strerror(error)}")
    _write("/proc/self/setgroups", "deny")
    _write("/proc/self/uid_map", f"{uid} {uid} 1")
    _write("/proc/self/gid_map", f"{gid} {gid} 1")


def _settle() -> None:
    """A /proc of the namespace's own. Raises: OSError."""
    _mount(b"none", b"/", None, _MS_REC | _MS_SLAVE)
    _mount(b"proc", b"/proc", b"proc", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC)


def _mount(source: bytes, target: bytes, kind: bytes | None, flags: int) -> None:
    if _libc.mount(source, target, kind, ctypes.c_ulong(flags), None) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"mount on {target.decode()} is refused: {os.strerror(error)}")


def _keep(alive_fd: int) -> None:
    """Reap until nobody holds the other end of the pipe any more."""
    wakeup_read, wakeup_write = os.pipe()
    os.set_blocking(wakeup_read, False)
    os.set_blocking(wakeup_write, False)
    signal.set_wakeup_fd(wakeup_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda signum, frame: None)
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    os.chdir("/")
    poll = select.poll()
    poll.register(wakeup_read, select.POLLIN)
    poll.register(alive_fd, select.POLLIN)
    while True:
        for fd, _ in poll.poll():
            if fd == alive_fd:
                return
            os.read(fd, 4096)
            _reap()


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0] != 0:
            pass
    except ChildProcessError:
        pass


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as f:
        f.write(text)


if __name__ == "__main__":
    main()
