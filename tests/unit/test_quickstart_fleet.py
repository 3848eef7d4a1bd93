"""The quickstart's servers that take weights, and the trainer's side of their fleet."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.request import ProxyHandler, build_opener

import numpy as np
import pytest

QUICKSTART = Path(__file__).parents[2] / "deployments" / "quickstart"
sys.path.insert(0, str(QUICKSTART))

from fleet import GONE_AFTER_S, LOOK_EVERY_S, Fleet, FleetError
from grpo import initial_state
from policy import Policy, initial_policy
from sampler import Sampler
from serving import InferenceServer
from weights import BadWeights, Weights

NEW = initial_policy(np.random.default_rng(5))


class Servers:
    """Inference servers by rank, and a gateway that knows them; each fleet test has its own."""

    def __init__(self, count: int) -> None:
        self._stack = ExitStack()
        self.servers = {rank: self._start() for rank in range(count)}
        self.versions: dict[int, int | None] = dict.fromkeys(self.servers, 0)
        #: The bodies of POST /muster/rollout/weights, in order.
        self.told: list[dict[str, Any]] = []
        self.tokens: list[str | None] = []
        #: What the gateway answers instead of 200.
        self.refusal = 0
        self.gateway = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        threading.Thread(target=self.gateway.serve_forever, args=(0.02,), daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.gateway.server_address[1]}"

    @property
    def steps(self) -> list[int]:
        return [server.sampler.step for server in self.servers.values()]

    def _start(self) -> InferenceServer:
        sampler = Sampler(
            initial_policy(np.random.default_rng(0)), step=0, rng=np.random.default_rng(0)
        )
        return self._stack.enter_context(InferenceServer(sampler, port=0, takes_weights=True))

    def restart(self, rank: int) -> None:
        """It comes back with the weights that it began with."""
        self.servers[rank] = self._start()
        self.versions[rank] = None

    def lose(self, rank: int) -> None:
        """It listens no more, and the gateway does not know it yet."""
        self.servers[rank].server_close()

    def snapshot(self) -> dict[str, Any]:
        return {
            "servers": [
                {"rank": rank, "version": version} for rank, version in self.versions.items()
            ],
            "training": {
                "urls": {str(rank): server.url for rank, server in self.servers.items()},
                "weight_ranks": {str(rank): [2 * rank, 2 * rank + 1] for rank in self.servers},
                "epochs": {str(rank): 1 for rank in self.servers},
            },
        }

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        fleet = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(fleet.snapshot())

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                fleet.told.append(body)
                for rank in body["ranks"]:
                    fleet.versions[rank // 2] = body["version"]
                self._answer({})

            def _answer(self, content: dict[str, Any]) -> None:
                fleet.tokens.append(self.headers["Authorization"])
                payload = json.dumps(content).encode()
                self.send_response(fleet.refusal or 200)
                self.send_header("Content-Length", str(len(payload)))
                self.end_headers()
                self.wfile.write(payload)

            def log_message(self, *arguments: object) -> None: ...

        return Handler

    def close(self) -> None:
        self.gateway.shutdown()
        self.gateway.server_close()
        self._stack.close()


@pytest.fixture
def servers() -> Iterator[Servers]:
    made = Servers(3)
    yield made
    made.close()


class FakeClock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def a_fleet(servers: Servers, clock: FakeClock | None = None, token: str = "") -> Fleet:
    clock = clock or FakeClock()
    return Fleet(servers.url, token=token, clock=clock, sleep=clock.sleep)


def test_weights_survive_the_way() -> None:
    there = Weights.of(Weights(policy=NEW, step=7).as_bytes())

    assert there.step == 7
    assert np.array_equal(there.policy.hidden_weight, NEW.hidden_weight)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not an archive",
        # Cut short on the way.
        Weights(policy=NEW, step=7).as_bytes()[:-100],
        # Of another policy.
        Weights(
            policy=Policy(
                hidden_weight=np.zeros((2, 2)),
                hidden_bias=np.zeros(2),
                output_weight=np.zeros((2, 2)),
                output_bias=np.zeros(2),
            ),
            step=7,
        ).as_bytes(),
    ],
)
def test_what_is_no_weights_of_this_policy_is_refused(content: bytes) -> None:
    with pytest.raises(BadWeights):
        Weights.of(content)


def test_a_push_brings_every_server_the_weights_and_tells_the_gateway(servers: Servers) -> None:
    done = a_fleet(servers).push(NEW, step=3)

    assert done == (0, 1, 2)
    assert servers.steps == [3, 3, 3]
    assert servers.told == [
        {"version": 3, "ranks": [0, 1, 2, 3, 4, 5], "epochs": {"0": 1, "1": 1, "2": 1}}
    ]


def test_a_server_that_is_gone_is_left_out_of_a_push(servers: Servers) -> None:
    servers.lose(1)

    assert a_fleet(servers).push(NEW, step=3) == (0, 2)

    assert servers.told[0]["ranks"] == [0, 1, 4, 5]
    assert servers.told[0]["epochs"] == {"0": 1, "2": 1}


def test_a_server_that_came_back_gets_the_last_weights_and_no_other_does(servers: Servers) -> None:
    clock = FakeClock()
    fleet = a_fleet(servers, clock)
    fleet.push(NEW, step=3)
    servers.restart(1)

    assert fleet.catch_up() == (), "it is not time yet"
    clock.sleep(LOOK_EVERY_S)
    assert fleet.catch_up() == (1,)
    clock.sleep(LOOK_EVERY_S)
    assert fleet.catch_up() == (), "all are up to date"

    assert servers.steps == [3, 3, 3]
    assert [told["ranks"] for told in servers.told] == [[0, 1, 2, 3, 4, 5], [2, 3]]


def test_the_gateway_is_shown_the_token(servers: Servers) -> None:
    a_fleet(servers, token="a-token").push(NEW, step=1)

    assert set(servers.tokens) == {"Bearer a-token"}


def test_a_gateway_that_refuses_is_an_error_at_once(servers: Servers) -> None:
    servers.refusal = 409
    clock = FakeClock()

    with pytest.raises(FleetError, match=r"GET .*/muster/rollout: 409"):
        a_fleet(servers, clock).push(NEW, step=1)

    assert clock.now_s == 0.0


def test_a_gateway_that_is_gone_is_an_error_after_a_while(servers: Servers) -> None:
    clock = FakeClock()
    fleet = a_fleet(servers, clock)
    servers.gateway.shutdown()
    servers.gateway.server_close()

    with pytest.raises(FleetError, match="the fleet went away"):
        fleet.push(NEW, step=1)

    assert GONE_AFTER_S <= clock.now_s < GONE_AFTER_S + 1


def test_the_trainers_own_server_takes_no_weights() -> None:
    sampler = Sampler(NEW, step=0, rng=np.random.default_rng(0))
    with InferenceServer(sampler, port=0) as server:
        opener = build_opener(ProxyHandler({}))
        content = Weights(policy=NEW, step=9).as_bytes()

        with pytest.raises(OSError, match="404"):
            opener.open(f"{server.url}/weights", data=content, timeout=30)

    assert sampler.step == 0


def test_a_server_begins_with_the_trainers_weights_and_ends_with_sigterm() -> None:
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    process = subprocess.Popen(
        [sys.executable, str(QUICKSTART / "server.py"), "--port", "0", "--seed", "3"],
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().split()[2].rstrip(",")
        body = json.dumps({"prompt": "7.0.4.2.=", "n": 4, "max_tokens": 5, "temperature": 0})
        opener = build_opener(ProxyHandler({}))
        with opener.open(f"{url}/generate", data=body.encode(), timeout=30) as answer:
            tokens = json.load(answer)["token_ids"]
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == -signal.SIGTERM
    finally:
        process.kill()
        process.wait()

    for_weights, _ = np.random.SeedSequence(3).spawn(2)
    policy = initial_state(np.random.default_rng(for_weights)).policy
    same = Sampler(policy, step=0, rng=np.random.default_rng(0))
    [one, *_] = same.sample([7, 0, 4, 2, 10], count=4, max_tokens=5, temperature=0)
    assert tokens == [list(one.tokens)] * 4
