"""How a job is handed to Ray: what is shipped with it, and a submit whose outcome is told apart, so
that it is submitted once, whatever becomes of the answers.
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
from tasks.ray import wrapper
from tasks.ray.dashboard import Credentials, Dashboard, Denied, JobState, LiveNode, NoAnswer
from tasks.ray.submission import SETTLES_WITHIN_S, JobPlan, SubmissionFile
from tasks.record.events import Emit
from tasks.record.outcome import GivenUp, Trouble
from tasks.record.places import muster_home
from tasks.spec.failure_kinds import FailureKind

if TYPE_CHECKING:
    from ray.job_submission import JobSubmissionClient


#: What a driver leaves behind at its end may take this long to leave when it is asked to.
STRAGGLERS_S = 0.3
#: How much of a worker's resource a driver takes: 1000 drivers fit where there is 1.
_SHARE = 0.001
#: The resource by which clusters mark the nodes that are to do work.
_WORKER_RESOURCE = "worker_node"
_NODE_ID_LABEL = "ray.io/node-id"
#: Never shipped.
_EXCLUDES = (
    *(".git", "/runs", "/tests", ".venv", "venv", "node_modules", "__pycache__", "/build"),
    *(".mypy_cache", ".pytest_cache", ".ruff_cache"),
)
#: For each request of a submit; the package itself may be hundreds of MB.
_REQUEST_WITHIN_S = 60.0
_PACKAGE = "muster_driver"
#: They tell each upload to the terminal, where a run's own view stands.
_TALKERS = {
    "ray.dashboard.modules.dashboard_sdk": logging.WARNING,
    "ray._private.runtime_env.packaging": logging.WARNING,
    "ray._private.runtime_env.working_dir": logging.ERROR,
}
#: Runs the shipped package. Not by `-m`: that would put the working directory first on the path,
#: where a `queue.py` or `signal.py` of the user's hides the standard library's.
_BOOTSTRAP = (
    "import os,runpy;runpy.run_path(next(p for p in"
    f' (d+"/{_PACKAGE}" for d in os.environ["PYTHONPATH"].split(":")) if os.path.isdir(p)),'
    'run_name="__main__")'
)
#: Ray runs the entrypoint by a shell whose parent is an interpreter that surely exists there,
#: which a `python` on the node's PATH does not.
_INTERPRETER = '"$(readlink /proc/$PPID/exe || command -v python3)"'


def entrypoint_of(plan: JobPlan) -> str:
    """The shell command that Ray is given."""
    command = plan.command
    own = f"--grace {command.grace_s:g} --signal {command.stop_signal}"
    own += f" --stragglers {STRAGGLERS_S:g} -- {shlex.join(command.argv)}"
    return f"exec {_INTERPRETER} -I -S -c {shlex.quote(_BOOTSTRAP)} {own}"


def environment_of(plan: JobPlan) -> dict[str, str]:
    """What all processes of the job get, by which they are found again on every node."""
    env = {
        **plan.command.env,
        "MUSTER_RUN_ID": plan.run_id,
        "MUSTER_ATTEMPT": str(plan.attempt),
        "MUSTER_COMPONENT": plan.component,
        # Longer than the wrapper's own, so that Ray does not kill it before it has finished.
        "RAY_JOB_STOP_WAIT_TIME_S": str(math.ceil(plan.command.grace_s) + 5),
    }
    if plan.command.stop_signal == signal.SIGINT:
        env["RAY_JOB_STOP_SIGNAL"] = "SIGINT"
    return env


def excludes_of(plan: JobPlan) -> list[str]:
    """What of the working directory is not shipped, in the syntax of .gitignore."""
    excludes = [*_EXCLUDES, *plan.excludes]
    with contextlib.suppress(ValueError):
        inside = muster_home().resolve().relative_to(plan.command.cwd.resolve())
        excludes.append(f"/{inside}")
    return excludes


def place_of_driver(
    plan: JobPlan, nodes: Sequence[LiveNode]
) -> tuple[Mapping[str, float], Mapping[str, str]]:
    """The resources and labels that keep the driver on the nodes that its run was given; of one
    that was given none, off the head, which Ray would prefer.

    Returns: both empty on a cluster that has nothing but a head.
    """
    if plan.entrypoint_resources or plan.entrypoint_label_selector:
        return plan.entrypoint_resources, plan.entrypoint_label_selector
    names = {node.node_id: {node.name, f"{node.name}/{node.node_id[:8]}"} for node in nodes}
    if given := [id for id, its in names.items() if not its.isdisjoint(plan.nodes)]:
        return {}, {_NODE_ID_LABEL: f"in({','.join(given)})"}
    workers = [node for node in nodes if not node.is_head]
    if any(node.resources_total.get(_WORKER_RESOURCE, 0) > 0 for node in workers):
        return {_WORKER_RESOURCE: _SHARE}, {}
    if workers and (heads := [node.node_id for node in nodes if node.is_head]):
        return {}, {_NODE_ID_LABEL: f"!{heads[0]}"}
    return {}, {}


def submit(plan: JobPlan, nodes: Sequence[LiveNode]) -> None:
    """Hand the job to Ray. Blocks, for some minutes at the worst: run it in a thread.

    Returns: once the cluster has it, be it from an earlier submit. Raises: Denied when it will
    never take it so; NoAnswer when nobody can say whether it has.
    """
    from ray.exceptions import AuthenticationError, RuntimeEnvSetupError

    resources, labels = place_of_driver(plan, nodes)
    try:
        with _package() as package:
            _client(plan.address).submit_job(
                submission_id=plan.submission_id,
                entrypoint=entrypoint_of(plan),
                entrypoint_resources=dict(resources) or None,
                entrypoint_label_selector=dict(labels) or None,
                metadata={"muster_run_id": plan.run_id, "muster_component": plan.component},
                runtime_env={
                    "working_dir": str(plan.command.cwd),
                    "excludes": excludes_of(plan),
                    "py_modules": [str(package)],
                    "env_vars": environment_of(plan),
                },
            )
    except AuthenticationError as error:
        raise Denied(f"{plan.address} refuses the token: {error}") from error
    except RuntimeError as error:
        _judge(error, plan)
    except (ValueError, TypeError, RuntimeEnvSetupError) as error:
        raise Denied(f"{plan.command.cwd} can't be shipped as it is: {error}") from error
    except OSError as error:  # The errors of `requests` are some.
        raise NoAnswer(f"no answer from {plan.address} to the submit: {error}") from error


def _judge(error: RuntimeError, plan: JobPlan) -> None:
    """Tell apart what the SDK raises as one: it says `Request failed with status code N: ...`."""
    text = str(error)
    if "already exists" in text and plan.submission_id in text:
        return
    _, found, rest = text.partition("Request failed with status code ")
    unfit = f"{plan.command.cwd} can't be shipped as it is"
    if not found:
        raise Denied(f"{unfit}: {text[:2000]}") from error
    if rest.startswith("413"):
        # The dashboard's own limit, which is below that of Ray's packages.
        raise Denied(
            f"{unfit}: packed, it is larger than the dashboard at {plan.address} takes "
            f"({rest[5:].strip(' .')}); exclude what the job does not need, or put it where the "
            "nodes can read it"
        ) from error
    if rest.startswith("4"):
        raise Denied(f"{plan.address} refuses the job: {text[:2000]}") from error
    raise NoAnswer(f"{plan.address}: {text[:2000]}") from error


def wrapper_sources() -> dict[str, str]:
    """What wraps a program on a node: the text of each file, by the name that it needs there."""
    files = {"__main__.py": wrapper.__file__, "tree.py": tree.__file__}
    return {name: Path(file).read_text(encoding="utf-8") for name, file in files.items()}


@contextlib.contextmanager
def _package() -> Iterator[Path]:
    """The wrapper as a directory to ship; its content, and so its URI, is always the same."""
    with tempfile.TemporaryDirectory(prefix="muster-ship-") as above:
        package = Path(above) / _PACKAGE
        package.mkdir()
        for name, source in wrapper_sources().items():
            (package / name).write_text(source, encoding="utf-8")
        yield package


def _client(address: str) -> JobSubmissionClient:
    """Ray's SDK, with a deadline on each request, no proxy, and the address that it is given."""
    import ray
    from ray.dashboard.modules.dashboard_sdk import SubmissionClient
    from ray.job_submission import JobSubmissionClient

    # Once they are imported, where they set a level themselves.
    for name, level in _TALKERS.items():
        logging.getLogger(name).setLevel(level)

    credentials = Credentials.own(address)

    class Client(JobSubmissionClient):
        def __init__(self) -> None:
            # Its own constructor would have RAY_ADDRESS in our environment replace the address.
            SubmissionClient.__init__(
                self, address, headers=credentials.sent(), verify=credentials.ca or True
            )
            self._client_ray_version = ray.__version__

        def _do_request(self, *args: Any, **kwargs: Any) -> Any:
            kwargs.setdefault("timeout", _REQUEST_WITHIN_S)
            kwargs.setdefault("proxies", {"http": "", "https": ""})
            # Headers are for this address alone.
            kwargs.setdefault("allow_redirects", False)
            return super()._do_request(*args, **kwargs)

    return Client()


