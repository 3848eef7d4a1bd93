"""The registry on disk of the runs of this machine: `$MUSTER_HOME/live/<run id>/`.

Each active run has a directory here. It contains `owner.json`, which describes the flow process,
and one file for each component. A component's file is written before its program is executed. The
directory is removed when the run has ended. A directory without a living owner belongs to a run
that was killed; `finish` ends the leftovers of that run.

A lock file shows whether the owner lives. The kernel releases the lock when the process ends.
Unlike a pid, the lock can be checked from every PID namespace.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
import shutil
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from tasks.processes import cgroup, reserved_space, shared_memory, tree
from tasks.processes.ending import KILLED_WITHIN_S, Known, end_all, end_marked
from tasks.processes.identity import ProcessId, boot_id, host_name
from tasks.record.disk import DiskThread, replace_file, write_json
from tasks.record.places import is_at, keep_private, muster_home, read_own_file
from tasks.record.run_json import RunJson

_log = logging.getLogger(__name__)

_OWNER = "owner.json"
_LOCK = "lock"
#: Seconds to wait for the disk. If a write takes longer, the run stays registered for `reconcile`.
_WRITTEN_WITHIN_S = 5.0
_WRITTEN_AFTER_ALL_WITHIN_S = 0.5
#: Seconds to wait for another process that is finishing the same run.
_CLAIM_WITHIN_S = 60.0
_LOOK_EVERY_S = 0.1


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True, extra="ignore")


class Owner(_Model):
    """The process that supervises a run."""

    run_id: str
    host: str
    process: ProcessId
    #: Id of the flow run; None for an owner without one, such as a temporary Prefect server.
    flow_run_id: str | None = None
    #: URL of the Prefect server that keeps the flow run; None if that server ends with the run.
    api_url: str | None = None
    #: Name of the worker that started the flow run; None if no worker did.
    worker: str | None = None
    #: Directory of the run; None if the run has no directory.
    directory: Path | None = None
    #: True if the run's Ray jobs may continue without this process until the run is resumed.
    adopts: bool = False
    #: Files and directories that must be removed with the run.
    leftovers: tuple[Path, ...] = ()
    #: Time at which the owner was first found dead, in CLOCK_BOOTTIME seconds; None if it is not
    #: known to be dead.
    lost_at_boot_s: float | None = None


class _Entry(_Model):
    """One component of a run, kept in a separate file."""

    kind: ClassVar[str]

    run_id: str
    #: Number of the attempt, from 1.
    attempt: int
    component: str
    #: Seconds from the component's stop signal to SIGKILL.
    grace_s: float

    @classmethod
    def file_of(cls, component: str) -> str:
        return f"{cls.kind}-{component}.json"


class RegisterEntry(_Entry):
    """A component that runs on this machine, or that is about to be started.

    A component may guard processes itself. Such a process is entered as `COMPONENT.PART`.
    """

    kind = "component"

    #: Mark of the guardian and its descendants, see `tree.mark_own`.
    mark: int
    guardian: ProcessId
    #: First process of the component. It does not execute its program before this entry is written.
    process: ProcessId
    #: The component's cgroup v2 directory, or None.
    cgroup: Path | None = None


class JobEntry(_Entry):
    """A component that runs as a job on a Ray cluster, or that is about to be submitted.

    The data for queries about the job are in `submission.json` in the attempt's directory.
    """

    kind = "job"

    submission_id: str
    #: Log file in the attempt's directory.
    log: Path


class RunHeld(OSError):
    """Another living process of this machine supervises the run."""


def enter(directory: Path, entry: RegisterEntry | JobEntry) -> None:
    """Write the entry of a component to the run's directory, before the component is started.

    Raises:
        OSError: The entry was not written. The component must not be started.
    """
    write_json(directory / entry.file_of(entry.component), entry.model_dump(mode="json"))


def leave(directory: Path, component: str) -> None:
    """Remove the entries of a component whose processes have all ended."""
    (directory / RegisterEntry.file_of(component)).unlink(missing_ok=True)
    # The process that entered the parts may have been killed. Its parts were its descendants, so
    # they have ended, too.
    for part in directory.glob(RegisterEntry.file_of(f"{component}.*")):
        part.unlink(missing_ok=True)
    (directory / JobEntry.file_of(component)).unlink(missing_ok=True)


class RunRegister:
    """The registry of one run, held open by the process that supervises the run.

    `close` removes the run from the registry.
    """

    def __init__(self, owner: Owner) -> None:
        """Register a run, after waiting for a process that is finishing an earlier owner of the
        run.

        Raises:
            RunHeld: Another living process supervises the run.
            FileExistsError: The directory belongs to another flow run.
            OSError: The registry cannot be written.
        """
        #: Directory of the run in the registry. `close` removes it.
        self.directory = _live() / owner.run_id
        self.owner = owner
        #: Thread that writes the files of the run.
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
        with suppress(OSError):
            reserved_space.reserve(self.directory)

    @staticmethod
    def opened(run_id: str, **about: object) -> RunRegister:
        """Register this process as the owner of a run.

        Args:
            run_id: The run.
            about: Further fields of `Owner`.
        """
        keep_private()
        me = ProcessId.of(os.getpid())
        owner = Owner.model_validate(
            {"run_id": run_id, "host": host_name(), "process": me, **about}
        )
        return RunRegister(owner)

    def note_leftovers(self, made: set[Path], gone: set[Path]) -> None:
        """Update the list of files that must be removed with the run.

        Args:
            made: Files that the run has made.
            gone: Files that no longer exist. They leave the list, because another user may reuse a
                name.
        """
        kept = [path for path in self.owner.leftovers if path not in gone]
        leftovers = (*kept, *sorted(made.difference(kept)))
        if leftovers != self.owner.leftovers:
            self.owner = self.owner.model_copy(update={"leftovers": leftovers})
            self.disk.replace(self.directory / _OWNER, self._owner_text)

    async def enter(self, entry: RegisterEntry | JobEntry) -> None:
        """Write the entry of a component before it is started.

        Raises:
            OSError: The entry was not written. The component must not be started.
        """
        await asyncio.wrap_future(self.disk.do(partial(enter, self.directory, entry)))

    def leave(self, component: str) -> None:
        """Remove the entries of a component whose processes have all ended. Returns at once."""
        self.disk.do(partial(leave, self.directory, component))

    def settle(self, record: RunJson) -> None:
        """Wait until the final record of the run is on disk.

        If the disk does not accept the record in time, a short form of it is written to the
        reserved disk space. A later `reconcile` then writes the record.
        """
        if not self.disk.flush(_WRITTEN_WITHIN_S):
            with suppress(OSError):  # TimeoutError is one.
                write = partial(reserved_space.write_final_record, self.directory, record)
                self.disk.do(write).result(_WRITTEN_AFTER_ALL_WITHIN_S)

    def close(self) -> None:
        """Remove the run from the registry and release its lock.

        The run stays registered if an entry remains or if its record could not be written. A later
        `reconcile` then finds the run.
        """
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
    """A run of this machine whose owner has died, claimed by the process that finishes the run."""

    def __init__(self, directory: Path, owner: Owner) -> None:
        self._directory = directory
        self.owner = owner
        self.entries = _entries(directory, RegisterEntry)
        self.jobs = _entries(directory, JobEntry)
        #: Final state of the run from the reserved disk space; None if nothing was written there.
        self.end = reserved_space.read_final_record(directory)

    @property
    def is_of_this_boot(self) -> bool:
        """True if the run belongs to this boot of the machine or container.

        Otherwise none of its processes can still run.
        """
        return self.owner.process.boot_id == boot_id()

    def seconds_lost(self) -> float:
        """Return the seconds since the owner was first found dead. The first call records that
        time.
        """
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        if self.owner.lost_at_boot_s is None or self.owner.lost_at_boot_s > now:
            self.owner = self.owner.model_copy(update={"lost_at_boot_s": now})
            write_json(self._directory / _OWNER, self.owner.model_dump(mode="json"))
        return now - (self.owner.lost_at_boot_s or now)

    def forget_job(self, component: str) -> None:
        """Remove the entry of a component whose job has ended without leftovers."""
        (self._directory / JobEntry.file_of(component)).unlink(missing_ok=True)
        self.jobs = [entry for entry in self.jobs if entry.component != component]

    def forget(self) -> None:
        """Remove the run from the registry."""
        shutil.rmtree(self._directory, ignore_errors=True)


@contextmanager
def claimed(run_id: str, *, host: str | None = None) -> Iterator[LostRun | None]:
    """Claim a run whose owner has died, so that no other process finishes it at the same time.

    Args:
        run_id: The run.
        host: Required host of the run. None: this machine.

    Yields:
        The run; None if its owner lives, another process is finishing it, or it belongs to another
        host.
    """
    directory = _live() / run_id
    owner = _read(directory / _OWNER, Owner)
    if owner is None or owner.host != (host or host_name()) or owner.process.is_alive():
        yield None
        return
    lock = _try_lock(directory)
    try:
        # Read again under the lock, because another process may have finished the run since.
        owner = _read(directory / _OWNER, Owner) if lock is not None else None
        yield LostRun(directory, owner) if owner is not None else None
    finally:
        if lock is not None:
            os.close(lock)


def registered_runs() -> list[str]:
    """Return the ids of all registered runs, both living and lost, in alphabetical order."""
    try:
        return sorted(entry.name for entry in _live().iterdir() if entry.is_dir())
    except OSError:
        return []


def owner_of(run_id: str) -> Owner | None:
    """Return the registered owner of a run, alive or dead; None if there is no readable entry."""
    return _read(_live() / run_id / _OWNER, Owner)


def teardown_s(process: int | None = None) -> float:
    """Return the longest time in seconds that the teardown of a registered run can take; 0 without
    runs.

    Components are stopped one after the other. Each may finish a save before it is stopped, which
    can take another grace period.

    Args:
        process: Pid of a flow process, to count only its run. None: count every run of this
            MUSTER_HOME.
    """
    longest_s = 0.0
    for run_id in registered_runs():
        owner = owner_of(run_id)
        if owner is None or process not in (None, owner.process.pid):
            continue
        directory = _live() / run_id
        entries = [*_entries(directory, RegisterEntry), *_entries(directory, JobEntry)]
        # A part (`COMPONENT.PART`) ends within the grace period of its component.
        graces = [entry.grace_s for entry in entries if "." not in entry.component]
        longest_s = max(longest_s, 2 * sum(graces))
    return longest_s


def _live() -> Path:
    return muster_home() / "live"


_M = TypeVar("_M", bound=_Model)
_E = TypeVar("_E", bound=_Entry)


def _entries(directory: Path, kind: type[_E]) -> list[_E]:
    entries = [_read(path, kind) for path in sorted(directory.glob(kind.file_of("*")))]
    return [entry for entry in entries if entry is not None]


def _read(path: Path, model: type[_M]) -> _M | None:
    try:
        return model.model_validate_json(read_own_file(path))
    except FileNotFoundError:
        return None
    except (OSError, ValidationError, ValueError) as error:
        _log.warning("%s can't be read, and is passed over: %s", path, error)
        return None


def _try_lock(directory: Path) -> int | None:
    """Lock the run's directory and return the file descriptor of the lock.

    This is a POSIX lock, which belongs to the process and not to the open file, so a forked child
    does not inherit it.

    Returns:
        None if another process holds the lock or has just removed it.
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


