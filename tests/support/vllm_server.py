"""Stands in for vLLM: speaks its protocol for new weights, and dies as it does. No torch.

    python tests/support/vllm_server.py serve MODEL --host HOST --port PORT ...

`installed` puts it on a PATH as `vllm`. Weights are a folder with `weights.json`, `{"scale": 1.5}`;
`log_prob` is what each token of an answer then gets, so that whoever knows the weights of a version
can tell which ones an answer was made with.

| request | answer, as vLLM's |
| --- | --- |
| `GET /health` | 200, also of an engine that hangs; 503 once its engine core is dead |
| `POST /v1/completions` | tokens with their log-probabilities; an engine core that is dead: 500 |
| `POST /collective_rpc` `reload_weights` | the weights of a folder; 500 where they can't be read |
| `POST /reset_prefix_cache` | forgets prompts: until then they are answered by old weights |
| `POST /pause?mode=abort\\|wait\\|keep`, `/resume` | ends, awaits or holds what is under way |

A failed reload leaves an engine whose next completion kills it, unless a good one comes before.
SIGUSR1: the engine core hangs, and the front end does not notice. SIGUSR2: the engine core dies,
and the front end leaves with exit code 0 a moment later.
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

WEIGHTS = "weights.json"
DEAD = "EngineCore encountered an issue. See stack trace (above) for the root cause."
#: Between the death of an engine core and the end of its front end.
LEAVES_AFTER_S = 0.5
TOKEN_S = 0.002


def installed(folder: Path) -> Path:
    """The folder, with this server in it as the program `vllm`."""
    folder.mkdir(parents=True, exist_ok=True)
    program = folder / "vllm"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{Path(__file__)}" "$@"\n')
    program.chmod(0o755)
    return folder


def save_weights(folder: Path, scale: float) -> Path:
    """The folder, with weights that a server can load."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / WEIGHTS).write_text(json.dumps({"scale": scale}))
    return folder


def log_prob(scale: float, token: int, place: int) -> float:
    """Of a token at a place of an answer, in nats."""
    return -scale * (1.0 + token / 256 + place)


class EngineDead(Exception):
    """The engine core is dead; whoever asks from now on hears of it."""


class Engine:
    """The engine core: weights, prefix cache, and what is under way."""

    def __init__(self, model: Path) -> None:
        self._scale = _loaded(model)
        self._cache: dict[str, float] = {}
        self._changed = threading.Condition()
        self._under_way = 0
        self._aborts = 0
        #: What holds new answers, and each further token where it is `keep`.
        self._paused = ""
        self._is_poisoned = False
        self.is_dead = False
        self.is_hung = False

    def complete(self, prompt: str, tokens: int) -> tuple[list[int], list[float], str]:
        """Tokens, their log-probabilities, and why the answer ended.

        Raises: EngineDead.
        """
        with self._changed:
            self._wait_while(lambda: bool(self._paused))
            if self._is_poisoned:
                self.die()
            self._check()
            scale, aborts = self._cache.setdefault(prompt, self._scale), self._aborts
            self._under_way += 1
        made: list[int] = []
        try:
            while len(made) < tokens:
                time.sleep(TOKEN_S)
                with self._changed:
                    self._wait_while(lambda: self._paused == "keep")
                    if self._aborts != aborts:
                        break
                made.append((sum(prompt.encode()) + len(made)) % 256)
        finally:
            with self._changed:
                self._under_way -= 1
                self._changed.notify_all()
        scores = [log_prob(scale, token, place) for place, token in enumerate(made)]
        return made, scores, "length" if len(made) == tokens else "abort"

    def reload(self, folder: str) -> None:
        """Raises: OSError or ValueError, where the weights can't be read; EngineDead."""
        with self._changed:
            self._wait_while(lambda: False)
            try:
                self._scale = _loaded(Path(folder))
            except (OSError, ValueError, KeyError, TypeError):
                self._is_poisoned = True
                raise
            self._is_poisoned = False

    def reset_prefix_cache(self) -> None:
        with self._changed:
            self._wait_while(lambda: False)
            self._cache.clear()

    def pause(self, mode: str) -> None:
        """Returns once it is so."""
        with self._changed:
            self._paused = mode
            if mode == "abort":
                self._aborts += 1
            self._changed.notify_all()
            self._wait_while(lambda: mode != "keep" and bool(self._under_way))

    def resume(self) -> None:
        with self._changed:
            self._paused = ""
            self._changed.notify_all()

    def die(self) -> None:
        """As by SIGKILL: what is under way fails at once, the front end follows."""
        self.is_dead = True
        threading.Timer(LEAVES_AFTER_S, os._exit, (0,)).start()

    def _wait_while(self, is_held: Any) -> None:
        """Holding the lock; a hung engine waits for ever. Raises: EngineDead."""
        self._check()
        while self.is_hung or is_held():
            self._changed.wait(0.05)
            self._check()

    def _check(self) -> None:
        if self.is_dead:
            raise EngineDead(DEAD)


def _loaded(folder: Path) -> float:
    if not folder.is_absolute():
        raise ValueError(f"{folder}: not absolute, so it starts from the server's own directory")
    return float(json.loads((folder / WEIGHTS).read_text())["scale"])


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def __init__(self, engine: Engine, model: str, host: str, port: int) -> None:
        self.engine = engine
        self.model = model
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """Bind without the name lookup that `HTTPServer` adds."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]


class _Handler(BaseHTTPRequestHandler):
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
        asked = json.loads(body) if body.strip() else {}
        try:
            self._answer(*self._answered(url.path, parse_qs(url.query), asked))
        except EngineDead as error:
            self._answer(500, _error(str(error)))

    def _answered(
        self, path: str, query: dict[str, list[str]], asked: dict[str, Any]
    ) -> tuple[int, dict[str, Any]]:
        engine = self.server.engine
        if path == "/v1/completions":
            return self._completed(asked)
        if path == "/collective_rpc" and asked.get("method") == "reload_weights":
            try:
                engine.reload(asked["kwargs"]["weights_path"])
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

    def _completed(self, asked: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        if asked["model"] != self.server.model:
            return 404, _error(f"The model `{asked['model']}` does not exist.")
        choices = []
        for index in range(asked.get("n", 1)):
            tokens, scores, ended = self.server.engine.complete(
                asked["prompt"], asked.get("max_tokens", 16)
            )
            choices.append(
                {
                    "index": index,
                    "text": bytes(tokens).decode(errors="replace"),
                    "finish_reason": ended,
                    "logprobs": {"token_logprobs": scores},
                    "token_ids": tokens,
                }
            )
        return 200, {"object": "text_completion", "model": asked["model"], "choices": choices}

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def _answer(self, status: int, body: dict[str, Any] | None = None) -> None:
        payload = b"" if body is None else json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(payload)))
        self.end_headers()
        self.wfile.write(payload)


def _error(message: str) -> dict[str, Any]:
    return {"error": {"message": message, "type": "InternalServerError", "code": 500}}


def main(argv: Sequence[str] | None = None) -> int:
    """The exit status, where it could not serve; else it serves until a signal ends it."""
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
