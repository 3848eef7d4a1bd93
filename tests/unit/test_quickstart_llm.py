"""Requests of the vLLM quickstart's trainer to a fake gateway, and its use of the responses."""

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

from digits_task import ANSWER_TOKENS, compute_reward, draw_prompt, tokenize
from rollout_client import Answer, FleetError, RolloutClient, SyncLost

from tasks.spec.loading import load_spec

SYNC = "/muster/rollout/sync"
HEADERS = {"X-Muster-Engine": "1", "X-Muster-Epoch": "3", "X-Muster-Version": "7"}
COMPLETION = {"choices": [{"token_ids": [55, 256], "logprobs": {"token_logprobs": [-1.5, -2.0]}}]}
BEGUN = {"sync": "ab", "targets": [{"engine": 0, "epoch": 1}, {"engine": 1, "epoch": 4}]}


class Gateway(ThreadingHTTPServer):
    """A fake gateway that gives prepared responses and keeps the requests."""

    daemon_threads = True

    def __init__(self) -> None:
        #: `responses[method, path]`: status and JSON body of each prepared response. The last
        #: response is repeated for all further requests.
        self.responses: dict[tuple[str, str], list[tuple[int, dict[str, Any]]]] = {}
        #: Method, path and JSON body of each request.
        self.requests: list[tuple[str, str, dict[str, Any]]] = []
        super().__init__(("127.0.0.1", 0), _Handler)

    def respond(self, method: str, path: str, *responses: tuple[int, dict[str, Any]]) -> None:
        """Prepare the responses to requests with this method and path, in the order of requests."""
        self.responses[method, path] = list(responses)

    def respond_to_broadcasts(self, *statuses: tuple[int | None, int | None]) -> None:
        """Prepare the responses to broadcasts.

        Args:
            statuses: A pair of HTTP statuses for each broadcast: from engine 0 and from engine 1.
                None means that the engine does not answer.
        """
        bodies = [
            {
                "answers": [
                    {"engine": engine, "status": status, "body": "so"}
                    for engine, status in enumerate(engine_statuses)
                ]
            }
            for engine_statuses in statuses
        ]
        self.respond("POST", f"{SYNC}/ab/broadcast", *((200, body) for body in bodies))


class _Handler(BaseHTTPRequestHandler):
    server: Gateway

    def do_GET(self) -> None:
        self._respond()

    do_POST = do_DELETE = do_GET

    def _respond(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.server.requests.append((self.command, self.path, json.loads(body or b"{}")))
        responses = self.server.responses[self.command, self.path]
        status, content = responses.pop(0) if len(responses) > 1 else responses[0]
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
    server = Gateway()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.fixture
def client(gateway: Gateway) -> RolloutClient:
    url = f"http://127.0.0.1:{gateway.server_address[1]}"
    return RolloutClient(url, model="policy", sleep=lambda _: None)


def test_run_spec_is_valid_and_names_existing_programs() -> None:
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
        # The missing tokens of a short answer count as wrong.
        (b"1234", 0.5),
        (b"", 0.0),
    ],
)
def test_reward_is_the_share_of_digits_in_the_answer(answer: bytes, reward: float) -> None:
    assert compute_reward(list(answer)) == reward


def test_all_prompts_have_the_same_length() -> None:
    lengths = {len(tokenize(draw_prompt(random.Random(seed)))) for seed in range(100)}

    assert len(lengths) == 1
    assert lengths.pop() + ANSWER_TOKENS < 128


def test_answer_names_its_engine_and_weight_version(
    gateway: Gateway, client: RolloutClient
) -> None:
    gateway.respond("POST", "/v1/completions", (200, COMPLETION))

    answers = client.complete("1?", count=1, max_tokens=2)

    assert answers == [
        Answer(tokens=(55, 256), log_probs=(-1.5, -2.0), engine=1, epoch=3, version=7)
    ]
    [(_, _, body)] = gateway.requests
    assert body["n"] == 1 and body["logprobs"] == 0 and body["return_token_ids"] is True


