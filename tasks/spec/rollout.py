"""The component `rollout` of a run spec, which is a fleet of inference servers.

The keys of a fleet depend on each other, so their combination is checked, too. `check_fleet` checks
the keys that a backend needs or does not allow. `check_sizes` checks the sizes of an engine.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from tasks.spec.formatting import join_words
from tasks.spec.placeholders import SERVER, find_names, mapping_or_empty
from tasks.spec.values import (
    Count,
    CountOrZero,
    Env,
    LogBytes,
    Model,
    Refusal,
    Seconds,
    Stop,
    Text,
    Words,
    describe_value,
    is_number,
    make_refusal,
)

#: Mapping from each backend to its command-line options for the number of pipeline stages. The spec
#: has no key for this number, so the user writes the option into `args`.
_PIPELINE_OPTIONS = {
    "sglang": ("--pp-size", "--pipeline-parallel-size"),
    "vllm": ("-pp", "--pipeline-parallel-size"),
}


class Sizes(BaseModel):
    """Numbers of nodes, GPUs and parallel ranks of one inference engine.

    The numbers come from the keys of the component `rollout` in the run spec.
    """

    model_config = ConfigDict(frozen=True, strict=True)

    #: Name of the backend, such as `sglang`.
    backend: str
    #: Number of nodes of one engine.
    nodes: Count = Field(1, alias="nodes_per_engine")
    #: Number of GPUs of one engine on each node, or None if the spec does not set it.
    gpus_per_node: Count | None = None
    #: Number of ranks over which each tensor is split.
    tensor: Count = Field(1, alias="tensor_parallel")
    #: Number of ranks over which the experts are distributed.
    expert: Count = Field(1, alias="expert_parallel")
    #: Value of the spec key `data_parallel`. For the actual number of data-parallel replicas of the
    #: engine, see the property `replicas`.
    data: Count = Field(1, alias="data_parallel")
    #: True if only the attention layers are data-parallel, within the tensor-parallel ranks.
    dp_attention: bool = False
    #: Value of the spec key `args`, not validated.
    args: Any = ()

    @classmethod
    def of(cls, written: Mapping[str, Any]) -> Sizes | None:
        """Return the sizes of an engine, or None if a key for a size is invalid.

        An invalid key is reported later, when the spec is validated.

        Args:
            written: The component `rollout` as the user wrote it.
        """
        with suppress(ValidationError):
            return cls.model_validate(
                {key: value for key, value in written.items() if value is not None}
            )
        return None

    @property
    def pipeline(self) -> int:
        """Number of pipeline stages that an option in `args` sets, or 1 without such an option.

        The layers of the language model are split into this number of parts.
        """
        words = _to_words(self.args)
        for index, word in enumerate(words):
            name, _, value = word.partition("=")
            if name in _PIPELINE_OPTIONS.get(self.backend, ()):
                value = value or "".join(words[index + 1 : index + 2])
                return max(1, int(value)) if value.isdecimal() else 1
        return 1

    @property
    def replicas(self) -> int:
        """Number of data-parallel replicas in one engine, for the option `--dp` of the backend.

        The default for LMDeploy is one replica for each expert rank.
        """
        if self.backend == "lmdeploy" and self.data == 1:
            return self.expert
        return self.data

    @property
    def gpus(self) -> int:
        """Total number of GPUs of one engine on all its nodes, or 0 if the engine needs no GPUs."""
        if self.backend == "command":
            return self.nodes * (self.gpus_per_node or 0)
        if self.backend == "lmdeploy":
            return max(self.tensor, self.expert, self.replicas)
        replicas = 1 if self.dp_attention else self.data
        return self.tensor * self.pipeline * replicas

    @property
    def servers(self) -> int:
        """Number of server processes of one engine."""
        if self.backend == "lmdeploy":
            return self.replicas
        if self.backend == "command" and self.data > 1:
            return self.data
        return self.nodes

    @property
    def ranks(self) -> int:
        """Number of ranks of one engine: one for each GPU.

        An engine without GPUs has one rank for each server.
        """
        return self.gpus or self.servers


def check_sizes(sizes: Sizes) -> Iterator[Refusal]:
    """Yield the faults in the sizes of an engine.

    The inference engine would report some of these faults only at the start of the run, which may
    be hours later.
    """
    faults = [*_find_unsupported_size_faults(sizes)] or [*_find_divisibility_faults(sizes)]
    yield from faults

    gpus_per_node = sizes.gpus_per_node
    if not faults and gpus_per_node and gpus_per_node * sizes.nodes != sizes.gpus:
        total = gpus_per_node * sizes.nodes
        remedy = f"write `gpus_per_node: {sizes.gpus // sizes.nodes}`, or leave it out"
        problem = (
            f"an engine would have {total} GPUs, {gpus_per_node} on each node, but its parallel "
            f"ranks need {sizes.gpus}"
        )
        yield ("gpus_per_node",), make_refusal(problem, remedy)


def _find_unsupported_size_faults(sizes: Sizes) -> Iterator[Refusal]:
    """Yield a fault for each size that the backend of the engine does not support."""
    match sizes.backend:
        case "sglang":
            yield from _find_sglang_size_faults(sizes)
        case "lmdeploy":
            yield from _find_lmdeploy_size_faults(sizes)
        case "vllm":
            yield from _find_vllm_size_faults(sizes)
        case "command":
            yield from _find_command_size_faults(sizes)
        case _:
            yield from _find_dp_attention_faults(sizes)


def _find_dp_attention_faults(sizes: Sizes) -> Iterator[Refusal]:
    if sizes.dp_attention:
        problem = f"only the backend sglang supports this key, found the backend {sizes.backend}"
        remedy = "leave out dp_attention, or write `backend: sglang`"
        yield ("dp_attention",), make_refusal(problem, remedy)


def _find_sglang_size_faults(sizes: Sizes) -> Iterator[Refusal]:
    if sizes.dp_attention and sizes.data == 1:
        problem = "this key needs at least 2 replicas in each engine (`data_parallel`), found 1"
        remedy = "write `data_parallel: N` with a divisor N of tensor_parallel"
        yield ("dp_attention",), make_refusal(problem, remedy)
    if not sizes.dp_attention and sizes.data > 1 and sizes.nodes > 1:
        problem = f"SGLang allows no replicas within an engine that spans {sizes.nodes} nodes"
        remedy = (
            f"write `data_parallel: 1` and `engines: {sizes.data}`, or add `dp_attention: true`"
        )
        yield ("data_parallel",), make_refusal(problem, remedy)


def _find_lmdeploy_size_faults(sizes: Sizes) -> Iterator[Refusal]:
    yield from _find_dp_attention_faults(sizes)
    if sizes.expert > 1 and sizes.tensor > 1:
        problem = (
            "LMDeploy supports only one of expert_parallel and tensor_parallel, found "
            f"{sizes.expert} and {sizes.tensor}"
        )
        yield ("expert_parallel",), make_refusal(problem, "leave out one of the two keys")
    if sizes.data > 1 and sizes.expert == sizes.tensor == 1:
        problem = (
            "LMDeploy allows replicas only with tensor_parallel or expert_parallel, found "
            f"{sizes.data} replicas"
        )
        remedy = f"write `data_parallel: 1` and `engines: {sizes.data}`"
        yield ("data_parallel",), make_refusal(problem, remedy)


def _find_vllm_size_faults(sizes: Sizes) -> Iterator[Refusal]:
    yield from _find_dp_attention_faults(sizes)
    gpus = sizes.tensor * sizes.data
    if sizes.expert not in (1, gpus):
        problem = (
            f"must be 1 or {gpus}, found {sizes.expert}: vLLM distributes the experts over all "
            "ranks of the engine (tensor_parallel times data_parallel)"
        )
        remedy = f"write `expert_parallel: {gpus}`, or leave it out for no expert parallelism"
        yield ("expert_parallel",), make_refusal(problem, remedy)


def _find_command_size_faults(sizes: Sizes) -> Iterator[Refusal]:
    yield from _find_dp_attention_faults(sizes)
    problem = (
        "the backend `command` does not support this key, because your own program decides how it "
        "uses its GPUs"
    )
    remedy = (
        "leave it out. Set the parallelism with an option of your program in `command`, and the "
        "number of GPUs with `gpus_per_node: N`"
    )
    if sizes.tensor > 1:
        yield ("tensor_parallel",), make_refusal(problem, remedy)
    if sizes.expert > 1:
        yield ("expert_parallel",), make_refusal(problem, remedy)


def _find_divisibility_faults(sizes: Sizes) -> Iterator[Refusal]:
    """Yield a fault for each size that must divide another size, but does not."""
    tensor = ("tensor_parallel", sizes.tensor)
    replicas = ("the number of replicas", sizes.replicas)
    gpus = ("the number of GPUs of an engine", sizes.gpus)
    if sizes.backend == "lmdeploy":
        gpus = ("the number of GPUs of an engine", max(sizes.tensor, sizes.expert))

    #: Rules `(key, value, (name, size))`: the value of the spec key must divide the size. The name
    #: of the size is used in messages.
    rules: list[tuple[str, int, tuple[str, int]]]
    if sizes.backend == "sglang":
        rules = [
            ("expert_parallel", sizes.expert, tensor),
            ("nodes_per_engine", sizes.nodes, gpus),
        ]
        if sizes.dp_attention:
            rules.append(("data_parallel", sizes.data, tensor))
    else:
        rules = [
            ("data_parallel", sizes.replicas, gpus),
            ("nodes_per_engine", sizes.nodes, replicas if sizes.replicas > 1 else gpus),
        ]

    for key, part, (name, whole) in rules:
        if whole % part:
            divisors = (number for number in range(1, whole + 1) if whole % number == 0)
            remedy = (
                f"set `{key}` to {join_words(divisors, 'or')}, or change {name} to a multiple of "
                f"{part}"
            )
            yield (
                (key,),
                make_refusal(
                    f"must be a divisor of {name}, which is {whole}, found {part}", remedy
                ),
            )


#: Environment variable with the timeout of a health check inside SGLang, in whole seconds. Source:
#: SGLang 0.5, srt/entrypoints/http_server.py
SGLANG_TIMEOUT = "SGLANG_HEALTH_CHECK_TIMEOUT"
#: Timeout of a health check inside SGLang in seconds, if SGLANG_HEALTH_CHECK_TIMEOUT is not set.
_SGLANG_TIMEOUT_S = 20

#: Mapping from a backend's name in the spec to its name in messages. Muster builds the commands of
#: these backends.
_MODEL_BACKENDS = {"sglang": "SGLang", "lmdeploy": "LMDeploy", "vllm": "vLLM"}
#: Mapping from spec keys to example values for error messages. For all other keys, the
#: example is N, which stands for a number.
_EXAMPLES = {"model": "PATH_OR_NAME", "dp_attention": "true, and data_parallel: N"}


@cache
def _load_reserved_arguments() -> Mapping[str, Mapping[str, list[str]]]:
    """Return the arguments that Muster itself passes to each backend and that users must not write.

    The list `result[backend][key]` contains the arguments that Muster derives from a spec key. The
    user sets this spec key instead of the arguments. Arguments without a spec key are in the list
    `result[backend]["none"]`.
    """
    return tomllib.loads(Path(__file__).with_name("backends.toml").read_text(encoding="utf-8"))


def choose_sglang_timeout_s(timeout_s: float) -> int:
    """Return a timeout in seconds for the health check inside SGLang.

    The returned timeout is shorter than that of Muster, so that SGLang's error message arrives
    before Muster stops waiting.

    Args:
        timeout_s: Muster's timeout for a health check (`health.timeout_s`), in seconds.
    """
    return max(1, min(_SGLANG_TIMEOUT_S, int(timeout_s * 0.8)))


def check_fleet(written: Mapping[str, Any]) -> Iterator[Refusal]:
    """Yield the faults that result from a combination of keys of the component `rollout`.

    Args:
        written: The component as the user wrote it. Its values are not validated yet.
    """
    backend = written.get("backend")
    if backend is None:
        remedy = "write sglang, lmdeploy or vllm, or `command` for your own program"
        yield ("backend",), make_refusal("missing: a fleet needs a backend", remedy)

    if backend == "command":
        yield from _find_command_backend_faults(written)
    elif backend in _MODEL_BACKENDS:
        yield from _find_model_backend_faults(str(backend), written)

    if (sizes := Sizes.of(written)) is not None:
        yield from check_sizes(sizes)

    recovery = mapping_or_empty(written.get("recovery"))
    health = mapping_or_empty(written.get("health"))
    for section, key, number, limit_name, limit in (
        (
            "recovery",
            "min_active",
            recovery.get("min_active"),
            "engines",
            written.get("engines", 1),
        ),
        (
            "recovery",
            "backoff_s",
            recovery.get("backoff_s"),
            "max_backoff_s",
            recovery.get("max_backoff_s"),
        ),
        (
            "health",
            "first_after_s",
            health.get("first_after_s"),
            "start_within_s",
            written.get("start_within_s", 1800),
        ),
    ):
        if is_number(number) and is_number(limit) and number > limit:
            problem = f"must be at most `{limit_name}`, which is {limit:g}, found {number:g}"
            yield (section, key), make_refusal(problem, f"write `{key}: {limit:g}` or less")


def _find_command_backend_faults(written: Mapping[str, Any]) -> Iterator[Refusal]:
    """Yield the faults in a component `rollout` with the backend `command`."""
    texts = str([written.get(key) for key in ("command", "args", "env")])
    if written.get("command") is None:
        example = 'command: [python, serve.py, --port, "${server.port}"]'
        problem = "missing: the backend `command` needs a command"
        yield ("command",), make_refusal(problem, f"write {example}")
    elif f"{SERVER}port" not in find_names(texts):
        problem = "must contain ${server.port}, the port on which the server must listen"
        remedy = 'write for example --port, "${server.port}", or set a variable in env'
        yield ("command",), make_refusal(problem, remedy)


def _find_model_backend_faults(backend: str, written: Mapping[str, Any]) -> Iterator[Refusal]:
    """Yield the faults in a component `rollout` with the backend `sglang`, `lmdeploy` or `vllm`."""
    name = _MODEL_BACKENDS[backend]
    health = mapping_or_empty(written.get("health"))
    if written.get("model") is None:
        yield (
            ("model",),
            make_refusal(f"missing: {name} needs a model", "write `model: PATH_OR_NAME`"),
        )
    if written.get("command") is not None:
        problem = (
            "this key is only for the backend `command`, because Muster itself builds the command "
            f"of {name}"
        )
        remedy = "leave out the command, and write further arguments of the server into `args`"
        yield ("command",), make_refusal(problem, remedy)
    for index, word in enumerate(_to_words(written.get("args"))):
        for key, options in _load_reserved_arguments()[backend].items():
            if _get_option_name(word, backend) in options:
                problem = f"Muster itself sets {word.partition('=')[0]} for each server"
                remedy = "leave it out"
                if key != "none":
                    remedy = f"write `{key}: {_EXAMPLES.get(key, 'N')}` instead"
                yield ("args", index), make_refusal(problem, remedy)
    for key in ("path", "token"):
        if health.get(key) is not None:
            problem = (
                "this key is only for the backend `command`, because Muster itself knows the "
                f"health check of {name}"
            )
            yield ("health", key), make_refusal(problem, "leave it out")
    if backend != "sglang":
        return
    if mapping_or_empty(written.get("env")).get(SGLANG_TIMEOUT) is not None:
        problem = "Muster itself sets this variable to the value of health.timeout_s"
        remedy = "leave out the variable, and write for example health: {timeout_s: 15}"
        yield ("env", SGLANG_TIMEOUT), make_refusal(problem, remedy)
    if is_number(timeout_s := health.get("timeout_s")) and timeout_s <= 1:
        problem = (
            f"must be more than 1, found {timeout_s:g}: the timeout of SGLang's own health check "
            "is at least 1 second, and Muster must wait longer"
        )
        yield ("health", "timeout_s"), make_refusal(problem, "write for example 15")


def _get_option_name(word: str, backend: str) -> str:
    """Return the name of the command-line option in an argument, without the value.

    The name is written with hyphens, as in `backends.toml`, even if the argument contains
    underscores. vLLM accepts both.

    Args:
        word: One argument, such as `--port=8000`.
        backend: Name of the backend.
    """
    name = word.partition("=")[0]
    return name.replace("_", "-") if backend == "vllm" and name.startswith("--") else name


def _to_words(value: object) -> list[str]:
    """Return the items of a list as strings, or an empty list for any other value."""
    return [str(word) for word in value] if isinstance(value, list | tuple) else []


Backend = Literal["sglang", "lmdeploy", "vllm", "command"]
#: Path of a URL on an inference server, such as `/health`.
UrlPath = Annotated[str, Field(strict=True, pattern=r"^/\S*$")]


class FleetToken(Model):
    """HTTP request that a health check sends, so that an inference server generates a token."""

    path: UrlPath = Field(
        description="URL path on the server to which Muster sends the request. An answer with "
        "status 200 means that the server has generated a token.",
        examples=["/v1/completions"],
    )
    json_: Mapping[str, Any] | None = Field(
        None,
        alias="json",
        description="JSON body of the request, which Muster sends with POST. If omitted, Muster "
        "sends a GET request without a body.",
        examples=[{"prompt": "1", "max_tokens": 1}],
    )


class FleetHealth(Model):
    """How Muster checks the health of the inference servers: intervals, timeouts and limits."""

    interval_s: Seconds = Field(
        30, description="Seconds between two health checks of the same inference server."
    )
    timeout_s: Seconds = Field(
        15,
        description="Longest time in seconds for the answer of a server to a health check. A "
        "slower answer is a failed check. The time must be longer than the timeout of the "
        "backend's own health check.",
    )
    misses: CountOrZero = Field(
        3,
        description="An engine counts as failed after this number of failed checks of the same "
        "server in a row. 0: Muster makes no regular checks, but still notices dead servers. If a "
        "program requests a check of all servers, an engine counts as failed after a single "
        "failed check.",
    )
    first_after_s: Seconds | None = Field(
        None,
        description="Seconds from the successful start of an inference server to its first "
        "health check. If omitted, the value of `interval_s` applies.",
    )
    path: UrlPath | None = Field(
        None,
        description="Only for the backend `command`: URL path on the server that answers with "
        "status 200 if the server is ready. If omitted, the path is /health.",
        examples=["/health"],
    )
    token: FleetToken | None = Field(
        None,
        description="Only for the backend `command`: request that makes the server generate a "
        "token, as a health check. If omitted, Muster does not notice an engine that hangs while "
        "its server still answers at `path`.",
        examples=[{"path": "/generate", "json": {"prompt": "1", "max_tokens": 1}}],
    )


UNLIMITED: Final = "unlimited"


def _check_budget(value: object) -> object:
    if value != UNLIMITED and (type(value) is not int or value < 1):
        problem = (
            f"must be a whole number, 1 or more, or {UNLIMITED}, found {describe_value(value)}"
        )
        raise make_refusal(problem, "leave out the key: the default is 3 restarts for each engine")
    return value


Budget = Annotated[Count | Literal["unlimited"], BeforeValidator(_check_budget)]


class FleetRecovery(Model):
    """Restart of failed inference engines."""

    budget: Budget | None = Field(
        None,
        description="Largest number of restarts of failed engines in the whole attempt. Engines "
        "that fail together count as one restart. After this number, Muster restarts no failed "
        "engines. unlimited: no limit. If omitted, the number is 3 for each engine of the fleet, "
        "but at least 10 in total.",
    )
    backoff_s: Seconds = Field(
        1,
        description="Delay in seconds before an engine's second restart in a row. The first "
        "restart has no delay. The delay grows with each further restart.",
    )
    max_backoff_s: Seconds = Field(
        60,
        description="Upper limit, in seconds, of the growing delay before a restart of an engine.",
    )
    parallel: Count = Field(
        4, description="Largest number of inference engines that restart at the same time."
    )
    min_active: Count | None = Field(
        None,
        description="Smallest number of inference engines that must be active. The run fails if "
        "fewer engines are active. If omitted, the run fails only when no engine can serve "
        "requests any more.",
    )


class FleetWeights(Model):
    """Weights that the inference servers use before the first weight update."""

    initial: Literal["loaded", "stale"] | None = Field(
        None,
        description="Behaviour of the fleet before the trainer's first weight update. loaded: "
        "serve the model as the servers loaded it. stale: serve no requests. If omitted, it is "
        "`stale` in an attempt that resumes from a checkpoint, and otherwise `loaded`.",
    )


class Rollout(Model):
    """Fleet of inference servers behind one address, `${rollout.url}`."""

    keys_outside_form = (
        "expert_parallel",
        "data_parallel",
        "dp_attention",
        "cwd",
        "stop",
        "start_within_s",
        "host",
        "require_token",
        "concurrency",
        "queue_size",
        "queue_timeout_s",
        "session_by_user",
        "paths",
        "health",
        "recovery",
        "weights",
        "placement",
        "log_max_bytes",
    )

    backend: Backend | None = Field(
        None,
        description="Program that serves the model: SGLang, LMDeploy, vLLM, or your own program in "
        "the key `command`.",
        examples=["sglang"],
    )
    model: Text | None = Field(
        None,
        description="Path of the model, or name of the model on the Hugging Face Hub. Required "
        "for all backends except `command`.",
        examples=["Qwen/Qwen3-8B"],
    )
    engines: Count = Field(
        1, description="Number of inference engines. Each engine serves the whole model."
    )
    nodes_per_engine: Count = Field(
        1, description="Number of nodes over which each engine is distributed."
    )
    gpus_per_node: Count | None = Field(
        None,
        description="Number of GPUs that one engine takes on each of its nodes. If omitted, "
        "Muster calculates the number from the keys for parallelism, such as `tensor_parallel`. "
        "For the backend `command`, the default is 0.",
        examples=[8],
    )
    tensor_parallel: Count = Field(
        1,
        description="Tensor parallelism: number of ranks over which each engine splits the "
        "tensors of the model.",
    )
    expert_parallel: Count = Field(
        1,
        description="Expert parallelism: number of ranks over which each engine distributes the "
        "experts of a mixture-of-experts model. With LMDeploy, each of these ranks accepts "
        "requests.",
    )
    data_parallel: Count = Field(
        1, description="Data parallelism: number of replicas of the model within one engine."
    )
    dp_attention: Annotated[bool, Field(strict=True)] = Field(
        False,
        description="Only for SGLang. true: data parallelism for the attention layers only. The "
        "replicas share the GPUs of `tensor_parallel`, so they need no further GPUs. The "
        "replicas may span several nodes.",
    )
    command: Words | None = Field(
        None,
        description="Only for the backend `command`: command that starts one server. The server "
        "must listen on ${server.host} and ${server.port}. ${server.rank}, ${server.node} and "
        "${server.group} identify the server.",
        examples=[["python", "serve.py", "--port", "${server.port}"]],
    )
    args: Words | None = Field(
        None,
        description="Further command-line arguments of each inference server, with one list item "
        "for each argument.",
        examples=[["--context-length", "8192"]],
    )
    env: Env = Field(
        default_factory=dict,
        description="Environment variables of the inference servers. They override the `env` of "
        "the run. To use the value of a Prefect Secret block, write `{secret: BLOCK}` in place of "
        "the value.",
        examples=[{"NCCL_DEBUG": "WARN"}],
    )
    cwd: Text | None = Field(
        None,
        description="Working directory of the inference servers. A relative path starts at the "
        "project's root. If omitted, the `cwd` of the run applies.",
    )
    stop: Stop = Field(
        default_factory=Stop,
        description="Signal and grace period with which Muster stops each inference server.",
    )
    start_within_s: Seconds = Field(
        1800,
        description="Longest time in seconds from the start of an inference server until the "
        "server generates a token. If it takes longer, the start has failed.",
    )
    host: Text = Field(
        "127.0.0.1",
        description="Address of this machine on which the fleet's gateway listens. Use 0.0.0.0 "
        "for connections from other machines.",
        examples=["0.0.0.0"],
    )
    require_token: bool = Field(
        False,
        description="true: every request needs a token. false: programs of the same user and of "
        "root need no token on a loopback address. On any other address, every request needs a "
        "token.",
    )
    concurrency: Count | None = Field(
        None,
        description="Largest number of requests that the fleet's gateway sends to one server at "
        "the same time. Further requests wait at the gateway. If omitted, there is no limit.",
        examples=[64],
    )
    queue_size: Count = Field(
        16384,
        description="Largest number of requests that wait in the queue of the fleet's gateway. "
        "The gateway rejects further requests.",
    )
    queue_timeout_s: Seconds = Field(
        1800,
        description="Longest time in seconds that a request waits in the queue of the fleet's "
        "gateway. After this time, the gateway rejects the request.",
    )
    session_by_user: bool = Field(
        False,
        description="true: requests with the same `user` go to the same server, like requests with "
        "the same session_id. Do not use this if all requests have the same `user`: only one "
        "server would get requests.",
    )
    paths: Words | None = Field(
        None,
        description="Further URL paths that the gateway forwards to an inference server, in "
        'addition to the paths of the APIs of OpenAI, SGLang and LMDeploy. ["*"]: all paths. The '
        "gateway counts a POST to such a path as a request that generates tokens.",
        examples=[["/act"]],
    )
    health: FleetHealth = Field(
        default_factory=FleetHealth, description="Health checks of the inference servers."
    )
    recovery: FleetRecovery = Field(
        default_factory=FleetRecovery,
        description="Rules for the restart of failed inference engines.",
    )
    weights: FleetWeights = Field(
        default_factory=FleetWeights,
        description="Weights that the fleet serves before the trainer's first weight update.",
    )
    placement: Literal["local", "ray"] = Field(
        "local",
        description="Place where the inference servers run. local: on the host of the run. ray: "
        "on the nodes of the Ray cluster.",
    )
    log_max_bytes: LogBytes | None = Field(
        None,
        description="Largest size, in bytes, of each log file of the fleet: the log of each "
        "server, and the log of the fleet itself. Muster keeps the first quarter and the newest "
        "lines of a larger log. A line between the two parts says how many bytes were left out. "
        "If omitted, there is no limit.",
        examples=[1_000_000_000],
    )

    @classmethod
    def rules(cls, written: Mapping[str, Any]) -> Iterator[Refusal]:
        yield from check_fleet(written)

    @cached_property
    def sizes(self) -> Sizes:
        """Sizes of each engine of the component `rollout`.

        Raises:
            ValueError: The component has no backend. This is impossible after the validation.
        """
        sizes = Sizes.of(self.model_dump())
        if sizes is None:
            raise ValueError("the fleet has no backend")
        return sizes
