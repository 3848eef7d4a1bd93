"""Check the session of a stack's Ray cluster: its control store, directories and sockets.

A cluster whose files were deleted still answers on all of its ports, but its new jobs fail.
"""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

from deployments.stack.state import Stack
from tasks.ray.control_store import list_living_nodes
from tasks.ray.dashboard import Denied, NoAnswer

#: Directories of a Ray session, below the directory of the session.
#: Source: ray/_private/node.py, `Node._init_temp`.
_SESSION_DIRECTORIES = ("sockets", "logs", "runtime_resources")
#: Longest time, in seconds, that a socket may take to accept a connection.
_CONNECT_WITHIN_S = 5.0


class BrokenSession(Exception):
    """Files of the Ray session are missing, so the Ray cluster must be restarted.

    The message names the first missing file.
    """


def check_session(stack: Stack) -> None:
    """Check the directories and sockets of the Ray session of each living node.

    The nodes are read from Ray's Global Control Store (GCS).

    Raises:
        BrokenSession: A directory or socket is missing, or a socket accepts no connection.
        NoAnswer: The GCS does not answer, or knows no living node.
        Denied: The GCS refuses the request.
    """
    # Set the variables from which Ray's client reads the access token.
    for name, value in stack.ray_auth.items():
        os.environ.setdefault(name, value)
    nodes = asyncio.run(list_living_nodes(stack.ray_address))
    if not nodes:
        raise NoAnswer(f"the Ray control store at {stack.ray_address} has no running node")

    for node in nodes:
        session = Path(node.raylet_socket_name).parents[1]
        for directory in (session, *(session / name for name in _SESSION_DIRECTORIES)):
            if not directory.is_dir():
                raise BrokenSession(f"Ray's session directory {directory} is missing")
        for path in (node.raylet_socket_name, node.object_store_socket_name):
            _check_socket(path)


def find_session_problem(stack: Stack) -> str:
    """Return the problem of the Ray session with its remedy, or an empty string."""
    try:
        check_session(stack)
    except BrokenSession as error:
        return f"{error}, so new Ray jobs fail. To restart the Ray cluster, run `muster up`"
    except (NoAnswer, Denied) as error:
        return f"does not answer: {error}"
    return ""


def _check_socket(path: str) -> None:
    """Connect to a UNIX socket of Ray.

    Raises:
        BrokenSession: The socket is missing, or no process accepts the connection.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(_CONNECT_WITHIN_S)
        try:
            connection.connect(path)
        except FileNotFoundError:
            raise BrokenSession(f"Ray's session socket {path} is missing") from None
        except OSError as error:
            raise BrokenSession(f"Ray's session socket {path} does not answer ({error})") from error
