"""An inference server over HTTP, for Atropos' clients `vllm` and `openai`.

| request | response |
| --- | --- |
| GET /health | status 200 and the training step of the weights |
| POST /generate | tokens with their log-probabilities, in the format of vLLM's example server |
| GET /v1/models | the model, in the format of OpenAI |
| POST /v1/completions | text, in the format of OpenAI |
| POST /v1/chat/completions | a message, in the format of OpenAI |
| POST /update_weights_from_disk | loads new weights from a file, if `takes_weights` is set |
"""

from __future__ import annotations

import json
import socketserver
import sys
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from copy_task import EOS, VOCABULARY, format_tokens, parse_tokens
from sampler import Completion, Sampler
from weights import BadWeights, Weights

#: Name of the model in responses.
MODEL_NAME = "copy-four-digits"
#: Largest number of answers to one request.
MAX_COMPLETIONS = 1024
#: Largest number of tokens of an answer.
MAX_TOKENS = 256
#: Largest size of the body of a request, in bytes.
MAX_BODY_BYTES = 10_000_000


class BadRequest(Exception):
    """The request is invalid. The client gets status 400 and this message."""


class InferenceServer(ThreadingHTTPServer):
    """HTTP server that answers requests with a sampler, in background threads.

    An instance of this class is a context manager: the server runs while the context is open.
    """

    daemon_threads = True
    # Largest number of connections that wait until the server accepts them. The default of 5 is too
    # small, because an environment opens many connections at the same time. With a full queue, a
    # client waits a second before the next try.
    request_queue_size = 256

    def __init__(
        self, sampler: Sampler, *, port: int, host: str = "127.0.0.1", takes_weights: bool = False
    ) -> None:
        """Open the listening socket.

        Args:
            sampler: Samples the answers.
            port: Port to listen on. 0 takes any free port.
            host: Address to listen on.
            takes_weights: True to accept new weights by POST /update_weights_from_disk.

        Raises:
            OSError: The port is not free.
        """
        self.sampler = sampler
        self.takes_weights = takes_weights
        super().__init__((host, port), _Handler)
        self._thread = threading.Thread(
            target=self.serve_forever,
            # Let the thread check every 0.1 seconds whether the server was stopped.
            kwargs={"poll_interval": 0.1},
            name="inference",
            daemon=True,
        )

    def server_bind(self) -> None:
        """Bind the socket. Unlike `HTTPServer`, do not look up the host's name in the network."""
        socketserver.TCPServer.server_bind(self)
        self.server_name = str(self.server_address[0])
        self.server_port = self.server_address[1]

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Report a failed request, unless the client only closed the connection."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)

    @property
    def url(self) -> str:
        """URL of the server, without a slash at the end."""
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
    """Handles the requests of one connection."""

    server: InferenceServer
    # Buffer the response, so that it is sent as one packet. By default, headers and body are
    # separate packets, and the second packet waits for the client's acknowledgement of the first
    # packet.
    wbufsize = -1
    timeout = 60

    def do_GET(self) -> None:
        if self.path == "/health":
            self._respond(200, {"status": "ok", "step": self.server.sampler.step})
        elif self.path == "/v1/models":
            self._respond(200, list_models())
        else:
            self._respond(404, {"error": f"no such path: {self.path}"})

    def do_POST(self) -> None:
        handle = _GENERATORS.get(self.path)
        try:
            if handle is not None:
                self._respond(200, handle(self.server.sampler, self._read_json()))
            elif self.path == "/update_weights_from_disk" and self.server.takes_weights:
                self._respond(200, load_weights(self.server.sampler, self._read_json()))
            else:
                self._respond(404, {"error": f"no such path: {self.path}"})
        except BadRequest as error:
            self._respond(400, {"error": str(error)})

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing, because a line for each request would make the trainer's lines hard to
        find.
        """

    def _read_body(self) -> bytes:
        """Return the body of the request.

        Raises:
            BadRequest: The length of the body is missing, not a number, or too large.
        """
        length = self.headers.get("Content-Length") or "0"
        if not length.isdecimal() or int(length) > MAX_BODY_BYTES:
            raise BadRequest(
                f"Content-Length must be a number up to {MAX_BODY_BYTES}, found {length}"
            )
        return self.rfile.read(int(length))

    def _read_json(self) -> Mapping[str, Any]:
        """Return the JSON object in the body of the request.

        Raises:
            BadRequest: The body is not a JSON object.
        """
        try:
            body = json.loads(self._read_body())
        except ValueError as error:
            raise BadRequest(f"the body is not JSON: {error}") from error
        if not isinstance(body, dict):
            raise BadRequest("the body is not a JSON object")
        return body

    def _respond(self, status: int, body: Mapping[str, Any]) -> None:
        """Send a response with a JSON body."""
        payload = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)


def generate(sampler: Sampler, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the response to POST /generate.

    Args:
        sampler: Samples the answers.
        body: JSON body of the request: `{prompt: str | {prompt_token_ids}, n, max_tokens, ...}`.

    Returns:
        The JSON body. The item `logprobs[answer][position]` is `[{token: log_prob}]`, with the
        sampled token and the log-probability of this token.

    Raises:
        BadRequest: A value of the request is not valid.
    """
    completions = _sample(sampler, body)
    return {
        "text": [format_tokens(completion.tokens) for completion in completions],
        "token_ids": [completion.tokens for completion in completions],
        "logprobs": [
            [
                [{token: score}]
                for token, score in zip(completion.tokens, completion.log_probs, strict=True)
            ]
            for completion in completions
        ],
        "finish_reasons": [completion.finish_reason for completion in completions],
    }


