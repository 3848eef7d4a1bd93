"""The registry on disk of the active runs of this machine: `$MUSTER_HOME/live/<run id>/`.

Each active run has a directory in the registry. The directory contains `owner.json`, which
describes the flow process of the run (its owner), and one file for each component. A component's
file is written before its program is executed. The directory is removed when the run has ended. If
the owner has died, the run was killed, and `finish` ends its leftover processes.

The owner holds the lock on a file in the directory. The kernel releases the lock when the owner
ends. Unlike a pid, the lock shows from every PID namespace whether the owner lives.

A file that cannot be read does not count as missing. If the file of a component cannot be read, the
processes of the component are found by their environment variables. If `owner.json` cannot be read,
the owner is described by the lock and by other files of the run.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
import shutil
import signal
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tasks.processes import cgroup, reserved_space, shared_memory, tree
from tasks.processes.ending import (
    KILLED_WITHIN_S,
    PidAndStart,
    end_all,
    end_carriers,
    end_marked,
    find_carriers,
)
from tasks.processes.identity import ProcessId, boot_id, host_name
from tasks.record.disk import DiskThread, replace_file, sync_directory, write_json
from tasks.record.places import (
    AttemptPlace,
    RunPlace,
    is_at,
    keep_private,
    muster_home,
    read_own_file,
)
from tasks.record.run_json import RunJson, SubmissionJson

_log = logging.getLogger(__name__)

#: Name of the file that describes the owner of a run: the process that supervises the run.
_OWNER = "owner.json"
#: Name of the lock file of a run. The owner of the run, its supervising process, holds the lock.
_LOCK = "lock"
#: Name of the file with the host name of the machine that supervises a run.
#: The file is needed if `owner.json` cannot be read.
_HOST = "host"
#: Name of the file that describes the supervising process of a run if `owner.json` cannot be read.
_REBUILT = "owner-rebuilt.json"
#: Prefix of the name that the directory of a run gets before Muster removes the directory.
_REMOVED = ".removed."
#: Layout of `struct flock` on 64-bit Linux: type, whence, start, length, pid. Source: fcntl(2).
_FLOCK = "hhqqi"
#: Seconds to wait until the last files of a run are on the disk. If the disk takes longer, the run
#: stays registered, and a later `muster reconcile` completes its record.
_WRITTEN_WITHIN_S = 5.0
#: Time limit in seconds for each of two steps: freeing the disk space that is reserved for
#: `run.json`, and writing the short form of the run's final record.
_WRITTEN_AFTER_ALL_WITHIN_S = 0.5
#: Seconds to wait for the last files of a run after the reserved disk space was freed. The space is
#: freed if the files are not written within `_WRITTEN_WITHIN_S`.
_WRITTEN_INTO_ROOM_WITHIN_S = 2.0
#: Seconds to wait for another process that is ending the leftover processes of the same run.
_CLAIM_WITHIN_S = 60.0
#: Seconds between two attempts to lock the registry directory of a run.
_LOOK_EVERY_S = 0.1
#: Seconds that a living guardian gets to end its component if the component's registry entry cannot
#: be read. Only the entry contains the grace period of the component.
_UNKNOWN_GRACE_S = 600.0
#: Seconds from the stop signal to SIGKILL for a Ray job whose registry entry cannot be read.
_UNKNOWN_JOB_GRACE_S = 60.0


class _Model(BaseModel):
    """Base class for the JSON files of the registry. Unknown keys are ignored."""

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
    #: URL of the Prefect server that stores the flow run. None if the server is temporary and ends
    #: with the run.
    api_url: str | None = None
    #: Name of the Prefect worker that started the flow run. None if no worker started it.
    worker: str | None = None
    #: Directory of the run; None if the run has no directory.
    directory: Path | None = None
    #: True if the run's Ray jobs continue after the death of the supervising process. Another
    #: process can then resume the run and supervise these jobs.
    adopts: bool = False
    #: Files and directories that must be removed when the run has ended.
    leftovers: tuple[Path, ...] = ()
    #: Time at which the supervising process was first found dead, in CLOCK_BOOTTIME seconds. None
    #: if it was never found dead.
    lost_at_boot_s: float | None = None
    #: Reason why `owner.json` could not be read, with the path of the file. The description of the
    #: supervising process then comes from the lock and from other files of the run. Empty if
    #: `owner.json` could be read.
    fault: str = Field(default="", exclude=True)


class _Entry(_Model):
    """Registry entry of one component of a run: a file in the run's registry directory."""

    #: First part of the name of the entry's file: `component` or `job`.
    kind: ClassVar[str]

    run_id: str
    #: Number of the attempt at the run, from 1.
    attempt: int
    component: str
    #: Seconds from the component's stop signal to SIGKILL.
    grace_s: float
    #: The end of the component is delayed while it writes a checkpoint, by at most this number of
    #: seconds. None in an entry of an earlier version of Muster, which used `grace_s` instead.
    save_grace_s: float | None = None

    @classmethod
    def file_of(cls, component: str) -> str:
        """Return the file name of a component's entry in the run's registry directory."""
        return f"{cls.kind}-{component}.json"


