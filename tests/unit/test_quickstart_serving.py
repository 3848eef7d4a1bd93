"""The quickstart's inference server, asked over HTTP as Atropos and others ask it."""

from __future__ import annotations

import json
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "deployments" / "quickstart"))

from copy_task import EOS, VOCABULARY, prompt_of, text_of
from policy import Policy, context_of, forward, initial_policy
from sampler import Sampler
from serving import InferenceServer

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


def test_log_probs_are_the_policys_own(server: InferenceServer) -> None:
    policy = initial_policy(np.random.default_rng(0))

    for temperature in (1.0, 0.5, 0.0):
        body = {"prompt": {"prompt_token_ids": PROMPT}, "temperature": temperature}
        _, answer = ask(server, "/generate", body)
        tokens = answer["token_ids"][0]
        contexts = [context_of(PROMPT + tokens[:at]) for at in range(len(tokens))]
        wanted = forward(policy, np.array(contexts)).log_probs[np.arange(len(tokens)), tokens]

        got = [next(iter(position[0].values())) for position in answer["logprobs"][0]]

        assert got == pytest.approx(list(wanted))


def test_answer_stops_after_eos_or_at_the_token_limit() -> None:
    body = {"prompt": {"prompt_token_ids": PROMPT}, "max_tokens": 3}

    with InferenceServer(a_sampler(always(EOS)), port=0) as server:
        _, stopped = ask(server, "/generate", body)
        server.sampler.load(always(6), step=5)
        _, cut_off = ask(server, "/generate", body)

    assert (stopped["token_ids"], stopped["finish_reasons"]) == ([[EOS]], ["stop"])
    assert (cut_off["token_ids"], cut_off["finish_reasons"]) == ([[6, 6, 6]], ["length"])


def test_prompt_may_be_text() -> None:
    text, tokens = (
        a_sampler_asked({"prompt": prompt, "n": 4})
        for prompt in (text_of(PROMPT), {"prompt_token_ids": PROMPT})
    )

    assert text == tokens


def a_sampler_asked(body: Mapping[str, Any]) -> Any:
    with InferenceServer(a_sampler(), port=0) as server:
        return ask(server, "/generate", body)[1]["token_ids"]


def test_completions_answer_as_openai_does() -> None:
    with InferenceServer(a_sampler(always(3)), port=0) as server:
        status, answer = ask(server, "/v1/completions", {"prompt": "7.0.4.2.=", "max_tokens": 2})

    assert status == 200
    assert answer["object"] == "text_completion"
    assert answer["choices"] == [
        {"index": 0, "text": "3.3", "finish_reason": "length", "logprobs": None}
    ]


def test_sampling_follows_the_policys_distribution() -> None:
    policy = replace(
        always(0), output_bias=np.log(np.array([0.7, 0.3] + [1e-9] * (len(VOCABULARY) - 2)))
    )
    policy = replace(policy, output_weight=np.zeros_like(policy.output_weight))

    completions = a_sampler(policy).sample(PROMPT, count=4000, max_tokens=1)

    share = sum(one.tokens == (0,) for one in completions) / len(completions)
    assert share == pytest.approx(0.7, abs=0.05)
    assert {one.tokens for one in completions} == {(0,), (1,)}


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
def test_bad_request_is_answered_with_what_is_wrong(
    server: InferenceServer, body: object, complaint: str
) -> None:
    status, answer = ask(server, "/generate", body)

    assert status == 400
    assert complaint in answer["error"]


@pytest.mark.parametrize(("path", "body"), [("/", None), ("/healthz", None), ("/generate/", {})])
def test_unknown_path_is_not_found(server: InferenceServer, path: str, body: object) -> None:
    assert ask(server, path, body)[0] == 404


def test_a_whole_batch_may_ask_at_once(server: InferenceServer) -> None:
    body = {"prompt": {"prompt_token_ids": PROMPT}, "n": 8, "max_tokens": 5}

    with ThreadPoolExecutor(64) as pool:
        answers = list(pool.map(lambda _: ask(server, "/generate", body), range(128)))

    assert all(status == 200 and len(answer["token_ids"]) == 8 for status, answer in answers)


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


def test_taken_port_is_an_error_at_once(server: InferenceServer) -> None:
    with pytest.raises(OSError, match="in use"):
        InferenceServer(a_sampler(), port=server.server_address[1])
