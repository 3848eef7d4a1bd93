"""The trainer of the quickstart with vLLM: GRPO on answers that a fleet gives through its gateway.

    python train.py --model FOLDER --fleet URL --steps 40 --out FOLDER

Each step it trains on the answers to a few prompts and brings its weights to the running engines.
Every answer is judged: the weights of the version that it names must give the log-probabilities
that the engine gave. While it trains, the answers of the next step are made. Exit status: 0 after
the last step · 1 training failed, an answer came from weights out of step, or the fleet is gone ·
2 the arguments are wrong · 143 after SIGTERM, with the last finished step saved.
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
from torch_grpo import Group, Judgement, OutOfStep, StepStats, Weights, batch_of, judge, train_step
from transformers import LlamaForCausalLM

#: Names, in the folder of checkpoints, the last complete one.
LATEST = "latest"
#: Versions whose weights are kept, in memory to judge by and on disk for engines to load.
KEPT_VERSIONS = 8
#: Between two looks for engines that came back without the weights.
LOOK_EVERY_S = 2.0
#: Until some engine has taken the weights; longer than one takes to be started again.
PUBLISH_WITHIN_S = 300.0
RETRY_EVERY_S = 1.0


class Training:
    """One training, from the model or a checkpoint of it to the last step."""

    def __init__(self, options: argparse.Namespace, client: RolloutClient) -> None:
        self._options = options
        self._client = client
        self._out: Path = options.out
        self._rng = random.Random(options.seed)
        self._model = LlamaForCausalLM.from_pretrained(options.model, dtype=torch.float32)
        self._optimizer = torch.optim.Adam(self._model.parameters(), lr=options.learning_rate)
        self._step = 0
        self._saved_step = 0
        #: `known[version]`, the last ones that were committed.
        self._known: dict[int, Weights] = {}
        self._pool = ThreadPoolExecutor(options.prompts, thread_name_prefix="rollout")

    def run(self) -> None:
        """Returns once the last step is trained, in the metrics and checkpointed.

        Raises: FleetError, OutOfStep, FloatingPointError, OSError.
        """
        options = self._options
        self._publish()
        _say(f"training steps {self._step + 1} to {options.steps}")
        rollouts = self._ask()
        while self._step < options.steps:
            groups = self._gather(rollouts)
            is_last = self._step + 1 == options.steps
            rollouts = [] if is_last else self._ask()
            batch = batch_of(groups)
            judgement = judge(self._model, batch, self._known, tolerance=options.log_prob_tolerance)
            stats = train_step(self._model, self._optimizer, batch)
            self._step += 1
            synced = self._publish()
            staleness = sum(self._step - 1 - one.version for one in batch.answers)
            self._report(stats, judgement, synced, staleness=staleness / len(batch.answers))
            if self._step % options.checkpoint_every == 0 or is_last:
                self.checkpoint()

    def close(self) -> None:
        """Wait for no answer any more."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def resume(self, path: Path) -> None:
        """Go on from a checkpoint: a file, or a folder whose `latest` names one.

        Raises: OSError.
        """
        file = path / (path / LATEST).read_text().strip() if path.is_dir() else path
        saved = torch.load(file, weights_only=True)
        self._model.load_state_dict(saved["model"])
        self._optimizer.load_state_dict(saved["optimizer"])
        self._step = self._saved_step = saved["step"]
        # Other prompts than those of the steps before.
        self._rng = random.Random(f"{self._options.seed} {self._step}")
        _say(f"resumed from {file}, step {self._step}")

    def checkpoint(self) -> None:
        """Put the last finished step safely on disk, unless it is there."""
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

    def _ask(self) -> list[Future[Group]]:
        prompts = [draw_prompt(self._rng) for _ in range(self._options.prompts)]
        return [self._pool.submit(self._group, prompt) for prompt in prompts]

    def _group(self, prompt: str) -> Group:
        size = self._options.group_size
        answers = self._client.complete(prompt, count=size, max_tokens=ANSWER_TOKENS)
        return Group(prompt=prompt, answers=answers)

    def _gather(self, rollouts: Sequence[Future[Group]]) -> list[Group]:
        while wait(rollouts, timeout=LOOK_EVERY_S).not_done:
            if any(engine["state"] == "stale" for engine in self._client.engines()):
                # It serves once it has the weights; it may be the only one that is left.
                self._publish()
        return [one.result() for one in rollouts]

    def _publish(self) -> Synced:
        """Bring the model's weights, under the number of the step, to every engine that runs.

        Raises: FleetError, where none takes them within `PUBLISH_WITHIN_S`.
        """
        version, options = self._step, self._options
        folder = self._out / "weights" / f"step-{version:06d}"
        self._model.save_pretrained(folder)
        # Before anybody can answer by them.
        self._known[version] = {
            name: tensor.detach().clone() for name, tensor in self._model.state_dict().items()
        }
        for outdated in sorted(self._known)[:-KEPT_VERSIONS]:
            del self._known[outdated]
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
            except SyncLost as lost:
                _say(f"version {version} is not in step: {lost}")
                if time.monotonic() >= deadline:
                    raise FleetError(str(lost)) from lost
                time.sleep(RETRY_EVERY_S)
                continue
            for engine, why in synced.left_out.items():
                _say(f"version {version}: engine {engine} is left out: {why}")
            return synced

    def _report(
        self, stats: StepStats, judgement: Judgement, synced: Synced, *, staleness: float
    ) -> None:
        line: dict[str, Any] = {
            "step": self._step,
            "at": round(time.time(), 3),
            **asdict(stats),
            "staleness": staleness,
            "log_prob_gap": judgement.gap,
            "log_prob_gap_before": judgement.gap_before,
            "sync_s": round(synced.took_s, 3),
            "serving": synced.serving,
            "left_out": synced.left_out,
            "failures": self._client.failures,
        }
        with (self._out / "metrics.jsonl").open("a") as file:
            # One write, so that a reader sees a whole line.
            file.write(f"{json.dumps(line)}\n")
        if self._step % 5 == 0 or self._step in (1, self._options.steps):
            _say(
                f"step {self._step}/{self._options.steps}: reward {stats.reward:.3f}, entropy "
                f"{stats.entropy:.3f} nats, log-probabilities {judgement.gap:.1g} apart, sync "
                f"{synced.took_s:.2f} s"
            )


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status."""
    options = _parser().parse_args(argv)
    # The model is too small to share out: more threads only spin on cores that engines need.
    torch.set_num_threads(1)
    torch.manual_seed(options.seed)
    transformers.logging.disable_progress_bar()
    options.out.mkdir(parents=True, exist_ok=True)
    client = RolloutClient(
        options.fleet, model=options.served_as, token=os.environ.get("MUSTER_ROLLOUT_TOKEN", "")
    )
    training = Training(options, client)
    signal.signal(signal.SIGTERM, _leave)
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


def _leave(number: int, frame: object) -> None:
    sys.exit(128 + number)


def _say(line: str) -> None:
    print(line, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Train the quickstart's model on a fleet of vLLM.")
    add = parser.add_argument
    add("--model", type=Path, required=True, help="folder of the model to begin with")
    add("--fleet", required=True, metavar="URL", help="of the gateway")
    add("--served-as", default="policy", help="name under which the engines serve the model")
    add("--out", type=Path, required=True, help="folder for metrics, weights and checkpoints")
    add("--resume-from", default="", help="checkpoint, or a folder of them; empty: none")
    add("--steps", type=int, default=40, help="the step to stop after")
    add("--prompts", type=int, default=8, help="prompts of a step")
    add("--group-size", type=int, default=8, help="answers to a prompt")
    add("--learning-rate", type=float, default=0.006, help="of Adam")
    add("--checkpoint-every", type=int, default=10, help="steps")
    # Not `interrupt`: an answer that goes on with other weights could not be judged.
    ways = ("wait", "abort")
    add("--in-flight", default="wait", choices=ways, help="what a sync does to answers under way")
    add("--sync-s", type=float, default=60.0, help="for a whole sync")
    add("--broadcast-s", type=float, default=10.0, help="for an engine to load the weights")
    add("--log-prob-tolerance", type=float, default=1e-3, help="in nats")
    add("--seed", type=int, default=0, help="of the prompts")
    return parser


def leave_with(main: Callable[[], int]) -> NoReturn:
    """End the process with this exit status, whoever still waits for an answer in a thread."""
    status = 1
    try:
        status = main()
    except SystemExit as left:
        status = left.code if isinstance(left.code, int) else 1
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


if __name__ == "__main__":
    leave_with(main)
