"""Names that the modules of a stack share, and the environment variables of its programs."""

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
from tasks.spec.ui_pages import make_page_url

#: Root of Muster's checkout, or the directory that contains Muster's packages in an installed
#: wheel.
ROOT = Path(__file__).resolve().parents[2]
#: Path of `prefect.yaml` if Muster runs from a checkout.
_CHECKOUT_PROJECT_FILE = ROOT / "prefect.yaml"
#: Path of `prefect.yaml` if Muster was installed from a wheel.
_WHEEL_PROJECT_FILE = ROOT / "deployments/prefect.yaml"
#: Path of `prefect.yaml`, the file that defines Muster's deployments.
PROJECT_FILE = _CHECKOUT_PROJECT_FILE if _CHECKOUT_PROJECT_FILE.exists() else _WHEEL_PROJECT_FILE
#: Address on which every part of a stack listens.
HOST = "127.0.0.1"
#: Value of the variable MUSTER_RUN_ID in processes of the `muster up` stack that belong to no run.
RUN_ID = "stack"
#: Name of the work pool for runs.
POOL = "gang"
#: Name of the work pool for pipelines. A pipeline starts several runs and waits for their ends.
PIPELINES_POOL = "pipelines"
#: Path of the page in the Prefect UI that shows the queue of the work pool `gang`.
QUEUE_PAGE = make_page_url("", "artifacts/key/gang-queue")
#: Path of the page in the Prefect UI that shows the nodes of the work pool `gang`.
NODES_PAGE = make_page_url("", "artifacts/key/gang-nodes")
#: Start of the last line that `deployments.stack.setup` prints if it has succeeded.
SET_UP = "Set up:"
#: Environment variable with the id of the `muster up` stack. Every process of a stack has this
#: variable, including the processes of runs.
STACK_VARIABLE = "MUSTER_STACK"
#: Environment variable with the URL of the Ray dashboard that `muster up` has started. The program
#: `deployments.stack.setup` reads this variable.
RAY_VARIABLE = "MUSTER_STACK_RAY"

#: Environment variables that describe this process or its run. Programs of a stack must not inherit
#: these variables.
_OWN_VARIABLES = frozenset(
    (
        "MUSTER_RUN_ID",
        "MUSTER_ATTEMPT",
        "MUSTER_COMPONENT",
        "MUSTER_ROLE",
        STACK_VARIABLE,
        "NOTIFY_SOCKET",
        "LISTEN_FDS",
        "LISTEN_PID",
        "LISTEN_FDNAMES",
    )
)
#: Prefixes of environment variables that may select a Prefect server or a Ray cluster outside the
#: stack. Programs of the stack must not inherit these variables.
_FOREIGN_PREFIXES = ("PREFECT_", "RAY_")
#: Host names of this machine that a URL of the `muster up` stack can have.
LOOPBACK = ("127.0.0.1", "localhost")
#: Environment variable from which clients of the Prefect server read the password, in the form
#: `user:password`. If the variable is set for `muster up`, it is used instead of the password file
#: in the MUSTER_HOME.
AUTH = "PREFECT_API_AUTH_STRING"
#: Environment variable from which the Prefect server itself reads its password. If the variable is
#: set for `muster up`, it has priority over `PREFECT_API_AUTH_STRING`.
SERVER_AUTH = "PREFECT_SERVER_API_AUTH_STRING"

#: Ray's environment variable that says whether clients of the Ray cluster need an access token. If
#: the variable is set for `muster up`, the stack uses the same value.
RAY_MODE = "RAY_AUTH_MODE"
#: Ray's environment variable with the access token of the Ray cluster. If the variable is set for
#: `muster up`, the stack uses the same value.
RAY_TOKEN = "RAY_AUTH_TOKEN"
#: Ray's environment variable with the path of the file that contains the access token of the Ray
#: cluster. If the variable is set for `muster up`, the stack uses the same value.
RAY_FILE = "RAY_AUTH_TOKEN_PATH"


def auth_string(environment: Mapping[str, str] = os.environ) -> str:
    """Return the password of the `muster up` stack's Prefect server, in the form `user:password`.

    The password comes from the first of these sources that contains a password: the environment
    variable of the Prefect server, the environment variable of Prefect's clients, the password file
    of this MUSTER_HOME. A missing file is created with a new password.

    Raises:
        OSError: The password file can be neither read nor created.
    """
    return environment.get(SERVER_AUTH) or environment.get(AUTH) or make_server_password()


def renew_password(environment: Mapping[str, str] = os.environ) -> None:
    """Replace the Prefect password of this MUSTER_HOME, unless an environment variable sets one.

    This function is called before the start of a new `muster up` stack, so that passwords of
    earlier stacks are no longer valid.

    Raises:
        OSError: The password file cannot be written.
    """
    if not (environment.get(SERVER_AUTH) or environment.get(AUTH)):
        renew_server_password()


def build_ray_auth(environment: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the environment variables with the access token for Ray's programs and clients.

    Variables that are already set are kept. Otherwise the token comes from a file in this
    MUSTER_HOME. A missing file is created with a new token.

    Raises:
        OSError: The token file can be neither read nor created.
    """
    variables = {
        key: environment[key] for key in (RAY_MODE, RAY_TOKEN, RAY_FILE) if key in environment
    }
    if variables.get(RAY_MODE, "token") == "token" and variables.keys() <= {RAY_MODE}:
        token_file = muster_home() / "ray-token"
        kept_secret(token_file, lambda: secrets.token_hex(32))
        variables[RAY_FILE] = str(token_file)
    return {RAY_MODE: "token", **variables}


def client_env(home: Path, api_url: str) -> dict[str, str]:
    """Return the environment of a program that uses the `muster up` stack's Prefect server.

    Args:
        home: The MUSTER_HOME of the program.
        api_url: URL of the API of the Prefect server.

    Raises:
        OSError: The password file of the MUSTER_HOME can be neither read nor created.
    """
    env = _inherited_variables(os.environ)
    return {
        **env,
        AUTH: auth_string(),
        "PATH": build_component_path(sys.executable, env.get("PATH", os.defpath)),
        "MUSTER_HOME": str(home),
        "PREFECT_API_URL": api_url,
        "PREFECT_HOME": str(home / "prefect"),
        # Load no plugins, so that each program starts 0.1 s faster. Muster's plugin for Prefect is
        # not needed, because the password variable is already set here.
        "PREFECT_PLUGINS_ENABLED": "false",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "DO_NOT_TRACK": "1",
        "PYTHONUNBUFFERED": "1",
        "PYTHONFAULTHANDLER": "1",
    }


def _inherited_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment variables that a program of the `muster up` stack may inherit."""
    return {
        key: value
        for key, value in environment.items()
        if key not in _OWN_VARIABLES and not key.startswith(_FOREIGN_PREFIXES)
    }
