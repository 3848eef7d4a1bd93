"""A backend's package, without what it depends on: the Python files of its wheel."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

#: vLLM's wheel is some 350 MB.
_PIP_WITHIN_S = 900


class NoPackage(Exception):
    """pip did not get the wheel; the message is pip's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Package:
    """One version of a backend on disk."""

    #: Its Python files, unpacked.
    folder: Path
    version: str
    #: The wheel's name and its checksum.
    source: str


def fetch(backend: str, version: str | None, folder: Path) -> Package:
    """The wheel of a version, or of the newest, in a folder that the caller removes.

    Raises:
        NoPackage: It cannot be had.
    """
    downloads, unpacked = folder / "downloads", folder / "unpacked"
    wanted = f"{backend}=={version}" if version else backend
    command = (
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"),
        *("-q", "--disable-pip-version-check", "--no-input", "-d", str(downloads), wanted),
    )
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PIP_WITHIN_S,
        )
    except subprocess.TimeoutExpired as late:
        raise NoPackage(f"pip download has not ended in {_PIP_WITHIN_S} s") from late
    if done.returncode != 0:
        raise NoPackage(done.stderr.strip()[-2000:])
    (file,) = downloads.glob("*.whl")
    with zipfile.ZipFile(file) as archive:
        archive.extractall(unpacked, [one for one in archive.namelist() if one.endswith(".py")])
    with file.open("rb") as opened:
        checksum = hashlib.file_digest(opened, "sha256").hexdigest()
    found = file.name.split("-")[1]
    return Package(folder=unpacked, version=found, source=f"{file.name}, sha256 {checksum}")
