"""Commands, environment variables and health checks of the inference servers of each backend.

All functions compute their results from the fleet's spec and the place of a server. They do no I/O.
`docs/extending.md` explains how to add a backend.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.rollout import lmdeploy_replica
from tasks.spec.placeholders import substitute
from tasks.spec.rollout import SGLANG_TIMEOUT, Rollout, choose_sglang_timeout_s
from tasks.spec.values import select_literals


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """One HTTP request to a server."""

    #: HTTP method in upper case, such as `POST`.
    method: str
    #: Path and query of the request. The path begins with `/`.
    path: str
    #: Body of the request, which is sent as JSON. None to send no body.
    body: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Questions:
    """The requests that check, pause and resume the servers of a fleet."""

    #: Readiness request. A server that is ready answers the request with 200.
    ready: Ask
    #: Request that makes the engine generate a token. The server then answers 200. None if the
    #: backend has no request of this kind.
    token: Ask | None
    #: Request that pauses all generation of a server, until the request `resume` is sent. None if
    #: the backend cannot pause.
    pause: Ask | None = None
    #: Request that resumes the paused generation of a server. None if the backend cannot pause.
    resume: Ask | None = None


_HEALTH = Ask(method="GET", path="/health")
#: Source text of `lmdeploy_replica.py`. LMDeploy's servers run this text with `python -c`, so the
#: file need not be installed on the machine of the servers.
_REPLICA_SOURCE = Path(lmdeploy_replica.__file__).read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Position of one server among the engines and nodes of its fleet, and its addresses."""

    #: Index of the server's engine among the engines of the fleet.
    engine: int
    #: Index of the server among the servers of its engine, from 0.
    index: int
    #: Ranks of the server's GPUs. The first rank is also the rank of the server.
    ranks: tuple[int, ...]
    #: Index of the server's node among the nodes of the fleet.
    node: int
    #: Host name or address that the server listens on. Empty until addresses are assigned.
    host: str = ""
    #: Port that the server listens on. None if the server has no HTTP API.
    port: int | None = None
    #: Host and port at which the processes of the engine connect to each other. None if the engine
    #: has only one process.
    meeting: tuple[str, int] | None = None

    @property
    def rank(self) -> int:
        """Rank of the server, which is the rank of its first GPU."""
        return self.ranks[0]

    def filled(self, text: str) -> str:
        """Return a text with the placeholders `${server.NAME}` replaced by values of this server.

        All other placeholders remain unchanged.
        """
        values = {
            "server.port": str(self.port),
            "server.host": self.host,
            "server.rank": str(self.rank),
            "server.node": str(self.node),
            "server.group": str(self.engine),
        }
        return substitute(text, lambda name: values.get(name, f"${{{name}}}"))


@dataclass(frozen=True)
class Backend(ABC):
    """Describes the servers of one fleet. Each kind of inference engine has a subclass.

    By default, each node of an engine runs one server, and the engine's first server is the
    entrypoint.
    """

    #: The spec of the fleet.
    fleet: Rollout

    def is_entrypoint(self, index: int) -> bool:
        """Return True if a server accepts rollout requests and shows the health of its engine.

        Args:
            index: Index of the server among the servers of its engine.
        """
        return index == 0

    def has_api(self, index: int) -> bool:
        """Return True if a server listens for HTTP requests.

        Args:
            index: Index of the server among the servers of its engine.
        """
        return True

    @property
    def meets(self) -> bool:
        """True if the processes of one engine need a shared address to find each other."""
        return self.fleet.nodes_per_engine > 1

    @abstractmethod
    def questions(self) -> Questions:
        """Return the requests that check, pause and resume the servers."""

    @abstractmethod
    def argv(self, place: Place) -> tuple[str, ...]:
        """Return the program of a server and its arguments.

        The result does not contain the further arguments in the user's spec. The caller appends
        them.
        """

    def env(self, place: Place) -> dict[str, str]:
        """Return the environment variables that a server needs in addition to those of the spec."""
        return {}

    def _completion(self, name_option: str) -> Ask:
        """Return a request that generates one token through the OpenAI-compatible API.

        Args:
            name_option: Option of the server's command line that renames the served model.
        """
        model = _read_option(self.fleet.args or (), name_option) or self.fleet.model
        body = {"model": model, "prompt": "1", "max_tokens": 1, "temperature": 0}
        return Ask(method="POST", path="/v1/completions", body=body)


