"""Opening a pipeline within its flow run, and what ends it while it is open."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from prefect.context import FlowRunContext
from prefect.settings import PREFECT_API_URL

from tasks.pipeline.pipeline import Pipeline
from tasks.record.places import make_run_id
from tasks.server.flow_process import cancel_watched, interrupting, started_by_others, why_cancelled
from tasks.spec.pipeline import PipelineSpec


def pipeline_id_of_flow_run() -> str:
    """The name of the flow run of this context, the same for each of its processes."""
    flow_run = _flow_run()
    context = FlowRunContext.get()
    spec = ((context.parameters if context is not None else None) or {})["spec"]
    if not isinstance(spec, PipelineSpec):
        spec = PipelineSpec.model_validate(spec)
    return make_run_id(spec.name, "pipeline", flow_run.id, flow_run.created or datetime.now(UTC))


@contextmanager
def open_pipeline(spec: PipelineSpec) -> Iterator[Pipeline]:
    """The pipeline of this flow run; a signal or a cancel ends it, with its stage, while open.

    SIGTERM under a worker that was not asked to cancel it leaves it to the next worker instead.
    """
    flow_run_id: UUID = _flow_run().id
    line = Pipeline(spec, flow_run_id=flow_run_id, api_url=PREFECT_API_URL.value() or "")
    with (
        interrupting(line, _on_term(line)),
        cancel_watched(flow_run_id, line.interrupt),
    ):
        line.prepare()
        yield line


def _on_term(line: Pipeline) -> Callable[[], None] | None:
    """What SIGTERM means where it is not simply the end of the pipeline."""
    if started_by_others() is None:
        return None
    context = contextvars.copy_context()

    def ask() -> None:
        if why := context.run(why_cancelled, line.flow_run_id):
            line.interrupt(why)
        else:
            line.let_go("its process was ended by SIGTERM")

    return lambda: threading.Thread(target=ask, name="on-term", daemon=True).start()


def _flow_run() -> Any:
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        raise RuntimeError("a pipeline is opened within the flow `pipeline` only")
    return context.flow_run
