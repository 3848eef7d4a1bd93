"""Check before a run starts that this machine has everything that the run spec names."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from tasks.processes.containment import Level, probe
from tasks.processes.identity import host_name
from tasks.processes.memory_cgroup import find_memory_parent
from tasks.record.checkpoint_paths import check_access
from tasks.record.checkpoint_store import StoreRefused, StoreUnreachable
from tasks.rollout.component import fleet_faults
from tasks.spec.errors import Fault, InvalidSpec
from tasks.spec.loading import find_project_root, load_spec
from tasks.spec.own_settings import find_setting_problems
from tasks.spec.placeholders import find_placeholder_faults
from tasks.spec.programs import add_active_environment
from tasks.spec.run import LIVE_CODE, RunSpec
from tasks.train.interpreters import find_missing_files


def load_checked_spec(path: Path, overrides: Sequence[str] = ()) -> RunSpec:
    """Load the run spec in a file, and check that its programs and features are available.

    The access to object stores is not checked.

    Args:
        path: The file.
        overrides: Changes of the form `a.b=c`. They are applied in order.

    Raises:
        InvalidSpec: The file or an override has faults, or this machine lacks a program or feature.
    """
    spec = load_spec(path, overrides)
    root = find_project_root(path)
    if spec.code in (None, LIVE_CODE):
        check_spec(add_active_environment(spec, root), root=root, checks_stores=False)
    return spec


def check_spec(spec: RunSpec, *, root: Path | None = None, checks_stores: bool = True) -> None:
    """Raise an error if a placeholder, program or feature in a run spec is not available.

    Invalid values of Muster's environment variables are faults, too.

    Args:
        spec: The spec of the run.
        root: Root folder of the project with the files that the spec names. If None, these files
            are in the working directory.
        checks_stores: True to check the access to an object store of the checkpoints, too.

    Raises:
        InvalidSpec: The error lists all faults of the spec.
    """
    setting_faults = [Fault(path="", problem=problem) for problem in find_setting_problems()]
    faults = [
        *find_placeholder_faults(spec.written()),
        *(fleet_faults(spec, spec.fleet) if spec.fleet is not None else ()),
        *find_missing_files(spec, root),
        *(setting_faults or _find_containment_faults(spec)),
        *_find_memory_faults(spec),
        *(_find_store_faults(spec) if checks_stores else ()),
    ]
    if faults:
        raise InvalidSpec(tuple(faults), source=f"the spec of run {spec.name!r}")


def _find_store_faults(spec: RunSpec) -> Iterator[Fault]:
    """Yield a fault if the store of the checkpoints refuses access.

    A store that does not answer is no fault, because the run waits for the store later.
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
    """Yield a fault if the spec requires a PID namespace, but this machine does not support it.

    A spec with `containment: auto` does not require a PID namespace.
    """
    if spec.containment != "namespace":
        return
    reason = probe(namespace=True).missing.get(Level.L4)
    if reason is not None:
        yield Fault(
            path="containment",
            problem=f"{host_name()} offers no PID namespace: {reason}",
            remedy="write `containment: auto`, or use a host with PID namespaces",
        )


def _find_memory_faults(spec: RunSpec) -> Iterator[Fault]:
    """Yield a fault for each key `memory_gib` if memory cannot be limited on this machine."""
    for name, component in spec.processes.items():
        if component.memory_gib is None:
            continue
        try:
            find_memory_parent()
        except OSError as error:
            yield Fault(
                path=f"components.{name}.memory_gib",
                problem=f"{host_name()} cannot limit the memory of a component: {error}",
                remedy="leave out memory_gib, or run Muster as root. Or run Muster in a cgroup "
                "that systemd delegates (Delegate=yes)",
            )
