"""What the process of a fleet says: brought into the run's events, and put into words."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import Callable
from pathlib import Path

from tasks.spec.run import FLEET

_log = logging.getLogger(__name__)

_LOOK_EVERY_S = 0.1
#: Names of ours, which a field of the fleet's can't have beside them.
_TAKEN = frozenset({"at", "event", "name", "component"})


class FleetTail:
    """Tells the run what the fleet's process writes to its file, a JSON object a line.

    Looks from a thread of its own, from `start` to `close`, which brings in what is left. A file
    that is not there yet, or a line that is none, costs a warning at most.
    """

    def __init__(self, path: Path, emit: Callable[..., None]) -> None:
        """
        Args:
            emit: `EventLog.emit` of the run.
        """
        self._path = path
        self._emit = emit
        self._read_bytes = 0
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="fleet-tail", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Once the process has ended; any number of times."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()

    def look(self) -> None:
        """Tell the lines that were completed since the last look."""
        try:
            with self._path.open("rb") as f:
                f.seek(self._read_bytes)
                whole, end, _ = f.read().rpartition(b"\n")
        except FileNotFoundError:
            return
        except OSError as error:
            _log.warning("%s can't be read: %s", self._path, error)
            return
        # Before they are told: a line that can't be is not told again and again.
        self._read_bytes += len(whole) + len(end)
        for line in whole.splitlines():
            self._tell(line)

    def _follow(self) -> None:
        is_last = False
        while not is_last:
            # Asked first, so that what was written before the end is looked at after it.
            is_last = self._closing.wait(_LOOK_EVERY_S)
            try:
                self.look()
            except Exception:
                _log.exception("%s: events of the fleet are lost", self._path)

    def _tell(self, line: bytes) -> None:
        try:
            content = json.loads(line)
            name, at = str(content["event"]), float(content["at"])
        except (ValueError, KeyError, TypeError) as error:
            _log.warning("%s: not an event: %r: %r", self._path, line[:200], error)
            return
        fields = {key: value for key, value in content.items() if key not in _TAKEN}
        self._emit(name, FLEET, at=at, **fields)
