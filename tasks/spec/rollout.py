"""The component `rollout` of a spec, which is a fleet of inference servers.

The keys of a fleet depend on each other. Their combination is checked before the single keys are
validated: first the sizes of an engine (`Sizes`), then the keys that a backend allows.
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

#: Options in `args` that set the number of pipeline stages; the spec has no key for it.
_PIPELINE_OPTIONS = {
    "sglang": ("--pp-size", "--pipeline-parallel-size"),
    "vllm": ("-pp", "--pipeline-parallel-size"),
}


class Sizes(BaseModel):
    """Sizes of an engine, calculated from the keys of its fleet."""

    model_config = ConfigDict(frozen=True, strict=True)

    backend: str
    #: Number of nodes of one engine.
    nodes: Count = Field(1, alias="nodes_per_engine")
    #: Number of GPUs of one engine on each node, or None if the spec does not set it.
    gpus_per_node: Count | None = None
    tensor: Count = Field(1, alias="tensor_parallel")
    expert: Count = Field(1, alias="expert_parallel")
    #: Value of the key; `replicas` is the effective number.
    data: Count = Field(1, alias="data_parallel")
    #: True if only the attention layers have replicas, within the ranks of tensor parallelism.
    dp_attention: bool = False
    args: Any = ()

    @classmethod
    def of(cls, written: Mapping[str, Any]) -> Sizes | None:
        """Return the sizes of a fleet, or None if a key is invalid.

        Validation reports the invalid key separately.
        """
        with suppress(ValidationError):
            return cls.model_validate(
                {key: value for key, value in written.items() if value is not None}
            )
        return None

    @property
    def pipeline(self) -> int:
        """Number of pipeline stages that `args` ask for, or 1."""
        words = _to_words(self.args)
        for index, word in enumerate(words):
            name, _, value = word.partition("=")
            if name in _PIPELINE_OPTIONS.get(self.backend, ()):
                value = value or "".join(words[index + 1 : index + 2])
                return max(1, int(value)) if value.isdecimal() else 1
        return 1

    @property
    def replicas(self) -> int:
        """Value of the backend's option `--dp`.

        LMDeploy distributes experts over replicas, so its default is one replica per expert rank.
        """
        if self.backend == "lmdeploy" and self.data == 1:
            return self.expert
        return self.data

    @property
    def gpus(self) -> int:
        """Number of GPUs of one engine on all its nodes together; 0 if it needs none."""
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
        """Number of ranks of one engine: its GPUs, or its servers if it has no GPUs."""
        return self.gpus or self.servers


def check_sizes(sizes: Sizes) -> Iterator[Refusal]:
    """Yield the faults in the sizes of an engine.

    The backend itself would detect some of them only hours later, when the run starts.
    """
    faults = [*_unsupported_size_faults(sizes)] or [*_divisibility_faults(sizes)]
    yield from faults

    gpus_per_node = sizes.gpus_per_node
    if not faults and gpus_per_node and gpus_per_node * sizes.nodes != sizes.gpus:
        total = gpus_per_node * sizes.nodes
        has = f"one engine has {gpus_per_node} GPUs on each node, {total} in all"
        remedy = f"write {sizes.gpus // sizes.nodes}, or leave it out"
        problem = f"{has}, but its parallelism asks for {sizes.gpus}"
        yield ("gpus_per_node",), make_refusal(problem, remedy)


def _unsupported_size_faults(sizes: Sizes) -> Iterator[Refusal]:
    """Yield the faults in sizes that the backend does not support."""
    match sizes.backend:
        case "sglang":
            yield from _sglang_size_faults(sizes)
        case "lmdeploy":
            yield from _lmdeploy_size_faults(sizes)
        case "vllm":
            yield from _vllm_size_faults(sizes)
        case "command":
            yield from _command_size_faults(sizes)
        case _:
            yield from _dp_attention_faults(sizes)


def _dp_attention_faults(sizes: Sizes) -> Iterator[Refusal]:
    if sizes.dp_attention:
        problem = "only SGLang shares the ranks of tensor_parallel among replicas of attention"
        yield ("dp_attention",), make_refusal(problem, "leave it out, or write backend: sglang")


def _sglang_size_faults(sizes: Sizes) -> Iterator[Refusal]:
    if sizes.dp_attention and sizes.data == 1:
        problem = "nothing to share: DP attention is over data_parallel, which is 1"
        remedy = "write data_parallel: N, a divisor of tensor_parallel"
        yield ("dp_attention",), make_refusal(problem, remedy)
    if not sizes.dp_attention and sizes.data > 1 and sizes.nodes > 1:
        problem = "SGLang has no replicas in an engine that spans nodes"
        remedy = f"write 1, and engines: {sizes.data}; or add dp_attention: true"
        yield ("data_parallel",), make_refusal(problem, remedy)


def _lmdeploy_size_faults(sizes: Sizes) -> Iterator[Refusal]:
    yield from _dp_attention_faults(sizes)
    if sizes.expert > 1 and sizes.tensor > 1:
        problem = f"LMDeploy has either this or tensor_parallel, which is {sizes.tensor}"
        yield ("expert_parallel",), make_refusal(problem, "write 1 for one of them")
    if sizes.data > 1 and sizes.expert == sizes.tensor == 1:
        problem = "LMDeploy has replicas only of an engine with tensor or expert parallelism"
        yield ("data_parallel",), make_refusal(problem, f"write 1, and engines: {sizes.data}")


def _vllm_size_faults(sizes: Sizes) -> Iterator[Refusal]:
    yield from _dp_attention_faults(sizes)
    gpus = sizes.tensor * sizes.data
    if sizes.expert not in (1, gpus):
        problem = f"vLLM spreads experts over all {gpus} GPUs of tensor and data parallelism"
        yield ("expert_parallel",), make_refusal(problem, f"write {gpus}, or 1 for none")


def _command_size_faults(sizes: Sizes) -> Iterator[Refusal]:
    yield from _dp_attention_faults(sizes)
    problem = "only the program of a command knows how it uses its GPUs"
    remedy = "write it in the command, and gpus_per_node: N"
    if sizes.tensor > 1:
        yield ("tensor_parallel",), make_refusal(problem, remedy)
    if sizes.expert > 1:
        yield ("expert_parallel",), make_refusal(problem, remedy)


def _divisibility_faults(sizes: Sizes) -> Iterator[Refusal]:
    """Yield a fault for each size that must divide another size and does not."""
    tensor = ("tensor_parallel", sizes.tensor)
    replicas = ("its replicas", sizes.replicas)
    gpus = ("the engine's GPUs", sizes.gpus)
    if sizes.backend == "lmdeploy":
        gpus = ("the engine's GPUs", max(sizes.tensor, sizes.expert))

    #: Key, its value, and the name and value of the size that it must divide.
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
            remedy = f"write {join_words(divisors, 'or')}, or make that a multiple of {part}"
            yield (key,), make_refusal(f"{part} does not divide {name}, {whole}", remedy)


#: Variable that sets SGLang's own timeout of a health check, in whole seconds.
#: Source: SGLang 0.5, srt/entrypoints/http_server.py
SGLANG_TIMEOUT = "SGLANG_HEALTH_CHECK_TIMEOUT"
_SGLANG_TIMEOUT_S = 20

#: Backends that serve a model, with the names that messages use for them.
_MODEL_BACKENDS = {"sglang": "SGLang", "lmdeploy": "LMDeploy", "vllm": "vLLM"}
#: Example values of keys for remedies. All other keys are numbers.
_EXAMPLES = {"model": "PATH_OR_NAME", "dp_attention": "true, and data_parallel: N"}


@cache
def _reserved_arguments() -> Mapping[str, Mapping[str, list[str]]]:
    """Return the arguments that Muster itself passes to a backend, by backend and spec key."""
    return tomllib.loads(Path(__file__).with_name("backends.toml").read_text(encoding="utf-8"))


def choose_sglang_timeout_s(timeout_s: float) -> int:
    """Return the timeout that SGLang should use for its own health check, in seconds.

    It is shorter than the fleet's timeout, so that SGLang's error message reaches the fleet before
    the fleet stops waiting.
    """
    return max(1, min(_SGLANG_TIMEOUT_S, int(timeout_s * 0.8)))


def check_fleet(written: Mapping[str, Any]) -> Iterator[Refusal]:
    """Yield the faults that concern several keys of a fleet.

    Args:
        written: The fleet as the user wrote it. Its values are not validated yet.
    """
    backend = written.get("backend")
    if backend is None:
        remedy = "write sglang, lmdeploy or vllm, or command with a program of your own"
        yield ("backend",), make_refusal("missing: nothing says what the servers are", remedy)

    if backend == "command":
        yield from _command_backend_faults(written)
    elif backend in _MODEL_BACKENDS:
        yield from _model_backend_faults(str(backend), written)

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
            problem = f"{number:g} is above {limit_name}, {limit:g}"
            yield (section, key), make_refusal(problem, f"write {limit:g} or less")


def _command_backend_faults(written: Mapping[str, Any]) -> Iterator[Refusal]:
    """Yield the faults of a fleet whose servers are started by a command of the user."""
    texts = str([written.get(key) for key in ("command", "args", "env")])
    if written.get("command") is None:
        example = 'command: [python, serve.py, --port, "${server.port}"]'
        yield ("command",), make_refusal("missing: the backend is `command`", f"write {example}")
    elif f"{SERVER}port" not in find_names(texts):
        problem = "nothing says ${server.port}, so a server can't know where it is to listen"
        remedy = 'write for example --port, "${server.port}"; an environment variable will do too'
        yield ("command",), make_refusal(problem, remedy)


def _model_backend_faults(backend: str, written: Mapping[str, Any]) -> Iterator[Refusal]:
    """Yield the faults of a fleet whose servers are started by Muster for a known backend."""
    name = _MODEL_BACKENDS[backend]
    health = mapping_or_empty(written.get("health"))
    if written.get("model") is None:
        yield ("model",), make_refusal(f"missing: {name} serves one", "write model: PATH_OR_NAME")
    if written.get("command") is not None:
        problem = f"is for the backend `command`: {name}'s is made from the other keys"
        yield ("command",), make_refusal(problem, "leave it out; more arguments go into args")
    for index, word in enumerate(_to_words(written.get("args"))):
        for key, options in _reserved_arguments()[backend].items():
            if _option_of(word, backend) in options:
                problem = f"{word.partition('=')[0]} is set for each server"
                has_key = key != "none"
                remedy = f"write {key}: {_EXAMPLES.get(key, 'N')}" if has_key else "leave it out"
                yield ("args", index), make_refusal(problem, remedy)
    for key in ("path", "token"):
        if health.get(key) is not None:
            problem = f"is for the backend `command`: {name}'s own is known"
            yield ("health", key), make_refusal(problem, "leave it out")
    if backend != "sglang":
        return
    if mapping_or_empty(written.get("env")).get(SGLANG_TIMEOUT) is not None:
        remedy = "leave it out, and write health: {timeout_s: 15}"
        yield ("env", SGLANG_TIMEOUT), make_refusal("is made from health.timeout_s", remedy)
    if is_number(timeout_s := health.get("timeout_s")) and timeout_s <= 1:
        problem = f"{timeout_s:g}: SGLang takes a second at least to say yes or no"
        yield ("health", "timeout_s"), make_refusal(problem, "write more than 1")


def _option_of(word: str, backend: str) -> str:
    """Return the name of the option in a word, in the spelling of `backends.toml`.

    vLLM accepts underscores in place of hyphens.
    """
    name = word.partition("=")[0]
    return name.replace("_", "-") if backend == "vllm" and name.startswith("--") else name


def _to_words(value: object) -> list[str]:
    """Return the items of a list as strings, or an empty list for any other value."""
    return [str(word) for word in value] if isinstance(value, list | tuple) else []


Backend = Literal["sglang", "lmdeploy", "vllm", "command"]
#: Path on the server, such as `/health`.
UrlPath = Annotated[str, Field(strict=True, pattern=r"^/\S*$")]


class FleetToken(Model):
    """A request that makes a server generate a token."""

    path: UrlPath = Field(
        description="Where the request goes; 200 says that a token was generated.",
        examples=["/v1/completions"],
    )
    json_: Mapping[str, Any] | None = Field(
        None,
        alias="json",
        description="Sent with POST; left out: GET.",
        examples=[{"prompt": "1", "max_tokens": 1}],
    )


class FleetHealth(Model):
    """Health checks of the fleet's servers."""

    interval_s: Seconds = Field(30, description="Between two sweeps of all servers.")
    timeout_s: Seconds = Field(
        15,
        description="An answer that takes longer is a miss; more than the backend's own timeout.",
    )
    misses: CountOrZero = Field(
        3,
        description="So many in a row: the server is inactive. 0: no sweeps at intervals; deaths "
        "are seen and the check before training is made even so, where one bad answer is enough.",
    )
    first_after_s: Seconds | None = Field(
        None, description="Of grace before a new server's first question; left out: one interval."
    )
    path: UrlPath | None = Field(
        None,
        description="For the backend command: 200 says that it may be asked; left out: /health.",
        examples=["/health"],
    )
    token: FleetToken | None = Field(
        None,
        description="For the backend command: a request that generates a token; left out: none, "
        "and a server whose engine is stuck behind a good /health is not found out.",
        examples=[{"path": "/generate", "json": {"prompt": "1", "max_tokens": 1}}],
    )


