"""The variable on the Prefect server that is the gate's lease."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import UTC, datetime
from uuid import UUID

import httpx
from prefect.client.orchestration import PrefectClient
from prefect.client.schemas.actions import VariableCreate
from prefect.client.schemas.objects import Variable
from prefect.exceptions import ObjectAlreadyExists

from tasks.processes.identity import host_name

_NOTE = "Muster: the gate of the queue that decides right now; it goes by itself"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """The lease as the server has it."""

    #: No other variable ever gets it, not even of the same name.
    id: UUID
    #: Names this one taking; empty where somebody else wrote the variable.
    holder: str
    #: The mark of the host lock that the holder has; empty where it has none.
    lock: str
    #: Who that is, for people.
    who: str


class GateVariable:
    """Prefect has no compare-and-set, but of several who create one name the server lets one."""

    def __init__(self, client: PrefectClient, name: str) -> None:
        self._client = client
        self._name = name

    async def create(self, holder: str, lock: str | None) -> Lease | None:
        """The lease as it is then: with this holder, or another's; None where that one has just
        given it back.

        Raises: httpx.HTTPError. It may have been created even so, or may still be.
        """
        value = {
            "note": _NOTE,
            "holder": holder,
            "lock": lock,
            "host": host_name(),
            "pid": os.getpid(),
            "at": datetime.now(UTC).isoformat(timespec="milliseconds"),
        }
        try:
            made = VariableCreate(name=self._name, value=value, tags=["muster"])
            return _lease(await self._client.create_variable(made))
        except ObjectAlreadyExists:
            # By ourselves, where Prefect's client has asked again because an answer was lost.
            return await self.read()

    async def read(self) -> Lease | None:
        """Raises: httpx.HTTPError."""
        variable = await self._client.read_variable_by_name(self._name)
        return _lease(variable) if variable is not None else None

    async def delete(self, lease: Lease) -> bool:
        """Whether it was there. A lease that was taken since is left alone.

        Raises: httpx.HTTPError. It may have been deleted even so.
        """
        # By its id, which the client's own method cannot: the name may be another's by now.
        ids = {"id": str(lease.id)}
        try:
            await self._client.request("DELETE", "/variables/{id}", path_params=ids)
        except httpx.HTTPStatusError as error:
            if error.response.status_code != httpx.codes.NOT_FOUND:
                raise
            return False
        return True


def _lease(variable: Variable) -> Lease:
    value = variable.value if isinstance(variable.value, dict) else {}
    return Lease(
        id=variable.id,
        holder=str(value.get("holder") or ""),
        lock=str(value.get("lock") or ""),
        who=f"pid {value.get('pid')} on {value.get('host')}" if value else "somebody unknown",
    )
