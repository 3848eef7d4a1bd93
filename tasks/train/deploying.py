"""Send a run spec to a Prefect server, as one run or as a deployment.

This module contains the commands `muster submit`, `muster deploy` and `muster init`.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import UTC, datetime
from json import dumps
from pathlib import Path
from shlex import quote
from typing import Any, TypeVar
from uuid import UUID

import httpx
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import FlowRun, State
from prefect.client.schemas.responses import DeploymentResponse
from prefect.settings import PREFECT_API_URL
from prefect.states import Scheduled
from pydantic import ValidationError

from tasks.pipeline.stage_specs import add_code, require_deployment
from tasks.processes.devices import Devices
from tasks.queue.ledger import parse_request
from tasks.record.checkpoints import list_output_folders
from tasks.record.places import muster_home, write_for_caller
from tasks.server.artifacts import make_code_label, store_submitted_code
from tasks.server.deployments import (
    WORKING_DIR,
    Overlap,
    describe_overlap,
    describe_schedules,
    find_deployment,
    make_cron_schedule,
    make_overlap_settings,
    remove_cron,
    renew_deployment,
    set_cron,
    set_overlap,
)
from tasks.server.flow_process import EXIT_INTERRUPTED, get_exit_code
from tasks.server.flow_runs import connect_to_server, read_refusal
from tasks.server.server import NoServer, find_page_url, hide_prefect_logs, read_secrets
from tasks.show.arguments import EXIT_DONE, AsJson, FromRun, Overrides, SpecFile
from tasks.show.terminal import Terminal
from tasks.spec.documents import find_document
from tasks.spec.draft import OwnFolder, draft_spec, read_hook
from tasks.spec.errors import BadArgument, MusterError
from tasks.spec.formatting import join_commas
from tasks.spec.loading import (
    find_project_root,
    is_project_root,
    load_spec,
    make_absolute,
    name_source,
)
from tasks.spec.pipeline import STAGE_DEPLOYMENT, load_pipeline
from tasks.spec.programs import add_active_environment
from tasks.spec.run import LIVE_CODE, RunSpec
from tasks.spec.standard_input import STANDARD_INPUT
from tasks.train.checking import explain_misfit
from tasks.train.local_workers import require_files
from tasks.train.project_summary import print_project
from tasks.train.run_checkpoints import with_start
from tasks.train.run_watch import RunWatch
from tasks.train.submit_matrix import MatrixOptions, make_matrix_pipeline, queue_matrix

S = TypeVar("S")

#: Seconds between two requests for the state of a run.
_POLL_EVERY_S = 1.0
#: Name of the flow that runs a run spec.
TRAIN_FLOW = "train"


def load_run_spec(path: str) -> dict[str, Any]:
    """Return the content of a run spec for a deployment in prefect.yaml.

    This function is a build step: `{{ ID.spec }}` in prefect.yaml is replaced by the spec. So if
    the spec is invalid, `prefect deploy` fails, and no run starts.

    Args:
        path: Path of the run spec, relative to the folder of prefect.yaml.

    Returns:
        `{"spec": ...}` as plain data. It includes the start order of the components.

    Raises:
        InvalidSpec: The spec has faults.
    """
    return {"spec": _store_code(load_spec(Path(path)), _add_run_code).to_server_data()}


def load_pipeline_spec(path: str) -> dict[str, Any]:
    """Return the content of a pipeline spec, together with the run specs of its stages.

    This function is a build step of prefect.yaml, like `load_run_spec`.

    Args:
        path: Path of the pipeline spec, relative to the folder of prefect.yaml.

    Returns:
        `{"spec": ...}` as plain data.

    Raises:
        InvalidSpec: The pipeline or a run spec has faults.
    """
    pipeline = load_pipeline(Path(path), root=Path.cwd())
    return {"spec": _store_code(pipeline, add_code).written()}


def _store_code(spec: S, add_code: Callable[[SyncPrefectClient | None, S, Path], S]) -> S:
    """Store a snapshot of the project's code, and return the spec with the snapshot's name.

    The snapshot is stored on this machine, and on the Prefect server if a server is configured.

    Args:
        spec: A run spec or a pipeline spec. If there is no project, the spec is returned unchanged.
        add_code: Function that stores a snapshot of a project's code, and returns the spec with the
            snapshot's name.
    """
    api_url = PREFECT_API_URL.value()
    root = Path.cwd()
    if not is_project_root(root):
        return spec
    with connect_to_server(api_url) if api_url else nullcontext() as client:
        return add_code(client, spec, root)


def _add_run_code(client: SyncPrefectClient | None, spec: RunSpec, root: Path) -> RunSpec:
    """Store a snapshot of the project's code, and return the run spec with the snapshot's name.

    The run later loads the snapshot by this name. If the spec already names a snapshot, that name
    is kept. If the run needs the Python environment of this shell, the returned spec also contains
    the path of the environment.
    """
    code = store_submitted_code(client, spec.code, root, list_output_folders(spec, root))
    return add_active_environment(spec, root).model_copy(update={"code": code})


def _make_job_variables(spec: RunSpec, root: Path) -> dict[str, str]:
    """Return the job variables of a run, which set the working directory of its process.

    Returns:
        The job variables. Empty if the spec names submitted code, because the process itself then
        changes to a folder with this code.
    """
    return {WORKING_DIR: str(root)} if spec.code == LIVE_CODE else {}


def submit(
    spec: SpecFile,
    /,
    *,
    set: Overrides = (),
    start: FromRun = None,
    queue: str | None = None,
    matrix: MatrixOptions = (),
    at_most: int | None = None,
    watch: bool = False,
    json: AsJson = False,
) -> int:
    """Queue a run of a spec on the Prefect server. The run starts when all its GPUs are free.

    Exit: 0 queued; 2 the spec is invalid, or the run can only start on this machine, which does not
    have a file that the run needs. In these cases, nothing was queued. With --watch, the result of
    the run: 0 completed, 1 failed, 3 no cluster is large enough for the run, 130 cancelled.

    Args:
        queue: The queue of the work pool: urgent, default or idle.
        at_most: With --matrix, the largest number of runs that wait or are running at once.
        watch: Show the run until it has ended, as `muster train` does. For a run on another host,
            show its states and steps. Ctrl-C ends only the display.
        json: Print run_id, flow_run_id and page as JSON. With --watch, print only the states of the
            run, to stderr.
    """
    run_spec = load_spec(spec, set)
    if start is not None:
        run_spec = with_start(run_spec, start)
    root = find_project_root(spec)
    if matrix:
        return _submit_matrix(run_spec, root, matrix, at_most, queue=queue, watch=watch, json=json)
    if at_most is not None:
        raise BadArgument("--at-most limits the runs of a matrix: add --matrix KEY=VALUE,VALUE")
    with connect_to_configured_server() as client:
        flow_run = queue_run(client, run_spec, root, queue=queue)
        if reason := explain_misfit(run_spec):
            print(f"warning: the run cannot start: {reason}", file=sys.stderr)
        return follow_run(client, flow_run, run_spec, watch=watch, json=json)


def _submit_matrix(
    spec: RunSpec,
    root: Path,
    matrix: Sequence[str],
    at_most: int | None,
    *,
    queue: str | None,
    watch: bool,
    json: bool,
) -> int:
    """Submit a pipeline that runs a spec once for each combination of the values in a matrix.

    Args:
        spec: The run spec.
        root: Root folder of the spec's project.
        matrix: Values of the options `--matrix`.
        at_most: Largest number of runs that run or wait in the queue at the same time. None for no
            limit.
        queue: Value of the option `--queue`, which cannot be combined with a matrix.
        watch: True to print the states of the pipeline until it has ended.
        json: True to print the ids and the page of the pipeline as JSON.

    Returns:
        The exit code of the command.
    """
    if queue is not None:
        raise BadArgument(
            "--queue cannot be used with --matrix: the runs of a matrix use the queue `default`"
        )
    if at_most is not None and at_most < 1:
        raise BadArgument(f"--at-most must be at least 1, found {at_most}")
    pipeline = make_matrix_pipeline(spec, matrix, at_most)
    count = len(pipeline.stages[0].points)
    with connect_to_configured_server() as client:
        flow_run = queue_matrix(client, spec, pipeline, root)
        page = find_page_url("flow-run", flow_run.id)
        if json:
            content = {"flow_run_id": str(flow_run.id), "page": page, "points": count}
            print(dumps(content, indent=2), flush=True)
        else:
            print(f"{pipeline.name} is queued: {count} runs of the matrix\n  page    {page}")
            print(f"  end     {format_prefect_command('flow-run', 'cancel', str(flow_run.id))}")
        if not watch:
            return EXIT_DONE
        try:
            return get_exit_code(wait_until_ended(client, flow_run.id, _print_state))
        except KeyboardInterrupt:
            print("The pipeline continues.", file=sys.stderr)
            return EXIT_INTERRUPTED


def follow_run(
    client: SyncPrefectClient,
    flow_run: FlowRun,
    spec: RunSpec,
    *,
    watch: bool,
    json: bool,
    note: str = "",
    after_attempt: int = 0,
) -> int:
    """Print that a run is queued. If the user wants it, also show the run until it has ended.

    Args:
        client: Client of the Prefect server.
        flow_run: The flow run of the queued run.
        spec: Spec of the run.
        watch: True to show the run until it has ended, as `muster train` does.
        json: True to print the ids and the page of the run as JSON. With `watch`, the states of the
            run follow on stderr.
        note: Text after the first line, such as the checkpoint from which the run starts.
        after_attempt: Number of the last attempt that is not shown. 0 to show all attempts.

    Returns:
        The exit code of the command.
    """
    run_id = parse_request(flow_run).name
    page = find_page_url("flow-run", flow_run.id)
    if json:
        content = {"run_id": run_id, "flow_run_id": str(flow_run.id), "page": page}
        print(dumps(content, indent=2), flush=True)
    else:
        print(f"{run_id} is queued{note}\n  page    {page}")
        print(f"  follow  muster logs {run_id} -f\n  end     muster cancel {run_id}")
    if not watch:
        return EXIT_DONE
    try:
        if json:
            return get_exit_code(wait_until_ended(client, flow_run.id, _print_state))
        with Terminal(spec) as terminal:
            run_watch = RunWatch(client, flow_run.id, run_id, terminal, after_attempt)
            state = wait_until_ended(
                client, flow_run.id, run_watch.show_state, each_poll=run_watch.show_news
            )
            run_watch.end(state, page or "")
        return get_exit_code(state)
    except KeyboardInterrupt:
        print(f"The run continues. To end it: muster cancel {run_id}", file=sys.stderr)
        return EXIT_INTERRUPTED


def _print_state(state: State[Any]) -> None:
    """Print a state of a flow run on stderr, with the time."""
    text = f"{state.name}: {state.message}" if state.message else state.name
    print(f"{time.strftime('%H:%M:%S')} {text}", file=sys.stderr, flush=True)


def queue_run(
    client: SyncPrefectClient,
    spec: RunSpec,
    root: Path,
    *,
    queue: str | None = None,
    deployment: str = STAGE_DEPLOYMENT,
) -> FlowRun:
    """Add a run to the queue, and return its flow run.

    Args:
        client: Client of the Prefect server.
        spec: The run spec.
        root: Root folder of the spec's project.
        queue: Name of the work queue, or None for the work queue of the deployment.
        deployment: Name of the deployment `train/NAME` that starts the run.

    Raises:
        InvalidSpec: The run was not queued, because the server lacks a Prefect Secret block of the
            spec, or because all workers are on this machine, which lacks a file of the spec.
        MusterError: The run could not be queued.
    """
    found_deployment = require_deployment(client, deployment)
    read_secrets(client, spec)
    require_files(client, spec, root, found_deployment.work_pool_name)
    spec = _add_run_code(client, spec, root)
    print_project(spec, root)
    flow_run = client.create_flow_run_from_deployment(
        found_deployment.id,
        parameters={"spec": spec.to_server_data()},
        state=Scheduled(),
        tags=spec.tags,
        work_queue_name=queue,
        job_variables=_make_job_variables(spec, root),
    )
    labels = make_code_label(spec.code)
    if labels is not None:
        client.update_flow_run_labels(flow_run.id, labels)
    return flow_run


def wait_until_ended(
    client: SyncPrefectClient,
    flow_run_id: UUID,
    say: Callable[[State[Any]], None] = lambda state: None,
    within_s: float | None = None,
    *,
    each_poll: Callable[[State[Any]], None] = lambda state: None,
) -> State[Any]:
    """Wait until a run has ended, and return its final state.

    Args:
        client: Client of the Prefect server.
        flow_run_id: Id of the flow run.
        say: Function that is called with the present state, and then with each new state of the
            run.
        within_s: Longest wait in seconds, or None for no limit.
        each_poll: Function that is called with the present state about once a second.

    Raises:
        TimeoutError: The run has not ended in time.
    """
    deadline = time.monotonic() + (within_s or 0)
    last_reported = None
    while True:
        state = client.read_flow_run(flow_run_id).state or Scheduled()
        if (state.name, state.message) != last_reported:
            say(state)
        last_reported = (state.name, state.message)
        each_poll(state)
        if state.is_final():
            return state
        if within_s is not None and time.monotonic() >= deadline:
            message = f": {state.message}" if state.message else ""
            raise TimeoutError(f"the run is still {state.name} after {within_s:g} s{message}")
        time.sleep(_POLL_EVERY_S)


def deploy(
    spec: SpecFile,
    /,
    *,
    set: Overrides = (),
    name: str | None = None,
    cron: str | None = None,
    timezone: str | None = None,
    no_cron: bool = False,
    overlap: Overlap | None = None,
) -> None:
    """Create or update a deployment, so that the Prefect UI or a schedule can start runs of a spec.

    An update keeps all changes that were made in the UI: schedules, pauses, limits, tags and job
    variables.

    Exit: 0 done; 2 the spec is invalid, and nothing was changed.

    Args:
        name: Name of the deployment. Default: the name of the spec.
        cron: Start a run at these times, for example "0 3 * * *". Default: no change.
        timezone: IANA name of the time zone of `--cron`, for example Europe/Berlin. This option
            requires `--cron`. Default: no change, or UTC for a new cron line.
        no_cron: Remove the cron line.
        overlap: What to do if a run is due while the last run of the deployment has not ended.
            skip: the new run is cancelled. queue: the new run waits. allow: both run at the same
            time. Default: no change, or allow for a new deployment.
    """
    _check_schedule_options(cron, timezone, no_cron)
    run_spec = load_spec(spec, set)
    root = find_project_root(spec)
    with connect_to_configured_server() as client:
        model = require_deployment(client, STAGE_DEPLOYMENT)
        read_secrets(client, run_spec)
        run_spec = _add_run_code(client, run_spec, root)
        print_project(run_spec, root)
        deployment_name = name or run_spec.name
        full_name = f"{TRAIN_FLOW}/{deployment_name}"
        # Mark no parameter as required, because the deployment already contains the spec. So *Quick
        # run* in the Prefect UI can start a run without asking for parameters.
        parameter_schema = {**(model.parameter_openapi_schema or {}), "required": []}
        source = name_source(spec if spec == STANDARD_INPUT else make_absolute(spec))
        description = f"Run spec: {source}. Project: {root}."
        job_variables = _make_job_variables(run_spec, root)

        existing = find_deployment(client, full_name)
        if existing is None:
            client.create_deployment(
                flow_id=model.flow_id,
                name=deployment_name,
                entrypoint=model.entrypoint,
                work_pool_name=model.work_pool_name,
                parameters={"spec": run_spec.to_server_data()},
                parameter_openapi_schema=parameter_schema,
                enforce_parameter_schema=True,
                tags=[*run_spec.tags],
                description=description,
                pull_steps=[],
                job_variables=job_variables,
                schedules=[make_cron_schedule(cron, timezone)] if cron is not None else None,
                **(make_overlap_settings(overlap) if overlap is not None else {}),
            )
        else:
            renew_deployment(
                client,
                existing,
                entrypoint=model.entrypoint,
                spec=run_spec.to_server_data(),
                parameter_schema=parameter_schema,
                tags=run_spec.tags,
                description=description,
                working_dir=job_variables.get(WORKING_DIR),
            )
            if no_cron:
                remove_cron(client, existing)
            elif cron is not None:
                set_cron(client, existing, cron, timezone)
            if overlap is not None:
                set_overlap(client, existing, overlap)

        _print_deployment(client.read_deployment_by_name(full_name), is_new=existing is None)


def _check_schedule_options(cron: str | None, timezone: str | None, no_cron: bool) -> None:
    """Check the options of `muster deploy` for the schedule.

    Raises:
        BadArgument: Options contradict each other, or the cron line or time zone is invalid.
    """
    if no_cron and cron is not None:
        raise BadArgument(
            "--no-cron removes the schedule that --cron sets: use only one of the two"
        )
    if cron is None:
        if timezone is not None:
            raise BadArgument(f"--timezone {timezone} needs a cron line: add --cron LINE")
        return
    try:
        make_cron_schedule(cron, timezone)
    except ValidationError as error:
        reason = error.errors()[0]["msg"].removeprefix("Value error, ")
        zone = f" --timezone {timezone}" if timezone is not None else ""
        raise BadArgument(f'--cron "{cron}"{zone}: {reason}') from error


def _print_deployment(deployment: DeploymentResponse, *, is_new: bool) -> None:
    """Print the URL of a deployment, its schedules, and a command that starts a run."""
    full_name = f"{TRAIN_FLOW}/{deployment.name}"
    print(f"The deployment {full_name} was {'created' if is_new else 'updated'}.")
    print(f"  page      {find_page_url('deployment', deployment.id)}")
    for line in describe_schedules(deployment, datetime.now(UTC)):
        print(f"  schedule  {line}")
    print(f"  overlap   {describe_overlap(deployment)}")
    print(f"  run       {format_prefect_command('deployment', 'run', full_name)}")


def format_prefect_command(*arguments: str) -> str:
    """Return a shell command that runs `prefect` with the configured server, in any directory.

    The command runs the `prefect` of Muster's own Python environment. Only this `prefect` finds
    Muster's plugin, which provides the password of the Prefect server on this machine.
    """
    variables = {
        "PREFECT_API_URL": str(PREFECT_API_URL.value()),
        "PREFECT_PLUGINS_ENABLED": "true",
        "PREFECT_PLUGINS_ALLOW": "muster",
    }
    if "MUSTER_HOME" in os.environ:
        variables["MUSTER_HOME"] = str(muster_home())
    settings = [f"{name}={quote(value)}" for name, value in variables.items()]
    prefect = str(Path(sys.executable).parent / "prefect")
    return " ".join([*settings, *map(quote, (prefect, *arguments))])


@contextmanager
def connect_to_configured_server() -> Iterator[SyncPrefectClient]:
    """Connect to the configured Prefect server while the context is open.

    Raises:
        NoServer: No Prefect server is configured.
        MusterError: The server rejected a request.
    """
    api_url = PREFECT_API_URL.value()
    if not api_url:
        raise NoServer("no Prefect server is set: run `muster up`, or set PREFECT_API_URL")
    hide_prefect_logs()
    with connect_to_server(api_url) as client:
        try:
            yield client
        except httpx.HTTPStatusError as error:
            if error.response.is_server_error:
                raise
            reason = read_refusal(error.response)
            raise MusterError(f"the Prefect server rejected the request: {reason}") from error


def init(path: Path = Path(), /, *, force: bool = False) -> None:
    """Write a commented run spec, muster.yaml, for the training in a directory or for a script.

    The command recognises plain scripts, torchrun, accelerate, transformers, Lightning, verl, TRL,
    slime and prime-rl by their files. If the script needs the module muster_metrics.py to write its
    metrics, this module is written, too.

    Exit: 0 written; 1 a muster.yaml exists already; 2 the directory contains no training.

    Args:
        path: The directory with the training, or the script that starts it. Default: the working
            directory. For a script below the working directory, muster.yaml is written there.
        force: Replace an existing muster.yaml.
    """
    if not path.exists():
        raise BadArgument(f"{path} does not exist: write the path of a script or of a directory")
    directory, file = _split_training_path(path)
    draft = draft_spec(directory, file, gpus=_count_gpus(), guide=find_document("run-spec.md"))
    spec_path = directory / "muster.yaml"
    if spec_path.exists() and not force:
        raise MusterError(f"{spec_path} exists already: add --force to replace it")
    write_for_caller(spec_path, draft.text)
    load_spec(spec_path)

    print(f"Found {draft.framework} ({draft.file}). Wrote the run spec {spec_path}.")
    if draft.hook is not None:
        hook = directory / draft.hook
        if not hook.exists():
            write_for_caller(hook, read_hook())
        print(
            f"To let Muster show the steps of the training, use {hook} in the training script. The "
            f"comments in {spec_path.name} show how."
        )
    if draft.own_folder is not None:
        print(_describe_own_folder(draft.own_folder, spec_path))
    elif draft.needs_checkpoints_variable:
        print(
            f"Muster found no option of {draft.file} that sets the folder of the checkpoints. So "
            f"{spec_path} sets the environment variable CHECKPOINTS. Change the script so that it "
            'saves its checkpoints in os.environ["CHECKPOINTS"].'
        )
    if draft.missing_arguments:
        names = join_commas(draft.missing_arguments)
        print(
            f"The script also requires the arguments {names}: add them to `command` in {spec_path}."
        )
    if draft.other_scripts:
        scripts = join_commas(draft.other_scripts)
        command = f"muster init {quote(str(draft.other_scripts[0]))} --force"
        if directory.absolute() != Path.cwd():
            command = f"cd {quote(str(directory))} && {command}"
        print(f"Other scripts: {scripts}. To choose one: {command}")
    print(f"Check this file, then run it:\n  muster train {quote(str(spec_path))}")


def _describe_own_folder(folder: OwnFolder, spec_path: Path) -> str:
    """Return a message about a script that chooses its own folder for checkpoints.

    Args:
        folder: The folder.
        spec_path: Path of the run spec that `muster init` has written.
    """
    source = folder.reason
    if folder.is_fixed:
        return (
            f"The script probably saves its checkpoints in {folder.path}, {source}. So "
            f"`checkpoints` in {spec_path} names this folder, which all runs of `muster train` "
            "share. The comments in the file show how to give each run a folder of its own."
        )
    return (
        f"The script may save its checkpoints in {folder.path}, {source}. But `checkpoints` in "
        f'{spec_path} is "${{run.dir}}/checkpoints". Either let the script save in '
        'os.environ["CHECKPOINTS"], or set `checkpoints` to the folder in which it saves.'
    )


def _split_training_path(path: Path) -> tuple[Path, Path | None]:
    """Return the directory of a training, and the main file.

    Args:
        path: An existing directory or file.

    Returns:
        The directory, and the path of the file relative to the directory. The second value is None
        if `path` is a directory.
    """
    if path.is_dir():
        return path, None
    file = make_absolute(path)
    if file.is_relative_to(Path.cwd()):
        return Path(), file.relative_to(Path.cwd())
    return path.parent, Path(path.name)


def _count_gpus() -> int:
    """Return the number of GPUs of this machine that a run can get.

    If the GPU driver does not answer, the result is 0, and the reason is printed on stderr.

    Raises:
        BadDevices: MUSTER_GPUS is malformed or names a missing GPU.
    """
    try:
        return len(Devices.here().indices)
    except OSError as error:
        print(f"The GPUs of this machine are unknown: {error}", file=sys.stderr)
        return 0
