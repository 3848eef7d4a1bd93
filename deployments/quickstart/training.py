"""The training loop: take a batch, train one step, publish the weights, write the metrics."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import checkpoints
from atropos_api import Registration, batch_of
from checkpoints import Checkpoint
from copy_task import ANSWER_TOKENS, DIGITS_PER_PROMPT
from grpo import StepStats, TrainState, train_step
from metrics_file import MetricsFile
from policy import Policy
from sampler import Sampler

#: Pause between two polls for a batch: at first, at most, and how it grows while none comes.
POLL_FIRST_S = 0.02
POLL_LAST_S = 0.25
POLL_GROWTH = 1.5
#: Steps between two lines of progress.
SAY_EVERY = 5
#: More than a prompt and its answer, since environments also drop sequences of this exact length.
MAX_SEQUENCE_TOKENS = 2 * (DIGITS_PER_PROMPT + ANSWER_TOKENS)


class Api(Protocol):
    """The part of `AtroposApi` that training needs."""

    def register(self, registration: Registration) -> None: ...

    def next_groups(self) -> list[Mapping[str, Any]] | None: ...


class Servers(Protocol):
    """The part of `Fleet` that training needs: servers beside the trainer's own."""

    def push(self, policy: Policy, *, step: int) -> object: ...

    def catch_up(self) -> object: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How to train."""

    #: The last step to train, counted from the first step of the first attempt
    steps: int
    #: Answers in a batch, a multiple of `group_size`
    batch_size: int
    #: Answers to one prompt
    group_size: int
    learning_rate: float
    #: Steps between two checkpoints; the last step always has one
    checkpoint_every: int
    #: Where checkpoints go
    folder: Path


class Training:
    """One training, from the step in `state` to the last of `plan`.

    `run` belongs to one thread; `state` and `checkpoint` may be called from another at any time
    and see the last step that was finished.
    """

    def __init__(
        self,
        plan: Plan,
        *,
        api: Api,
        sampler: Sampler,
        state: TrainState,
        metrics: MetricsFile,
        servers: Servers | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._plan = plan
        self._api = api
        self._sampler = sampler
        self._state = state
        self._metrics = metrics
        self._servers = servers
        self._sleep = sleep
        self._saving = threading.Lock()
        self._saved_step = state.step

    @property
    def state(self) -> TrainState:
        return self._state

    def run(self) -> None:
        """Returns once the last step is trained, in the metrics and checkpointed.

        Raises:
            ApiError: the API refused this trainer, failed or went away.
            FleetError: the servers' gateway refused, or went away.
            FloatingPointError: training diverged.
            OSError: metrics or a checkpoint could not be written.
        """
        plan = self._plan
        # Before an environment can ask: servers begin with the weights of no step.
        self._publish()
        self._api.register(
            Registration(
                batch_size=plan.batch_size,
                max_token_len=MAX_SEQUENCE_TOKENS,
                checkpoint_dir=str(plan.folder),
                save_checkpoint_interval=plan.checkpoint_every,
                starting_step=self._state.step,
                num_steps=plan.steps,
            )
        )
        _say(f"registered for steps {self._state.step + 1} to {plan.steps}; waiting for batches")
        #: Seconds of the step, by its parts; the weights of the one before come first.
        took: dict[str, float] = {}
        began_s = time.monotonic()
        while self._state.step < plan.steps:
            with _timed(took, "wait_for_batch"):
                batch = batch_of(self._wait_for_groups(), group_size=plan.group_size)
            with _timed(took, "forward_backward"):
                trained, stats = train_step(self._state, batch, learning_rate=plan.learning_rate)
            took["time/step"], began_s = _since(began_s), time.monotonic()
            # In this order, a crash leaves a line too many, which resuming drops, never a gap.
            self._metrics.append(trained.step, stats, took)
            self._state = trained
            with _timed(took, "broadcast_weights"):
                self._publish()
            self._report(trained.step, stats)
            if trained.step % plan.checkpoint_every == 0 or trained.step == plan.steps:
                self.checkpoint()

    def _publish(self) -> None:
        self._sampler.load(self._state.policy, step=self._state.step)
        if self._servers is not None:
            self._servers.push(self._state.policy, step=self._state.step)

    def checkpoint(self) -> int:
        """The step that is now safely on disk, 0 for none."""
        with self._saving:
            state = self._state
            if state.step != self._saved_step:
                saved = Checkpoint(state=state, rng_state=self._sampler.rng_state())
                checkpoints.save(saved, self._plan.folder)
                self._saved_step = state.step
            return self._saved_step

    def _wait_for_groups(self) -> list[Mapping[str, Any]]:
        pause_s = POLL_FIRST_S
        while (groups := self._api.next_groups()) is None:
            if self._servers is not None:
                # With none left that has these weights there would never be a batch.
                self._servers.catch_up()
            self._sleep(pause_s)
            pause_s = min(pause_s * POLL_GROWTH, POLL_LAST_S)
        return groups

    def _report(self, step: int, stats: StepStats) -> None:
        if step % SAY_EVERY == 0 or step in (1, self._plan.steps):
            _say(
                f"step {step}/{self._plan.steps}: reward {stats.reward:.3f}, "
                f"entropy {stats.entropy:.3f} nats, clipped {stats.clip_fraction:.1%}"
            )


@contextmanager
def _timed(took: dict[str, float], part: str) -> Iterator[None]:
    began_s = time.monotonic()
    yield
    took[f"time/{part}"] = _since(began_s)


def _since(began_s: float) -> float:
    return round(time.monotonic() - began_s, 4)


def _say(line: str) -> None:
    print(line, flush=True)
