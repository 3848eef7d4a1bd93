"""A fake vLLM server without torch, with vLLM's requests for new weights and vLLM's failures.

    python tests/support/vllm_server.py serve MODEL --host HOST --port PORT ...

The function `install_program` creates a program `vllm` that starts this server. The weights are a
folder with a file `weights.json`, for example `{"scale": 1.5}`. The log-probabilities of an answer
depend on the weights (`log_prob`), so a test can compute which weights produced an answer.

| request | answer, as from vLLM |
| --- | --- |
| `GET /health` | 200, even if the engine core hangs; 503 if the engine core is dead |
| `POST /v1/completions` | tokens with log-probabilities; 500 if the engine core is dead |
| `POST /collective_rpc` `reload_weights` | loads the weights of a folder; 500 if it cannot |
| `POST /reset_prefix_cache` | clears the prefix cache; cached prompts use the old weights |
| `POST /pause?mode=abort\\|wait\\|keep` | aborts, awaits or suspends the running completions |
| `POST /resume` | ends the pause |

After a failed reload of weights, the next completion kills the engine core, unless a reload
succeeds first. SIGUSR1 lets the engine core hang, which the front end does not notice. SIGUSR2
kills the engine core, and the front end then exits with code 0.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socketserver
import sys
import threading
import time
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

#: Name of the file with the weights.
WEIGHTS = "weights.json"
#: vLLM's error message for requests to a dead engine core.
DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."
#: Seconds from the death of the engine core until the front end exits.
LEAVES_AFTER_S = 0.5
#: Seconds that the server needs for each token.
TOKEN_S = 0.002


def install_program(folder: Path) -> Path:
    """Write an executable `vllm` into a folder, and return the folder.

    The executable starts the fake server of this module.
    """
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "vllm"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{Path(__file__)}" "$@"\n')
    program.chmod(0o755)
    return folder


def save_weights(folder: Path, scale: float) -> Path:
    """Write a folder of weights that the server can load, and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / WEIGHTS).write_text(json.dumps({"scale": scale}))
    return folder


def log_prob(scale: float, token: int, place: int) -> float:
    """Return the log-probability of a token, in nats.

    Args:
        scale: The fake weights: a single number. Each log-probability is multiplied by this number.
        token: The token, from 0 to 255.
        place: Position of the token in the answer, from 0.
    """
    return -scale * (1.0 + token / 256 + place)


class EngineDead(Exception):
    """The engine core is dead and executes no further request."""


class Engine:
    """The fake engine core, with its weights, its prefix cache and its running completions."""

    def __init__(self, model: Path) -> None:
        """
        Args:
            model: Folder with the first weights.
        """
        #: The current fake weights: a single number. Each log-probability is multiplied by this
        #: number.
        self._scale = _load_weights(model)
        #: Prefix cache: mapping from a prompt to the weights that produced the first answer to the
        #: prompt. Later answers to the prompt use the same weights.
        self._cache: dict[str, float] = {}
        #: Condition (a lock) that protects all attributes, and that is notified after each change.
        self._changed = threading.Condition()
        #: Number of running completions.
        self._running = 0
        #: Number of pauses with the mode `abort` since the start of the server.
        self._aborts = 0
        #: Mode of the current pause: `abort`, `wait` or `keep`. Empty if there is no pause. New
        #: completions wait for the end of the pause. In the mode `keep`, running completions wait,
        #: too.
        self._pause_mode = ""
        #: True if the next completion kills the engine core.
        self._is_poisoned = False
        self.is_dead = False
        self.is_hung = False

    def complete(self, prompt: str, tokens: int) -> tuple[list[int], list[float], str]:
        """Return the tokens of an answer, their log-probabilities, and the finish reason.

        Args:
            prompt: The prompt.
            tokens: Number of tokens to generate.

        Raises:
            EngineDead: The engine core is dead.
        """
        with self._changed:
            self._wait_while(lambda: bool(self._pause_mode))
            if self._is_poisoned:
                self.die()
            self._raise_if_dead()
            scale = self._cache.setdefault(prompt, self._scale)
            aborts_before = self._aborts
            self._running += 1

        generated: list[int] = []
        try:
            while len(generated) < tokens:
                time.sleep(TOKEN_S)
                with self._changed:
                    self._wait_while(lambda: self._pause_mode == "keep")
                    if self._aborts != aborts_before:
                        break
                generated.append((sum(prompt.encode()) + len(generated)) % 256)
        finally:
            with self._changed:
                self._running -= 1
                self._changed.notify_all()

        scores = [log_prob(scale, token, place) for place, token in enumerate(generated)]
        return generated, scores, "length" if len(generated) == tokens else "abort"

    def reload(self, folder: str) -> None:
        """Load the weights of a folder.

        Raises:
            OSError, ValueError, KeyError, TypeError: The weights cannot be read.
            EngineDead: The engine core is dead.
        """
        with self._changed:
            self._wait_while(lambda: False)
            try:
                self._scale = _load_weights(Path(folder))
            except (OSError, ValueError, KeyError, TypeError):
                self._is_poisoned = True
                raise
            self._is_poisoned = False

    def reset_prefix_cache(self) -> None:
        """Clear the prefix cache, so that all prompts use the current weights."""
        with self._changed:
            self._wait_while(lambda: False)
            self._cache.clear()

    def pause(self, mode: str) -> None:
        """Pause the engine core. The engine core then starts no further requests.

        In the mode `keep`, the running requests stay paused. In other modes, the method waits
        until no request runs.
        """
        with self._changed:
            self._pause_mode = mode
            if mode == "abort":
                self._aborts += 1
            self._changed.notify_all()
            self._wait_while(lambda: mode != "keep" and bool(self._running))

    def resume(self) -> None:
        """End the pause of the engine core. The engine core then works on requests again."""
        with self._changed:
            self._pause_mode = ""
            self._changed.notify_all()

    def die(self) -> None:
        """Let the engine core die: running completions fail at once, and the front end exits."""
        self.is_dead = True
        threading.Timer(LEAVES_AFTER_S, os._exit, (0,)).start()

    def _wait_while(self, is_held: Any) -> None:
        """Wait while `is_held` returns True or the engine core hangs.

        The caller must hold the lock `_changed`.

        Raises:
            EngineDead: The engine core is dead.
        """
        self._raise_if_dead()
        while self.is_hung or is_held():
            self._changed.wait(0.05)
            self._raise_if_dead()

    def _raise_if_dead(self) -> None:
        if self.is_dead:
            raise EngineDead(DEAD)


