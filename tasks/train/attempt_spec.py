"""The run spec of one attempt, in which ports and other placeholders are filled in."""

from __future__ import annotations

from pathlib import Path

from tasks.processes.ports import PortsReserved
from tasks.record.places import AttemptPlace, RunPlace
from tasks.rollout.component import fleet_names, fleet_ports
from tasks.spec.loading import dump_spec, list_required_ports, resolve
from tasks.spec.run import RunSpec
from tasks.train.run_secrets import RunSecrets


def reserve_ports(spec: RunSpec) -> PortsReserved:
    """Reserve a free TCP port for each port placeholder in a run spec.

    Raises:
        OSError: No port is free.
    """
    return PortsReserved([*list_required_ports(spec), *fleet_ports(spec)])


class AttemptSpec:
    """The run spec of one attempt, in which placeholders are replaced by values.

    The attribute `resolved` is written to `spec.yaml`. To keep secrets out of this file, `resolved`
    contains the names of Prefect Secret blocks instead of their values. `with_block_values` returns
    a spec with these values for the components.
    """

    def __init__(
        self,
        spec: RunSpec,
        *,
        run_place: RunPlace,
        place: AttemptPlace,
        ray_address: str,
        resume_from: str,
        ports: PortsReserved,
        secrets: RunSecrets,
    ) -> None:
        """
        Args:
            spec: The run spec with placeholders.
            run_place: Paths of the run's files.
            place: Paths of the attempt's files.
            ray_address: Dashboard address of the work pool's Ray cluster. Used for a run with Ray
                whose spec has no address.
            resume_from: Path of the checkpoint from which the attempt starts, or an empty string.
            ports: The ports that are reserved for the attempt.
            secrets: The secrets of the run. The secrets in the resolved spec are added to this
                object.
        """
        self.place = place
        self.resume_from = resume_from
        self.ports = ports
        self._spec = spec
        self._run_place = run_place
        self._ray_address = ray_address
        self._secrets = secrets

        names = self._fill_names()
        #: The spec in which placeholders are replaced by values. The values of Prefect Secret
        #: blocks are not inserted.
        self.resolved = self._resolve(names)
        # A secret variable such as WANDB_KEY can have the value `${run.id}`. But the run id must
        # not be masked, because paths contain the run id. So values of placeholders are no secrets.
        secrets.add(self.resolved.secrets - {*names.values()})

    def with_block_values(self) -> RunSpec:
        """Return the resolved spec with the values of the Prefect Secret blocks."""
        return self.resolved.with_secrets(self._secrets.block_values)

    def write(self) -> None:
        """Write the resolved spec to the attempt's `spec.yaml`, with secrets masked."""
        text = dump_spec(self.resolved, self._secrets.values)
        self.place.spec.write_text(text, encoding="utf-8")

    def move_ports(self, component: str, *, fleet_port: int | None) -> None:
        """Reserve new ports for a component whose port was taken, and update `spec.yaml`.

        Args:
            component: Name of the component.
            fleet_port: Port of the gateway of the run's inference servers. None if the run has no
                inference servers.

        Raises:
            OSError: No port is free, or the running inference servers were started with the old
                port.
        """
        self.ports.move(component)
        resolved = self._resolve(self._fill_names())
        has_moved_fleet = fleet_port is not None and fleet_port not in self.ports.numbers.values()
        if has_moved_fleet or resolved.fleet != self.resolved.fleet:
            raise OSError(
                "the gateway of the inference servers cannot change its port, because the running "
                "servers were started with the old port"
            )
        self.resolved = resolved
        self.write()

    def _fill_names(self) -> dict[str, str]:
        """Return a mapping from the name of each placeholder to its value."""
        numbers = self.ports.numbers
        return {
            "run.id": self._run_place.run_id,
            "run.dir": str(self._run_place.directory),
            "attempt.number": str(self.place.number),
            "attempt.dir": str(self.place.directory),
            "attempt.resume_from": self.resume_from,
            **{name: str(port) for name, port in numbers.items()},
            **fleet_names(self._spec, numbers),
        }

    def _resolve(self, names: dict[str, str]) -> RunSpec:
        return resolve(self._spec.with_ray_address(self._ray_address), names, Path.cwd())
