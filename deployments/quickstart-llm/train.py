"""The trainer of the quickstart with vLLM: GRPO on answers that a rollout fleet samples.

    python train.py --model FOLDER --fleet URL --steps 40 --out FOLDER

In each step, the trainer trains on the answers to a few prompts and then sends its weights to the
running engines. During the training, the fleet already samples the answers of the next step.

The trainer checks every answer. An answer names a version of the weights, and these weights must
reproduce the log-probabilities that the engine reported.

Exit status: 0 after the last step; 1 if the training failed, an answer came from other weights, or
the fleet is gone; 2 if the arguments are wrong; 143 after SIGTERM, with the last step saved.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import torch
import transformers
from digits_task import ANSWER_TOKENS, draw_prompt
from rollout_client import FleetError, RolloutClient, Synced, SyncLost
from torch_grpo import (
    AnswerCheck,
    Group,
    OutOfStep,
    StepStats,
    Weights,
    build_batch,
    check_answers,
    train_step,
)
from transformers import LlamaForCausalLM

#: Name of a file in the folder of checkpoints. The file contains the name of the last checkpoint.
LATEST = "latest"
#: Number of versions whose weights are kept: in memory for the check of answers, and on disk for
#: the engines.
KEPT_VERSIONS = 8
#: Time, in seconds, between two checks for restarted engines that lack the current weights.
CHECK_EVERY_S = 2.0
#: Longest time, in seconds, to repeat a weight sync until an engine has loaded the weights. This
#: time must be longer than the restart of an engine, because all engines may be restarting.
PUBLISH_WITHIN_S = 300.0
#: Time, in seconds, between two tries of a weight sync.
RETRY_EVERY_S = 1.0


class Training:
    """One training, from the initial model or a checkpoint to the last step."""

    def __init__(self, options: argparse.Namespace, client: RolloutClient) -> None:
        """
        Args:
            options: The arguments of the program.
            client: Client of the rollout fleet.
        """
        self._options = options
        self._client = client
        self._out: Path = options.out
        self._rng = random.Random(options.seed)
        self._model = LlamaForCausalLM.from_pretrained(options.model, dtype=torch.float32)
        self._optimizer = torch.optim.Adam(self._model.parameters(), lr=options.learning_rate)
        #: Number of the last finished step.
        self._step = 0
        #: Number of the training step that the last checkpoint contains.
        self._saved_step = 0
        #: Mapping from version to weights, for the last `KEPT_VERSIONS` versions.
        self._kept_weights: dict[int, Weights] = {}
        self._pool = ThreadPoolExecutor(options.prompts, thread_name_prefix="rollout")

    def run(self) -> None:
        """Train until the last step is finished.

        Write the metrics of each step. Write checkpoints at regular intervals and after the last
        step.

        Raises:
            FleetError: The fleet is gone, or no engine of the fleet has the weights.
            OutOfStep: An answer was sampled with other weights than reported.
            FloatingPointError: The loss is not finite.
            OSError: A file could not be written.
        """
        options = self._options
        self._publish_weights()
        _say(f"training steps {self._step + 1} to {options.steps}")
        rollouts = self._request_groups()
        while self._step < options.steps:
            groups = self._collect_groups(rollouts)
            is_last = self._step + 1 == options.steps
            rollouts = [] if is_last else self._request_groups()

            batch = build_batch(groups)
            check = check_answers(
                self._model, batch, self._kept_weights, tolerance=options.log_prob_tolerance
            )
            stats = train_step(self._model, self._optimizer, batch)
            self._step += 1
            synced = self._publish_weights()

            staleness = sum(self._step - 1 - answer.version for answer in batch.answers)
            self._write_metrics(stats, check, synced, staleness=staleness / len(batch.answers))
            if self._step % options.checkpoint_every == 0 or is_last:
                self.checkpoint()

    def close(self) -> None:
        """Cancel all requests that were not sent yet. Do not wait for the answers to other
        requests.
        """
        self._pool.shutdown(wait=False, cancel_futures=True)

    def resume(self, path: Path) -> None:
        """Load a checkpoint, and continue from its step.

        Args:
            path: A checkpoint file, or a folder of checkpoints with a file `latest`.

        Raises:
            OSError: The checkpoint cannot be read.
        """
        file = path / (path / LATEST).read_text().strip() if path.is_dir() else path
        state = torch.load(file, weights_only=True)
        self._model.load_state_dict(state["model"])
        self._optimizer.load_state_dict(state["optimizer"])
        self._step = state["step"]
        self._saved_step = self._step
        # The seed depends on the step, so that the prompts of earlier steps are not repeated.
        self._rng = random.Random(f"{self._options.seed} {self._step}")
        _say(f"resumed from {file}, step {self._step}")

    def checkpoint(self) -> None:
        """Write a checkpoint of the last finished step, unless that step is already saved."""
        if self._step == self._saved_step:
            return
        folder = self._out / "checkpoints"
        folder.mkdir(parents=True, exist_ok=True)
        name = f"step-{self._step:06d}.pt"
        state = {
            "step": self._step,
            "model": self._model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
        }
        torch.save(state, folder / f".{name}")
        os.replace(folder / f".{name}", folder / name)
        (folder / f".{LATEST}").write_text(f"{name}\n")
        os.replace(folder / f".{LATEST}", folder / LATEST)
        self._saved_step = self._step

    def _request_groups(self) -> list[Future[Group]]:
        """Request the answers of one step in the background, and return their futures."""
        prompts = [draw_prompt(self._rng) for _ in range(self._options.prompts)]
        return [self._pool.submit(self._request_group, prompt) for prompt in prompts]

    def _request_group(self, prompt: str) -> Group:
        """Request the answers to one prompt, and return them with the prompt."""
        size = self._options.group_size
        answers = self._client.complete(prompt, count=size, max_tokens=ANSWER_TOKENS)
        return Group(prompt=prompt, answers=answers)

    def _collect_groups(self, rollouts: Sequence[Future[Group]]) -> list[Group]:
        """Wait until the engines have answered the prompts of a step. Return prompts and answers.

        During the wait, engines that were restarted get the current weights.
        """
        while wait(rollouts, timeout=CHECK_EVERY_S).not_done:
            if any(engine["state"] == "stale" for engine in self._client.engines()):
                # Send the weights again to stale engines. A stale engine lacks the current weights,
                # and gets no requests. If all engines stayed stale, no answers would arrive.
                self._publish_weights()
        return [rollout.result() for rollout in rollouts]

    def _publish_weights(self) -> Synced:
        """Send the model's weights to every running engine, with the step as their version.

        Raises:
            FleetError: No engine has loaded the weights within `PUBLISH_WITHIN_S`.
        """
        version = self._step
        options = self._options
        folder = self._out / "weights" / f"step-{version:06d}"
        self._model.save_pretrained(folder)
        # Keep a copy of the weights, to check the answers that engines generate with these weights.
        # Store the copy before the weight sync, because such answers may arrive directly after the
        # sync.
        self._kept_weights[version] = {
            name: tensor.detach().clone() for name, tensor in self._model.state_dict().items()
        }
        for outdated in sorted(self._kept_weights)[:-KEPT_VERSIONS]:
            del self._kept_weights[outdated]
            shutil.rmtree(self._out / "weights" / f"step-{outdated:06d}", ignore_errors=True)
        deadline = time.monotonic() + PUBLISH_WITHIN_S
        while True:
            try:
                synced = self._client.sync(
                    str(folder.resolve()),
                    version=version,
                    in_flight=options.in_flight,
                    timeout_s=options.sync_s,
                    broadcast_s=options.broadcast_s,
                )
            except SyncLost as error:
                _say(f"the weights of version {version} could not be synced yet: {error}")
                if time.monotonic() >= deadline:
                    raise FleetError(str(error)) from error
                time.sleep(RETRY_EVERY_S)
                continue
            for engine, reason in synced.left_out.items():
                _say(f"engine {engine} did not load the weights of version {version}: {reason}")
            return synced

    def _write_metrics(
        self, stats: StepStats, check: AnswerCheck, synced: Synced, *, staleness: float
    ) -> None:
        """Append the metrics of the last step to `metrics.jsonl`, and print some of them.

        Args:
            stats: Metrics of the training step.
            check: Result of the check of the step's answers.
            synced: Result of the weight sync after the step.
            staleness: Mean age of the weights that sampled the answers, in training steps.
        """
        metrics: dict[str, Any] = {
            "step": self._step,
            "at": round(time.time(), 3),
            **asdict(stats),
            "staleness": staleness,
            "log_prob_gap": check.gap,
            "log_prob_gap_before": check.gap_before,
            "sync_s": round(synced.took_s, 3),
            "serving": synced.serving,
            "left_out": synced.left_out,
            "failures": self._client.failures,
        }
        with (self._out / "metrics.jsonl").open("a") as file:
            # Write the whole line at once, so that a reader never sees only a part of the line.
            file.write(f"{json.dumps(metrics)}\n")
        if self._step % 5 == 0 or self._step in (1, self._options.steps):
            _say(
                f"step {self._step}/{self._options.steps}: reward {stats.reward:.3f}, entropy "
                f"{stats.entropy:.3f} nats, largest difference of log-probabilities "
                f"{check.gap:.1g} nats, weight sync {synced.took_s:.2f} s"
            )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the training, and return the exit status."""
    options = _parser().parse_args(argv)
    # Use a single thread, because the model is small. More threads would only take CPU time from
    # the engines.
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    transformers.logging.disable_progress_bar()
    options.out.mkdir(parents=True, exist_ok=True)
    client = RolloutClient(
        options.fleet, model=options.served_as, token=os.environ.get("MUSTER_ROLLOUT_TOKEN", "")
    )
    training = Training(options, client)
    signal.signal(signal.SIGTERM, _exit_on_signal)
    try:
        if options.resume_from:
            training.resume(Path(options.resume_from))
        training.run()
    except (FleetError, OutOfStep, FloatingPointError, OSError) as error:
        print(f"train: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return 1
    except SystemExit:
        training.checkpoint()
        raise
    finally:
        training.close()
    return 0


def _exit_on_signal(number: int, frame: object) -> None:
    """Exit with the status of a program that was ended by this signal."""
    sys.exit(128 + number)


def _say(line: str) -> None:
    print(line, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="Train the quickstart's model, with vLLM servers for inference."
    )
    add = parser.add_argument
    add("--model", type=Path, required=True, help="Folder of the initial model")
    add("--fleet", required=True, metavar="URL", help="URL of the gateway")
    add("--served-as", default="policy", help="Name of the model in requests to the engines")
    add("--out", type=Path, required=True, help="folder for metrics, weights and checkpoints")
    add(
        "--resume-from",
        default="",
        help="Checkpoint, or folder of checkpoints, to resume from. Empty: start a new training",
    )
    add("--steps", type=int, default=40, help="Number of the last step")
    add("--prompts", type=int, default=8, help="Number of prompts per step")
    add("--group-size", type=int, default=8, help="Number of answers per prompt")
    add("--learning-rate", type=float, default=0.006, help="Learning rate of Adam")
    add("--checkpoint-every", type=int, default=10, help="Number of steps between checkpoints")
    # Do not offer the value `interrupt`, although the gateway accepts it. With `interrupt`, an
    # answer could be sampled with two versions of the weights. The log-probabilities of that answer
    # could not be checked.
    actions = ("wait", "abort")
    add(
        "--in-flight",
        default="wait",
        choices=actions,
        help="Treatment of unfinished answers at the beginning of a weight sync",
    )
    add("--sync-s", type=float, default=60.0, help="Time limit of a weight sync, in seconds")
    add(
        "--broadcast-s",
        type=float,
        default=10.0,
        help="Time limit for an engine to load weights, in seconds",
    )
    add(
        "--log-prob-tolerance",
        type=float,
        default=1e-3,
        help="Largest allowed difference of log-probabilities, in nats",
    )
    add("--seed", type=int, default=0, help="Seed of the prompts")
    return parser


def leave_with(main: Callable[[], int]) -> NoReturn:
    """Run a program and end the process with its exit status, even if threads still run.

    Args:
        main: The program, which returns its exit status.
    """
    status = 1
    try:
        status = main()
    except SystemExit as exit_request:
        status = exit_request.code if isinstance(exit_request.code, int) else 1
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    leave_with(main)