def complete(sampler: Sampler, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the response to POST /v1/completions.

    Args:
        sampler: Samples the answers.
        body: JSON body of the request: `{prompt: str | [token], n, max_tokens, ...}`.

    Raises:
        BadRequest: A value of the request is not valid.
    """
    completions = _sample(sampler, body)
    return {
        "id": f"cmpl-{time.time_ns():x}",
        "object": "text_completion",
        "created": int(time.time()),
        "model": MODEL_NAME,
        "choices": [
            {
                "index": index,
                "text": format_tokens([token for token in completion.tokens if token != EOS]),
                "finish_reason": completion.finish_reason,
                "logprobs": None,
            }
            for index, completion in enumerate(completions)
        ],
    }


def chat(sampler: Sampler, body: Mapping[str, Any]) -> dict[str, Any]:
    """Return the response to POST /v1/chat/completions.

    The policy has no chat template, so the prompt is the text of the last message.

    Args:
        sampler: Samples the answers.
        body: JSON body of the request: `{messages: [{role, content}], n, max_tokens, ...}`.

    Raises:
        BadRequest: A value of the request is not valid.
    """
    max_tokens = body.get("max_completion_tokens", body.get("max_tokens", 16))
    prompt = _parse_last_message(body.get("messages"))
    response = complete(sampler, {**body, "prompt": prompt, "max_tokens": max_tokens})
    choices = [
        {
            "index": choice["index"],
            "message": {"role": "assistant", "content": choice["text"]},
            "finish_reason": choice["finish_reason"],
            "logprobs": None,
        }
        for choice in response["choices"]
    ]
    return {
        **response,
        "id": f"chat{response['id']}",
        "object": "chat.completion",
        "choices": choices,
    }


def list_models() -> dict[str, Any]:
    """Return the response to GET /v1/models."""
    model = {"id": MODEL_NAME, "object": "model", "created": 0, "owned_by": "quickstart"}
    return {"object": "list", "data": [model]}


#: Mapping from the path of a request to the function that answers a prompt.
_GENERATORS: Mapping[str, Callable[[Sampler, Mapping[str, Any]], dict[str, Any]]] = {
    "/generate": generate,
    "/v1/completions": complete,
    "/v1/chat/completions": chat,
}


def load_weights(sampler: Sampler, body: Mapping[str, Any]) -> dict[str, Any]:
    """Load new weights, and return the response to POST /update_weights_from_disk.

    Args:
        sampler: The sampler that uses the new weights from now on.
        body: JSON body of the request: `{model_path: str}`. The file at this path must be an .npz
            file with the content that `Weights.as_bytes` returns.

    Raises:
        BadRequest: The file cannot be read, or it does not contain weights of this policy.
    """
    path = body.get("model_path")
    if not isinstance(path, str):
        raise BadRequest(f"model_path must be the path of a file, but is {path!r}")
    try:
        weights = Weights.of(Path(path).read_bytes())
    except (OSError, BadWeights) as error:
        raise BadRequest(str(error)) from error
    sampler.load(weights.policy, step=weights.step)
    return {"step": weights.step}


def _sample(sampler: Sampler, body: Mapping[str, Any]) -> list[Completion]:
    """Return the answers to a request, sampled with the settings in its JSON body.

    Raises:
        BadRequest: A value of the request is not valid.
    """
    if body.get("stream"):
        raise BadRequest("this server cannot stream answers: leave `stream` out of the request")
    return sampler.sample(
        _parse_prompt(body.get("prompt")),
        count=_parse_integer(body, "n", default=1, most=MAX_COMPLETIONS),
        max_tokens=_parse_integer(body, "max_tokens", default=16, most=MAX_TOKENS),
        temperature=_parse_temperature(body),
    )


def _parse_prompt(prompt: object) -> list[int]:
    """Return the tokens of a prompt. Raise BadRequest if the prompt is not valid."""
    if isinstance(prompt, str):
        return parse_tokens(prompt)
    if isinstance(prompt, dict):
        prompt = prompt.get("prompt_token_ids")
    if not isinstance(prompt, list) or not all(
        type(token) is int and 0 <= token < len(VOCABULARY) for token in prompt
    ):
        raise BadRequest(
            f"prompt must be a text, or a list of tokens from 0 to {len(VOCABULARY) - 1}, found "
            f"{prompt!r}"
        )
    return prompt


def _parse_last_message(messages: object) -> str:
    """Return the text of the last message of a chat. Raise BadRequest if there is no text."""
    last = messages[-1] if isinstance(messages, list) and messages else None
    content = last.get("content") if isinstance(last, dict) else None
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict)]
        content = "".join(part for part in parts if isinstance(part, str))
    if not isinstance(content, str):
        raise BadRequest(
            f"messages must be a list of mappings with role and content, found {messages!r}"
        )
    return content


def _parse_integer(body: Mapping[str, Any], key: str, *, default: int, most: int) -> int:
    """Return the integer `body[key]`. Raise BadRequest unless the value is from 1 to `most`."""
    value = body.get(key, default)
    if type(value) is not int or not 1 <= value <= most:
        raise BadRequest(f"{key} must be a whole number from 1 to {most}, found {value!r}")
    return value


def _parse_temperature(body: Mapping[str, Any]) -> float:
    """Return the temperature of a request. Raise BadRequest if it is negative or not finite."""
    value = body.get("temperature", 1.0)
    if type(value) not in (int, float) or not 0 <= value < float("inf"):
        raise BadRequest(f"temperature must be a number, 0 or more, found {value!r}")
    return float(value)
