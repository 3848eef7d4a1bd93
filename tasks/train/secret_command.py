"""Store secrets on the Prefect server, and list their names: the command `muster secret`."""

from __future__ import annotations

import sys
from getpass import getpass
from json import dumps
from typing import Annotated

from cyclopts import App, Parameter

from tasks.server.secrets import check_name, list_secret_names, save_secret
from tasks.show.arguments import AsJson
from tasks.spec.errors import BadArgument
from tasks.train.deploying import connect_to_configured_server

app = App(
    name="secret",
    help="Store secrets on the Prefect server, as Prefect Secret blocks.\n\n"
    "A spec uses the secret NAME as `env: {VARIABLE: {secret: NAME}}`.\n\n"
    "Exit: 0 done; 1 no server answers; 2 the name or the value is not valid, or the secret "
    "exists already, and nothing was done.",
)

SecretName = Annotated[str, Parameter(name="NAME", help="Name of the secret, such as `hf-token`.")]


@app.command(name="set")
def set_(name: SecretName, /, *, overwrite: bool = False) -> None:
    """Store a secret. The value is read from standard input, or typed invisibly on the terminal.

    Args:
        overwrite: Replace the value of an existing secret.
    """
    check_name(name)
    with connect_to_configured_server() as client:
        value = _read_value(name)
        is_new = save_secret(client, name, value, overwrite=overwrite)
    print(f"The secret {name} was {'created' if is_new else 'replaced'}.")
    print(f"  use in a spec  env: {{VARIABLE: {{secret: {name}}}}}")


@app.command
def ls(*, json: AsJson = False) -> None:
    """List the names of the secrets, without their values.

    Args:
        json: Print a list of names as JSON.
    """
    with connect_to_configured_server() as client:
        names = list_secret_names(client)
    if json:
        print(dumps(names, indent=2))
    elif not names:
        print("There are no secrets. To store one, run `muster secret set NAME`.", file=sys.stderr)
    for name in [] if json else names:
        print(name)


def _read_value(name: str) -> str:
    """Read the value of a secret from the terminal or from standard input.

    Raises:
        BadArgument: No value was typed, or standard input is closed or contains no text.
    """
    if sys.stdin is None:
        raise BadArgument(
            f"standard input is closed, so Muster cannot read the value of the secret {name}. "
            "Pass the value through standard input"
        )
    if sys.stdin.isatty():
        try:
            return getpass(f"Value of {name}: ")
        except EOFError:
            raise BadArgument(f"no value was typed for the secret {name}") from None
    try:
        text = sys.stdin.read()
    except UnicodeDecodeError as error:
        raise BadArgument(f"the value of the secret {name} is not text: {error}") from None
    return text.removesuffix("\n").removesuffix("\r")
