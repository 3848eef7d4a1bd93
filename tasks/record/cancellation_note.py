"""The note that tells the process of a run why a signal ends the run.

`muster cancel` ends a run without a flow run on the server by a signal. `muster down` and a stopped
worker end their runs by signals, too. A signal has no text, so the reason is first written into a
file of the run.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

#: Name of the file with the reason why a run is cancelled. The file is in the run's directory.
_FILE = "cancelled.txt"
#: Largest number of characters that are read from this file.
_READ_AT_MOST = 1000


def write_note(directory: Path, reason: str) -> None:
    """Write the reason why a run is cancelled into the directory of the run.

    If a note exists already, the note is not changed, because its reason came first. Errors during
    writing are ignored: the cancellation must not fail because of the note.
    """
    with suppress(OSError), (directory / _FILE).open("x", encoding="utf-8") as file:
        file.write(reason)


def take_note(directory: Path) -> str:
    """Return the reason why a run was cancelled, and delete the note with the reason.

    Return an empty string if there is no note. The note is deleted so that a later attempt of the
    run does not show the same reason.
    """
    path = directory / _FILE
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            reason = file.read(_READ_AT_MOST)
    except OSError:
        return ""
    with suppress(OSError):
        path.unlink()
    return reason.strip()