class ProcessEntry(_Entry):
    """Registry entry of a component that runs on this machine or is about to be started here.

    Each component has a guardian process. A component may start additional guardians itself, for
    example for the servers of a rollout. Each additional guardian has its own entry with the name
    `COMPONENT.PART`.
    """

    kind = "component"

    #: Number that identifies the guardian process and its descendants, see `tree.mark_own`.
    mark: int
    #: Identity of the guardian, the process that owns the component's process tree.
    guardian: ProcessId
    #: Identity of the component's first process. The registry entry is written before the process
    #: executes its program.
    process: ProcessId
    #: Directory of the component's cgroup v2; None if the component has no cgroup.
    cgroup: Path | None = None


class JobEntry(_Entry):
    """Registry entry of a component that runs as a Ray job. Written before the job is submitted.

    The address of the cluster and other facts about the job are in `submission.json` in the
    directory of the attempt.
    """

    kind = "job"

    #: Submission id of the Ray job that runs the component.
    submission_id: str
    #: The component's log file in the directory of the attempt.
    log: Path


@dataclass(frozen=True, slots=True, kw_only=True)
class UnreadableFile:
    """A file in the registry of active runs that exists, but cannot be read."""

    path: Path
    #: Reason why the file cannot be read, for example `the file is empty`.
    reason: str

    def __str__(self) -> str:
        return f"{self.path} cannot be read: {self.reason}"

    @property
    def component(self) -> str:
        """Name of the component that the file describes, from the name of the file."""
        return self.path.stem.partition("-")[2]


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
    # Only a Ray job on another machine survives a power failure of this machine. So only the entry
    # of a Ray job must be safe on the disk before the job starts.
    is_durable = isinstance(entry, JobEntry)
    path = directory / entry.file_of(entry.component)
    write_json(path, entry.model_dump(mode="json"), durable=is_durable)


def leave(directory: Path, component: str) -> None:
    """Remove the registry entries of a component whose processes have all ended.

    Args:
        directory: Directory of the run in the registry.
        component: Name of the component.
    """
    (directory / ProcessEntry.file_of(component)).unlink(missing_ok=True)
    # Also remove the entries of the component's parts, such as single inference servers. A
    # component that was killed could not remove these entries itself. All parts are descendants of
    # the component, so they have ended, too.
    for part in directory.glob(ProcessEntry.file_of(f"{component}.*")):
        part.unlink(missing_ok=True)
    (directory / JobEntry.file_of(component)).unlink(missing_ok=True)


class EntryWriter:
    """Writes and removes the registry entries of one run, in a separate thread."""

    def __init__(self, directory: Path, entry_disk: DiskThread) -> None:
        """
        Args:
            directory: Directory of the run in the registry.
            entry_disk: Thread that writes and removes the registry entries.
        """
        self.directory = directory
        self.entry_disk = entry_disk

    async def enter(self, entry: ProcessEntry | JobEntry) -> None:
        """Write the registry entry of a component. Await this before the component is started.

        Raises:
            OSError: The entry was not written. The component must not be started.
        """
        await asyncio.wrap_future(self.entry_disk.do(partial(enter, self.directory, entry)))

    def leave(self, component: str) -> None:
        """Remove the registry entries of a component whose processes have all ended.

        Returns at once. Another thread removes the files.
        """
        self.entry_disk.do(partial(leave, self.directory, component))


