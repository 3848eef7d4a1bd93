"""The registry on disk of the active runs of this machine: `$MUSTER_HOME/live/<run id>/`.

Each active run has a directory in the registry. The directory contains `owner.json`, which
describes the flow process of the run (its owner), and one file for each component. A component's
file is written before its program is executed. The directory is removed when the run has ended. If
the owner has died, the run was killed, and `finish` ends its leftover processes.

The owner holds the lock on a file in the directory. The kernel releases the lock when the owner
ends. Unlike a pid, the lock shows from every PID namespace whether the owner lives.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
import shutil
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

from tasks.processes import cgroup, reserved_space, shared_memory, tree
from tasks.processes.ending import KILLED_WITHIN_S, PidAndStart, end_all, end_marked
from tasks.processes.identity import ProcessId, boot_id, host_name
from tasks.record.disk import DiskThread, replace_file, write_json
from tasks.record.places import is_at, keep_private, muster_home, read_own_file
from tasks.record.run_json import RunJson

_log = logging.getLogger(__name__)

#: Name of the file that describes the owner of a run, the process that supervises it.
_OWNER = "owner.json"
#: Name of the file whose lock the owner of a run, the process that supervises it, holds.
_LOCK = "lock"
#: Seconds to wait until the last files of a run are on the disk. If the disk takes longer, the run
#: stays registered, and a later `muster reconcile` completes its record.
_WRITTEN_WITHIN_S = 5.0
#: Seconds to wait until the short form of a run's final record is written into reserved disk space.
_WRITTEN_AFTER_ALL_WITHIN_S = 0.5
#: Seconds to wait until the last files of a run are on the disk, after reserved space was freed.
_WRITTEN_INTO_ROOM_WITHIN_S = 2.0
#: Seconds to wait for another process that is ending the leftover processes of the same run.
_CLAIM_WITHIN_S = 60.0
#: Seconds between two attempts to lock the run's directory.
_LOOK_EVERY_S = 0.1


class _Model(BaseModel):
    """Base of the registry's JSON files. Unknown keys are ignored."""

    model_config = ConfigDict(frozen=True, extra="ignore")


class Owner(_Model):
    """The process that supervises a run, as `owner.json` describes it."""

    run_id: str
    #: Name of the machine on which the process runs.
    host: str
    #: Identity of the process that supervises the run.
    process: ProcessId
    #: Id of the run's flow run. None if the registered processes belong to no flow run, for example
    #: those of a temporary Prefect server.
    flow_run_id: str | None = None
    #: URL of the Prefect server that stores the flow run. None if it is a temporary server, which
    #: ends with the run.
    api_url: str | None = None
    #: Name of the Prefect worker that started the flow run. None if no worker started it.
    worker: str | None = None
    #: Directory of the run; None if the run has no directory.
    directory: Path | None = None
    #: True if the run's Ray jobs may continue after the death of the process, until another process
    #: resumes the run.
    adopts: bool = False
    #: Files and directories that must be removed when the run has ended.
    leftovers: tuple[Path, ...] = ()
    #: Time at which the supervising process was first found dead, in CLOCK_BOOTTIME seconds. None
    #: if it was never found dead.
    lost_at_boot_s: float | None = None


class _Entry(_Model):
    """One component of a run. Each entry is a separate file in the run's registry directory."""

    #: First part of the name of the entry's file: `component` or `job`.
    kind: ClassVar[str]

    run_id: str
    #: Number of the attempt at the run, from 1.
    attempt: int
    component: str
    #: Seconds from the component's stop signal to SIGKILL.
    grace_s: float
    #: Longest time in seconds for which a checkpoint that the component writes delays its end. An
    #: earlier version of Muster wrote no such value; the time was then `grace_s`.
    save_grace_s: float | None = None

    @classmethod
    def file_of(cls, component: str) -> str:
        """Return the file name of a component's entry in the run's registry directory."""
        return f"{cls.kind}-{component}.json"


