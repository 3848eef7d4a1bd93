"""The spec key `start_from`: a checkpoint of another run, from which a run starts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any

from pydantic import AfterValidator, Field

from tasks.spec.checkpoint_urls import is_url
from tasks.spec.errors import Fault
from tasks.spec.placeholders import find_uses, mapping_or_empty
from tasks.spec.values import Count, CountOrZero, Model, Text, make_refusal

#: Pattern of a run id: `<name>-<workload>-<YYYYMMDD>-<HHMMSS>-<8 hex>`.
RUN_ID_PATTERN = r"^[a-z][a-z0-9-]{0,31}-[a-z]+-\d{8}-\d{6}-[0-9a-f]{8}$"
RunId = Annotated[str, Field(strict=True, pattern=RUN_ID_PATTERN)]
#: Matches a run id that is a complete part of a path or URI. The group contains the run id.
_RUN_ID_PART = re.compile(rf"/({RUN_ID_PATTERN[1:-1]})(?:/|$)")
#: Placeholder name for the path of the checkpoint from which an attempt starts. With
#: `${attempt.resume_from}` in a command, the user passes this path to a program.
_RESUME_FROM = "attempt.resume_from"


def _check_absolute(path: str) -> str:
    if not path.startswith("/") and not is_url(path):
        raise make_refusal(
            f"must be an absolute path or a URL, found {path!r}",
            "write --from RUN@STEP instead of this key",
        )
    return path


def is_run_id(text: str) -> bool:
    """Return True if a text has the form of a run id."""
    return re.match(RUN_ID_PATTERN, text) is not None


def find_run_id(path: str) -> str | None:
    """Return the run id in a path or URI, or None.

    For example, the path of a checkpoint in a run's directory contains the run id.

    Returns:
        The last run id in the path, or None if no part of the path is a run id.
    """
    return next(iter(reversed(_RUN_ID_PART.findall(path))), None)


class StartFrom(Model):
    """Checkpoint from which a run starts, written by another run or by an earlier attempt."""

    run: RunId = Field(
        description="Id of the run that wrote the checkpoint.",
        examples=["quickstart-grpo-20260101-120000-0123abcd"],
    )
    checkpoint: Annotated[Text, AfterValidator(_check_absolute)] = Field(
        description="Absolute path or URL of the checkpoint. The option `--from RUN@STEP` of "
        "`muster train` finds the path.",
        examples=["/data/checkpoints/step_20"],
    )
    step: CountOrZero | None = Field(
        None,
        description="Training step at which the checkpoint was written. If omitted, the step is "
        "unknown.",
        examples=[20],
    )
    attempt: Count | None = Field(
        None,
        description="Number of an attempt. Only this attempt starts from the checkpoint. `muster "
        "retry RUN --from-step N` sets this key. If omitted, every attempt starts from the "
        "checkpoint until the run has written its own checkpoint.",
    )

    @property
    def is_step_back(self) -> bool:
        """True if the run itself wrote the checkpoint and returns to it in a new attempt."""
        return self.attempt is not None


def find_start_faults(written: Mapping[str, Any]) -> Iterator[Fault]:
    """Yield a fault if a spec contains `start_from`, but does not pass the checkpoint to a program.

    A program gets the path of the checkpoint only through the placeholder `${attempt.resume_from}`,
    for example in the command of the trainer.

    Args:
        written: The run spec as plain data, in which placeholders are not replaced yet.
    """
    if not mapping_or_empty(written.get("start_from")):
        return
    if any(use.name == _RESUME_FROM for use in find_uses(written)):
        return
    yield Fault(
        path="start_from",
        problem="no program of the run would get the checkpoint, because the spec does not use "
        f"${{{_RESUME_FROM}}}",
        remedy=f'add --resume-from, "${{{_RESUME_FROM}}}" to the command of the trainer',
    )
