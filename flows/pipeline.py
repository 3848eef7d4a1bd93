"""The flow `pipeline`: runs in sequence, each with what the one before has handed on."""

from __future__ import annotations

from prefect import flow
from prefect.client.schemas.objects import State

from tasks.pipeline.pipeline import open_pipeline, pipeline_id_of_flow_run
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


if __name__ == "__main__":
    from tasks.pipeline.command import main

    raise SystemExit(main(pipeline))
