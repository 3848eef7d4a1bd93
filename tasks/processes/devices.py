"""The GPUs of this machine: which of them Muster may give, and who has them."""

from __future__ import annotations

import errno
import hmac
import os
import re
import socket
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tasks.processes.guarded import kept_fds
from tasks.processes.identity import host_name
from tasks.processes.machine import DRIVER, gpus_seen
from tasks.processes.ports import port_key
from tasks.spec.errors import MusterError
from tasks.spec.run_rules import DEVICE_VARIABLES

#: Which devices Muster may give, `0,1,4-7`; it stands in for GPUs where there are none.
MUSTER_GPUS = "MUSTER_GPUS"
#: Whoever has a socket of the name of a device, in the kernel's abstract namespace, has the device.
#: That can't be replaced or left behind as a file can, and asks for no right of a user.
_PREFIX = "muster/device/"
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

    def key(self, index: int) -> str:
        """The name of a device on this machine, by which it is leased.

        A real device has the same name for all users, who share it. A number that stands in for a
        device belongs to this home alone: its name depends on the home's secret, so that no other
        user can lease it.

        Raises: OSError, if the secret can be neither read nor made.
        """
        # One that has fallen off the bus has none.
        if uuid := self.uuids.get(index):
            return uuid
        stands_in = f"device {host_name()} {index}"
        return hmac.new(port_key(), stands_in.encode(), "sha256").hexdigest()[:32]


def _visible(uuids: Mapping[int, str]) -> tuple[int, ...]:
    """What an outer scheduler lets this process see; by its order where it is numbers."""
    written = os.environ.get(*DEVICE_VARIABLES["nvidia"])
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
        self._sockets: list[socket.socket] = []
        try:
            for index in self.indices:
                key = devices.key(index)
                # The first keeps others out, the second says whom to ask.
                for name in (key, f"{key}/{owner}"):
                    self._sockets.append(socket.socket(socket.AF_UNIX))
                    self._sockets[-1].bind(f"\0{_PREFIX}{name}")
            kept_fds.update(one.fileno() for one in self._sockets)
        except OSError as error:
            self.close()
            if error.errno != errno.EADDRINUSE:
                raise
            who = leased(devices).get(index) or "another run"
            problem = f"device {index} of {host_name()} is held by {who}"
            raise DeviceHeld(errno.EBUSY, problem) from None

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
        for one in self._sockets:
            kept_fds.discard(one.fileno())
            one.close()
        self._sockets.clear()


def leased(devices: Devices) -> dict[int, str]:
    """`owner[index]` of the devices that somebody has."""
    owners: dict[str, str] = {}
    for line in Path("/proc/net/unix").read_text("utf-8", "replace").splitlines():
        _, is_lease, name = line.partition(f" @{_PREFIX}")
        key, _, owner = name.partition("/")
        if is_lease:
            owners[key] = owner or owners.get(key, "")
    keys = {index: devices.key(index) for index in devices.indices}
    return {index: owners[key] for index, key in keys.items() if key in owners}
