"""The trainer of the quickstart: serves the policy, fetches scored batches, and trains on them.

    python trainer.py --api http://127.0.0.1:8000 --port 8001 --steps 60 --out DIR

With `--fleet URL` the trainer also sends the weights of each step to a fleet of inference servers.
The URL is that of the fleet's gateway. Environments then send their requests to the gateway. If the
gateway requires a token, set MUSTER_ROLLOUT_TOKEN.

Exit status: 0 after the last step, with its checkpoint and metrics; 1 if the training failed, with
the reason on stderr; 2 if the arguments are wrong and nothing was started; 130 after SIGINT and 143
after SIGTERM, with a checkpoint of the last finished step.
"""

from __future__ import annotations

import os

# Use one thread, because the matrices are too small to profit from several threads.
os.environ["OPENBLAS_NUM_THREADS"] = "1"

import argparse
import queue
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from atropos_api import ApiError, AtroposApi
from checkpoints import BadCheckpoint, Checkpoint, load
from fleet import Fleet, FleetError
from grpo import DEFAULT_LEARNING_RATE, TrainState, initial_state
from metrics_file import MetricsFile
from sampler import Sampler
from serving import InferenceServer
from training import Plan, Training

#: Reason for the end of a training: a signal, an error, or None if the training is complete.
Ending = signal.Signals | Exception | None
#: Queue for the reasons to end the training. The first entry ends the training.
Endings = queue.SimpleQueue[Ending]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """A training, and the sampler with which this process answers requests during the training."""

    training: Training
    #: Object that samples answers with the current weights of the training.
    sampler: Sampler
    #: Port of the inference server. 0 takes any free port.
    port: int


def main(argv: list[str] | None = None) -> int:
    """Run the training, and return the exit status."""
    trainer = prepare(argv)
    endings: Endings = queue.SimpleQueue()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _frame: endings.put(signal.Signals(number)))
    return run(trainer, endings)


def prepare(argv: Sequence[str] | None) -> Trainer:
    """Return the trainer that the command-line arguments describe, without starting it.

    Raises:
        SystemExit: The arguments are wrong. The exit status is 2, and stderr gives the reason.
    """
    parser = _parser()
    options = parser.parse_args(argv)
    if options.batch_size % options.group_size:
        parser.error("--batch-size: not a multiple of --group-size")
    try:
        state, rng = _starting_point(options.seed, options.init_from, options.resume_from)
    except BadCheckpoint as error:
        parser.error(str(error))
    if state.step >= options.steps:
        parser.error(
            f"--steps must be more than {state.step}, the step of the checkpoint, but is "
            f"{options.steps}"
        )
    plan = Plan(
        steps=options.steps,
        batch_size=options.batch_size,
        group_size=options.group_size,
        learning_rate=options.learning_rate,
        checkpoint_every=options.checkpoint_every,
        folder=options.out / "checkpoints",
    )
    try:
        plan.folder.mkdir(parents=True, exist_ok=True)
        metrics = MetricsFile(options.out / "metrics.jsonl", resumed_step=state.step)
    except OSError as error:
        parser.error(f"--out: {error}")

    sampler = Sampler(state.policy, step=state.step, rng=rng)
    token = os.environ.get("MUSTER_ROLLOUT_TOKEN", "")
    training = Training(
        plan,
        api=AtroposApi(options.api),
        sampler=sampler,
        state=state,
        metrics=metrics,
        servers=Fleet(options.fleet, folder=options.out, token=token) if options.fleet else None,
    )
    return Trainer(training=training, sampler=sampler, port=options.port)


def run(trainer: Trainer, endings: Endings) -> int:
    """Serve and train the policy until the training ends. Return the exit status.

    Args:
        trainer: The trainer.
        endings: Queue for the signals that this process receives. A signal ends the training.
    """
    try:
        with InferenceServer(trainer.sampler, port=trainer.port) as server:
            print(f"inference on {server.url}, weights of step {trainer.sampler.step}", flush=True)
            return _supervise(trainer.training, endings)
    except OSError as error:
        return _report_failure(f"cannot serve on port {trainer.port}: {error}")


