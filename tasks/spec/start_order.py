"""The order in which components start, where a spec says it apart from the order of their keys.

The keys of a file have an order; a JSONB column, in which a Prefect server on PostgreSQL keeps
parameters, sorts them by length and then by bytes. A list keeps its order everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from tasks.spec.values import Refusal, did_you_mean, refused

KEY = "start_order"


def in_start_order(written: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """The written spec with its components in the order of `start_order`, which then names all of
    them: those that it left out come last, as they are written.

    So a component that is added in a form need not be named twice, and one that a form leaves out
    by null need not be taken out of the list. Without the key, or with a faulty one, the spec stays
    as it is.
    """
    order, components = written.get(KEY), written.get("components")
    if not order or not isinstance(order, list | tuple) or not isinstance(components, Mapping):
        return written
    if not all(isinstance(name, str) for name in order) or any(refusals_of_order(written)):
        return written
    ordered = {name: components[name] for name in [*order, *components]}
    named = [name for name, component in ordered.items() if component is not None]
    return {**written, KEY: named, "components": ordered}


def refusals_of_order(written: Mapping[str, Any]) -> Iterator[Refusal]:
    """One for each name in `start_order` that is no component's, or stands there twice."""
    order, components = written.get(KEY), written.get("components")
    if not isinstance(order, list | tuple) or not isinstance(components, Mapping):
        return
    for index, name in enumerate(order):
        if not isinstance(name, str):
            continue
        if name not in components:
            known = [str(one) for one in components]
            remedy = did_you_mean(name, known) or f"take it out; known are {', '.join(known)}"
            yield (KEY, index), refused(f"there is no component {name!r}", remedy)
        elif name in order[:index]:
            yield (KEY, index), refused(f"names {name!r} again", "name each component once")
