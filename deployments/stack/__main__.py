"""The lasting stack of this machine: `python -m deployments.stack up | down | status`.

A Prefect server with its UI, a Ray head, nodes with logical GPUs where `--gpus` asks for them, the
work pool `gang`, one worker, and the deployments of prefect.yaml. One stack belongs to one
MUSTER_HOME. All of it listens on loopback only.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from deployments.stack.answers import answers, are_all_answering, until_answering
from deployments.stack.env import HOST, NODES_PAGE, POOL, QUEUE_PAGE, ROOT, RUN_ID, client_env
from deployments.stack.launch import launch, stop, tail_of
from deployments.stack.nodes import MOST_GPUS, MOST_NODES, Fleet
from deployments.stack.state import Stack, StackError, StackPlace
from tasks.processes.ports import listeners

EXIT_OK, EXIT_FAILED, EXIT_INTERRUPTED = 0, 1, 130

_DEFAULT_PORT = 4200
#: A start has a deadline for each part; a command waits for another one that long.
_OTHER_COMMAND_WITHIN_S = 600.0
_SETUP_WITHIN_S = 120.0


def up(place: StackPlace, port: int | None, ray_dashboard: int | None, fleet: Fleet | None) -> int:
    """Start the stack, or say that it is there; either way every deployment is applied."""
    with place.locked(_say_waiting, _OTHER_COMMAND_WITHIN_S):
        stack = place.load()
        if stack is not None and stack.is_running and stack.state == "up":
            return _again(place, stack, port, fleet)
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
            stack = launch(place, wanted, ray_dashboard, fleet, lock_fd, _say)
        _say(_summary(place, stack))
    return EXIT_OK


def down(place: StackPlace, port: int | None) -> int:
    """Stop the stack and what runs in it, until nothing is left."""
    with place.locked(_say_waiting, _OTHER_COMMAND_WITHIN_S):
        stack = place.load()
        if stack is None:
            # One that an `up` was killed over may not have described itself yet.
            with place.no_supervisor():
                place.clear()
            _say(f"No stack of {place.directory.parent} is running.")
            return EXIT_OK
        _refuse_other_port(stack, port)
        if stack.is_running:
            _say("Stopping the worker with its runs, Ray, and the Prefect server.")
            stop(stack)
        elif stack.state in ("starting", "up"):
            _say("The stack's supervisor was killed: waiting until its parts have ended, too.")
        with place.no_supervisor():
            place.clear()
        _say("The stack is stopped; nothing of it is left.")
        return EXIT_OK


def status(place: StackPlace, port: int | None) -> int:
    """Say what runs where; 0 only if all of it answers."""
    stack = place.load()
    if stack is None:
        _say(f"No stack of {place.directory.parent} is running; `make up` starts one.")
        return EXIT_FAILED
    _refuse_other_port(stack, port)
    if not stack.is_running:
        why = f": {stack.message}" if stack.message else ""
        _say(f"The stack is not running any more{why}.\nIts logs: {place.logs}")
        return EXIT_FAILED
    found = answers(stack)
    started = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(stack.started_at))
    _say(f"The stack (pid {stack.supervisor.pid}) is {stack.state}, started {started}.")
    for answer in found:
        _say(f"  {answer}")
    _say(f"  logs            {place.logs}")
    return EXIT_OK if are_all_answering(found) else EXIT_FAILED


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
    return EXIT_OK


def _summary(place: StackPlace, stack: Stack) -> str:
    return f"""\
The stack is up.
  Prefect UI      {stack.ui_url}
  Ray dashboard   {stack.ray_dashboard}  (ray.init: {stack.ray_address})
  Ray nodes       {_nodes(stack)}
  work pool       {POOL}, served by the worker {stack.worker}
  queue           {stack.ui_url}{QUEUE_PAGE}
  nodes           {stack.ui_url}{NODES_PAGE}
  deployments     those of {ROOT / "prefect.yaml"}
  database        {place.server_home}
  logs            {place.logs}
Start a run from the UI, or with
  export PREFECT_API_URL={stack.api_url}
  {_shown(Path(sys.executable).parent / "prefect")} deployment run 'train/quickstart' --watch
`make down` stops it all."""


def _nodes(stack: Stack) -> str:
    if not stack.nodes:
        return "only the head, which runs no work (make up GPUS=2x8: with logical GPUs)"
    names = ", ".join(f"{node.name} ({node.gpus})" for node in stack.nodes)
    return f"{names}: {sum(node.gpus for node in stack.nodes)} logical GPUs in all"


def _shown(path: Path) -> str:
    """The path as one would type it here."""
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else str(path)


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
            "--port (make up PORT=4201)"
        )


def _refuse_other_port(stack: Stack, port: int | None) -> None:
    if port not in (None, stack.port):
        raise StackError(
            f"the stack of this MUSTER_HOME has port {stack.port}, not {port}: leave --port out, "
            "or set another MUSTER_HOME for a second stack"
        )


def _refuse_other_fleet(stack: Stack, fleet: Fleet | None) -> None:
    if fleet is not None and str(fleet) != stack.fleet:
        has = f"has GPUS={stack.fleet}" if stack.fleet else "has no nodes with GPUs"
        raise StackError(
            f"the stack that is up {has}, not {fleet}, and its nodes can't be changed: "
            f"`make down` first, then `make up GPUS={fleet}`"
        )


def _say_waiting() -> None:
    _say("Another `up` or `down` of this stack is under way: waiting for it.")


def _say(text: str) -> None:
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # `make up | head`: that nobody reads on is no reason to stop half way.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m deployments.stack",
        description=f"A lasting stack on this machine, on {HOST} only: a Prefect server with its "
        "UI, a Ray head, a work pool, a worker and the deployments of prefect.yaml.",
        epilog="Exit: 0 done (status: all of it answers), 1 not, 2 wrong options, 130 interrupted.",
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="up|down|status")
    texts = {
        "up": "start it and wait until all of it answers",
        "down": "stop it, and the runs in it, until nothing is left",
        "status": "say what runs where",
    }
    for name, text in texts.items():
        command = commands.add_parser(
            name, help=text, description=f"{text[0].upper()}{text[1:]}.", epilog=parser.epilog
        )
        command.add_argument(
            "--port",
            type=_port,
            help=f"of the Prefect server; else that of PREFECT_API_URL, or {_DEFAULT_PORT}",
        )
        if name == "up":
            command.add_argument(
                "--ray-dashboard",
                metavar="PORT",
                type=_port_or_any,
                help="of Ray's dashboard; else 8265 where that is free; 0: any free one",
            )
            command.add_argument(
                "--gpus",
                metavar="NxG",
                type=_fleet,
                help=f"N Ray nodes on this machine, at most {MOST_NODES}, with G logical GPUs "
                f"each, at most {MOST_GPUS}; G alone is 1xG; else Ray's head is alone",
            )
    return parser


def _port(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 65535:
        raise argparse.ArgumentTypeError(f"not a port: {text!r} (1 to 65535)")
    return int(text)


def _fleet(text: str) -> Fleet:
    try:
        return Fleet.parsed(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _port_or_any(text: str) -> int:
    return 0 if text == "0" else _port(text)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # A shell that puts this in the background would have SIGINT ignored.
        signal.signal(signum, signal.default_int_handler)
    try:
        place = StackPlace.of_home()
        if options.command == "up":
            return up(place, options.port, options.ray_dashboard, options.gpus)
        return {"down": down, "status": status}[options.command](place, options.port)
    except (StackError, OSError) as error:
        print(f"{options.command}: {error}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return EXIT_INTERRUPTED


if __name__ == "__main__":
    raise SystemExit(main())