class RunRegistration(EntryWriter):
    """The registry directory of one run, locked by the process that supervises the run.

    `close` removes the directory.
    """

    def __init__(self, owner: Owner) -> None:
        """Register a run, and lock its registry directory.

        If the earlier owner of the run has died, another process may be ending the leftover
        processes of the run. In this case, wait until that process has finished.

        Args:
            owner: Description of the calling process and of the run.

        Raises:
            RunHeld: Another living process supervises the run.
            FileExistsError: The run is registered with the id of another flow run.
            OSError: The registry cannot be written.
        """
        # The entries have a thread of their own. Otherwise the start of a component would wait
        # until earlier changes of the run's record are on the disk.
        entry_disk = DiskThread(f"registry entries of {owner.run_id}")
        super().__init__(_registry_directory() / owner.run_id, entry_disk)
        #: Thread that writes the record and the events of the run.
        self.disk = DiskThread(f"disk of {owner.run_id}")
        self.owner = owner
        self._lock_fd: int | None = None
        deadline = time.monotonic() + _CLAIM_WITHIN_S
        while self._lock_fd is None:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._lock_fd = _try_lock(self.directory)
            if self._lock_fd is None:
                other = _read_owner(self.directory)
                if other and not other.fault and other.flow_run_id != owner.flow_run_id:
                    why = f"{self.directory} belongs to flow run {other.flow_run_id}"
                    raise FileExistsError(errno.EEXIST, f"{why}, not to {owner.flow_run_id}")
                if (other and other.process.is_alive()) or time.monotonic() > deadline:
                    who = f"another process of this machine already runs {owner.run_id}"
                    raise RunHeld(errno.EBUSY, who)
                time.sleep(_LOOK_EVERY_S)
        _locked_here[self.directory] = _Lock(pid=os.getpid(), register=self)
        try:
            (self.directory / _REBUILT).unlink(missing_ok=True)
            replace_file(self.directory / _HOST, f"{owner.host}\n")
            replace_file(self.directory / _OWNER, self._owner_text(), durable=True)
            sync_directory(self.directory.parent)
            self._reserve_space()
        except OSError:
            # This process has started no component of the run yet, so undo the registration. But if
            # an earlier process of the run has left entries of its components, keep the run in the
            # registry: `muster reconcile` needs these entries.
            if not _entry_files(self.directory):
                _remove_run(self.directory)
            self._unlock()
            raise

    def _reserve_space(self) -> None:
        """Reserve disk space for the final record of the run.

        Raises:
            OSError: The disk has not enough free space.
        """
        try:
            reserved_space.reserve(self.directory)
        except OSError as error:
            # Some file systems cannot reserve disk space. The run can work without the reservation,
            # so only a full disk or an exceeded quota is an error.
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                raise

    @staticmethod
    def opened(run_id: str, **about: object) -> RunRegistration:
        """Register a run, and return its registration.

        This process is registered as the process that supervises the run.

        Args:
            run_id: Id of the run.
            about: Further fields of `Owner`.

        Raises:
            OSError: See `RunRegistration`.
        """
        keep_private()
        me = ProcessId.of(os.getpid())
        owner = Owner.model_validate(
            {"run_id": run_id, "host": host_name(), "process": me, **about}
        )
        return RunRegistration(owner)

    def note_leftovers(self, made: set[Path], removed: set[Path]) -> None:
        """Update the list of files that must be removed when the run has ended.

        Args:
            made: Files that processes of the run have made.
            removed: Files that were removed. They are taken off the list, because another user may
                create a file with the same name.
        """
        kept = [path for path in self.owner.leftovers if path not in removed]
        leftovers = (*kept, *sorted(made.difference(kept)))
        if leftovers != self.owner.leftovers:
            self.owner = self.owner.model_copy(update={"leftovers": leftovers})
            self.disk.replace(self.directory / _OWNER, self._owner_text)

    def settle(self, record: RunJson) -> str:
        """Wait until the final record of the run is on disk.

        If the disk does not accept the record in time, free the disk space that is reserved for the
        record. If the record is larger than that space, write a short form of the record into a
        second reserved file. A later `muster reconcile` then writes `run.json` from this file.

        Args:
            record: The final record.

        Returns:
            An empty string if all files of the run are on the disk. Otherwise a text with the files
            that could not be written, and the reasons.
        """
        if self._flush(_WRITTEN_WITHIN_S):
            return ""
        with suppress(OSError):  # includes TimeoutError
            make_room = partial(reserved_space.make_room, self.directory)
            self.disk.do(make_room).result(_WRITTEN_AFTER_ALL_WITHIN_S)
        if self._flush(_WRITTEN_INTO_ROOM_WITHIN_S):
            return ""
        with suppress(OSError):  # includes TimeoutError
            write = partial(reserved_space.write_final_record, self.directory, record)
            self.disk.do(write).result(_WRITTEN_AFTER_ALL_WITHIN_S)
        return self.disk.describe_unwritten_files() or "the disk does not respond"

    def close(self) -> None:
        """Remove the run from the registry, and release the lock on its directory.

        The run stays registered if a component still has an entry or if the record of the run could
        not be written. A later `muster reconcile` then ends the remaining processes of the run and
        writes its record.
        """
        if self._lock_fd is None:
            return
        if not self._flush(_WRITTEN_WITHIN_S):
            _log.warning(
                "the run %s still counts as running on this machine, because its record could not "
                "be written. A later `muster reconcile` writes the record.",
                self.owner.run_id,
            )
        elif not _entry_files(self.directory):
            _remove_run(self.directory)
        self._unlock()

    def _flush(self, within_s: float) -> bool:
        """Wait until both disk threads have written all files of the run.

        Returns:
            False if this takes longer than `within_s` seconds.
        """
        deadline = time.monotonic() + within_s
        is_written = self.entry_disk.flush(within_s)
        return self.disk.flush(max(0.0, deadline - time.monotonic())) and is_written

    def _unlock(self) -> None:
        """Release the lock on the run's directory."""
        _locked_here.pop(self.directory, None)
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def _owner_text(self) -> str:
        return self.owner.model_dump_json(indent=2) + "\n"