class ProcessEntry(_Entry):
    """Registry entry of a component that runs on this machine or is about to be started here.

    A component may start further guardian processes itself, for example for the servers of a
    rollout. Each of these guardians has its own entry with the name `COMPONENT.PART`.
    """

    kind = "component"

    #: Number that identifies the guardian process and its descendants, see `tree.mark_own`.
    mark: int
    #: Identity of the guardian, the process that owns the component's process tree.
    guardian: ProcessId
    #: Identity of the component's first process. The process executes its program only after this
    #: entry was written.
    process: ProcessId
    #: Directory of the component's cgroup v2; None if the component has no cgroup.
    cgroup: Path | None = None


class JobEntry(_Entry):
    """Registry entry of a component that runs as a Ray job, or whose Ray job will be submitted now.

    The address of the cluster and other facts about the job are in `submission.json` in the
    directory of the attempt.
    """

    kind = "job"

    #: Submission id of the Ray job that runs the component.
    submission_id: str
    #: The component's log file in the directory of the attempt.
    log: Path


class RunHeld(OSError):
    """Another living process of this machine supervises the run."""


def enter(directory: Path, entry: ProcessEntry | JobEntry) -> None:
    """Write the registry entry of a component. Call this before the component is started.

    Args:
        directory: Directory of the run in the registry.
        entry: The entry.

    Raises:
        OSError: The entry was not written. The component must not be started.
    """
    write_json(directory / entry.file_of(entry.component), entry.model_dump(mode="json"))


def leave(directory: Path, component: str) -> None:
    """Remove the registry entries of a component whose processes have all ended.

    Args:
        directory: Directory of the run in the registry.
        component: Name of the component.
    """
    (directory / ProcessEntry.file_of(component)).unlink(missing_ok=True)
    # Also remove entries of the component's parts. If the component was killed, it could not remove
    # these entries itself. All parts are descendants of the component, so they have ended, too.
    for part in directory.glob(ProcessEntry.file_of(f"{component}.*")):
        part.unlink(missing_ok=True)
    (directory / JobEntry.file_of(component)).unlink(missing_ok=True)


class EntryWriter:
    """Writes and removes the registry entries of one run, in the thread that writes its files."""

    def __init__(self, directory: Path, disk: DiskThread) -> None:
        """
        Args:
            directory: Directory of the run in the registry.
            disk: Thread that writes the files of the run.
        """
        self.directory = directory
        self.disk = disk

    async def enter(self, entry: ProcessEntry | JobEntry) -> None:
        """Write the registry entry of a component. Await this before the component is started.

        Raises:
            OSError: The entry was not written. The component must not be started.
        """
        await asyncio.wrap_future(self.disk.do(partial(enter, self.directory, entry)))

    def leave(self, component: str) -> None:
        """Remove the registry entries of a component whose processes have all ended.

        Returns at once. Another thread removes the files.
        """
        self.disk.do(partial(leave, self.directory, component))