def _supervise(training: Training, endings: Endings) -> int:
    """Train until the training is complete, fails, or gets a signal, and return the exit status.

    The training loop runs in a daemon thread. So a signal ends the process at once, even if the
    loop waits for an API that does not answer.
    """

    def train() -> None:
        try:
            training.run()
        except Exception as error:
            endings.put(error)
        else:
            endings.put(None)

    threading.Thread(target=train, name="training", daemon=True).start()

    match endings.get():
        case None:
            print(f"complete: {training.state.step} steps trained", flush=True)
            return 0
        case signal.Signals() as number:
            status = 128 + number
            print(f"{number.name}: stopping", flush=True)
        case ApiError() | FleetError() | OSError() | FloatingPointError() as error:
            status = _report_failure(str(error))
        case error:
            traceback.print_exception(error)
            status = _report_failure(repr(error))
    try:
        if step := training.checkpoint():
            print(f"step {step} is checkpointed", flush=True)
    except OSError as error:
        status = _report_failure(f"no checkpoint: {error}")
    return status


def _report_failure(message: str) -> int:
    """Print a message to stderr, and return the exit status 1."""
    print(f"trainer: {message}", file=sys.stderr, flush=True)
    return 1


def _starting_point(
    seed: int, init_from: Path | None, resume_from: Path | None
) -> tuple[TrainState, np.random.Generator]:
    """Return the state before the first step, and the random generator for sampling.

    Args:
        seed: Seed of a new training.
        init_from: Checkpoint with the first weights of a new training, or None.
        resume_from: Checkpoint to resume, or None for a new training.

    Raises:
        BadCheckpoint: A checkpoint cannot be read.
    """
    if resume_from is None:
        weights_seed, sampling_seed = np.random.SeedSequence(seed).spawn(2)
        state = initial_state(np.random.default_rng(weights_seed))
        if init_from is not None:
            policy = _load_checkpoint(init_from, "--init-from").state.policy
            state = replace(state, policy=policy)
        return state, np.random.default_rng(sampling_seed)
    checkpoint = _load_checkpoint(resume_from, "--resume-from")
    rng = np.random.default_rng()
    rng.bit_generator.state = checkpoint.rng_state
    return checkpoint.state, rng


def _load_checkpoint(path: Path, option: str) -> Checkpoint:
    """Return a checkpoint.

    Args:
        path: The checkpoint.
        option: Name of the command-line option with the path, for error messages.

    Raises:
        BadCheckpoint: The checkpoint cannot be read.
    """
    try:
        return load(path)
    except BadCheckpoint as error:
        raise BadCheckpoint(f"{option}: {error}") from error


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="The quickstart's trainer: GRPO on a CPU.")
    add = parser.add_argument
    add("--api", type=_url, required=True, help="URL of the Atropos API, http://HOST:PORT")
    add("--port", type=_port, required=True, help="Port of the inference server. 0: a free port")
    add("--steps", type=_positive, required=True, help="Number of the last step")
    add("--out", type=Path, required=True, help="folder for metrics.jsonl and checkpoints/")
    add("--seed", type=_natural, default=0, help="Seed of the initial weights and of sampling")
    add("--batch-size", type=_positive, default=128, help="Number of answers per batch")
    add("--group-size", type=_positive, default=8, help="Number of answers per prompt")
    add("--learning-rate", type=_rate, default=DEFAULT_LEARNING_RATE)
    add(
        "--checkpoint-every", type=_positive, default=10, help="Number of steps between checkpoints"
    )
    help_text = "Checkpoint, or folder of an earlier training. Empty: start a new training"
    add("--resume-from", type=_path_or_none, help=help_text)
    help_text = "Checkpoint with the first weights of a new training. Default: $INIT_FROM"
    add("--init-from", type=_path_or_none, default=os.environ.get("INIT_FROM"), help=help_text)
    add(
        "--fleet",
        type=_url_or_none,
        help="URL of a gateway, http://HOST:PORT. Empty: no rollout servers",
    )
    return parser


def _url_or_none(text: str) -> str | None:
    return _url(text) if text else None


def _path_or_none(text: str) -> Path | None:
    return Path(text) if text else None


def _natural(text: str) -> int:
    if (value := int(text)) < 0:
        raise argparse.ArgumentTypeError(f"{text} is below 0")
    return value


def _positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{text} is below 1")
    return value


def _port(text: str) -> int:
    if (value := _natural(text)) > 65535:
        raise argparse.ArgumentTypeError(f"{text} is above 65535")
    return value


def _rate(text: str) -> float:
    if not 0 < (value := float(text)) < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def _url(text: str) -> str:
    if not text.startswith("http://"):
        raise argparse.ArgumentTypeError(f"{text} does not start with http://")
    return text


if __name__ == "__main__":
    sys.exit(main())
