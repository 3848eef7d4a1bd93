"""The flow `pipeline`: runs in sequence, each with what the one before has handed on."""

from __future__ import annotations

from prefect import flow
from prefect.client.schemas.objects import State

from tasks.pipeline.pipeline import open_pipeline, pipeline_id_of_flow_run, run_pipeline
from tasks.show.arguments import Overrides, PipelineFile, run_alone
from tasks.spec.pipeline import PipelineSpec


@flow(name="pipeline", flow_run_name=pipeline_id_of_flow_run, persist_result=False)
def pipeline(spec: PipelineSpec) -> State[None]:
    """Run the stages one after the other, each through the queue as a run of its own.

    Retried, it goes on: what is complete is not repeated, what is on its way is taken up, and a
    stage that failed is tried anew.

    Args:
        spec: The stages, and what each is given of those before it.
    """
    with open_pipeline(spec) as line:
        while stage := line.next_stage():
            run = line.begin(stage)
            if run and not line.follow(run):
                line.cancel(run)
        return line.conclude()


def command(spec: PipelineFile = None, /, *, set: Overrides = (), resume: str = "") -> int:
    """Run a pipeline to its end: its stages one after the other, each through the queue of the
    Prefect server as a run of its own.

    Exit: 0 completed, 1 failed, 2 the spec is invalid (nothing was started), 3 a stage can never
    fit the cluster, 130 interrupted (after its stage's end).

    Args:
        resume: Go on with this flow run of a pipeline, by its id or name: what is complete is not
            repeated, what is on its way is taken up, what failed is tried anew.
    """
    return run_pipeline(pipeline, spec, set, resume)


if __name__ == "__main__":
    raise SystemExit(run_alone(command, "python -m flows.pipeline"))
