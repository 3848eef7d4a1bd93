"""HTTP requests to the quickstart's inference server, and its client for a fleet."""

from __future__ import annotations

import itertools
import json
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "deployments" / "quickstart"))

from copy_task import EOS, VOCABULARY, build_prompt
from fleet import GONE_AFTER_S, Fleet, FleetError
from policy import Policy, initial_policy
from sampler import Sampler
from serving import InferenceServer
from weights import BadWeights, Weights

PROMPT = build_prompt([7, 0, 4, 2])


def make_constant_policy(token: int) -> Policy:
    """Return a policy that always samples the given token."""
    policy = initial_policy(np.random.default_rng(0))
    return replace(policy, output_bias=50.0 * np.eye(len(VOCABULARY))[token])


def make_sampler() -> Sampler:
    """Return a sampler with an untrained policy. The sampler reports 4 as its training step."""
    policy = initial_policy(np.random.default_rng(0))
    return Sampler(policy, step=4, rng=np.random.default_rng(1))


@pytest.fixture
def server() -> Iterator[InferenceServer]:
    with InferenceServer(make_sampler(), port=0) as server:
        yield server


def send(server: InferenceServer, path: str, body: object | None = None) -> tuple[int, Any]:
    """Send a request, and return the status and the JSON of the response.

    Args:
        server: The server.
        path: Path of the request.
        body: Bytes, or an object to send as JSON. None sends a GET request.
    """
    data = body
    if body is not None and not isinstance(body, bytes):
        data = json.dumps(body).encode()
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(server.url + path, data=data, timeout=30) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_health_names_the_step_of_the_weights(server: InferenceServer) -> None:
    assert send(server, "/health") == (200, {"status": "ok", "step": 4})

    server.sampler.load(make_constant_policy(EOS), step=5)

    assert send(server, "/health") == (200, {"status": "ok", "step": 5})


def test_generate_responds_in_the_format_of_vllm(server: InferenceServer) -> None:
    body = {"prompt": {"prompt_token_ids": PROMPT}, "logprobs": 0, "n": 3, "max_tokens": 5}

    status, answer = send(server, "/generate", body)

    assert status == 200
    assert len(answer["logprobs"]) == len(answer["finish_reasons"]) == 3
    for positions, tokens in zip(answer["logprobs"], answer["token_ids"], strict=True):
        assert [int(next(iter(position[0]))) for position in positions] == tokens
        assert all(next(iter(position[0].values())) < 0 for position in positions)


def test_model_is_listed_in_the_format_of_openai(server: InferenceServer) -> None:
    status, answer = send(server, "/v1/models")

    assert (status, answer["object"]) == (200, "list")
    assert [model["id"] for model in answer["data"]] == ["copy-four-digits"]


@pytest.mark.parametrize("content", ["7.0.4.2.=", [{"type": "text", "text": "7.0.4.2.="}]])
def test_chat_is_answered_in_the_format_of_openai(server: InferenceServer, content: object) -> None:
    token = VOCABULARY.index("7")
    server.sampler.load(make_constant_policy(token), step=5)
    messages = [{"role": "system", "content": "Copy."}, {"role": "user", "content": content}]

    body = {"model": "any", "messages": messages, "n": 2, "max_completion_tokens": 3}
    status, answer = send(server, "/v1/chat/completions", body)

    assert (status, answer["object"]) == (200, "chat.completion")
    [first, second] = answer["choices"]
    assert first["message"] == {"role": "assistant", "content": "7.7.7"} == second["message"]
    assert (first["finish_reason"], second["index"]) == ("length", 1)


@pytest.mark.parametrize("messages", [None, [], ["text"], [{"role": "user"}]])
def test_chat_without_a_text_is_refused(server: InferenceServer, messages: object) -> None:
    status, answer = send(server, "/v1/chat/completions", {"messages": messages})

    assert status == 400
    assert answer["error"].startswith("messages must be ")


