"""The registry on disk of what runs on this machine: `$MUSTER_HOME/live/<run id>/`.

A run that is under way has a directory here, with `owner.json` (its flow process) and one file for
each component, written before the component's program is executed. With the run's end it is gone.
What is found here without a living owner is what a killed run has left, and `finish` ends it.

A lock says whether the owner lives, and not only its pid: the kernel drops it with the process,
whatever the clock does, and it can be seen from any pid namespace.

Segments of /dev/shm are registered too. One belongs to nobody once its makers are dead, and its
name tells nothing for certain. So a name is attributed when it appears: the kernel tells of each
new one (inotify), and whoever has it open or mapped then has made it.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import fcntl
import json
import logging
import os
import select
import shutil
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from tasks.processes import cgroup, tree
from tasks.processes.ending import KILLED_WITHIN_S, Known, end_all, end_marked
from tasks.processes.identity import ProcessId, boot_id, host_name
from tasks.record.disk import DiskThread, replace_file, write_json
from tasks.record.places import is_at, keep_private, muster_home, read_own_file
from tasks.record.run_json import AttemptRecord, RunJson

_log = logging.getLogger(__name__)

_OWNER, _LOCK, _END = "owner.json", "lock", "end"
#: Set aside for how a run ends, should the disk be full by then.
_END_BYTES = 16384
#: A disk that takes nothing for so long leaves the run registered, for a reconcile.
_WRITTEN_WITHIN_S = 5.0
_WRITTEN_AFTER_ALL_WITHIN_S = 0.5
#: Whoever finishes a run has ended its processes, and told its server, by then.
_CLAIM_WITHIN_S = 60.0
_LOOK_EVERY_S = 0.1


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Owner(_Model):
    """The process that supervises a run."""

    run_id: str
    host: str
    process: ProcessId
    #: Of the flow run; None for what is not one, such as a temporary Prefect server.
    flow_run_id: str | None = None
    #: The Prefect server that keeps the flow run; None where it ends with the run.
    api_url: str | None = None
    #: The worker that started it; None where none did.
    worker: str | None = None
    #: The run's own directory; None where it has none.
    directory: Path | None = None
    #: Its jobs may go on without it, until a next process of the run comes.
    adopts: bool = False
    #: Files and directories that must not outlive the run, beside its processes.
    leftovers: tuple[Path, ...] = ()
    #: When somebody first found the owner gone, CLOCK_BOOTTIME seconds.
    lost_at_boot_s: float | None = None


class _Entry(_Model):
    """One component of a run, in a file of its own."""

    kind: ClassVar[str]

    run_id: str
    #: From 1.
    attempt: int
    component: str
    #: Seconds from its stop signal to SIGKILL.
    grace_s: float

    @classmethod
    def file_of(cls, component: str) -> str:
        return f"{cls.kind}-{component}.json"


class RegisterEntry(_Entry):
    """One that was started, or is about to be; `COMPONENT.PART` for what it guards itself."""

    kind = "component"

    #: Of the guardian and all below it, see `tree.mark_own`.
    mark: int
    guardian: ProcessId
    #: The component's own process, not yet executing its program when this is written.
    process: ProcessId
    #: Its cgroup v2 directory, where it has one.
    cgroup: Path | None = None


class JobEntry(_Entry):
    """One that a cluster runs, submitted or about to be.

    What is needed to ask for it lies with the attempt, in `submission.json`.
    """

    kind = "job"

    submission_id: str
    #: In the attempt's directory.
    log: Path


class RunHeld(OSError):
    """Another living process of this machine supervises the run: leave it to that one."""


def enter(directory: Path, entry: RegisterEntry | JobEntry) -> None:
    """Note something of a run before it is started, in the directory of the run's register.

    Raises: OSError; then it must not be started.
    """
    write_json(directory / entry.file_of(entry.component), entry.model_dump(mode="json"))


def leave(directory: Path, component: str) -> None:
    """Nothing of the component is left."""
    (directory / RegisterEntry.file_of(component)).unlink(missing_ok=True)
    # Whoever entered its parts may have been killed; they were below it, and gone with it.
    for part in directory.glob(RegisterEntry.file_of(f"{component}.*")):
        part.unlink(missing_ok=True)
    (directory / JobEntry.file_of(component)).unlink(missing_ok=True)


class RunRegister:
    """The registry of one run, held open by the process that supervises it.

    Closing it says that nothing of the run is left.
    """

    def __init__(self, owner: Owner) -> None:
        """Waits for somebody who is finishing an earlier process of the run.

        Raises: RunHeld; OSError, where it can't be written, or is another flow run's.
        """
        #: Where it is on disk; gone once the run is forgotten.
        self.directory = _live() / owner.run_id
        self.owner = owner
        #: Writes what there is to write of the run.
        self.disk = DiskThread(f"disk of {owner.run_id}")
        self._lock_fd: int | None = None
        deadline = time.monotonic() + _CLAIM_WITHIN_S
        while self._lock_fd is None:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._lock_fd = _try_lock(self.directory)
            if self._lock_fd is None:
                other = _read(self.directory / _OWNER, Owner)
                if other and other.flow_run_id != owner.flow_run_id:
                    why = f"{self.directory} is flow run {other.flow_run_id}'s"
                    raise FileExistsError(errno.EEXIST, f"{why}, not {owner.flow_run_id}'s")
                if (other and other.process.is_alive()) or time.monotonic() > deadline:
                    who = f"another process of this machine runs {owner.run_id}"
                    raise RunHeld(errno.EBUSY, who)
                time.sleep(_LOOK_EVERY_S)
        replace_file(self.directory / _OWNER, self._owner_text())
        with suppress(OSError), (self.directory / _END).open("wb") as f:
            os.posix_fallocate(f.fileno(), 0, _END_BYTES)

    @staticmethod
    def opened(run_id: str, **about: object) -> RunRegister:
        """Register this process as the owner of a run; `about` are fields of `Owner`."""
        keep_private()
        me = ProcessId.of(os.getpid())
        owner = Owner.model_validate(
            {"run_id": run_id, "host": host_name(), "process": me, **about}
        )
        return RunRegister(owner)

    def note_leftovers(self, made: set[Path], gone: set[Path]) -> None:
        """Note what has to be removed with the run, and what has gone before: it may come again,
        and be another's then."""
        kept = [path for path in self.owner.leftovers if path not in gone]
        leftovers = (*kept, *sorted(made.difference(kept)))
        if leftovers != self.owner.leftovers:
            self.owner = self.owner.model_copy(update={"leftovers": leftovers})
            self.disk.replace(self.directory / _OWNER, self._owner_text)

    async def enter(self, entry: RegisterEntry | JobEntry) -> None:
        """Note something of the run before it is started.

        Raises: OSError; then it must not be started.
        """
        await asyncio.wrap_future(self.disk.do(partial(enter, self.directory, entry)))

    def leave(self, component: str) -> None:
        """Nothing of the component is left. Returns at once."""
        self.disk.do(partial(leave, self.directory, component))

    def settle(self, record: RunJson) -> None:
        """Wait until the disk has the record of a run that has ended. Where it does not take that,
        how the run ended goes where room was set aside for it, and a reconcile writes the record.
        """
        if not self.disk.flush(_WRITTEN_WITHIN_S):
            with suppress(OSError):  # TimeoutError is one.
                keep = self.disk.do(partial(_keep_end, self.directory / _END, record))
                keep.result(_WRITTEN_AFTER_ALL_WITHIN_S)

    def close(self) -> None:
        """Forget the run, unless an entry says that something of it is left, or the disk has not
        taken its record: then a reconcile finds it."""
        if self._lock_fd is None:
            return
        if not self.disk.flush(_WRITTEN_WITHIN_S):
            _log.warning("%s stays registered: its record could not be written", self.owner.run_id)
        elif not _entries(self.directory, RegisterEntry) and not _entries(self.directory, JobEntry):
            shutil.rmtree(self.directory, ignore_errors=True)
        os.close(self._lock_fd)
        self._lock_fd = None

    def _owner_text(self) -> str:
        return self.owner.model_dump_json(indent=2) + "\n"


