"""What the trainer of the quickstart with vLLM says to a gateway, and makes of its answers."""

from __future__ import annotations

import json
import random
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deployments" / "quickstart-llm"
sys.path.insert(0, str(FOLDER))

from digits_task import ANSWER_TOKENS, draw_prompt, reward_of, tokens_of
from rollout_client import Answer, FleetError, RolloutClient, SyncLost

from tasks.spec.loading import load_spec

SYNC = "/muster/rollout/sync"
HEADERS = {"X-Muster-Engine": "1", "X-Muster-Epoch": "3", "X-Muster-Version": "7"}
COMPLETION = {"choices": [{"token_ids": [55, 256], "logprobs": {"token_logprobs": [-1.5, -2.0]}}]}
BEGUN = {"sync": "ab", "targets": [{"engine": 0, "epoch": 1}, {"engine": 1, "epoch": 4}]}


class Gateway(ThreadingHTTPServer):
    """Answers as it was told, and keeps what it was asked."""

    daemon_threads = True

    def __init__(self) -> None:
        #: `answers[method, path]`: each with its status, the last one again and again.
        self.answers: dict[tuple[str, str], list[tuple[int, dict[str, Any]]]] = {}
        self.asked: list[tuple[str, str, dict[str, Any]]] = []
        super().__init__(("127.0.0.1", 0), _Handler)

    def says(self, method: str, path: str, *answers: tuple[int, dict[str, Any]]) -> None:
        self.answers[method, path] = list(answers)

    def answer_to_broadcasts(self, *statuses: tuple[int | None, int | None]) -> None:
        """By the engines 0 and 1, a broadcast each."""
        told = [
            {"answers": [{"engine": n, "status": one, "body": "so"} for n, one in enumerate(both)]}
            for both in statuses
        ]
        self.says("POST", f"{SYNC}/ab/broadcast", *((200, one) for one in told))


class _Handler(BaseHTTPRequestHandler):
    server: Gateway

    def do_GET(self) -> None:
        self._answer()

    do_POST = do_DELETE = do_GET

    def _answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.asked.append((self.command, self.path, json.loads(body or b"{}")))
        told = self.server.answers[self.command, self.path]
        status, content = told.pop(0) if len(told) > 1 else told[0]
        payload = json.dumps(content).encode()
        self.send_response(status)
        for name, value in HEADERS.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    made = Gateway()
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.shutdown()
    made.server_close()
    thread.join()


@pytest.fixture
def client(gateway: Gateway) -> RolloutClient:
    url = f"http://127.0.0.1:{gateway.server_address[1]}"
    return RolloutClient(url, model="policy", sleep=lambda _: None)


def test_its_spec_is_valid_and_names_programs_that_are_there() -> None:
    spec = load_spec(FOLDER / "quickstart-llm.yaml")

    scripts = [component.command[1] for component in spec.processes.values()]
    assert scripts == [f"deployments/quickstart-llm/{name}.py" for name in ("tiny_model", "train")]
    assert all((ROOT / script).is_file() for script in scripts)
    assert spec.fleet is not None and spec.fleet.sizes.backend == "vllm"


@pytest.mark.parametrize(
    ("answer", "reward"),
    [
        (b"12345678", 1.0),
        (b"1234abcd", 0.5),
        (b"1234", 0.5),  # it ended early: what is missing is no digit
        (b"", 0.0),
    ],
)
def test_an_answer_is_rewarded_by_its_share_of_digits(answer: bytes, reward: float) -> None:
    assert reward_of(list(answer)) == reward


def test_prompts_are_of_one_length() -> None:
    lengths = {len(tokens_of(draw_prompt(random.Random(seed)))) for seed in range(100)}

    assert len(lengths) == 1
    assert lengths.pop() + ANSWER_TOKENS < 128


def test_an_answer_says_who_made_it_and_by_which_weights(
    gateway: Gateway, client: RolloutClient
) -> None:
    gateway.says("POST", "/v1/completions", (200, COMPLETION))

    answers = client.complete("1?", count=1, max_tokens=2)

    assert answers == [
        Answer(tokens=(55, 256), log_probs=(-1.5, -2.0), engine=1, epoch=3, version=7)
    ]
    [(_, _, asked)] = gateway.asked
    assert asked["n"] == 1 and asked["logprobs"] == 0 and asked["return_token_ids"] is True