class RunRegister(EntryWriter):
    """The registry directory of one run, locked by the process that supervises the run.

    `close` removes the directory.
    """

    def __init__(self, owner: Owner) -> None:
        """Register a run, and lock its registry directory.

        An earlier owner of the run may have died. If another process is ending the leftover
        processes of that owner, wait until it has done so.

        Args:
            owner: Description of the calling process and of the run.

        Raises:
            RunHeld: Another living process supervises the run.
            FileExistsError: The run is registered with the id of another flow run.
            OSError: The registry cannot be written.
        """
        disk = DiskThread(f"disk of {owner.run_id}")
        super().__init__(_registry_directory() / owner.run_id, disk)
        self.owner = owner
        self._lock_fd: int | None = None
        deadline = time.monotonic() + _CLAIM_WITHIN_S
        while self._lock_fd is None:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._lock_fd = _try_lock(self.directory)
            if self._lock_fd is None:
                other = _read_model(self.directory / _OWNER, Owner)
                if other and other.flow_run_id != owner.flow_run_id:
                    why = f"{self.directory} belongs to flow run {other.flow_run_id}"
                    raise FileExistsError(errno.EEXIST, f"{why}, not to {owner.flow_run_id}")
                if (other and other.process.is_alive()) or time.monotonic() > deadline:
                    who = f"another process of this machine runs {owner.run_id}"
                    raise RunHeld(errno.EBUSY, who)
                time.sleep(_LOOK_EVERY_S)
        try:
            replace_file(self.directory / _OWNER, self._owner_text())
            self._reserve_space()
        except OSError:
            # Nothing of the run was started yet, so leave nothing for `muster reconcile`.
            shutil.rmtree(self.directory, ignore_errors=True)
            os.close(self._lock_fd)
            self._lock_fd = None
            raise

    def _reserve_space(self) -> None:
        """Reserve disk space for the final record of the run.

        Raises:
            OSError: The disk has not enough free space.
        """
        try:
            reserved_space.reserve(self.directory)
        except OSError as error:
            # Not every file system can reserve space. The run does not depend on that.
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise

    @staticmethod
    def opened(run_id: str, **about: object) -> RunRegister:
        """Register a run with this process as its owner.

        Args:
            run_id: The run.
            about: Further fields of `Owner`.

        Raises:
            OSError: See `RunRegister`.
        """
        keep_private()
        me = ProcessId.of(os.getpid())
        owner = Owner.model_validate(
            {"run_id": run_id, "host": host_name(), "process": me, **about}
        )
        return RunRegister(owner)

    def note_leftovers(self, made: set[Path], removed: set[Path]) -> None:
        """Update the list of files that must be removed when the run has ended.

        Args:
            made: Files that processes of the run have made.
            removed: Files that were removed. They are taken from the list, because another user may
                create a file with the same name.
        """
        kept = [path for path in self.owner.leftovers if path not in removed]
        leftovers = (*kept, *sorted(made.difference(kept)))
        if leftovers != self.owner.leftovers:
            self.owner = self.owner.model_copy(update={"leftovers": leftovers})
            self.disk.replace(self.directory / _OWNER, self._owner_text)

    def settle(self, record: RunJson) -> None:
        """Wait until the final record of the run is on disk.

        If the disk does not accept the record in time, free the disk space that is reserved for the
        record. If the record is larger than that space, write a short form of the record into the
        other part of the reserved space. A later `muster reconcile` then writes `run.json` from it.

        Args:
            record: The final record.
        """
        if self.disk.flush(_WRITTEN_WITHIN_S):
            return
        with suppress(OSError):  # includes TimeoutError
            make_room = partial(reserved_space.make_room, self.directory)
            self.disk.do(make_room).result(_WRITTEN_AFTER_ALL_WITHIN_S)
        if not self.disk.flush(_WRITTEN_INTO_ROOM_WITHIN_S):
            with suppress(OSError):  # includes TimeoutError
                write = partial(reserved_space.write_final_record, self.directory, record)
                self.disk.do(write).result(_WRITTEN_AFTER_ALL_WITHIN_S)

    def close(self) -> None:
        """Remove the run from the registry, and release the lock on its directory.

        The run stays registered if a component still has an entry or if the record of the run could
        not be written. A later `muster reconcile` then ends the remaining processes of the run and
        writes its record.
        """
        if self._lock_fd is None:
            return
        if not self.disk.flush(_WRITTEN_WITHIN_S):
            _log.warning(
                "%s stays registered, because its record could not be written. "
                "A later `muster reconcile` writes it.",
                self.owner.run_id,
            )
        elif not _read_entries(self.directory, ProcessEntry) and not _read_entries(
            self.directory, JobEntry
        ):
            shutil.rmtree(self.directory, ignore_errors=True)
        os.close(self._lock_fd)
        self._lock_fd = None

    def _owner_text(self) -> str:
        return self.owner.model_dump_json(indent=2) + "\n"


class LostRun:
    """A registered run whose owner, the process that supervised it, has died.

    The calling process holds the lock on the run's directory. Use `claim_lost_run` to create this
    object.
    """

    def __init__(self, directory: Path, owner: Owner) -> None:
        self._directory = directory
        self.owner = owner
        self.entries = _read_entries(directory, ProcessEntry)
        self.jobs = _read_entries(directory, JobEntry)
        #: Final state of the run from the reserved disk space; None if nothing was written there.
        self.end = reserved_space.read_final_record(directory)

    @property
    def is_of_this_boot(self) -> bool:
        """True if the owner of the run was started in this boot of the machine or container.

        If it is False, no process of the run can exist any more.
        """
        return self.owner.process.boot_id == boot_id()

    def seconds_lost(self) -> float:
        """Return the seconds since the run's owner, its supervising process, was first found dead.

        The first call writes the current time into `owner.json` and returns 0.
        """
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        if self.owner.lost_at_boot_s is None or self.owner.lost_at_boot_s > now:
            self.owner = self.owner.model_copy(update={"lost_at_boot_s": now})
            write_json(self._directory / _OWNER, self.owner.model_dump(mode="json"))
        return now - (self.owner.lost_at_boot_s or now)

    def forget_job(self, component: str) -> None:
        """Remove the registry entry of a Ray job that has ended without leftover processes.

        Args:
            component: Name of the component that ran as this job.
        """
        (self._directory / JobEntry.file_of(component)).unlink(missing_ok=True)
        self.jobs = [entry for entry in self.jobs if entry.component != component]

    def forget(self) -> None:
        """Remove the run from the registry."""
        shutil.rmtree(self._directory, ignore_errors=True)


