"""Read the traceback of the first failed rank from the error file of torchrun.

torchrun copies the error of the rank that failed first into the file that the environment variable
TORCHELASTIC_ERROR_FILE names. A rank reports its error only if the main function of its script has
the decorator `torch.distributed.elastic.multiprocessing.errors.record`.
Source: torch/distributed/elastic/multiprocessing/errors/error_handler.py.
"""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import replace
from pathlib import Path

from tasks.processes.guarded import Command

_VARIABLE = "TORCHELASTIC_ERROR_FILE"
#: Matches the command line of a launcher that uses torchrun.
_LAUNCHER = re.compile(r"\btorchrun\b|\btorch\.distributed\.(?:run|launch)\b|\baccelerate\b")
#: Largest number of characters of an error file that are read.
_READ_AT_MOST = 1 << 20


class ErrorFile:
    """The error file of a component whose command is torchrun or accelerate."""

    def __init__(self, command: Command) -> None:
        #: Path of the file; None if the component is another program.
        self._path: Path | None = None
        #: True if Muster has chosen the path.
        self._is_own = False
        #: Time of the last change before the launch in nanoseconds; None if there was no file.
        self._changed_before_ns: int | None = None
        if _VARIABLE in command.env:
            self._path = command.cwd / command.env[_VARIABLE]
        elif _LAUNCHER.search(" ".join(command.argv)):
            self._path = command.log.with_suffix(".error.json")
            self._is_own = True

    def prepare(self, command: Command) -> Command:
        """Return the command with the environment variable, after an old file was removed.

        A variable that the spec sets stays unchanged, and the file that it names is not removed.
        """
        self._changed_before_ns = self._read_change_time()
        if self._path is None or not self._is_own:
            return command
        with contextlib.suppress(OSError):
            self._path.unlink()
        return replace(command, env={**command.env, _VARIABLE: str(self._path)})

    def read_traceback(self) -> str:
        """Return the traceback of the rank that failed first, or an empty string if unknown."""
        if self._path is None or self._read_change_time() == self._changed_before_ns:
            return ""
        try:
            with self._path.open(encoding="utf-8", errors="replace") as f:
                content = json.loads(f.read(_READ_AT_MOST))
        except (OSError, ValueError):
            return ""
        message = content.get("message") if isinstance(content, dict) else None
        if not isinstance(message, dict):
            return message if isinstance(message, str) else ""
        extra = message.get("extraInfo")
        traceback = extra.get("py_callstack") if isinstance(extra, dict) else None
        text = traceback or message.get("message")
        return text if isinstance(text, str) else ""

    def _read_change_time(self) -> int | None:
        with contextlib.suppress(OSError):
            return self._path.stat().st_mtime_ns if self._path is not None else None
        return None
