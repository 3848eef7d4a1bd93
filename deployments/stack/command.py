"""The commands `muster up`, `muster down` and `muster status` for the stack of this machine.

A stack consists of a Prefect server with its UI, a Ray head, the work pool `gang`, one worker, and
the deployments of prefect.yaml. The option `--gpus` adds Ray nodes with logical GPUs. Each
MUSTER_HOME has at most one stack. All parts listen on the loopback interface only.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from contextlib import suppress
from typing import Annotated
from urllib.parse import urlsplit

from cyclopts import Parameter, validators

from deployments.stack.env import (
    AUTH,
    NODES_PAGE,
    POOL,
    PROJECT_FILE,
    QUEUE_PAGE,
    RAY_VARIABLE,
    ROOT,
    RUN_ID,
    client_env,
)
from deployments.stack.launch import launch, read_last_lines, restart_ray, stop
from deployments.stack.nodes import Fleet
from deployments.stack.part_checks import (
    are_all_answering,
    check_parts,
    describe_listed_nodes,
    wait_until_answering,
)
from deployments.stack.ray_session import BrokenSession, check_session
from deployments.stack.state import Stack, StackError, StackPlace
from tasks.processes.identity import host_name, user_name
from tasks.processes.own_modules import make_own_command
from tasks.processes.ports import listeners
from tasks.processes.registry import Owner, describe_unreadable_files
from tasks.processes.signals import interrupt_on_signals
from tasks.processes.stop_notes import write_stop_notes
from tasks.ray.dashboard import Denied, NoAnswer
from tasks.record.cancellation_note import take_note
from tasks.record.places import password_file
from tasks.show.arguments import EXIT_DONE, EXIT_FAILED
from tasks.spec.formatting import format_count

#: Port of the Prefect server if neither `--port` nor PREFECT_API_URL gives another port.
_DEFAULT_PORT = 4200
#: Longest time, in seconds, that a command waits for the end of another `muster up` or `muster
#: down`. The limit is longer than the slowest successful start of a stack.
_OTHER_COMMAND_WITHIN_S = 600.0
#: Longest time, in seconds, that applying the deployments to a running stack may take.
_SETUP_WITHIN_S = 120.0

#: Type of the option `--port`.
Port = Annotated[
    int | None,
    Parameter(
        name="--port",
        validator=validators.Number(gte=1, lte=65535),
        help="Port of the Prefect server. Default: the port in PREFECT_API_URL, or "
        f"{_DEFAULT_PORT}.",
    ),
]
#: Type of the option `--gpus`.
Gpus = Annotated[
    Fleet | None,
    Parameter(
        name="--gpus",
        accepts_keys=False,
        n_tokens=1,
        converter=lambda _type, tokens: Fleet.parsed(tokens[0].value),
        help="Ray nodes to start on this machine. NxG starts N nodes with G logical GPUs "
        "each; G alone starts one node. Default: only the head node of Ray.",
    ),
]
#: Type of an option that takes a port, or 0 for any free port.
AnyPort = Annotated[int | None, Parameter(validator=validators.Number(gte=0, lte=65535))]


def up(
    *,
    port: Port = None,
    gpus: Gpus = None,
    ray_dashboard: AnyPort = None,
) -> int:
    """Start the lasting stack of this machine, and wait until all parts answer.

    The stack has a Prefect server with its UI, a Ray head, a work pool, a worker and the
    deployments. All parts listen only on 127.0.0.1. If the stack is already up, the deployments are
    applied again. If files of the Ray session are missing, the Ray cluster is restarted.

    Exit: 0 done, 1 failed, 2 wrong options, 130 interrupted.

    Args:
        ray_dashboard: Port of Ray's dashboard. 0: any free port. Default: 8265 if it is free.
    """
    place = _open_place()
    with place.locked(_say_waiting, _OTHER_COMMAND_WITHIN_S):
        stack = place.load()
        if stack is not None and stack.is_running and stack.state == "up":
            return _apply_deployments_again(place, stack, port, gpus)
        if stack is not None and stack.is_running:
            _say(
                "The Muster stack of this MUSTER_HOME is stopping. This command waits until the "
                "stack has ended."
            )
            stop(stack)
        with place.no_supervisor() as lock_fd:
            place.clear()
            server_port = port or _default_port()
            _refuse_taken_port(server_port)
            if ray_dashboard:
                _refuse_taken_port(ray_dashboard)
            place.begin_logs()
            with place.announce_start(server_port):
                stack = launch(place, server_port, ray_dashboard, gpus, lock_fd, _say)
        _say(_summarize(place, stack))
    return EXIT_DONE


def down(*, port: Port = None) -> int:
    """Stop the stack and its runs, and wait until all their processes have ended.

    Exit: 0 all processes have ended, 1 some may still run, 2 wrong options, 130 interrupted.
    """
    place = _open_place()
    with place.locked(_say_waiting, _OTHER_COMMAND_WITHIN_S):
        stack = place.load()
        if stack is None:
            # Wait until no supervisor runs. If `muster up` was killed during a start, the
            # supervisor may still run and write stack.json later.
            with place.no_supervisor():
                place.clear()
            _say(f"No Muster stack with the home directory {place.directory.parent} is running.")
            return EXIT_DONE
        _refuse_other_port(stack, port)
        if stack.is_running:
            _say(
                "Stopping the Muster stack: the worker with its runs, Ray, and the Prefect server."
            )
            _stop_with_reason(stack)
        elif stack.state in ("starting", "up"):
            _say(
                "The supervisor process of the Muster stack was killed. This command waits until "
                "the other processes of the stack have ended."
            )
        with place.no_supervisor():
            place.clear()
        _say("The Muster stack is stopped, and all of its processes have ended.")
        return EXIT_DONE


def _stop_with_reason(stack: Stack) -> None:
    """Stop the stack, and let each run of the stack record who stopped the stack."""
    reason = f"{user_name()} stopped the stack with `muster down` on {host_name()}"

    def is_run_of_stack(owner: Owner) -> bool:
        is_own_worker = owner.worker == stack.worker
        return is_own_worker and stack.is_reached_at(owner.api_url or "")

    directories = write_stop_notes(f"cancelled, because {reason}", is_run_of_stack)
    try:
        stop(stack)
    finally:
        # Each stopped run reads the file that gives the reason for the stop, and deletes the file.
        # Delete the files of runs that ended by themselves just before the stop.
        for directory in directories:
            take_note(directory)


def status(*, port: Port = None) -> int:
    """Show the parts of the stack, with their addresses and problems.

    Exit: 0 all parts answer, 1 a part does not answer, 2 wrong options.
    """
    place = _open_place()
    for line in describe_unreadable_files():
        _say(line)
    stack = place.load()
    if stack is None:
        _say(
            f"No Muster stack with the home directory {place.directory.parent} is running. Start "
            "a stack with `muster up`."
        )
        return EXIT_FAILED
    _refuse_other_port(stack, port)
    if not stack.is_running:
        # A supervisor that was not killed writes `stopped` or `failed` before it ends.
        was_killed = stack.state in ("starting", "up", "stopping")
        message = "the supervisor of the stack was killed" if was_killed else stack.message
        reason = f": {message}" if message else ""
        _say(f"The stack has ended{reason}.")
        for line in _describe_deaths(stack):
            _say(line)
        _say(f"Its logs: {place.logs}")
        return EXIT_FAILED
    checks = check_parts(stack)
    started = _format_time(stack.started_at)
    _say(
        f"The Muster stack (pid {stack.supervisor.pid}) is {stack.state}. It was started at "
        f"{started}."
    )
    for check in checks:
        _say(f"  {check}")
    for line in _describe_deaths(stack):
        _say(line)
    _say(f"  logs            {place.logs}")
    return EXIT_DONE if are_all_answering(checks) else EXIT_FAILED


def _describe_deaths(stack: Stack) -> list[str]:
    """Return a line for each program of the stack that has died, in the order of the deaths."""
    dead_parts = [part for part in stack.parts if part.died_at is not None]
    lines = []
    for part in sorted(dead_parts, key=lambda part: part.died_at or 0.0):
        count = format_count(part.deaths, "time")
        died = f"died {count}, last at {_format_time(part.died_at or 0.0)}"
        lines.append(f"  {part.name:<15} {died}, now {part.state}: {part.reason}")
    return lines


def _format_time(epoch_s: float) -> str:
    """Return a time in UTC epoch seconds as date and time of day."""
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(epoch_s))


def _open_place() -> StackPlace:
    """Return the stack directory of MUSTER_HOME.

    After this call, stop signals interrupt the command.
    """
    interrupt_on_signals()
    return StackPlace.of_home()


def _apply_deployments_again(
    place: StackPlace, stack: Stack, port: int | None, fleet: Fleet | None
) -> int:
    """Apply the deployments to a running stack, and return the exit code of `muster up`.

    Args:
        place: Directory of the stack.
        stack: The running stack.
        port: Value of the option `--port`, or None.
        fleet: Value of the option `--gpus`, or None.

    Raises:
        StackError: The options do not fit the running stack, or the deployments were not applied.
    """
    _refuse_other_port(stack, port)
    _refuse_other_fleet(stack, fleet)
    _say(
        f"The Muster stack is already up (pid {stack.supervisor.pid}). Muster applies its "
        "deployments again."
    )
    _repair_ray(place, stack)
    wait_until_answering(stack)
    log = place.log("deployments")
    with log.open("ab") as output:
        try:
            subprocess.run(
                make_own_command("deployments.stack.setup"),
                cwd=ROOT,
                env={
                    **client_env(place.directory.parent, stack.api_url),
                    # The settings of a new work pool must list the Ray cluster of the stack.
                    RAY_VARIABLE: stack.ray_dashboard,
                },
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                timeout=_SETUP_WITHIN_S,
                check=True,
            )
        except subprocess.SubprocessError as error:
            raise StackError(
                f"Muster could not apply the deployments: {error}\nLast lines of "
                f"{log}:\n{read_last_lines(log)}"
            ) from None
    _say(_summarize(place, stack))
    return EXIT_DONE


def _repair_ray(place: StackPlace, stack: Stack) -> None:
    """Restart the Ray cluster if files of its session are missing.

    Raises:
        StackError: The Ray cluster does not answer after the restart.
    """
    try:
        # Ignore a cluster that does not answer. The cluster may be starting, and later checks wait
        # for an answer.
        with suppress(NoAnswer, Denied):
            check_session(stack)
    except BrokenSession as error:
        _say(
            f"Ray's session is broken: {error}. Muster restarts the Ray cluster of this stack, "
            "which ends all jobs of the cluster."
        )
        restart_ray(place, stack)


def _summarize(place: StackPlace, stack: Stack) -> str:
    """Return the text that `muster up` shows at its end: addresses, passwords and next commands."""
    if stack.has_own_password:
        file = shlex.quote(str(password_file()))
        password = f"cat {file}"
        export = f'export {AUTH}="$(cat {file})"'
    else:
        password = f"the value of {AUTH} in this shell"
        export = f"export {AUTH}"
    ray_variables = " ".join(f"{key}={shlex.quote(value)}" for key, value in stack.ray_auth.items())
    return f"""\
