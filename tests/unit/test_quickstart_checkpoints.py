"""Checkpoints and metrics of the quickstart after a crash and after a resume."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

QUICKSTART = Path(__file__).parents[2] / "deployments" / "quickstart"
sys.path.insert(0, str(QUICKSTART))

from checkpoints import BadCheckpoint, Checkpoint, load, save
from grpo import StepStats, initial_state
from metrics_file import MetricsFile

STATS = StepStats(reward=0.5, entropy=1.0, loss=0.0, clip_fraction=0.0, tokens=9)


def test_killed_writer_leaves_a_checkpoint_that_loads(tmp_path: Path) -> None:
    program = (
        "import sys, numpy as np\n"
        "from dataclasses import replace\n"
        "from pathlib import Path\n"
        "from checkpoints import Checkpoint, save\n"
        "from grpo import initial_state\n"
        "state = initial_state(np.random.default_rng(0))\n"
        "while True:\n"
        "    state = replace(state, step=state.step % 9 + 1)\n"
        "    save(Checkpoint(state=state, rng_state={}), Path(sys.argv[1]))\n"
        "    print(state.step, flush=True)\n"
    )
    writer = subprocess.Popen(
        [sys.executable, "-c", program, tmp_path],
        cwd=QUICKSTART,
        stdout=subprocess.PIPE,
        text=True,
    )
    with writer:
        assert writer.stdout is not None
        for _ in range(20):
            assert writer.stdout.readline()
        writer.send_signal(signal.SIGKILL)

    assert load(tmp_path).state.step in range(1, 10)
    for path in tmp_path.glob("step-*.npz"):
        load(path)


def test_failed_write_keeps_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = initial_state(np.random.default_rng(0))
    save(Checkpoint(state=replace(state, step=1), rng_state={}), tmp_path)

    def fail_with_full_disk(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail_with_full_disk)
    with pytest.raises(OSError, match="No space left"):
        save(Checkpoint(state=replace(state, step=2), rng_state={}), tmp_path)

    assert load(tmp_path).state.step == 1
    assert {entry.name for entry in tmp_path.iterdir()} == {"latest", "step-000001.npz"}


@pytest.mark.parametrize("kept_fraction", [0.0, 0.5])
def test_truncated_checkpoint_is_rejected(tmp_path: Path, kept_fraction: float) -> None:
    state = initial_state(np.random.default_rng(0))
    path = save(Checkpoint(state=state, rng_state={}), tmp_path)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * kept_fraction)])

    with pytest.raises(BadCheckpoint, match="not a checkpoint"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("resumed_step", "last_text", "kept_steps"),
    [
        # A new training (step 0) removes all lines from the metrics file of an earlier training.
        (0, "", []),
        # Steps after the checkpoint are trained again, so their lines in the metrics file are
        # removed.
        (2, "", [1, 2]),
        # The checkpoint contains all trained steps, so no line is removed.
        (4, "", [1, 2, 3, 4]),
        # After a crash of the machine, the last line may be incomplete. An incomplete line is
        # removed.
        (4, '{"step": 5, "at"', [1, 2, 3, 4]),
        # A last line without a newline is removed, because the next line would be appended to this
        # line.
        (5, '{"step": 5}', [1, 2, 3, 4]),
    ],
)
def test_resumed_metrics_continue_after_the_checkpoint(
    tmp_path: Path, resumed_step: int, last_text: str, kept_steps: list[int]
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(f'{{"step": {step}}}\n' for step in (1, 2, 3, 4)) + last_text)

    MetricsFile(path, resumed_step=resumed_step).append(9, STATS)

    steps = [json.loads(line)["step"] for line in path.read_text().splitlines()]
    assert steps == [*kept_steps, 9]
