"""Submit a job to Ray exactly once, whatever happens to the requests.

A submission has a fixed id. After a request without an answer, the cluster is asked for that id
before the job is submitted again. The working directory and a small wrapper are shipped with it.
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
from tasks.record.outcome import GivenUp, GiveUpReason
from tasks.record.places import muster_home
from tasks.spec.failure_kinds import FailureKind

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient


#: Seconds that leftover processes of a driver get to exit after their stop signal.
STRAGGLERS_S = 0.3
#: Amount of a worker's resource that a driver takes. It is tiny so that drivers never compete: a
#: node with 1 unit has room for 1000 drivers.
_WORKER_SHARE = 0.001
#: Resource with which clusters mark the nodes that run work.
_WORKER_RESOURCE = "worker_node"
_NODE_ID_LABEL = "ray.io/node-id"
#: Files that are never shipped, in the syntax of .gitignore.
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
#: Deadline of each request of a submission, in seconds. The package may be hundreds of MB.
_REQUEST_TIMEOUT_S = 60.0
#: Directory name of the shipped wrapper.
_PACKAGE = "muster_driver"
#: Loggers of Ray that report each upload, and the level that silences them. Their lines would
#: disturb Muster's own output on the terminal.
_NOISY_LOGGERS = {
    "ray.dashboard.modules.dashboard_sdk": logging.WARNING,
    "ray._private.runtime_env.packaging": logging.WARNING,
    "ray._private.runtime_env.working_dir": logging.ERROR,
}
#: Python code that runs the shipped wrapper. `python -m` would put the working directory first on
#: the import path. There, the user's `queue.py` or `signal.py` would hide the standard library's.
_BOOTSTRAP = (
    "import os,runpy;runpy.run_path(next(p for p in"
    f' (d+"/{_PACKAGE}" for d in os.environ["PYTHONPATH"].split(":")) if os.path.isdir(p)),'
    'run_name="__main__")'
)
#: Shell expression for the Python interpreter. Ray starts the entrypoint with a shell, and the
#: shell's parent is Ray's own interpreter, so that one exists. The node's PATH may have none.
_INTERPRETER = '"$(readlink /proc/$PPID/exe || command -v python3)"'


def build_entrypoint(plan: JobPlan) -> str:
    """Return the shell command that Ray runs: the wrapper, which runs the component's command."""
    command = plan.command
    wrapper_arguments = (
        f"--grace {command.grace_s:g} --signal {command.stop_signal}"
        f" --stragglers {STRAGGLERS_S:g} -- {shlex.join(command.argv)}"
    )
    return f"exec {_INTERPRETER} -I -S -c {shlex.quote(_BOOTSTRAP)} {wrapper_arguments}"


def build_environment(plan: JobPlan) -> dict[str, str]:
    """Return the environment variables of the job. A sweep recognises its processes by them."""
    env = {
        **plan.command.env,
        "MUSTER_RUN_ID": plan.run_id,
        "MUSTER_ATTEMPT": str(plan.attempt),
        "MUSTER_COMPONENT": plan.component,
        # Longer than the wrapper's grace period, so that Ray does not kill the wrapper too early.
        "RAY_JOB_STOP_WAIT_TIME_S": str(math.ceil(plan.command.grace_s) + 5),
    }
    if plan.command.stop_signal == signal.SIGINT:
        env["RAY_JOB_STOP_SIGNAL"] = "SIGINT"
    return env


def list_excludes(plan: JobPlan) -> list[str]:
    """Return the files of the working directory that are not shipped, as .gitignore patterns."""
    excludes = [*_EXCLUDES, *plan.excludes]
    with contextlib.suppress(ValueError):
        # The Muster home holds the records of runs. It is not shipped either.
        home = muster_home().resolve().relative_to(plan.command.cwd.resolve())
        excludes.append(f"/{home}")
    return excludes


