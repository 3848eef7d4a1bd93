"""The GPUs of this machine: which of them Muster may give, and who has them."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import stat
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tasks.processes.guarded import kept_fds
from tasks.processes.identity import host_name
from tasks.processes.machine import DRIVER, gpus_seen
from tasks.record.places import is_at, muster_home
from tasks.spec.errors import MusterError
from tasks.spec.run import VISIBLE

#: Which devices Muster may give, `0,1,4-7`; it stands in for GPUs where there are none.
MUSTER_GPUS = "MUSTER_GPUS"
#: Of whatever user: a device is one for all of them.
_SHARED = Path("/tmp/muster-devices")
_TRIES, _AGAIN_S = 5, 0.01
#: For a driver, which may hang.
_ANSWERS_WITHIN_S = 10.0


class BadDevices(MusterError):
    """What names devices can't be read, or names what is not there: nothing was started."""

    exit_code = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """The accelerators of this machine that Muster may give."""

    #: nvidia | amd | ascend
    kind: str
    #: As the driver numbers them, ascending.
    indices: tuple[int, ...]
    #: `uuids[index]` of those that are real.
    uuids: Mapping[int, str]
    #: `problems[index]`: why others are not given.
    problems: Mapping[int, str]

    @staticmethod
    def here() -> Devices:
        """By MUSTER_GPUS, the driver, and what this process may see itself.

        Raises: BadDevices; OSError, where a driver does not answer.
        """
        seen, named = gpus_seen(), os.environ.get(MUSTER_GPUS)
        if seen["problem"]:
            raise OSError(errno.EIO, f"the GPUs of {host_name()} can't be counted", seen["problem"])
        wanted = None if named is None else parsed(named, MUSTER_GPUS)
        uuids = {gpu["index"]: gpu["uuid"] for gpu in seen["gpus"]}
        problems = {gpu["index"]: gpu["problem"] for gpu in seen["gpus"] if gpu["problem"]}
        if seen["gpus"]:
            if wanted is None:
                wanted = _visible(uuids)
            if missing := [one for one in wanted if one not in uuids]:
                there = f"this machine has {len(uuids)} GPUs: write some of {listed(uuids)}"
                raise BadDevices(f"{MUSTER_GPUS}={named}: there is no GPU {missing[0]}: {there}")
            indices = [one for one in wanted if one not in problems]
        else:
            indices = sorted(wanted or ())
        return Devices(
            kind=kind_here(), indices=tuple(sorted(indices)), uuids=uuids, problems=problems
        )

    def lease_file(self, index: int) -> Path:
        """Whoever has a lock on it has the device."""
        # One that has fallen off the bus has none.
        if uuid := self.uuids.get(index):
            return _SHARED / uuid
        return muster_home() / "devices" / host_name() / str(index)


def _visible(uuids: Mapping[int, str]) -> tuple[int, ...]:
    """What an outer scheduler lets this process see; by its order where it is numbers."""
    written = os.environ.get(*VISIBLE["nvidia"])
    if written is None:
        return tuple(uuids)
    words = [word.strip() for word in written.split(",") if word.strip()]
    by_uuid = {uuid: index for index, uuid in uuids.items()}
    found = [int(word) if word.isdecimal() else by_uuid.get(word, -1) for word in words]
    return tuple(one for one in found if one in uuids)


def kind_here() -> str:
    """Of this machine's accelerators, by their drivers: nvidia | amd | ascend."""
    if Path("/dev/davinci_manager").exists():
        return "ascend"
    return "amd" if Path("/dev/kfd").exists() and not DRIVER.exists() else "nvidia"


def parsed(text: str, name: str) -> tuple[int, ...]:
    """`0,1,4-7` as numbers. Raises: BadDevices."""
    found: list[int] = []
    for part in filter(None, (word.strip() for word in text.split(","))):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise BadDevices(f"{name}={text}: {part!r} is no device: write {name}=0,1,4-7")
        found += range(int(match[1]), int(match[2] or match[1]) + 1)
    return tuple(dict.fromkeys(found))


def listed(indices: Iterable[int]) -> str:
    """`0,1,4`."""
    return ",".join(map(str, indices))


class DeviceHeld(OSError):
    """Another run has a lease on a device."""


class DeviceLease:
    """Devices of this machine that one run has, until it is closed or the last process that guards
    something of the run has ended, whatever ends it."""

    def __init__(self, devices: Devices, indices: Sequence[int], owner: str) -> None:
        """
        Args:
            owner: the flow run's id, for whoever asks who has them.

        Raises: DeviceHeld, with nothing taken; OSError.
        """
        self.kind = devices.kind
        self.indices = tuple(indices)
        self._fds: list[int] = []
        try:
            for index in self.indices:
                self._fds.append(_locked(devices.lease_file(index), owner, index))
            kept_fds.update(self._fds)
        except BaseException:
            self.close()
            raise

    def why_unfit(self) -> str:
        """Why they can't be used now, by their driver; empty where they can."""
        said: list[str] = []

        def ask() -> None:
            try:
                here = Devices.here()
            except (OSError, BadDevices) as error:
                said.append(str(error))
                return
            # Without a driver, what MUSTER_GPUS or a pool's table says stands in for GPUs.
            gone = [one for one in self.indices if here.uuids and one not in here.indices]
            said.append(f"{host_name()} shows no fit GPU {listed(gone)}" if gone else "")

        thread = threading.Thread(target=ask, name="devices", daemon=True)
        thread.start()
        thread.join(_ANSWERS_WITHIN_S)
        silent = f"the driver of {host_name()} is silent for {_ANSWERS_WITHIN_S:g} s"
        return said[0] if said else silent

    def close(self) -> None:
        """Give them back; any number of times."""
        while self._fds:
            fd = self._fds.pop()
            kept_fds.discard(fd)
            # A guardian may hold a copy of it for a moment longer.
            with suppress(OSError):
                fcntl.flock(fd, fcntl.LOCK_UN)
            os.close(fd)


def leased(devices: Devices) -> dict[int, str]:
    """`owner[index]` of the devices that somebody has."""
    found = {}
    for index in devices.indices:
        with suppress(OSError):
            fd = os.open(devices.lease_file(index), os.O_RDONLY)
            try:
                fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                found[index] = _owner(fd)
            finally:
                os.close(fd)
    return found


def _locked(path: Path, owner: str, index: int) -> int:
    while not is_at(fd := _locked_once(path, index), path):
        os.close(fd)
    os.ftruncate(fd, 0)
    os.pwrite(fd, json.dumps({"owner": owner, "pid": os.getpid()}).encode(), 0)
    return fd


def _locked_once(path: Path, index: int) -> int:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.parent == _SHARED:
        with suppress(PermissionError):
            path.parent.chmod(0o1777)
    try:
        # Where it is another user's, O_CREAT would be refused in a sticky directory.
        fd = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        fd = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        if path.parent == _SHARED and stat.S_IMODE(os.fstat(fd).st_mode) != 0o666:
            with suppress(PermissionError):
                os.fchmod(fd, 0o666)
        # Whoever looks who has it locks it for a moment.
        for _try in range(_TRIES):
            with suppress(BlockingIOError):
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            time.sleep(_AGAIN_S)
        else:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        who = _owner(fd) or "another run"
        os.close(fd)
        raise DeviceHeld(errno.EBUSY, f"device {index} of {host_name()} is held by {who}") from None
    except BaseException:
        os.close(fd)
        raise
    return fd


def _owner(fd: int) -> str:
    try:
        return str(json.loads(os.pread(fd, 4096, 0))["owner"])
    except (ValueError, KeyError, TypeError):
        return ""
