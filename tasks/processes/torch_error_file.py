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
#: Matches a command line that starts torchrun, or starts accelerate, which uses torchrun.
_LAUNCHER = re.compile(r"\btorchrun\b|\btorch\.distributed\.(?:run|launch)\b|\baccelerate\b")
#: Largest number of characters of an error file that are read.
_READ_AT_MOST = 1 << 20


class ErrorFile:
    """The file in which torchrun reports the error of a component's first failed rank.

    Launchers that use torchrun, such as accelerate, write this file, too. A component with another
    command has no error file.
    """

    def __init__(self, command: Command) -> None:
        #: Path of the error file; None if the component has no error file.
        self._path: Path | None = None
        #: True if Muster has chosen the path of the error file. False if the spec sets the path.
        self._is_own = False
        #: Modification time (`st_mtime_ns`) of the error file before the launch of the component.
        #: A file that still has this time contains an older error. None if there was no file.
        self._changed_before_ns: int | None = None
        if _VARIABLE in command.env:
            self._path = command.cwd / command.env[_VARIABLE]
        elif _LAUNCHER.search(" ".join(command.argv)):
            self._path = command.log.with_suffix(".error.json")
            self._is_own = True

    def prepare(self, command: Command) -> Command:
        """Set the variable TORCHELASTIC_ERROR_FILE for a command, and return the new command.

        An error file of an earlier process is removed. If the spec sets the variable, the command
        stays unchanged, and the file that the variable names is not removed.
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
