"""The spec key `start_order`, which lists the components in the order of their start.

Without this key, components start in the order in which the spec file lists them. A Prefect server
on PostgreSQL does not keep that order, because a JSONB column sorts the keys of a mapping. It keeps
the order of a list, such as `start_order`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tasks.spec.formatting import suggest_name
from tasks.spec.values import Refusal, make_refusal

#: Spec key that lists the components in the order of their start.
START_ORDER_KEY = "start_order"


def sort_by_start_order(written: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Return a run spec in which components are sorted according to the key `start_order`.

    Components that are missing in `start_order` come last, in the order of the file. In the result,
    `start_order` is complete: it lists all components whose value is not null. So a user who adds
    or omits a component in the web form of the Prefect UI need not edit `start_order`.

    Args:
        written: The spec as plain data. It is returned unchanged if `start_order` is missing or
            invalid.
    """
    order = written.get(START_ORDER_KEY)
    components = written.get("components")
    if not order or not isinstance(order, list | tuple) or not isinstance(components, Mapping):
        return written
    if not all(isinstance(name, str) for name in order) or any(check_start_order(written)):
        return written
    sorted_components = {name: components[name] for name in [*order, *components]}
    names = [name for name, component in sorted_components.items() if component is not None]
    return {**written, START_ORDER_KEY: names, "components": sorted_components}


def check_start_order(written: Mapping[str, Any]) -> Iterator[Refusal]:
    """Yield a fault for each name in `start_order` that is not the name of a component."""
    order = written.get(START_ORDER_KEY)
    components = written.get("components")
    if not isinstance(order, list | tuple) or not isinstance(components, Mapping):
        return
    for index, name in enumerate(order):
        if isinstance(name, str) and name not in components:
            known_names = [str(known_name) for known_name in components]
            remedy = suggest_name(name, known_names)
            remedy = remedy or f"remove the name; known components: {', '.join(known_names)}"
            yield (START_ORDER_KEY, index), make_refusal(f"there is no component {name!r}", remedy)