def _load_weights(folder: Path) -> float:
    """Return the fake weights in a checkpoint folder: a single number, called `scale`.

    Raises:
        OSError, ValueError, KeyError, TypeError: The weights cannot be read.
    """
    if not folder.is_absolute():
        raise ValueError(f"{folder}: not absolute, so it starts from the server's own directory")
    return float(json.loads((folder / WEIGHTS).read_text())["scale"])


class Server(ThreadingHTTPServer):
    """HTTP front end of the fake vLLM server, which passes requests to the fake engine core."""

    daemon_threads = True
    request_queue_size = 256

    def __init__(self, engine: Engine, model: str, host: str, port: int) -> None:
        self.engine = engine
        self.model = model
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """Bind the socket. Unlike `HTTPServer`, do not look up the host name.

        The lookup may take seconds on a machine without DNS.
        """
        socketserver.TCPServer.server_bind(self)
        self.server_name = str(self.server_address[0])
        self.server_port = self.server_address[1]


class _Handler(BaseHTTPRequestHandler):
    """Answers the requests of one connection."""

    server: Server
    protocol_version = "HTTP/1.1"
    wbufsize = -1

    def do_GET(self) -> None:
        if self.path == "/health":
            self._answer(503 if self.server.engine.is_dead else 200)
        elif self.path == "/v1/models":
            self._answer(200, {"object": "list", "data": [{"id": self.server.model}]})
        else:
            self._answer(404, {"detail": "Not Found"})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        url = urlsplit(self.path)
        content = json.loads(body) if body.strip() else {}
        try:
            self._answer(*self._execute(url.path, parse_qs(url.query), content))
        except EngineDead as error:
            self._answer(500, _error(str(error)))

    def _execute(
        self, path: str, query: dict[str, list[str]], content: dict[str, Any]
    ) -> tuple[int, dict[str, Any]]:
        """Execute a POST request, and return the status and the JSON content of the answer.

        Args:
            path: Path of the request.
            query: Values of each parameter in the URL.
            content: JSON content of the request.

        Raises:
            EngineDead: The engine core is dead.
        """
        engine = self.server.engine
        if path == "/v1/completions":
            return self._complete(content)
        if path == "/collective_rpc" and content.get("method") == "reload_weights":
            try:
                engine.reload(content["kwargs"]["weights_path"])
            except (OSError, ValueError, KeyError, TypeError) as error:
                return 500, _error(f"Call to collective_rpc method failed: {error}")
            return 200, {"results": [None]}
        if path == "/reset_prefix_cache":
            engine.reset_prefix_cache()
            return 200, {"success": True}
        if path == "/pause":
            engine.pause(query.get("mode", ["abort"])[0])
            return 200, {"status": "paused"}
        if path == "/resume":
            engine.resume()
            return 200, {"status": "resumed"}
        return 404, {"detail": "Not Found"}

    def _complete(self, content: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        """Generate the completions of a request, and return the status and content of the answer.

        Raises:
            EngineDead: The engine core is dead.
        """
        if content["model"] != self.server.model:
            return 404, _error(f"The model `{content['model']}` does not exist.")
        choices = []
        for index in range(content.get("n", 1)):
            tokens, scores, finish_reason = self.server.engine.complete(
                content["prompt"], content.get("max_tokens", 16)
            )
            choices.append(
                {
                    "index": index,
                    "text": bytes(tokens).decode(errors="replace"),
                    "finish_reason": finish_reason,
                    "logprobs": {"token_logprobs": scores},
                    "token_ids": tokens,
                }
            )
        return 200, {"object": "text_completion", "model": content["model"], "choices": choices}

    def log_message(self, format: str, *args: object) -> None:
        """Print no log lines."""

    def _answer(self, status: int, body: dict[str, Any] | None = None) -> None:
        payload = b"" if body is None else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)


def _error(message: str) -> dict[str, Any]:
    """Return the JSON content of an error answer of vLLM."""
    return {"error": {"message": message, "type": "InternalServerError", "code": 500}}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the server until a signal ends the process."""
    parser = argparse.ArgumentParser()
    parser.add_argument("verb", choices=["serve"])
    parser.add_argument("model")
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--served-model-name")
    options, _ = parser.parse_known_args(argv)
    engine = Engine(Path(options.model))
    name = options.served_model_name or options.model
    signal.signal(signal.SIGUSR1, lambda *_: setattr(engine, "is_hung", True))
    signal.signal(signal.SIGUSR2, lambda *_: engine.die())
    Server(engine, name, options.host, options.port).serve_forever(poll_interval=0.1)
    return 0


if __name__ == "__main__":
    sys.exit(main())
