"""Environment variables that name and group the runs of experiment trackers.

Each process that uses Weights & Biases (W&B) or MLflow starts a new run there. So no attempt writes
into the history of another attempt. Muster sets only names and groups:

- In W&B, all runs are in one group, which has the name of Muster's run.
- In MLflow, all runs have tags. From the second attempt on, they are children of one parent run.

W&B can also rewind one of its runs to an earlier step, but Muster never requests that. Rewinding
fails on a self-managed W&B server. It also fails or cuts off the wrong steps if the server has not
received the last steps, or if the trainer counts its steps otherwise than W&B. The callback of
Hugging Face counts them otherwise. In offline mode, W&B ignores that a run is resumed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

#: Environment variables with which a user selects a run of W&B. If one of these variables is
#: set, Muster sets no variables of W&B.
_WANDB_SELECTORS = ("WANDB_RUN_ID", "WANDB_RESUME", "WANDB_RESUME_FROM", "WANDB_FORK_FROM")
#: Environment variables with which a user selects a run of MLflow, or the tags of a run. If one of
#: these variables is set, Muster sets no variables of MLflow.
_MLFLOW_SELECTORS = ("MLFLOW_RUN_ID", "MLFLOW_RUN_CONTEXT")
#: Environment variables that select an MLflow server or experiment. A component with one of these
#: variables uses MLflow.
_MLFLOW_PLACES = ("MLFLOW_TRACKING_URI", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_EXPERIMENT_ID")

#: Name of a tag of MLflow runs. The value of the tag is the id of Muster's run.
RUN_TAG = "muster.run"


def tracker_env(
    component: str, run_id: str, attempt: int, env: Mapping[str, str], *, mlflow_parent: str = ""
) -> dict[str, str]:
    """Return the variables for W&B and MLflow that Muster sets for a component.

    Args:
        component: Name of the component.
        run_id: Id of the run.
        attempt: Number of the attempt, from 1.
        env: The variables of the component that are already set. The result contains none of these
            variables, so the user's values are kept.
        mlflow_parent: Id of the parent run in MLflow, or an empty string if there is none.
    """
    variables: dict[str, str] = {}
    if not any(name in env for name in _WANDB_SELECTORS):
        variables |= {
            "WANDB_RUN_GROUP": run_id,
            "WANDB_NAME": f"{run_id}--a{attempt:02d}-{component}",
            "WANDB_JOB_TYPE": component,
        }
    if not any(name in env for name in _MLFLOW_SELECTORS):
        tags = {
            RUN_TAG: run_id,
            "muster.attempt": str(attempt),
            "muster.component": component,
        }
        if mlflow_parent:
            tags["mlflow.parentRunId"] = mlflow_parent
        variables["MLFLOW_RUN_CONTEXT"] = json.dumps(tags)
    return {name: value for name, value in variables.items() if name not in env}


def needs_mlflow_parent(env: Mapping[str, str], *, is_job: bool) -> bool:
    """Return True if the MLflow runs of a component need a parent run in MLflow.

    A parent run groups the MLflow runs of several attempts. No parent run is needed if the user
    selects a run of MLflow.

    Args:
        env: Variables of the component that do not come from `tracker_env`.
        is_job: True if the component is a Ray job. A Ray job needs a parent run only if it uses an
            MLflow server. Without a server, the job may write its MLflow runs to files on another
            machine, where Muster cannot create a parent run.
    """
    if any(name in env for name in _MLFLOW_SELECTORS):
        return False
    is_server = env.get("MLFLOW_TRACKING_URI", "").startswith(("http://", "https://"))
    return is_server if is_job else any(env.get(name) for name in _MLFLOW_PLACES)
