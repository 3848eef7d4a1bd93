"""Generate the tables of Muster's environment variables in docs/settings.md."""

from __future__ import annotations

from tasks.spec.own_settings import COMPONENT_VARIABLES, SETTINGS


def list_settings() -> str:
    """Return the Markdown table of the environment variables that a user may set."""
    rows = [
        f"| `{setting.name}` | {setting.meaning} | {setting.default_text} |" for setting in SETTINGS
    ]
    return "\n".join(("| variable | meaning | default |", "| --- | --- | --- |", *rows))


def list_component_variables() -> str:
    """Return the Markdown table of the variables that Muster sets for the programs of a run."""
    rows = [f"| `{name}` | {meaning} |" for name, meaning in COMPONENT_VARIABLES.items()]
    return "\n".join(("| variable | value |", "| --- | --- |", *rows))
