"""The order of a pipeline's stages: which stages must have ended before a stage may begin.

The functions work on plain data, so that they can also check a pipeline with faults.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tasks.spec.errors import Fault
from tasks.spec.formatting import suggest_name


def list_needs(stages: Sequence[Mapping[str, Any]]) -> dict[str, tuple[str, ...]]:
    """Return a mapping from the name of each stage to the names of the stages it waits for.

    A stage with the key `needs` waits for the stages in this key. A stage without `needs` waits for
    all stages before it in the file.
    """
    names: list[str] = []
    needs: dict[str, tuple[str, ...]] = {}
    for stage in stages:
        written = stage.get("needs")
        name = str(stage.get("name"))
        earlier = [other for other in names if other != name]
        wanted = earlier
        if isinstance(written, list | tuple):
            wanted = [need for need in written if isinstance(need, str)]
        needs[name] = tuple(dict.fromkeys(wanted))
        names.append(name)
    return needs


def list_ancestors(name: str, needs: Mapping[str, Sequence[str]]) -> tuple[str, ...]:
    """Return the names of all stages that must end before a stage starts.

    Example: if stage A waits for B, and B waits for C, the result for A is B and C.

    Args:
        name: Name of the stage.
        needs: Mapping from each stage to the stages that it waits for. Unknown names are ignored.
            The graph may contain a cycle.
    """
    found: dict[str, None] = {}
    waiting = [*needs.get(name, ())]
    while waiting:
        need = waiting.pop()
        if need in needs and need not in found:
            found[need] = None
            waiting.extend(needs[need])
    return tuple(other for other in needs if other in found)


def find_graph_faults(indexed_stages: Mapping[int, Mapping[str, Any]]) -> Iterator[Fault]:
    """Yield a fault for each unknown name in `needs`, and for each cycle of stages.

    Args:
        indexed_stages: The stages of a pipeline, as plain data. Each key is the index of a stage in
            the list `stages` of the pipeline spec.
    """
    needs = list_needs([*indexed_stages.values()])
    for index, stage in indexed_stages.items():
        written = stage.get("needs")
        for position, need in enumerate(written if isinstance(written, list | tuple) else ()):
            if isinstance(need, str) and need not in needs:
                remedy = suggest_name(need, needs) or f"known stages: {', '.join(needs)}"
                path = f"stages.{index}.needs.{position}"
                yield Fault(path=path, problem=f"there is no stage {need!r}", remedy=remedy)

    reported: set[str] = set()
    for index, stage in indexed_stages.items():
        name = str(stage.get("name"))
        if name in reported or name not in list_ancestors(name, needs):
            continue
        cycle = find_cycle(name, needs)
        reported.update(cycle)
        text = " needs ".join([*cycle, cycle[0]])
        remedy = "remove a name from the list `needs` of one of these stages"
        if any("needs" not in other for other in _select(indexed_stages, cycle)):
            remedy += (
                ". A stage without the key `needs` waits for all stages before it: write "
                "`needs: []` in a stage that needs none of them"
            )
        yield Fault(
            path=f"stages.{index}.needs",
            problem=f"stages need each other in a cycle: {text}",
            remedy=remedy,
        )


def _select(
    indexed_stages: Mapping[int, Mapping[str, Any]], names: Sequence[str]
) -> list[Mapping[str, Any]]:
    """Return the stages with these names."""
    return [stage for stage in indexed_stages.values() if str(stage.get("name")) in names]


def find_cycle(name: str, needs: Mapping[str, Sequence[str]]) -> list[str]:
    """Return one of the shortest cycles through a stage. The stage must be part of a cycle.

    Args:
        name: Name of the stage.
        needs: Mapping from each stage to the stages that it waits for.

    Returns:
        The names along the cycle, beginning with `name`. Each stage needs the next one.
    """
    paths = [[name]]
    visited: set[str] = set()
    while paths:
        path = paths.pop(0)
        for need in needs.get(path[-1], ()):
            if need == name:
                return path
            if need in needs and need not in visited:
                visited.add(need)
                paths.append([*path, need])
    raise ValueError(f"stage {name} is in no cycle")
