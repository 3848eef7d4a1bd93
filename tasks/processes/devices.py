"""The GPUs of this machine that Muster may grant, and their leases."""

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

#: Variable with the devices that Muster may grant, for example `0,1,4-7`. On a machine without
#: GPUs, the numbers stand in for GPUs.
MUSTER_GPUS = "MUSTER_GPUS"
#: Prefix of the sockets that represent leases, in the kernel's abstract namespace. The process that
#: holds the socket with a device's name holds the device. Unlike a file, such a socket cannot be
#: replaced or left behind, and it needs no permissions.
_PREFIX = "muster/device/"
#: Time limit in seconds of a question to the driver, which may hang.
_ANSWERS_WITHIN_S = 10.0


class BadDevices(MusterError):
    """A list of devices cannot be read, or names a missing device. Nothing was started."""

    exit_code = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """The accelerators of this machine that Muster may grant."""

    #: Vendor: nvidia, amd or ascend.
    kind: str
    #: Their numbers in the driver, ascending.
    indices: tuple[int, ...]
    #: UUID of each real device, by its number.
    uuids: Mapping[int, str]
    #: Problem of each device that is not granted, by its number.
    problems: Mapping[int, str]

    @staticmethod
    def here() -> Devices:
        """Return the devices of this machine, by MUSTER_GPUS, the driver and this process's
        variables.

        Raises:
            BadDevices: MUSTER_GPUS cannot be read or names a missing GPU.
            OSError: The driver does not answer.
        """
        seen = gpus_seen()
        named = os.environ.get(MUSTER_GPUS)
        if seen["problem"]:
            raise OSError(errno.EIO, f"the GPUs of {host_name()} can't be counted", seen["problem"])
        wanted = None if named is None else parsed(named, MUSTER_GPUS)
        uuids = {gpu["index"]: gpu["uuid"] for gpu in seen["gpus"]}
        problems = {gpu["index"]: gpu["problem"] for gpu in seen["gpus"] if gpu["problem"]}
        if seen["gpus"]:
            if wanted is None:
                wanted = _visible(uuids)
            if missing := [index for index in wanted if index not in uuids]:
                there = f"this machine has {len(uuids)} GPUs: write some of {listed(uuids)}"
                raise BadDevices(f"{MUSTER_GPUS}={named}: there is no GPU {missing[0]}: {there}")
            indices = [index for index in wanted if index not in problems]
        else:
            indices = sorted(wanted or ())
        return Devices(
            kind=kind_here(), indices=tuple(sorted(indices)), uuids=uuids, problems=problems
        )

    def key(self, index: int) -> str:
        """Return the name that represents a device of this machine in leases.

        A real device has the same name for all users, because they share it. A number on a machine
        without GPUs belongs to this home only. Its name depends on the home's secret, so that no
        other user can lease it.

        Raises:
            OSError: The secret can be neither read nor created.
        """
        # A device that has fallen off the bus has no UUID.
        if uuid := self.uuids.get(index):
            return uuid
        stands_in = f"device {host_name()} {index}"
        return hmac.new(port_key(), stands_in.encode(), "sha256").hexdigest()[:32]


def _visible(uuids: Mapping[int, str]) -> tuple[int, ...]:
    """Return the devices that an outer scheduler makes visible to this process.

    If the variable contains numbers, its order is kept.
    """
    written = os.environ.get(*DEVICE_VARIABLES["nvidia"])
    if written is None:
        return tuple(uuids)
    words = [word.strip() for word in written.split(",") if word.strip()]
    by_uuid = {uuid: index for index, uuid in uuids.items()}
    indices = [int(word) if word.isdecimal() else by_uuid.get(word, -1) for word in words]
    return tuple(index for index in indices if index in uuids)