UNLIMITED: Final = "unlimited"


def _check_budget(value: object) -> object:
    if value != UNLIMITED and (type(value) is not int or value < 1):
        problem = (
            f"must be a whole number, 1 or more, or {UNLIMITED}, found {describe_value(value)}"
        )
        raise make_refusal(problem, "leave it out for 3 for each engine")
    return value


Budget = Annotated[Count | Literal["unlimited"], BeforeValidator(_check_budget)]


class FleetRecovery(Model):
    """Restart of failed servers."""

    budget: Budget | None = Field(
        None,
        description="Recoveries in all, where engines that fail together count once; then engines "
        "that fail stay down. Left out: 3 for each engine, and 10 at least. unlimited: no end.",
    )
    backoff_s: Seconds = Field(
        1, description="Before the second try in a row of one engine; it then grows."
    )
    max_backoff_s: Seconds = Field(60, description="How far the back-off grows.")
    parallel: Count = Field(4, description="Engines that recover at once.")
    min_active: Count | None = Field(
        None,
        description="Fewer active engines than this: the run has failed; left out: no such floor.",
    )


class FleetWeights(Model):
    """Weights that the fleet's servers serve."""

    initial: Literal["loaded", "stale"] | None = Field(
        None,
        description="Until the trainer's first sync: loaded, the model as a server loaded it; "
        "stale, nothing. Left out: loaded, and stale in an attempt that resumes from a "
        "checkpoint.",
    )