@pytest.mark.parametrize("status", [500, 502, 503])
def test_request_is_sent_again_after_a_server_error(
    gateway: Gateway, client: RolloutClient, status: int
) -> None:
    gateway.respond("POST", "/v1/completions", (status, {}), (status, {}), (200, COMPLETION))

    answers = client.complete("1?", count=1, max_tokens=2)

    assert len(answers) == 1
    assert client.failures == {status: 2}


def test_request_is_not_sent_again_after_a_client_error(
    gateway: Gateway, client: RolloutClient
) -> None:
    gateway.respond("POST", "/v1/completions", (400, {"error": "no such model"}))

    with pytest.raises(FleetError, match="no such model"):
        client.complete("1?", count=1, max_tokens=2)

    assert len(gateway.requests) == 1


@pytest.mark.parametrize(
    ("loads", "resets", "serving", "left_out"),
    [
        ((200, 200), (200, 200), {"0": 1, "1": 4}, {}),
        ((200, 500), (200, 200), {"0": 1}, {1: "/collective_rpc: 500 so"}),
        ((200, None), (200, None), {"0": 1}, {1: "/collective_rpc: None so"}),
        # Engine 1 has the new weights. Its prefix cache could not be reset, so the cache still
        # belongs to the old weights.
        ((200, 200), (200, 500), {"0": 1}, {1: "/reset_prefix_cache: 500 so"}),
    ],
)
def test_only_engines_that_executed_all_broadcasts_are_committed(
    gateway: Gateway,
    client: RolloutClient,
    loads: tuple[int | None, int | None],
    resets: tuple[int | None, int | None],
    serving: dict[str, int],
    left_out: dict[int, str],
) -> None:
    engines = [int(engine) for engine in serving]
    gateway.respond("POST", SYNC, (200, BEGUN))
    gateway.respond_to_broadcasts(loads, resets)
    gateway.respond("POST", f"{SYNC}/ab/commit", (200, {"serving": engines}))

    synced = client.sync("/weights", version=9)

    assert gateway.requests[-1] == ("POST", f"{SYNC}/ab/commit", {"version": 9, "epochs": serving})
    assert synced.serving == tuple(engines)
    assert synced.left_out == left_out
    load, reset = (body for _, path, body in gateway.requests if path.endswith("broadcast"))
    assert load["body"]["kwargs"] == {"weights_path": "/weights"}
    assert reset["path"] == "/reset_prefix_cache"


def test_sync_is_aborted_if_no_engine_loaded_the_weights(
    gateway: Gateway, client: RolloutClient
) -> None:
    gateway.respond("POST", SYNC, (200, BEGUN))
    gateway.respond_to_broadcasts((500, None), (200, None))
    gateway.respond("DELETE", f"{SYNC}/ab", (200, {}))

    with pytest.raises(SyncLost, match="no inference engine loaded the weights of version 9"):
        client.sync("/weights", version=9)

    assert gateway.requests[-1][:2] == ("DELETE", f"{SYNC}/ab")


@pytest.mark.parametrize(
    ("begin", "broadcast"),
    [
        # The gateway refuses to begin the weight update, because running requests did not end in
        # time.
        (409, 200),
        # The gateway has begun the weight update, but refuses the broadcast, because the deadline
        # has passed.
        (200, 404),
    ],
)
def test_sync_that_ended_early_raises_sync_lost(
    gateway: Gateway, client: RolloutClient, begin: int, broadcast: int
) -> None:
    gateway.respond("POST", SYNC, (begin, BEGUN))
    gateway.respond("POST", f"{SYNC}/ab/broadcast", (broadcast, {"error": "over"}))

    with pytest.raises(SyncLost):
        client.sync("/weights", version=9)


def test_refused_sync_is_not_requested_again(gateway: Gateway, client: RolloutClient) -> None:
    gateway.respond("POST", SYNC, (401, {"error": "unauthorized"}))

    with pytest.raises(FleetError, match="unauthorized"):
        client.sync("/weights", version=9)

    assert len(gateway.requests) == 1