#: Seconds that a guardian without a supervisor may need in addition to its grace period.
_GUARDIAN_MARGIN_S = 10.0
#: Prefix of the directories that Muster makes. Directories without it are never removed.
_PREFIX = "muster-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Remains:
    """Result of finishing a lost run."""

    #: Pids that were killed.
    killed: tuple[int, ...]
    #: Pids of each component that survived SIGKILL.
    left: Mapping[str, tuple[int, ...]]
    #: Pid of each component's guardian that is still within the grace period.
    waiting: Mapping[str, int]
    #: Removed files, directories and cgroups.
    removed: tuple[Path, ...]

    @property
    def is_clean(self) -> bool:
        """True if no process remains and no guardian is still working."""
        return not self.left and not self.waiting


def finish(lost: LostRun) -> Remains:
    """End the leftovers of a lost run, and remove its files. It may be called any number of times.

    A living guardian ends its component itself within the grace period. It is killed only if it has
    not done so in time. Only processes with the run's mark or in its cgroup are touched.
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
        segments = [path for path in lost.owner.leftovers if path.parent == shared_memory.DIRECTORY]
        removed += shared_memory.remove_unused(segments)
        removed += [path for path in lost.owner.leftovers if _remove_directory(path)]
    return Remains(killed=tuple(sorted(killed)), left=left, waiting=waiting, removed=tuple(removed))


def _end_once(entry: RegisterEntry) -> set[Known]:
    """Send SIGKILL once to all processes of a component, and return those that were alive."""
    living = end_marked(entry.mark)
    if entry.cgroup is not None and not cgroup.is_empty(str(entry.cgroup)):
        with suppress(OSError):
            inside = cgroup.pids(str(entry.cgroup))
            living |= {(pid, tree.start_ticks(pid)) for pid in inside}
            cgroup.kill(str(entry.cgroup))
    return living


def _remove_directory(path: Path) -> bool:
    """Remove a directory that Muster made. Return True if it existed and no longer exists."""
    with suppress(OSError):
        if path.name.startswith(_PREFIX) and shared_memory.is_own_file(path):
            shutil.rmtree(path, ignore_errors=True)
            return not path.exists()
    return False