def choose_driver_node(
    plan: JobPlan, nodes: Sequence[LiveNode]
) -> tuple[Mapping[str, float], Mapping[str, str]]:
    """Return the resources and labels that decide on which node the driver runs.

    - Values of the plan are taken as they are.
    - Otherwise the driver runs on a node that was granted to the run.
    - Without a grant, it runs on any node but the head, which Ray would prefer.

    Returns:
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
    """Submit the job to Ray. Blocks for up to some minutes, so run it in a thread.

    Returns normally if the cluster has the job, even from an earlier request.

    Raises:
        Denied: The cluster will never accept this job as it is.
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
        raise Denied(f"{plan.address} refuses the token: {error}") from error
    except RuntimeError as error:
        _handle_sdk_error(error, plan)
    except (ValueError, TypeError, RuntimeEnvSetupError) as error:
        raise Denied(f"{plan.command.cwd} can't be shipped as it is: {error}") from error
    except OSError as error:  # Includes the errors of the `requests` library.
        raise NoAnswer(f"no answer from {plan.address} to the submit: {error}") from error


def _handle_sdk_error(error: RuntimeError, plan: JobPlan) -> None:
    """Raise Denied or NoAnswer for an error of Ray's SDK, or return if the cluster has the job.

    The SDK raises the same exception for every failed request. Only the text tells them apart:
    `Request failed with status code N: ...`.
    """
    text = str(error)
    if "already exists" in text and plan.submission_id in text:
        return
    _, separator, rest = text.partition("Request failed with status code ")
    unfit = f"{plan.command.cwd} can't be shipped as it is"
    if not separator:
        raise Denied(f"{unfit}: {text[:2000]}") from error
    if rest.startswith("413"):
        # The dashboard's limit is lower than Ray's own limit for packages.
        raise Denied(
            f"{unfit}: packed, it is larger than the dashboard at {plan.address} takes "
            f"({rest[5:].strip(' .')}); exclude what the job does not need, or put it where the "
            "nodes can read it"
        ) from error
    if rest.startswith("4"):
        raise Denied(f"{plan.address} refuses the job: {text[:2000]}") from error
    raise NoAnswer(f"{plan.address}: {text[:2000]}") from error


def wrapper_sources() -> dict[str, str]:
    """Return the source of each file of the shipped wrapper, by file name."""
    files = {"__main__.py": wrapper.__file__, "tree.py": tree.__file__}
    return {name: Path(file).read_text(encoding="utf-8") for name, file in files.items()}


@contextlib.contextmanager
def _package() -> Iterator[Path]:
    """Create a temporary directory with the wrapper's files.

    The content is always the same, so Ray uploads the package only once for each cluster.
    """
    with tempfile.TemporaryDirectory(prefix="muster-ship-") as parent:
        package = Path(parent) / _PACKAGE
        package.mkdir()
        for name, source in wrapper_sources().items():
            (package / name).write_text(source, encoding="utf-8")
        yield package


def _client(address: str) -> JobSubmissionClient:
    """Return Ray's client with a deadline for each request, no proxy, and exactly this address."""
    import ray
    from ray.dashboard.modules.dashboard_sdk import SubmissionClient
    from ray.job_submission import JobSubmissionClient

    # These modules set the level of their loggers when they are imported.
    for name, level in _NOISY_LOGGERS.items():
        logging.getLogger(name).setLevel(level)

    credentials = Credentials.own(address)

    class Client(JobSubmissionClient):
        def __init__(self) -> None:
            # The constructor of the base class would replace the address with RAY_ADDRESS.
            SubmissionClient.__init__(
                self, address, headers=credentials.sent(), verify=credentials.ca or True
            )
            self._client_ray_version = ray.__version__

        def _do_request(self, *args: Any, **kwargs: Any) -> Any:
            kwargs.setdefault("timeout", _REQUEST_TIMEOUT_S)
            kwargs.setdefault("proxies", {"http": "", "https": ""})
            # After a redirect, the headers would go to another address.
            kwargs.setdefault("allow_redirects", False)
            require_trusted_url(address)
            return super()._do_request(*args, **kwargs)

    return Client()


#: Seconds after which a cluster that never answered is given up. This is short because the address
#: is probably wrong, and nothing was submitted yet.
_FIRST_ANSWER_TIMEOUT_S = 20.0
#: How often a job is submitted before it is given up.
_MAX_SUBMITS = 3
#: Seconds between two requests for the state of a submission.
_STATE_INTERVAL_S = 0.5


