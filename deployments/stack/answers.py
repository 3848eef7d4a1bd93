"""Which parts of a stack really answer, asked from outside it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import httpx

from deployments.stack.env import AUTH, POOL, auth_string
from deployments.stack.state import Stack, StackError
from tasks.processes.trusted_server import check_listeners

_ANSWER_WITHIN_S = 10.0
_ALL_WITHIN_S = 60.0
_ASK_EVERY_S = 0.2
_REFUSED = "wants a password"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one part said."""

    part: str
    #: Where it is, or what it does.
    found: str
    #: Why it counts as not answering; empty where it does.
    problem: str = ""

    def __str__(self) -> str:
        return f"{self.part:<15} {self.found}  {self.problem or 'answers'}"


def answers(stack: Stack) -> list[Answer]:
    """One for each part of the stack."""
    auth = httpx.BasicAuth(*auth_string().partition(":")[::2])
    with httpx.Client(trust_env=False, timeout=_ANSWER_WITHIN_S, auth=auth) as client:
        check_listeners(client)
        return [
            _asked(client, "Prefect UI", stack.ui_url, f"{stack.api_url}/health"),
            _asked(client, "Ray dashboard", stack.ray_dashboard, stack.ray_health),
            *(_asked(client, node.name, node.found, node.health) for node in stack.nodes),
            _pool(client, stack),
            _worker(client, stack),
        ]


def are_all_answering(found: Sequence[Answer]) -> bool:
    return not any(answer.problem for answer in found)


def until_answering(stack: Stack) -> None:
    """Wait until every part answers. Raises: StackError, with those that don't."""
    deadline = time.monotonic() + _ALL_WITHIN_S
    while not are_all_answering(found := answers(stack)):
        is_refused = any(_REFUSED in answer.problem for answer in found)
        if is_refused or time.monotonic() > deadline:
            silent = "; ".join(f"{a.part} {a.problem}" for a in found if a.problem)
            waited = "" if is_refused else f" after {_ALL_WITHIN_S:.0f} s"
            raise StackError(f"not all of the stack answers{waited}: {silent}")
        time.sleep(_ASK_EVERY_S)


def _asked(client: httpx.Client, part: str, found: str, url: str) -> Answer:
    try:
        _ask(client, "GET", url)
    except _NoAnswer as error:
        return Answer(part=part, found=found, problem=str(error))
    return Answer(part=part, found=found)


def _pool(client: httpx.Client, stack: Stack) -> Answer:
    try:
        pool = _json(client, "GET", f"{stack.api_url}/work_pools/{POOL}")
    except _NoAnswer as error:
        return Answer(part="work pool", found=POOL, problem=str(error))
    limit = pool["concurrency_limit"]
    found = f"{POOL}, {'no limit' if limit is None else f'at most {limit} runs at once'}"
    # Paused by somebody, it still is as it should be.
    return Answer(part="work pool", found=f"{found}{', paused' if pool['is_paused'] else ''}")


def _worker(client: httpx.Client, stack: Stack) -> Answer:
    """It polls, by its own word, and the server has heard of it since the stack began."""
    workers = f"{stack.api_url}/work_pools/{POOL}/workers/filter"
    problem = "the server has not heard of it yet"
    try:
        _json(client, "GET", stack.worker_health)
        for worker in _json(client, "POST", workers, json={}):
            if worker["name"] == stack.worker and worker["status"] == "ONLINE":
                heard = datetime.fromisoformat(worker["last_heartbeat_time"]).timestamp()
                problem = "" if heard > stack.started_at else problem
    except _NoAnswer as error:
        problem = str(error)
    return Answer(part="worker", found=stack.worker, problem=problem)


class _NoAnswer(Exception):
    """There was none, or it was no 2xx."""


def _ask(client: httpx.Client, method: str, url: str, **more: Any) -> httpx.Response:
    try:
        return client.request(method, url, **more).raise_for_status()
    except httpx.HTTPError as error:
        status = error.response.status_code if isinstance(error, httpx.HTTPStatusError) else 0
        if status == httpx.codes.UNAUTHORIZED:
            raise _NoAnswer(f"{_REFUSED}: set {AUTH} as it was for `muster up`") from None
        raise _NoAnswer(_silence(method, url, error)) from None


def _json(client: httpx.Client, method: str, url: str, **more: Any) -> Any:
    response = _ask(client, method, url, **more)
    try:
        return response.json()
    except ValueError as error:
        raise _NoAnswer(_silence(method, url, error)) from None


def _silence(method: str, url: str, error: Exception) -> str:
    return f"does not answer: {method} {url}: {error or type(error).__name__}"
