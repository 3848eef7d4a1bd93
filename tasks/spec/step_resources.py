"""Resources and environment of a step: the key `resources`, and rules that depend on its place.

A step runs on a node of a Ray cluster or on a host. Stages of a pipeline and evaluations of
checkpoints are steps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import Field

from tasks.spec.placeholders import mapping_or_empty
from tasks.spec.secrets import looks_secret
from tasks.spec.values import (
    CountOrZero,
    Model,
    Positive,
    Refusal,
    SecretBlock,
    Text,
    Word,
    make_refusal,
)


class Resources(Model):
    """Resources that a step takes on a Ray node while the step runs."""

    gpus: CountOrZero = Field(
        0,
        description="Number of GPUs that the step takes. A step with GPUs waits in the queue, "
        "like a run.",
        examples=[1],
    )
    cpus: Positive | None = Field(
        None,
        description="Number of CPUs that the step takes. If omitted, a step on Ray takes 1 CPU.",
        examples=[4],
    )
    memory_gib: Positive | None = Field(
        None,
        description="Main memory in GiB that Ray reserves for the step. If omitted, Ray "
        "reserves no memory.",
        examples=[16],
    )
    labels: Mapping[Text, Word] = Field(
        default_factory=dict,
        description="Ray labels, with their values, that the node of the step must have. A step "
        "with GPUs may not have this key, because the queue chooses the node of such a step.",
        examples=[{"ray.io/node-type": "worker"}],
    )


def check_resources(written: Mapping[str, Any], *, on: object) -> Iterator[Refusal]:
    """Yield the faults that result from a combination of keys in a step's resources.

    Args:
        written: The step as the user wrote it. Its values are not validated yet.
        on: Place of the step: `ray`, `host`, or an invalid value.
    """
    resources = mapping_or_empty(written.get("resources"))
    if on == "host":
        for key in ("cpus", "memory_gib", "labels"):
            if resources.get(key):
                problem = "this resource needs Ray, but the step runs without Ray (`on: host`)"
                yield ("resources", key), make_refusal(problem, "leave it out, or write `on: ray`")
    elif resources.get("gpus") and resources.get("labels"):
        problem = (
            "the queue chooses the node of a step with GPUs, but `labels` may require another node"
        )
        yield ("resources", "labels"), make_refusal(problem, "leave out labels")


def check_ray_secrets(env: Mapping[Any, Any]) -> Iterator[Refusal]:
    """Yield a fault for each secret in the environment of a step on Ray.

    Ray shows the variables of a job to all users of its dashboard.

    Args:
        env: Environment variables as the user wrote them. They are not validated yet.
    """
    for name, value in env.items():
        is_block = isinstance(value, Mapping | SecretBlock)
        if is_block or (value and looks_secret(str(name))):
            problem = (
                "Ray shows the environment variables of a step to every user of the Ray dashboard"
            )
            remedy = "write `on: host`, or store the secret in a file on the nodes"
            yield ("env", str(name)), make_refusal(problem, remedy)
