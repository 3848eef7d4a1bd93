"""The trainer of the quickstart as a Ray job. Its driver starts an actor that runs the training.

    python ray_trainer.py --gpus 1 --cpus-per-gpu 3 -- --api http://127.0.0.1:8000 --port 8001 ...

The arguments after `--` are those of `trainer.py`. The exit status is that of `trainer.py`, or 1 if
the actor dies. The policy is trained on CPUs: the GPUs are reserved but not used.
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

#: Seconds between two checks whether the driver of the Ray job has received a signal.
CHECK_EVERY_S = 0.2


class TrainerActor:
    """A Ray actor that runs one training.

    The actor needs the Ray option `max_concurrency=2`, so that `stop` can run during `train`.
    """

    def __init__(self, folder: str) -> None:
        """
        Args:
            folder: Folder of `trainer.py`, relative to the working directory of the Ray job.
        """
        # Let this actor import `trainer.py`. Ray adds only its copy of the job's working directory
        # to the import path. So also add the folder in this copy that contains `trainer.py`.
        folders = (Path(entry) / folder for entry in sys.path)
        sys.path[:0] = [str(path) for path in folders if (path / "trainer.py").exists()]
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
        except SystemExit as error:
            # Do not raise SystemExit: Ray would treat it as a request to end the actor.
            return error.code if isinstance(error.code, int) else 1

    def stop(self, number: int) -> None:
        """End the training as a signal would: write a checkpoint of the last step, and exit.

        Args:
            number: Number of the signal.
        """
        self._endings.put(signal.Signals(number))


def main() -> int:
    """Run the training in an actor, and return the exit status."""
    options = _parser().parse_args()
    # Compute this relative path before `ray.init`, which may change the working directory.
    folder = os.path.relpath(Path(__file__).parent)
    ray.init()
    # Set the handlers after `ray.init`, which sets its own SIGTERM handler.
    signals: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda number, _frame: signals.put(number))
    actor_class = ray.remote(TrainerActor).options(
        num_gpus=options.gpus, num_cpus=options.gpus * options.cpus_per_gpu, max_concurrency=2
    )
    # Ray's type hints do not include the methods of an actor handle.
    actor: Any = actor_class.remote(folder)

    place = actor.place.remote()
    print(f"waiting for {options.gpus} GPUs", flush=True)
    while not _is_done(place):
        if not signals.empty():
            # Kill the actor, because an actor that still waits for GPUs cannot receive a `stop`.
            ray.kill(actor)
            return 128 + signals.get()
    print(f"trainer on {ray.get(place)}", flush=True)

    status = actor.train.remote(options.arguments)
    while not _is_done(status):
        if not signals.empty():
            actor.stop.remote(signals.get())
    return int(ray.get(status))


def _is_done(result: ray.ObjectRef[object]) -> bool:
    """Wait for up to `CHECK_EVERY_S` seconds, and return True if the result is available."""
    done, _ = ray.wait([result], timeout=CHECK_EVERY_S)
    return bool(done)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="The quickstart's trainer as a Ray job.")
    add = parser.add_argument
    add("--gpus", type=int, default=1, help="Number of GPUs that the trainer uses on one node")
    add("--cpus-per-gpu", type=int, default=3, help="Number of CPUs per GPU")
    add("arguments", nargs="+", metavar="-- ARGUMENTS", help="Arguments of trainer.py")
    return parser


if __name__ == "__main__":
    sys.exit(main())
