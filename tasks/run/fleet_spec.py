"""The component `rollout` of a spec: a fleet of inference servers."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from tasks.run.fields import Count, Model, Seconds, Text, Words

Backend = Literal["sglang", "lmdeploy", "vllm", "command"]


class FleetHealth(Model):
    """How the fleet's servers are asked whether they still work."""

    interval_s: Seconds = Field(30, description="Seconds between two sweeps of all servers.")
    timeout_s: Seconds = Field(15, description="An answer that takes longer is a miss.")
    misses: Count = Field(3, description="So many in a row: the server is inactive.")
    first_after_s: Seconds | None = Field(
        None, description="Seconds of grace before a new server's first question."
    )


class FleetRecovery(Model):
    """How servers that failed are started again."""

    budget: Count | None = Field(None, description="Recoveries in all; left out: no limit.")
    backoff_s: Seconds | None = Field(None, description="Seconds before the first new try.")
    max_backoff_s: Seconds | None = Field(None, description="The longest pause between tries.")
    parallel: Count = Field(4, description="Groups that recover at once.")
    min_active: Count | None = Field(
        None, description="Fewer active engines than this: the run has failed."
    )


class Rollout(Model):
    """A fleet of inference servers behind one gateway, `${rollout.url}`."""

    backend: Backend | None = Field(None, description="What serves the model.")
    model: Text | None = Field(None, description="The model's path or name.")
    engines: Count = Field(1, description="Inference engines, each a set of ranks.")
    nodes_per_engine: Count = Field(1, description="Nodes that one engine spans.")
    gpus_per_node: Count | None = Field(None, description="GPUs of one engine on each node.")
    tensor_parallel: Count = Field(1, description="Ranks that share each tensor.")
    expert_parallel: Count = Field(1, description="Ranks that share the experts.")
    data_parallel: Count = Field(1, description="Replicas within one engine.")
    command: Words | None = Field(None, description="The server, for the backend `command`.")
    args: Words | None = Field(None, description="More arguments for each server.")
    health: FleetHealth = Field(default_factory=FleetHealth, description="Questions to servers.")
    recovery: FleetRecovery = Field(
        default_factory=FleetRecovery, description="What is done about servers that failed."
    )
    placement: Literal["local", "ray"] = Field("local", description="Where the servers run.")
