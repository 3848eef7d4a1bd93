"""The GPUs of this machine that Muster may grant to runs, and the leases that runs hold on them."""

from __future__ import annotations

import errno
import hmac
import os
import socket
import threading
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tasks.processes.guarded import kept_fds
from tasks.processes.identity import host_name
from tasks.processes.machine import DRIVER, read_gpus
from tasks.processes.ports import port_key
from tasks.spec.errors import MusterError
from tasks.spec.own_settings import GPUS, parse_device_numbers
from tasks.spec.run_rules import DEVICE_VARIABLES

#: Environment variable with the numbers of the GPUs that Muster may grant, for example `0,1,4-7`.
#: On a machine without GPUs, Muster treats each number as if it were a GPU.
MUSTER_GPUS = GPUS.name
#: Prefix of the names of the Unix sockets that represent leases on devices. The sockets are in the
#: kernel's abstract namespace. Unlike a lock file, such a socket vanishes with its process, and no
#: other user can replace it.
_PREFIX = "muster/device/"
#: Seconds to wait for an answer of the GPU driver, which may hang.
_ANSWERS_WITHIN_S = 10.0


class BadDevices(MusterError):
    """A list of devices is malformed, or names a device that this machine does not have.

    The error is raised before the run starts.
    """

    exit_code = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """The accelerators of this machine that Muster may grant."""

    #: Vendor of the devices: nvidia, amd or ascend.
    kind: str
    #: Indices of the devices that Muster may grant, in the numbering of the GPU driver, in
    #: ascending order.
    indices: tuple[int, ...]
    #: Mapping from device number to UUID, for all devices that the GPU driver reports. Empty on a
    #: machine without GPUs.
    uuids: Mapping[int, str]
    #: Mapping from device number to the reason why the device must not be granted.
    problems: Mapping[int, str]

    @staticmethod
    def here() -> Devices:
        """Return the devices of this machine that Muster may grant.

        The GPU driver reports the GPUs of the machine. Environment variables change the result:

        - If MUSTER_GPUS is set, only the GPUs in MUSTER_GPUS are returned.
        - Otherwise, if CUDA_VISIBLE_DEVICES is set, only the GPUs in that variable are returned.
        - On a machine without GPUs, each number in MUSTER_GPUS counts as a device.

        Raises:
            BadDevices: MUSTER_GPUS is malformed or names a missing GPU.
            OSError: The driver does not answer.
        """
        gpu_state = read_gpus()
        named = os.environ.get(MUSTER_GPUS)
        if gpu_state["problem"]:
            raise OSError(
                errno.EIO, f"the GPUs of {host_name()} can't be counted", gpu_state["problem"]
            )
        wanted = None if named is None else parse_devices(named, MUSTER_GPUS)
        uuids = {gpu["index"]: gpu["uuid"] for gpu in gpu_state["gpus"]}
        problems = {gpu["index"]: gpu["problem"] for gpu in gpu_state["gpus"] if gpu["problem"]}
        if gpu_state["gpus"]:
            if wanted is None:
                wanted = _list_visible_gpus(uuids)
            if missing := [index for index in wanted if index not in uuids]:
                raise BadDevices(
                    f"{MUSTER_GPUS}={named} names GPU {missing[0]}, which does not exist. This "
                    f"machine has {len(uuids)} GPUs: choose from {format_devices(uuids)}."
                )
            indices = [index for index in wanted if index not in problems]
        else:
            indices = sorted(wanted or ())
        return Devices(
            kind=kind_here(), indices=tuple(sorted(indices)), uuids=uuids, problems=problems
        )

    def key(self, index: int) -> str:
        """Return the name of the socket that represents a lease on a device.

        The name for a GPU is its UUID, which is the same for all users of the machine. If the
        device has no known UUID, for example on a machine without GPUs, the name is derived from
        the secret of this MUSTER_HOME, so that no other user can guess the name.

        Args:
            index: Number of the device.

        Raises:
            OSError: The secret can be neither read nor created.
        """
        # The GPU driver reports no UUID for a GPU that has fallen off the bus. Derive the key of
        # such a GPU from its number.
        if uuid := self.uuids.get(index):
            return uuid
        stands_in = f"device {host_name()} {index}"
        return hmac.new(port_key(), stands_in.encode(), "sha256").hexdigest()[:32]


