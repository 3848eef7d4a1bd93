"""Names that the parts of a stack share, and the environment of the programs it starts."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Mapping
from pathlib import Path

from tasks.record.places import (
    kept_secret,
    make_server_password,
    muster_home,
    renew_server_password,
)
from tasks.spec.programs import build_component_path

#: The checkout; in a wheel, where its packages lie.
ROOT = Path(__file__).resolve().parents[2]
#: Of the deployments: in a wheel it lies with the package.
PROJECT_FILE = next(
    (file for file in (ROOT / "prefect.yaml",) if file.exists()), ROOT / "deployments/prefect.yaml"
)
HOST = "127.0.0.1"
#: In place of a run's id, in the environment of the parts.
RUN_ID = "stack"
#: The work pool of runs, and that of pipelines, whose processes only wait for runs of the other.
POOL, PIPELINES_POOL = "gang", "pipelines"
#: Where the UI shows the queue of POOL, and the nodes: from the server's address on.
QUEUE_PAGE, NODES_PAGE = "/v2/artifacts/key/gang-queue", "/v2/artifacts/key/gang-nodes"
#: The first words of the last line of `stack_setup`, once all is done.
SET_UP = "Set up:"
#: In the environment of everything that a stack starts, runs included: the stack's id.
STACK_VARIABLE = "MUSTER_STACK"
#: In the environment of `stack_setup`: the address of the dashboard of the stack's Ray cluster.
RAY_VARIABLE = "MUSTER_STACK_RAY"

#: About the process that has them, or the run around it.
_OWN = frozenset(
    ("MUSTER_RUN_ID", "MUSTER_ATTEMPT", "MUSTER_COMPONENT", "MUSTER_ROLE", STACK_VARIABLE)
) | frozenset(("NOTIFY_SOCKET", "LISTEN_FDS", "LISTEN_PID", "LISTEN_FDNAMES"))
#: They lead to a server or a cluster that is not the stack's.
_FOREIGN = ("PREFECT_", "RAY_")
LOOPBACK = ("127.0.0.1", "localhost")
#: The password of the Prefect server, `user:password`: as its clients have it, and as it has it
#: itself. Either, in the environment of `muster up`, is taken in place of the home's own.
AUTH, SERVER_AUTH = "PREFECT_API_AUTH_STRING", "PREFECT_SERVER_API_AUTH_STRING"

#: Ray's own: whether it asks for a token, which, and the file that has it. They, too, are taken
#: from the environment of `muster up`.
RAY_MODE, RAY_TOKEN, RAY_FILE = "RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"


def auth_string(environment: Mapping[str, str] = os.environ) -> str:
    """The password of the stack's server.

    Raises: OSError, where none is set, and that of this MUSTER_HOME can be neither read nor made.
    """
    return environment.get(SERVER_AUTH) or environment.get(AUTH) or make_server_password()


def renew_password(environment: Mapping[str, str] = os.environ) -> None:
    """Give this MUSTER_HOME a new password for the stack that is about to start, unless the
    environment sets one. Whoever learned the last one cannot use it any more.

    Raises: OSError.
    """
    if not (environment.get(SERVER_AUTH) or environment.get(AUTH)):
        renew_server_password()


def ray_auth(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """How Ray's own programs, and what asks them, are told of the token of the stack's cluster.

    Raises: as `auth_string`.
    """
    given = {key: environment[key] for key in (RAY_MODE, RAY_TOKEN, RAY_FILE) if key in environment}
    if given.get(RAY_MODE, "token") == "token" and given.keys() <= {RAY_MODE}:
        file = muster_home() / "ray-token"
        kept_secret(file, lambda: secrets.token_hex(32))
        given[RAY_FILE] = str(file)
    return {RAY_MODE: "token", **given}


def client_env(home: Path, api_url: str) -> dict[str, str]:
    """The environment of a program that talks to the stack's Prefect server.

    Args:
        home: MUSTER_HOME.
    """
    env = _inherited(os.environ)
    spared = [host for host in env.get("NO_PROXY", env.get("no_proxy", "")).split(",") if host]
    no_proxy = ",".join([*spared, *(host for host in LOOPBACK if host not in spared)])
    return {
        **env,
        AUTH: auth_string(),
        "PATH": build_component_path(sys.executable, env.get("PATH", os.defpath)),
        "MUSTER_HOME": str(home),
        "PREFECT_API_URL": api_url,
        "PREFECT_HOME": str(home / "prefect"),
        # In the checkout they are on, for the password, which is here; they cost each start 0.1 s.
        "PREFECT_PLUGINS_ENABLED": "false",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        "NO_PROXY": no_proxy,
        "no_proxy": no_proxy,
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
    }


def _inherited(environment: Mapping[str, str]) -> dict[str, str]:
    return {
        key: value
        for key, value in environment.items()
        if key not in _OWN and not key.startswith(_FOREIGN)
    }
