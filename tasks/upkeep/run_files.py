"""The files of a run's directory: which are Muster's, which may go, and what names another run."""

from __future__ import annotations

import gzip
import os
import re
import shutil
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path

#: Of a run that is pruned these stay: what it was, and what became of it.
_KEPT = re.compile(r"run\.json|attempt-\d+/spec\.yaml")
#: What Muster itself writes, in the folder of an attempt.
_OWN = re.compile(
    r"attempt-\d+/[^/]*(\.log|\.log\.gz|\.hang\.txt)"
    r"|attempt-\d+/(events\.jsonl|rollout\.jsonl|rollout-plan\.json|submission[^/]*\.json)"
)
_LOG = re.compile(r"attempt-\d+/[^/]*\.log")
_RUN_ID = re.compile(r"[a-z][a-z0-9-]*-(?:ppo|grpo|sft)-\d{8}-\d{6}-[0-9a-f]{4}")


def sizes(directory: Path) -> dict[str, int]:
    """Bytes of every file, by its path within the directory; links are not followed."""
    found = {}
    for folder, names, files in os.walk(directory):
        for name in [*files, *(n for n in names if os.path.islink(os.path.join(folder, n)))]:
            path = os.path.join(folder, name)
            with suppress(OSError):
                found[os.path.relpath(path, directory)] = os.lstat(path).st_size
    return found


def removable(names: Iterable[str], *, outputs: bool) -> list[str]:
    """Those of the paths within a run's directory that a prune removes.

    Args:
        outputs: with what the run's own programs have written.
    """
    return [
        name for name in names if not _KEPT.fullmatch(name) and (outputs or _OWN.fullmatch(name))
    ]


def plain_logs(names: Iterable[str]) -> list[str]:
    """Those that can be compressed."""
    return [name for name in names if _LOG.fullmatch(name)]


def run_ids_in(text: str) -> set[str]:
    """The run ids that stand in it, within paths for example."""
    return set(_RUN_ID.findall(text))


def named_by(directory: Path) -> set[str]:
    """The other runs that a run's record and specs name: it has started from what they left."""
    found: set[str] = set()
    for path in (directory / "run.json", *directory.glob("attempt-*/spec.yaml")):
        with suppress(OSError):
            found |= run_ids_in(path.read_text(encoding="utf-8", errors="replace"))
    return found - {directory.name}


def remove(directory: Path, names: Iterable[str]) -> None:
    """Remove these files, and the folders that are empty then.

    Raises: OSError, the first one; all others were removed even so.
    """
    first: OSError | None = None
    for name in names:
        try:
            (directory / name).unlink(missing_ok=True)
        except OSError as error:
            first = first or error
    for folder in sorted(_folders(directory), reverse=True):
        with suppress(OSError):
            folder.rmdir()
    if first is not None:
        raise first


def compress(path: Path) -> None:
    """Put `path.gz` in place of a file, with its times. Raises: OSError; the file is whole then."""
    draft, packed = path.with_name(f".{path.name}.gz"), path.with_name(f"{path.name}.gz")
    try:
        with path.open("rb") as source, gzip.open(draft, "wb", compresslevel=6) as target:
            shutil.copyfileobj(source, target, 1 << 20)
        shutil.copystat(path, draft)
        draft.replace(packed)
    finally:
        draft.unlink(missing_ok=True)
    path.unlink()


def _folders(directory: Path) -> Iterator[Path]:
    for folder, names, _ in os.walk(directory):
        yield from (Path(folder) / name for name in names)
