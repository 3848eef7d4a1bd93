"""Program that makes the runs of earlier attempts in MLflow the children of one parent run.

Usage: python -c "$(cat group_mlflow_runs.py)" RUN_ID. The Python interpreter is the one of a
component, with the component's environment variables. So the program finds the same MLflow store as
the component, and it imports nothing of Muster. It prints the id of the parent run, or nothing if
no attempt has begun a run in MLflow yet.
"""

from __future__ import annotations

import sys

#: Largest number of runs that are read from MLflow.
MAX_RUNS = 1000


def main(muster_run_id: str) -> None:
    """Print the id of the MLflow run that groups the attempts of a run of Muster.

    Create this MLflow run if it does not exist yet. Print nothing if no attempt has an MLflow run.
    """
    try:
        from mlflow import MlflowClient
    except ImportError:
        return
    client = MlflowClient()
    experiments = []
    page_token = None
    while True:
        page = client.search_experiments(page_token=page_token)
        experiments += [experiment.experiment_id for experiment in page]
        page_token = page.token
        if not page_token:
            break
    condition = f"tags.`muster.run` = '{muster_run_id}'"
    runs = client.search_runs(experiments, condition, max_results=MAX_RUNS)
    of_attempts = [run for run in runs if "muster.attempt" in run.data.tags]
    parents = [run.info.run_id for run in runs if "muster.attempt" not in run.data.tags]
    if not of_attempts:
        return

    if parents:
        parent = parents[0]
    else:
        experiment = of_attempts[-1].info.experiment_id
        tags = {"muster.run": muster_run_id}
        created = client.create_run(experiment, tags=tags, run_name=muster_run_id)
        parent = created.info.run_id
        # The parent run only groups other runs. End it now, because no other process will do so.
        client.set_terminated(parent, "FINISHED")
    for run in of_attempts:
        if "mlflow.parentRunId" not in run.data.tags:
            client.set_tag(run.info.run_id, "mlflow.parentRunId", parent)
        if run.info.status == "RUNNING":
            # The attempt of this MLflow run is over. But its process was killed, and therefore did
            # not end the MLflow run.
            client.set_terminated(run.info.run_id, "KILLED")
    print(parent)


if __name__ == "__main__":
    main(sys.argv[1])
