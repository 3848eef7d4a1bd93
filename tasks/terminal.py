"""What a person at a terminal sees of a run: components, readiness, progress, the outcome."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from prefect.logging.handlers import PrefectConsoleHandler
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tasks import curve
from tasks.run.events import Event
from tasks.run.spec import RunSpec
from tasks.session import event_listeners


class Terminal:
    """Shows the events of the runs of this context, as they happen.

    Plain lines, and a progress bar where the output is a terminal.
    """

    def __init__(self, spec: RunSpec, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)
        self._began = time.monotonic()
        self._total = spec.progress.total if spec.progress else None
        self._directory: Path | None = None
        self._run_id = ""
        self._has_ended = False
        self._cause: str | None = None
        self._shown_step = 0.0
        self._bar = Progress(
            TextColumn("         {task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
            transient=True,
        )
        self._step = self._bar.add_task("step", total=self._total, visible=False)

    def __enter__(self) -> Terminal:
        self._token = event_listeners.set((*event_listeners.get(), self.show))
        self._bar.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._bar.stop()
        event_listeners.reset(self._token)

    def end(self, state: str, message: str) -> None:
        """How the run ended, where no event has said so: it never came to an attempt."""
        if not self._has_ended:
            self._show_state(state, message)

    def say(self, text: str, style: str = "") -> None:
        """One line, with the seconds since the beginning."""
        stamp = f"[dim]{time.monotonic() - self._began:7.1f}s[/dim]"
        body = f"[{style}]{escape(text)}[/{style}]" if style else escape(text)
        self._console.print(f"{stamp} {body}", soft_wrap=True)

    def show(self, event: Event) -> None:
        """One event of the run."""
        name, fields = event.component or "", event.fields
        match event.name:
            case "attempt.begun":
                self._run_id = fields["run_id"]
                self._directory = Path(fields["directory"])
                self.say(f"run {self._run_id}, attempt {fields['attempt']}", "bold")
                self.say(f"files in {self._directory}")
            case "containment":
                self.say(f"containment {fields['text']}", "dim")
            case "attempt.adopted":
                self._run_id = fields["run_id"]
                self._directory = Path(fields["directory"])
                self.say(f"run {self._run_id}, attempt {fields['attempt']} goes on", "bold")
            case "component.spawned" if fields["pid"] is not None:
                self.say(f"{name}: started, pid {fields['pid']}")
            case "job.submitted" | "job.attached":
                done = event.name.removeprefix("job.")
                self.say(f"{name}: job {fields['submission_id']} {done}")
            case "job.state":
                place = f", {fields['place']}" if fields["place"] else ""
                self.say(f"{name}: job {fields['status']}{place}")
            case "job.swept" if fields["killed"] or fields["left"]:
                ended = "; ".join(fields["killed"])
                self.say(f"{name}: ended what its job had left: {ended}", "yellow")
            case "contact.lost":
                self.say(f"{name}: no answer: {fields['message']}", "yellow")
            case "contact.back":
                self.say(f"{name}: {fields['address']} answers again", "green")
            case "component.ready":
                self.say(f"{name}: ready after {fields['after_s']:.2f} s", "green")
            case "component.drained":
                self.say(f"{name}: its part is done, the run goes on")
            case "component.exited":
                code = fields["exit_code"]
                how = fields["signal"] or f"exit code {'unknown' if code is None else code}"
                self.say(f"{name}: ended, {how}")
            case "component.stuck":
                left = ", ".join(map(str, fields["pids"]))
                self.say(f"{name}: can't be ended: {left}", "bold red")
            case "component.diagnosed":
                self.say(f"{name}: what it was doing is in {fields['path']}")
            case "rollout.server.died":
                self.say(f"{name}: server {fields['rank']} died: {fields['why']}", "yellow")
            case "rollout.recovery.ended":
                self._show_recovery(name, fields)
            case "rollout.warning":
                self.say(f"{name}: {fields['message']}", "yellow")
            case "rollout.failed":
                self.say(f"{name}: {fields['reason']}", "bold red")
            case "probe.failed" if fields.get("probe") == "live":
                self.say(f"{name}: {fields['reason']} (miss {fields['misses']})", "yellow")
            case "run.progress":
                self._show_step(fields["step"])
            case "teardown.begun":
                self.say(f"stopping: {fields['reason']}")
            case "attempt.ended":
                self._bar.stop()
                self._show_failure(fields["failure"])
            case "run.waiting":
                self.say(f"waiting: {fields['message']}", "yellow")
            case "run.state":
                self._show_state(fields["state"], fields["message"])

    def _show_step(self, step: float) -> None:
        self._bar.update(self._step, completed=step, visible=True)
        # Without a bar a line for each twentieth is enough.
        stride = (self._total or 100) / 20
        if self._bar.disable and (step - self._shown_step >= stride or step == self._total):
            self._shown_step = step
            of = f" of {self._total}" if self._total else ""
            self.say(f"step {step:g}{of}")

    def _show_state(self, state: str, message: str) -> None:
        self._has_ended = state in ("completed", "failed", "cancelled")
        match state:
            case "completed":
                self._show_curve()
                self.say(f"completed: {message}", "bold green")
            case "failed":
                self.say(f"failed: {message}", "bold red")
            case "cancelled":
                self.say(f"cancelled: {message}; nothing is left running", "bold yellow")
            case "pending_resources" if message:
                self.say(f"waiting: {message}", "yellow")
            case _:
                return
        if self._directory is not None:
            self.say(f"record {self._directory.parent / 'run.json'}")

    def _show_failure(self, failure: Mapping[str, str] | None) -> None:
        if failure is None:
            return
        if failure["hint"]:
            self.say(f"hint: {failure['hint']}")
        if failure["component"] and self._directory is not None:
            self.say(f"log {self._directory / (failure['component'] + '.log')}; its last lines:")
            for line in failure["log_tail"].splitlines()[-12:]:
                self._console.print(f"         | {escape(line)}", soft_wrap=True)

    def _show_recovery(self, name: str, fields: Mapping[str, Any]) -> None:
        ranks, took_s = ", ".join(map(str, fields["ranks"])), fields["took_s"]
        if fields["outcome"] == "recovered":
            self.say(f"{name}: server {ranks} is back after {took_s:.1f} s", "green")
        elif fields["outcome"] == "failed":
            self.say(f"{name}: server {ranks} is not back: {fields['message']}", "yellow")

    def _show_curve(self) -> None:
        if self._directory is None:
            return
        for metrics in sorted(self._directory.glob("metrics.jsonl")):
            points = curve.read(metrics, "step", "reward")
            if len(points) > 1:
                self._console.print(curve.draw(points, title="reward by step"), markup=False)
                first, last = points[0][1], points[-1][1]
                self.say(f"reward {first:.3f} at first, {last:.3f} at last")
                self.say(f"figures in {metrics}")


def outlive_readers() -> None:
    """Go on when nobody reads any more what this process prints.

    Rich ends the thread then, by SystemExit. The reader of a flow process is its worker, which may
    be killed, and then the first line that Prefect logs would end the run as Crashed.
    """

    def on_broken_pipe(console: Console) -> None:
        console.quiet = True

    setattr(Console, "on_broken_pipe", on_broken_pipe)  # noqa: B010


def quieten_prefect() -> None:
    """The terminal tells the story; Prefect's own lines go to its server only."""
    os.environ.setdefault("DO_NOT_TRACK", "1")
    for name in list(logging.root.manager.loggerDict):
        for handler in logging.getLogger(name).handlers:
            if isinstance(handler, PrefectConsoleHandler):
                handler.setLevel(logging.CRITICAL)
