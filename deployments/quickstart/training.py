"""The training loop: fetch a batch, train one step, write the metrics, publish the weights."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import checkpoints
from atropos_api import Registration, build_batch
from checkpoints import Checkpoint
from copy_task import ANSWER_TOKENS, DIGITS_PER_PROMPT
from grpo import StepStats, TrainState, train_step
from metrics_file import MetricsFile
from policy import Policy
from sampler import Sampler

#: Pause, in seconds, after the first request for a batch, if the batch is not complete yet.
POLL_FIRST_S = 0.02
#: Longest pause between two requests for a batch, in seconds.
POLL_LAST_S = 0.25
#: Factor that multiplies the pause after each further request for a batch.
POLL_GROWTH = 1.5
#: Number of steps between two lines of output about the progress.
SAY_EVERY = 5
#: Length limit of a sequence, in tokens. Environments drop sequences that reach the limit. A prompt
#: with its answer is always shorter.
MAX_SEQUENCE_TOKENS = 2 * (DIGITS_PER_PROMPT + ANSWER_TOKENS)


class Api(Protocol):
    """The methods of `AtroposApi` that training needs."""

    def register(self, registration: Registration) -> None: ...

    def next_groups(self) -> list[Mapping[str, Any]] | None: ...


class Servers(Protocol):
    """The methods of `Fleet` that training needs.

    `Fleet` is the client of the inference servers.
    """

    def push(self, policy: Policy, *, step: int) -> object: ...

    def catch_up(self) -> object: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The settings of a training."""

    #: Number of the last step. Steps are counted over all attempts, beginning with 1.
    steps: int
    #: Number of answers in a batch, a multiple of `group_size`.
    batch_size: int
    #: Number of answers to one prompt.
    group_size: int
    learning_rate: float
    #: Number of steps between two checkpoints. The last step is always saved.
    checkpoint_every: int
    #: Folder of the checkpoints.
    folder: Path


class Training:
    """One training, from a given state to the last step in its plan.

    Only one thread may call `run`. Other threads may use `state` and `checkpoint` at any time. Both
    refer to the last finished step.
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
        """
        Args:
            plan: Settings of the training.
            api: Client of the Atropos API.
            sampler: Sampler of this process, which gets the new weights after each step.
            state: State before the first step.
            metrics: File for the metrics of each step.
            servers: Inference servers in other processes that also get the new weights after each
                step, or None.
            sleep: Waits for a number of seconds.
        """
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
        """State after the last finished step."""
        return self._state

    def run(self) -> None:
        """Train until the last step is finished, and write the metrics and the checkpoints.

        Raises:
            ApiError: The API is gone, failed, or refused the registration.
            FleetError: The gateway of the servers is gone or refused a request.
            FloatingPointError: The weights are not finite.
            OSError: The metrics or a checkpoint could not be written.
        """
        plan = self._plan
        # Send the current weights to the servers before an environment can register and send
        # requests. The servers may have other weights.
        self._publish_weights()
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
        _say(
            f"the trainer is registered for steps {self._state.step + 1} to {plan.steps}, and "
            "waits for batches"
        )
        #: Mapping from the name of a metric to the duration of the step, or of a part of the step,
        #: in seconds. `broadcast_weights` is from the preceding step, because the metrics of a step
        #: are written before its weights are sent.
        durations: dict[str, float] = {}
        began_at_s = time.monotonic()
        while self._state.step < plan.steps:
            with _measure(durations, "wait_for_batch"):
                batch = build_batch(self._wait_for_groups(), group_size=plan.group_size)
            with _measure(durations, "forward_backward"):
                next_state, stats = train_step(self._state, batch, learning_rate=plan.learning_rate)
            durations["time/step"] = _seconds_since(began_at_s)
            began_at_s = time.monotonic()
            # Write the metrics before the state changes. If the process is killed in between, the
            # metrics contain an additional step, which a resumed training removes.
            self._metrics.append(next_state.step, stats, durations)
            self._state = next_state
            with _measure(durations, "broadcast_weights"):
                self._publish_weights()
            self._print_progress(next_state.step, stats)
            if next_state.step % plan.checkpoint_every == 0 or next_state.step == plan.steps:
                self.checkpoint()

    def _publish_weights(self) -> None:
        """Give the current weights to the sampler and to the servers."""
        self._sampler.load(self._state.policy, step=self._state.step)
        if self._servers is not None:
            self._servers.push(self._state.policy, step=self._state.step)

    def checkpoint(self) -> int:
        """Write a checkpoint of the last finished step, unless that step is already saved.

        Returns:
            The number of the saved step, or 0 if no step is finished.
        """
        with self._saving:
            state = self._state
            if state.step != self._saved_step:
                checkpoint = Checkpoint(state=state, rng_state=self._sampler.rng_state())
                checkpoints.save(checkpoint, self._plan.folder)
                self._saved_step = state.step
            return self._saved_step

    def _wait_for_groups(self) -> list[Mapping[str, Any]]:
        """Wait until the next batch is complete, and fetch the batch from the API.

        Returns:
            The groups of scored answers, as the environments sent them.
        """
        pause_s = POLL_FIRST_S
        while (groups := self._api.next_groups()) is None:
            if self._servers is not None:
                # Send the current weights to restarted servers. A server without these weights gets
                # no requests, so the batch would never be complete after a restart of all servers.
                self._servers.catch_up()
            self._sleep(pause_s)
            pause_s = min(pause_s * POLL_GROWTH, POLL_LAST_S)
        return groups

    def _print_progress(self, step: int, stats: StepStats) -> None:
        """Print the metrics of the first step, of the last step, and of every fifth step."""
        if step % SAY_EVERY == 0 or step in (1, self._plan.steps):
            _say(
                f"step {step}/{self._plan.steps}: reward {stats.reward:.3f}, "
                f"entropy {stats.entropy:.3f} nats, clipped {stats.clip_fraction:.1%} of the tokens"
            )


@contextmanager
def _measure(durations: dict[str, float], part: str) -> Iterator[None]:
    """Measure the duration of a `with` block, and store it in `durations` as `time/<part>`."""
    began_at_s = time.monotonic()
    yield
    durations[f"time/{part}"] = _seconds_since(began_at_s)


def _seconds_since(began_at_s: float) -> float:
    """Return the seconds since an earlier value of `time.monotonic()`."""
    return round(time.monotonic() - began_at_s, 4)


def _say(line: str) -> None:
    print(line, flush=True)
