"""How large the engines of a fleet are: ranks, servers, GPUs of each node."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from tasks.spec.values import Refusal, refused

_DEFAULTS: Mapping[str, int | None] = {
    "engines": 1,
    "nodes_per_engine": 1,
    "gpus_per_node": None,
    "tensor_parallel": 1,
    "expert_parallel": 1,
    "data_parallel": 1,
}
#: How a pipeline's depth is written among `args`; no key of the spec sets it.
_PIPELINE = {
    "sglang": ("--pp-size", "--pipeline-parallel-size"),
    "vllm": ("-pp", "--pipeline-parallel-size"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The numbers that a fleet is cut by."""

    #: The keys of the spec that they come from.
    KEYS: ClassVar = (*_DEFAULTS, "backend", "args")

    backend: str
    #: Inference engines of the fleet.
    engines: int
    #: Nodes that one engine spans.
    nodes: int
    #: GPUs of one engine on each of them, where it was written.
    gpus_per_node: int | None
    tensor: int
    expert: int
    #: As written; `replicas` is what it comes to.
    data: int
    #: Stages of a pipeline, from the arguments.
    pipeline: int

    @classmethod
    def of(cls, written: Mapping[str, Any]) -> Sizes | None:
        """From the keys of a spec; None where one is no number, which is its own fault."""
        found = {key: written.get(key, default) for key, default in _DEFAULTS.items()}
        for key, number in found.items():
            if number is None and key == "gpus_per_node":
                continue
            if not isinstance(number, int) or isinstance(number, bool) or number < 1:
                return None
        backend = written.get("backend")
        if not isinstance(backend, str):
            return None
        return cls(
            backend=backend,
            engines=found["engines"] or 1,
            nodes=found["nodes_per_engine"] or 1,
            gpus_per_node=found["gpus_per_node"],
            tensor=found["tensor_parallel"] or 1,
            expert=found["expert_parallel"] or 1,
            data=found["data_parallel"] or 1,
            pipeline=_pipeline(backend, written.get("args")),
        )

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
        return self.tensor * self.pipeline * self.data

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


def _pipeline(backend: str, args: object) -> int:
    words = [str(word) for word in args] if isinstance(args, list | tuple) else []
    for index, word in enumerate(words):
        name, _, value = word.partition("=")
        if name in _PIPELINE.get(backend, ()):
            value = value or "".join(words[index + 1 : index + 2])
            return int(value) if value.isdecimal() and int(value) >= 1 else 1
    return 1


def size_faults(sizes: Sizes) -> Iterator[Refusal]:
    """What does not divide, or what the backend itself would refuse hours later."""
    judge = {"sglang": _sglang, "lmdeploy": _lmdeploy, "vllm": _vllm, "command": _command}
    found = list(judge[sizes.backend](sizes)) if sizes.backend in judge else []
    yield from found
    asked = sizes.gpus_per_node
    if found or sizes.backend == "command":
        return
    if sizes.gpus % sizes.nodes:
        problem = f"{sizes.nodes} nodes do not divide the engine's {sizes.gpus} GPUs"
        yield ("nodes_per_engine",), refused(problem, f"write {_divisors(sizes.gpus)}")
    elif asked is not None and asked * sizes.nodes != sizes.gpus:
        across = f"{asked} on each of {sizes.nodes} nodes" if sizes.nodes > 1 else f"{asked}"
        problem = f"one engine has {across}, but {_product(sizes)} ask for {sizes.gpus} GPUs"
        remedy = f"write {sizes.gpus // sizes.nodes}, or leave it out"
        yield ("gpus_per_node",), refused(problem, remedy)