def kind_here() -> str:
    """Return the vendor of this machine's accelerators, by their drivers: nvidia, amd or ascend."""
    if Path("/dev/davinci_manager").exists():
        return "ascend"
    return "amd" if Path("/dev/kfd").exists() and not DRIVER.exists() else "nvidia"


def parsed(text: str, name: str) -> tuple[int, ...]:
    """Return the numbers of a list such as `0,1,4-7`.

    Args:
        text: The list.
        name: Name of the variable, for the error message.

    Raises:
        BadDevices: The list cannot be read.
    """
    indices: list[int] = []
    for part in filter(None, (word.strip() for word in text.split(","))):
        match = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
        if match is None or int(match[2] or match[1]) < int(match[1]):
            raise BadDevices(f"{name}={text}: {part!r} is no device: write {name}=0,1,4-7")
        indices += range(int(match[1]), int(match[2] or match[1]) + 1)
    return tuple(dict.fromkeys(indices))


def listed(indices: Iterable[int]) -> str:
    """Return the numbers as text: `0,1,4`."""
    return ",".join(map(str, indices))


class DeviceHeld(OSError):
    """Another run holds a lease on a device."""


class DeviceLease:
    """Devices of this machine that one run holds.

    The lease ends with `close`, or when this process and all guardians of the run have ended.
    """

    def __init__(self, devices: Devices, indices: Sequence[int], owner: str) -> None:
        """
        Args:
            devices: The devices of this machine.
            indices: Numbers of the devices to lease.
            owner: Id of the flow run, shown to others who want the devices.

        Raises:
            DeviceHeld: Another run holds one of the devices. No device was leased.
            OSError: The devices cannot be leased.
        """
        self.kind = devices.kind
        self.indices = tuple(indices)
        self._sockets: list[socket.socket] = []
        try:
            for index in self.indices:
                key = devices.key(index)
                # The first name excludes other runs. The second shows them the owner.
                for name in (key, f"{key}/{owner}"):
                    self._sockets.append(socket.socket(socket.AF_UNIX))
                    self._sockets[-1].bind(f"\0{_PREFIX}{name}")
            kept_fds.update(lease.fileno() for lease in self._sockets)
        except OSError as error:
            self.close()
            if error.errno != errno.EADDRINUSE:
                raise
            who = leased(devices).get(index) or "another run"
            problem = f"device {index} of {host_name()} is held by {who}"
            raise DeviceHeld(errno.EBUSY, problem) from None

    def why_unfit(self) -> str:
        """Return the reason why the driver cannot use the devices now; empty if it can."""
        answers: list[str] = []

        def ask() -> None:
            try:
                here = Devices.here()
            except (OSError, BadDevices) as error:
                answers.append(str(error))
                return
            # Without a driver, numbers from MUSTER_GPUS or the pool's table stand in for GPUs.
            unfit = [index for index in self.indices if here.uuids and index not in here.indices]
            answers.append(f"{host_name()} shows no fit GPU {listed(unfit)}" if unfit else "")

        thread = threading.Thread(target=ask, name="devices", daemon=True)
        thread.start()
        thread.join(_ANSWERS_WITHIN_S)
        silent = f"the driver of {host_name()} is silent for {_ANSWERS_WITHIN_S:g} s"
        return answers[0] if answers else silent

    def close(self) -> None:
        """Give the devices back. May be called any number of times."""
        for lease in self._sockets:
            kept_fds.discard(lease.fileno())
            lease.close()
        self._sockets.clear()


def leased(devices: Devices) -> dict[int, str]:
    """Return the owner of each leased device, by its number."""
    owners: dict[str, str] = {}
    for line in Path("/proc/net/unix").read_text("utf-8", "replace").splitlines():
        _, is_lease, name = line.partition(f" @{_PREFIX}")
        key, _, owner = name.partition("/")
        if is_lease:
            owners[key] = owner or owners.get(key, "")
    keys = {index: devices.key(index) for index in devices.indices}
    return {index: owners[key] for index, key in keys.items() if key in owners}
