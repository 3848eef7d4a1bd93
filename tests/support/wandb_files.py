"""Read the files that Weights & Biases writes in offline mode.

A `.wandb` file has the framing of LevelDB's log: blocks of 32768 bytes, with records that have a
header of checksum, length and type. Source: `core/pkg/leveldb/record.go` of wandb. The content of
each record is decoded by wandb's own classes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_BLOCK = 32768
_FILE_HEADER = 7
_RECORD_HEADER = struct.Struct("<IHB")
#: Types of a record in LevelDB's log: a whole record, or the last part of a record.
_FULL = 1
_LAST = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class WandbRun:
    """One run of Weights & Biases, read from its offline file."""

    #: Id of the W&B run.
    id: str
    #: Name that the W&B page shows.
    name: str
    #: Name of the W&B group of the run.
    group: str
    #: W&B's job type of the run: the name of a component.
    job_type: str
    #: One dict for each call of `wandb.log`, in the order of the file. The dict is a mapping from
    #: the name of a metric to its value.
    history: tuple[dict[str, Any], ...]

    @property
    def metrics(self) -> set[str]:
        """Names of the logged metrics, without the names that W&B itself adds."""
        return {name for row in self.history for name in row if not name.startswith("_")}


def read_offline_runs(folder: Path) -> list[WandbRun]:
    """Return the runs below a folder, in the order of their start.

    Empty files are left out: a process that is killed soon after its start leaves an empty file.
    """
    files = sorted(folder.glob("wandb/offline-run-*/*.wandb"))
    return [run for file in files if (run := _read_run(file)) is not None]


def merge_history(runs: Iterable[WandbRun], step: str = "_step") -> list[dict[str, Any]]:
    """Return the metrics history of a run, merged from the W&B runs of its attempts.

    If several attempts have logged the same step, the values of the last attempt are used.

    Args:
        runs: The W&B runs, in the order of their start.
        step: Name of the metric that contains the number of the step.
    """
    rows = {row[step]: row for run in runs for row in run.history}
    return [rows[number] for number in sorted(rows)]


def _read_run(file: Path) -> WandbRun | None:
    from wandb.proto.wandb_internal_pb2 import Record

    run: Any = None
    history = []
    for content in _read_records(file.read_bytes()):
        record = Record()
        record.ParseFromString(content)
        kind = record.WhichOneof("record_type")
        if kind == "run":
            run = record.run
        elif kind == "history":
            history.append(
                {
                    item.key or ".".join(item.nested_key): json.loads(item.value_json)
                    for item in record.history.item
                }
            )
    if run is None:
        return None
    return WandbRun(
        id=run.run_id,
        name=run.display_name,
        group=run.run_group,
        job_type=run.job_type,
        history=tuple(history),
    )


def _read_records(content: bytes) -> Iterator[bytes]:
    """Yield the complete records of a file. A killed process may leave an incomplete record."""
    at = _FILE_HEADER
    parts: list[bytes] = []
    while at + _RECORD_HEADER.size <= len(content):
        left_in_block = _BLOCK - at % _BLOCK
        if left_in_block < _RECORD_HEADER.size:
            at += left_in_block
            continue
        _, length, kind = _RECORD_HEADER.unpack_from(content, at)
        at += _RECORD_HEADER.size
        if kind == 0 or at + length > len(content):
            return
        parts.append(content[at : at + length])
        at += length
        if kind in (_FULL, _LAST):
            yield b"".join(parts)
            parts = []
