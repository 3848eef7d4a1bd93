"""`command`: any server, from a template with `${server.port}` and the like.

An engine is as many servers as it has replicas, each of them an entrypoint; without replicas, one
on each of its nodes, of which the first is the entrypoint.
"""

from __future__ import annotations

from tasks.rollout.place import Place
from tasks.rollout.topology import Answers, Ask, Questions
from tasks.spec.placeholders import substituted
from tasks.spec.rollout import Rollout


def answers(fleet: Rollout, index: int) -> Answers:
    return Answers.ENGINE if is_entrypoint(fleet, index) else Answers.PROCESS


def is_entrypoint(fleet: Rollout, index: int) -> bool:
    return fleet.data_parallel > 1 or index == 0


def meets(fleet: Rollout) -> bool:
    return False


def questions(fleet: Rollout) -> Questions:
    token = fleet.health.token
    asked: Ask | None = None
    if token is not None:
        method = "GET" if token.json_ is None else "POST"
        asked = Ask(method=method, path=token.path, body=token.json_)
    return Questions(ready=Ask(method="GET", path=fleet.health.path or "/health"), token=asked)


def argv(fleet: Rollout, place: Place) -> tuple[str, ...]:
    return (*(fleet.command or ()), *(fleet.args or ()))


def env(fleet: Rollout, place: Place) -> dict[str, str]:
    return {}


def filled(text: str, place: Place) -> str:
    """The text for one server; what is not `${server.NAME}` stays as it is."""
    values = {
        "server.port": str(place.port),
        "server.host": place.host,
        "server.rank": str(place.rank),
        "server.node": str(place.node),
        "server.group": str(place.engine),
    }
    return substituted(text, lambda name: values.get(name, f"${{{name}}}"))
