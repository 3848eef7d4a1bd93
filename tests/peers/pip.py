"""Download the wheels of other projects with pip, without their dependencies, and unpack them."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

#: Time limit of pip in seconds. vLLM's wheel has about 350 MB.
_PIP_WITHIN_S = 900


class NoWheel(Exception):
    """pip could not download a wheel; the message is the error output of pip."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    """A wheel that was downloaded and unpacked."""

    #: Folder of the unpacked wheel.
    folder: Path
    #: Name of the wheel file.
    name: str
    sha256: str

    @property
    def version(self) -> str:
        return self.name.split("-")[1]


def fetch(requirement: str, folder: Path, *, only: str = "") -> Wheel:
    """Download and unpack a wheel into an existing folder. The caller must remove the folder.

    Args:
        requirement: Requirement in the form of pip, such as `verl==0.9.1`.
        folder: Folder for the wheel and its content.
        only: Ending of the names of the files to unpack; an empty string unpacks all files.

    Raises:
        NoWheel: pip could not download the wheel.
    """
    downloads = folder / "downloads"
    unpacked = folder / "unpacked"
    pip("download", "--no-deps", "--only-binary=:all:", "-d", str(downloads), requirement)
    (file,) = downloads.glob("*.whl")
    with zipfile.ZipFile(file) as archive:
        archive.extractall(unpacked, [name for name in archive.namelist() if name.endswith(only)])
    with file.open("rb") as opened:
        checksum = hashlib.file_digest(opened, "sha256").hexdigest()
    return Wheel(folder=unpacked, name=file.name, sha256=checksum)


def pip(*arguments: str) -> None:
    """Run pip with the arguments.

    Raises:
        NoWheel: pip failed or did not end in time.
    """
    command = (sys.executable, "-m", "pip", *arguments, "-q", "--disable-pip-version-check")
    try:
        result = subprocess.run(
            (*command, "--no-input"),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_PIP_WITHIN_S,
        )
    except subprocess.TimeoutExpired as error:
        raise NoWheel(f"pip {arguments[0]} has not ended in {_PIP_WITHIN_S} s") from error
    if result.returncode != 0:
        raise NoWheel(result.stderr.strip()[-2000:])