class LostRun:
    """A run of this machine whose owner has gone, claimed by whoever finishes it."""

    def __init__(self, directory: Path, owner: Owner) -> None:
        self._directory = directory
        self.owner = owner
        self.entries = _entries(directory, RegisterEntry)
        self.jobs = _entries(directory, JobEntry)
        #: How it ended, where its record could not be written.
        self.end: RunJson | None = None
        with suppress(OSError, ValueError):
            self.end = RunJson.read(directory / _END)

    @property
    def is_of_this_boot(self) -> bool:
        """Otherwise the machine, or the container, was started anew, and no process is left."""
        return self.owner.process.boot_id == boot_id()

    def seconds_lost(self) -> float:
        """Since somebody first found it lost; noted at the first call."""
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        if self.owner.lost_at_boot_s is None or self.owner.lost_at_boot_s > now:
            self.owner = self.owner.model_copy(update={"lost_at_boot_s": now})
            write_json(self._directory / _OWNER, self.owner.model_dump(mode="json"))
        return now - (self.owner.lost_at_boot_s or now)

    def forget_job(self, component: str) -> None:
        """Its job is final, and nothing of it is left."""
        (self._directory / JobEntry.file_of(component)).unlink(missing_ok=True)
        self.jobs = [entry for entry in self.jobs if entry.component != component]

    def forget(self) -> None:
        """All of it is finished."""
        shutil.rmtree(self._directory, ignore_errors=True)


