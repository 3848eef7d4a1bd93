"""Wheels of the peers, got by pip without what they depend on, and unpacked."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

#: vLLM's wheel is some 350 MB.
_PIP_WITHIN_S = 900


class NoWheel(Exception):
    """pip did not get a wheel; the message is pip's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    """One version of a package on disk."""

    #: It unpacked.
    folder: Path
    #: The name of the wheel's file.
    name: str
    sha256: str

    @property
    def version(self) -> str:
        return self.name.split("-")[1]


def fetch(requirement: str, folder: Path, *, only: str = "") -> Wheel:
    """A wheel, in a folder that the caller removes.

    Args:
        requirement: as pip has it: `verl==0.9.1`.
        only: what the names of the files end with that are unpacked; empty: all are.

    Raises:
        NoWheel: it cannot be had.
    """
    downloads, unpacked = folder / "downloads", folder / "unpacked"
    pip("download", "--no-deps", "--only-binary=:all:", "-d", str(downloads), requirement)
    (file,) = downloads.glob("*.whl")
    with zipfile.ZipFile(file) as archive:
        archive.extractall(unpacked, [one for one in archive.namelist() if one.endswith(only)])
    with file.open("rb") as opened:
        checksum = hashlib.file_digest(opened, "sha256").hexdigest()
    return Wheel(folder=unpacked, name=file.name, sha256=checksum)


def pip(*arguments: str) -> None:
    """Raises: NoWheel."""
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
