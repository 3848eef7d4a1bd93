"""What a run tells the Prefect server beside its states: messages, logs, artifacts.

None of it may cost the run: a server that is away makes it late or lost, with a warning.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

from prefect import get_run_logger
from prefect.artifacts import (
    create_markdown_artifact,
    create_progress_artifact,
    update_progress_artifact,
)
from prefect.client.orchestration import get_client
from prefect.context import FlowRunContext
from prefect.exceptions import MissingContextError
from prefect.states import Running

from tasks.run.outcome import Verdict
from tasks.session import RunSession

_log = logging.getLogger(__name__)


def say_state(run: RunSession, message: str) -> None:
    """Write a message into the flow run's state Running."""
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        return
    get_run_logger().info(message)
    with _best_effort("state message"), get_client(sync_client=True) as client:
        # Not forced: a run that is being cancelled keeps that state.
        client.set_flow_run_state(context.flow_run.id, Running(message=message))


@contextmanager
def progress_of(run: RunSession) -> Iterator[Callable[[float | None], None]]:
    """A progress bar on the flow run, moved by calling what is yielded with the step."""
    progress = run.spec.progress
    if progress is None or progress.total is None:
        yield lambda step: None
        return
    total = progress.total
    artifact_id = None
    last: float | None = None
    with _best_effort("progress artifact"):
        artifact_id = create_progress_artifact(
            progress=0.0, key="progress", description=f"{run.run_id}: step 0 of {total}"
        )

    def report(step: float | None) -> None:
        nonlocal last
        if step is None or step == last or artifact_id is None:
            return
        last = step
        with _best_effort("progress artifact"):
            update_progress_artifact(
                artifact_id,  # type: ignore[arg-type]
                progress=min(100.0, 100.0 * step / total),
                description=f"{run.run_id}: step {step:g} of {total}",
            )

    yield report


def tell_verdict(run: RunSession, verdict: Verdict) -> None:
    """The outcome of an attempt: why, the failed component's last lines, where its files lie."""
    logger = _logger()
    failure = verdict.failure
    if failure is None:
        logger.info("attempt %d: %s", run.record.attempts, verdict.message)
    else:
        logger.error("attempt %d: %s", run.record.attempts, verdict.message)
        if failure.hint:
            logger.error("hint: %s", failure.hint)
        if failure.log_tail and run.attempt is not None and failure.component is not None:
            log = run.attempt.log(failure.component)
            logger.error("last lines of %s:\n%s", log, failure.log_tail)
    with _best_effort("components artifact"):
        create_markdown_artifact(
            key="components", markdown=_components_table(run, verdict), description=run.run_id
        )


def _components_table(run: RunSession, verdict: Verdict) -> str:
    lines = [
        f"**{run.run_id}**, attempt {run.record.attempts}: {verdict.message}",
        "",
        "| component | pid | ready after | ended | log |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, seen in run.record.components().items():
        ready = f"{seen['ready_at'] - seen['started_at']:.2f} s" if seen["ready_at"] else "never"
        ended = seen["signal"] or f"exit code {seen['exit_code']}" if seen["ended_at"] else "?"
        log = run.attempt.log(name) if run.attempt else ""
        lines.append(f"| {name} | {seen['pid']} | {ready} | {ended} | `{log}` |")
    if verdict.failure is not None and verdict.failure.log_tail:
        lines += ["", f"Last lines of {verdict.failure.component}:", "", "```"]
        lines += [verdict.failure.log_tail, "```"]
    return "\n".join([*lines, "", f"Record: `{run.place.record}`"])


def _logger() -> logging.Logger | logging.LoggerAdapter[logging.Logger]:
    try:
        return get_run_logger()
    except MissingContextError:
        return _log


@contextmanager
def _best_effort(what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        with suppress(Exception):
            _logger().warning("%s not written to the Prefect server: %r", what, error)
