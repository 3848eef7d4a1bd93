"""The trainer's client of the vLLM quickstart, with a fleet process that has `backend: vllm`.

The program `vllm` on the PATH is `tests/support/vllm_server.py`, a stand-in that speaks vLLM's
protocol. The log-probabilities of its tokens reveal the weights that generated them.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "deployments" / "quickstart-llm"))

from rollout_client import Answer, FleetError, RolloutClient, Synced, SyncLost

from tasks.processes import tree
from tasks.processes.ports import listeners
from tasks.rollout.component import FleetPlan
from tests.support.supervised_components import (
    DEADLINE_S,
    RUN_ID,
    free_port,
    is_alive,
    processes_with,
    wait_until,
)
from tests.support.vllm_server import install_program, log_prob, save_weights

ENGINES = (0, 1)
PROMPTS = ("one", "two", "three", "four")


class VllmFleet:
    """A fleet of two engines with fake vLLM servers, and a client that controls the fleet.

    The object remembers the weights of every version, to check the answers of the engines.
    """

    def __init__(self, directory: Path, *, interval_s: float) -> None:
        """
        Args:
            directory: Directory of the model, the weights and the logs.
            interval_s: Time between two health checks of an engine, in seconds.
        """
        self.directory = directory
        port = free_port()
        #: Mapping from version to weights. The weights of the fake server are a single number, with
        #: which the server multiplies all log-probabilities.
        self.scales = {0: 1.0}
        plan = FleetPlan(
            **{
                "run_id": RUN_ID,
                "attempt": 1,
                "fleet": {
                    "backend": "vllm",
                    "model": str(save_weights(directory / "model", self.scales[0])),
                    "engines": len(ENGINES),
                    "args": ["--served-model-name", "policy"],
                    "health": {
                        "interval_s": interval_s,
                        "first_after_s": 0.5,
                        "timeout_s": 1,
                        "misses": 2,
                    },
                    "recovery": {"backoff_s": 0.1, "max_backoff_s": 0.2},
                    "stop": {"grace_s": 1},
                    "start_within_s": DEADLINE_S,
                },
                "port": port,
                "ports": {f"server.{rank}": free_port() for rank in ENGINES},
                "cwd": directory,
                "directory": directory,
            }
        )
        programs = install_program(directory / "bin")
        with (directory / "rollout.log").open("wb") as log:
            self._process = subprocess.Popen(
                (sys.executable, "-P", "-m", "tasks.rollout.process"),
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={
                    **os.environ,
                    "MUSTER_RUN_ID": RUN_ID,
                    **plan.env,
                    "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}",
                },
                start_new_session=True,
            )
        self._url = f"http://127.0.0.1:{port}"
        self.client = RolloutClient(self._url, model="policy")

    def until_ready(self) -> None:
        """Wait until all engines of the fleet serve."""

        def is_ready() -> bool:
            with suppress(httpx.HTTPError):
                health = httpx.get(f"{self._url}/muster/health", trust_env=False)
                return bool(health.json()["ready"])
            return False

        wait_until(is_ready, f"the fleet serves; its log is in {self.directory}")

    def sync(self, version: int, *, broken: int | None = None, in_flight: str = "wait") -> Synced:
        """Update the weights of both engines, each from its own files, and return the result.

        Args:
            version: New weight version.
            broken: Number of the engine whose weight files are damaged, or None for no engine.
            in_flight: Treatment of running requests during the update, "wait" or "abort".
        """
        self.scales[version] = 1.0 + version / 8
        folder = self.directory / f"step-{version}"
        for engine in ENGINES:
            save_weights(folder / str(engine), self.scales[version])
            if engine == broken:
                (folder / str(engine) / "weights.json").write_text('{"sca')
        return self.client.sync(
            f"{folder}/${{engine.index}}", version=version, in_flight=in_flight, broadcast_s=2.0
        )

    def is_consistent(self, answer: Answer) -> bool:
        """Return True if an answer was generated with the weight version that the answer names."""
        scale = self.scales[answer.version]
        expected = [
            log_prob(scale, token, position) for position, token in enumerate(answer.tokens)
        ]
        return answer.log_probs == pytest.approx(expected, abs=1e-6)

    def state(self, engine: int) -> tuple[str, int]:
        """Return the state and the epoch of an engine. Each start of an engine is a new epoch."""
        [engine_state] = [
            candidate for candidate in self.client.engines() if candidate["engine"] == engine
        ]
        return engine_state["state"], engine_state["epoch"]

    def signal(self, engine: int, number: int) -> None:
        """Send a signal to the server process of an engine."""
        [engine_state] = [
            candidate for candidate in self.client.engines() if candidate["engine"] == engine
        ]
        [listener] = listeners(int(engine_state["urls"][0].rpartition(":")[2]))
        os.kill(listener.pid, number)

    def end(self) -> None:
        """Kill the fleet process, and wait until all processes of the fleet have ended."""
        self._process.kill()
        self._process.wait()

        def has_ended() -> bool:
            for pid in tree.children(os.getpid()):
                if not is_alive(pid):
                    with suppress(ChildProcessError):
                        os.waitpid(pid, os.WNOHANG)
            return not processes_with("MUSTER_RUN_ID", RUN_ID)

        wait_until(has_ended, "no process of the fleet remains")


class Load:
    """Threads that send requests without a pause and store the answers."""

    def __init__(self, client: RolloutClient) -> None:
        self.answers: list[Answer] = []
        self.errors: list[FleetError] = []
        self._client = client
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(prompt,)) for prompt in PROMPTS]
        for thread in self._threads:
            thread.start()

    def until_more(self, count: int = 20) -> None:
        """Wait until `count` further answers have arrived."""
        target = len(self.answers) + count
        wait_until(lambda: len(self.answers) >= target, f"{count} more answers come")

    def stop(self) -> None:
        """Stop sending requests, and wait for the threads to end."""
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, prompt: str) -> None:
        """Request completions of the prompt until `stop` is called or a request fails."""
        while not self._is_over.is_set():
            try:
                self.answers += self._client.complete(prompt, count=2, max_tokens=8)
            except FleetError as error:
                self.errors.append(error)
                return


@pytest.fixture
def fleet(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[VllmFleet]:
    """Yield a fleet that serves requests.

    A test sets the parameter of this fixture: the interval of health checks, in seconds.
    """
    tree.become_subreaper()
    vllm_fleet = VllmFleet(tmp_path, interval_s=getattr(request, "param", 0.5))
    try:
        vllm_fleet.until_ready()
        yield vllm_fleet
    finally:
        vllm_fleet.end()


@pytest.fixture
def load(fleet: VllmFleet) -> Iterator[Load]:
    """Send requests in threads during the test, and check all answers after the test.

    Each answer names a weight version, and must have been generated with the weights of this
    version.
    """
    requests = Load(fleet.client)
    yield requests
    requests.stop()
    assert requests.errors == []
    assert [answer for answer in requests.answers if not fleet.is_consistent(answer)] == []


def test_answers_are_generated_with_the_weight_version_that_they_name(
    fleet: VllmFleet, load: Load
) -> None:
    load.until_more()
    for version in range(1, 6):
        synced = fleet.sync(version)
        load.until_more()

        assert set(synced.serving) == set(ENGINES)

    assert {answer.version for answer in load.answers} == set(range(6))
    assert {answer.engine for answer in load.answers} == set(ENGINES)


# With 600 s between two health checks, no health check happens during the test. A health check
# would kill the engine that has failed to load weights.
@pytest.mark.parametrize("fleet", [600.0], indirect=True)
def test_engine_that_failed_to_load_weights_is_restarted_and_not_committed(
    fleet: VllmFleet, load: Load
) -> None:
    _, epoch = fleet.state(1)

    synced = fleet.sync(1, broken=1)
    load.until_more()
    wait_until(lambda: fleet.state(1) == ("stale", epoch + 1), "the engine is restarted and stale")
    next_sync = fleet.sync(2)
    load.until_more()

    assert set(synced.serving) == {0}
    assert "500" in synced.left_out[1]
    assert set(next_sync.serving) == set(ENGINES)
    assert not [answer for answer in load.answers if (answer.engine, answer.version) == (1, 1)]


def test_sync_with_a_hung_engine_ends_at_its_deadline_and_the_other_engine_serves(
    fleet: VllmFleet, load: Load
) -> None:
    fleet.sync(1)
    load.until_more()

    fleet.signal(1, signal.SIGUSR1)
    synced = fleet.sync(2, in_flight="abort")
    load.until_more()
    wait_until(lambda: fleet.state(1)[0] == "stale", "the engine is restarted")
    next_sync = fleet.sync(3)
    load.until_more()

    assert set(synced.serving) == {0}
    assert set(next_sync.serving) == set(ENGINES)


def test_engine_with_a_dead_core_restarts_stale_and_serves_after_a_commit(
    fleet: VllmFleet, load: Load
) -> None:
    fleet.sync(1)
    load.until_more()
    _, epoch = fleet.state(0)

    fleet.signal(0, signal.SIGUSR2)
    wait_until(lambda: fleet.state(0) == ("stale", epoch + 1), "the engine is restarted and stale")
    load.until_more()
    fleet.sync(2)
    load.until_more()

    # Before the sync of version 2, the restarted engine had only version 1 of the weights. The
    # engine must not have answered requests with version 1.
    assert not [
        answer for answer in load.answers if (answer.epoch, answer.version) == (epoch + 1, 1)
    ]
    assert [answer for answer in load.answers if (answer.engine, answer.epoch) == (0, epoch + 1)]


def test_sync_that_all_engines_fail_raises_and_the_next_sync_succeeds(
    fleet: VllmFleet,
) -> None:
    fleet.sync(1)
    missing = str(fleet.directory / "nowhere")

    with pytest.raises(SyncLost, match="no inference engine loaded the weights of version 2"):
        fleet.client.sync(missing, version=2, broadcast_s=2.0)
    wait_until(
        lambda: all(fleet.state(engine)[0] == "stale" for engine in ENGINES),
        "both engines are restarted",
    )
    synced = fleet.sync(3)
    [answer] = fleet.client.complete("one", count=1, max_tokens=4)

    assert set(synced.serving) == set(ENGINES)
    assert answer.version == 3 and fleet.is_consistent(answer)
