"""The flow `pipeline`: a graph of runs and steps, which can use the results of earlier stages."""

from __future__ import annotations

from prefect import flow
from prefect.client.schemas.objects import State

from tasks.pipeline.command import run_pipeline
from tasks.pipeline.session import open_pipeline, pipeline_id_of_flow_run
from tasks.show.arguments import Overrides, PipelineFile, run_alone
from tasks.spec.pipeline import PipelineSpec
from tasks.train.pipeline_check import find_unfit_stages


@flow(name="pipeline", flow_run_name=pipeline_id_of_flow_run, persist_result=False)
def pipeline(spec: PipelineSpec) -> State[None]:
    """Run the stages in their order. Each stage is a separate run, which waits in the queue.

    A retry of the flow run continues the pipeline: complete stages are not repeated, runs in
    progress are watched again, and failed stages are repeated.

    Args:
        spec: The stages, and the results of earlier stages that each stage uses.
    """
    with open_pipeline(spec, find_unfit_stages) as session:
        while session.advance():
            session.wait()
        session.cancel_runs()
        return session.conclude()


def command(spec: PipelineFile = None, /, *, set: Overrides = (), resume: str = "") -> int:
    """Run a pipeline to its end.

    A stage begins when the stages that it needs have ended. Each stage is a separate run, which
    waits in the queue of the Prefect server.

    Exit: 0 completed, 1 failed, 2 the spec is invalid (nothing was started), 3 a stage can never
    fit the cluster, 130 interrupted (after the running stages have ended).

    Args:
        resume: Id or name of a pipeline's flow run to continue. Complete stages are not repeated,
            the pipeline attaches to a run in progress, and failed stages are repeated.
    """
    return run_pipeline(pipeline, spec, set, resume)


if __name__ == "__main__":
    raise SystemExit(run_alone(command, "python -m flows.pipeline"))
