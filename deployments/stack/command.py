"""The lasting stack of this machine: `muster up`, `muster down`, `muster status`.

A Prefect server with its UI, a Ray head, nodes with logical GPUs where `--gpus` asks for them, the
work pool `gang`, one worker, and the deployments of prefect.yaml. One stack belongs to one
MUSTER_HOME. All of it listens on loopback only.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from typing import Annotated
from urllib.parse import urlsplit

from cyclopts import Parameter, validators

from deployments.stack.answers import answers, are_all_answering, until_answering
from deployments.stack.env import (
    AUTH,
    NODES_PAGE,
    POOL,
    PROJECT_FILE,
    QUEUE_PAGE,
    ROOT,
    RUN_ID,
    client_env,
)
from deployments.stack.launch import launch, stop, tail_of
from deployments.stack.nodes import Fleet
from deployments.stack.state import Stack, StackError, StackPlace
from tasks.processes.ports import listeners
from tasks.processes.signals import interrupt_on_signals
from tasks.record.places import password_file
from tasks.show.arguments import EXIT_DONE, EXIT_FAILED
from tasks.spec.formatting import format_count

_DEFAULT_PORT = 4200
#: A start has a deadline for each part; a command waits for another one that long.
_OTHER_COMMAND_WITHIN_S = 600.0
_SETUP_WITHIN_S = 120.0


Port = Annotated[
    int | None,
    Parameter(
        name="--port",
        validator=validators.Number(gte=1, lte=65535),
        help=f"Of the Prefect server; else that of PREFECT_API_URL, or {_DEFAULT_PORT}.",
    ),
]
Gpus = Annotated[
    Fleet | None,
    Parameter(
        name="--gpus",
        accepts_keys=False,
        n_tokens=1,
        converter=lambda _type, tokens: Fleet.parsed(tokens[0].value),
        help="NxG: N Ray nodes on this machine with G logical GPUs each; G alone is 1xG; else "
        "Ray's head is alone.",
    ),
]
AnyPort = Annotated[int | None, Parameter(validator=validators.Number(gte=0, lte=65535))]


def up(
    *,
    port: Port = None,
    gpus: Gpus = None,
    ray_dashboard: AnyPort = None,
) -> int:
    """Start the lasting stack of this machine, and wait until all of it answers: a Prefect server
    with its UI, a Ray head, a work pool, a worker, the deployments.

    All of it listens on 127.0.0.1 only. Where it is up already, the deployments are applied again.

    Exit: 0 done, 1 not, 2 wrong options, 130 interrupted.

    Args:
        ray_dashboard: Port of Ray's dashboard; else 8265 where that is free; 0: any free one.
    """
    place = _place()
    with place.locked(_say_waiting, _OTHER_COMMAND_WITHIN_S):
        stack = place.load()
        if stack is not None and stack.is_running and stack.state == "up":
            return _again(place, stack, port, gpus)
        if stack is not None and stack.is_running:
            _say("A stack is coming to its end here: waiting for that.")
            stop(stack)
        with place.no_supervisor() as lock_fd:
            place.clear()
            wanted = port or _default_port()
            _refuse_taken(wanted)
            if ray_dashboard:
                _refuse_taken(ray_dashboard)
            place.begin_logs()
            stack = launch(place, wanted, ray_dashboard, gpus, lock_fd, _say)
        _say(_summary(place, stack))
    return EXIT_DONE


def down(*, port: Port = None) -> int:
    """Stop the stack and what runs in it, until nothing is left.

    Exit: 0 nothing is left, 1 something may be, 2 wrong options, 130 interrupted.
    """
    place = _place()
    with place.locked(_say_waiting, _OTHER_COMMAND_WITHIN_S):
        stack = place.load()
        if stack is None:
            # One that an `up` was killed over may not have described itself yet.
            with place.no_supervisor():
                place.clear()
            _say(f"No stack of {place.directory.parent} is running.")
            return EXIT_DONE
        _refuse_other_port(stack, port)
        if stack.is_running:
            _say("Stopping the worker with its runs, Ray, and the Prefect server.")
            stop(stack)
        elif stack.state in ("starting", "up"):
            _say("The stack's supervisor was killed: waiting until its parts have ended, too.")
        with place.no_supervisor():
            place.clear()
        _say("The stack is stopped; nothing of it is left.")
        return EXIT_DONE


def status(*, port: Port = None) -> int:
    """Say what of the stack runs where.

    Exit: 0 all of it answers, 1 not, 2 wrong options.
    """
    place = _place()
    stack = place.load()
    if stack is None:
        _say(f"No stack of {place.directory.parent} is running; `muster up` starts one.")
        return EXIT_FAILED
    _refuse_other_port(stack, port)
    if not stack.is_running:
        # A supervisor that ends by itself leaves another state.
        was_killed = stack.state in ("starting", "up", "stopping")
        message = "its supervisor was killed" if was_killed else stack.message
        why = f": {message}" if message else ""
        _say(f"The stack is not running any more{why}.")
        for line in _deaths(stack):
            _say(line)
        _say(f"Its logs: {place.logs}")
        return EXIT_FAILED
    found = answers(stack)
    started = _moment(stack.started_at)
    _say(f"The stack (pid {stack.supervisor.pid}) is {stack.state}, started {started}.")
    for answer in found:
        _say(f"  {answer}")
    for line in _deaths(stack):
        _say(line)
    _say(f"  logs            {place.logs}")
    return EXIT_DONE if are_all_answering(found) else EXIT_FAILED


def _deaths(stack: Stack) -> list[str]:
    """One line for each part that has died, the one that died last at the end."""
    parts = [part for part in stack.parts if part.died_at is not None]
    lines = []
    for part in sorted(parts, key=lambda part: part.died_at or 0.0):
        died = f"died {format_count(part.deaths, 'time')}, last at {_moment(part.died_at or 0.0)}"
        lines.append(f"  {part.name:<15} {died}, now {part.state}: {part.reason}")
    return lines


def _moment(epoch_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(epoch_s))


def _place() -> StackPlace:
    interrupt_on_signals()
    return StackPlace.of_home()


def _again(place: StackPlace, stack: Stack, port: int | None, fleet: Fleet | None) -> int:
    _refuse_other_port(stack, port)
    _refuse_other_fleet(stack, fleet)
    _say(f"The stack is up already (pid {stack.supervisor.pid}): applying the deployments again.")
    until_answering(stack)
    log = place.log("deployments")
    with log.open("ab") as output:
        try:
            subprocess.run(
                (sys.executable, "-m", "deployments.stack.setup"),
                cwd=ROOT,
                env=client_env(place.directory.parent, stack.api_url),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                timeout=_SETUP_WITHIN_S,
                check=True,
            )
        except subprocess.SubprocessError as error:
            raise StackError(
                f"the deployments were not applied: {error}\nLast lines of {log}:\n{tail_of(log)}"
            ) from None
    _say(_summary(place, stack))
    return EXIT_DONE


def _summary(place: StackPlace, stack: Stack) -> str:
    password, export = f"what {AUTH} is set to here", f"export {AUTH}"
    if stack.has_own_password:
        file = shlex.quote(str(password_file()))
        password, export = f"cat {file}", f'export {AUTH}="$(cat {file})"'
    ray = " ".join(f"{key}={shlex.quote(value)}" for key, value in stack.ray_auth.items())
    return f"""\