def _list_visible_gpus(uuids: Mapping[int, str]) -> tuple[int, ...]:
    """Return the numbers of the GPUs that CUDA_VISIBLE_DEVICES lists; all GPUs if it is not set.

    An outer scheduler such as Slurm sets this variable. The order of the GPUs in the variable is
    kept.

    Args:
        uuids: Mapping from the number of each GPU to its UUID.
    """
    written = os.environ.get(*DEVICE_VARIABLES["nvidia"])
    if written is None:
        return tuple(uuids)
    words = [word.strip() for word in written.split(",") if word.strip()]
    by_uuid = {uuid: index for index, uuid in uuids.items()}
    indices = [int(word) if word.isdecimal() else by_uuid.get(word, -1) for word in words]
    return tuple(index for index in indices if index in uuids)


def kind_here() -> str:
    """Return the vendor of this machine's accelerators: nvidia, amd or ascend.

    The loaded driver shows the vendor. Without a driver, the result is nvidia.
    """
    if Path("/dev/davinci_manager").exists():
        return "ascend"
    return "amd" if Path("/dev/kfd").exists() and not DRIVER.exists() else "nvidia"


def parse_devices(text: str, name: str) -> tuple[int, ...]:
    """Parse a list of device numbers such as `0,1,4-7`, and return the numbers.

    Args:
        text: The list.
        name: Name of the environment variable that contains the list, for the error message.

    Raises:
        BadDevices: The list is malformed.
    """
    try:
        return parse_device_numbers(text)
    except ValueError as error:
        raise BadDevices(f"{name}={text}: {error}") from None


def format_devices(indices: Iterable[int]) -> str:
    """Return device numbers as a text such as `0,1,4`."""
    return ",".join(map(str, indices))


class DeviceHeld(OSError):
    """Another run holds a lease on a device."""


class DeviceLease:
    """A lease of one run on devices of this machine.

    The lease ends with `close`. Without `close`, the lease ends when this process and all guardian
    processes of the run's components have ended.
    """

    def __init__(self, devices: Devices, indices: Sequence[int], owner: str) -> None:
        """
        Args:
            devices: The devices of this machine.
            indices: Numbers of the devices to lease.
            owner: Id of the flow run. Another run that cannot get a device shows this id in its
                error message.

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
                # Only one socket can have the name `key`. So while this socket exists, no other run
                # can lease the device. The name of the second socket contains the owner, so that
                # other runs can read the owner.
                for name in (key, f"{key}/{owner}"):
                    self._sockets.append(socket.socket(socket.AF_UNIX))
                    self._sockets[-1].bind(f"\0{_PREFIX}{name}")
            kept_fds.update(lease.fileno() for lease in self._sockets)
        except OSError as error:
            self.close()
            if error.errno != errno.EADDRINUSE:
                raise
            who = read_leases(devices).get(index) or "another run"
            problem = f"device {index} of {host_name()} is already in use by {who}"
            raise DeviceHeld(errno.EBUSY, problem) from None

    def why_unfit(self) -> str:
        """Return the reason why the leased devices cannot be used now; empty if they can be used.

        The GPU driver is asked in another thread, because the driver may hang.
        """
        answers: list[str] = []

        def ask() -> None:
            try:
                here = Devices.here()
            except (OSError, BadDevices) as error:
                answers.append(str(error))
                return
            # On a machine without GPUs, the leased device numbers come from MUSTER_GPUS or from the
            # work pool's settings. No physical device belongs to such a number, so there is no
            # device that could be unhealthy.
            unfit = [index for index in self.indices if here.uuids and index not in here.indices]
            problem = f"GPU {format_devices(unfit)} of {host_name()} is missing or unhealthy"
            answers.append(problem if unfit else "")

        thread = threading.Thread(target=ask, name="devices", daemon=True)
        thread.start()
        thread.join(_ANSWERS_WITHIN_S)
        no_answer = f"the GPU driver of {host_name()} did not answer within {_ANSWERS_WITHIN_S:g} s"
        return answers[0] if answers else no_answer

    def close(self) -> None:
        """End the lease, so that other runs can lease the devices. May be called repeatedly."""
        for lease in self._sockets:
            kept_fds.discard(lease.fileno())
            lease.close()
        self._sockets.clear()


def read_leases(devices: Devices) -> dict[int, str]:
    """Return a mapping from device number to the owner of the lease, for all leased devices.

    The owner is the id of a flow run, or an empty string if unknown.
    """
    owners: dict[str, str] = {}
    for line in Path("/proc/net/unix").read_text("utf-8", "replace").splitlines():
        _, is_lease, name = line.partition(f" @{_PREFIX}")
        key, _, owner = name.partition("/")
        if is_lease:
            owners[key] = owner or owners.get(key, "")
    keys = {index: devices.key(index) for index in devices.indices}
    return {index: owners[key] for index, key in keys.items() if key in owners}
