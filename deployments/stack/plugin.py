"""Prefect's own commands on the stack of this machine: what Prefect asks as it is imported, where
its plugins are enabled.

In Muster's checkout they are, by its pyproject.toml; elsewhere by `prefect config set
PREFECT_PLUGINS_ENABLED=true`. The commands of `muster` and whatever a stack starts need none of it.
"""

from __future__ import annotations

from prefect.plugins import HookContext, SetupResult, register_hook

from deployments.stack.env import AUTH
from deployments.stack.state import to_reach_stack


@register_hook
def setup_environment(*, ctx: HookContext) -> SetupResult | None:
    """The password of the stack of this MUSTER_HOME, for a program that was given its address."""
    lacks = to_reach_stack(ctx.api_url) if ctx.api_url else {}
    return SetupResult(env=lacks, note="the stack of this MUSTER_HOME") if AUTH in lacks else None
