"""Small specs for what the UI is to show."""

from __future__ import annotations

from typing import Any

Spec = dict[str, Any]

_STAYS = "import time\nprint('up', flush=True)\ntime.sleep(3600)"
#: The last line of a trainer that crashes.
COMPLAINT = "RuntimeError: the checkpoint is of another model"
_CRASHES = "import time\ntime.sleep(1)\nraise RuntimeError('the checkpoint is of another model')"


def python(code: str) -> list[str]:
    return ["python", "-c", code]


def spec(name: str, trainer: str = _STAYS, **more: Any) -> Spec:
    """A run of an api and a trainer that runs some code; by default both stay for an hour."""
    return {
        "name": name,
        "workload": "grpo",
        "components": {
            "api": {"command": python(_STAYS), "ready": {"log": "up"}},
            "trainer": {"command": python(trainer)},
        },
        **more,
    }


def crashing() -> Spec:
    return spec("crashes", _CRASHES)


def broken() -> Spec:
    """The server takes it, since only Muster knows the names that a placeholder may have."""
    return spec("broken", progress={"jsonl": "${attmpt.dir}/metrics.jsonl", "step": "step"})


def gang_of(name: str, gpus: int) -> Spec:
    return spec(name, gang={"nodes": 1, "gpus_per_node": gpus, "hours": 1})