@pytest.mark.parametrize("status", [500, 502, 503])
def test_a_request_that_was_lost_is_sent_again(
    gateway: Gateway, client: RolloutClient, status: int
) -> None:
    gateway.says("POST", "/v1/completions", (status, {}), (status, {}), (200, COMPLETION))

    answers = client.complete("1?", count=1, max_tokens=2)

    assert len(answers) == 1
    assert client.failures == {status: 2}


def test_a_request_that_is_wrong_is_not_sent_again(gateway: Gateway, client: RolloutClient) -> None:
    gateway.says("POST", "/v1/completions", (400, {"error": "no such model"}))

    with pytest.raises(FleetError, match="no such model"):
        client.complete("1?", count=1, max_tokens=2)

    assert len(gateway.asked) == 1


@pytest.mark.parametrize(
    ("loads", "resets", "serving", "left_out"),
    [
        ((200, 200), (200, 200), {"0": 1, "1": 4}, {}),
        ((200, 500), (200, 200), {"0": 1}, {1: "/collective_rpc: 500 so"}),
        ((200, None), (200, None), {"0": 1}, {1: "/collective_rpc: None so"}),
        # It has the weights, and still what the old ones made of prompts.
        ((200, 200), (200, 500), {"0": 1}, {1: "/reset_prefix_cache: 500 so"}),
    ],
)
def test_only_an_engine_that_did_all_it_was_sent_is_committed(
    gateway: Gateway,
    client: RolloutClient,
    loads: tuple[int | None, int | None],
    resets: tuple[int | None, int | None],
    serving: dict[str, int],
    left_out: dict[int, str],
) -> None:
    gateway.says("POST", SYNC, (200, BEGUN))
    gateway.answer_to_broadcasts(loads, resets)
    gateway.says("POST", f"{SYNC}/ab/commit", (200, {"serving": [int(one) for one in serving]}))

    synced = client.sync("/weights", version=9)

    assert gateway.asked[-1] == ("POST", f"{SYNC}/ab/commit", {"version": 9, "epochs": serving})
    assert synced.serving == tuple(int(one) for one in serving)
    assert synced.left_out == left_out
    load, reset = (body for _, path, body in gateway.asked if path.endswith("broadcast"))
    assert load["body"]["kwargs"] == {"weights_path": "/weights"}
    assert reset["path"] == "/reset_prefix_cache"


def test_a_sync_that_no_engine_took_is_given_up(gateway: Gateway, client: RolloutClient) -> None:
    gateway.says("POST", SYNC, (200, BEGUN))
    gateway.answer_to_broadcasts((500, None), (200, None))
    gateway.says("DELETE", f"{SYNC}/ab", (200, {}))

    with pytest.raises(SyncLost, match="no engine took version 9"):
        client.sync("/weights", version=9)

    assert gateway.asked[-1][:2] == ("DELETE", f"{SYNC}/ab")


@pytest.mark.parametrize(
    ("begin", "broadcast"),
    [
        (409, 200),  # requests were still under way when its time was over
        (200, 404),  # its deadline has passed meanwhile
    ],
)
def test_a_sync_that_ended_early_may_be_tried_again(
    gateway: Gateway, client: RolloutClient, begin: int, broadcast: int
) -> None:
    gateway.says("POST", SYNC, (begin, BEGUN))
    gateway.says("POST", f"{SYNC}/ab/broadcast", (broadcast, {"error": "over"}))

    with pytest.raises(SyncLost):
        client.sync("/weights", version=9)


def test_a_gateway_that_refuses_is_not_asked_again(gateway: Gateway, client: RolloutClient) -> None:
    gateway.says("POST", SYNC, (401, {"error": "unauthorized"}))

    with pytest.raises(FleetError, match="unauthorized"):
        client.sync("/weights", version=9)

    assert len(gateway.asked) == 1