class LostRun:
    """A registered run whose owner has died. The owner is the process that supervised the run.

    The calling process holds the lock on the run's directory. Use `claim_lost_run` to create this
    object.
    """

    def __init__(self, directory: Path, owner: Owner) -> None:
        self._directory = directory
        self.owner = owner
        #: Entries of the components that ran on this machine.
        self.entries, unreadable_entries = _read_entries(directory, ProcessEntry)
        #: Unreadable registry files of components. The processes of these components are found by
        #: their environment variables MUSTER_RUN_ID and MUSTER_COMPONENT.
        self.unreadable_entries = tuple(unreadable_entries)
        jobs, unreadable_jobs = _read_entries(directory, JobEntry)
        rebuilt_jobs = {file: _rebuild_jobs(owner, file) for file in unreadable_jobs}
        #: Entries of the components that ran as Ray jobs. If the registry file of a job cannot be
        #: read, the entry is made from the submission files of the run.
        self.jobs = [*jobs, *(job for found in rebuilt_jobs.values() for job in found or ())]
        #: Registry files of Ray jobs that cannot be read.
        self.unreadable_jobs = tuple(unreadable_jobs)
        #: Registry files in `unreadable_jobs` whose Ray jobs Muster does not know, because the
        #: submission files of the run are missing or unreadable. The jobs may still be running.
        self.unknown_jobs = tuple(file for file, found in rebuilt_jobs.items() if found is None)
        #: Final record that the run has written into reserved disk space, because the disk was
        #: full. None if the run has written no record there.
        self.end = reserved_space.read_final_record(directory)

    @property
    def faults(self) -> tuple[str, ...]:
        """Texts about the registry files of the run that could not be read."""
        files = (*self.unreadable_entries, *self.unreadable_jobs)
        return tuple(filter(None, (self.owner.fault, *map(str, files))))

    @property
    def is_of_this_boot(self) -> bool:
        """True if the machine or container has not restarted since the supervising process started.

        If the value is False, no process of the run can exist any more.
        """
        return self.owner.process.boot_id == boot_id()

    def seconds_lost(self) -> float:
        """Return the seconds since the run's owner, its supervising process, was first found dead.

        The first call writes the current time into `owner.json` and returns 0.
        """
        now = time.clock_gettime(time.CLOCK_BOOTTIME)
        if self.owner.lost_at_boot_s is None or self.owner.lost_at_boot_s > now:
            self.owner = self.owner.model_copy(update={"lost_at_boot_s": now})
            # If owner.json could not be read, write to another file and keep owner.json: a later
            # process may be able to read it.
            name = _REBUILT if self.owner.fault else _OWNER
            write_json(self._directory / name, self.owner.model_dump(mode="json"), durable=True)
        return now - (self.owner.lost_at_boot_s or now)

    def forget_job(self, component: str) -> None:
        """Remove the registry entry of a Ray job that has ended without leftover processes.

        Args:
            component: Name of the component that ran as this job.
        """
        (self._directory / JobEntry.file_of(component)).unlink(missing_ok=True)
        self.jobs = [entry for entry in self.jobs if entry.component != component]

    def forget(self) -> None:
        """Remove the run from the registry.

        If the registry file of a component cannot be read, the method searches for the component's
        processes by their environment variables. If it finds processes, the run stays registered.

        Raises:
            OSError: The processes of this machine cannot be listed.
        """
        for file in self.unreadable_entries if self.is_of_this_boot else ():
            if pids := find_carriers(_variables_of(self.owner.run_id, file)):
                _log.warning(
                    "Muster cannot read the file %s, which describes a component of run %s. The "
                    "processes %s of the component are still running. So the run still counts as "
                    "running on this machine",
                    file,
                    self.owner.run_id,
                    ", ".join(map(str, pids)),
                )
                return
        _remove_run(self._directory)


