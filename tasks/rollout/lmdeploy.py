"""LMDeploy: one server for an engine with tensor parallelism, one for each replica of another.

A replica, which is one rank where experts are shared, gets a process of its own: so the ranks of
the plan are those of the servers, each has its own guardian and its own death, and the GPUs that
it sees are those of the plan. LMDeploy's command line would start the replicas of a node under one
process that picks devices from 0 on and listens on the machine's outward address.

Source: LMDeploy 0.18, cli/serve.py, serve/openai/launch_server.py, pytorch/envs.py
"""

from __future__ import annotations

from pathlib import Path

from tasks.rollout import lmdeploy_replica
from tasks.rollout.place import Place, option_in
from tasks.rollout.topology import Answers, Ask, Questions
from tasks.spec.rollout import Rollout

#: Given to the servers as a text: nothing of ours has to be installed beside LMDeploy.
_ONE_REPLICA = Path(lmdeploy_replica.__file__).read_text(encoding="utf-8")


def answers(fleet: Rollout, index: int) -> Answers:
    return Answers.ENGINE


def is_entrypoint(fleet: Rollout, index: int) -> bool:
    return True


def meets(fleet: Rollout) -> bool:
    return fleet.nodes_per_engine > 1 or fleet.sizes.replicas > 1


def questions(fleet: Rollout) -> Questions:
    model = option_in(fleet.args or (), "--model-name") or fleet.model
    body = {"model": model, "prompt": "1", "max_tokens": 1, "temperature": 0}
    return Questions(
        # What a monitor saw, up to 12 s ago; a scheduler that stalls shows after 90 s.
        ready=Ask(method="GET", path="/health"),
        token=Ask(method="POST", path="/v1/completions", body=body),
    )


def argv(fleet: Rollout, place: Place) -> tuple[str, ...]:
    replicas = fleet.sizes.replicas
    words = ["python", "-c", _ONE_REPLICA] if replicas > 1 else ["lmdeploy"]
    words += ["serve", "api_server", fleet.model or "", "--backend", "pytorch"]
    if fleet.tensor_parallel > 1 or replicas == 1:
        words += ["--tp", str(fleet.tensor_parallel)]
    if replicas > 1:
        words += ["--dp", str(replicas), "--ep", str(fleet.expert_parallel)]
        words += ["--nnodes", str(replicas), "--node-rank", str(place.index)]
    words += ["--server-name", place.host, "--server-port", str(place.port)]
    return (*words, *(fleet.args or ()))


def env(fleet: Rollout, place: Place) -> dict[str, str]:
    found: dict[str, str] = {}
    if place.meeting is not None:
        host, port = place.meeting
        kind = "DP" if fleet.sizes.replicas > 1 else "DIST"
        found[f"LMDEPLOY_{kind}_MASTER_ADDR"] = host
        found[f"LMDEPLOY_{kind}_MASTER_PORT"] = str(port)
    if fleet.sizes.replicas > 1 or fleet.nodes_per_engine == 1:
        # It runs its workers under Ray. In a cluster it would ask for GPUs that it holds already,
        # so it gets a small one of its own, of what it sees.
        found["RAY_ADDRESS"] = fleet.env.get("RAY_ADDRESS", "local")
    return found
