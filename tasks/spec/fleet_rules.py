"""What the keys of a fleet demand of each other."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from tasks.spec.fleet_sizes import Sizes, size_faults
from tasks.spec.values import Refusal, did_you_mean, refused

#: Of the server that a text of the fleet is about: `${server.port}` and the like.
SERVER_NAMES = ("port", "host", "rank", "node", "group")
#: How long SGLang itself waits for the token of a health check, in whole seconds.
#: Source: SGLang 0.5, srt/entrypoints/http_server.py
SGLANG_TIMEOUT = "SGLANG_HEALTH_CHECK_TIMEOUT"
_SGLANG_TIMEOUT_S = 20

_MODELS = {"sglang": "SGLang", "lmdeploy": "LMDeploy", "vllm": "vLLM"}
#: Arguments that are made from other keys, by the key; "" for those that no key sets.
_OURS: dict[str, dict[str, tuple[str, ...]]] = {
    "sglang": {
        "model": ("--model-path", "--model"),
        "tensor_parallel": ("--tp-size", "--tensor-parallel-size", "--tp"),
        "expert_parallel": ("--ep-size", "--expert-parallel-size", "--ep"),
        "data_parallel": ("--dp-size", "--data-parallel-size", "--dp"),
        "nodes_per_engine": ("--nnodes",),
        "": (
            *("--node-rank", "--dist-init-addr", "--nccl-init-addr", "--host", "--port"),
            *("--base-gpu-id", "--api-key"),
        ),
    },
    "lmdeploy": {
        "tensor_parallel": ("--tp",),
        "expert_parallel": ("--ep",),
        "data_parallel": ("--dp",),
        "nodes_per_engine": ("--nnodes",),
        "": (
            *("--backend", "--node-rank", "--dist-init-addr", "--server-name", "--server-port"),
            *("--proxy-url", "--api-keys", "--ssl"),
        ),
    },
    "vllm": {
        "model": ("--model",),
        "tensor_parallel": ("--tensor-parallel-size", "-tp"),
        "expert_parallel": ("--enable-expert-parallel", "-ep"),
        "data_parallel": ("--data-parallel-size", "-dp"),
        "nodes_per_engine": ("--nnodes", "-n"),
        "": (
            *("--node-rank", "-r", "--master-addr", "--master-port", "--headless", "--host"),
            *("--port", "--uds", "--api-key", "--ssl-keyfile", "--ssl-certfile"),
            *("--data-parallel-size-local", "-dpl", "--data-parallel-address", "-dpa"),
            *("--data-parallel-rpc-port", "-dpp", "--data-parallel-start-rank", "-dpr"),
            *("--data-parallel-rank", "-dpn", "--data-parallel-hybrid-lb", "-dph"),
            *("--data-parallel-external-lb", "-dpe"),
            *("--data-parallel-multi-port-external-lb", "-dpm"),
            *("--data-parallel-backend", "-dpb", "--device-ids"),
        ),
    },
}
_SERVER = re.compile(r"(?<!\$)\$\{server\.([^{}]*)\}")


def sglang_timeout_s(timeout_s: float, env: Mapping[str, str]) -> int:
    """Until when SGLang answers a health check itself: as the environment says, else well within
    the fleet's own timeout, for a client that gives up first never hears of a failure."""
    written = env.get(SGLANG_TIMEOUT)
    return int(written) if written else max(1, min(_SGLANG_TIMEOUT_S, int(timeout_s * 0.8)))


def fleet_faults(written: Mapping[str, Any]) -> Iterator[Refusal]:
    """What is wrong with a fleet as a whole, judged before its keys are known to be valid."""
    backend = written.get("backend")
    if backend is None:
        remedy = "write sglang, lmdeploy or vllm, or command with a program of your own"
        yield ("backend",), refused("missing: nothing says what the servers are", remedy)
    if backend == "command":
        yield from _of_a_command(written)
    elif backend in _MODELS:
        yield from _of_a_model(str(backend), written)
    sizes = Sizes.of(written)
    if sizes is not None:
        yield from size_faults(sizes)
    yield from _unknown_names(written)
    yield from _of_recovery(written)
    yield from _of_health(written)


def _of_a_command(written: Mapping[str, Any]) -> Iterator[Refusal]:
    if written.get("command") is None:
        example = 'command: [python, serve.py, --port, "${server.port}"]'
        yield ("command",), refused("missing: the backend is `command`", f"write {example}")
    elif not any(name == "port" for _, name in _names_used(written)):
        problem = "nothing says ${server.port}, so a server can't know where it is to listen"
        remedy = 'write for example --port, "${server.port}"; an environment variable will do too'
        yield ("command",), refused(problem, remedy)


