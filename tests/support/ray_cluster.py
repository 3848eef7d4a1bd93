"""A real Ray cluster on this machine: a head that runs no work, and nodes with logical GPUs.

All of it listens on loopback and lives below one `keeper`, so that nothing of it, nor of what runs
in it, outlives its owner, however that ends.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import httpx

from tasks.processes.ports import PortsReserved
from tasks.ray import control_store
from tests.support import keeper

HOST = "127.0.0.1"
ROOT = Path(__file__).resolve().parents[2]

#: What every process of the cluster and every client of it has in its environment: no token file
#: of another cluster counts, nothing is reported to anybody, nothing listens but on loopback.
RAY_ENV = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}
#: With these on the head a stopped node counts as dead after about 8 s in place of 65.
FAST_HEALTH = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}
#: Ray's own name of a head whose autoscaler starts nodes as processes beside it.
#: Source: ray/autoscaler/_private/fake_multi_node/node_provider.py.
_FAKE_HEAD = f"{'f' * 51}00000"
_FAKE_NODES = {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1"}
_FAKE_NODES_OF_2 = {
    "RAY_enable_autoscaler_v2": "1",
    "RAY_CLOUD_INSTANCE_ID": _FAKE_HEAD,
    "RAY_OVERRIDE_NODE_ID_FOR_TESTING": _FAKE_HEAD,
}
#: The least that Ray takes is 75 MiB.
_OBJECT_STORE_BYTES = 80 * 1024 * 1024
_READY_WITHIN_S = 90.0
_STOP_WITHIN_S = 30.0
_LOOK_EVERY_S = 0.05
_OWN_COMPONENT = ("MUSTER_RUN_ID", "MUSTER_ATTEMPT", "MUSTER_COMPONENT", "MUSTER_ROLE")


async def free_gpus(gcs_address: str) -> dict[str, float]:
    """`free[node id]` by the cluster's own word, of nodes that have any free."""
    usage = "NodeResourceInfo", "GetAllResourceUsage"
    (reply,) = await control_store._call(gcs_address, *usage, [{}])
    return {
        node.node_id.hex(): free
        for node in reply.resource_usage_data.batch
        if (free := node.resources_available.get("GPU"))
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class RayNode:
    """One node of the cluster."""

    #: By which Ray knows it, in hex.
    node_id: str
    #: The pid of `ray start --block`, which ends when a process of the node has died.
    starter: int
    #: The pid of the raylet.
    raylet: int
    #: Where its dashboard agent listens.
    agent_port: int
    gpus: int
    cpus: int


class RayCluster:
    """Head and nodes; `started` gives one that runs, and ends it.

    Args:
        is_fast_to_notice: whether a node that is gone is seen in seconds (FAST_HEALTH).
        head_env: more variables of the head's processes.
        most_nodes: so many with 8 GPUs and 32 CPUs its autoscaler may have, which starts and stops
            them on this machine.
        autoscaler: its version, 1 or 2.
    """

    def __init__(
        self,
        *,
        is_fast_to_notice: bool = False,
        head_env: dict[str, str] | None = None,
        most_nodes: int = 0,
        autoscaler: int = 1,
    ) -> None:
        #: Short, since the sockets in it may have 107 characters in all.
        self.temp_dir = Path(tempfile.mkdtemp(prefix="mray-", dir="/tmp"))
        #: Those that were added, dead or alive, in that order.
        self.nodes: list[RayNode] = []
        self._keeper = subprocess.Popen(
            (sys.executable, "-I", "-S", keeper.__file__, str(self.temp_dir)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._ports: list[PortsReserved] = []
        gcs, dashboard, client, agent = self._reserve("head", "gcs", "dashboard", "client", "agent")
        #: The dashboard's URL, for `JobSubmissionClient`.
        self.address = f"http://{HOST}:{dashboard}"
        #: HOST:PORT, for `ray.init` and GcsClient.
        self.gcs_address = f"{HOST}:{gcs}"
        #: The variables of a client of this cluster, over those that it has.
        self.env = dict(RAY_ENV)
        health = FAST_HEALTH if is_fast_to_notice else {}
        try:
            #: The pid of the head's `ray start --block`.
            self.head = self._spawn(
                "head",
                (
                    *("-m", "ray.scripts.scripts", "start", "--head", f"--node-ip-address={HOST}"),
                    *(f"--port={gcs}", f"--ray-client-server-port={client}"),
                    *(f"--dashboard-host={HOST}", f"--dashboard-port={dashboard}"),
                    *("--num-cpus=0", "--num-gpus=0"),
                    *(self._autoscaled(most_nodes, autoscaler) if most_nodes else ()),
                    *_common(agent),
                ),
                {
                    **health,
                    **(head_env or {}),
                    **(_FAKE_NODES if most_nodes else {}),
                    **(_FAKE_NODES_OF_2 if most_nodes and autoscaler == 2 else {}),
                },
            )
            # It answers only once the head's raylet, too, is there.
            self._until_answers(f"{self.address}/api/jobs/", self.head, "head")
        except BaseException:
            self.stop()
            raise

    def _autoscaled(self, most: int, version: int) -> tuple[str, ...]:
        """Source: ray/cluster_utils.py, AutoscalingCluster, which would stop every Ray here."""
        of_2 = {"launch_multiple": True, "head_node_id": _FAKE_HEAD} if version == 2 else {}
        provider = {
            # By its own name it wants a file that the wheel lacks.
            "type": "external",
            "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
            "gcs_address": self.gcs_address,
            # All nodes have the same address.
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
            **of_2,
        }
        resources = {"CPU": 32, "GPU": 8, "object_store_memory": _OBJECT_STORE_BYTES}
        types = {
            "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
            "eight": {
                "resources": resources,
                "node_config": {},
                "min_workers": 0,
                "max_workers": most,
            },
        }
        config = {
            "cluster_name": "autoscaled",
            "max_workers": most,
            "provider": provider,
            "available_node_types": types,
            "head_node_type": "ray.head.default",
            "upscaling_speed": 10.0,
            "idle_timeout_minutes": 0.05,
            **{key: {} for key in ("auth", "docker", "file_mounts")},
            **{key: [] for key in ("rsync_exclude", "rsync_filter", "cluster_synced_files")},
            **{key: [] for key in ("initialization_commands", "setup_commands")},
            **{key: [] for key in ("head_setup_commands", "worker_setup_commands")},
            **{key: [] for key in ("head_start_ray_commands", "worker_start_ray_commands")},
            "file_mounts_sync_continuously": False,
        }
        file = self.temp_dir / "autoscaler.json"
        file.write_text(json.dumps(config))
        return (f"--autoscaling-config={file}",)

    @classmethod
    @contextmanager
    def started(
        cls,
        *,
        nodes: int = 2,
        gpus_per_node: int = 8,
        cpus_per_node: int = 32,
        is_fast_to_notice: bool = False,
        head_env: dict[str, str] | None = None,
    ) -> Iterator[RayCluster]:
        """One with so many equal nodes, all of them alive; nothing of it is left at the end."""
        cluster = cls(is_fast_to_notice=is_fast_to_notice, head_env=head_env)
        try:
            for _ in range(nodes):
                cluster.add_node(gpus=gpus_per_node, cpus=cpus_per_node)
            yield cluster
        finally:
            cluster.stop()

    def add_node(
        self, gpus: int = 8, cpus: int = 32, resources: dict[str, float] | None = None
    ) -> RayNode:
        """One more node, once the cluster counts it as alive and its agent answers.

        Args:
            resources: by default {"worker_node": 100}.
        """
        name = f"node-{len(self.nodes)}"
        [agent] = self._reserve(name, "agent")
        wanted = {"worker_node": 100} if resources is None else resources
        starter = self._spawn(
            name,
            (
                *("-m", "deployments.stack.ray_node", self.gcs_address),
                *(f"--num-cpus={cpus}", f"--num-gpus={gpus}"),
                f"--resources={json.dumps(wanted)}",
                # The head's looks after the logs of all nodes of a machine.
                "--include-log-monitor=false",
                *_common(agent),
            ),
            {},
        )
        # The agent asks the cluster whether its raylet is alive.
        self._until_answers(f"http://{HOST}:{agent}/api/local_raylet_healthz", starter, name)
        raylet = _child(starter, "raylet")
        [node_id] = (a[10:] for a in _argv(raylet) if a.startswith("--node_id="))
        node = RayNode(
            node_id=node_id, starter=starter, raylet=raylet, agent_port=agent, gpus=gpus, cpus=cpus
        )
        self.nodes.append(node)
        return node

    def kill_node(self, index: int) -> RayNode:
        """SIGKILL the raylet of `nodes[index]`; what it ran is left to fate."""
        node = self.nodes[index]
        os.kill(node.raylet, signal.SIGKILL)
        return node

    def kill_head(self) -> None:
        """SIGKILL everything of the head: GCS, dashboard, raylet and agents."""
        for pid in (self.head, *keeper.below(self.head)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def pids(self) -> list[int]:
        """Every living process of the cluster and of what runs in it."""
        return [] if self._keeper.poll() is not None else keeper.below(self._keeper.pid)

    def stop(self) -> None:
        """End all of it by SIGKILL, and remove its directory; any number of times.

        Raises: AssertionError, where something can't be ended.
        """
        assert self._keeper.stdin is not None and self._keeper.stdout is not None
        with suppress(BrokenPipeError):
            self._keeper.stdin.close()
        code = self._keeper.wait(_STOP_WITHIN_S)
        self._keeper.stdout.close()
        for ports in self._ports:
            ports.close()
        assert code == 0, f"something of the Ray cluster in {self.temp_dir} outlived SIGKILL"

    def _reserve(self, name: str, *uses: str) -> list[int]:
        """Ports that are this cluster's until its end, for a process that is to bind them now."""
        ports = PortsReserved(f"{name}.{use}" for use in uses)
        self._ports.append(ports)
        ports.release(name)
        return list(ports.numbers.values())

    def _spawn(self, name: str, arguments: Sequence[str], variables: dict[str, str]) -> int:
        inherited = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith("RAY_") and key not in _OWN_COMPONENT
        }
        command = {
            "argv": [sys.executable, *arguments, f"--temp-dir={self.temp_dir / 'ray'}"],
            "env": {
                **inherited,
                **RAY_ENV,
                **variables,
                # Jobs say `python`: the one that has Ray.
                "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
                "PYTHONPATH": str(ROOT),
                "PYTHONUNBUFFERED": "1",
            },
            "log": str(self._log(name)),
        }
        assert self._keeper.stdin is not None and self._keeper.stdout is not None
        self._keeper.stdin.write(json.dumps(command).encode() + b"\n")
        self._keeper.stdin.flush()
        return int(self._keeper.stdout.readline())

    def _until_answers(self, url: str, starter: int, name: str) -> None:
        def has_answered() -> bool:
            assert Path(f"/proc/{starter}").exists(), self._why_not(name, "has ended")
            with suppress(httpx.HTTPError):
                return httpx.get(url, trust_env=False, timeout=10.0).is_success
            return False

        _until(has_answered, lambda: self._why_not(name, f"does not answer GET {url}"))

    def _why_not(self, name: str, what: str) -> str:
        tail = self._log(name).read_text(errors="replace")[-2000:]
        return f"the {name} of the Ray cluster {what}; its log ends:\n{tail}"

    def _log(self, name: str) -> Path:
        return self.temp_dir / f"{name}.log"


def _common(agent_port: int) -> tuple[str, ...]:
    return (
        # Without one of its own, `get_job_logs` fails with HTTP 500 for jobs of the other nodes.
        f"--dashboard-agent-listen-port={agent_port}",
        # Any free ones; by default a range that others use, too.
        *("--min-worker-port=0", "--max-worker-port=0"),
        f"--object-store-memory={_OBJECT_STORE_BYTES}",
        *("--block", "--disable-usage-stats", "--log-style=record", "--log-color=false"),
    )


def _child(parent: int, program: str) -> int:
    [found] = (pid for pid in keeper.below(parent) if Path((_argv(pid) or [""])[0]).name == program)
    return found


def _argv(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def _until(is_so: Callable[[], bool], why_not: Callable[[], str]) -> None:
    deadline = time.monotonic() + _READY_WITHIN_S
    while not is_so():
        assert time.monotonic() < deadline, f"{why_not()}\n(within {_READY_WITHIN_S:.0f} s)"
        time.sleep(_LOOK_EVERY_S)
