"""Inject faults into real vLLM engines: `make llm-faults`, or `python -m tests.faults.llm`.

The program starts the run of the vLLM quickstart, with a lower learning rate, so that its weights
change during the whole run. Then it injects one fault after the other:

- the engine core process of an engine is killed;
- the engine core process of an engine is stopped;
- the server process of an engine is killed;
- one engine receives a truncated checkpoint in a weight update.

Each fault follows when both engines serve again. The trainer recomputes the log-probabilities of
each answer with the weight version that the answer names. It fails at the first answer that was
made with other weights.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from tasks.processes.ports import listeners
from tests.support.help import HelpFormatter
from tests.support.host_environment import wait_for, with_absolute_cwd
from tests.support.supervised_components import processes_with

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ROOT / ".venv-llm" / "bin"
SPEC = ROOT / "deployments" / "quickstart-llm" / "quickstart-llm.yaml"
TRAINER = "tests/faults/llm_trainer.py"
#: Largest allowed difference, in nats, between the log-probabilities of an engine and of the
#: trainer.
TOLERANCE = 1e-3
#: Learning rate. With the default rate, which is higher, the model would finish its learning before
#: the last fault is injected.
LEARNING_RATE = 0.0006
#: Time limit, in seconds, on the start of an engine on a busy machine.
BACK_WITHIN_S = 600.0
STEP_WITHIN_S = 120.0


class LlmRun:
    """Run of the vLLM quickstart. Gives access to its process, inference engines and metrics."""

    def __init__(self, home: Path, log: Path, *, in_flight: str) -> None:
        """Start the run.

        Args:
            home: MUSTER_HOME of the run.
            log: File for the output of the run.
            in_flight: Treatment of running requests in a weight update, "wait" or "abort".
        """
        spec = yaml.safe_load(SPEC.read_text())
        trainer = spec["components"]["trainer"]["command"]
        trainer[1] = TRAINER
        trainer += ["--learning-rate", str(LEARNING_RATE), "--in-flight", in_flight]
        spec["progress"]["total"] = spec["success"]["step"] = 100_000
        spec["stall_after_s"] = 900
        path = home / "spec.yaml"
        path.write_text(yaml.safe_dump(with_absolute_cwd(spec), sort_keys=False))
        env = {
            **os.environ,
            "MUSTER_HOME": str(home),
            "PATH": f"{PROGRAMS}{os.pathsep}{os.environ['PATH']}",
        }
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                (sys.executable, "-m", "flows.train", str(path)),
                cwd=ROOT,
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        self._home = home

    @property
    def directory(self) -> Path:
        """Directory of the run's first attempt.

        Raises:
            FileNotFoundError: The attempt has not begun.
        """
        directory = next(iter(self._home.glob("runs/*/attempt-01")), None)
        if directory is None:
            raise FileNotFoundError("the run has no directory yet")
        return directory

    @property
    def url(self) -> str:
        """Base URL of the gateway."""
        spec = yaml.safe_load((self.directory / "spec.yaml").read_text())
        command = spec["components"]["trainer"]["command"]
        return str(command[command.index("--fleet") + 1])

    def lines(self) -> list[dict[str, Any]]:
        """Return the metrics of the run, one record per training step."""
        with suppress(OSError):
            text = (self.directory / "metrics.jsonl").read_text()
            return [json.loads(line) for line in text.splitlines(keepends=True) if line[-1] == "\n"]
        return []

    def engines(self) -> dict[int, dict[str, Any]]:
        """Return the state of each engine by its number, or {} if the gateway does not answer."""
        # The file with the gateway's URL may not exist yet, or the gateway may not answer yet.
        with suppress(OSError, httpx.HTTPError):
            snapshot = httpx.get(f"{self.url}/muster/rollout", trust_env=False, timeout=10.0).json()
            return {int(engine["engine"]): engine for engine in snapshot["engines"]}
        return {}

    def wait(self, condition: Callable[[], Any], description: str, within_s: float) -> Any:
        """Wait until a condition holds, and return its result.

        Args:
            condition: Returns a value that is true if the condition holds.
            description: Text of the condition, for the error message.
            within_s: Time limit, in seconds.

        Raises:
            AssertionError: The condition did not hold in time, or the run has ended.
        """

        def check() -> Any:
            assert self.process.poll() is None, f"the run has ended before: {description}"
            return condition()

        return wait_for(check, description, within_s)

    def both_serve(self) -> bool:
        """Return True if both engines are active and took part in the last weight update."""
        engines = self.engines()
        lines = self.lines()
        return (
            [engine["state"] for engine in engines.values()] == ["active", "active"]
            and bool(lines)
            and len(lines[-1]["serving"]) == 2
        )

    def has_learned(self) -> bool:
        """Return True if the reward of the last training step is above 0.85."""
        return [line["reward"] for line in self.lines()][-1:] > [0.85]

    def server(self, engine: int) -> psutil.Process:
        """Return the process that listens on the HTTP port of an engine."""
        url = self.engines()[engine]["urls"][0]
        return psutil.Process(listeners(int(url.rpartition(":")[2]))[0].pid)

    def core(self, engine: int) -> psutil.Process:
        """Return the process that runs the model of an engine."""
        children = self.server(engine).children(recursive=True)
        [core] = [child for child in children if "EngineCore" in "".join(child.cmdline())]
        return core


def vllm_processes() -> list[int]:
    """Return the process ids of all vLLM engine cores and workers on this machine.

    The function cannot select the processes of one run, because these processes overwrite their
    environment variables.
    """
    return [process.pid for process in psutil.process_iter() if process.name().startswith("VLLM::")]


def fault_free(run: LlmRun) -> str:
    """Wait for the first three training steps, inject no fault, and return the number of steps."""
    run.wait(lambda: len(run.lines()) >= 3, "the first steps", BACK_WITHIN_S)
    return f"{len(run.lines())} steps"


def kill_core(run: LlmRun) -> str:
    """Kill the engine core process of engine 0, and wait until the engine has recovered.

    Returns:
        The duration of the recovery, and the training steps during the recovery, as text.
    """
    return _lose_engine(run, 0, lambda: run.core(0).kill())


def stop_core(run: LlmRun) -> str:
    """Stop the engine core process of engine 1 with SIGSTOP, and wait for the engine's recovery.

    In the next weight update, the request to this engine hangs. The update then continues without
    the engine.

    Returns:
        The duration of the recovery, and the training steps during the recovery, as text.
    """
    return _lose_engine(run, 1, lambda: run.core(1).suspend())


def kill_server(run: LlmRun) -> str:
    """Kill the server process of engine 0, and wait until the engine has recovered.

    Returns:
        The duration of the recovery, and the training steps during the recovery, as text.
    """
    return _lose_engine(run, 0, lambda: run.server(0).kill())


def break_weights(run: LlmRun) -> str:
    """Let the trainer send a truncated checkpoint to engine 1, and wait for the engine's recovery.

    Returns:
        The duration of the recovery, and the training steps during the recovery, as text.
    """
    order = run.directory / "break-weights"
    result = _lose_engine(run, 1, lambda: _write_atomically(order, "1"))
    errors = [line["left_out"]["1"] for line in run.lines() if "1" in line["left_out"]]
    assert any(" 500 " in error for error in errors), f"no load failed: {errors}"
    return result


def _write_atomically(path: Path, text: str) -> None:
    """Write a file so that the trainer never reads an incomplete text."""
    draft = path.with_suffix(".draft")
    draft.write_text(text)
    os.replace(draft, path)


def _lose_engine(run: LlmRun, engine: int, inject: Callable[[], object]) -> str:
    """Inject a fault into an engine, and wait until the engine has recovered.

    Meanwhile, the other engine must serve alone for a training step. Then the faulty engine must
    serve again, with a higher epoch. The epoch counts the starts of an engine.

    Args:
        run: The run.
        engine: Number of the faulty engine, 0 or 1.
        inject: Injects the fault.

    Returns:
        The duration of the recovery, and the training steps during the recovery, as text.
    """
    epoch = run.engines()[engine]["epoch"]
    step = len(run.lines())
    began = time.monotonic()
    inject()

    def is_out() -> bool:
        lines = run.lines()
        return len(lines) > step and lines[-1]["serving"] == [1 - engine]

    run.wait(is_out, f"the fleet continues without engine {engine}", STEP_WITHIN_S)
    out_s = time.monotonic() - began
    first_step_alone = len(run.lines())
    run.wait(
        lambda: run.both_serve() and run.engines()[engine]["epoch"] > epoch,
        f"engine {engine} serves again",
        BACK_WITHIN_S,
    )
    longest_sync_s = max(line["sync_s"] for line in run.lines()[step:])
    steps_alone = len(run.lines()) - first_step_alone
    return (
        f"a step without it after {out_s:.0f} s, {steps_alone} steps until it served "
        f"again after {time.monotonic() - began:.0f} s, longest sync {longest_sync_s:.1f} s"
    )


FAULTS: tuple[Callable[[LlmRun], str], ...] = (
    fault_free,
    kill_core,
    stop_core,
    kill_server,
    break_weights,
)


def judged(run: LlmRun) -> list[str]:
    """Print a summary of the run's metrics, and return the errors that the metrics show."""
    lines = run.lines()
    errors = []
    if not lines:
        return ["no step was trained"]
    rewards = [line["reward"] for line in lines]
    gap = max(line["log_prob_gap"] for line in lines)
    gaps_of_old_version = [
        line["log_prob_gap_before"] for line in lines if line["log_prob_gap_before"]
    ]
    print(
        f"{len(lines)} steps, {sum(line['tokens'] for line in lines)} tokens judged: largest gap "
        f"{gap:.2g} nats; by the version before it would have been "
        f"{min(gaps_of_old_version):.2g} at least"
    )
    print(f"reward {rewards[0]:.3f} at first, {rewards[-1]:.3f} at last")
    print(f"requests sent again, by status: {lines[-1]['failures'] or 'none'}")
    if not gap <= TOLERANCE:
        errors.append(f"an answer was {gap:.2g} nats from the weights that it named")
    if min(gaps_of_old_version) <= TOLERANCE:
        errors.append("weights changed so little that the judgement could not tell them apart")
    if not (rewards[0] < 0.2 and rewards[-1] > 0.8):
        errors.append("it did not learn")
    return errors


