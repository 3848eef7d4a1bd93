"""Check from outside whether the parts of a running stack answer."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import httpx

from deployments.stack.env import AUTH, POOL, auth_string
from deployments.stack.ray_session import find_session_problem
from deployments.stack.state import Stack, StackError
from tasks.processes.identity import host_name
from tasks.processes.trusted_server import check_listeners
from tasks.queue.worker_names import name_variable, read_other_worker
from tasks.server.flow_runs import read_pool_settings
from tasks.spec.formatting import format_count

#: Longest time, in seconds, that one HTTP request to a part of the `muster up` stack may take.
_REQUEST_WITHIN_S = 10.0
#: Default time limit, in seconds, of `wait_until_answering` for all parts of the `muster up` stack.
_ALL_WITHIN_S = 60.0
#: Time, in seconds, between two rounds of checks of `wait_until_answering`.
_CHECK_EVERY_S = 0.2
#: Beginning of the text in `PartCheck.problem` if a server has rejected the password.
_REFUSED = "wants a password"


@dataclass(frozen=True, slots=True, kw_only=True)
class PartCheck:
    """Result of one check of a part of the `muster up` stack."""

    #: Name of the part of the `muster up` stack, as `muster status` shows it.
    part: str
    #: Address of this part of the `muster up` stack, or a short description of its work.
    description: str
    #: Reason why this part of the `muster up` stack counts as not answering. Empty if the part
    #: answers.
    problem: str = ""

    def __str__(self) -> str:
        return f"{self.part:<15} {self.description}  {self.problem or 'answers'}"


def check_parts(stack: Stack) -> list[PartCheck]:
    """Send a request to each part of the `muster up` stack and return one result for each part."""
    with _connect() as client:
        return [
            _check_url(client, "Prefect UI", stack.ui_url, f"{stack.api_url}/health"),
            _check_url(client, "Ray dashboard", stack.ray_dashboard, stack.ray_health),
            _check_ray_session(stack),
            *(_check_url(client, node.name, node.description, node.health) for node in stack.nodes),
            _check_pool(client, stack),
            _check_worker(client, stack),
        ]


def _connect() -> httpx.Client:
    """Return a client that sends the stack's password only to programs of trusted users."""
    auth = httpx.BasicAuth(*auth_string().partition(":")[::2])
    client = httpx.Client(trust_env=False, timeout=_REQUEST_WITHIN_S, auth=auth)
    check_listeners(client)
    return client


def are_all_answering(checks: Sequence[PartCheck]) -> bool:
    """Return True if none of the checks found a problem."""
    return not any(check.problem for check in checks)


def wait_until_answering(stack: Stack, limit_s: float = _ALL_WITHIN_S) -> None:
    """Repeat the checks of all parts of the `muster up` stack until every part answers.

    Args:
        stack: The running stack.
        limit_s: Longest time to wait, in seconds.

    Raises:
        StackError: Some parts did not answer in time, or a server rejected the password. The
            message names these parts.
    """
    deadline = time.monotonic() + limit_s
    while not are_all_answering(checks := check_parts(stack)):
        is_refused = any(_REFUSED in check.problem for check in checks)
        if is_refused or time.monotonic() > deadline:
            problems = "; ".join(
                f"{check.part} {check.problem}" for check in checks if check.problem
            )
            waited = "" if is_refused else f" after {limit_s:.0f} s"
            raise StackError(f"not all parts of the stack answer{waited}: {problems}")
        time.sleep(_CHECK_EVERY_S)


def _check_url(client: httpx.Client, part: str, description: str, url: str) -> PartCheck:
    """Check that a GET request to the URL succeeds, and return the result of the check."""
    try:
        _send_request(client, "GET", url)
    except _NoAnswer as error:
        return PartCheck(part=part, description=description, problem=str(error))
    return PartCheck(part=part, description=description)


def _check_ray_session(stack: Stack) -> PartCheck:
    """Check the control store, the directories and the sockets of Ray, and return the result."""
    return PartCheck(
        part="Ray session",
        description=str(stack.ray_temp),
        problem=find_session_problem(stack),
    )


