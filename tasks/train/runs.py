"""One run of a Prefect server or of this machine, and the states that a run can have."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, get_args

from tasks.processes.identity import host_name
from tasks.record.outcome import join_problems, list_problems
from tasks.record.places import RunPlace
from tasks.record.run_json import RunJson

#: Matches a run id. The group contains the name in the spec of the run.
_RUN_ID = re.compile(r"(.+)-[a-z]+-\d{8}-\d{6}-[0-9a-f]{8}")
#: State of a run that has not ended.
OpenState = Literal["queued", "pending_resources", "admitted", "starting", "running", "stopping"]
#: State of a run that has ended.
EndedState = Literal["completed", "failed", "crashed", "cancelled"]
#: All states of runs that have ended.
ENDED_STATES: tuple[str, ...] = get_args(EndedState)
#: States of runs that wait in the queue.
WAITING_STATES = ("queued", "pending_resources")


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One run. The fields are those of `muster ls --json`."""

    #: Id of the run. It is also the name of the flow run.
    run_id: str
    #: Id of the flow run. Empty if `run.json` does not contain it.
    flow_run_id: str
    #: State of the run: queued, pending_resources, admitted, starting, running, stopping,
    #: completed, failed, cancelled or crashed. `crashed` means that the process of the run
    #: ended before it could report the result of the run.
    state: str
    #: Message about the state: the reason for waiting, or how the run ended.
    message: str
    #: Tags of the run spec and of the flow run.
    tags: tuple[str, ...]
    #: Time at which the flow run was created, in UTC epoch seconds. Without a server, the value of
    #: `started_at`.
    created_at: float | None
    #: Time at which the run started, in UTC epoch seconds. None if the run has not started.
    started_at: float | None
    #: Time at which the run ended, in UTC epoch seconds. None if the run has not ended.
    ended_at: float | None
    #: Number of attempts. None if this machine has no record of the run.
    attempts: int | None
    #: Host on which the flow process runs or ran last. Empty if the run had no process yet.
    host: str

    @property
    def name(self) -> str:
        """Name of the run in its spec, as read from the run id.

        If the run id does not contain this name, the whole run id is returned.
        """
        match = _RUN_ID.fullmatch(self.run_id)
        return match[1] if match else self.run_id

    @property
    def problems(self) -> list[str]:
        """The warnings in `message`, one per item. A message without warnings is the only item."""
        return list_problems(self.message)

    @property
    def brief(self) -> str:
        """`message` in one line.

        If `message` consists of warnings, this line contains all warnings. Otherwise this is the
        first line. If the first line ends with a colon, such as `the run spec has 2 faults:`, the
        next line is added, without its list marker.
        """
        line, _, rest = join_problems(self.message).partition("\n")
        if not line.endswith(":"):
            return line
        first_item = rest.partition("\n")[0].strip().removeprefix("- ")
        return f"{line} {first_item}".rstrip()

    @property
    def place(self) -> RunPlace:
        """Paths of the run's files. The files exist only on the host of the run."""
        return RunPlace.of(self.run_id)

    @property
    def is_on_another_host(self) -> bool:
        """True if the run has started on another host than this machine."""
        return self.host not in ("", host_name()) and self.started_at is not None

    def __str__(self) -> str:
        return f"{self.run_id} is {self.state}\n{self.message}".rstrip()

    @staticmethod
    def of_record(record: RunJson) -> Run:
        """Return a `Run` for the content of a `run.json` on this machine."""
        return Run(
            run_id=record.run_id,
            flow_run_id=record.flow_run_id,
            state=record.state.value,
            message=record.message,
            tags=record.tags,
            created_at=record.started_at,
            started_at=record.started_at,
            ended_at=record.ended_at,
            attempts=len(record.attempts),
            host=host_name(),
        )
