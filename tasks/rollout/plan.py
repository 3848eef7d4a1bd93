"""What the process of a fleet is given to do, in its environment: no file has it."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from tasks.record.places import AttemptPlace
from tasks.spec.rollout import Rollout
from tasks.spec.run import FLEET
from tasks.spec.secrets import mask_text, secret_values, secrets_in_words

#: Where a component finds the gateway's token: for requests, and that of TRAINER, or of all where
#: the run has none of that name, for orders, too.
TOKEN_ENV, TRAINER = "MUSTER_ROLLOUT_TOKEN", "trainer"
#: Where the fleet's process finds its plan, as JSON.
PLAN_ENV = "MUSTER_ROLLOUT_PLAN"


class FleetPlan(BaseModel):
    """One fleet of one attempt."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    run_id: str
    #: From 1.
    attempt: int
    #: As in the spec, its placeholders filled in; its `env` is all that its servers are given.
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
    #: That the gateway asks for; empty: none.
    token: str = Field("", repr=False)
    #: The same, for orders.
    order_token: str = Field("", repr=False)
    #: The run's, beside those that the plan itself shows.
    secrets: frozenset[str] = Field(frozenset(), repr=False)

    @property
    def place(self) -> AttemptPlace:
        """The files of the attempt."""
        return AttemptPlace(directory=self.directory, number=self.attempt)

    @property
    def env(self) -> dict[str, str]:
        """What the fleet's own process gets."""
        token = {TOKEN_ENV: self.token} if self.token else {}
        return {**token, PLAN_ENV: self.model_dump_json(exclude_unset=True)}

    @staticmethod
    def of(env: Mapping[str, str]) -> FleetPlan:
        return FleetPlan.model_validate_json(env[PLAN_ENV])

    def mask(self, text: str) -> str:
        """The text without what is secret of the fleet and of its run."""
        fleet = self.fleet
        words = secrets_in_words([*(fleet.command or ()), *(fleet.args or ())])
        tokens = {one for one in (self.token, self.order_token) if one}
        return mask_text(text, self.secrets | secret_values(fleet.env) | words | tokens)

    def env_of(self, component: str, *, others: Collection[str]) -> dict[str, str]:
        """What a component of the run gets, whose components are `others`."""
        gives_orders = component == TRAINER or TRAINER not in others
        token = self.order_token if gives_orders else self.token
        return {TOKEN_ENV: token} if token else {}

    def log_of(self, rank: int) -> Path:
        """Of the server that is called by this rank."""
        return self.place.log(f"{FLEET}-r{rank}")
