"""The component `rollout` of a spec: a fleet of inference servers.

What its keys demand of each other is judged before they are known to be valid themselves: sizes
first (`Sizes`: ranks, servers and GPUs of an engine), then what goes with a backend.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import cache, cached_property
from pathlib import Path
from typing import Annotated, Any, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from tasks.spec.placeholders import SERVER, mapping, names_of
from tasks.spec.values import (
    Count,
    Env,
    Model,
    NoneOrMore,
    Refusal,
    Seconds,
    Stop,
    Text,
    Words,
    is_number,
    refused,
    shown,
)
from tasks.spec.words import listed

#: How a pipeline's depth is written among `args`; no key of the spec sets it.
_PIPELINE = {
    "sglang": ("--pp-size", "--pipeline-parallel-size"),
    "vllm": ("-pp", "--pipeline-parallel-size"),
}


class Sizes(BaseModel):
    """The numbers that a fleet is cut by, from the keys of its spec."""

    model_config = ConfigDict(frozen=True, strict=True)

    backend: str
    #: Nodes that one engine spans.
    nodes: Count = Field(1, alias="nodes_per_engine")
    #: GPUs of one engine on each of them, where it was written.
    gpus_per_node: Count | None = None
    tensor: Count = Field(1, alias="tensor_parallel")
    expert: Count = Field(1, alias="expert_parallel")
    #: As written; `replicas` is what it comes to.
    data: Count = Field(1, alias="data_parallel")
    #: The replicas are of attention only, and lie within the ranks of tensor parallelism.
    dp_attention: bool = False
    args: Any = ()

    @classmethod
    def of(cls, written: Mapping[str, Any]) -> Sizes | None:
        """None where a key is faulty, which is told of the key itself."""
        with suppress(ValidationError):
            return cls.model_validate({key: one for key, one in written.items() if one is not None})
        return None

    @property
    def pipeline(self) -> int:
        """Stages of a pipeline, from the arguments."""
        words = _words(self.args)
        for index, word in enumerate(words):
            name, _, value = word.partition("=")
            if name in _PIPELINE.get(self.backend, ()):
                value = value or "".join(words[index + 1 : index + 2])
                return max(1, int(value)) if value.isdecimal() else 1
        return 1

    @property
    def replicas(self) -> int:
        """What `--dp` is: LMDeploy spreads experts over replicas, one for each unless written."""
        if self.backend == "lmdeploy" and self.data == 1:
            return self.expert
        return self.data

    @property
    def gpus(self) -> int:
        """Of one engine, all nodes together; 0 where none are asked for."""
        if self.backend == "command":
            return self.nodes * (self.gpus_per_node or 0)
        if self.backend == "lmdeploy":
            return max(self.tensor, self.expert, self.replicas)
        return self.tensor * self.pipeline * (1 if self.dp_attention else self.data)

    @property
    def servers(self) -> int:
        """Processes of one engine."""
        if self.backend == "lmdeploy":
            return self.replicas
        if self.backend == "command" and self.data > 1:
            return self.data
        return self.nodes

    @property
    def ranks(self) -> int:
        """Of one engine: its GPUs; its servers, where it has no GPUs."""
        return self.gpus or self.servers


def size_faults(sizes: Sizes) -> Iterator[Refusal]:
    """What the backend itself would refuse hours later, and what does not divide."""
    found = [*_not_offered(sizes)] or [*_uneven(sizes)]
    yield from found
    asked = sizes.gpus_per_node
    if not found and asked and asked * sizes.nodes != sizes.gpus:
        has = f"one engine has {asked} GPUs on each node, {asked * sizes.nodes} in all"
        remedy = f"write {sizes.gpus // sizes.nodes}, or leave it out"
        problem = f"{has}, but its parallelism asks for {sizes.gpus}"
        yield ("gpus_per_node",), refused(problem, remedy)


def _not_offered(sizes: Sizes) -> Iterator[Refusal]:
    backend, tensor, expert, data = sizes.backend, sizes.tensor, sizes.expert, sizes.data
    only_the_program = (
        "only the program of a command knows how it uses its GPUs",
        "write it in the command, and gpus_per_node: N",
    )
    for is_so, key, problem, remedy in (
        (
            sizes.dp_attention and backend != "sglang",
            "dp_attention",
            "only SGLang shares the ranks of tensor_parallel among replicas of attention",
            "leave it out, or write backend: sglang",
        ),
        (
            sizes.dp_attention and backend == "sglang" and data == 1,
            "dp_attention",
            "nothing to share: DP attention is over data_parallel, which is 1",
            "write data_parallel: N, a divisor of tensor_parallel",
        ),
        (
            not sizes.dp_attention and backend == "sglang" and data > 1 and sizes.nodes > 1,
            "data_parallel",
            "SGLang has no replicas in an engine that spans nodes",
            f"write 1, and engines: {data}; or add dp_attention: true",
        ),
        (
            backend == "lmdeploy" and expert > 1 and tensor > 1,
            "expert_parallel",
            f"LMDeploy has either this or tensor_parallel, which is {tensor}",
            "write 1 for one of them",
        ),
        (
            backend == "lmdeploy" and data > 1 and expert == tensor == 1,
            "data_parallel",
            "LMDeploy has replicas only of an engine with tensor or expert parallelism",
            f"write 1, and engines: {data}",
        ),
        (
            backend == "vllm" and expert not in (1, tensor * data),
            "expert_parallel",
            f"vLLM spreads experts over all {tensor * data} GPUs of tensor and data parallelism",
            f"write {tensor * data}, or 1 for none",
        ),
        (backend == "command" and tensor > 1, "tensor_parallel", *only_the_program),
        (backend == "command" and expert > 1, "expert_parallel", *only_the_program),
    ):
        if is_so:
            yield (key,), refused(problem, remedy)


def _uneven(sizes: Sizes) -> Iterator[Refusal]:
    """Of each part that does not divide its whole."""
    tensor, replicas = ("tensor_parallel", sizes.tensor), ("its replicas", sizes.replicas)
    gpus = ("the engine's GPUs", sizes.gpus)
    if sizes.backend == "lmdeploy":
        gpus = ("the engine's GPUs", max(sizes.tensor, sizes.expert))
    if sizes.backend == "sglang":
        parts = [("expert_parallel", sizes.expert, tensor), ("nodes_per_engine", sizes.nodes, gpus)]
        parts += [("data_parallel", sizes.data, tensor)] if sizes.dp_attention else []
    else:
        spread = replicas if sizes.replicas > 1 else gpus
        parts = [("data_parallel", sizes.replicas, gpus), ("nodes_per_engine", sizes.nodes, spread)]
    for key, part, (name, whole) in parts:
        if whole % part:
            divisors = (one for one in range(1, whole + 1) if whole % one == 0)
            remedy = f"write {listed(divisors, 'or')}, or make that a multiple of {part}"
            yield (key,), refused(f"{part} does not divide {name}, {whole}", remedy)


#: How long SGLang itself waits for the token of a health check, in whole seconds.
#: Source: SGLang 0.5, srt/entrypoints/http_server.py
SGLANG_TIMEOUT = "SGLANG_HEALTH_CHECK_TIMEOUT"
_SGLANG_TIMEOUT_S = 20

_MODELS = {"sglang": "SGLang", "lmdeploy": "LMDeploy", "vllm": "vLLM"}
#: What a remedy writes for such a key; N for any other.
_EXAMPLES = {"model": "PATH_OR_NAME", "dp_attention": "true, and data_parallel: N"}


@cache
def _ours() -> Mapping[str, Mapping[str, list[str]]]:
    """The arguments that are made from other keys, by backend and key."""
    return tomllib.loads(Path(__file__).with_name("backends.toml").read_text(encoding="utf-8"))


def sglang_timeout_s(timeout_s: float) -> int:
    """Until when SGLang answers a health check itself: well within the fleet's own timeout, for a
    client that gives up first never hears of a failure."""
    return max(1, min(_SGLANG_TIMEOUT_S, int(timeout_s * 0.8)))


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
    if (sizes := Sizes.of(written)) is not None:
        yield from size_faults(sizes)
    recovery, health = mapping(written.get("recovery")), mapping(written.get("health"))
    engines, within_s = written.get("engines", 1), written.get("start_within_s", 1800)
    for place, keys, name, most in (
        ("recovery", recovery, "min_active", ("engines", engines)),
        ("recovery", recovery, "backoff_s", ("max_backoff_s", recovery.get("max_backoff_s"))),
        ("health", health, "first_after_s", ("start_within_s", within_s)),
    ):
        number, (limit, limit_number) = keys.get(name), most
        if is_number(number) and is_number(limit_number) and number > limit_number:
            problem = f"{number:g} is above {limit}, {limit_number:g}"
            yield (place, name), refused(problem, f"write {limit_number:g} or less")


def _of_a_command(written: Mapping[str, Any]) -> Iterator[Refusal]:
    texts = str([written.get(key) for key in ("command", "args", "env")])
    if written.get("command") is None:
        example = 'command: [python, serve.py, --port, "${server.port}"]'
        yield ("command",), refused("missing: the backend is `command`", f"write {example}")
    elif f"{SERVER}port" not in names_of(texts):
        problem = "nothing says ${server.port}, so a server can't know where it is to listen"
        remedy = 'write for example --port, "${server.port}"; an environment variable will do too'
        yield ("command",), refused(problem, remedy)


def _of_a_model(backend: str, written: Mapping[str, Any]) -> Iterator[Refusal]:
    name, health = _MODELS[backend], mapping(written.get("health"))
    if written.get("model") is None:
        yield ("model",), refused(f"missing: {name} serves one", "write model: PATH_OR_NAME")
    if written.get("command") is not None:
        problem = f"is for the backend `command`: {name}'s is made from the other keys"
        yield ("command",), refused(problem, "leave it out; more arguments go into args")
    for index, word in enumerate(_words(written.get("args"))):
        for key, flags in _ours()[backend].items():
            if _flag(word, backend) in flags:
                problem = f"{word.partition('=')[0]} is set for each server"
                is_made = key != "none"
                remedy = f"write {key}: {_EXAMPLES.get(key, 'N')}" if is_made else "leave it out"
                yield ("args", index), refused(problem, remedy)
    for key in ("path", "token"):
        if health.get(key) is not None:
            problem = f"is for the backend `command`: {name}'s own is known"
            yield ("health", key), refused(problem, "leave it out")
    if backend != "sglang":
        return
    if mapping(written.get("env")).get(SGLANG_TIMEOUT) is not None:
        remedy = "leave it out, and write health: {timeout_s: 15}"
        yield ("env", SGLANG_TIMEOUT), refused("is made from health.timeout_s", remedy)
    if is_number(timeout_s := health.get("timeout_s")) and timeout_s <= 1:
        problem = f"{timeout_s:g}: SGLang takes a second at least to say yes or no"
        yield ("health", "timeout_s"), refused(problem, "write more than 1")


def _flag(word: str, backend: str) -> str:
    """The option that a word is, as the backend's parser reads it: vLLM takes either dash."""
    name = word.partition("=")[0]
    return name.replace("_", "-") if backend == "vllm" and name.startswith("--") else name