The stack is up.
  Prefect UI      {stack.ui_url}
  its password    {password}
  Ray dashboard   {stack.ray_dashboard}  (ray.init: {stack.ray_address})
  Ray nodes       {_describe_nodes(stack)}
  own GPUs        {describe_listed_nodes(stack)}
  work pool       {POOL}, served by the worker {stack.worker}
  queue           {stack.ui_url}{QUEUE_PAGE}
  nodes           {stack.ui_url}{NODES_PAGE}
  deployments     from {PROJECT_FILE}
  database        {place.server_home}
  logs            {place.logs}
Next, from any directory:
  muster submit SPEC.yaml --watch    queue a run (muster init writes a spec)
  muster deploy SPEC.yaml            let the Prefect UI or a schedule start runs of a spec
  muster ls                          list the runs
  muster down                        stop the stack and its runs
For other programs, set the address of the Prefect server with
  export PREFECT_API_URL={stack.api_url}
  {export}
and the address of the Ray cluster with
  export RAY_ADDRESS={stack.ray_dashboard} {ray_variables}"""


def _describe_nodes(stack: Stack) -> str:
    """Return the names and GPU counts of the Ray nodes as one line."""
    if not stack.nodes:
        return (
            "only the head node, which runs no work (to add nodes with logical GPUs: muster up "
            "--gpus 2x8)"
        )
    names = ", ".join(f"{node.name} ({node.gpus})" for node in stack.nodes)
    return f"{names}: {sum(node.gpus for node in stack.nodes)} logical GPUs in all"


def _default_port() -> int:
    """Return the port in PREFECT_API_URL if that URL leads to this machine, otherwise 4200."""
    try:
        parts = urlsplit(os.environ.get("PREFECT_API_URL", ""))
        host, port = parts.hostname or "", parts.port
    except ValueError:
        return _DEFAULT_PORT
    is_loopback = host == "localhost" or host.startswith("127.")
    return port if is_loopback and port else _DEFAULT_PORT


def _refuse_taken_port(port: int) -> None:
    """Raise StackError if processes listen on the port. The message names these processes."""
    holders = []
    for listener in listeners(port):
        stack = "the stack of another MUSTER_HOME, " if listener.run_id == RUN_ID else ""
        process = f"pid {listener.pid} ({listener.command})" if listener.pid else "another user"
        holders.append(f"{stack}{process}")
    if holders:
        raise StackError(
            f"port {port} is already used by {' and '.join(holders)}. End that program, or choose "
            "another port, for example: muster up --port 4201"
        )


def _refuse_other_port(stack: Stack, port: int | None) -> None:
    """Raise StackError if the stack's Prefect server has another port than `port`.

    Args:
        stack: The running stack.
        port: Value of the option `--port`. None to accept any port.
    """
    if port not in (None, stack.port):
        raise StackError(
            f"the running stack uses port {stack.port}, not {port}. Omit --port, or set another "
            "MUSTER_HOME to start a second stack"
        )


def _refuse_other_fleet(stack: Stack, fleet: Fleet | None) -> None:
    """Refuse the option `--gpus` if the running stack was started with another value.

    Args:
        stack: The running stack.
        fleet: Value of the option `--gpus`. None without this option: any stack is accepted.

    Raises:
        StackError: The running stack was started with another value.
    """
    if fleet is not None and str(fleet) != stack.fleet:
        current_fleet = f"with --gpus {stack.fleet}" if stack.fleet else "without --gpus"
        raise StackError(
            f"the running stack was started {current_fleet}, and its nodes cannot be changed. Run "
            f"`muster down`, then `muster up --gpus {fleet}`"
        )


def _say_waiting() -> None:
    """Tell the user that this command waits for the end of another command."""
    _say(
        "Another `muster up` or `muster down` of this stack is still running. This command waits "
        "for the end of the other command."
    )


def _say(text: str) -> None:
    """Print a text. If standard output is closed, discard this text and all later texts."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # The reader of standard output has ended early, for example `head` in `muster up | head`.
        # Replace standard output with /dev/null, so that the command can still finish its work.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