@contextmanager
def claimed(run_id: str, *, host: str | None = None) -> Iterator[LostRun | None]:
    """A run's registry for whoever finishes it, and nobody else meanwhile.

    Args:
        host: whose run it has to be: None is this machine.

    Returns: None, when the run has an owner, or is being finished, or is none of that host's.
    """
    directory = _live() / run_id
    owner = _read(directory / _OWNER, Owner)
    if owner is None or owner.host != (host or host_name()) or owner.process.is_alive():
        yield None
        return
    lock = _try_lock(directory)
    try:
        # Read again, under the lock: somebody may have finished it meanwhile.
        owner = _read(directory / _OWNER, Owner) if lock is not None else None
        yield LostRun(directory, owner) if owner is not None else None
    finally:
        if lock is not None:
            os.close(lock)


def registered_runs() -> list[str]:
    """Run ids, of living and of lost runs, in order."""
    try:
        return sorted(entry.name for entry in _live().iterdir() if entry.is_dir())
    except OSError:
        return []


def owner_of(run_id: str) -> Owner | None:
    """Who was registered for a run, living or lost; None where nobody can be read."""
    return _read(_live() / run_id / _OWNER, Owner)


def teardown_s(process: int | None = None) -> float:
    """The longest time that the grace periods of a registered run take, in seconds; 0 without runs.

    Components are stopped one after the other, and each may finish a save before, for as long as
    its grace period.

    Args:
        process: only the run of this flow process; None: every run of this MUSTER_HOME.
    """
    longest_s = 0.0
    for run_id in registered_runs():
        owner = owner_of(run_id)
        if owner is None or process not in (None, owner.process.pid):
            continue
        directory = _live() / run_id
        entries = [*_entries(directory, RegisterEntry), *_entries(directory, JobEntry)]
        # A part, as COMPONENT.PART, ends within the grace period of its component.
        graces = [entry.grace_s for entry in entries if "." not in entry.component]
        longest_s = max(longest_s, 2 * sum(graces))
    return longest_s


