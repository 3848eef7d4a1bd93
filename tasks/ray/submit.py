"""Submit a job to a Ray cluster exactly once, even if requests get no answer.

The job is submitted with a fixed submission id. If a submit request gets no answer, Muster first
asks the cluster whether it has a job with this id. If the cluster has no such job, Muster submits
the job again.

The working directory and a small wrapper program are shipped with the job. The *driver* is the
process that runs the job's command, inside the wrapper, on a node of the cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import shlex
import signal
import tempfile
import time
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.processes import tree
from tasks.processes.trusted_server import require_trusted_url
from tasks.ray import wrapper
from tasks.ray.dashboard import Credentials, Dashboard, Denied, JobState, LiveNode, NoAnswer
from tasks.ray.submission import SETTLES_WITHIN_S, JobPlan, SubmissionFile
from tasks.record.events import Emit
from tasks.record.outcome import ComponentFailed, GiveUpReason
from tasks.record.places import muster_home
from tasks.spec.failure_kinds import FailureKind

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient


#: Seconds from the stop signal to SIGKILL for processes that outlive the command of a job.
STRAGGLERS_S = 0.3
#: Amount of the Ray resource `worker_node` that a job's driver takes. The amount is small, so that
#: a node with one unit of the resource has room for 1000 drivers.
_WORKER_SHARE = 0.001
#: Ray resource with which the operators of a cluster mark the nodes for jobs.
_WORKER_RESOURCE = "worker_node"
#: Ray label that contains the id of a node.
_NODE_ID_LABEL = "ray.io/node-id"
#: Files of the working directory that are never copied to the cluster, as .gitignore patterns.
_EXCLUDES = (
    ".git",
    "/runs",
    "/tests",
    ".venv",
    "venv",
    "node_modules",
    "__pycache__",
    "/build",
    ".mypy_cache",
    ".pytest_cache",
    ".ruff_cache",
)
#: Deadline of each request of a submission, in seconds. A request may upload hundreds of MB.
_REQUEST_TIMEOUT_S = 60.0
#: Name of the directory with the wrapper program, which is copied to the cluster with each job. The
#: wrapper starts the component's command on the node.
_PACKAGE = "muster_driver"
#: Mapping from logger name to log level, for Ray's loggers that report uploads. The level
#: suppresses these reports, which would disturb Muster's own output on the terminal.
_NOISY_LOGGERS = {
    "ray.dashboard.modules.dashboard_sdk": logging.WARNING,
    "ray._private.runtime_env.packaging": logging.WARNING,
    "ray._private.runtime_env.working_dir": logging.ERROR,
}
#: Python code that finds and runs the wrapper program on the node. `python -m` is not used, because
#: Python would then search the working directory first for each import. A user's file `queue.py` in
#: this directory would replace the module `queue` of the standard library.
_BOOTSTRAP = (
    "import os,runpy;runpy.run_path(next(p for p in"
    f' (d+"/{_PACKAGE}" for d in os.environ["PYTHONPATH"].split(":")) if os.path.isdir(p)),'
    'run_name="__main__")'
)
#: Shell expression for the path of the Python interpreter that runs Ray on the node. A Ray process
#: starts the shell for the job's command. So the expression reads the interpreter's path from the
#: parent process of the shell. If the path cannot be read, `python3` in the PATH is used. `python3`
#: is only the second choice, because the PATH may contain another Python or none.
_INTERPRETER = '"$(readlink /proc/$PPID/exe || command -v python3)"'


def build_entrypoint(plan: JobPlan) -> str:
    """Return the job's shell command: the wrapper program with the component's command."""
    command = plan.command
    wrapper_arguments = (
        f"--grace {command.longest_grace_s:g} --signal {command.stop_signal}"
        f" --stragglers {STRAGGLERS_S:g} -- {shlex.join(command.argv)}"
    )
    return f"exec {_INTERPRETER} -I -S -c {shlex.quote(_BOOTSTRAP)} {wrapper_arguments}"


def build_environment(plan: JobPlan) -> dict[str, str]:
    """Return the environment variables of the job.

    Muster searches for leftover processes of the job by the variables MUSTER_RUN_ID, MUSTER_ATTEMPT
    and MUSTER_COMPONENT.
    """
    env = {
        **plan.command.env,
        "MUSTER_RUN_ID": plan.run_id,
        "MUSTER_ATTEMPT": str(plan.attempt),
        "MUSTER_COMPONENT": plan.component,
        # After a stop request, Ray waits this number of seconds and then kills Muster's wrapper
        # process, which runs the command. The time must be longer than the command's grace period.
        "RAY_JOB_STOP_WAIT_TIME_S": str(math.ceil(plan.command.longest_grace_s) + 5),
    }
    if plan.command.stop_signal == signal.SIGINT:
        env["RAY_JOB_STOP_SIGNAL"] = "SIGINT"
    return env


def list_excludes(plan: JobPlan) -> list[str]:
    """Return .gitignore patterns for files of the working directory that Ray does not upload."""
    excludes = [*_EXCLUDES, *plan.excludes]
    with contextlib.suppress(ValueError):
        # If Muster's home directory is inside the working directory, do not upload the home
        # directory, because it contains the records of all runs.
        home = muster_home().resolve().relative_to(plan.command.cwd.resolve())
        excludes.append(f"/{home}")
    return excludes


def choose_driver_node(
    plan: JobPlan, nodes: Sequence[LiveNode]
) -> tuple[Mapping[str, float], Mapping[str, str]]:
    """Choose the resources and labels that a node must have to run the job's driver.

    - If the plan contains resources or labels for the driver, they are used unchanged.
    - Otherwise, the driver runs on a node that the queue granted to the run.
    - Without a grant, the driver runs on any node except the head node. Ray itself would prefer the
      head node.

    Returns:
        Two mappings: from resource name to required amount, and from label name to required value.
        Both are empty if the cluster has only a head node.
    """
    if plan.entrypoint_resources or plan.entrypoint_label_selector:
        return plan.entrypoint_resources, plan.entrypoint_label_selector

    granted_ids = [
        node.node_id
        for node in nodes
        if node.name in plan.nodes or f"{node.name}/{node.node_id[:8]}" in plan.nodes
    ]
    if granted_ids:
        return {}, {_NODE_ID_LABEL: f"in({','.join(granted_ids)})"}

    workers = [node for node in nodes if not node.is_head]
    if any(node.resources_total.get(_WORKER_RESOURCE, 0) > 0 for node in workers):
        return {_WORKER_RESOURCE: _WORKER_SHARE}, {}
    heads = [node for node in nodes if node.is_head]
    if workers and heads:
        return {}, {_NODE_ID_LABEL: f"!{heads[0].node_id}"}
    return {}, {}


def submit(plan: JobPlan, nodes: Sequence[LiveNode]) -> None:
    """Submit the job to Ray. The call may block for minutes, so call it in a thread.

    The call returns normally if the cluster has the job, even if an earlier request submitted it.

    Args:
        plan: Plan of the job.
        nodes: The living nodes of the cluster, from which the driver's node is chosen.

    Raises:
        Denied: The cluster rejects the job, and would reject it again.
        NoAnswer: It is unknown whether the cluster has the job.
    """
    from ray.exceptions import AuthenticationError, RuntimeEnvSetupError

    resources, labels = choose_driver_node(plan, nodes)
    try:
        with _package() as package:
            _client(plan.address).submit_job(
                submission_id=plan.submission_id,
                entrypoint=build_entrypoint(plan),
                entrypoint_resources=dict(resources) or None,
                entrypoint_num_cpus=plan.entrypoint_cpus,
                entrypoint_num_gpus=plan.entrypoint_gpus,
                entrypoint_memory=plan.entrypoint_memory_bytes,
                entrypoint_label_selector=dict(labels) or None,
                metadata={"muster_run_id": plan.run_id, "muster_component": plan.component},
                runtime_env={
                    "working_dir": str(plan.command.cwd),
                    "excludes": list_excludes(plan),
                    "py_modules": [str(package)],
                    "env_vars": build_environment(plan),
                },
            )
    except AuthenticationError as error:
        raise Denied(f"{plan.address} rejected Ray's authentication token: {error}") from error
    except RuntimeError as error:
        _handle_sdk_error(error, plan)
    except (ValueError, TypeError, RuntimeEnvSetupError) as error:
        raise Denied(
            f"Muster cannot send the working directory {plan.command.cwd} to the cluster: {error}"
        ) from error
    except OSError as error:
        # The errors of the `requests` library are OSErrors, too.
        raise NoAnswer(
            f"{plan.address} did not answer the request to submit the job: {error}"
        ) from error


def _handle_sdk_error(error: RuntimeError, plan: JobPlan) -> None:
    """Raise the exception that fits an error of Ray's SDK, or return if the cluster has the job.

    The SDK raises RuntimeError for every failed request. The status code of the request is only in
    the text of the error: `Request failed with status code N: ...`.

    Raises:
        Denied: The cluster rejects the job, and would reject it again.
        NoAnswer: It is unknown whether the cluster has the job.
    """
    text = str(error)
    if "already exists" in text and plan.submission_id in text:
        return
    _, separator, rest = text.partition("Request failed with status code ")
    problem = f"Muster cannot send the working directory {plan.command.cwd} to the cluster"
    if not separator:
        raise Denied(f"{problem}: {text[:2000]}") from error
    if rest.startswith("413"):
        # HTTP status 413 means that the package is too large for the dashboard. The dashboard's
        # size limit is lower than Ray's own limit for packages.
        raise Denied(
            f"{problem}: the files of this directory exceed the size limit of the dashboard at "
            f"{plan.address} ({rest[5:].strip(' .')}). Exclude files that the job does not need, "
            "or move them to a directory that the nodes can read."
        ) from error
    if rest.startswith("4"):
        raise Denied(f"{plan.address} rejected the job: {text[:2000]}") from error
    raise NoAnswer(
        f"it is unknown whether the Ray cluster at {plan.address} has accepted the job: "
        f"{text[:2000]}"
    ) from error


def wrapper_sources() -> dict[str, str]:
    """Return a mapping from file name to source code, for all files of the wrapper program."""
    files = {"__main__.py": wrapper.__file__, "tree.py": tree.__file__}
    return {name: Path(file).read_text(encoding="utf-8") for name, file in files.items()}


@contextlib.contextmanager
def _package() -> Iterator[Path]:
    """Create a temporary directory with the wrapper program's files, and yield its path.

    The wrapper program starts the command of each Ray job. Its files are the same for all jobs, so
    Ray uploads them only once to each cluster.
    """
    with tempfile.TemporaryDirectory(prefix="muster-ship-") as parent:
        package = Path(parent) / _PACKAGE
        package.mkdir()
        for name, source in wrapper_sources().items():
            (package / name).write_text(source, encoding="utf-8")
        yield package


def _client(address: str) -> JobSubmissionClient:
    """Return Ray's client for submitting jobs, with restrictions for its requests.

    Each request has a deadline, uses no proxy, follows no redirect, and goes to the given address.

    Args:
        address: URL of the cluster's dashboard.
    """
    import ray
    from ray.dashboard.modules.dashboard_sdk import SubmissionClient
    from ray.job_submission import JobSubmissionClient

    # The import of Ray's modules sets the levels of Ray's loggers, so change the levels afterwards.
    for name, level in _NOISY_LOGGERS.items():
        logging.getLogger(name).setLevel(level)

    credentials = Credentials.own(address)

    class Client(JobSubmissionClient):
        def __init__(self) -> None:
            # Skip the constructor of JobSubmissionClient. The constructor would replace the address
            # with the value of the environment variable RAY_ADDRESS.
            SubmissionClient.__init__(
                self, address, headers=credentials.make_headers(), verify=credentials.ca or True
            )
            self._client_ray_version = ray.__version__

        def _do_request(self, *args: Any, **kwargs: Any) -> Any:
            kwargs.setdefault("timeout", _REQUEST_TIMEOUT_S)
            kwargs.setdefault("proxies", {"http": "", "https": ""})
            # Follow no redirect, because a redirect would send the headers with the token to
            # another address.
            kwargs.setdefault("allow_redirects", False)
            require_trusted_url(address)
            return super()._do_request(*args, **kwargs)

    return Client()


#: Longest wait for the first answer of a cluster, in seconds. The wait is short: if the cluster has
#: never answered, its address is probably wrong, and no job was submitted.
_FIRST_ANSWER_TIMEOUT_S = 20.0
#: Largest number of submit requests for one job.
_MAX_SUBMITS = 3
#: Seconds between two requests for the state of a submitted job.
_STATE_INTERVAL_S = 0.5


async def finish_thread_work(blocking: Coroutine[Any, Any, None]) -> None:
    """Wait until a thread has finished its work, even if this call is cancelled.

    A thread cannot be cancelled. If this call is cancelled, CancelledError is raised after the
    thread has finished.

    Args:
        blocking: Coroutine that waits for the thread, for example `asyncio.to_thread(...)`.
    """
    task = asyncio.ensure_future(blocking)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


@dataclass(slots=True)
class Submitter:
    """Submits one Ray job. If a submit request fails, asks whether the cluster has the job."""

    _plan: JobPlan
    _dashboard: Dashboard
    _file: SubmissionFile
    _emit: Emit

    async def run(self) -> JobState | None:
        """Submit the job, or attach to it if an earlier process of the run has submitted it.

        Returns:
            The state of the job. None if the job was submitted now and its state is unknown.

        Raises:
            ComponentFailed: The job could not be submitted, or it is unknown whether it was
                submitted.
        """
        content = self._file.content
        is_outcome_unknown = content.submit_began_at is not None and content.submitted_at is None
        state = await self._request_state(settle=is_outcome_unknown)
        if state is not None:
            self._note_submitted()
            self._emit("job.attached", submission_id=self._plan.submission_id)
            return state
        if self._file.content.submitted_at is not None:
            raise ComponentFailed(await self.forgotten() or _job_unknown(self._plan))
        for _ in range(_MAX_SUBMITS):
            problem = await self._submit_once()
            if not problem:
                break
            state = await self._request_state(settle=True)
            if state is not None:
                break
        else:
            raise self._give_up(
                FailureKind.NETWORK,
                "submit-unanswered",
                f"Muster sent {_MAX_SUBMITS} requests to submit job {self._plan.submission_id} to "
                f"the Ray dashboard at {self._plan.address}. The dashboard did not answer these "
                f"requests, and its list of jobs does not contain the job: {problem}",
            )
        self._note_submitted()
        plan = self._plan
        self._emit("job.submitted", submission_id=plan.submission_id, address=plan.address)
        return state

    async def forgotten(self) -> GiveUpReason | None:
        """Return why the cluster has no record of a job that the cluster had accepted.

        Call this method only after the cluster has answered that it does not know the job.

        Returns:
            The reason for giving up the job, or None if the cluster does not answer now.
        """
        try:
            session = await self._dashboard.session()
        except (NoAnswer, Denied):
            return None
        recorded_session = self._file.content.session
        if recorded_session is not None and session != recorded_session:
            message = (
                f"the Ray cluster at {self._plan.address} was restarted and has lost job "
                f"{self._plan.submission_id}. The session of the cluster was {recorded_session}, "
                f"and is now {session}"
            )
            return GiveUpReason(
                kind=FailureKind.NODE_LOST, rule="cluster-restarted", message=message
            )
        return _job_unknown(self._plan)

    async def _submit_once(self) -> str:
        """Send one submit request for the job.

        Returns:
            An empty string if the cluster has the job. Otherwise, the error of the request. It is
            then unknown whether the cluster has the job.

        Raises:
            ComponentFailed: The cluster rejects the job, and would reject it again.
        """
        try:
            nodes = await self._dashboard.nodes()
            session = await self._dashboard.session()
            gcs_address = await self._dashboard.gcs_address()
            began_at = time.time()
            self._file.note(submit_began_at=began_at, session=session, gcs_address=gcs_address)
            await self._file.written()
            await finish_thread_work(asyncio.to_thread(submit, self._plan, nodes))
        except NoAnswer as error:
            return str(error)
        except Denied as error:
            raise self._give_up(FailureKind.USER_ERROR, "job-refused", str(error)) from error
        return ""

    def _note_submitted(self) -> None:
        """Record in the submission file that the cluster has the job."""
        if self._file.content.submitted_at is None:
            self._file.note(submitted_at=time.time(), status="pending")

    def _give_up(self, kind: FailureKind, rule: str, message: str) -> ComponentFailed:
        """Record the reason for giving up the job, and return the exception to raise."""
        # If contact with the cluster was lost, the cluster may have accepted the job. So do not
        # record the job as refused.
        if kind is not FailureKind.LOST_CONTACT:
            self._file.note(status="refused", message=message)
        return ComponentFailed(GiveUpReason(kind=kind, rule=rule, message=message))

    async def _request_state(self, *, settle: bool) -> JobState | None:
        """Return the state of the job. Requests are repeated until the cluster answers.

        Args:
            settle: True if an earlier submit request may still reach the cluster. If True and the
                cluster has no such job, the state is requested again for some seconds.

        Returns:
            The state of the job, or None if the cluster has no such job.

        Raises:
            ComponentFailed: The cluster refused the request, or did not answer for too long.
        """
        was_begun = self._file.content.submit_began_at is not None
        timeout_s = self._plan.lost_after_s if was_begun else _FIRST_ANSWER_TIMEOUT_S
        started_s = time.monotonic()
        answered_s = started_s
        while True:
            try:
                state = await self._dashboard.job(self._plan.submission_id)
            except Denied as error:
                raise self._give_up(FailureKind.USER_ERROR, "job-refused", str(error)) from error
            except NoAnswer as error:
                if time.monotonic() - answered_s > timeout_s:
                    raise self._give_up_unanswered(was_begun, timeout_s, str(error)) from error
            else:
                answered_s = time.monotonic()
                if state is not None or not settle or answered_s - started_s > SETTLES_WITHIN_S:
                    return state
            await asyncio.sleep(_STATE_INTERVAL_S)

    def _give_up_unanswered(
        self, was_begun: bool, timeout_s: float, problem: str
    ) -> ComponentFailed:
        """Return the exception for a cluster that did not answer in time.

        Args:
            was_begun: True if a submit request was sent. The cluster may then have the job.
            timeout_s: Time in seconds during which requests were repeated.
            problem: Error of the last request.
        """
        plan = self._plan
        if was_begun:
            message = (
                f"the state of job {plan.submission_id} is unknown, because {plan.address} has not "
                f"answered for {timeout_s:g} s: {problem}"
            )
            return self._give_up(FailureKind.LOST_CONTACT, "contact-lost", message)
        message = (
            f"no Ray dashboard has answered at {plan.address} for {timeout_s:g} s, so no job was "
            f"submitted: {problem}"
        )
        return self._give_up(FailureKind.NETWORK, "cluster-unreachable", message)


def _job_unknown(plan: JobPlan) -> GiveUpReason:
    """Return the reason for giving up a job that the cluster had accepted and no longer has."""
    message = (
        f"the Ray cluster at {plan.address} accepted job {plan.submission_id}, but no longer knows "
        "the job; perhaps somebody deleted it there"
    )
    return GiveUpReason(kind=FailureKind.LOST_CONTACT, rule="job-unknown", message=message)
