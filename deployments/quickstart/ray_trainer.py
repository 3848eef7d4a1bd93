"""The trainer of the quickstart as a Ray job: the driver of an actor that takes GPUs and trains.

    python ray_trainer.py --gpus 1 --cpus-per-gpu 3 -- --api http://127.0.0.1:8000 --port 8001 ...

What follows `--` goes to `trainer.py`, whose exit statuses these are; 1 also when the actor dies.
The policy is trained on CPUs: the GPUs are taken and left alone.
"""

from __future__ import annotations

import argparse
import os
import queue
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray

#: Seconds between two checks of the driver for a received signal.
LOOK_EVERY_S = 0.2


class TrainerActor:
    """One training. `train` and `stop` need a thread each: make it with `max_concurrency=2`."""

    def __init__(self, folder: str) -> None:
        """Args: folder: of `trainer.py`, relative to the job's working directory."""
        # Ray gives each node a copy of the working directory and puts that on the path, but not
        # the folder of the script.
        copies = (Path(entry) / folder for entry in sys.path)
        sys.path[:0] = [str(copy) for copy in copies if (copy / "trainer.py").exists()]
        self._endings: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def place(self) -> str:
        """Return the node and the GPUs of this actor as text."""
        context = ray.get_runtime_context()
        gpus = ", ".join(context.get_accelerator_ids().get("GPU", [])) or "none"
        return f"node {context.get_node_id()}, GPUs {gpus}"

    def train(self, arguments: Sequence[str]) -> int:
        """Run the trainer with these arguments, and return its exit status."""
        import trainer

        try:
            return trainer.run(trainer.prepare(arguments), self._endings)
        except SystemExit as refused:
            # Ray would treat a SystemExit as a request to end the actor.
            return refused.code if isinstance(refused.code, int) else 1

    def stop(self, number: int) -> None:
        """End the training as this signal would: the last finished step is checkpointed."""
        self._endings.put(signal.Signals(number))


def main() -> int:
    """The exit status, after training."""
    options = _parser().parse_args()
    # Before Ray looks after the working directory, which it may unpack anew.
    folder = os.path.relpath(Path(__file__).parent)
    ray.init()
    # Set the handlers after `ray.init`, which sets its own SIGTERM handler.
    signals: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _frame: signals.put(number))
    actor_class = ray.remote(TrainerActor).options(
        num_gpus=options.gpus, num_cpus=options.gpus * options.cpus_per_gpu, max_concurrency=2
    )
    # Ray's type hints do not include the methods of a handle.
    actor: Any = actor_class.remote(folder)

    place = actor.place.remote()
    print(f"waiting for {options.gpus} GPUs", flush=True)
    while not _is_done(place):
        if not signals.empty():
            # The actor still waits for GPUs, so it cannot receive a `stop`.
            ray.kill(actor)
            return 128 + signals.get()
    print(f"trainer on {ray.get(place)}", flush=True)

    status = actor.train.remote(options.arguments)
    while not _is_done(status):
        if not signals.empty():
            actor.stop.remote(signals.get())
    return int(ray.get(status))


def _is_done(result: ray.ObjectRef[object]) -> bool:
    done, _ = ray.wait([result], timeout=LOOK_EVERY_S)
    return bool(done)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="The quickstart's trainer as a Ray job.")
    add = parser.add_argument
    add("--gpus", type=int, default=1, help="GPUs that the trainer takes on one node")
    add("--cpus-per-gpu", type=int, default=3, help="CPUs that it takes with each")
    add("arguments", nargs="+", metavar="-- ARGUMENTS", help="the trainer's own; see trainer.py")
    return parser


if __name__ == "__main__":
    sys.exit(main())
