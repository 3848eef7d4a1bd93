"""The Prefect tasks of the flow `train`, and the context manager that opens and closes a run.

Each call of `admit`, `start`, `monitor` and `teardown` is one task run in the Prefect UI.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial, wraps
from typing import Any, TypeVar

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.context import TagsContext
from prefect.exceptions import Abort
from prefect.settings import PREFECT_API_URL
from prefect.states import Cancelled, Completed, Failed

from tasks.processes.full_disks import describe_storage_error, is_storage_error
from tasks.processes.registry import RunHeld
from tasks.ray.dashboard import add_listed_clusters
from tasks.record.cancellation_note import take_note
from tasks.record.code_store import NoCode
from tasks.record.places import muster_home
from tasks.record.states import RunState
from tasks.server.artifacts import download_code, make_code_label
from tasks.server.events import override_client_settings, set_client_retries
from tasks.server.flow_process import (
    find_worker_flow_run,
    get_current_flow_run,
    get_current_spec,
    make_current_run_id,
)
from tasks.server.flow_runs import (
    STATE_OF,
    ServerAway,
    connect_to_server,
    find_worker,
    read_listed_clusters,
)
from tasks.server.interruption import (
    INTERRUPTED_BY,
    Change,
    end_on_request,
    observe_flow_run,
)
from tasks.server.server import find_lasting_api_url, read_configured_secrets
from tasks.show.failure import add_unwritten_files, summarize_failure
from tasks.show.terminal import outlive_readers
from tasks.spec.errors import InvalidSpec, MusterError, RunEnded
from tasks.spec.failure_kinds import FailureKind
from tasks.spec.run import RunSpec
from tasks.spec.secrets import mask_logs
from tasks.train.evaluating import evaluate_checkpoints
from tasks.train.reporter import Reporter
from tasks.train.run_events import announce_events
from tasks.train.run_lineage import record_lineage
from tasks.train.session import CheckpointsUnreadable, RunSession
from tasks.train.spec_check import check_spec
from tasks.upkeep.waiting_runs import forget_waiting_run, read_earlier_record

T = TypeVar("T")


class DiskFull(MusterError):
    """The files of the run cannot be written, so the run cannot start or continue."""

    def __init__(self, error: BaseException) -> None:
        description = describe_storage_error(error, muster_home())
        super().__init__(f"the files of the run cannot be written: {description}")

    @property
    def state(self) -> State[None]:
        """Final Prefect state of the flow run."""
        return Failed(message=f"{FailureKind.STORAGE.value}: {self}")


#: Longest time in seconds for repeating a request to a Prefect server that does not answer. A
#: restart of the server takes less time.
_SERVER_TIMEOUT_S = 120.0
#: Seconds between two tries of a request.
_RETRY_EVERY_S = 2.0
#: Number of retries of the request that sets the final state, if a worker started the run. The
#: pauses start at 2 s and double each time, so 8 retries take about eight minutes. A restart of the
#: server by `muster up` can take that long.
_FINAL_STATE_RETRIES_OF_WORKER = 8
#: Number of retries of the request that sets the final state, if a person started the run. The
#: person waits at the terminal, so there are fewer retries than for a run of a worker.
_FINAL_STATE_RETRIES_OF_PERSON = 6
#: Number of retries of the request that sets the final state, if the run was interrupted. There are
#: few retries, because the host or the Prefect server is probably being stopped. If all retries
#: fail, `muster reconcile` sets the state later.
_FINAL_STATE_RETRIES_OF_INTERRUPTED = 2


def _as_task(body: Callable[..., State[None]]) -> Callable[..., bool]:
    """Return a Prefect task for a function that returns a Prefect state.

    The task returns True if the state is Completed, otherwise False. The name of the task run
    consists of the function and the component, such as `start-trainer`.

    The task catches the errors of the function. After an error, the task returns False, and the
    result of the run reports the error.
    """

    @wraps(body)
    def run_as_task(run: RunSession, *component: str) -> bool:
        name = "-".join([body.__name__, *component])

        def call_body() -> State[None]:
            try:
                return body(run, *component)
            except Exception as error:
                run.crash(error)
                return Failed(message=run.mask(f"{name}: {error!r}"))

        run_task = task(name=name, task_run_name=name, cache_policy=NO_CACHE, persist_result=False)(
            call_body
        )
        # Give the task run no tags, because Prefect writes each tag to the server's database. If
        # another process writes to an SQLite database at the same time, the request fails, and is
        # repeated only after 2 s.
        with TagsContext(current_tags=set()):
            return bool(run_task(return_state=True).is_completed())

    return run_as_task


@_as_task
def admit(run: RunSession) -> State[None]:
    """Check the run's spec, and wait until the queue has granted all GPUs of the run.

    Returns:
        Completed if the attempt may start, Failed if it cannot start. Cancelled if the run was
        interrupted, or if another process will continue the run.
    """
    try:
        _repeat_until_answered(run, partial(run.enter_code, _download_code))
        _label_flow_run(run)
        check_spec(run.spec, checks_stores=run.record.attempts == 0)
        run.set_secret_blocks(
            _repeat_until_answered(run, partial(read_configured_secrets, run.spec))
        )
    except (InvalidSpec, NoCode) as error:
        return Failed(message=run.fail(FailureKind.USER_ERROR, str(error)).message)
    except ServerAway as error:
        message = f"Muster cannot read the code or the Prefect Secret blocks of the run: {error}"
        return Failed(message=run.fail(FailureKind.NETWORK, message).message)
    try:
        run.await_checkpoint_store()
    except CheckpointsUnreadable as error:
        if run.interrupt_reason or run.handover_reason:
            return Cancelled(message=run.interrupt_reason or run.handover_reason)
        return Failed(message=run.fail(error.kind, str(error)).message)

    reason = "the spec requests no GPUs" if run.spec.gang is None else ""
    if run.adopts_jobs and run.record.content.adoptable(run.place) is not None:
        reason = "the Ray jobs of the run continue on their GPUs"
    needs_cluster = run.spec.ray is not None and run.spec.ray.address is None
    if reason and not needs_cluster:
        return Completed(message=f"admitted: {reason}")
    # Import these modules only if needed. The import takes 0.1 s, and the cases above do not need
    # these modules.
    from tasks.queue.admission import Admitted, find_cluster, wait_for_gang
    from tasks.queue.decision import Refused
    from tasks.queue.settings import MissingFromServer
    from tasks.upkeep.reconcile import reconcile_while_waiting

    if reason:
        try:
            run.ray_address = find_cluster(run.flow_run_id)
        except MissingFromServer as error:
            return Failed(message=run.fail(FailureKind.USER_ERROR, str(error)).message)
        return Completed(message=f"admitted: {reason}")

    # A killed run of this host may still occupy GPUs. So clean up after killed runs while this run
    # waits.
    with reconcile_while_waiting():
        outcome = wait_for_gang(
            run.flow_run_id,
            is_first_attempt=run.record.attempts == 0,
            ignores_grant=run.attempt is not None,
            report=run.record_waiting,
            wait=run.wait,
        )
    match outcome:
        case Admitted():
            run.accept_grant(outcome.nodes, outcome.devices)
            run.ray_address = outcome.cluster
            return Completed(message=f"admitted on {outcome}")
        case Refused():
            return Failed(message=run.fail(outcome.kind, outcome.message).message)
        case None:
            return Cancelled(message=run.interrupt_reason or run.handover_reason)


def _label_flow_run(run: RunSession) -> None:
    """Add a label with the name of the submitted code to the flow run.

    Flow runs that a schedule or the Prefect UI created do not have this label yet.
    """
    labels = make_code_label(run.spec.code) or {}
    if labels.keys() - get_current_flow_run().labels.keys():
        with suppress(ServerAway), connect_to_server(PREFECT_API_URL.value() or "") as client:
            client.update_flow_run_labels(run.flow_run_id, labels)


def _download_code(name: str) -> bytes | None:
    """Download submitted code from the Prefect server, or return None if it does not exist.

    Args:
        name: Name of the stored code, or of the file tree that belongs to the stored code.
    """
    with connect_to_server(PREFECT_API_URL.value() or "") as client:
        return download_code(client, name)


def _repeat_until_answered(run: RunSession, request: Callable[[], T]) -> T:
    """Call a function that sends a request to the Prefect server, and return its result.

    While the server does not answer, the call is repeated.

    Raises:
        ServerAway: The server did not answer in time, or the run must end. Other errors of the
            function are raised at once.
    """
    deadline = time.monotonic() + _SERVER_TIMEOUT_S
    while True:
        try:
            return request()
        except ServerAway:
            if time.monotonic() > deadline or not run.wait(_RETRY_EVERY_S):
                raise


@_as_task
def start(run: RunSession, component: str) -> State[None]:
    """Start one component, and wait until it is ready.

    Returns:
        Completed if the component is ready. Otherwise the run must end, and the message of the
        returned state gives the reason.
    """
    began_s = time.monotonic()
    is_first_component = component == next(iter(run.spec.components))
    if is_first_component:
        run.check_devices()
    try:
        run.supervisor.start(component)
    except RunEnded:
        decision = run.supervisor.decision
        if decision is not None and decision.component not in (None, component):
            # The attempt has ended because of another component. So the state is Cancelled. With
            # the state Failed, this component would seem to be the cause.
            message = f"{component} is no longer needed, because the run ends: {decision.reason}"
            return Cancelled(message=run.mask(message))
        return _describe_end(run)
    duration_s = time.monotonic() - began_s
    description = run.supervisor.describe(component)
    return Completed(message=f"{description} ready after {duration_s:.2f} s")


@_as_task
def monitor(run: RunSession) -> State[None]:
    """Supervise a run whose components are all ready, until the run must end.

    Returns:
        Completed if the run was successful.
    """
    run.supervisor.wait_decided()
    return _describe_end(run)


@_as_task
def teardown(run: RunSession) -> State[None]:
    """Stop the running components in the reverse order of their start.

    This task may be called at any time of the run, and several times.

    Returns:
        Failed if a process or a Ray job could not be ended.
    """
    verdict = run.end_attempt()
    if verdict.left:
        return Failed(message=verdict.message)
    if not verdict.state.is_final:
        return Completed(
            message="the Ray jobs of the run continue, and the next flow process of the run "
            "attaches to these jobs"
        )
    if verdict.unseen:
        message = (
            "no remaining processes were found, but Muster could not check all processes: "
            f"{verdict.message}"
        )
        return Completed(message=message)
    return Completed(message="all processes of the run have ended")


def _describe_end(run: RunSession) -> State[None]:
    """Return the final Prefect state of the task `start` or `monitor`, from the run's result."""
    decision = run.supervisor.decision
    if decision is None:
        return Failed(message="")
    if decision.state is RunState.RUNNING:
        # The attempt continues in another process, so this task has neither completed nor failed.
        # Prefect has no state for this case, so use Cancelled.
        make_state = Cancelled
    else:
        make_state = STATE_OF.get(decision.state, Failed)
    return make_state(message=run.mask(decision.reason))


