"""Import the module that reads runs from the Prefect server only when it is needed."""

from __future__ import annotations

from functools import cache
from types import ModuleType


@cache
def import_server_runs() -> ModuleType:
    """Import and return the module `server_runs`, which reads runs from the Prefect server.

    The first call imports Prefect, which takes seconds. So call this function only if the caller
    needs data from a Prefect server.

    The module `tasks.client` is an exception: it always calls this function during its own import.
    If `server_runs` were imported later, Python could find another package with the name `tasks` in
    the user's project.
    """
    from tasks.train import server_runs

    return server_runs
