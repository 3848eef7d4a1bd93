"""Create the parent runs in MLflow that group the attempts of a run."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from tasks.spec.command_python import find_command_python
from tasks.spec.run import RunSpec
from tasks.train.interpreters import component_search_path
from tasks.train.plan import component_env, inherit_env
from tasks.train.trackers import needs_mlflow_parent

#: Program that finds or creates the parent run in MLflow. The Python interpreter of a component
#: executes this program, because MLflow may be installed only in the environment of the component.
_PROGRAM = Path(__file__).with_name("group_mlflow_runs.py")
#: Longest time in seconds that the program `_PROGRAM` may take for one component.
_LIMIT_S = 60.0
#: Seconds between two checks whether `_PROGRAM` has ended.
_PAUSE_S = 0.1
_RUN_ID = re.compile(r"[0-9a-f]{32}")
#: Environment variables with a shorter timeout and fewer retries for the MLflow client in
#: `_PROGRAM`. They prevent a long delay if the MLflow server does not answer. Components do not get
#: these variables.
_IMPATIENT = {"MLFLOW_HTTP_REQUEST_TIMEOUT": "15", "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1"}


def find_mlflow_parents(
    spec: RunSpec,
    run_id: str,
    attempt: int,
    *,
    must_end: Callable[[], bool],
    warn: Callable[[str], None],
    limit_s: float = _LIMIT_S,
) -> dict[str, str]:
    """Return a mapping from component names to the ids of their parent runs in MLflow.

    Each attempt creates its own MLflow runs. The parent run groups these runs in the MLflow UI. A
    parent run is created only if an earlier attempt has already started a run in MLflow.

    A component without a parent run is not in the result. An error of MLflow only causes a warning.

    Args:
        spec: The resolved spec of the attempt, with the values of Prefect Secret blocks.
        run_id: Id of the run.
        attempt: Number of the attempt that starts next, from 1.
        must_end: Function that returns True if the run must end. The search then ends at once.
        warn: Function that reports a warning to the user.
        limit_s: Longest time in seconds for one component.
    """
    parents: dict[str, str] = {}
    if spec.tracker == "off" or attempt == 1:
        return parents

    untracked = spec.model_copy(update={"tracker": "off"})
    # Several components usually share one MLflow store. Send only one request to each store.
    parent_by_store: dict[tuple[object, ...], str] = {}
    for name, component in spec.processes.items():
        env = component_env(untracked, name, run_id, attempt)
        is_job = component.launcher == "ray_job"
        if not needs_mlflow_parent(env, is_job=is_job):
            continue
        if is_job:
            # `env` lacks the variables of this process, because a Ray job does not inherit them.
            # Add these variables, because `_PROGRAM`, which finds the parent run, runs on this
            # machine and not in the Ray job.
            env = {
                **inherit_env(),
                "PATH": component_search_path({**spec.env, **component.env}),
                **env,
            }
        cwd = Path(component.cwd or spec.cwd)
        python = _find_python(component.command, env, cwd)
        if python is None:
            continue

        settings = sorted(item for item in env.items() if item[0].startswith("MLFLOW_"))
        store = (python, cwd, *settings)
        if store not in parent_by_store:
            argv = [python, "-c", _PROGRAM.read_text(encoding="utf-8"), run_id]
            parent_by_store[store] = ""
            try:
                parent_by_store[store] = _run(argv, env, cwd, must_end, limit_s)
            except (OSError, subprocess.SubprocessError) as error:
                if must_end():
                    break
                warn(
                    f"MLflow: the attempts of {name} are not grouped in one run, because "
                    f"{error}. Check MLFLOW_TRACKING_URI, or write `tracker: off` in the spec"
                )
        if parent_by_store[store]:
            parents[name] = parent_by_store[store]
    return parents


def _find_python(command: Sequence[str], env: Mapping[str, str], cwd: Path) -> str | None:
    """Return the path of the Python interpreter that a component probably uses.

    If the command is no Python program, the first `python` in the PATH is returned.
    """
    path = env.get("PATH", os.defpath)
    python = find_command_python(command, path, cwd)
    return str(python) if python is not None else shutil.which("python", path=path)


def _run(
    argv: Sequence[str],
    env: Mapping[str, str],
    cwd: Path,
    must_end: Callable[[], bool],
    limit_s: float,
) -> str:
    """Execute the program that groups the runs in MLflow, and return the parent run's id.

    Args:
        argv: Interpreter and arguments of the program.
        env: Environment variables of the program.
        cwd: Working directory of the program.
        must_end: Function that returns True if the run must end.
        limit_s: Longest time in seconds.

    Returns:
        The id, or an empty string if there is no parent run.

    Raises:
        OSError: The program cannot be started.
        subprocess.SubprocessError: The program failed or took too long, or the run must end.
    """
    deadline = time.monotonic() + limit_s
    with subprocess.Popen(
        argv,
        env={**env, **_IMPATIENT},
        cwd=cwd,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
    ) as process:
        try:
            while True:
                try:
                    output, errors = process.communicate(timeout=_PAUSE_S)
                    break
                except subprocess.TimeoutExpired:
                    _check_time(deadline, limit_s, must_end)
        except BaseException:
            os.killpg(process.pid, signal.SIGKILL)
            raise

    if process.returncode != 0:
        [*_, last_line] = errors.strip().splitlines() or [
            f"the program exited with code {process.returncode}"
        ]
        raise subprocess.SubprocessError(f"the request failed: {last_line}")
    words = output.split()
    return words[-1] if words and _RUN_ID.fullmatch(words[-1]) else ""


def _check_time(deadline: float, limit_s: float, must_end: Callable[[], bool]) -> None:
    """Raise an error if the program that groups the runs in MLflow must be stopped.

    Raises:
        subprocess.SubprocessError: The time limit is reached, or the run must end.
    """
    if must_end():
        raise subprocess.SubprocessError("the run is ending")
    if time.monotonic() > deadline:
        raise subprocess.SubprocessError(f"there was no answer within {limit_s:g} s")
