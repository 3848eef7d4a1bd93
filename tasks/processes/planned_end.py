"""Find out when a machine will end the processes of a run, for example for maintenance."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

#: File in which systemd describes the scheduled shutdown of this machine.
#: Source: systemd, src/login/logind-dbus.c, SHUTDOWN_SCHEDULE_FILE.
_SCHEDULE = Path("/run/systemd/shutdown/scheduled")
#: Values of the key MODE in systemd's file about the scheduled shutdown. With these values, the
#: shutdown ends all processes of the machine.
_ENDING_MODES = frozenset({"poweroff", "reboot", "halt", "kexec", "soft-reboot"})


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedEnd:
    """A known future time at which a component will be ended by its machine, and not by Muster."""

    #: Time at which the processes will be ended, in UTC epoch seconds.
    at: float
    #: Reason why the processes will be ended, in one line for the user, such as a shutdown of the
    #: machine.
    reason: str


def read_scheduled_shutdown(schedule: Path = _SCHEDULE) -> PlannedEnd | None:
    """Return the shutdown of this machine that `shutdown -h TIME` or `shutdown -r TIME` scheduled.

    Args:
        schedule: File of systemd with the lines `USEC=MICROSECONDS` and `MODE=MODE`.

    Returns:
        None if no shutdown is scheduled, or if the file cannot be read.
    """
    try:
        lines = schedule.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    values = {name: value for name, _, value in (line.partition("=") for line in lines)}
    microseconds = values.get("USEC", "")
    mode = values.get("MODE", "")
    if not microseconds.isdecimal() or mode not in _ENDING_MODES:
        return None
    return PlannedEnd(at=int(microseconds) / 1e6, reason=f"this machine has a scheduled {mode}")