def _live() -> Path:
    return muster_home() / "live"


_M = TypeVar("_M", bound=_Model)
_E = TypeVar("_E", bound=_Entry)


def _entries(directory: Path, kind: type[_E]) -> list[_E]:
    found = [_read(path, kind) for path in sorted(directory.glob(kind.file_of("*")))]
    return [entry for entry in found if entry is not None]


def _read(path: Path, model: type[_M]) -> _M | None:
    try:
        return model.model_validate_json(read_own_file(path))
    except FileNotFoundError:
        return None
    except (OSError, ValidationError, ValueError) as error:
        _log.warning("%s can't be read, and is passed over: %s", path, error)
        return None


def _keep_end(path: Path, record: RunJson) -> None:
    """Write how a run ended over the room that was set aside, which takes no more of it."""
    attempts: tuple[AttemptRecord, ...] = ()
    if (last := record.attempt) is not None:
        failure = last.failure.with_changes(log_tail="") if last.failure else None
        attempts = (last.with_changes(components={}, failure=failure),)
    end = RunJson(
        state=record.state, message=record.message, ended_at=record.ended_at, attempts=attempts
    )
    text = json.dumps(end.as_json()).encode()
    if len(text) <= _END_BYTES:
        fd = os.open(path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            os.pwrite(fd, text.ljust(_END_BYTES), 0)
        finally:
            os.close(fd)


def _try_lock(directory: Path) -> int | None:
    """The fd of the run's lock; None when another process has it, or has just removed it.

    A lock of the process (POSIX) and not of the open file: a fork does not carry it on.
    """
    try:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        fd = os.open(directory / _LOCK, flags, 0o644)
    except FileNotFoundError:
        return None
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(fd)
        if error.errno in (errno.EACCES, errno.EAGAIN):
            return None
        raise
    if not is_at(fd, directory / _LOCK):
        os.close(fd)
        return None
    return fd


DIRECTORY = Path("/dev/shm")
_IN_MOVED_FROM, _IN_MOVED_TO, _IN_CREATE, _IN_DELETE, _IN_ISDIR = 0x40, 0x80, 0x100, 0x200, 1 << 30
_COMES, _GOES = _IN_CREATE | _IN_MOVED_TO, _IN_DELETE | _IN_MOVED_FROM
_EVENT = struct.Struct("iIII")
#: Many appear at once, when a collective library starts: they are looked up together.
_GATHER_S = 0.05
#: A maker may have closed it again at the first look, and mapped it a moment later.
_MAPPED_WITHIN_S = 0.2
#: CPU that the looks take at most: whoever fills the directory only makes them rarer.
_CORES = 0.02
#: A disk may hang on which the last look is noted.
_LAST_LOOK_WITHIN_S = 5.0
#: What an eventfd is told: to look at once, and never again after that.
_NOW, _LAST = 1, 1 << 32


def _wait(fds: Iterable[int], within_s: float | None) -> bool:
    """Until one can be read; whether one can."""
    poll = select.poll()
    for fd in fds:
        poll.register(fd, select.POLLIN)
    return bool(poll.poll(None if within_s is None else within_s * 1000))


class SharedMemoryWatch:
    """Notes the segments that one of `own_pids` has made, for as long as they are there, from now
    until `close`. Does nothing where the directory can't be watched."""

    def __init__(
        self,
        own_pids: Callable[[], set[int]],
        note: Callable[[set[Path], set[Path]], None],
        directory: Path = DIRECTORY,
    ) -> None:
        """
        Args:
            own_pids: called in a thread, once a look.
            note: told there of segments that were made, and of whatever is gone.
        """
        self._own_pids = own_pids
        self._note = note
        self._directory = directory
        #: `appeared[path]`: when; those that nobody is known to have made.
        self._appeared: dict[Path, float] = {}
        self._fd = _watch(directory)
        self._wake = os.eventfd(0)
        self._thread = threading.Thread(target=self._follow, name="shared-memory", daemon=True)
        if self._fd >= 0:
            self._thread.start()

    def hurry(self, *, is_last: bool = False) -> None:
        """Look at once: whoever has made something may be about to end. Returns at once."""
        os.eventfd_write(self._wake, _LAST if is_last else _NOW)

    def close(self) -> None:
        """Look a last time, and watch no more. Blocks."""
        self.hurry(is_last=True)
        if self._thread.is_alive():
            self._thread.join(_LAST_LOOK_WITHIN_S)
        if self._thread.is_alive():
            _log.warning("the last look at %s takes too long: not waited for", self._directory)
            return
        os.close(self._wake)
        if self._fd >= 0:
            os.close(self._fd)

    def _follow(self) -> None:
        """Look whenever there is a reason to, until `close`."""
        next_at = 0.0
        is_closing = False
        while not is_closing:
            if not self._appeared:
                _wait((self._fd, self._wake), None)
            pause_s = max(_GATHER_S, next_at - time.monotonic())
            if _wait((self._wake,), pause_s):
                is_closing = os.eventfd_read(self._wake) >= _LAST
            began_s = time.thread_time()
            self._look()
            next_at = time.monotonic() + (time.thread_time() - began_s) / _CORES

    def _look(self) -> None:
        now = time.monotonic()
        gone = self._read_news(now)
        wanted = {path for path in self._appeared if _is_ours(path)}
        made: set[Path] = set()
        try:
            if wanted:
                made = held_by(self._own_pids(), wanted)
        except OSError as error:  # No more files can be opened, for example.
            _log.warning(
                "who has made %s is not known: %s", ", ".join(map(str, sorted(wanted))), error
            )
        self._appeared = {
            path: at
            for path, at in self._appeared.items()
            if path in wanted - made and now - at < _MAPPED_WITHIN_S
        }
        if made or gone:
            self._note(made, gone)

    def _read_news(self, now: float) -> set[Path]:
        """What has come is in `_appeared` afterwards; what has gone is returned."""
        gone: set[Path] = set()
        with suppress(BlockingIOError):
            while True:
                data = memoryview(os.read(self._fd, 1 << 16))
                while data:
                    _, mask, _, length = _EVENT.unpack_from(data)
                    name = bytes(data[_EVENT.size : _EVENT.size + length]).rstrip(b"\0")
                    data = data[_EVENT.size + length :]
                    path = self._directory / os.fsdecode(name)
                    if mask & _GOES:
                        gone.add(path)
                        self._appeared.pop(path, None)
                    elif mask & _COMES and not mask & _IN_ISDIR:
                        self._appeared[path] = now
        return gone


def held_by(pids: Iterable[int], wanted: set[Path]) -> set[Path]:
    """Which of the files a process among `pids` has open or mapped.

    Raises: OSError, where this process itself cannot look, such as EMFILE.
    """
    found: set[Path] = set()
    names = {str(path): path for path in wanted}
    # As a mapping's path begins in /proc/PID/maps.
    folders = {b" " + os.fsencode(path.parent) + b"/" for path in wanted}
    for pid in pids:
        if len(found) == len(wanted):
            break
        found |= {names[target] for target in tree.open_files(pid).values() if target in names}
        with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            # A process of thousands of mappings is common: no loop of ours goes over them all.
            maps = Path(f"/proc/{pid}/maps").read_bytes()
            for folder in folders:
                for rest in maps.split(folder)[1:]:
                    target = os.fsdecode(folder[1:] + rest.partition(b"\n")[0])
                    if target in names:
                        found.add(names[target])
    return found


def _is_ours(path: Path) -> bool:
    """It is there, and this user's: no other is ever removed."""
    with suppress(OSError):
        return path.lstat().st_uid == os.getuid()
    return False


def remove_unused(paths: Iterable[Path]) -> list[Path]:
    """Remove those of our own segments that no living process has open or mapped.

    Returns: those removed; none while it is unknown who has them open.
    """
    candidates = {path for path in paths if _is_ours(path)}
    removed: list[Path] = []
    try:
        unused = candidates - held_by(tree.all_pids(), candidates)
    except OSError as error:
        _log.warning("shared memory is not removed, its users are unknown: %s", error)
        return removed
    for path in sorted(unused):
        with suppress(OSError):
            path.unlink()
            removed.append(path)
    return removed


def _watch(directory: Path) -> int:
    """An inotify fd; -1 where none is to be had."""
    libc = ctypes.CDLL(None, use_errno=True)
    fd: int = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    if fd < 0:
        return -1
    if libc.inotify_add_watch(fd, os.fsencode(directory), _COMES | _GOES) < 0:
        os.close(fd)
        return -1
    return fd


#: A guardian that has lost its supervisor needs no longer than its grace period and this.
_GUARDIAN_MARGIN_S = 10.0
#: How directories of ours are called; nothing else is removed, whatever a registry says.
_PREFIX = "muster-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Remains:
    """What finishing a lost run came to."""

    #: Pids that were ended.
    killed: tuple[int, ...]
    #: `left[component] -> pids` that outlived SIGKILL.
    left: Mapping[str, tuple[int, ...]]
    #: `waiting[component] -> pid` of a guardian that is still within the grace period.
    waiting: Mapping[str, int]
    #: Files, directories and cgroups.
    removed: tuple[Path, ...]

    @property
    def is_clean(self) -> bool:
        """Nothing is left, and nobody waited for."""
        return not self.left and not self.waiting


def finish(lost: LostRun) -> Remains:
    """End what a lost run has left, and remove what must not outlive it; any number of times.

    A guardian that lives takes its component down by itself, with the grace period that it is due:
    it is left to do so, until it has had the time. No process is touched that is not of the run:
    each is told by its mark, or by its cgroup.
    """
    killed: set[int] = set()
    left: dict[str, tuple[int, ...]] = {}
    waiting: dict[str, int] = {}
    removed: list[Path] = []
    for entry in reversed(lost.entries) if lost.is_of_this_boot else ():
        if entry.guardian.is_alive() and lost.seconds_lost() <= entry.grace_s + _GUARDIAN_MARGIN_S:
            waiting[entry.component] = entry.guardian.pid
            continue
        ended, remaining = end_all(partial(_end_once, entry), KILLED_WITHIN_S)
        killed |= {pid for pid, _ in ended}
        if remaining:
            left[entry.component] = tuple(sorted(pid for pid, _ in remaining))
        elif entry.cgroup and entry.cgroup.exists() and cgroup.remove(str(entry.cgroup)):
            removed.append(entry.cgroup)
    if not left and not waiting:
        segments = [path for path in lost.owner.leftovers if path.parent == DIRECTORY]
        removed += remove_unused(segments)
        removed += [path for path in lost.owner.leftovers if _remove_directory(path)]
    return Remains(killed=tuple(sorted(killed)), left=left, waiting=waiting, removed=tuple(removed))


def _end_once(entry: RegisterEntry) -> set[Known]:
    """One round of SIGKILL against all of a component; the processes that were there."""
    found = end_marked(entry.mark)
    if entry.cgroup is not None and not cgroup.is_empty(str(entry.cgroup)):
        with suppress(OSError):
            inside = cgroup.pids(str(entry.cgroup))
            found |= {(pid, tree.start_ticks(pid)) for pid in inside}
            cgroup.kill(str(entry.cgroup))
    return found


def _remove_directory(path: Path) -> bool:
    """Whether it was there, was ours, and is gone now."""
    with suppress(OSError):
        if path.name.startswith(_PREFIX) and _is_ours(path):
            shutil.rmtree(path, ignore_errors=True)
            return not path.exists()
    return False
