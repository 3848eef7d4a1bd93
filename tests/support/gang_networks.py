"""Cables between this machine and hosts with a network of their own, on this machine.

The machine has one address on all of them, so that one URL of its server is good on every host.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

#: Of a range for benchmarks between networks, which leads nowhere else. Source: RFC 2544.
_NET = "198.18.77"
HERE = f"{_NET}.1"
_WITHIN_S = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Cable:
    """From this machine to one host."""

    #: The ends' names, of which the far one moves into the host's network.
    near: str
    far: str
    #: The host's address.
    address: str

    def plug_into(self, pid: int) -> None:
        """Give the network of that process its end, an address, and a loopback."""
        _do("ip", "link", "set", self.far, "netns", str(pid))
        for command in (
            ("ip", "link", "set", "lo", "up"),
            ("ip", "addr", "add", self.address, "peer", f"{HERE}/32", "dev", self.far),
            ("ip", "link", "set", self.far, "up"),
        ):
            _do("nsenter", f"--net=/proc/{pid}/ns/net", *command)


def why_no_networks() -> str:
    """Why no host can have a network of its own; empty where it can."""
    if os.geteuid() != 0:
        return "a network of its own for each host takes root"
    try:
        _do("unshare", "--net", "ip", "link", "add", "near", "type", "veth", "peer", "name", "far")
    except (OSError, AssertionError) as error:
        return f"no network namespaces with cables (veth) between them can be made: {error}"
    return ""


@contextmanager
def cables(count: int) -> Iterator[list[Cable]]:
    """Laid on this machine, where each has the address `HERE`; all of them gone afterwards."""
    laid: list[Cable] = []
    try:
        for number in range(count):
            # A name may have 15 characters.
            name = f"mu{os.getpid()}{'abcdefgh'[number]}"
            cable = Cable(near=name, far=f"{name}f", address=f"{_NET}.{number + 2}")
            _do("ip", "link", "add", cable.near, "type", "veth", "peer", "name", cable.far)
            laid.append(cable)
            _do("ip", "addr", "add", HERE, "peer", f"{cable.address}/32", "dev", cable.near)
            _do("ip", "link", "set", cable.near, "up")
        yield laid
    finally:
        for cable in laid:
            # Gone already where the host's network has gone.
            subprocess.run(("ip", "link", "del", cable.near), stderr=subprocess.DEVNULL)


def _do(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=_WITHIN_S)
    if done.returncode != 0:
        raise AssertionError(f"{' '.join(command)} exited {done.returncode}: {done.stderr.strip()}")
