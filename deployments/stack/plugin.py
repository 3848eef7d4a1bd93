"""Prefect's own commands on the stack of this machine: what Prefect asks as it is imported, where
its plugins are enabled.

Its import also makes the clients of this program check who listens at the server's port before they
send the password: see `tasks.server.trusted_clients`. Flow runs that Prefect's own worker starts
get that check from here, too.

In Muster's checkout they are, by its pyproject.toml; elsewhere by `prefect config set
PREFECT_PLUGINS_ENABLED=true`. The commands of `muster` and whatever a stack starts need none of it.
"""

from __future__ import annotations

from prefect.plugins import HookContext, SetupResult, register_hook

import tasks.server  # noqa: F401  (its import guards Prefect's clients)
from deployments.stack.env import AUTH
from deployments.stack.state import to_reach_stack


@register_hook
def setup_environment(*, ctx: HookContext) -> SetupResult | None:
    """The password of the stack of this MUSTER_HOME, for a program that was given its address."""
    lacks = to_reach_stack(ctx.api_url) if ctx.api_url else {}
    return SetupResult(env=lacks, note="the stack of this MUSTER_HOME") if AUTH in lacks else None