def _sglang(sizes: Sizes) -> Iterator[Refusal]:
    if sizes.data > 1 and sizes.nodes > 1:
        problem = "SGLang has no replicas in an engine that spans nodes"
        yield ("data_parallel",), refused(problem, f"write 1, and engines: {sizes.data}")
    if (sizes.tensor * sizes.pipeline) % sizes.nodes:
        problem = f"SGLang can't cut {sizes.tensor * sizes.pipeline} ranks over {sizes.nodes} nodes"
        yield ("tensor_parallel",), refused(problem, f"write a multiple of {sizes.nodes}")
    if sizes.tensor % sizes.expert:
        problem = f"SGLang spreads experts over tensor_parallel, {sizes.tensor}, not over more"
        yield ("expert_parallel",), refused(problem, f"write {_divisors(sizes.tensor)}")


def _lmdeploy(sizes: Sizes) -> Iterator[Refusal]:
    if sizes.expert > 1 and sizes.tensor > 1:
        problem = f"LMDeploy has either this or tensor_parallel, which is {sizes.tensor}"
        yield ("expert_parallel",), refused(problem, "write 1 for one of them")
        return
    width = max(sizes.tensor, sizes.expert)
    if sizes.data > 1 and width == 1:
        problem = "LMDeploy has replicas only of an engine with tensor or expert parallelism"
        yield ("data_parallel",), refused(problem, f"write 1, and engines: {sizes.data}")
    elif width % sizes.replicas:
        problem = f"LMDeploy can't share {width} GPUs among {sizes.replicas} replicas"
        yield ("data_parallel",), refused(problem, f"write {_divisors(width)}")
    if sizes.replicas > 1 and sizes.replicas % sizes.nodes:
        problem = f"{sizes.replicas} replicas are no whole number on each of {sizes.nodes} nodes"
        yield ("data_parallel",), refused(problem, f"write a multiple of {sizes.nodes}")


def _vllm(sizes: Sizes) -> Iterator[Refusal]:
    width = sizes.tensor * sizes.data
    if sizes.expert not in (1, width):
        problem = f"vLLM spreads experts over all {width} GPUs of tensor and data parallelism"
        yield ("expert_parallel",), refused(problem, f"write {width}, or 1 for none")
    if sizes.data > 1 and sizes.data % sizes.nodes:
        problem = f"{sizes.data} replicas are no whole number on each of {sizes.nodes} nodes"
        yield ("data_parallel",), refused(problem, f"write a multiple of {sizes.nodes}")
    elif sizes.data == 1 and (sizes.tensor * sizes.pipeline) % sizes.nodes:
        problem = f"vLLM can't cut {sizes.tensor * sizes.pipeline} ranks over {sizes.nodes} nodes"
        yield ("tensor_parallel",), refused(problem, f"write a multiple of {sizes.nodes}")


def _command(sizes: Sizes) -> Iterator[Refusal]:
    for key, number in (("tensor_parallel", sizes.tensor), ("expert_parallel", sizes.expert)):
        if number > 1:
            problem = "only the program of a command knows how it uses its GPUs"
            yield (key,), refused(problem, "write it in the command, and gpus_per_node: N")
    if sizes.data > 1 and sizes.data % sizes.nodes:
        problem = f"{sizes.data} replicas are no whole number on each of {sizes.nodes} nodes"
        yield ("data_parallel",), refused(problem, f"write a multiple of {sizes.nodes}")
    elif sizes.gpus % sizes.servers:
        problem = f"{sizes.servers} servers can't share {sizes.gpus} GPUs"
        yield (
            ("gpus_per_node",),
            refused(problem, f"write a multiple of {sizes.servers // sizes.nodes}"),
        )


def _product(sizes: Sizes) -> str:
    if sizes.backend == "lmdeploy":
        return "tensor and expert parallelism"
    return (
        "tensor, pipeline and data parallelism"
        if sizes.pipeline > 1
        else ("tensor and data parallelism")
    )


def _divisors(number: int) -> str:
    return _listed([part for part in range(1, number + 1) if number % part == 0])


def _listed(numbers: Sequence[int]) -> str:
    *most, last = map(str, numbers)
    return f"{', '.join(most)} or {last}" if most else last
