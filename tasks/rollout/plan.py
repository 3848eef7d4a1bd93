"""What the process of a fleet is given to do: one file in the attempt's directory."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tasks.record.places import AttemptPlace
from tasks.spec.rollout import Rollout
from tasks.spec.run import FLEET
from tasks.spec.secrets import mask_text, masked_in, secret_values, secrets_in_words

#: Where a component finds the gateway's token: for requests, and that of TRAINER, or of all where
#: the run has none of that name, for orders, too.
TOKEN_ENV, TRAINER = "MUSTER_ROLLOUT_TOKEN", "trainer"
#: Where the fleet's process finds the other one.
ORDER_TOKEN_ENV = "MUSTER_ROLLOUT_ORDER_TOKEN"
#: Where it finds, as JSON, what of the plan may be secret and so stands in no file: the variables
#: and the words of its servers, and what is to be masked in all that it writes.
SERVERS_ENV = "MUSTER_ROLLOUT_SERVERS_ENV"
_OF_SERVERS = ("env", "command", "args")


class BadPlan(Exception):
    """The file can't be read, or is no plan. The message names it and says why."""


class FleetPlan(BaseModel):
    """One fleet of one attempt."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run_id: str
    #: From 1.
    attempt: int
    #: As in the spec, its placeholders filled in; its `env` is all that its servers are given, and
    #: stands in no file.
    fleet: Rollout = Field(repr=False)
    #: The port of the gateway.
    port: int
    #: Of a fleet on this machine, by the names of `ports_needed`.
    ports: Mapping[str, int]
    #: GPUs of each node that the run may have; None: it asks for none.
    node_gpus: int | None = None
    #: The dashboard of the Ray cluster; None: the fleet is on this machine.
    ray: str | None = None
    #: Where the servers run; absolute.
    cwd: Path
    #: Of the attempt, for logs and events; absolute.
    directory: Path
    #: The run's register, for the servers' own entries; None: what holds the component's processes
    #: ends them all at once.
    register_at: Path | None = None
    #: Until the first weights come, its servers serve the model as they load it; else they wait.
    serves_as_loaded: bool = True
    #: What holds them: L1 to L4, see `containment`.
    level: str = "L2"
    #: That the gateway asks for; empty: none. In no file either.
    token: str = Field("", exclude=True, repr=False)
    #: The same, for orders.
    order_token: str = Field("", exclude=True, repr=False)
    #: The run's, beside those that the plan itself shows. In no file either.
    secrets: frozenset[str] = Field(frozenset(), exclude=True, repr=False)

    @property
    def place(self) -> AttemptPlace:
        """The files of the attempt."""
        return AttemptPlace(directory=self.directory, number=self.attempt)

    @property
    def env(self) -> dict[str, str]:
        """What the fleet's own process gets: all that is secret."""
        of_servers = self.fleet.model_dump(mode="json", include={*_OF_SERVERS}, exclude_unset=True)
        hidden = json.dumps({"fleet": of_servers, "secrets": sorted(self.secrets)})
        tokens = {TOKEN_ENV: self.token, ORDER_TOKEN_ENV: self.order_token}
        return {**{name: token for name, token in tokens.items() if token}, SERVERS_ENV: hidden}

    def mask(self, text: str) -> str:
        """The text without what is secret of the fleet and of its run."""
        fleet = self.fleet
        words = secrets_in_words([*(fleet.command or ()), *(fleet.args or ())])
        tokens = {one for one in (self.token, self.order_token) if one}
        return mask_text(text, self.secrets | secret_values(fleet.env) | words | tokens)

    def env_of(self, component: str, *, others: Collection[str]) -> dict[str, str]:
        """What a component of the run gets.

        Args:
            others: the run's components.
        """
        gives_orders = component == TRAINER or TRAINER not in others
        token = self.order_token if gives_orders else self.token
        return {TOKEN_ENV: token} if token else {}

    def write(self, path: Path) -> None:
        """With the words of servers masked, and for this user's eyes only. Raises: OSError."""
        fleet = self.fleet.model_dump(mode="json", exclude_unset=True, exclude={"env"})
        for key in fleet.keys() & {*_OF_SERVERS}:
            fleet[key] = masked_in(fleet[key], self.mask)
        content = {**self.model_dump(mode="json", exclude={"fleet"}), "fleet": fleet}
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with open(fd, "w", encoding="utf-8") as f:
            f.write(f"{json.dumps(content, indent=2)}\n")

    @staticmethod
    def read(path: Path, env: Mapping[str, str]) -> FleetPlan:
        """
        Args:
            env: of the fleet's process, which has what stands in no file.

        Raises: BadPlan.
        """
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
            if isinstance(content, dict) and isinstance(content.get("fleet"), dict):
                hidden = json.loads(env.get(SERVERS_ENV, "{}"))
                content["fleet"] |= hidden.get("fleet", {})
                content["secrets"] = hidden.get("secrets", [])
                content["token"] = env.get(TOKEN_ENV, "")
                content["order_token"] = env.get(ORDER_TOKEN_ENV, "")
            return FleetPlan.model_validate(content)
        except (OSError, ValueError) as error:
            raise BadPlan(f"{path} is no plan of a fleet: {_in_a_line(error)}") from error

    def log_of(self, rank: int) -> Path:
        """Of the server that is called by this rank."""
        return self.place.log(f"{FLEET}-r{rank}")


def _in_a_line(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return " ".join(str(error).split())
    return "; ".join(
        f"{'.'.join(map(str, fault['loc'])) or 'the whole'}: {fault['msg']}"
        for fault in error.errors(include_url=False)
    )
