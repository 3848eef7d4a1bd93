"""Runs from Python, for notebooks, scripts and agents: `from tasks.client import submit`.

The server is the one that `muster` finds; what it refuses is refused here by the same errors, all
of them `MusterError`. Import it before Prefect, which reads once where its server is.
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
from tasks.train import runs  # noqa: E402
from tasks.train.deploying import queued, to_server, until_ended  # noqa: E402


@dataclass(frozen=True, slots=True)
class RunHandle:
    """A run by its id, which is the name of its flow run."""

    run_id: str

    @property
    def seen(self) -> runs.Run:
        """All that a list says of it, as it is now: the keys of `muster ls --json`."""
        return runs.find(self.run_id)

    @property
    def state(self) -> str:
        """`queued`, `pending_resources`, `running`, `completed`, `failed`, ...: that of
        `muster ls --json`."""
        return self.seen.state

    def wait(self, within_s: float | None = None) -> str:
        """Wait for its end.

        Args:
            within_s: Seconds; None: however long it takes.

        Returns: its final state. Raises: TimeoutError.
        """
        if (seen := self.seen).state not in runs.ENDED:
            with to_server() as client:
                until_ended(client, UUID(seen.flow_run_id), within_s=within_s)
        return self.state

    def metrics(self) -> list[dict[str, Any]]:
        """A row a step, in order, as its trainer wrote it, with `attempt`. See `muster metrics`.

        Raises: BadArgument, where its files are on another host, or it writes none.
        """
        return runs.metrics_of(self.seen)

    def logs(self, component: str = "", *, attempt: int | None = None) -> dict[str, list[str]]:
        """By component, the lines that it has written.

        Args:
            component: Only of this one.
            attempt: Left out, the last one.

        Raises: BadArgument, where there are none, or they are on another host.
        """
        run = self.seen
        number = attempt or runs.last_attempt(run)
        names, place = runs.logs_asked(run, number, component), run.place.attempt(number)
        return {name: [*LogFile(place.log(name)).read_new(is_last=True)] for name in names}

    def cancel(self, *, now: bool = False) -> None:
        """Have the run end, with the grace period of each component.

        Args:
            now: Skip the grace periods, also of a run that is being cancelled already.

        Raises: BadArgument, if it has ended; MusterError.
        """
        runs.cancel_run(self.seen, is_now=now)

    def explain(self) -> str:
        """Its whole story, as `muster explain` tells it."""
        return runs.story_of(self.seen)

    def record(self) -> dict[str, Any]:
        """What `run.json` says. Raises: BadArgument, where it has none yet."""
        return runs.record_of(self.seen).as_json()


def find(name: str = "latest") -> RunHandle:
    """The run of that id, of a unique beginning of it or of its flow run's id; or the `latest`.

    Raises: BadArgument.
    """
    return RunHandle(runs.find(name).run_id)


def submit(
    spec: Path | str | Mapping[str, Any],
    *,
    deployment: str = STAGE_DEPLOYMENT,
    overrides: Sequence[str] = (),
    queue: str | None = None,
) -> RunHandle:
    """Queue a run: it starts once its whole gang of GPUs is free.

    Args:
        spec: A file, whose project is that which it lies in; or the content of one, of the project
            that the working directory lies in.
        deployment: By which it is started, `train/NAME`: that one's work pool and worker.
        overrides: `progress.total=20`, as `--set`.
        queue: Of the work pool: urgent, default or idle.

    Raises: InvalidSpec, with every fault; MusterError. Nothing was queued then.
    """
    if isinstance(spec, Mapping):
        loaded, root = parse_spec(spec, overrides), find_project_root(Path.cwd() / "spec.yaml")
    else:
        loaded, root = load_spec(Path(spec), overrides), find_project_root(Path(spec))
    with to_server() as client:
        flow_run = queued(client, loaded, root, queue=queue, deployment=deployment)
    return RunHandle(parse_request(flow_run).name)