@contextmanager
def claim_lost_run(run_id: str, *, host: str | None = None) -> Iterator[LostRun | None]:
    """Lock a run whose owner, the process that supervised it, has died.

    No other process can then end the leftover processes of the run at the same time.

    Args:
        run_id: The run.
        host: Name of the machine on which the owner ran. None if it is this machine.

    Yields:
        The run. None if its owner lives, if another process has locked the run, if the run is not
        registered, or if it belongs to another machine.
    """
    directory = _registry_directory() / run_id
    owner = _read_model(directory / _OWNER, Owner)
    if owner is None or owner.host != (host or host_name()) or owner.process.is_alive():
        yield None
        return
    lock = _try_lock(directory)
    try:
        # Read the owner again while the directory is locked. Another process may have removed the
        # run since the first read.
        owner = _read_model(directory / _OWNER, Owner) if lock is not None else None
        yield LostRun(directory, owner) if owner is not None else None
    finally:
        if lock is not None:
            os.close(lock)


def registered_runs() -> list[str]:
    """Return the ids of all runs in the registry, in alphabetical order.

    Runs whose supervising process has died are included.
    """
    try:
        return sorted(entry.name for entry in _registry_directory().iterdir() if entry.is_dir())
    except OSError:
        return []


def read_owner(run_id: str) -> Owner | None:
    """Return the registered owner of a run: the process that supervises it. It may have ended.

    Returns:
        None if the run is not registered or its `owner.json` cannot be read.
    """
    return _read_model(_registry_directory() / run_id / _OWNER, Owner)


def find_run_ids() -> dict[str, str]:
    """Return the run id of each registered run that has a flow run, by the id of the flow run."""
    owners = filter(None, map(read_owner, registered_runs()))
    return {owner.flow_run_id: owner.run_id for owner in owners if owner.flow_run_id}


def find_living_owner(run_id: str) -> Owner | None:
    """Return the process that supervises a run on this machine now, or None if there is none."""
    owner = read_owner(run_id)
    if owner is None or owner.host != host_name() or not owner.process.is_alive():
        return None
    return owner


def send_to_owner(owner: Owner, signum: signal.Signals) -> bool:
    """Send a signal to the process that supervises a run.

    Args:
        owner: Result of `find_living_owner`.
        signum: The signal. SIGTERM ends the run with all grace periods.

    Returns:
        False if the process has ended.

    Raises:
        PermissionError: The process belongs to another user.
    """
    try:
        os.kill(owner.process.pid, signum)
    except ProcessLookupError:
        return False
    return True


def teardown_s(process: int | None = None) -> float:
    """Return the longest time that the teardown of a registered run can take, in seconds.

    The components of a run are stopped one after the other. Each may first finish a checkpoint.

    Args:
        process: Pid of a flow process, to consider only its run. If None, every run of this
            MUSTER_HOME is considered.

    Returns:
        0 if no such run is registered.
    """
    longest_s = 0.0
    for run_id in registered_runs():
        owner = read_owner(run_id)
        if owner is None or process not in (None, owner.process.pid):
            continue
        directory = _registry_directory() / run_id
        entries = [*_read_entries(directory, ProcessEntry), *_read_entries(directory, JobEntry)]
        # Do not add the grace periods of parts (`COMPONENT.PART`). A part ends together with its
        # component.
        graces = [
            entry.grace_s + (entry.grace_s if entry.save_grace_s is None else entry.save_grace_s)
            for entry in entries
            if "." not in entry.component
        ]
        longest_s = max(longest_s, sum(graces))
    return longest_s


