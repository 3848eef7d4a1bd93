"""The rank that dies first under a real torchrun is named.

Set `MUSTER_TEST_TORCH_PYTHON` to a Python that has `torch`; otherwise the tests are skipped.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from tasks.processes.attempt import make_failure
from tasks.record.outcome import Exit
from tests.support.supervised_components import free_port

PYTHON = os.environ.get("MUSTER_TEST_TORCH_PYTHON", "")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.thorough,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not PYTHON, reason="MUSTER_TEST_TORCH_PYTHON names no Python with torch"),
]
#: A training of two ranks with gloo. At the fourth step, rank 1 executes the Python code in the
#: first argument, while rank 0 waits for rank 1 in the backward pass.
TRAINING = """
import datetime, os, signal, sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=8))
rank = dist.get_rank()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(4, 4))
for step in range(100):
    if step == 3 and rank == 1:
        exec(sys.argv[1])
    model(torch.ones(2, 4)).sum().backward()
    print("step", step, flush=True)
"""


@pytest.mark.parametrize(
    ("code", "kind", "message"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "UNKNOWN", "was killed by SIGKILL first"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", "RUNTIME_ERROR", "was killed by SIGSEGV first"),
        ("sys.exit(3)", "RUNTIME_ERROR", "ended first, with exit code 3"),
        ("raise ValueError('bad batch')", "USER_ERROR", "ValueError: bad batch"),
    ],
)
def test_rank_that_dies_first_is_named(tmp_path: Path, code: str, kind: str, message: str) -> None:
    script = tmp_path / "training.py"
    script.write_text(TRAINING)
    options = ("--nproc-per-node", "2", "--master-port", str(free_port()))

    done = subprocess.run(
        (PYTHON, "-m", "torch.distributed.run", *options, str(script), code),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=240,
    )
    exit = Exit.from_return_code(done.returncode, 0.0)
    failure = make_failure("trainer", done.stdout, message="it ended", rule="exit", exit=exit)

    assert "it ended: rank 1 (pid " in failure.message
    assert message in failure.message
    assert failure.kind == kind