The stack is up.
  Prefect UI      {stack.ui_url}
  its password    {password}
  Ray dashboard   {stack.ray_dashboard}  (ray.init: {stack.ray_address})
  Ray nodes       {_nodes(stack)}
  work pool       {POOL}, served by the worker {stack.worker}
  queue           {stack.ui_url}{QUEUE_PAGE}
  nodes           {stack.ui_url}{NODES_PAGE}
  deployments     those of {PROJECT_FILE}
  database        {place.server_home}
  logs            {place.logs}
Next, from any directory:
  muster submit SPEC.yaml --watch    a run of yours, through the queue (muster init writes a spec)
  muster deploy SPEC.yaml            the same to be started from the UI, or by a schedule
  muster ls                          what runs, waits and has ended
  muster down                        stops it all
Other programs find the server by
  export PREFECT_API_URL={stack.api_url}
  {export}
and its Ray cluster, as Ray's own commands do, by
  export RAY_ADDRESS={stack.ray_dashboard} {ray}"""


def _nodes(stack: Stack) -> str:
    if not stack.nodes:
        return "only the head, which runs no work (muster up --gpus 2x8: with logical GPUs)"
    names = ", ".join(f"{node.name} ({node.gpus})" for node in stack.nodes)
    return f"{names}: {sum(node.gpus for node in stack.nodes)} logical GPUs in all"


def _default_port() -> int:
    """That of PREFECT_API_URL where it leads to this machine, so that it fits the stack."""
    try:
        parts = urlsplit(os.environ.get("PREFECT_API_URL", ""))
        host, port = parts.hostname or "", parts.port
    except ValueError:
        return _DEFAULT_PORT
    is_loopback = host == "localhost" or host.startswith("127.")
    return port if is_loopback and port else _DEFAULT_PORT


def _refuse_taken(port: int) -> None:
    found = []
    for listener in listeners(port):
        stack = "the stack of another MUSTER_HOME, " if listener.run_id == RUN_ID else ""
        who = f"pid {listener.pid} ({listener.command})" if listener.pid else "another user"
        found.append(f"{stack}{who}")
    if found:
        raise StackError(
            f"port {port} is taken by {' and '.join(found)}: end it, or choose another port with "
            "--port (muster up --port 4201)"
        )


def _refuse_other_port(stack: Stack, port: int | None) -> None:
    if port not in (None, stack.port):
        raise StackError(
            f"the stack of this MUSTER_HOME has port {stack.port}, not {port}: leave --port out, "
            "or set another MUSTER_HOME for a second stack"
        )


def _refuse_other_fleet(stack: Stack, fleet: Fleet | None) -> None:
    if fleet is not None and str(fleet) != stack.fleet:
        has = f"has --gpus {stack.fleet}" if stack.fleet else "has no nodes with GPUs"
        raise StackError(
            f"the stack that is up {has}, not {fleet}, and its nodes can't be changed: "
            f"`muster down` first, then `muster up --gpus {fleet}`"
        )


def _say_waiting() -> None:
    _say("Another `up` or `down` of this stack is under way: waiting for it.")


def _say(text: str) -> None:
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # `muster up | head`: that nobody reads on is no reason to stop half way.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