def _registry_directory() -> Path:
    """Return the directory in MUSTER_HOME with the registered runs, one subdirectory per run."""
    return muster_home() / "live"


_M = TypeVar("_M", bound=_Model)
_E = TypeVar("_E", bound=_Entry)


def _read_entries(directory: Path, kind: type[_E]) -> list[_E]:
    """Return all readable entries of a type from a run's registry directory."""
    entries = [_read_model(path, kind) for path in sorted(directory.glob(kind.file_of("*")))]
    return [entry for entry in entries if entry is not None]


def _read_model(path: Path, model: type[_M]) -> _M | None:
    """Return the content of a registry file; None if the file is missing or cannot be read."""
    try:
        return model.model_validate_json(read_own_file(path))
    except FileNotFoundError:
        return None
    except (OSError, ValidationError, ValueError) as error:
        _log.warning("%s cannot be read and is skipped: %s", path, error)
        return None


def _try_lock(directory: Path) -> int | None:
    """Lock a run's registry directory, and return the open file descriptor of its lock file.

    A POSIX lock is used, because a forked child does not inherit a POSIX lock.

    Returns:
        None if another process holds the lock or has just removed the directory.
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


#: Seconds that a guardian, the process that owns a component, has in addition to the grace period.
#: In this time it must end the component of a run whose owner has died. After this time, the
#: guardian is killed.
_GUARDIAN_MARGIN_S = 10.0
#: Prefix of the names of directories that Muster makes. Other directories are never removed.
_PREFIX = "muster-"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftoverCleanup:
    """Result of `finish`: the processes and files of a lost run that were ended or remain."""

    #: Pids of the processes that were killed.
    killed: tuple[int, ...]
    #: `left[component]`: pids of the processes that survived SIGKILL.
    left: Mapping[str, tuple[int, ...]]
    #: `waiting[component]`: pid of the guardian, the process that owns the component, if the
    #: guardian still waits for the grace period of the component.
    waiting: Mapping[str, int]
    #: Files, directories and cgroups that were removed.
    removed: tuple[Path, ...]

    @property
    def is_clean(self) -> bool:
        """True if no process of the run remains.

        The guardian processes count, too: none still waits for the end of its component.
        """
        return not self.left and not self.waiting


def finish(lost: LostRun) -> LeftoverCleanup:
    """End the leftover processes of a lost run, and remove its files.

    A living guardian, the process that owns a component, ends the component itself within the grace
    period. The guardian is killed only if it needs longer. Only processes that `tree.mark_own`
    has marked for the run, or that are in its cgroups, are killed. The function may be called any
    number of times.
    """
    killed: set[int] = set()
    left: dict[str, tuple[int, ...]] = {}
    waiting: dict[str, int] = {}
    removed: list[Path] = []
    for entry in reversed(lost.entries) if lost.is_of_this_boot else ():
        if entry.guardian.is_alive() and lost.seconds_lost() <= entry.grace_s + _GUARDIAN_MARGIN_S:
            waiting[entry.component] = entry.guardian.pid
            continue
        ended, remaining = end_all(partial(_kill_component_once, entry), KILLED_WITHIN_S)
        killed |= {pid for pid, _ in ended}
        if remaining:
            left[entry.component] = tuple(sorted(pid for pid, _ in remaining))
        elif entry.cgroup and entry.cgroup.exists() and cgroup.remove(str(entry.cgroup)):
            removed.append(entry.cgroup)
    if not left and not waiting:
        segments = [path for path in lost.owner.leftovers if path.parent == shared_memory.DIRECTORY]
        removed += shared_memory.remove_unused(segments)
        removed += [path for path in lost.owner.leftovers if _remove_directory(path)]
    return LeftoverCleanup(
        killed=tuple(sorted(killed)), left=left, waiting=waiting, removed=tuple(removed)
    )


def _kill_component_once(entry: ProcessEntry) -> set[PidAndStart]:
    """Send SIGKILL once to all living processes of a component, and return these processes.

    The registry entry of the component contains its cgroup and the number with which
    `tree.mark_own` has marked its processes. The processes are found by both.
    """
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
