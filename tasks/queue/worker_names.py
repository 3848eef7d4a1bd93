"""Detect two live workers of one work pool that have the same name.

The Prefect server identifies a worker by its work pool and its name, so it counts both workers as
one. Muster reads the host of a run from the name of its worker. With two workers of one name, a run
would be attributed to the wrong host.

Workers with the same name share a Prefect variable. Each worker writes its host and process id into
the variable, at each synchronisation with the server. If a worker later finds another process in
the variable, that process has written it in the meantime. So that process is a live worker of the
same name. Clocks are not compared.
"""

from __future__ import annotations

import hashlib
from typing import Any

from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.actions import VariableCreate, VariableUpdate

#: At each heartbeat, a worker checks whether another worker with the same name has written to their
#: shared Prefect variable. After this number of checks without a write, the other worker counts as
#: ended.
_SYNCS_UNTIL_FORGOTTEN = 3
#: Description in the Prefect variable, for users who see the variable in the Prefect UI.
_NOTE = (
    "Muster wrote this variable. It names the process of a worker, so that Muster notices a second "
    "worker with the same name."
)


def name_variable(pool: str, worker: str) -> str:
    """Return the name of the Prefect variable that all workers with the same name share.

    Args:
        pool: Name of the work pool.
        worker: Name of the worker. It may contain characters that the name of a variable must not
            contain.
    """
    digest = hashlib.sha256(f"{pool}/{worker}".encode()).hexdigest()
    return f"muster_worker_{digest[:24]}"


def read_other_worker(value: object) -> str:
    """Read from a Prefect variable whether two live workers have the same name.

    Args:
        value: Value of the variable. A worker with this name has written this value.

    Returns:
        Host and process id of the other worker, which did not write the value. Empty if only one
        live worker has the name.
    """
    other = value.get("other") if isinstance(value, dict) else ""
    return other if isinstance(other, str) else ""


class WorkerName:
    """The name of a worker, and the last observation of another worker with the same name."""

    def __init__(self, pool: str, worker: str, process: str) -> None:
        """
        Args:
            pool: Name of the work pool.
            worker: Name of the worker.
            process: Text with host and process id of this worker. The text is different for each
                worker.
        """
        self._variable = name_variable(pool, worker)
        self._fixed = {"note": _NOTE, "pool": pool, "worker": worker, "process": process}
        self._process = process
        self._other = ""
        self._has_written = False
        #: Number of calls of `find_other` since another worker with the same name was last found.
        #: After several calls, the other worker counts as ended.
        self._quiet_syncs = 0

    async def find_other(self, client: PrefectClient) -> str:
        """Return another live worker with the same name, if there is one.

        The method writes the host and process id of the calling worker into a Prefect variable that
        all workers with the name share. So the other worker can find the calling worker, too.

        Returns:
            Host and process id of the other worker, or an empty string.

        Raises:
            httpx.HTTPError: The server did not answer, or rejected a request.
        """
        variable = await client.read_variable_by_name(self._variable)
        value: Any = variable.value if variable is not None else None
        writer = value.get("process") if isinstance(value, dict) else None

        # All workers with the same name write their host and process id into the same Prefect
        # variable. If this process has written the variable, and the variable now names another
        # process, the other process is a second live worker. If this process has not written the
        # variable yet, ignore the variable, because it may name a process that has ended.
        if self._has_written and isinstance(writer, str) and writer != self._process:
            self._other = writer
            self._quiet_syncs = 0
        else:
            self._quiet_syncs += 1
        if self._quiet_syncs >= _SYNCS_UNTIL_FORGOTTEN:
            self._other = ""

        content = {**self._fixed, "other": self._other}
        if variable is None:
            await client.create_variable(VariableCreate(name=self._variable, value=content))
        elif value != content:
            await client.update_variable(VariableUpdate(name=self._variable, value=content))
        self._has_written = True
        return self._other
