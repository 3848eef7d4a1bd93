"""What of a run runs where."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tasks.show.markdown import code, table, text
from tasks.show.view import RunView, Shown, end_of, moment, seconds
from tasks.spec.run import FLEET

_HEAD = ("component", "state", "runs as", "ready after", "ports", "log")
_SERVERS_HEAD = ("server", "state", "address", "restarts", "log")
#: A table shows no more of them.
_SERVERS_AT_MOST = 200


def components_of(view: RunView) -> Shown:
    """The components of the attempt under way, or of the last one, and the servers of a fleet."""
    attempt = view.attempt
    if attempt is None:
        names = ", ".join(view.spec.components)
        return Shown(headline="nothing was started yet", data=f"To be started: {text(names)}.")
    rows = [[*_row(view, attempt, name)] for name in view.spec.components]
    on = f" on {text(view.host)}" if view.host else ""
    files = code(view.place.attempt(attempt["number"]).directory)
    parts = [
        f"Attempt {attempt['number']}{on}, as of {moment(view.at)}. Logs are in {files}.",
        table(_HEAD, rows),
    ]
    if view.servers:
        parts += ["Servers of the fleet:", table(_SERVERS_HEAD, _servers(view))]
    if len(view.servers) > _SERVERS_AT_MOST:
        parts.append(f"The first {_SERVERS_AT_MOST} of {len(view.servers)} servers.")
    return Shown(headline=_headline(view, attempt), data="\n\n".join(parts))


def state_of(view: RunView, attempt: Mapping[str, Any], name: str) -> str:
    """What a component does, in a few words."""
    seen = attempt["components"].get(name)
    if seen is None:
        return "not started"
    if seen["ended_at"] is not None:
        return end_of(attempt, name)
    if seen["ready_at"] is not None:
        return "ready"
    return "starting"


def _headline(view: RunView, attempt: Mapping[str, Any]) -> str:
    failure = attempt["failure"] or {}
    states = [
        f"{name} {'failed' if name == failure.get('component') else state_of(view, attempt, name)}"
        for name in view.spec.components
    ]
    return "\n\n".join(map(text, states))


def _row(view: RunView, attempt: Mapping[str, Any], name: str) -> Iterator[str]:
    seen = attempt["components"].get(name)
    failure = attempt["failure"] or {}
    yield text(name)
    state = text(state_of(view, attempt, name))
    if failure.get("component") == name:
        state = f"**failed first**: {state}"
    elif state == "starting" and (why := view.unready.get(name)):
        state += f", not ready: {text(why)}"
    yield state
    yield _runs_as(attempt, name, seen)
    if seen is None or not seen["started_at"]:
        yield ""
    elif seen["ready_at"]:
        yield seconds(seen["ready_at"] - seen["started_at"])
    else:
        yield "never" if seen["ended_at"] or attempt["ended_at"] else "not yet"
    yield ", ".join(_ports(attempt.get("ports") or {}, name))
    yield code(f"{name}.log") if seen is not None else ""


def _runs_as(attempt: Mapping[str, Any], name: str, seen: Mapping[str, Any] | None) -> str:
    if seen is None:
        return ""
    if seen["pid"] is not None:
        return f"pid {seen['pid']}"
    ray = attempt["ray"]
    job = ray if ray.get("component") == name else (ray.get("others") or {}).get(name, {})
    nodes = job.get("nodes") or []
    listed = ", ".join(map(str, nodes)) if isinstance(nodes, list | tuple) else str(nodes)
    where = f" on {text(listed)}" if listed else ""
    return f"Ray job {code(job.get('submission_id', ''))}{where}"


def _ports(ports: Mapping[str, int], name: str) -> Iterator[str]:
    """Of a fleet, its gateway's: those of its servers stand with them."""
    own, others = f"{name}.port", f"{name}.ports."
    for port, number in ports.items():
        if port == own:
            yield str(number)
        elif port.startswith(others) and name != FLEET:
            yield f"{text(port.removeprefix(others))} {number}"


def _servers(view: RunView) -> Iterator[list[str]]:
    for server in view.servers[:_SERVERS_AT_MOST]:
        cause = f": {text(server.cause)}" if server.cause else ""
        yield [
            str(server.rank),
            text(server.state) + cause,
            code(server.url),
            str(server.restarts or ""),
            code(f"{FLEET}-r{server.rank}.log"),
        ]
