"""Connect simulated hosts, which have their own networks, to this machine.

A cable is a pair of virtual network devices (veth). The machine has the same address on all cables,
so that every host reaches a server of the machine with the same URL.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

#: First three bytes of the IPv4 addresses of this machine and of the simulated hosts. RFC 2544
#: reserves this range of addresses for benchmarks.
_NET = "198.18.77"
#: Address of this machine in each pair of virtual network devices. Each pair connects this machine
#: to one simulated host.
HERE = f"{_NET}.1"
#: Time limit of one network command, in seconds.
_COMMAND_TIMEOUT_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkLink:
    """A pair of virtual network devices that connects this machine to one simulated host."""

    #: Name of the network device on this machine.
    near: str
    #: Name of the simulated host's network device. `move_into_namespace` moves the device from the
    #: network of this machine into the network of the host.
    far: str
    #: Address of the host.
    address: str

    def move_into_namespace(self, pid: int) -> None:
        """Move the device `far` into the network namespace of a process, and configure the device.

        In the namespace, the device `far` gets the address of the simulated host, and the loopback
        device `lo` is switched on.
        """
        _run_command("ip", "link", "set", self.far, "netns", str(pid))
        for command in (
            ("ip", "link", "set", "lo", "up"),
            ("ip", "addr", "add", self.address, "peer", f"{HERE}/32", "dev", self.far),
            ("ip", "link", "set", self.far, "up"),
        ):
            _run_command("nsenter", f"--net=/proc/{pid}/ns/net", *command)


def explain_missing_networks() -> str:
    """Return the reason why simulated hosts cannot have their own networks on this machine.

    An empty string means that the hosts can have their own networks.
    """
    if os.geteuid() != 0:
        return "only root can create a network for each simulated host"
    try:
        _run_command(
            "unshare",
            "--net",
            "ip",
            "link",
            "add",
            "near",
            "type",
            "veth",
            "peer",
            "name",
            "far",
        )
    except (OSError, AssertionError) as error:
        return f"no network namespaces with cables (veth) between them can be made: {error}"
    return ""


@contextmanager
def cables(count: int) -> Iterator[list[NetworkLink]]:
    """Create one pair of virtual network devices (veth) per host, and delete the pairs at the end.

    In each pair, the device on this machine has the address `HERE`.
    """
    created: list[NetworkLink] = []
    try:
        for number in range(count):
            # The kernel allows at most 15 characters in the name of a network device.
            name = f"mu{os.getpid()}{'abcdefgh'[number]}"
            cable = NetworkLink(near=name, far=f"{name}f", address=f"{_NET}.{number + 2}")
            _run_command("ip", "link", "add", cable.near, "type", "veth", "peer", "name", cable.far)
            created.append(cable)
            peer = f"{cable.address}/32"
            _run_command("ip", "addr", "add", HERE, "peer", peer, "dev", cable.near)
            _run_command("ip", "link", "set", cable.near, "up")
        yield created
    finally:
        for cable in created:
            # `ip` fails if the pair of devices no longer exists. The kernel deletes the pair
            # together with the network namespace of the host.
            subprocess.run(("ip", "link", "del", cable.near), stderr=subprocess.DEVNULL)


def _run_command(*command: str) -> None:
    """Run a command.

    Raises:
        AssertionError: The command failed.
    """
    result = subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_TIMEOUT_S)
    if result.returncode != 0:
        shown = " ".join(command)
        raise AssertionError(f"{shown} exited {result.returncode}: {result.stderr.strip()}")
