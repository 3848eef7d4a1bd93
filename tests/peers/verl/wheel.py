"""verl's own word on how it is started: its wheel, without what it depends on, and Hydra beside it.

hydra-core does not go into the project's environment: it pins an antlr4 runtime that others there
cannot use. So both live in a temporary folder, and `compose` runs on nothing else.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.peers.pip import Wheel, pip

ROOT = Path(__file__).resolve().parents[3]
HYDRA = "hydra-core>=1.3,<1.4"
_COMPOSE_WITHIN_S = 120


class Unanswered(Exception):
    """verl's configuration could not be composed at all; the message says where that ended."""


def ask(wheel: Wheel, question: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The answer of `compose` to its question; both are described there.

    Args:
        folder: for hydra-core, and what that needs.

    Raises:
        NoWheel: Hydra cannot be had.
        Unanswered: it failed.
    """
    pip("install", "--target", str(folder), HYDRA)
    # Without `site`, so that what this environment happens to hold changes nothing.
    command = (sys.executable, "-S", "-m", "tests.peers.verl.compose", str(wheel.folder))
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={"PATH": os.environ["PATH"], "PYTHONPATH": f"{folder}:{ROOT}"},
            input=json.dumps(question),
            capture_output=True,
            text=True,
            timeout=_COMPOSE_WITHIN_S,
        )
    except subprocess.TimeoutExpired as late:
        raise Unanswered(f"no answer in {_COMPOSE_WITHIN_S} s") from late
    if done.returncode != 0:
        raise Unanswered(done.stderr[-2000:])
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer
