"""What the servers of each backend are: their program and variables, what they are asked.

Pure: from the fleet's spec and a server's place. `docs/extending.md` tells how to add a backend.
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

    method: str
    #: Begins with `/`.
    path: str
    #: Sent as JSON; None: no body.
    body: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Questions:
    """What the servers of a fleet are asked."""

    #: 200 says that the server may be sent requests.
    ready: Ask
    #: 200 says that a token was generated just now; None where the backend has no such request.
    token: Ask | None
    #: By which it stops where it is, with what it generates, and goes on later; None: it can't.
    pause: Ask | None = None
    resume: Ask | None = None


_HEALTH = Ask(method="GET", path="/health")
#: Given to LMDeploy's servers as a text: nothing of ours has to be installed beside it.
_ONE_REPLICA = Path(lmdeploy_replica.__file__).read_text(encoding="utf-8")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Where one server of an engine is."""

    #: Index into the fleet's engines.
    engine: int
    #: Which of its engine's servers it is, from 0.
    index: int
    #: One for each of its GPUs; the first is the server's own.
    ranks: tuple[int, ...]
    #: Index into the fleet's nodes.
    node: int
    #: Where it listens; empty before addresses are given out.
    host: str = ""
    #: None where it has no API.
    port: int | None = None
    #: Host and port at which the processes of its engine find each other.
    meeting: tuple[str, int] | None = None

    @property
    def rank(self) -> int:
        return self.ranks[0]

    def filled(self, text: str) -> str:
        """The text for this server; what is not `${server.NAME}` stays as it is."""
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
    """The servers of one fleet: here one on each node of an engine, the first its entrypoint."""

    fleet: Rollout

    def is_entrypoint(self, index: int) -> bool:
        """Whether this server of an engine accepts rollout requests, and answers for its engine."""
        return index == 0

    def has_api(self, index: int) -> bool:
        """Whether this server of an engine listens at all."""
        return True

    @property
    def meets(self) -> bool:
        """Whether the processes of an engine need an address at which they find each other."""
        return self.fleet.nodes_per_engine > 1

    @abstractmethod
    def questions(self) -> Questions:
        """What its servers are asked."""

    @abstractmethod
    def argv(self, place: Place) -> tuple[str, ...]:
        """The server's program and its arguments; those that the user adds come after them."""

    def env(self, place: Place) -> dict[str, str]:
        """Variables that the server needs to be what it is planned as."""
        return {}

    def _completion(self, name_option: str) -> Ask:
        """One token by OpenAI's API, of the model by the name that it is served under."""
        model = _option_in(self.fleet.args or (), name_option) or self.fleet.model
        body = {"model": model, "prompt": "1", "max_tokens": 1, "temperature": 0}
        return Ask(method="POST", path="/v1/completions", body=body)


class Sglang(Backend):
    """SGLang. A later node serves a stub that says 200 for as long as its process lives.

    DP attention is asked for in the way that every version takes, which 0.5.23 calls deprecated.

    Source: SGLang 0.5, srt/arg_groups/fields/parallel.py, srt/arg_groups/parallel_hook.py,
    srt/entrypoints/http_server.py
    """

    def questions(self) -> Questions:
        return Questions(
            ready=_HEALTH,
            token=Ask(method="GET", path="/health_generate"),
            # What is under way goes back into its queue, and its cache is made anew.
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
    """LMDeploy: one server for an engine with tensor parallelism, one for each replica of another.

    LMDeploy's command line would start the replicas of a node under one process that picks devices
    from 0 on and listens on the machine's outward address.

    Source: LMDeploy 0.18, cli/serve.py, serve/openai/launch_server.py, pytorch/envs.py
    """

    def is_entrypoint(self, index: int) -> bool:
        return True

    @property
    def meets(self) -> bool:
        return self.fleet.nodes_per_engine > 1 or self.fleet.sizes.replicas > 1

    def questions(self) -> Questions:
        # Ready: what a monitor saw, up to 12 s ago; a scheduler that stalls shows after 90 s.
        return Questions(ready=_HEALTH, token=self._completion("--model-name"))

    def argv(self, place: Place) -> tuple[str, ...]:
        fleet, replicas = self.fleet, self.fleet.sizes.replicas
        words = ["python", "-c", _ONE_REPLICA] if replicas > 1 else ["lmdeploy"]
        words += ["serve", "api_server", fleet.model or "", "--backend", "pytorch"]
        if fleet.tensor_parallel > 1 or replicas == 1:
            words += ["--tp", str(fleet.tensor_parallel)]
        if replicas > 1:
            words += ["--dp", str(replicas), "--ep", str(fleet.expert_parallel)]
            words += ["--nnodes", str(replicas), "--node-rank", str(place.index)]
        return (*words, "--server-name", place.host, "--server-port", str(place.port))

    def env(self, place: Place) -> dict[str, str]:
        found: dict[str, str] = {}
        has_replicas = self.fleet.sizes.replicas > 1
        if place.meeting is not None:
            kind = "DP" if has_replicas else "DIST"
            found[f"LMDEPLOY_{kind}_MASTER_ADDR"] = place.meeting[0]
            found[f"LMDEPLOY_{kind}_MASTER_PORT"] = str(place.meeting[1])
        if has_replicas or self.fleet.nodes_per_engine == 1:
            # It runs its workers under Ray. In a cluster it would ask for GPUs that it holds
            # already, so it gets a small one of its own, of what it sees.
            found["RAY_ADDRESS"] = select_literals(self.fleet.env).get("RAY_ADDRESS", "local")
        return found


class Vllm(Backend):
    """vLLM. All servers of an engine but the first are headless, without an API.

    Source: vLLM 0.33, entrypoints/cli/serve.py, engine/arg_utils.py
    """

    def has_api(self, index: int) -> bool:
        return index == 0

    def questions(self) -> Questions:
        # Ready: a flag of the front end, blind to an engine that hangs.
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
            words += self._across_nodes(place.index, *place.meeting)
        if fleet.expert_parallel > 1:
            words.append("-ep")
        if place.port is not None:
            words += ["--host", place.host, "--port", str(place.port)]
        return tuple(words)

    def _across_nodes(self, index: int, host: str, port: int) -> list[str]:
        nodes, replicas = self.fleet.nodes_per_engine, self.fleet.data_parallel
        if replicas == 1:
            words = ["--nnodes", str(nodes), "-r", str(index)]
            words += ["--master-addr", host, "--master-port", str(port)]
            return [*words, "--headless"] if index else words
        local = replicas // nodes
        words = ["-dpl", str(local), "-dpa", host, "-dpp", str(port)]
        return [*words, "--headless", "-dpr", str(index * local)] if index else words


class AnyCommand(Backend):
    """Any server, from a template with `${server.port}` and the like.

    An engine is as many servers as it has replicas, each of them an entrypoint; without replicas,
    one on each of its nodes, of which the first is the entrypoint.
    """

    @property
    def meets(self) -> bool:
        return False

    def is_entrypoint(self, index: int) -> bool:
        return self.fleet.data_parallel > 1 or index == 0

    def questions(self) -> Questions:
        health, asked = self.fleet.health, None
        if (token := health.token) is not None:
            method = "GET" if token.json_ is None else "POST"
            asked = Ask(method=method, path=token.path, body=token.json_)
        ready = _HEALTH if health.path is None else Ask(method="GET", path=health.path)
        return Questions(ready=ready, token=asked)

    def argv(self, place: Place) -> tuple[str, ...]:
        return tuple(self.fleet.command or ())


#: By their names in a spec.
BACKENDS: Mapping[str, type[Backend]] = {
    "sglang": Sglang,
    "lmdeploy": Lmdeploy,
    "vllm": Vllm,
    "command": AnyCommand,
}


def backend_of(fleet: Rollout) -> Backend:
    """What the fleet's servers are."""
    return BACKENDS[fleet.sizes.backend](fleet)


def _option_in(words: tuple[str, ...], name: str) -> str | None:
    """The value of an option among arguments, `--name VALUE` or `--name=VALUE`; the last counts."""
    found = ""
    for index, word in enumerate(words):
        option, equals, value = word.partition("=")
        if option == name:
            found = value if equals else "".join(words[index + 1 : index + 2])
    return found or None