# Call this function when the module is imported, because Prefect writes log lines before the flow
# begins. Without this call, a write error would end the run if the worker that reads the log lines
# was killed.
outlive_readers()


def make_run_id_of_flow_run() -> str:
    """Return the run id of the current flow run. The run id is also the name of the flow run."""
    spec = get_current_spec(RunSpec)
    return spec.run_id or make_current_run_id(spec.name, spec.workload)


@contextmanager
def open_run(spec: RunSpec) -> Iterator[RunSession]:
    """Open the run of the current flow run. Signals and cancellations end the run cleanly.

    When the context closes, the final state of the run is recorded, unless another process will
    continue the run.

    Raises:
        Abort: Another process of this machine already owns the run.
        DiskFull: The files of the run cannot be written. No component is running.
    """
    flow_run = get_current_flow_run()
    api_url = find_lasting_api_url()
    flow_run_id = flow_run.id
    if spec.ray is not None:
        add_listed_clusters(read_listed_clusters(api_url))
    starter = find_worker_flow_run()
    earlier_record = None
    # If the run had an earlier process, that process may have been on another host. So read the
    # record of the run from the server. A run that a person started on this machine does not need
    # this step.
    if api_url and starter and starter.run_count > 1:
        earlier_record = read_earlier_record(api_url, flow_run_id)
    try:
        run = RunSession(
            spec,
            run_id=make_run_id_of_flow_run(),
            flow_run_id=flow_run_id,
            api_url=api_url,
            worker=find_worker(starter) if starter else None,
            earlier=earlier_record,
        )
    except RunHeld as error:
        # Another process already executes the run, for example because two workers started the same
        # flow run. That process sets the states of the flow run, so this process must not set any.
        raise Abort(f"{error.strerror}. This second process ends, and changes nothing") from error
    except OSError as error:
        if is_storage_error(error):
            raise DiskFull(error) from error
        raise
    forget_waiting_run(run.run_id)
    with (
        end_on_request(run, flow_run_id, may_be_left=run.adopts_jobs),
        mask_logs(run.mask),
        announce_events(run, flow_run),
        record_lineage(run, flow_run),
        Reporter(run, flow_run),
        evaluate_checkpoints(run, flow_run.tags, api_url),
    ):
        run.open()
        try:
            yield run
        except Exception as error:
            # Record the failure, for example a full disk or a bug in Muster. Otherwise, the record
            # would never get a final state.
            if isinstance(error, CheckpointsUnreadable):
                run.fail(error.kind, str(error))
            elif is_storage_error(error):
                disk_full = DiskFull(error)
                run.fail(FailureKind.STORAGE, str(disk_full))
                raise disk_full from None
            else:
                run.fail(FailureKind.UNKNOWN, f"the run cannot continue: {error!r}")
            traceback_text = "".join(traceback.format_exception(error))
            if run.mask(traceback_text) == traceback_text:
                raise
            # Prefect writes the error into the flow run's state, and its traceback into the log.
            # Both may contain a secret, so raise a masked error without the traceback.
            raise MusterError(run.mask(repr(error))) from None
        finally:
            run.close()
            set_client_retries(_count_final_state_retries(run, by_worker=starter is not None))


