"""What a supervisor is to do with one attempt: frozen data, resolved to the last port."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from tasks.processes.containment import Containment, Level
from tasks.processes.guarded import Command
from tasks.processes.remote import RemoteJob
from tasks.spec.probes import LiveProbe, ReadyProbe
from tasks.spec.run import OnExitZero, Progress


def _as_it_is(text: str) -> str:
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class ComponentPlan:
    """One component: what to start, how to tell that it is ready, what its end means."""

    name: str
    command: Command
    #: None: ready as soon as the program runs.
    ready: ReadyProbe | None
    live: LiveProbe | None
    on_exit_zero: OnExitZero
    #: Makes the job that runs it on a cluster, told where to say what happens to it; None: a
    #: process of this machine runs it.
    make_job: Callable[[Callable[..., None]], RemoteJob] | None = None
    #: An earlier process of the run may have started it: then it is gone on with.
    is_adopted: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptPlan:
    """One try at a run."""

    run_id: str
    #: From 1.
    number: int
    #: Where relative paths of the run begin; absolute.
    cwd: Path
    #: In the order of their start.
    components: tuple[ComponentPlan, ...]
    progress: Progress | None = None
    #: The step without which the run has not succeeded; None: exit 0 is enough.
    success_step: float | None = None
    #: Seconds without progress and output after which the run has failed; None: never.
    stall_after_s: float | None = None
    #: When it began, UTC epoch seconds; None: now.
    began_at: float | None = None
    #: What holds the attempt's processes.
    containment: Containment = field(default_factory=lambda: Containment(level=Level.L2))
    #: Takes secrets out of a text, before it is written down.
    mask: Callable[[str], str] = _as_it_is

    @property
    def own_questions(self) -> list[str]:
        """What we ask of components, as it stands in the log of one: `GET /health`."""
        asked = [self.progress.http] if self.progress else []
        asked += [component.live.http for component in self.components if component.live]
        return [f"GET {urlsplit(url).path or '/'}" for url in asked if url]

    @property
    def tag(self) -> dict[str, str]:
        """What every process of the attempt carries in its environment."""
        return {"MUSTER_RUN_ID": self.run_id, "MUSTER_ATTEMPT": str(self.number)}
