"""The run's figures, a JSON object a line and a line a step."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

from atomic_file import replace_file
from grpo import StepStats


class MetricsFile:
    """Holds each trained step once, in order, however often training was resumed."""

    def __init__(
        self, path: Path, *, resumed_step: int, clock: Callable[[], float] = time.time
    ) -> None:
        """Opens `path` with the steps up to `resumed_step` that it holds.

        Later ones were trained by weights that are gone and will be trained again.

        Raises:
            OSError: the file cannot be written.
        """
        kept = _lines_up_to(resumed_step, path) if path.exists() else []
        replace_file(path, b"".join(kept))
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
        self._clock = clock

    def append(self, step: int, stats: StepStats, took: Mapping[str, float] | None = None) -> None:
        """Add the line of `step`, counted from 1; whoever reads the file has it from here on.

        Args:
            took: seconds, by the name of what took them.
        """
        figures = {"step": step, "at": round(self._clock(), 3), **asdict(stats), **(took or {})}
        line = json.dumps(figures)
        # One write, so that a reader sees a whole line.
        os.write(self._descriptor, f"{line}\n".encode())

    def close(self) -> None:
        os.close(self._descriptor)


def _lines_up_to(step: int, path: Path) -> list[bytes]:
    kept: list[bytes] = []
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            if not line.endswith(b"\n") or json.loads(line)["step"] > step:
                break
        except (ValueError, KeyError, TypeError):
            break
        kept.append(line)
    return kept
