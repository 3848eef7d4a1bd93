"""The component `rollout` of a spec: a fleet of inference servers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import Field

from tasks.spec.fleet_rules import fleet_faults
from tasks.spec.fleet_sizes import Sizes
from tasks.spec.stop import Stop
from tasks.spec.values import Count, Env, Model, Refusal, Seconds, Text, Worded, Words

Backend = Literal["sglang", "lmdeploy", "vllm", "command"]
Misses = Annotated[int, Field(strict=True, ge=0)]
UrlPath = Annotated[Text, Worded(r"/\S*", "a path on the server, such as /health")]


class FleetToken(Model):
    """A request by which a server generates a token."""

    path: UrlPath = Field(
        title="Path",
        description="Where the request goes; 200 says that a token was generated.",
        examples=["/v1/completions"],
    )
    json_: Mapping[str, Any] | None = Field(
        None,
        alias="json",
        title="JSON",
        description="Sent with POST; left out: GET.",
        examples=[{"prompt": "1", "max_tokens": 1}],
    )


class FleetHealth(Model):
    """How the fleet's servers are asked whether they still work."""

    interval_s: Seconds = Field(
        30, title="Interval (seconds)", description="Between two sweeps of all servers."
    )
    timeout_s: Seconds = Field(
        15,
        title="Timeout (seconds)",
        description="An answer that takes longer is a miss; more than the backend's own timeout.",
    )
    misses: Misses = Field(
        3,
        title="Misses",
        description=(
            "So many in a row: the server is inactive. 0: no sweeps at intervals; deaths are seen "
            "and the check before training is made even so, where one bad answer is enough."
        ),
    )
    first_after_s: Seconds | None = Field(
        None,
        title="First after (seconds)",
        description="Of grace before a new server's first question; left out: one interval.",
    )
    path: UrlPath | None = Field(
        None,
        title="Path",
        description="For the backend command: 200 says that it may be asked; left out: /health.",
        examples=["/health"],
    )
    token: FleetToken | None = Field(
        None,
        title="Token",
        description=(
            "For the backend command: a request that generates a token; left out: none, and a "
            "server whose engine is stuck behind a good /health is not found out."
        ),
        examples=[{"path": "/generate", "json": {"prompt": "1", "max_tokens": 1}}],
    )


class FleetRecovery(Model):
    """How servers that failed are started again."""

    budget: Count | None = Field(
        None, title="Budget", description="Recoveries in all; left out: no limit."
    )
    backoff_s: Seconds | None = Field(
        None,
        title="Back-off (seconds)",
        description="Before the second try in a row of one engine; it then grows.",
    )
    max_backoff_s: Seconds | None = Field(
        None, title="Longest back-off (seconds)", description="How far the back-off grows."
    )
    parallel: Count = Field(4, title="Parallel", description="Engines that recover at once.")
    min_active: Count | None = Field(
        None,
        title="Least active",
        description="Fewer active engines than this: the run has failed; left out: no such floor.",
    )


class Rollout(Model):
    """A fleet of inference servers behind one gateway, `${rollout.url}`."""

    backend: Backend | None = Field(
        None,
        title="Backend",
        description="What serves the model: one of the three, or a command of your own.",
        examples=["sglang"],
    )
    model: Text | None = Field(
        None,
        title="Model",
        description="The model's path or name; not for the backend command.",
        examples=["Qwen/Qwen3-8B"],
    )
    engines: Count = Field(
        1, title="Engines", description="Inference engines, each a set of ranks."
    )
    nodes_per_engine: Count = Field(
        1, title="Nodes per engine", description="Nodes that one engine spans."
    )
    gpus_per_node: Count | None = Field(
        None,
        title="GPUs per node",
        description=(
            "GPUs of one engine on each node; left out: as many as its parallelism needs, for the "
            "backend command none."
        ),
        examples=[8],
    )
    tensor_parallel: Count = Field(
        1, title="Tensor parallelism", description="Ranks that share each tensor."
    )
    expert_parallel: Count = Field(
        1,
        title="Expert parallelism",
        description="Ranks that share the experts; with LMDeploy each of them is an entrypoint.",
    )
    data_parallel: Count = Field(
        1, title="Data parallelism", description="Replicas within one engine."
    )
    command: Words | None = Field(
        None,
        title="Command",
        description=(
            "The server, for the backend command: ${server.port} and ${server.host} are where it "
            "is to listen, ${server.rank}, ${server.node} and ${server.group} say which it is."
        ),
        examples=[["python", "serve.py", "--port", "${server.port}"]],
    )
    args: Words | None = Field(
        None,
        title="Arguments",
        description="More arguments for each server.",
        examples=[["--context-length", "8192"]],
    )
    env: Env = Field(
        default_factory=dict,
        title="Environment variables",
        description="For the servers only; they win over the run's.",
        examples=[{"SGLANG_HEALTH_CHECK_TIMEOUT": "10"}],
    )
    cwd: Text | None = Field(
        None,
        title="Working directory",
        description="Relative to the project's root; left out: the run's.",
    )
    stop: Stop = Field(
        default_factory=Stop, title="Stop", description="How a server is asked to end."
    )
    start_within_s: Seconds = Field(
        1800,
        title="Start within (seconds)",
        description="Until a started server has generated a token; else it has failed.",
    )
    host: Text = Field(
        "127.0.0.1",
        title="Host",
        description="The address of this machine on which the gateway listens.",
        examples=["0.0.0.0"],
    )
    concurrency: Count | None = Field(
        None,
        title="Concurrency",
        description="Requests at once for each entrypoint; left out: no limit.",
        examples=[64],
    )
    health: FleetHealth = Field(
        default_factory=FleetHealth, title="Health", description="Questions to servers."
    )
    recovery: FleetRecovery = Field(
        default_factory=FleetRecovery,
        title="Recovery",
        description="What is done about servers that failed.",
    )
    placement: Literal["local", "ray"] = Field(
        "local",
        title="Placement",
        description="local: processes of this machine. ray: on the nodes of the Ray cluster.",
    )

    @classmethod
    def rules(cls, written: Mapping[str, Any]) -> Iterator[Refusal]:
        yield from fleet_faults(written)

    @cached_property
    def sizes(self) -> Sizes:
        """How large its engines are.

        Raises:
            ValueError: Never for a fleet that was validated.
        """
        sizes = Sizes.of(self.model_dump(include=set(Sizes.KEYS)))
        if sizes is None:
            raise ValueError("the fleet has no backend")
        return sizes
