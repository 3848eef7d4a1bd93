"""A Prefect plugin that gives Prefect's own commands the password of this machine's stack.

If Prefect's plugins are enabled, Prefect imports this module and calls `setup_environment`. In
Muster's checkout, pyproject.toml enables the plugins. Elsewhere, use the command
`prefect config set PREFECT_PLUGINS_ENABLED=true`. The commands of `muster` and the programs of a
stack do not use the plugin.

The import of this module has a second effect: before Prefect's clients send the password, they
check which process listens on the server's port. See `tasks.server.trusted_clients`. Flow runs that
Prefect's own worker starts import this module, too.
"""

from __future__ import annotations

from prefect.plugins import HookContext, SetupResult, register_hook

import tasks.server  # noqa: F401  (its import guards Prefect's clients)
from deployments.stack.env import AUTH
from deployments.stack.state import to_reach_stack


@register_hook
def setup_environment(*, ctx: HookContext) -> SetupResult | None:
    """Return the environment variables that give a program access to the `muster up` stack.

    Returns:
        The password of the stack's Prefect server, and the variables for Ray's access token if they
        are not set yet. None if the program uses another Prefect server, or already has the
        password.
    """
    missing_variables = to_reach_stack(ctx.api_url) if ctx.api_url else {}
    if AUTH not in missing_variables:
        return None
    return SetupResult(env=missing_variables, note="the stack of this MUSTER_HOME")
