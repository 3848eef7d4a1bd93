"""How a component is asked to end."""

from __future__ import annotations

import signal
from typing import Annotated

from pydantic import AfterValidator, Field

from tasks.spec.values import Model, Text, did_you_mean, refused


def _is_signal(name: str) -> str:
    names = signal.Signals.__members__
    if name not in names:
        near = f"did you mean `SIG{name}`?" if f"SIG{name}" in names else ""
        remedy = near or did_you_mean(name.upper(), names) or "write for example SIGINT"
        raise refused(f"no signal of this system: {name!r}", remedy)
    return name


class Stop(Model):
    """How a component is asked to end."""

    signal: Annotated[Text, AfterValidator(_is_signal)] = Field(
        "SIGTERM",
        title="Signal",
        description="Sent first, by its name.",
        examples=["SIGTERM", "SIGINT"],
    )
    grace_s: Annotated[float, Field(strict=True, ge=0, allow_inf_nan=False)] = Field(
        10,
        title="Grace (seconds)",
        description="What is left of the component after so long is killed.",
    )