def main(argv: Sequence[str] | None = None) -> int:
    """Inject each fault into a training, and print the results.

    Returns:
        The exit code: 0 if all requirements were met, 1 if not, 2 if vLLM is not installed.
    """
    parser = argparse.ArgumentParser(
        prog="python -m tests.faults.llm",
        description=__doc__,
        epilog="Exit: 0 all held, 1 something did not, 2 there is no vLLM in .venv-llm.",
        formatter_class=HelpFormatter,
    )
    parser.add_argument("--log", type=Path, default=Path("llm-faults.log"), help="of the run")
    parser.add_argument(
        "--in-flight",
        default="abort",
        choices=("wait", "abort"),
        help="how a sync treats running requests",
    )
    options = parser.parse_args(argv)
    if not (PROGRAMS / "vllm").exists():
        print("there is no vLLM in .venv-llm: `make llm` installs it", file=sys.stderr)
        return 2
    home = Path(tempfile.mkdtemp(prefix="llm-faults-"))
    foreign_pids = set(vllm_processes())
    run = LlmRun(home, options.log, in_flight=options.in_flight)
    errors = []
    try:
        for fault in FAULTS:
            name = fault.__name__.replace("_", " ")
            try:
                run.wait(run.both_serve, "both engines serve", BACK_WITHIN_S)
                print(f"{name}: {fault(run)}", flush=True)
            except AssertionError as error:
                print(f"{name}: FAILED: {error}", flush=True)
                errors.append(f"{name}: {error}")
                break
        with suppress(AssertionError):
            run.wait(run.has_learned, "it has learned", BACK_WITHIN_S)
        run.process.send_signal(signal.SIGTERM)
        status = run.process.wait(120)
        if status != 130:
            errors.append(f"the run ended with {status}, not as interrupted: see {options.log}")
        leftover_pids = processes_with("MUSTER_HOME", str(home))
        leftover_pids += [pid for pid in vllm_processes() if pid not in foreign_pids]
        if leftover_pids:
            errors.append(f"leftover processes: {leftover_pids}")
        errors += judged(run)
    finally:
        run.process.kill()
        run.process.wait()
    for message in errors:
        print(f"WRONG: {message}")
    if errors:
        print(f"the run's files are in {home}")
    else:
        shutil.rmtree(home)
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