@pytest.mark.parametrize("path", ["/generate", "/v1/completions", "/v1/chat/completions"])
def test_stream_is_refused(server: InferenceServer, path: str) -> None:
    body = {"prompt": "7", "messages": [{"role": "user", "content": "7"}], "stream": True}

    status, answer = send(server, path, body)

    assert status == 400
    assert "leave `stream` out" in answer["error"]


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        # The body of a request must be a JSON object.
        (b"{", "not JSON"),
        ([], "not a JSON object"),
        # A request without a prompt, or with tokens outside the vocabulary, is refused.
        ({}, "prompt"),
        ({"prompt": {"prompt_token_ids": [len(VOCABULARY)]}}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": ["7"]}, "prompt"),
        # A request with a number out of range, or with a boolean instead of a number, is refused.
        ({"prompt": "7", "n": 0}, "n must be "),
        ({"prompt": "7", "n": True}, "n must be "),
        ({"prompt": "7", "max_tokens": 10**9}, "max_tokens must be "),
        ({"prompt": "7", "temperature": -1}, "temperature must be "),
        ({"prompt": "7", "temperature": float("nan")}, "temperature must be "),
    ],
)
def test_response_to_a_bad_request_names_the_fault(
    server: InferenceServer, body: object, complaint: str
) -> None:
    status, answer = send(server, "/generate", body)

    assert status == 400
    assert complaint in answer["error"]


def test_answers_use_one_version_of_weights_during_a_change(server: InferenceServer) -> None:
    body = {"prompt": {"prompt_token_ids": PROMPT}, "n": 8, "max_tokens": 20, "temperature": 0}
    policies = [make_constant_policy(1), make_constant_policy(2)]
    server.sampler.load(policies[0], step=0)

    with ThreadPoolExecutor(8) as pool:
        requests = [pool.submit(send, server, "/generate", body) for _ in range(100)]
        for step in range(1000):
            server.sampler.load(policies[step % 2], step=step)
        answers = [request.result()[1]["token_ids"] for request in requests]

    # All tokens of an answer were sampled with the same weights.
    assert all(answer in ([[1] * 20] * 8, [[2] * 20] * 8) for answer in answers)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not an archive",
        # The file of weights is truncated, so it is rejected.
        Weights(policy=make_constant_policy(1), step=7).as_bytes()[:-100],
        # The weights belong to a policy of another size, so they are rejected.
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
def test_invalid_weights_are_rejected(content: bytes) -> None:
    with pytest.raises(BadWeights):
        Weights.of(content)


def test_server_loads_weights_from_a_file_and_rejects_a_truncated_file(tmp_path: Path) -> None:
    path = tmp_path / "weights.npz"
    path.write_bytes(Weights(policy=make_constant_policy(1), step=9).as_bytes())
    with InferenceServer(make_sampler(), port=0, takes_weights=True) as server:
        complete_file = send(server, "/update_weights_from_disk", {"model_path": str(path)})
        path.write_bytes(path.read_bytes()[:-100])
        status, answer = send(server, "/update_weights_from_disk", {"model_path": str(path)})
        step = server.sampler.step

    assert complete_file == (200, {"step": 9})
    assert (status, step) == (400, 9)
    assert "not weights" in answer["error"]


def test_server_of_the_trainer_loads_no_weights(server: InferenceServer) -> None:
    status, _answer = send(server, "/update_weights_from_disk", {"model_path": "/weights.npz"})

    assert (status, server.sampler.step) == (404, 4)


def test_push_fails_at_once_if_refused_and_after_retries_if_the_gateway_is_gone(
    tmp_path: Path,
) -> None:
    seconds = itertools.count()
    pauses: list[float] = []
    with InferenceServer(make_sampler(), port=0) as server_without_gateway:
        fleet = Fleet(
            server_without_gateway.url,
            folder=tmp_path,
            clock=lambda: float(next(seconds)),
            sleep=pauses.append,
        )
        with pytest.raises(FleetError, match=r"POST .*/muster/rollout/sync with HTTP status 404"):
            fleet.push(make_constant_policy(1), step=1)
        assert pauses == []

    with pytest.raises(FleetError, match="the gateway no longer answers"):
        fleet.push(make_constant_policy(1), step=1)

    assert 0 < len(pauses) < GONE_AFTER_S
