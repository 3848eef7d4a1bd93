"""Small run specs for the tests and pictures of the UI."""

from __future__ import annotations

from typing import Any

Spec = dict[str, Any]

#: A program that runs for an hour.
_STAYING_PROGRAM = "import time\nprint('up', flush=True)\ntime.sleep(3600)"
#: Last line in the log of the trainer that crashes.
COMPLAINT = "RuntimeError: the checkpoint is of another model"
#: A program that fails after a second.
_CRASHING_PROGRAM = (
    "import time\ntime.sleep(1)\nraise RuntimeError('the checkpoint is of another model')"
)


def python(code: str) -> list[str]:
    """Return the command that runs the Python code."""
    return ["python", "-c", code]


def spec(name: str, trainer: str = _STAYING_PROGRAM, **further_keys: Any) -> Spec:
    """Return the spec of a run with an api and a trainer; by default both run for an hour.

    Args:
        name: Name of the run.
        trainer: Python code of the trainer.
        further_keys: Further keys of the spec.
    """
    return {
        "name": name,
        "workload": "grpo",
        "components": {
            "api": {"command": python(_STAYING_PROGRAM), "ready": {"log": "up"}},
            "trainer": {"command": python(trainer)},
        },
        **further_keys,
    }


def crashing() -> Spec:
    """Return a spec whose trainer crashes."""
    return spec("crashes", _CRASHING_PROGRAM)


def broken() -> Spec:
    """Return a spec with an unknown placeholder.

    The Prefect server accepts the spec, because only Muster knows the names of placeholders.
    """
    return spec("broken", progress={"jsonl": "${attmpt.dir}/metrics.jsonl", "step": "step"})


def gang_of(name: str, gpus: int) -> Spec:
    """Return the spec of a run that requests this number of GPUs on one node."""
    return spec(name, gang={"nodes": 1, "gpus_per_node": gpus, "hours": 1})
