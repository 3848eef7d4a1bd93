"""Check before a run starts that this machine has everything that the run spec names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tasks.processes.containment import Level
from tasks.processes.identity import host_name
from tasks.record.checkpoint_paths import check_access
from tasks.record.checkpoint_store import StoreRefused, StoreUnreachable
from tasks.rollout.component import fleet_faults
from tasks.spec.errors import Fault, InvalidSpec
from tasks.spec.placeholders import find_placeholder_faults
from tasks.spec.programs import find_missing_programs
from tasks.spec.run import RunSpec
from tasks.train.plan import component_search_path, find_containment


def check_spec(spec: RunSpec, *, checks_stores: bool = True) -> None:
    """Raise an error if a run spec names a placeholder, program or feature that is not available.

    Args:
        spec: The spec of the run.
        checks_stores: True to check the access to an object store of the checkpoints, too.

    Raises:
        InvalidSpec: The error lists all faults of the spec.
    """
    faults = [
        *find_placeholder_faults(spec.written()),
        *(fleet_faults(spec, spec.fleet) if spec.fleet is not None else ()),
        *find_missing_programs(spec, root=Path.cwd(), path=component_search_path(spec.env)),
        *_find_containment_faults(spec),
        *(_find_store_faults(spec) if checks_stores else ()),
    ]
    if faults:
        raise InvalidSpec(tuple(faults), source=f"the spec of run {spec.name!r}")


def _find_store_faults(spec: RunSpec) -> Iterator[Fault]:
    """Yield a fault if the store of the checkpoints refuses access.

    A store that does not answer is no fault of the spec. The run waits for this store later.
    """
    for name, component in spec.processes.items():
        try:
            check_access(component.checkpoints or "")
        except StoreUnreachable:
            continue
        except StoreRefused as error:
            yield Fault(
                path=f"components.{name}.checkpoints", problem=error.problem, remedy=error.remedy
            )


def _find_containment_faults(spec: RunSpec) -> Iterator[Fault]:
    """Yield a fault if the spec requires a PID namespace and this machine offers none.

    A spec with `containment: auto` requires no PID namespace.
    """
    if spec.containment != "namespace":
        return
    reason = find_containment(spec).missing.get(Level.L4)
    if reason is not None:
        yield Fault(
            path="containment",
            problem=f"{host_name()} offers no PID namespace: {reason}",
            remedy="write auto, or use a host with PID namespaces",
        )
