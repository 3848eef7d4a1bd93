"""Series of figures by how much is carried, and what of a server they are taken from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from tasks.processes.ports import listeners
from tests.benchmarks.report import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class By:
    """Makes the rows of one step: so many of what is counted."""

    #: `components`, `runs waiting`
    what: str
    count: int

    def row(self, figure: str, values: float | list[float], unit: str, note: str = "") -> Row:
        group = f"{figure}, by {self.what}"
        return Row(
            way=f"{figure}, {self.count:,} {self.what}",
            values=values if isinstance(values, list) else [values],
            unit=unit,
            group=group,
            at=self.count,
            is_detail=True,
            note=note,
        )


def server_pid(api: str) -> int:
    """Of the Prefect server on this machine that answers there."""
    port = urlsplit(api).port
    assert port is not None
    return next(one.pid for one in listeners(port) if one.pid)


def database_mb(home: Path) -> float:
    """Prefect's SQLite database below a folder, with what is not yet folded into it."""
    return sum(path.stat().st_size for path in home.rglob("prefect.db*")) / 1e6