@contextmanager
def claim_lost_run(run_id: str, *, host: str | None = None) -> Iterator[LostRun | None]:
    """Lock a run whose owner has died. The owner is the process that supervised the run.

    No other process can then end the leftover processes of the run at the same time.

    Args:
        run_id: The run.
        host: Name of the machine on which the owner ran. None if it is this machine.

    Yields:
        The run. None in these cases: the owner lives, another process has locked the run, the run
        is not registered, or the run belongs to another machine than `host`.

    Raises:
        OSError: The registry cannot be read, for example because this process has too many open
            files.
    """
    directory = _registry_directory() / run_id
    owner = _read_owner(directory)
    if (
        owner is None
        or _is_locked_here(directory)
        or owner.host != (host or host_name())
        or owner.process.is_alive()
    ):
        yield None
        return
    lock = _try_lock(directory)
    if lock is None:
        yield None
        return
    _locked_here[directory] = _Lock(pid=os.getpid(), register=None)
    try:
        # Read the owner again while the directory is locked. Another process may have removed the
        # run since the first read.
        owner = _read_owner(directory)
        yield LostRun(directory, owner) if owner is not None else None
    finally:
        _locked_here.pop(directory, None)
        os.close(lock)


def registered_runs() -> list[str]:
    """Return the ids of all runs in the registry, in alphabetical order.

    Runs whose supervising process has died are included.

    Raises:
        OSError: The registry cannot be read, for example because this process has too many open
            files.
    """
    try:
        entries = list(_registry_directory().iterdir())
    except FileNotFoundError:
        return []
    return sorted(
        entry.name for entry in entries if not entry.name.startswith(".") and entry.is_dir()
    )


def list_unreadable_files() -> list[UnreadableFile]:
    """Return all files in the registry that exist, but cannot be read.

    Raises:
        OSError: The registry cannot be read.
    """
    files: list[UnreadableFile] = []
    for run_id in registered_runs():
        directory = _registry_directory() / run_id
        owner = _read_model(directory / _OWNER, Owner)
        files += [owner] if isinstance(owner, UnreadableFile) else []
        files += _read_entries(directory, ProcessEntry)[1]
        files += _read_entries(directory, JobEntry)[1]
    return files


def describe_unreadable_files() -> list[str]:
    """Return a sentence for the user about each file of the registry that cannot be read."""
    try:
        files = list_unreadable_files()
    except OSError as error:
        return [f"Muster's list of running processes on this machine cannot be read: {error}"]
    return [
        f"{file}. Muster counts the run as running until `muster reconcile` has ended the "
        "processes of the run."
        for file in files
    ]


def read_owner(run_id: str) -> Owner | None:
    """Return the registered owner of a run, the process that supervises the run.

    The process may have ended. If `owner.json` cannot be read, the field `fault` of the owner has
    the reason. The other fields then come from the lock and from other files of the run.

    Returns:
        None if the run is not registered.

    Raises:
        OSError: The registry cannot be read, for example because this process has too many open
            files.
    """
    return _read_owner(_registry_directory() / run_id)


def find_run_ids() -> dict[str, str]:
    """Return a mapping from flow run id to run id, for each registered run with a flow run.

    The result is empty if the registry cannot be read.
    """
    try:
        owners = [owner for owner in map(read_owner, registered_runs()) if owner is not None]
    except OSError as error:
        _log.warning("Muster's list of the runs on this machine cannot be read: %s", error)
        return {}
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
        process: Pid of a process that supervises a run. Only this run is considered. If None,
            every run of this MUSTER_HOME is considered.

    Returns:
        0 if no such run is registered. If a part of the registry cannot be read, a time is returned
        that is enough for most components.
    """
    longest_s = 0.0
    try:
        for run_id in registered_runs():
            owner = read_owner(run_id)
            if owner is not None and process in (None, owner.process.pid):
                longest_s = max(longest_s, _teardown_of_run_s(_registry_directory() / run_id))
    except OSError as error:
        _log.warning("the grace periods of the runs on this machine cannot be read: %s", error)
        longest_s = max(longest_s, _UNKNOWN_GRACE_S)
    return longest_s


def _teardown_of_run_s(directory: Path) -> float:
    """Return the longest time that the teardown of one run can take, in seconds.

    Args:
        directory: Directory of the run in the registry.
    """
    processes, unreadable_processes = _read_entries(directory, ProcessEntry)
    jobs, unreadable_jobs = _read_entries(directory, JobEntry)
    # Leave out the entries of parts (`COMPONENT.PART`), such as one inference server. A part ends
    # within the grace period of its component.
    graces = [
        entry.grace_s + (entry.grace_s if entry.save_grace_s is None else entry.save_grace_s)
        for entry in (*processes, *jobs)
        if "." not in entry.component
    ]
    unreadable_files = (*unreadable_processes, *unreadable_jobs)
    graces += [_UNKNOWN_GRACE_S for file in unreadable_files if "." not in file.component]
    return sum(graces)


def _registry_directory() -> Path:
    """Return the directory in MUSTER_HOME with the registered runs, one subdirectory per run."""
    return muster_home() / "live"


_M = TypeVar("_M", bound=_Model)
_E = TypeVar("_E", bound=_Entry)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Lock:
    """Lock of this process on the registry directory of a run."""

    #: Pid of the process that took the lock. A forked child does not have the lock.
    pid: int
    #: The run's registration if this process supervises the run. None if this process cleans up
    #: after a run whose supervising process is dead.
    register: RunRegistration | None


#: Registry directories that this process has locked. The kernel releases a POSIX lock as soon as
#: its process closes any descriptor of the lock file. So the process must not open the lock file a
#: second time.
_locked_here: dict[Path, _Lock] = {}


def _is_locked_here(directory: Path) -> bool:
    """Return True if this process has locked a run's registry directory."""
    lock = _locked_here.get(directory)
    return lock is not None and lock.pid == os.getpid()