def _count_final_state_retries(run: RunSession, *, by_worker: bool) -> int:
    """Return how often the request that sets the final state of the run may be repeated."""
    if find_lasting_api_url() is None:
        # The run has a temporary server. Nobody restarts a temporary server, so more retries would
        # be useless.
        return 1
    if run.interrupt_reason:
        return _FINAL_STATE_RETRIES_OF_INTERRUPTED
    return _FINAL_STATE_RETRIES_OF_WORKER if by_worker else _FINAL_STATE_RETRIES_OF_PERSON


def _ask_about_cancel(run: RunSession) -> tuple[bool, str]:
    """Ask the Prefect server whether a user has cancelled a run, and for the reason.

    This process may not have noticed the cancellation yet, or may know only that a worker has sent
    SIGTERM. If the server does not answer, the result is the same as for a run that was not
    cancelled.

    Returns:
        - True if the final state of the run must be Cancelled.
        - The reason of the cancellation. Empty if the reason is unknown, or is already in
          `run.interrupt_reason`.
    """
    is_ended_by_signal = run.interrupt_reason.startswith(INTERRUPTED_BY)
    is_known = run.verdict.state is RunState.CANCELLED and not is_ended_by_signal
    if run.is_handing_over or is_known:
        return False, ""
    note = take_note(run.place.directory) if is_ended_by_signal else ""
    with override_client_settings(retries=0):
        observed = observe_flow_run(run.flow_run_id)
    match observed.change:
        case Change.CANCELLED | Change.CANCELLED_NOW:
            reason = observed.describe_cancellation()
            if not run.interrupt_reason:
                run.interrupt(reason)
            return True, reason if is_ended_by_signal else ""
        case Change.ENDED:
            # While this process was running, a user has set a final state by hand. The result of
            # this process replaces that state. If the run was interrupted, the result is Cancelled.
            return bool(run.interrupt_reason), note
    return False, note


def conclude(run: RunSession) -> State[Any]:
    """Record the final state of the run, and return the Prefect state of the flow run."""
    is_cancelled, cancellation = _ask_about_cancel(run)
    verdict = run.close(is_cancelled=is_cancelled, cancellation=cancellation)
    make_state = STATE_OF.get(verdict.state)
    if make_state is not None:
        message = run.place.shorten_paths(verdict.message)
        return make_state(message=add_unwritten_files(message, run.unwritten_files))
    last_attempt = run.record.content.attempt
    summary = run.mask(summarize_failure(verdict.message, run.place, last_attempt))
    return Failed(message=add_unwritten_files(summary, run.unwritten_files))
