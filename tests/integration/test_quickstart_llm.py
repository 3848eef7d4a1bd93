"""The trainer's side of the quickstart with vLLM, on the process of a fleet with `backend: vllm`.

The program `vllm` on its PATH is `tests/support/vllm_server.py`, which speaks vLLM's protocol: each
token's log-probability tells the weights that it was made with.
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
from tests.support.stage import DEADLINE_S, RUN_ID, free_port, is_alive, processes_with, wait_until
from tests.support.vllm_server import installed, log_prob, save_weights

ENGINES = (0, 1)
PROMPTS = ("one", "two", "three", "four")


class VllmFleet:
    """A fleet of two engines, and a trainer that knows the weights of every version."""

    def __init__(self, directory: Path, *, interval_s: float) -> None:
        """
        Args:
            interval_s: between two questions to each engine.
        """
        self.directory = directory
        port = free_port()
        #: `scales[version]`: what a version's weights are.
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
        programs = installed(directory / "bin")
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
        def is_ready() -> bool:
            with suppress(httpx.HTTPError):
                health = httpx.get(f"{self._url}/muster/health", trust_env=False)
                return bool(health.json()["ready"])
            return False

        wait_until(is_ready, f"the fleet serves; its log is in {self.directory}")

    def sync(self, version: int, *, broken: int | None = None, in_flight: str = "wait") -> Synced:
        """Weights of their own for each engine; those of a broken one can't be read."""
        self.scales[version] = 1.0 + version / 8
        folder = self.directory / f"step-{version}"
        for engine in ENGINES:
            save_weights(folder / str(engine), self.scales[version])
            if engine == broken:
                (folder / str(engine) / "weights.json").write_text('{"sca')
        return self.client.sync(
            f"{folder}/${{engine.index}}", version=version, in_flight=in_flight, broadcast_s=2.0
        )

    def is_in_step(self, answer: Answer) -> bool:
        """Whether the weights that the answer names give the log-probabilities that it has."""
        scale = self.scales[answer.version]
        expected = [log_prob(scale, token, place) for place, token in enumerate(answer.tokens)]
        return answer.log_probs == pytest.approx(expected, abs=1e-6)

    def state(self, engine: int) -> tuple[str, int]:
        """Of an engine, with its epoch."""
        [found] = [one for one in self.client.engines() if one["engine"] == engine]
        return found["state"], found["epoch"]

    def signal(self, engine: int, number: int) -> None:
        """To the process of an engine's server."""
        [found] = [one for one in self.client.engines() if one["engine"] == engine]
        [listener] = listeners(int(found["urls"][0].rpartition(":")[2]))
        os.kill(listener.pid, number)

    def end(self) -> None:
        self._process.kill()
        self._process.wait()

        def is_over() -> bool:
            for pid in tree.children(os.getpid()):
                if not is_alive(pid):
                    with suppress(ChildProcessError):
                        os.waitpid(pid, os.WNOHANG)
            return not processes_with("MUSTER_RUN_ID", RUN_ID)

        wait_until(is_over, "nothing of the fleet is left")


class Load:
    """Asks all the time, from threads of its own, and keeps the answers."""

    def __init__(self, client: RolloutClient) -> None:
        self.answers: list[Answer] = []
        self.errors: list[FleetError] = []
        self._client = client
        self._is_over = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(one,)) for one in PROMPTS]
        for thread in self._threads:
            thread.start()

    def until_more(self, least: int = 20) -> None:
        """Returns once so many more answers have come."""
        wanted = len(self.answers) + least
        wait_until(lambda: len(self.answers) >= wanted, f"{least} more answers come")

    def stop(self) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join()

    def _ask(self, prompt: str) -> None:
        while not self._is_over.is_set():
            try:
                self.answers += self._client.complete(prompt, count=2, max_tokens=8)
            except FleetError as error:
                self.errors.append(error)
                return


@pytest.fixture
def fleet(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[VllmFleet]:
    tree.become_subreaper()
    made = VllmFleet(tmp_path, interval_s=getattr(request, "param", 0.5))
    try:
        made.until_ready()
        yield made
    finally:
        made.end()


@pytest.fixture
def load(fleet: VllmFleet) -> Iterator[Load]:
    """At its end every answer was made by the weights that it names."""
    made = Load(fleet.client)
    yield made
    made.stop()
    assert made.errors == []
    assert [one for one in made.answers if not fleet.is_in_step(one)] == []


def test_an_answer_is_made_by_the_weights_that_it_names(fleet: VllmFleet, load: Load) -> None:
    load.until_more()
    for version in range(1, 6):
        synced = fleet.sync(version)
        load.until_more()

        assert set(synced.serving) == set(ENGINES)

    assert {one.version for one in load.answers} == set(range(6))
    assert {one.engine for one in load.answers} == set(ENGINES)


# No question finds it in time: vLLM's engine would die of the one for a token.
@pytest.mark.parametrize("fleet", [600.0], indirect=True)
def test_an_engine_that_could_not_load_is_restarted_and_never_committed(
    fleet: VllmFleet, load: Load
) -> None:
    _, epoch = fleet.state(1)

    synced = fleet.sync(1, broken=1)
    load.until_more()
    wait_until(lambda: fleet.state(1) == ("stale", epoch + 1), "it is started again, and stale")
    again = fleet.sync(2)
    load.until_more()

    assert set(synced.serving) == {0}
    assert "500" in synced.left_out[1]
    assert set(again.serving) == set(ENGINES)
    assert not [one for one in load.answers if (one.engine, one.version) == (1, 1)]


def test_a_push_to_an_engine_that_hangs_ends_by_its_deadline_and_the_other_goes_on(
    fleet: VllmFleet, load: Load
) -> None:
    fleet.sync(1)
    load.until_more()

    fleet.signal(1, signal.SIGUSR1)
    synced = fleet.sync(2, in_flight="abort")
    load.until_more()
    wait_until(lambda: fleet.state(1)[0] == "stale", "it is started again")
    again = fleet.sync(3)
    load.until_more()

    assert set(synced.serving) == {0}
    assert set(again.serving) == set(ENGINES)


def test_an_engine_core_that_dies_comes_back_stale_until_a_commit_names_it(
    fleet: VllmFleet, load: Load
) -> None:
    fleet.sync(1)
    load.until_more()
    _, epoch = fleet.state(0)

    fleet.signal(0, signal.SIGUSR2)
    wait_until(lambda: fleet.state(0) == ("stale", epoch + 1), "it is started again, and stale")
    load.until_more()
    fleet.sync(2)
    load.until_more()

    # It had the weights of its start, whatever its server answered before it was committed.
    assert not [one for one in load.answers if (one.epoch, one.version) == (epoch + 1, 1)]
    assert [one for one in load.answers if (one.engine, one.epoch) == (0, epoch + 1)]


def test_a_sync_that_no_engine_took_is_given_up_and_the_next_may_succeed(
    fleet: VllmFleet,
) -> None:
    fleet.sync(1)
    missing = str(fleet.directory / "nowhere")

    with pytest.raises(SyncLost, match="no engine took version 2"):
        fleet.client.sync(missing, version=2, broadcast_s=2.0)
    wait_until(
        lambda: all(fleet.state(engine)[0] == "stale" for engine in ENGINES),
        "both are started again",
    )
    synced = fleet.sync(3)
    [answer] = fleet.client.complete("one", count=1, max_tokens=4)

    assert set(synced.serving) == set(ENGINES)
    assert answer.version == 3 and fleet.is_in_step(answer)