def _of_a_model(backend: str, written: Mapping[str, Any]) -> Iterator[Refusal]:
    name = _MODELS[backend]
    if written.get("model") is None:
        yield ("model",), refused(f"missing: {name} serves one", "write model: PATH_OR_NAME")
    if written.get("command") is not None:
        problem = f"is for the backend `command`: {name}'s is made from the other keys"
        yield ("command",), refused(problem, "leave it out; more arguments go into args")
    for index, word in enumerate(_words(written.get("args"))):
        for key, flags in _OURS[backend].items():
            if _flag(word, backend) in flags:
                problem = f"{word.partition('=')[0]} is set for each server"
                yield (
                    ("args", index),
                    refused(problem, _instead(key)),
                )
    health = _mapping(written.get("health"))
    for key in ("path", "token"):
        if health.get(key) is not None:
            problem = f"is for the backend `command`: {name}'s own is known"
            yield ("health", key), refused(problem, "leave it out")
    if backend == "sglang":
        yield from _of_sglangs_timeout(written)


def _instead(key: str) -> str:
    if not key:
        return "leave it out"
    return "write model: PATH_OR_NAME" if key == "model" else f"write {key}: N"


def _of_sglangs_timeout(written: Mapping[str, Any]) -> Iterator[Refusal]:
    timeout_s = _number(_mapping(written.get("health")).get("timeout_s", 15))
    own = _mapping(written.get("env")).get(SGLANG_TIMEOUT)
    if timeout_s is None:
        return
    if own is None:
        if timeout_s <= 1:
            problem = f"{timeout_s:g}: SGLang takes a second at least to say yes or no"
            yield ("health", "timeout_s"), refused(problem, "write more than 1")
        return
    if isinstance(own, bool) or not re.fullmatch(r"[1-9][0-9]*", str(own)):
        problem = f"SGLang takes whole seconds, found {own!r}"
        yield ("env", SGLANG_TIMEOUT), refused(problem, 'write for example "12"')
    elif int(own) >= timeout_s:
        problem = (
            f"{timeout_s:g} is not above {SGLANG_TIMEOUT}, {own}: SGLang's own no would never be "
            "heard"
        )
        yield ("health", "timeout_s"), refused(problem, f"write more than {own}")


def _of_recovery(written: Mapping[str, Any]) -> Iterator[Refusal]:
    recovery = _mapping(written.get("recovery"))
    least, engines = _number(recovery.get("min_active")), _number(written.get("engines", 1))
    if least is not None and engines is not None and least > engines:
        problem = f"{least:g} is above engines, {engines:g}: the run could never start"
        yield ("recovery", "min_active"), refused(problem, f"write {engines:g} or less")
    first, longest = (_number(recovery.get(key)) for key in ("backoff_s", "max_backoff_s"))
    if first is not None and longest is not None and first > longest:
        problem = f"{longest:g} is below backoff_s, {first:g}"
        yield ("recovery", "max_backoff_s"), refused(problem, f"write {first:g} or more")


def _of_health(written: Mapping[str, Any]) -> Iterator[Refusal]:
    first = _number(_mapping(written.get("health")).get("first_after_s"))
    within = _number(written.get("start_within_s", 1800))
    if first is not None and within is not None and first >= within:
        problem = (
            f"{first:g} is not below start_within_s, {within:g}: no server could start in time"
        )
        yield ("health", "first_after_s"), refused(problem, f"write less than {within:g}")


def _unknown_names(written: Mapping[str, Any]) -> Iterator[Refusal]:
    for place, name in _names_used(written):
        if name not in SERVER_NAMES:
            known = [f"${{server.{one}}}" for one in SERVER_NAMES]
            near = did_you_mean(f"${{server.{name}}}", known)
            remedy = f"{near} known are {', '.join(known)}".strip()
            yield place, refused(f"unknown name `${{server.{name}}}`", remedy)


def _names_used(written: Mapping[str, Any]) -> Iterator[tuple[tuple[str | int, ...], str]]:
    texts: list[tuple[tuple[str | int, ...], str]] = [
        ((key, index), word)
        for key in ("command", "args")
        for index, word in enumerate(_words(written.get(key)))
    ]
    texts += [(("env", key), str(text)) for key, text in _mapping(written.get("env")).items()]
    for place, text in texts:
        for match in _SERVER.finditer(text):
            yield place, match.group(1)


def _flag(word: str, backend: str) -> str:
    """The option that a word is, as the backend's parser reads it: vLLM takes either dash."""
    name = word.partition("=")[0]
    return name.replace("_", "-") if backend == "vllm" and name.startswith("--") else name


def _words(value: object) -> list[str]:
    return [str(word) for word in value] if isinstance(value, list | tuple) else []


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _number(value: object) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value if is_number else None  # type: ignore[return-value]