async def finish_thread_work(blocking: Coroutine[Any, Any, None]) -> None:
    """Wait for work in a thread, even after a cancel, which cannot stop the thread."""
    task = asyncio.ensure_future(blocking)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


@dataclass(slots=True)
class Submitter:
    """Brings one submission to the cluster, and asks for its state by id if a request fails."""

    _plan: JobPlan
    _dashboard: Dashboard
    _file: SubmissionFile
    _emit: Emit

    async def run(self) -> JobState | None:
        """Submit the job, or attach to it if an earlier request or process has submitted it.

        Returns:
            The state of the job, or None if it was submitted just now.

        Raises:
            GivenUp: The job could not be submitted, or it is unknown whether it was.
        """
        content = self._file.content
        is_outcome_unknown = content.submit_began_at is not None and content.submitted_at is None
        state = await self._request_state(settle=is_outcome_unknown)
        if state is not None:
            self._note_submitted()
            self._emit("job.attached", submission_id=self._plan.submission_id)
            return state
        if self._file.content.submitted_at is not None:
            raise GivenUp(await self.forgotten() or _job_unknown(self._plan))
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
                f"{self._plan.address} answered no submit of job {self._plan.submission_id}, and "
                f"does not know the job: {problem}",
            )
        self._note_submitted()
        plan = self._plan
        self._emit("job.submitted", submission_id=plan.submission_id, address=plan.address)
        return state

    async def forgotten(self) -> GiveUpReason | None:
        """Return the reason why the cluster does not know a job that it had accepted.

        Returns:
            None if the cluster cannot be asked.
        """
        try:
            session = await self._dashboard.session()
        except (NoAnswer, Denied):
            return None
        recorded_session = self._file.content.session
        if recorded_session is not None and session != recorded_session:
            message = (
                f"the cluster at {self._plan.address} was restarted and knows nothing of job "
                f"{self._plan.submission_id}: it was {recorded_session}, it is {session}"
            )
            return GiveUpReason(
                kind=FailureKind.NODE_LOST, rule="cluster-restarted", message=message
            )
        return _job_unknown(self._plan)

    async def _submit_once(self) -> str:
        """Submit the job.

        Returns:
            Reason why it is unknown whether the cluster has the job; empty if the cluster has it.

        Raises:
            GivenUp: The cluster will never accept this job.
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
        if self._file.content.submitted_at is None:
            self._file.note(submitted_at=time.time(), status="pending")

    def _give_up(self, kind: FailureKind, rule: str, message: str) -> GivenUp:
        """Record why the job is given up, and return the exception to raise."""
        # After a loss of contact the job may exist, so its recorded status stays.
        if kind is not FailureKind.LOST_CONTACT:
            self._file.note(status="refused", message=message)
        return GivenUp(GiveUpReason(kind=kind, rule=rule, message=message))

    async def _request_state(self, *, settle: bool) -> JobState | None:
        """Return the state of the job. A request without an answer is repeated.

        Args:
            settle: If the cluster does not know the job, ask again for some seconds.

        Raises:
            GivenUp: The cluster refuses the request, or has not answered for too long.
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

    def _give_up_unanswered(self, was_begun: bool, timeout_s: float, problem: str) -> GivenUp:
        """Return the exception for a cluster that has not answered for `timeout_s` seconds."""
        plan = self._plan
        asked = f"asked for {timeout_s:g} s"
        if was_begun:
            fault = f"whether {plan.address} has job {plan.submission_id} is not known, {asked}"
            return self._give_up(FailureKind.LOST_CONTACT, "contact-lost", f"{fault}: {problem}")
        fault = f"no Ray dashboard answers at {plan.address}, {asked}; nothing was submitted"
        return self._give_up(FailureKind.NETWORK, "cluster-unreachable", f"{fault}: {problem}")


def _job_unknown(plan: JobPlan) -> GiveUpReason:
    message = (
        f"the cluster at {plan.address} does not know job {plan.submission_id}, which it had "
        "taken; somebody may have deleted it there"
    )
    return GiveUpReason(kind=FailureKind.LOST_CONTACT, rule="job-unknown", message=message)
