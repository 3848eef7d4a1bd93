"""The first process of a run's PID namespace: `python -I -S namespace_init.py`.

It stays until its standard input ends, a pipe whose write ends the guardians in the namespace hold.
With its end, whatever way it comes, the kernel ends every process in the namespace. What was
started is a process outside, which waits for it; on standard output it says the first process's pid
as seen from outside, once all is ready, or on standard error why none can be had.

Stdlib only, as the guardian.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_CLONE_NEWNS = 0x00020000
_CLONE_NEWUSER = 0x10000000
_CLONE_NEWPID = 0x20000000
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_REC, _MS_SLAVE = 2, 4, 8, 1 << 14, 1 << 19
_READY = b"ready"

_libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    try:
        _unshare()
    except OSError as error:
        sys.exit(str(error))
    said_read, said_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(said_read)
        # The kernel itself reaps what the namespace leaves to this process.
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        try:
            _settle()
        except OSError as error:
            os.write(said_write, str(error).encode())
            os._exit(1)
        os.write(said_write, _READY)
        os.close(said_write)
        os.close(1)
        os.chdir("/")
        os.read(0, 1)
        os._exit(0)
    os.close(said_write)
    said = os.read(said_read, 4096)
    if said != _READY:
        sys.exit(said.decode() or "the first process of the namespace ended")
    # Only its own end is of use now: whoever wants to end this one ends that one.
    for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    os.write(1, str(pid).encode())
    os.close(1)
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


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="ascii") as f:
        f.write(text)


if __name__ == "__main__":
    main()