def _read_owner(directory: Path) -> Owner | None:
    """Return the owner of a run, which is the process that supervises the run.

    If `owner.json` cannot be read, other files of the run describe the owner; see `read_owner`.

    Raises:
        OSError: The lock or another file of the run cannot be read.
    """
    owner = _read_model(directory / _OWNER, Owner)
    if isinstance(owner, UnreadableFile):
        return _rebuild_owner(directory, str(owner))
    if owner is None and _entry_files(directory):
        return _rebuild_owner(directory, f"{directory / _OWNER} is missing")
    return owner


def _rebuild_owner(directory: Path, fault: str) -> Owner:
    """Return the owner of a run whose `owner.json` cannot be read.

    Args:
        directory: Directory of the run in the registry.
        fault: Reason why `owner.json` cannot be read, with its path.

    Raises:
        OSError: The lock of the run cannot be read.
    """
    if _is_locked_here(directory) and (register := _locked_here[directory].register) is not None:
        return register.owner.model_copy(update={"fault": fault})
    earlier = _read_model(directory / _REBUILT, Owner)
    if isinstance(earlier, Owner) and _find_lock_holder(directory) is None:
        return earlier.model_copy(update={"fault": fault})

    place = RunPlace.of(directory.name)
    record: RunJson | None = None
    with suppress(OSError, ValueError):
        record = RunJson.read(place.record)
    holder = _find_lock_holder(directory)
    if holder:
        process = ProcessId.of(holder)
    else:
        process = ProcessId(pid=0, start_ticks=0, boot_id=_find_boot(directory))
    return Owner(
        run_id=directory.name,
        host=_find_host(directory, record, process),
        process=process,
        flow_run_id=record.flow_run_id or None if record is not None else None,
        directory=place.directory if place.directory.is_dir() else None,
        fault=fault,
    )


def _find_boot(directory: Path) -> str:
    """Return the id of the boot during which the processes of a run started.

    If no registry entry of the run can be read, the id of the current boot is returned. Muster then
    searches for processes of the run, because such processes may still exist.
    """
    entries, _ = _read_entries(directory, ProcessEntry)
    boots = {entry.guardian.boot_id for entry in entries}
    return min(boots) if boots and boot_id() not in boots else boot_id()


def _find_host(directory: Path, record: RunJson | None, process: ProcessId) -> str:
    """Return the name of the machine of a run whose `owner.json` cannot be read.

    Args:
        directory: Directory of the run in the registry.
        record: Record of the run, or None if it cannot be read.
        process: Identity of the run's supervising process, as far as it is known.

    Returns:
        An empty string if the machine is unknown. The run may then belong to another machine,
        because several machines may share a registry.
    """
    with suppress(OSError, UnicodeError):
        if host := read_own_file(directory / _HOST).decode().strip():
            return host
    if record is not None and record.attempt is not None and record.attempt.host:
        return record.attempt.host
    return host_name() if process.boot_id == boot_id() else ""