class Sglang(Backend):
    """SGLang.

    Only the first node of an engine has the real HTTP server. On the other nodes, SGLang starts a
    stub that answers 200 as long as its process lives.

    The class uses the option `--enable-dp-attention`, which every version of SGLang accepts. SGLang
    0.5.23 calls this option deprecated.

    Source: SGLang 0.5, srt/arg_groups/fields/parallel.py, srt/arg_groups/parallel_hook.py,
    srt/entrypoints/http_server.py
    """

    def questions(self) -> Questions:
        return Questions(
            ready=_HEALTH,
            token=Ask(method="GET", path="/health_generate"),
            # The mode `retract` puts the running requests back into the server's queue and frees
            # their KV cache, which the server recomputes later.
            pause=Ask(method="POST", path="/pause_generation", body={"mode": "retract"}),
            resume=Ask(method="POST", path="/continue_generation", body={}),
        )

    def argv(self, place: Place) -> tuple[str, ...]:
        fleet = self.fleet
        words = ["python", "-m", "sglang.launch_server", "--model-path", fleet.model or ""]
        words += ["--tp-size", str(fleet.tensor_parallel)]
        if fleet.expert_parallel > 1:
            words += ["--ep-size", str(fleet.expert_parallel)]
        if fleet.data_parallel > 1:
            words += ["--dp-size", str(fleet.data_parallel)]
        if fleet.dp_attention:
            words.append("--enable-dp-attention")
        if place.meeting is not None:
            words += ["--nnodes", str(fleet.nodes_per_engine), "--node-rank", str(place.index)]
            words += ["--dist-init-addr", "{}:{}".format(*place.meeting)]
        return (*words, "--host", place.host, "--port", str(place.port))

    def env(self, place: Place) -> dict[str, str]:
        return {SGLANG_TIMEOUT: str(choose_sglang_timeout_s(self.fleet.health.timeout_s))}


class Lmdeploy(Backend):
    """LMDeploy.

    An engine with tensor parallelism runs a single server. An engine with replicas runs one server
    for each replica, which `lmdeploy_replica.py` starts. LMDeploy's own command line is not used:
    it would start all replicas in one process, ignore the assigned devices, and listen on the
    machine's external address.

    Source: LMDeploy 0.18, cli/serve.py, serve/openai/launch_server.py, pytorch/envs.py
    """

    def is_entrypoint(self, index: int) -> bool:
        return True

    @property
    def meets(self) -> bool:
        return self.fleet.nodes_per_engine > 1 or self.fleet.sizes.replicas > 1

    def questions(self) -> Questions:
        # The endpoint /health reports a hanging scheduler only after 90 s, and its answer may be
        # 12 s old. So each health check also lets the server generate a token.
        return Questions(ready=_HEALTH, token=self._completion("--model-name"))

    def argv(self, place: Place) -> tuple[str, ...]:
        fleet = self.fleet
        replicas = fleet.sizes.replicas
        words = ["python", "-c", _REPLICA_SOURCE] if replicas > 1 else ["lmdeploy"]
        words += ["serve", "api_server", fleet.model or "", "--backend", "pytorch"]
        if fleet.tensor_parallel > 1 or replicas == 1:
            words += ["--tp", str(fleet.tensor_parallel)]
        if replicas > 1:
            words += ["--dp", str(replicas), "--ep", str(fleet.expert_parallel)]
            words += ["--nnodes", str(replicas), "--node-rank", str(place.index)]
        return (*words, "--server-name", place.host, "--server-port", str(place.port))

    def env(self, place: Place) -> dict[str, str]:
        variables: dict[str, str] = {}
        has_replicas = self.fleet.sizes.replicas > 1
        if place.meeting is not None:
            kind = "DP" if has_replicas else "DIST"
            variables[f"LMDEPLOY_{kind}_MASTER_ADDR"] = place.meeting[0]
            variables[f"LMDEPLOY_{kind}_MASTER_PORT"] = str(place.meeting[1])
        if has_replicas or self.fleet.nodes_per_engine == 1:
            # LMDeploy runs its workers under Ray. With "local", LMDeploy starts a private Ray
            # instance with the GPUs that it already has. On the run's Ray cluster, LMDeploy would
            # request further GPUs.
            ray_address = select_literals(self.fleet.env).get("RAY_ADDRESS", "local")
            variables["RAY_ADDRESS"] = ray_address
        return variables