class Rollout(Model):
    """A fleet of inference servers behind one gateway, `${rollout.url}`."""

    backend: Backend | None = Field(
        None,
        description="What serves the model: one of the three, or a command of your own.",
        examples=["sglang"],
    )
    model: Text | None = Field(
        None,
        description="The model's path or name; not for the backend command.",
        examples=["Qwen/Qwen3-8B"],
    )
    engines: Count = Field(1, description="Inference engines, each a set of ranks.")
    nodes_per_engine: Count = Field(1, description="Nodes that one engine spans.")
    gpus_per_node: Count | None = Field(
        None,
        description="GPUs of one engine on each node; left out: as many as its parallelism needs, "
        "for the backend command none.",
        examples=[8],
    )
    tensor_parallel: Count = Field(1, description="Ranks that share each tensor.")
    expert_parallel: Count = Field(
        1, description="Ranks that share the experts; with LMDeploy each of them is an entrypoint."
    )
    data_parallel: Count = Field(1, description="Replicas within one engine.")
    dp_attention: Annotated[bool, Field(strict=True)] = Field(
        False,
        description="For SGLang: the replicas are of attention only and lie within the ranks of "
        "tensor parallelism, which ask for no further GPUs and may span nodes.",
    )
    command: Words | None = Field(
        None,
        description="The server, for the backend command: ${server.port} and ${server.host} are "
        "where it is to listen, ${server.rank}, ${server.node} and ${server.group} say which it "
        "is.",
        examples=[["python", "serve.py", "--port", "${server.port}"]],
    )
    args: Words | None = Field(
        None, description="More arguments for each server.", examples=[["--context-length", "8192"]]
    )
    env: Env = Field(
        default_factory=dict,
        description="For the servers only; they win over the run's. {secret: BLOCK} in place of a "
        "text is the value of a Prefect Secret block.",
        examples=[{"NCCL_DEBUG": "WARN"}],
    )
    cwd: Text | None = Field(
        None, description="Relative to the project's root; left out: the run's."
    )
    stop: Stop = Field(default_factory=Stop, description="How a server is asked to end.")
    start_within_s: Seconds = Field(
        1800, description="Until a started server has generated a token; else it has failed."
    )
    host: Text = Field(
        "127.0.0.1",
        description="The address of this machine on which the gateway listens.",
        examples=["0.0.0.0"],
    )
    require_token: bool = Field(
        False,
        description="The gateway asks for a token on loopback, too, as it always does elsewhere; "
        "without one it answers programs of its own user, and of root.",
    )
    concurrency: Count | None = Field(
        None, description="Requests at once for each entrypoint; left out: no limit.", examples=[64]
    )
    queue_size: Count = Field(
        16384, description="Requests that wait at the gateway at one time; more are refused."
    )
    queue_timeout_s: Seconds = Field(
        1800, description="A request that has waited for so long is refused."
    )
    session_by_user: bool = Field(
        False,
        description="Requests with the same `user` go to the same server, as those with one "
        "session_id do. One name in all requests would leave the other servers idle.",
    )
    paths: Words | None = Field(
        None,
        description="More paths that the gateway passes on to a server, each POST as a request "
        'that generates; ["*"]: all. Known are those of OpenAI, SGLang and LMDeploy.',
        examples=[["/act"]],
    )
    health: FleetHealth = Field(default_factory=FleetHealth, description="Questions to servers.")
    recovery: FleetRecovery = Field(
        default_factory=FleetRecovery, description="What is done about servers that failed."
    )
    weights: FleetWeights = Field(
        default_factory=FleetWeights, description="Which weights its servers serve."
    )
    placement: Literal["local", "ray"] = Field(
        "local",
        description="local: processes of this machine. ray: on the nodes of the Ray cluster.",
    )

    @classmethod
    def rules(cls, written: Mapping[str, Any]) -> Iterator[Refusal]:
        yield from check_fleet(written)

    @cached_property
    def sizes(self) -> Sizes:
        """Sizes of an engine.

        Raises:
            ValueError: The fleet has no backend. Validation excludes this.
        """
        sizes = Sizes.of(self.model_dump())
        if sizes is None:
            raise ValueError("the fleet has no backend")
        return sizes
