"""verl's own word on how it is started: its wheel, without what it depends on, and Hydra beside it.

hydra-core does not go into the project's environment: it pins an antlr4 runtime that others there
cannot use. So both live in a temporary folder, and `compose` runs on nothing else.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[3]
HYDRA = "hydra-core>=1.3,<1.4"
_PIP_WITHIN_S = 300
_COMPOSE_WITHIN_S = 120


class NoWheel(Exception):
    """pip did not get the wheel, or Hydra; the message is pip's own."""


class Unanswered(Exception):
    """verl's configuration could not be composed at all; the message says where that ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    """A version of verl on disk."""

    #: It unpacked.
    folder: Path
    #: hydra-core, and what that needs.
    hydra: Path
    #: Of the wheel's file.
    sha256: str


def fetch(version: str, folder: Path) -> Wheel:
    """The wheel of a version, in a folder that the caller removes.

    Raises:
        NoWheel: it cannot be had.
    """
    downloads, unpacked, hydra = (folder / name for name in ("downloads", "verl", "hydra"))
    _pip("download", "--no-deps", "--only-binary=:all:", "-d", str(downloads), f"verl=={version}")
    _pip("install", "--target", str(hydra), HYDRA)
    (file,) = downloads.glob("verl-*.whl")
    with zipfile.ZipFile(file) as archive:
        archive.extractall(unpacked)
    return Wheel(folder=unpacked, hydra=hydra, sha256=hashlib.sha256(file.read_bytes()).hexdigest())


def ask(wheel: Wheel, question: Mapping[str, Any]) -> dict[str, Any]:
    """The answer of `compose` to its question; both are described there.

    Raises:
        Unanswered: it failed.
    """
    # Without `site`, so that what this environment happens to hold changes nothing.
    command = (sys.executable, "-S", "-m", "tests.peers.verl.compose", str(wheel.folder))
    try:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={"PATH": os.environ["PATH"], "PYTHONPATH": f"{wheel.hydra}:{ROOT}"},
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


def _pip(*arguments: str) -> None:
    command = (sys.executable, "-m", "pip", *arguments, "-q", "--disable-pip-version-check")
    try:
        done = subprocess.run(
            (*command, "--no-input"),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PIP_WITHIN_S,
        )
    except subprocess.TimeoutExpired as late:
        raise NoWheel(f"pip {arguments[0]} has not ended in {_PIP_WITHIN_S} s") from late
    if done.returncode != 0:
        raise NoWheel(done.stderr.strip()[-2000:])
