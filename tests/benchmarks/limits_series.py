"""Rows of a series of figures, and measurements of a Prefect server."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from tasks.processes.ports import listeners
from tests.benchmarks.report import Row


@dataclass(frozen=True, slots=True, kw_only=True)
class By:
    """Load during a measurement, for example a run with 100 components.

    A benchmark measures the same quantities at several loads. `row` returns the row of the results
    for one quantity at this load.
    """

    #: Kind of load, for example "components" or "runs waiting".
    what: str
    #: Size of the load, for example the number of components.
    count: int

    def row(self, figure: str, values: float | list[float], unit: str, note: str = "") -> Row:
        """Return the row of the results for a quantity, measured at the load that `self` describes.

        Args:
            figure: Name of the quantity, for example "gateway, RSS".
            values: Measured value or values.
            unit: Unit of the values.
            note: Explanation that a reader needs to understand the values.
        """
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
    """Return the process id of the Prefect server on this machine with this API URL."""
    port = urlsplit(api).port
    assert port is not None
    return next(listener.pid for listener in listeners(port) if listener.pid)


def database_mb(home: Path) -> float:
    """Return the size of Prefect's SQLite database below a folder, with its journal, in MB."""
    return sum(path.stat().st_size for path in home.rglob("prefect.db*")) / 1e6