def _check_pool(client: httpx.Client, stack: Stack) -> PartCheck:
    """Check that the `muster up` stack's work pool exists, and return the result of the check."""
    try:
        pool = _request_json(client, "GET", f"{stack.api_url}/work_pools/{POOL}")
    except _NoAnswer as error:
        return PartCheck(part="work pool", description=POOL, problem=str(error))

    limit = pool["concurrency_limit"]
    limit_text = "no limit" if limit is None else f"at most {limit} runs at once"
    # A user may pause the work pool on purpose. So show the pause, but not as a problem.
    pause_text = ", paused" if pool["is_paused"] else ""
    return PartCheck(part="work pool", description=f"{POOL}, {limit_text}{pause_text}")


def describe_listed_nodes(stack: Stack) -> str:
    """Return the machines that the work pool lists for runs without Ray, with their GPUs.

    If the work pool lists no machine, the text contains the command that adds a machine.
    """
    with _connect() as client:
        try:
            pool = _request_json(client, "GET", f"{stack.api_url}/work_pools/{POOL}")
        except _NoAnswer as error:
            return f"unknown: {error}"
    nodes = read_pool_settings(pool["base_job_template"]).get("nodes") or []
    if not nodes:
        command = f"muster queue set node.{host_name()}=GPUS"
        return (
            "none, because Muster found no GPU on this machine (to add GPUs, set MUSTER_GPUS, or "
            f"run: {command})"
        )
    return ", ".join(f"{node['name']} ({format_count(node['gpus'], 'GPU')})" for node in nodes)


def _check_worker(client: httpx.Client, stack: Stack) -> PartCheck:
    """Check that the stack's worker polls the Prefect server, and return the result of the check.

    There are two conditions: the worker's health check must report that the worker polls, and the
    Prefect server must have received a heartbeat of the worker since the start of the stack.
    """
    workers_url = f"{stack.api_url}/work_pools/{POOL}/workers/filter"
    problem = "has not yet reported to the Prefect server"
    try:
        _request_json(client, "GET", stack.worker_health)
        for worker in _request_json(client, "POST", workers_url, json={}):
            if worker["name"] == stack.worker and worker["status"] == "ONLINE":
                heartbeat_at = datetime.fromisoformat(worker["last_heartbeat_time"]).timestamp()
                problem = "" if heartbeat_at > stack.started_at else problem
    except _NoAnswer as error:
        problem = str(error)
    other = _find_other_worker(client, stack)
    description = (
        f"{stack.worker} (another worker also has this name: {other})" if other else stack.worker
    )
    return PartCheck(part="worker", description=description, problem=problem)


def _find_other_worker(client: httpx.Client, stack: Stack) -> str:
    """Return the host and process of a second live worker with the name of the stack's worker.

    Returns:
        The host and process, or an empty string if no second worker is known.
    """
    variable_url = f"{stack.api_url}/variables/name/{name_variable(POOL, stack.worker)}"
    try:
        return read_other_worker(_request_json(client, "GET", variable_url)["value"])
    except _NoAnswer:
        # The stack's worker has not stored its host and process on the Prefect server yet, or the
        # server does not answer.
        return ""


class _NoAnswer(Exception):
    """A request to a program of the `muster up` stack failed.

    The message of the exception describes the problem.
    """


def _send_request(client: httpx.Client, method: str, url: str, **options: Any) -> httpx.Response:
    """Send a request and return its response.

    Args:
        options: Further arguments of `httpx.Client.request`.

    Raises:
        _NoAnswer: No response came, or its status is not 2xx.
    """
    try:
        return client.request(method, url, **options).raise_for_status()
    except httpx.HTTPError as error:
        status = error.response.status_code if isinstance(error, httpx.HTTPStatusError) else 0
        if status == httpx.codes.UNAUTHORIZED:
            raise _NoAnswer(
                f"{_REFUSED}: in this shell, set {AUTH} to the value that was used for `muster up`"
            ) from None
        raise _NoAnswer(_describe_silence(method, url, error)) from None


def _request_json(client: httpx.Client, method: str, url: str, **options: Any) -> Any:
    """Send a request and return the parsed JSON of its response.

    Args:
        options: Further arguments of `httpx.Client.request`.

    Raises:
        _NoAnswer: No response came, its status is not 2xx, or its body is not JSON.
    """
    response = _send_request(client, method, url, **options)
    try:
        return response.json()
    except ValueError as error:
        raise _NoAnswer(_describe_silence(method, url, error)) from None


def _describe_silence(method: str, url: str, error: Exception) -> str:
    """Return a description of a failed HTTP request, for the field `PartCheck.problem`."""
    return f"does not answer: {method} {url}: {error or type(error).__name__}"
