"""The verb `muster plan`: the plan of a run's fleet, without starting anything."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import replace
from json import dumps

from cyclopts import App

from tasks.rollout.component import fleet_faults, node_gpus
from tasks.rollout.topology import ServerSlot, TopologyPlan, planned
from tasks.show.arguments import EXIT_DONE, AsJson, Overrides, SpecFile, run
from tasks.spec.errors import Fault, InvalidSpec
from tasks.spec.formatting import join_commas
from tasks.spec.loading import load_spec
from tasks.spec.run import RunSpec
from tasks.spec.secrets import MASK, mask_env, mask_text

_ARGUMENT_AT_MOST = 60


def plan(spec: SpecFile, /, *, set: Overrides = (), json: AsJson = False) -> int:
    """Show which inference servers a run would start, and where: engines, servers with their
    commands, groups that live and die together, the training mesh. Nothing is started.

    Hosts and ports stand in for those of a run: node-0 and so on, and ports in a row; local servers
    are on 127.0.0.1. ${run.dir} and the like stay as they are, variables that look secret are
    masked.

    Exit: 0 printed, 2 the spec is invalid or has no fleet.
    """
    loaded = load_spec(spec, set)
    # Nobody asks for what would be masked.
    loaded = loaded.with_secrets(dict.fromkeys(loaded.secret_blocks.values(), MASK))
    found = _without_secrets(_plan_of(loaded, str(spec)), loaded.secrets)
    print(dumps(found.as_json(), indent=2) if json else "\n".join(_in_words(found)))
    return EXIT_DONE


def _plan_of(spec: RunSpec, source: str) -> TopologyPlan:
    """Raises: InvalidSpec, when it has no fleet, or one that a run of it could not start."""
    if spec.fleet is None:
        problem = "has no `rollout`, so there is no fleet to plan"
        remedy = "write components: {rollout: {backend: sglang, model: PATH_OR_NAME}}"
        raise InvalidSpec((Fault(path="components", problem=problem, remedy=remedy),), source)
    if faults := fleet_faults(spec, spec.fleet):
        raise InvalidSpec(tuple(faults), source)
    return planned(spec.fleet, node_gpus(spec))


def _without_secrets(plan: TopologyPlan, secrets: frozenset[str]) -> TopologyPlan:
    """The same with variables that look secret masked, and the secrets wherever they stand."""

    def masked_slot(slot: ServerSlot) -> ServerSlot:
        argv = tuple(mask_text(word, secrets) for word in slot.argv)
        return replace(slot, env=mask_env(slot.env), argv=argv)

    engines = tuple(
        replace(engine, servers=tuple(map(masked_slot, engine.servers))) for engine in plan.engines
    )
    return replace(plan, engines=engines)


def _in_words(plan: TopologyPlan) -> Iterator[str]:
    for index, engine in enumerate(plan.engines):
        at = f", meets at {engine.dist_init}" if engine.dist_init else ""
        yield f"engine {index}: ranks {_span(engine.ranks)} on node {join_commas(engine.nodes)}{at}"
        for slot in engine.servers:
            serves = "entrypoint" if slot.is_entrypoint else "takes part"
            gpus = f", bundles {_span(slot.bundles)}" if slot.bundles else ", no GPUs"
            yield f"  server {slot.rank}: node {slot.node}, {slot.url or 'no API'}, {serves}{gpus}"
            env = (f"{name}={_shown(text)}" for name, text in slot.env.items())
            yield f"    {' '.join([*env, *map(_shown, slot.argv)])}"
    yield f"training mesh: {' '.join(f'[{_span(ranks)}]' for ranks in plan.training_mesh)}"


def _shown(word: str) -> str:
    line = " ".join(word.split()) if "\n" in word else word
    short = line if len(line) <= _ARGUMENT_AT_MOST else f"{line[: _ARGUMENT_AT_MOST - 3]}..."
    return shlex.quote(short)


def _span(numbers: Sequence[int]) -> str:
    is_run = len(numbers) > 2 and list(numbers) == list(range(numbers[0], numbers[-1] + 1))
    return f"{numbers[0]}-{numbers[-1]}" if is_run else join_commas(numbers)


if __name__ == "__main__":
    app = App(name="python -m tasks.rollout", help="The same as `muster plan SPEC`.")
    app.command(plan)
    raise SystemExit(run(app))