def _find_lock_holder(directory: Path) -> int | None:
    """Return the pid of the process that has locked a run's registry directory.

    Returns:
        The pid. None if no process has the lock, or if this process has the lock. 0 if another
        process has the lock, but its pid is unknown. The process is then in another PID namespace,
        or belongs to another user.

    Raises:
        OSError: The lock file cannot be opened.
    """
    if _is_locked_here(directory):
        return None
    try:
        fd = os.open(directory / _LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except FileNotFoundError:
        return None
    except PermissionError:
        return 0
    try:
        request = struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        answer = fcntl.fcntl(fd, fcntl.F_GETLK, request)
    finally:
        os.close(fd)
    kind, _, _, _, pid = struct.unpack(_FLOCK, answer)
    return None if kind == fcntl.F_UNLCK else max(0, pid)


def _rebuild_jobs(owner: Owner, file: UnreadableFile) -> list[JobEntry] | None:
    """Make new registry entries for the Ray jobs of a component whose entry file cannot be read.

    The submission files in the run's directory describe the jobs. Each job has a submission file,
    because this file is written before the job is submitted.

    Args:
        owner: The process that supervises the run.
        file: The unreadable entry file of the component.

    Returns:
        The new entries. None if the jobs are unknown, because a submission file of the run cannot
        be read or the run has no directory.
    """
    if owner.directory is None:
        return None
    jobs: list[JobEntry] = []
    for folder in sorted(owner.directory.glob("attempt-*")):
        for path in AttemptPlace(directory=folder, number=0).submissions():
            try:
                submission = SubmissionJson.read(path)
            except (OSError, ValueError) as error:
                _log.warning("%s cannot be read: %s", path, error)
                return None
            if submission.component == file.component and submission.ended_at is None:
                attempt = AttemptPlace(directory=folder, number=submission.attempt)
                jobs.append(
                    JobEntry(
                        run_id=owner.run_id,
                        attempt=submission.attempt,
                        component=submission.component,
                        grace_s=_UNKNOWN_JOB_GRACE_S,
                        submission_id=submission.submission_id,
                        log=attempt.log(submission.component),
                    )
                )
    return jobs


def _entry_files(directory: Path) -> list[Path]:
    """Return the paths of the entry files of a run's components and Ray jobs, readable or not."""
    kinds = (ProcessEntry, JobEntry)
    return [path for kind in kinds for path in sorted(directory.glob(kind.file_of("*")))]


def _read_entries(directory: Path, kind: type[_E]) -> tuple[list[_E], list[UnreadableFile]]:
    """Return all entries of a type from a run's registry directory.

    Returns:
        Two values: the entries, and the entry files that cannot be read.
    """
    entries: list[_E] = []
    unreadable: list[UnreadableFile] = []
    for path in sorted(directory.glob(kind.file_of("*"))):
        entry = _read_model(path, kind)
        if isinstance(entry, UnreadableFile):
            unreadable.append(entry)
        elif entry is not None:
            entries.append(entry)
    return entries, unreadable


def _read_model(path: Path, model: type[_M]) -> _M | UnreadableFile | None:
    """Return the content of a registry file, or the reason why it cannot be read.

    Returns:
        None if the file is missing.
    """
    content = b""
    try:
        content = read_own_file(path)
        return model.model_validate_json(content)
    except FileNotFoundError:
        return None
    except OSError as error:
        reason = error.strerror or str(error)
    except ValidationError as error:
        reason = _describe_invalid_content(content, error)
    file = UnreadableFile(path=path, reason=reason)
    _log.warning("%s", file)
    return file


def _describe_invalid_content(content: bytes, error: ValidationError) -> str:
    """Return the reason why the content of a registry file is not valid."""
    if not content:
        return "the file is empty"
    if not content.strip(b"\0"):
        return "the file contains only zero bytes"
    first = error.errors(include_url=False, include_input=False)[0]
    key = ".".join(map(str, first["loc"]))
    return f"{key}: {first['msg']}" if key else first["msg"]


def _remove_run(directory: Path) -> None:
    """Remove a run's directory from the registry.

    The directory is renamed first. Otherwise another process could find the directory half removed.
    The caller must hold the lock on the directory.
    """
    removed = directory.with_name(f"{_REMOVED}{directory.name}.{os.getpid()}")
    try:
        directory.rename(removed)
    except OSError:
        shutil.rmtree(directory, ignore_errors=True)
        return
    # Also remove directories that a killed process has renamed but not removed.
    for path in directory.parent.glob(f"{_REMOVED}*"):
        shutil.rmtree(path, ignore_errors=True)


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


#: If the supervising process of a run has died, each guardian process must end its component within
#: the grace period plus this number of seconds. Otherwise, the guardian is killed.
_GUARDIAN_MARGIN_S = 10.0
#: Prefix of the names of directories that Muster makes. Other directories are never removed.
_PREFIX = "muster-"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftoverCleanup:
    """Result of `finish`, which cleans up after a lost run.

    The result lists the killed processes, the remaining processes, and the removed files.
    """

    #: Pids of the processes that were killed.
    killed: tuple[int, ...]
    #: `left[component]`: pids of the processes that survived SIGKILL.
    left: Mapping[str, tuple[int, ...]]
    #: `waiting[component]`: pid of the guardian, the process that owns the component, if the
    #: guardian still waits for the end of the component's grace period.
    waiting: Mapping[str, int]
    #: Files, directories and cgroups that were removed.
    removed: tuple[Path, ...]
    #: Unreadable registry files of components. The processes of these components were found by
    #: their environment variables MUSTER_RUN_ID and MUSTER_COMPONENT.
    unreadable: tuple[UnreadableFile, ...] = ()

    @property
    def is_clean(self) -> bool:
        """True if neither processes of the run nor waiting guardian processes remain."""
        return not self.left and not self.waiting


def finish(lost: LostRun) -> LeftoverCleanup:
    """End the leftover processes of a lost run, and remove the run's files.

    Each component has a guardian process. If the guardian process is alive, it gets the grace
    period to end the component. After the grace period, the function kills both.

    Only processes of the run are killed. The function finds these processes by the cgroups of the
    run's components, and by the mark that `tree.mark_own` sets. If the registry entry of a
    component cannot be read, the function uses the environment variables of the processes instead.
    The function may be called any number of times.

    Raises:
        OSError: The processes of this machine cannot be listed.
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
    for file in lost.unreadable_entries if lost.is_of_this_boot else ():
        guardian_pids = _find_guardians(lost)
        if guardian_pids and lost.seconds_lost() <= _UNKNOWN_GRACE_S:
            waiting[file.component] = guardian_pids[0]
            continue
        killed_pids, remaining_pids = _end_unregistered(lost.owner.run_id, file)
        killed |= killed_pids
        if remaining_pids:
            left[file.component] = tuple(sorted(remaining_pids))
    if not left and not waiting:
        segments = [path for path in lost.owner.leftovers if path.parent == shared_memory.DIRECTORY]
        removed += shared_memory.remove_unused(segments)
        removed += [path for path in lost.owner.leftovers if _remove_directory(path)]
    return LeftoverCleanup(
        killed=tuple(sorted(killed)),
        left=left,
        waiting=waiting,
        removed=tuple(removed),
        unreadable=lost.unreadable_entries,
    )


def _variables_of(run_id: str, file: UnreadableFile) -> dict[str, str]:
    """Return the environment variables that identify the processes of a component.

    Args:
        run_id: The run.
        file: Registry file of the component, or of a part of the component (`COMPONENT.PART`).
    """
    component = file.component.partition(".")[0]
    return {"MUSTER_RUN_ID": run_id, "MUSTER_COMPONENT": component}


def _find_guardians(lost: LostRun) -> list[int]:
    """Return the pids of the run's living guardians that have no readable registry entry."""
    registered = {entry.guardian.pid for entry in lost.entries}
    variables = {"MUSTER_RUN_ID": lost.owner.run_id, "MUSTER_ROLE": "guardian"}
    return [pid for pid in find_carriers(variables) if pid not in registered]


def _end_unregistered(run_id: str, file: UnreadableFile) -> tuple[set[int], set[int]]:
    """End all processes of a component whose registry entry cannot be read.

    The function finds the processes by their environment variables. A process may have cleared its
    environment. The function finds such a process by the mark that `tree.mark_own` sets.

    Args:
        run_id: The run.
        file: The unreadable entry file.

    Returns:
        Two sets of pids: the ended processes, and the processes that survived SIGKILL.
    """
    variables = _variables_of(run_id, file)
    marks = {tree.read_mark(pid) for pid in find_carriers(variables)}
    carriers = end_carriers(variables)
    killed_pids = {process["pid"] for process in carriers["killed"]}
    remaining_pids = {process["pid"] for process in carriers["left"]}
    for mark in marks - {None, 0, tree.read_mark(os.getpid())}:
        ended, remaining = end_all(partial(end_marked, mark or 0), KILLED_WITHIN_S)
        killed_pids |= {pid for pid, _ in ended}
        remaining_pids |= {pid for pid, _ in remaining}
    return killed_pids, remaining_pids


def _kill_component_once(entry: ProcessEntry) -> set[PidAndStart]:
    """Send SIGKILL once to all living processes of a component, and return these processes.

    The function finds the processes by the mark that `tree.mark_own` sets, and by the cgroup of the
    component. The registry entry contains the mark and the cgroup.
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
