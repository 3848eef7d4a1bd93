"""What goes along with the questions to a Ray cluster: Ray's token, headers, certificates.

Anybody may write any address into a spec, and whoever looks at the queue asks it. So they go to
clusters that an operator has listed, and the token besides to that of the run whose process asks.
"""

from __future__ import annotations

import json
import os
import ssl
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator

from tasks.spec.placeholders import substituted
from tasks.spec.probes import Url

_ENV = "env."
#: A JSON list of `ListedCluster`, for this process and those of Muster's own that it starts.
VARIABLE = "MUSTER_RAY_CLUSTERS"


class ListedCluster(BaseModel):
    """A Ray cluster that an operator lets be asked."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    address: Url = Field(title="Address", description="Of its dashboard: http://10.0.0.1:8265.")
    headers: dict[str, str] = Field(
        default_factory=dict,
        title="Headers",
        description="Go along with each question to the dashboard. ${env.NAME} in a value is "
        "filled in by the process that asks, from its environment: a secret need not stand here.",
    )
    ca: str | None = Field(
        None,
        min_length=1,
        title="Certificates",
        description="The file, on each host, of those that vouch for an https address; left out: "
        "public ones.",
    )
    max_nodes: int | None = Field(
        None,
        ge=1,
        title="Most nodes",
        description="An autoscaler may have so many nodes with GPUs: what fits them waits, and is "
        "shown to it. Left out: what is there is all there will be.",
    )

    @field_validator("address")
    @classmethod
    def _without_slash(cls, address: str) -> str:
        return address.rstrip("/")


class Unfit(Exception):
    """What is to go along can't be had here; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """What goes along with the questions to one cluster. Raises: Unfit, as it is made use of."""

    #: As they are listed.
    headers: Mapping[str, str] = field(default_factory=dict)
    #: A file; None: public certificates.
    ca: str | None = None
    #: Ray's own token goes along, where its authentication is on.
    has_token: bool

    @staticmethod
    def of(address: str, listed: Iterable[ListedCluster], *, is_own: bool = False) -> Access:
        """
        Args:
            is_own: of the run whose process asks.
        """
        found = next((one for one in listed if one.address == address.rstrip("/")), None)
        if found is None:
            return Access(has_token=is_own)
        return Access(headers=found.headers, ca=found.ca, has_token=True)

    def sent(self) -> dict[str, str]:
        """The headers, filled in, without the token."""
        return {name: substituted(value, _variable) for name, value in self.headers.items()}

    def verify(self) -> ssl.SSLContext | bool:
        """What an https address has to prove."""
        try:
            return ssl.create_default_context(cafile=self.ca) if self.ca else True
        except OSError as error:
            raise Unfit(f"its certificates can't be read from {self.ca}: {error}") from error


def _variable(name: str) -> str:
    if not name.startswith(_ENV):
        raise Unfit(f"its headers name ${{{name}}}: write ${{env.NAME}}, or `$${{` for a `${{`")
    if (value := os.environ.get(name.removeprefix(_ENV))) is None:
        variable = name.removeprefix(_ENV)
        raise Unfit(f"its headers name the environment variable {variable}, which is not set here")
    return value


def known() -> dict[str, ListedCluster]:
    """By address, those that this process was told of. What can't be read counts as none."""
    try:
        listed = [ListedCluster.model_validate(one) for one in json.loads(os.environ[VARIABLE])]
    except (KeyError, ValueError, TypeError):
        return {}
    return {one.address: one for one in listed}


def know(clusters: Iterable[Mapping[str, Any]]) -> None:
    """Have this process, and those of Muster's own that it starts, know more listed clusters."""
    found = known()
    for one in clusters:
        cluster = ListedCluster.model_validate(one)
        found[cluster.address] = cluster
    if found:
        os.environ[VARIABLE] = json.dumps([one.model_dump() for one in found.values()])
