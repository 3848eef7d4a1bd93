"""Write the metrics file of a training: one JSON object per line, one line per step."""

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
    """A metrics file with one line per step, in the order of the steps, even after a resume."""

    def __init__(
        self, path: Path, *, resumed_step: int, clock: Callable[[], float] = time.time
    ) -> None:
        """Open the file and remove the lines of all steps after `resumed_step`.

        These steps will be trained again, because the checkpoint does not contain their weights.

        Args:
            resumed_step: Step of the checkpoint from which the training resumes, or 0.

        Raises:
            OSError: The file cannot be written.
        """
        kept_lines = _read_lines_up_to(resumed_step, path) if path.exists() else []
        replace_file(path, b"".join(kept_lines))
        self._descriptor = os.open(path, os.O_WRONLY | os.O_APPEND)
        self._clock = clock

    def append(self, step: int, stats: StepStats, took: Mapping[str, float] | None = None) -> None:
        """Append the line of a step. When this method returns, other processes can read the line.

        Args:
            step: Number of the step. The first step is 1.
            stats: Metrics of the step.
            took: Mapping from the name of a metric to a duration in seconds, or None.
        """
        metrics = {"step": step, "at": round(self._clock(), 3), **asdict(stats), **(took or {})}
        line = json.dumps(metrics)
        # Write the whole line at once, so that readers never see only a part of the line.
        os.write(self._descriptor, f"{line}\n".encode())

    def close(self) -> None:
        os.close(self._descriptor)


def _read_lines_up_to(step: int, path: Path) -> list[bytes]:
    """Return the lines of the metrics file up to a step, or up to the first invalid line."""
    lines: list[bytes] = []
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            if not line.endswith(b"\n") or json.loads(line)["step"] > step:
                break
        except (ValueError, KeyError, TypeError):
            break
        lines.append(line)
    return lines
