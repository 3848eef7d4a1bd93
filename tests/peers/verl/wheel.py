"""Let verl itself check run specs, with only the wheel of verl and Hydra installed.

hydra-core cannot be installed into the project's environment, because its version of the antlr4
runtime conflicts with other packages there. So verl and Hydra are unpacked into a temporary folder,
and `compose` runs with only these packages.
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
    """verl's configuration could not be composed; the message contains the reason."""


def ask(wheel: Wheel, question: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Run the module `compose` on a wheel of verl, and return its answer to a question.

    The docstring of `compose` describes the formats of the question and the answer.

    Args:
        wheel: Unpacked wheel of verl.
        question: Question for `compose`.
        folder: Folder for hydra-core and its dependencies.

    Raises:
        NoWheel: pip could not download Hydra.
        Unanswered: `compose` failed or did not end in time.
    """
    pip("install", "--target", str(folder), HYDRA)
    # `-S` switches the module `site` off, so that the new process cannot import the packages of
    # this environment.
    command = (sys.executable, "-S", "-m", "tests.peers.verl.compose", str(wheel.folder))
    try:
        result = subprocess.run(
            command,
            cwd=ROOT,
            env={"PATH": os.environ["PATH"], "PYTHONPATH": f"{folder}:{ROOT}"},
            input=json.dumps(question),
            capture_output=True,
            text=True,
            timeout=_COMPOSE_WITHIN_S,
        )
    except subprocess.TimeoutExpired as error:
        raise Unanswered(f"no answer in {_COMPOSE_WITHIN_S} s") from error
    if result.returncode != 0:
        raise Unanswered(result.stderr[-2000:])
    answer: dict[str, Any] = json.loads(result.stdout)
    return answer
