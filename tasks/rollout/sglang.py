"""SGLang: a server on each node of an engine, of which the first is the entrypoint.

Source: SGLang 0.5, srt/arg_groups/fields/parallel.py, srt/entrypoints/http_server.py
"""

from __future__ import annotations

from tasks.rollout.place import Place
from tasks.rollout.topology import Answers, Ask, Questions
from tasks.spec.rollout import SGLANG_TIMEOUT, Rollout, sglang_timeout_s


def answers(fleet: Rollout, index: int) -> Answers:
    # A later node serves a stub that says 200 for as long as its process lives.
    return Answers.ENGINE if index == 0 else Answers.PROCESS


def is_entrypoint(fleet: Rollout, index: int) -> bool:
    return index == 0


def meets(fleet: Rollout) -> bool:
    return fleet.nodes_per_engine > 1


def questions(fleet: Rollout) -> Questions:
    return Questions(
        ready=Ask(method="GET", path="/health"),
        token=Ask(method="GET", path="/health_generate"),
        own_timeout_s=sglang_timeout_s(fleet.health.timeout_s, fleet.env),
    )


def argv(fleet: Rollout, place: Place) -> tuple[str, ...]:
    words = ["python", "-m", "sglang.launch_server", "--model-path", fleet.model or ""]
    words += ["--tp-size", str(fleet.tensor_parallel)]
    if fleet.expert_parallel > 1:
        words += ["--ep-size", str(fleet.expert_parallel)]
    if fleet.data_parallel > 1:
        words += ["--dp-size", str(fleet.data_parallel)]
    if meets(fleet):
        words += ["--nnodes", str(fleet.nodes_per_engine), "--node-rank", str(place.index)]
        words += ["--dist-init-addr", place.meets_at]
    words += ["--host", place.host, "--port", str(place.port)]
    return (*words, *(fleet.args or ()))


def env(fleet: Rollout, place: Place) -> dict[str, str]:
    return {SGLANG_TIMEOUT: str(sglang_timeout_s(fleet.health.timeout_s, fleet.env))}