def _words(value: object) -> list[str]:
    return [str(word) for word in value] if isinstance(value, list | tuple) else []


Backend = Literal["sglang", "lmdeploy", "vllm", "command"]
#: A path on the server, such as `/health`.
UrlPath = Annotated[str, Field(strict=True, pattern=r"^/\S*$")]


class FleetToken(Model):
    """A request by which a server generates a token."""

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
    """How the fleet's servers are asked whether they still work."""

    interval_s: Seconds = Field(30, description="Between two sweeps of all servers.")
    timeout_s: Seconds = Field(
        15,
        description="An answer that takes longer is a miss; more than the backend's own timeout.",
    )
    misses: NoneOrMore = Field(
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


def _is_budget(value: object) -> object:
    if value != UNLIMITED and (type(value) is not int or value < 1):
        problem = f"must be a whole number, 1 or more, or {UNLIMITED}, found {shown(value)}"
        raise refused(problem, "leave it out for 3 for each engine")
    return value


Budget = Annotated[Count | Literal["unlimited"], BeforeValidator(_is_budget)]


class FleetRecovery(Model):
    """How servers that failed are started again."""

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
    """What the fleet's servers serve."""

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
        yield from fleet_faults(written)

    @cached_property
    def sizes(self) -> Sizes:
        """How large its engines are. Raises: ValueError, never for a fleet that was validated."""
        sizes = Sizes.of(self.model_dump())
        if sizes is None:
            raise ValueError("the fleet has no backend")
        return sizes
