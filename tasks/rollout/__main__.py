"""The command `muster plan`, which shows the plan of a run's inference fleet and starts nothing."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from json import dumps

from cyclopts import App

from tasks.rollout.component import fleet_faults, node_gpus
from tasks.rollout.topology import ServerSlot, TopologyPlan, plan_topology
from tasks.show.arguments import EXIT_DONE, AsJson, Overrides, SpecFile, run
from tasks.spec.errors import Fault, InvalidSpec
from tasks.spec.formatting import join_commas
from tasks.spec.loading import load_spec
from tasks.spec.run import RunSpec
from tasks.spec.secrets import MASK, mask_env, mask_text

#: Largest number of characters of one command-line argument that are shown.
_ARGUMENT_AT_MOST = 60


def plan(spec: SpecFile, /, *, set: Overrides = (), json: AsJson = False) -> int:
    """Show the inference servers that a run would start, without starting a server.
    The output lists the engines, the servers with their commands and hosts, and the groups of
    servers that are stopped and started together. The output also lists the training mesh. For
    each server that receives new weights, the mesh contains the inference ranks that get their
    weights through this server.

    Hosts and ports are examples: node-0 and so on, or 127.0.0.1 for local servers, and consecutive
    ports. Placeholders such as ${run.dir} stay as they are. Variables that look secret are masked.

    Exit: 0 printed, 2 the spec is invalid or has no fleet.
    """
    loaded = load_spec(spec, set)
    # The output shows a mask instead of each secret. So the run's Prefect Secret blocks are not
    # read.
    loaded = loaded.with_secrets(dict.fromkeys(loaded.secret_blocks.values(), MASK))
    topology = _mask_secrets(_plan_fleet(loaded, str(spec)), loaded.secrets)
    if json:
        print(dumps(topology.as_json(), indent=2))
    else:
        print("\n".join(_describe_plan(topology)))
    return EXIT_DONE


def _plan_fleet(spec: RunSpec, source: str) -> TopologyPlan:
    """Return the plan of the fleet in a run spec.

    Args:
        spec: The run spec.
        source: Name of the spec's file, for the error message.

    Raises:
        InvalidSpec: The spec has no fleet, or a fleet that no run could start.
    """
    if spec.fleet is None:
        problem = "the spec has no component `rollout`, so there are no inference servers to plan"
        remedy = "write `components: {rollout: {backend: sglang, model: PATH_OR_NAME}}`"
        raise InvalidSpec((Fault(path="components", problem=problem, remedy=remedy),), source)
    if faults := fleet_faults(spec, spec.fleet):
        raise InvalidSpec(tuple(faults), source)
    return plan_topology(spec.fleet, node_gpus(spec))


def _mask_secrets(plan: TopologyPlan, secrets: frozenset[str]) -> TopologyPlan:
    """Return the plan with all secrets replaced by a mask.

    The function masks two kinds of secrets: the values of environment variables whose names suggest
    a secret, and each known secret in a command-line argument.

    Args:
        plan: The plan of the fleet.
        secrets: The known secrets.
    """

    def mask_slot(slot: ServerSlot) -> ServerSlot:
        argv = tuple(mask_text(word, secrets) for word in slot.argv)
        return replace(slot, env=mask_env(slot.env), argv=argv)

    engines = tuple(
        replace(engine, servers=tuple(map(mask_slot, engine.servers))) for engine in plan.engines
    )
    return replace(plan, engines=engines)


def _describe_plan(plan: TopologyPlan) -> Iterator[str]:
    """Yield the lines that show a plan to a person."""
    for index, engine in enumerate(plan.engines):
        meeting = f", rendezvous at {engine.dist_init}" if engine.dist_init else ""
        nodes = join_commas(engine.nodes)
        yield f"engine {index}: ranks {_format_range(engine.ranks)} on node {nodes}{meeting}"
        for slot in engine.servers:
            role = "entrypoint" if slot.is_entrypoint else "no entrypoint"
            gpus = f", GPU bundles {_format_range(slot.bundles)}" if slot.bundles else ", no GPUs"
            url = slot.url or "no HTTP API"
            yield f"  server {slot.rank}: node {slot.node}, {url}, {role}{gpus}"
            env = (f"{name}={_shorten(text)}" for name, text in slot.env.items())
            yield f"    {' '.join([*env, *map(_shorten, slot.argv)])}"
    meshes = " ".join(f"[{_format_range(ranks)}]" for ranks in plan.training_mesh)
    yield f"training mesh: {meshes}"


def _shorten(word: str) -> str:
    """Return a command-line argument on one line of at most 60 characters, quoted for a shell."""
    line = " ".join(word.split()) if "\n" in word else word
    if len(line) > _ARGUMENT_AT_MOST:
        line = f"{line[: _ARGUMENT_AT_MOST - 3]}..."
    return shlex.quote(line)


def _format_range(numbers: Sequence[int]) -> str:
    """Return the numbers as text: more than two consecutive numbers as `3-7`, others as `3,5,6`."""
    is_range = len(numbers) > 2 and list(numbers) == list(range(numbers[0], numbers[-1] + 1))
    return f"{numbers[0]}-{numbers[-1]}" if is_range else join_commas(numbers)


if __name__ == "__main__":
    app = App(
        name="python -m tasks.rollout",
        help="Show the plan for the inference engines of a run spec, like `muster plan SPEC`.",
    )
    app.command(plan)
    raise SystemExit(run(app))
