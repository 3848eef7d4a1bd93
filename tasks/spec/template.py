"""Filling the placeholders of a run spec in: `${api.port}` and the like."""

from __future__ import annotations

import re
from collections.abc import Mapping

from tasks.spec import placeholders
from tasks.spec.errors import Fault
from tasks.spec.placeholders import Kind
from tasks.spec.run import Rollout, RunSpec


def names_known(spec: RunSpec) -> frozenset[str]:
    """Every name that this spec may use in a placeholder."""
    return placeholders.names_in(spec.written())


def template_faults(spec: RunSpec) -> tuple[Fault, ...]:
    """One fault for each unknown name and each `${` that is never closed, in file order."""
    return placeholders.faults_in(spec.written())


def ports_needed(spec: RunSpec) -> tuple[str, ...]:
    """The names of the ports to hold for the run, in the order of the components.

    `NAME.port` where some text of the spec uses it, and `NAME.ports.OTHER` for each port listed,
    used or not: the program may find it elsewhere. `rollout.port` is that of a fleet's gateway,
    which listens whether somebody asks it or not.
    """
    used = placeholders.names_used(spec.written())
    needed: list[str] = []
    for name in spec.components:
        if f"{name}.port" in used or isinstance(spec.components[name], Rollout):
            needed.append(f"{name}.port")
        component = spec.processes.get(name)
        needed += [f"{name}.ports.{port}" for port in (component.ports if component else ())]
    return tuple(needed)


def resolve(spec: RunSpec, names: Mapping[str, str]) -> RunSpec:
    """The spec with every placeholder filled in and each `$${` made `${`.

    What is filled in is not looked at again, so do not resolve the result a second time.

    Args:
        spec: As loaded, without `template_faults`.
        names: A value for each name that the spec uses; `progress.total` and `success.step` it
            has itself. In a regular expression a value is matched literally.

    Raises:
        KeyError: A name has no value.
        InvalidSpec: A value does not fit its place, such as a `tcp` address without a port.
    """
    written = spec.written()
    values = {
        f"{part}.{key}": str(number) for part, key, number in placeholders.numbers_in(written)
    }
    values.update(names)

    def filled(_path: str, text: str, kind: Kind) -> str:
        quoted = re.escape if kind is Kind.PATTERN else str
        return placeholders.substituted(text, lambda name: quoted(values[name]), kind)

    return RunSpec.model_validate(placeholders.rewritten(written, filled))
