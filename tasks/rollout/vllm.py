"""vLLM: a server on each node of an engine; all but the first are headless, without an API.

Source: vLLM 0.33, entrypoints/cli/serve.py, engine/arg_utils.py
"""

from __future__ import annotations

from tasks.rollout.place import Place, option_in
from tasks.rollout.topology import Answers, Ask, Questions
from tasks.spec.rollout import Rollout


def answers(fleet: Rollout, index: int) -> Answers:
    return Answers.ENGINE if index == 0 else Answers.NONE


def is_entrypoint(fleet: Rollout, index: int) -> bool:
    return index == 0


def meets(fleet: Rollout) -> bool:
    return fleet.nodes_per_engine > 1


def questions(fleet: Rollout) -> Questions:
    model = option_in(fleet.args or (), "--served-model-name") or fleet.model
    body = {"model": model, "prompt": "1", "max_tokens": 1, "temperature": 0}
    return Questions(
        # A flag of the front end, blind to an engine that hangs.
        ready=Ask(method="GET", path="/health"),
        token=Ask(method="POST", path="/v1/completions", body=body),
    )


def argv(fleet: Rollout, place: Place) -> tuple[str, ...]:
    words = ["vllm", "serve", fleet.model or "", "-tp", str(fleet.tensor_parallel)]
    if fleet.data_parallel > 1:
        words += ["-dp", str(fleet.data_parallel)]
    if place.meeting is not None:
        words += _across_nodes(fleet, place.index, *place.meeting)
    if fleet.expert_parallel > 1:
        words.append("-ep")
    if place.port is not None:
        words += ["--host", place.host, "--port", str(place.port)]
    return (*words, *(fleet.args or ()))


def _across_nodes(fleet: Rollout, index: int, host: str, port: int) -> list[str]:
    if fleet.data_parallel == 1:
        words = ["--nnodes", str(fleet.nodes_per_engine), "-r", str(index)]
        words += ["--master-addr", host, "--master-port", str(port)]
        return [*words, "--headless"] if index else words
    local = fleet.data_parallel // fleet.nodes_per_engine
    words = ["-dpl", str(local), "-dpa", host, "-dpp", str(port)]
    return [*words, "--headless", "-dpr", str(index * local)] if index else words


def env(fleet: Rollout, place: Place) -> dict[str, str]:
    return {}
