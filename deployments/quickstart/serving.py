"""Inference over HTTP, in the form that Atropos' `vllm` and `openai` clients speak.

| request | answer |
| --- | --- |
| GET /health | 200 and the training step of the weights |
| POST /generate | tokens with their log-probabilities, as vLLM's example server gives them |
| POST /v1/completions | text only, as OpenAI gives it |
| POST /update_weights_from_disk | serves the weights of a file from now on, where it was made to |
"""

from __future__ import annotations

import json
import socketserver
import sys
import threading
import time
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from copy_task import EOS, VOCABULARY, text_of, tokens_of
from sampler import Completion, Sampler
from weights import BadWeights, Weights

MODEL_NAME = "copy-four-digits"
MAX_COMPLETIONS = 1024
MAX_TOKENS = 256
MAX_BODY_BYTES = 10_000_000


class BadRequest(Exception):
    """The request is invalid. The client gets status 400 and this message."""


class InferenceServer(ThreadingHTTPServer):
    """Serves a sampler from threads of its own, between `__enter__` and `__exit__`.

    The socket listens once the object exists, so a port that is taken raises `OSError` there.
    """

    daemon_threads = True
    # An environment opens a connection a request, a batch of them at once; the default of 5
    # makes the rest wait a second for their next SYN.
    request_queue_size = 256

    def __init__(
        self, sampler: Sampler, *, port: int, host: str = "127.0.0.1", takes_weights: bool = False
    ) -> None:
        self.sampler = sampler
        self.takes_weights = takes_weights
        super().__init__((host, port), _Handler)
        self._thread = threading.Thread(
            target=self.serve_forever,
            # How long stopping may take.
            kwargs={"poll_interval": 0.1},
            name="inference",
            daemon=True,
        )

    def server_bind(self) -> None:
        """Bind without the name lookup that `HTTPServer` adds: it may ask a name server."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report a failed request, unless the client only closed the connection."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        return f"http://{self.server_name}:{self.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: InferenceServer
    # With the default, headers and body leave as two small packets, and the second waits for the
    # client's delayed acknowledgement of the first.
    wbufsize = -1
    timeout = 60

    def do_GET(self) -> None:
        if self.path == "/health":
            self._answer(200, {"status": "ok", "step": self.server.sampler.step})
        else:
            self._answer(404, {"error": f"no such path: {self.path}"})

    def do_POST(self) -> None:
        serve = {"/generate": generate, "/v1/completions": complete}.get(self.path)
        try:
            if serve is not None:
                self._answer(200, serve(self.server.sampler, self._json()))
            elif self.path == "/update_weights_from_disk" and self.server.takes_weights:
                self._answer(200, take_weights(self.server.sampler, self._json()))
            else:
                self._answer(404, {"error": f"no such path: {self.path}"})
        except BadRequest as error:
            self._answer(400, {"error": str(error)})

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing: a line for each request would hide the trainer's lines."""

    def _body(self) -> bytes:
        length = self.headers.get("Content-Length") or "0"
        if not length.isdecimal() or int(length) > MAX_BODY_BYTES:
            raise BadRequest(f"Content-Length: a number up to {MAX_BODY_BYTES}, not {length}")
        return self.rfile.read(int(length))

    def _json(self) -> Mapping[str, Any]:
        try:
            body = json.loads(self._body())
        except ValueError as error:
            raise BadRequest(f"the body is not JSON: {error}") from error
        if not isinstance(body, dict):
            raise BadRequest("the body is not a JSON object")
        return body

    def _answer(self, status: int, body: Mapping[str, Any]) -> None:
        payload = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)


def generate(sampler: Sampler, body: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to POST /generate: `{prompt: str | {prompt_token_ids}, n, max_tokens, ...}`.

    `logprobs[answer][position]` is a list of one `{token: log-probability}`.
    """
    completions = _sample(sampler, body)
    return {
        "text": [text_of(one.tokens) for one in completions],
        "token_ids": [one.tokens for one in completions],
        "logprobs": [
            [[{token: score}] for token, score in zip(one.tokens, one.log_probs, strict=True)]
            for one in completions
        ],
        "finish_reasons": [one.finish_reason for one in completions],
    }


def complete(sampler: Sampler, body: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to POST /v1/completions: `{prompt: str | [token], n, max_tokens, ...}`."""
    completions = _sample(sampler, body)
    return {
        "id": f"cmpl-{time.time_ns():x}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": MODEL_NAME,
        "choices": [
            {
                "index": index,
                "text": text_of([token for token in one.tokens if token != EOS]),
                "finish_reason": one.finish_reason,
                "logprobs": None,
            }
            for index, one in enumerate(completions)
        ],
    }


def take_weights(sampler: Sampler, body: Mapping[str, Any]) -> dict[str, Any]:
    """The answer to POST /update_weights_from_disk, whose file is that of `Weights.as_bytes`."""
    path = body.get("model_path")
    if not isinstance(path, str):
        raise BadRequest(f"model_path: the path of a file, not {path!r}")
    try:
        weights = Weights.of(Path(path).read_bytes())
    except (OSError, BadWeights) as error:
        raise BadRequest(str(error)) from error
    sampler.load(weights.policy, step=weights.step)
    return {"step": weights.step}


def _sample(sampler: Sampler, body: Mapping[str, Any]) -> list[Completion]:
    return sampler.sample(
        _prompt(body.get("prompt")),
        count=_integer(body, "n", default=1, most=MAX_COMPLETIONS),
        max_tokens=_integer(body, "max_tokens", default=16, most=MAX_TOKENS),
        temperature=_temperature(body),
    )


def _prompt(prompt: object) -> list[int]:
    if isinstance(prompt, str):
        return tokens_of(prompt)
    if isinstance(prompt, dict):
        prompt = prompt.get("prompt_token_ids")
    if not isinstance(prompt, list) or not all(
        type(token) is int and 0 <= token < len(VOCABULARY) for token in prompt
    ):
        raise BadRequest(f"prompt: a text or tokens from 0 to {len(VOCABULARY) - 1}: {prompt!r}")
    return prompt


def _integer(body: Mapping[str, Any], key: str, *, default: int, most: int) -> int:
    value = body.get(key, default)
    if type(value) is not int or not 1 <= value <= most:
        raise BadRequest(f"{key}: an integer from 1 to {most}, not {value!r}")
    return value


def _temperature(body: Mapping[str, Any]) -> float:
    value = body.get("temperature", 1.0)
    if type(value) not in (int, float) or not 0 <= value < float("inf"):
        raise BadRequest(f"temperature: a number of 0 or more, not {value!r}")
    return float(value)
