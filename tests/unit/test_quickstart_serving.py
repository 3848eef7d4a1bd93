"""The quickstart's inference server, asked over HTTP as Atropos and others ask it."""

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

from copy_task import EOS, VOCABULARY, prompt_of
from fleet import GONE_AFTER_S, Fleet, FleetError
from policy import Policy, initial_policy
from sampler import Sampler
from serving import InferenceServer
from weights import BadWeights, Weights

PROMPT = prompt_of([7, 0, 4, 2])


def always(token: int) -> Policy:
    """A policy that gives `token`, whatever it reads."""
    policy = initial_policy(np.random.default_rng(0))
    return replace(policy, output_bias=50.0 * np.eye(len(VOCABULARY))[token])


def a_sampler(policy: Policy | None = None) -> Sampler:
    policy = policy or initial_policy(np.random.default_rng(0))
    return Sampler(policy, step=4, rng=np.random.default_rng(1))


@pytest.fixture
def server() -> Iterator[InferenceServer]:
    with InferenceServer(a_sampler(), port=0) as server:
        yield server


def ask(server: InferenceServer, path: str, body: object | None = None) -> tuple[int, Any]:
    """The status and the JSON of the answer."""
    data = body if isinstance(body, bytes) else None if body is None else json.dumps(body).encode()
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(server.url + path, data=data, timeout=30) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_health_tells_the_step_of_the_weights(server: InferenceServer) -> None:
    assert ask(server, "/health") == (200, {"status": "ok", "step": 4})

    server.sampler.load(always(EOS), step=5)

    assert ask(server, "/health") == (200, {"status": "ok", "step": 5})


def test_generate_answers_as_the_vllm_client_reads_it(server: InferenceServer) -> None:
    body = {"prompt": {"prompt_token_ids": PROMPT}, "logprobs": 0, "n": 3, "max_tokens": 5}

    status, answer = ask(server, "/generate", body)

    assert status == 200
    assert len(answer["logprobs"]) == len(answer["finish_reasons"]) == 3
    for positions, tokens in zip(answer["logprobs"], answer["token_ids"], strict=True):
        assert [int(next(iter(position[0]))) for position in positions] == tokens
        assert all(next(iter(position[0].values())) < 0 for position in positions)


@pytest.mark.parametrize(
    ("body", "complaint"),
    [
        # Not JSON, and JSON of another shape.
        (b"{", "not JSON"),
        ([], "not a JSON object"),
        # No prompt, and tokens outside the vocabulary.
        ({}, "prompt"),
        ({"prompt": {"prompt_token_ids": [len(VOCABULARY)]}}, "prompt"),
        ({"prompt": [-1]}, "prompt"),
        ({"prompt": ["7"]}, "prompt"),
        # Numbers out of range, and what only looks like a number.
        ({"prompt": "7", "n": 0}, "n:"),
        ({"prompt": "7", "n": True}, "n:"),
        ({"prompt": "7", "max_tokens": 10**9}, "max_tokens:"),
        ({"prompt": "7", "temperature": -1}, "temperature:"),
        ({"prompt": "7", "temperature": float("nan")}, "temperature:"),
    ],
)
def test_bad_request_is_told_why(server: InferenceServer, body: object, complaint: str) -> None:
    status, answer = ask(server, "/generate", body)

    assert status == 400
    assert complaint in answer["error"]


def test_weights_may_be_swapped_while_answers_are_under_way(server: InferenceServer) -> None:
    body = {"prompt": {"prompt_token_ids": PROMPT}, "n": 8, "max_tokens": 20, "temperature": 0}
    policies = [always(1), always(2)]
    server.sampler.load(policies[0], step=0)

    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(ask, server, "/generate", body) for _ in range(100)]
        for step in range(1000):
            server.sampler.load(policies[step % 2], step=step)
        answers = [future.result()[1]["token_ids"] for future in asked]

    # Each answer comes from one set of weights or the other, never from both.
    assert all(answer in ([[1] * 20] * 8, [[2] * 20] * 8) for answer in answers)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not an archive",
        # Cut short on the way.
        Weights(policy=always(1), step=7).as_bytes()[:-100],
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


def test_a_server_reads_its_weights_from_a_file_or_keeps_those_it_has(tmp_path: Path) -> None:
    path = tmp_path / "weights.npz"
    path.write_bytes(Weights(policy=always(1), step=9).as_bytes())
    with InferenceServer(a_sampler(), port=0, takes_weights=True) as server:
        took = ask(server, "/update_weights_from_disk", {"model_path": str(path)})
        path.write_bytes(path.read_bytes()[:-100])
        status, answer = ask(server, "/update_weights_from_disk", {"model_path": str(path)})
        step = server.sampler.step

    assert took == (200, {"step": 9})
    assert (status, step) == (400, 9)
    assert "not weights" in answer["error"]


def test_the_trainers_own_server_takes_no_weights(server: InferenceServer) -> None:
    status, _answer = ask(server, "/update_weights_from_disk", {"model_path": "/weights.npz"})

    assert (status, server.sampler.step) == (404, 4)


def test_a_gateway_that_refuses_is_an_error_at_once_and_one_that_is_gone_after_a_while(
    tmp_path: Path,
) -> None:
    seconds = itertools.count()
    slept: list[float] = []
    with InferenceServer(a_sampler(), port=0) as no_gateway:
        fleet = Fleet(
            no_gateway.url,
            folder=tmp_path,
            clock=lambda: float(next(seconds)),
            sleep=slept.append,
        )
        with pytest.raises(FleetError, match=r"POST .*/muster/rollout/sync: 404"):
            fleet.push(always(1), step=1)
        assert slept == []

    with pytest.raises(FleetError, match="the fleet went away"):
        fleet.push(always(1), step=1)

    assert 0 < len(slept) < GONE_AFTER_S