class Vllm(Backend):
    """vLLM.

    Only the first server of an engine has the HTTP API. The other servers run with `--headless`.

    Source: vLLM 0.33, entrypoints/cli/serve.py, engine/arg_utils.py
    """

    def has_api(self, index: int) -> bool:
        return index == 0

    def questions(self) -> Questions:
        # vLLM's HTTP server answers /health with 200 even if its engine hangs. Only a request that
        # generates a token finds a hanging engine.
        return Questions(
            ready=_HEALTH,
            token=self._completion("--served-model-name"),
            pause=Ask(method="POST", path="/pause?mode=keep"),
            resume=Ask(method="POST", path="/resume"),
        )

    def argv(self, place: Place) -> tuple[str, ...]:
        fleet = self.fleet
        words = ["vllm", "serve", fleet.model or "", "-tp", str(fleet.tensor_parallel)]
        if fleet.data_parallel > 1:
            words += ["-dp", str(fleet.data_parallel)]
        if place.meeting is not None:
            words += self._multi_node_arguments(place.index, *place.meeting)
        if fleet.expert_parallel > 1:
            words.append("-ep")
        if place.port is not None:
            words += ["--host", place.host, "--port", str(place.port)]
        return tuple(words)

    def _multi_node_arguments(self, index: int, host: str, port: int) -> list[str]:
        """Return the command-line arguments of a server whose engine spans several nodes.

        Args:
            index: Index of the server among the servers of its engine.
            host: Host at which the servers of the engine connect to each other.
            port: Port on this host at which the servers connect to each other.
        """
        nodes = self.fleet.nodes_per_engine
        replicas = self.fleet.data_parallel
        if replicas == 1:
            words = ["--nnodes", str(nodes), "-r", str(index)]
            words += ["--master-addr", host, "--master-port", str(port)]
            return [*words, "--headless"] if index else words
        replicas_per_node = replicas // nodes
        words = ["-dpl", str(replicas_per_node), "-dpa", host, "-dpp", str(port)]
        if index:
            words += ["--headless", "-dpr", str(index * replicas_per_node)]
        return words


class AnyCommand(Backend):
    """A server of any kind, whose command in the spec has placeholders such as `${server.port}`.

    An engine with replicas runs one server for each replica, and each server is an entrypoint. An
    engine without replicas runs one server on each node, and the first server is the entrypoint.
    """

    @property
    def meets(self) -> bool:
        return False

    def is_entrypoint(self, index: int) -> bool:
        return self.fleet.data_parallel > 1 or index == 0

    def questions(self) -> Questions:
        health = self.fleet.health
        token_request: Ask | None = None
        if (token := health.token) is not None:
            method = "GET" if token.json_ is None else "POST"
            token_request = Ask(method=method, path=token.path, body=token.json_)
        ready = _HEALTH if health.path is None else Ask(method="GET", path=health.path)
        return Questions(ready=ready, token=token_request)

    def argv(self, place: Place) -> tuple[str, ...]:
        return tuple(self.fleet.command or ())


#: Mapping from the backend's name in a spec to its class.
BACKENDS: Mapping[str, type[Backend]] = {
    "sglang": Sglang,
    "lmdeploy": Lmdeploy,
    "vllm": Vllm,
    "command": AnyCommand,
}


def backend_of(fleet: Rollout) -> Backend:
    """Return the backend that the spec of a fleet names."""
    return BACKENDS[fleet.sizes.backend](fleet)


def _read_option(words: tuple[str, ...], name: str) -> str | None:
    """Return the value of an option in a command line, or None if the option is missing or empty.

    If the command line holds the option twice, the last value counts.

    Args:
        words: The command line. An option is written as `--name VALUE` or `--name=VALUE`.
        name: Name of the option, with its dashes.
    """
    last_value = ""
    for index, word in enumerate(words):
        option, equals, value = word.partition("=")
        if option == name:
            last_value = value if equals else "".join(words[index + 1 : index + 2])
    return last_value or None
