"""Real vLLM engines under faults: `make llm-faults`, or `python -m tests.faults.llm [--log FILE]`.

The run of the quickstart with vLLM, slower to learn so that its weights change throughout. One
after the other, each once both engines serve again: an engine core is killed, an engine core is
stopped, a server is killed, and one engine is given a truncated checkpoint in a sync. The trainer
recomputes every answer's log-probabilities by the weights that the answer names, and fails at the
first from weights out of step.
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
from tests.support.ground import in_checkout, until
from tests.support.help import HelpFormatter
from tests.support.stage import processes_with

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ROOT / ".venv-llm" / "bin"
SPEC = ROOT / "deployments" / "quickstart-llm" / "quickstart-llm.yaml"
TRAINER = "tests/faults/llm_trainer.py"
#: Of the largest difference between an engine's log-probabilities and the recomputed ones, nats.
TOLERANCE = 1e-3
#: So that it still learns when the last fault comes.
LEARNING_RATE = 0.0006
#: For an engine to start, on a machine that does much else.
BACK_WITHIN_S = 600.0
STEP_WITHIN_S = 120.0


class LlmRun:
    """The run, seen from outside: its process, its fleet, its metrics."""

    def __init__(self, home: Path, log: Path, *, in_flight: str) -> None:
        spec = yaml.safe_load(SPEC.read_text())
        trainer = spec["components"]["trainer"]["command"]
        trainer[1] = TRAINER
        trainer += ["--learning-rate", str(LEARNING_RATE), "--in-flight", in_flight]
        spec["progress"]["total"] = spec["success"]["step"] = 100_000
        spec["stall_after_s"] = 900
        path = home / "spec.yaml"
        path.write_text(yaml.safe_dump(in_checkout(spec), sort_keys=False))
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
        """Of its first attempt. Raises: FileNotFoundError, as long as there is none."""
        if found := next(iter(self._home.glob("runs/*/attempt-01")), None):
            return found
        raise FileNotFoundError("the run has no directory yet")

    @property
    def url(self) -> str:
        spec = yaml.safe_load((self.directory / "spec.yaml").read_text())
        command = spec["components"]["trainer"]["command"]
        return str(command[command.index("--fleet") + 1])

    def lines(self) -> list[dict[str, Any]]:
        """Its metrics, a step each."""
        with suppress(OSError):
            text = (self.directory / "metrics.jsonl").read_text()
            return [json.loads(line) for line in text.splitlines(keepends=True) if line[-1] == "\n"]
        return []

    def engines(self) -> dict[int, dict[str, Any]]:
        # Before the attempt begins there is no spec, and before the fleet does no gateway.
        with suppress(OSError, httpx.HTTPError):
            seen = httpx.get(f"{self.url}/muster/rollout", trust_env=False, timeout=10.0).json()
            return {int(one["engine"]): one for one in seen["engines"]}
        return {}

    def wait(self, is_so: Callable[[], Any], what: str, within_s: float) -> Any:
        """What `is_so` finds. Raises: AssertionError, when it does not, or the run has ended."""

        def found() -> Any:
            assert self.process.poll() is None, f"the run has ended while {what} was waited for"
            return is_so()

        return until(found, what, within_s)

    def both_serve(self) -> bool:
        """Both engines were committed in the last sync, and still are in routing."""
        engines, lines = self.engines(), self.lines()
        return (
            [one["state"] for one in engines.values()] == ["active", "active"]
            and bool(lines)
            and len(lines[-1]["serving"]) == 2
        )

    def has_learned(self) -> bool:
        return [line["reward"] for line in self.lines()][-1:] > [0.85]

    def server(self, engine: int) -> psutil.Process:
        """The front end of an engine."""
        url = self.engines()[engine]["urls"][0]
        return psutil.Process(listeners(int(url.rpartition(":")[2]))[0].pid)

    def core(self, engine: int) -> psutil.Process:
        children = self.server(engine).children(recursive=True)
        [core] = [one for one in children if "EngineCore" in "".join(one.cmdline())]
        return core


def vllm_processes() -> list[int]:
    """Engine cores and their workers: naming themselves, they have written over their environment,
    by which others are found."""
    return [one.pid for one in psutil.process_iter() if one.name().startswith("VLLM::")]


def fault_free(run: LlmRun) -> str:
    run.wait(lambda: len(run.lines()) >= 3, "the first steps", BACK_WITHIN_S)
    return f"{len(run.lines())} steps"


def kill_core(run: LlmRun) -> str:
    return _engine_lost(run, 0, lambda: run.core(0).kill())


def stop_core(run: LlmRun) -> str:
    """With its requests aborted, the next push to it hangs; the sync goes on without it."""
    return _engine_lost(run, 1, lambda: run.core(1).suspend())


def kill_server(run: LlmRun) -> str:
    return _engine_lost(run, 0, lambda: run.server(0).kill())


def break_weights(run: LlmRun) -> str:
    order = run.directory / "break-weights"
    said = _engine_lost(run, 1, lambda: _write(order, "1"))
    left_out = [line["left_out"]["1"] for line in run.lines() if "1" in line["left_out"]]
    assert any(" 500 " in why for why in left_out), f"no load failed: {left_out}"
    return said


def _write(path: Path, text: str) -> None:
    draft = path.with_suffix(".draft")
    draft.write_text(text)
    os.replace(draft, path)


def _engine_lost(run: LlmRun, engine: int, do: Callable[[], object]) -> str:
    """The engine is out, the other one goes on, and it comes back as another incarnation."""
    epoch, step = run.engines()[engine]["epoch"], len(run.lines())
    began = time.monotonic()
    do()

    def is_out() -> bool:
        lines = run.lines()
        return len(lines) > step and lines[-1]["serving"] == [1 - engine]

    run.wait(is_out, f"the fleet goes on without engine {engine}", STEP_WITHIN_S)
    out_s = time.monotonic() - began
    alone = len(run.lines())
    run.wait(
        lambda: run.both_serve() and run.engines()[engine]["epoch"] > epoch,
        f"engine {engine} serves again",
        BACK_WITHIN_S,
    )
    syncs = max(line["sync_s"] for line in run.lines()[step:])
    return (
        f"a step without it after {out_s:.0f} s, {len(run.lines()) - alone} steps until it served "
        f"again after {time.monotonic() - began:.0f} s, longest sync {syncs:.1f} s"
    )


FAULTS: tuple[Callable[[LlmRun], str], ...] = (
    fault_free,
    kill_core,
    stop_core,
    kill_server,
    break_weights,
)


def judged(run: LlmRun) -> list[str]:
    """What the metrics say against it."""
    lines, wrong = run.lines(), []
    if not lines:
        return ["no step was trained"]
    rewards = [line["reward"] for line in lines]
    gap = max(line["log_prob_gap"] for line in lines)
    before = [line["log_prob_gap_before"] for line in lines if line["log_prob_gap_before"]]
    print(
        f"{len(lines)} steps, {sum(line['tokens'] for line in lines)} tokens judged: largest gap "
        f"{gap:.2g} nats; by the version before it would have been {min(before):.2g} at least"
    )
    print(f"reward {rewards[0]:.3f} at first, {rewards[-1]:.3f} at last")
    print(f"requests sent again, by status: {lines[-1]['failures'] or 'none'}")
    if not gap <= TOLERANCE:
        wrong.append(f"an answer was {gap:.2g} nats from the weights that it named")
    if min(before) <= TOLERANCE:
        wrong.append("weights changed so little that the judgement could not tell them apart")
    if not (rewards[0] < 0.2 and rewards[-1] > 0.8):
        wrong.append("it did not learn")
    return wrong


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status."""
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
        help="what a sync does to requests",
    )
    options = parser.parse_args(argv)
    if not (PROGRAMS / "vllm").exists():
        print("there is no vLLM in .venv-llm: `make llm` installs it", file=sys.stderr)
        return 2
    home = Path(tempfile.mkdtemp(prefix="llm-faults-"))
    others = set(vllm_processes())
    run, wrong = LlmRun(home, options.log, in_flight=options.in_flight), []
    try:
        for fault in FAULTS:
            name = fault.__name__.replace("_", " ")
            try:
                run.wait(run.both_serve, "both engines serve", BACK_WITHIN_S)
                print(f"{name}: {fault(run)}", flush=True)
            except AssertionError as error:
                print(f"{name}: FAILED: {error}", flush=True)
                wrong.append(f"{name}: {error}")
                break
        with suppress(AssertionError):
            run.wait(run.has_learned, "it has learned", BACK_WITHIN_S)
        run.process.send_signal(signal.SIGTERM)
        status = run.process.wait(120)
        if status != 130:
            wrong.append(f"the run ended with {status}, not as interrupted: see {options.log}")
        left = processes_with("MUSTER_HOME", str(home))
        left += [pid for pid in vllm_processes() if pid not in others]
        if left:
            wrong.append(f"processes are left: {left}")
        wrong += judged(run)
    finally:
        run.process.kill()
        run.process.wait()
    for one in wrong:
        print(f"WRONG: {one}")
    if wrong:
        print(f"the run's files are in {home}")
    else:
        shutil.rmtree(home)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