#: Where nothing was ever sent, a cluster that does not answer is given up soon: its address may
#: be wrong.
_FIRST_ANSWER_WITHIN_S = 20.0
_SUBMITS = 3
_ASK_EACH_S = 0.5


async def finished(blocking: Coroutine[Any, Any, None]) -> None:
    """What a thread does is not undone by a cancel, so it is waited for."""
    task = asyncio.ensure_future(blocking)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        raise


@dataclass(slots=True)
class Submitter:
    """One submission's way to the cluster. Its outcome is asked for by id, never guessed."""

    _plan: JobPlan
    _dashboard: Dashboard
    _file: SubmissionFile
    _emit: Emit

    async def run(self) -> JobState | None:
        """Submit the job, or find that it was.

        Returns: its state, None where it was submitted just now. Raises: GivenUp.
        """
        was_begun = self._file.content.submit_began_at is not None
        state = await self._asked(settle=was_begun and self._file.content.submitted_at is None)
        if state is not None:
            self._known()
            self._emit("job.attached", submission_id=self._plan.submission_id)
            return state
        if self._file.content.submitted_at is not None:
            raise GivenUp(await self.forgotten() or _unknown(self._plan))
        for _ in range(_SUBMITS):
            problem = await self._send()
            if not problem:
                break
            state = await self._asked(settle=True)
            if state is not None:
                break
        else:
            raise self._refused(
                FailureKind.NETWORK,
                "submit-unanswered",
                f"{self._plan.address} answered no submit of job {self._plan.submission_id}, and "
                f"does not know the job: {problem}",
            )
        self._known()
        plan = self._plan
        self._emit("job.submitted", submission_id=plan.submission_id, address=plan.address)
        return state

    async def forgotten(self) -> Trouble | None:
        """Why a cluster does not know a job that it had taken; None where it can't be asked."""
        try:
            session = await self._dashboard.session()
        except (NoAnswer, Denied):
            return None
        before = self._file.content.session
        if before is not None and session != before:
            message = (
                f"the cluster at {self._plan.address} was restarted and knows nothing of job "
                f"{self._plan.submission_id}: it was {before}, it is {session}"
            )
            return Trouble(kind=FailureKind.NODE_LOST, rule="cluster-restarted", message=message)
        return _unknown(self._plan)

    async def _send(self) -> str:
        """Returns: why nobody can say whether the cluster has it; empty when it has it."""
        try:
            nodes = await self._dashboard.nodes()
            session = await self._dashboard.session()
            gcs_address = await self._dashboard.gcs_address()
            began_at = time.time()
            self._file.note(submit_began_at=began_at, session=session, gcs_address=gcs_address)
            await self._file.written()
            await finished(asyncio.to_thread(submit, self._plan, nodes))
        except NoAnswer as error:
            return str(error)
        except Denied as error:
            raise self._refused(FailureKind.USER_ERROR, "job-refused", str(error)) from error
        return ""

    def _known(self) -> None:
        if self._file.content.submitted_at is None:
            self._file.note(submitted_at=time.time(), status="pending")

    def _refused(self, kind: FailureKind, rule: str, message: str) -> GivenUp:
        if kind is not FailureKind.LOST_CONTACT:
            self._file.note(status="refused", message=message)
        return GivenUp(Trouble(kind=kind, rule=rule, message=message))

    async def _asked(self, *, settle: bool) -> JobState | None:
        """What the cluster knows of the job, asked until it answers.

        Args:
            settle: go on to ask for some seconds where it does not know it.

        Raises: GivenUp when it does not answer.
        """
        was_begun = self._file.content.submit_began_at is not None
        patience_s = self._plan.lost_after_s if was_begun else _FIRST_ANSWER_WITHIN_S
        began = answered = time.monotonic()
        while True:
            try:
                state = await self._dashboard.job(self._plan.submission_id)
            except Denied as error:
                raise self._refused(FailureKind.USER_ERROR, "job-refused", str(error)) from error
            except NoAnswer as error:
                if time.monotonic() - answered > patience_s:
                    raise self._unanswered(was_begun, patience_s, str(error)) from error
            else:
                answered = time.monotonic()
                if state is not None or not settle or answered - began > SETTLES_WITHIN_S:
                    return state
            await asyncio.sleep(_ASK_EACH_S)

    def _unanswered(self, was_begun: bool, patience_s: float, problem: str) -> GivenUp:
        plan, asked = self._plan, f"asked for {patience_s:g} s"
        if was_begun:
            said = f"whether {plan.address} has job {plan.submission_id} is not known, {asked}"
            return self._refused(FailureKind.LOST_CONTACT, "contact-lost", f"{said}: {problem}")
        said = f"no Ray dashboard answers at {plan.address}, {asked}; nothing was submitted"
        return self._refused(FailureKind.NETWORK, "cluster-unreachable", f"{said}: {problem}")


def _unknown(plan: JobPlan) -> Trouble:
    message = (
        f"the cluster at {plan.address} does not know job {plan.submission_id}, which it had "
        "taken; somebody may have deleted it there"
    )
    return Trouble(kind=FailureKind.LOST_CONTACT, rule="job-unknown", message=message)
