"""Submit and inspect runs from Python. The wheel offers these functions as the package `muster`.

The functions use the same Prefect server as the command `muster`. They also raise the same errors,
which are all subclasses of `MusterError`.

Import this module before Prefect, because Prefect reads the address of its server only once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from uuid import UUID

from tasks.command import find_server

find_server()

from tasks.queue.ledger import parse_request  # noqa: E402
from tasks.record.log_file import LogFile  # noqa: E402
from tasks.spec.loading import find_project_root, load_spec, parse_spec  # noqa: E402
from tasks.spec.pipeline import STAGE_DEPLOYMENT  # noqa: E402
from tasks.train.deploying import connect_to_configured_server, queue_run, wait_until_ended  # noqa: E402
from tasks.train.finding_runs import find_run  # noqa: E402
from tasks.train.local_runs import import_run_json  # noqa: E402
from tasks.train.run_cancellation import cancel_run  # noqa: E402
from tasks.train.run_logs import select_logs  # noqa: E402
from tasks.train.run_metrics import read_metrics  # noqa: E402
from tasks.train.run_records import find_last_attempt, require_record  # noqa: E402
from tasks.train.run_story import tell_story  # noqa: E402
from tasks.train.runs import ENDED_STATES, Run  # noqa: E402
from tasks.train.server_imports import import_server_runs  # noqa: E402

# These two calls import modules of Muster's package `tasks` that some functions below need. If the
# modules were imported later, Python could find another package with the name `tasks` in the user's
# project.
import_run_json()
import_server_runs()


@dataclass(frozen=True, slots=True)
class RunHandle:
    """Handle on one run. Its methods inspect the run, wait for its end, or cancel it."""

    #: Id of the run. The run's Prefect flow run has the same name.
    run_id: str

    @property
    def seen(self) -> Run:
        """The current entry of the run in the list of runs, with the keys of `muster ls --json`."""
        return find_run(self.run_id)

    @property
    def state(self) -> str:
        """The current state, as in `muster ls --json`, such as `queue_run`, `running` or
        `completed`.
        """
        return self.seen.state

    def wait(self, within_s: float | None = None) -> str:
        """Wait until the run has ended.

        Args:
            within_s: Longest wait in seconds, or None for no limit.

        Returns:
            The final state of the run.

        Raises:
            TimeoutError: The run has not ended in time.
        """
        run = self.seen
        if run.state not in ENDED_STATES:
            with connect_to_configured_server() as client:
                wait_until_ended(client, UUID(run.flow_run_id), within_s=within_s)
        return self.state

    def metrics(self) -> list[dict[str, Any]]:
        """Return the metrics that the trainer wrote, one row per step, in order.

        Each row also has the key `attempt`. See `muster metrics`.

        Raises:
            BadArgument: The files of the run are on another host, or the run writes no metrics.
        """
        return read_metrics(self.seen)

    def logs(self, component: str = "", *, attempt: int | None = None) -> dict[str, list[str]]:
        """Return the log lines, as a mapping from the name of a component to its lines.

        Args:
            component: Name of the component whose logs are returned. If empty, the logs of all
                components are returned.
            attempt: Number of the attempt. If None, the last attempt is used.

        Raises:
            BadArgument: There are no logs, or the logs are on another host.
        """
        run = self.seen
        number = attempt or find_last_attempt(run)
        names = select_logs(run.place, number, component)
        place = run.place.attempt(number)
        return {name: [*LogFile(place.log(name)).read_new(is_last=True)] for name in names}

    def cancel(self, *, now: bool = False) -> None:
        """Cancel the run. Each component gets its grace period.

        Args:
            now: If True, the grace periods are skipped, even if the run is already being cancelled.

        Raises:
            BadArgument: The run has already ended.
            MusterError: The run could not be cancelled.
        """
        cancel_run(self.seen, is_now=now)

    def explain(self) -> str:
        """Return the summary of the run that `muster explain` prints."""
        return tell_story(self.seen)

    def record(self) -> dict[str, Any]:
        """Return the content of the run's record `run.json`.

        Raises:
            BadArgument: The run has no record yet.
        """
        return require_record(self.seen).as_json()


def find(name: str = "latest") -> RunHandle:
    """Find a run by its name, and return a handle on the run.

    Args:
        name: Id of the run or of its flow run, a part of the run id that is unique among all runs,
            or `latest`. For other names, see `tasks.train.finding_runs.find_run`.

    Raises:
        BadArgument: No run matches the name, or several runs match.
    """
    return RunHandle(find_run(name).run_id)


def submit(
    spec: Path | str | Mapping[str, Any],
    *,
    deployment: str = STAGE_DEPLOYMENT,
    overrides: Sequence[str] = (),
    queue: str | None = None,
) -> RunHandle:
    """Add a run to the queue. The run starts when all GPUs of its gang are free.

    Args:
        spec: Path of a run spec, or the content of a run spec. With a path, the run belongs to the
            project that contains the file. With the content, the run belongs to the project of the
            working directory.
        deployment: Prefect deployment that starts the run, as `train/NAME`. The run is executed in
            the work pool of this deployment.
        overrides: Changes of the spec, such as `progress.total=20`. The option `--set` of `muster`
            has the same form.
        queue: Name of the work queue: urgent, default or idle.

    Raises:
        InvalidSpec: The spec is invalid. The error names all faults, and the run is not queued.
        MusterError: The run could not be queued.
    """
    if isinstance(spec, Mapping):
        run_spec = parse_spec(spec, overrides)
        project = find_project_root(Path.cwd() / "spec.yaml")
    else:
        run_spec = load_spec(Path(spec), overrides)
        project = find_project_root(Path(spec))
    with connect_to_configured_server() as client:
        flow_run = queue_run(client, run_spec, project, queue=queue, deployment=deployment)
    return RunHandle(parse_request(flow_run).name)
