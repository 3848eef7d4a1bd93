"""A real Ray cluster on this machine: a head node that runs no work, and nodes with logical GPUs.

All processes listen on 127.0.0.1. They are descendants of one `keeper` process, which kills them
all when the test's process ends, even if the test's process is killed.
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

#: Environment variables of every process of the cluster and of every client. With these variables,
#: Ray uses no token file of another cluster, sends no usage statistics, and listens only on
#: 127.0.0.1.
RAY_ENV = {
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
}
#: Environment variables of the head node with which Ray declares a stopped node dead after about
#: 8 s instead of 65 s.
FAST_HEALTH = {
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "1000",
    "RAY_health_check_timeout_ms": "2000",
    "RAY_health_check_failure_threshold": "3",
}
#: Node id that Ray gives to the head if its autoscaler starts nodes as processes of this machine.
#: Source: ray/autoscaler/_private/fake_multi_node/node_provider.py.
_FAKE_HEAD = f"{'f' * 51}00000"
#: Environment variables of the head for an autoscaler that starts nodes on this machine.
_FAKE_NODES = {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1"}
#: Further environment variables of the head for version 2 of Ray's autoscaler.
_FAKE_NODES_OF_2 = {
    "RAY_enable_autoscaler_v2": "1",
    "RAY_CLOUD_INSTANCE_ID": _FAKE_HEAD,
    "RAY_OVERRIDE_NODE_ID_FOR_TESTING": _FAKE_HEAD,
}
#: Size of the object store of each node. Ray requires at least 75 MiB.
_OBJECT_STORE_BYTES = 80 * 1024 * 1024
#: Time limit for the start of a node, in seconds.
_READY_WITHIN_S = 90.0
#: Time limit in which all processes of the cluster must end, in seconds.
_STOP_WITHIN_S = 30.0
#: Interval of the readiness checks, in seconds.
_CHECK_EVERY_S = 0.05
#: Environment variables that Muster gives a component. If the test itself runs in a component, the
#: cluster must not inherit these variables.
_COMPONENT_VARIABLES = ("MUSTER_RUN_ID", "MUSTER_ATTEMPT", "MUSTER_COMPONENT", "MUSTER_ROLE")


async def free_gpus(gcs_address: str) -> dict[str, float]:
    """Ask the cluster for its free GPUs, and return a mapping from node id to number of free GPUs.

    Nodes without a free GPU are left out.

    Args:
        gcs_address: HOST:PORT of the cluster's control store.
    """
    method = ("NodeResourceInfo", "GetAllResourceUsage")
    (reply,) = await control_store._call(gcs_address, *method, [{}])
    return {
        node.node_id.hex(): gpus
        for node in reply.resource_usage_data.batch
        if (gpus := node.resources_available.get("GPU"))
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class RayNode:
    """One worker node of the Ray cluster."""

    #: Ray's id of the node, in hexadecimal digits.
    node_id: str
    #: Process id of `ray start --block`, a process that ends when another process of the node has
    #: died.
    starter: int
    #: Process id of the raylet, Ray's daemon on each node.
    raylet: int
    #: TCP port of the node's dashboard agent.
    agent_port: int
    #: Number of logical GPUs.
    gpus: int
    #: Number of logical CPUs.
    cpus: int


class RayCluster:
    """A Ray cluster with a head node and worker nodes.

    The class method `run` is a context manager that runs a cluster.
    """

    def __init__(
        self,
        *,
        is_fast_to_notice: bool = False,
        head_env: dict[str, str] | None = None,
        most_nodes: int = 0,
        autoscaler: int = 1,
    ) -> None:
        """
        Args:
            is_fast_to_notice: True if Ray shall notice dead nodes within seconds (`FAST_HEALTH`).
            head_env: Further environment variables of the head's processes.
            most_nodes: Maximum number of nodes with 8 GPUs and 32 CPUs that Ray's autoscaler may
                start on this machine. 0 for no autoscaler.
            autoscaler: Version of the autoscaler, 1 or 2.
        """
        #: Directory for all files of the cluster. Its path is short, because the path of a Unix
        #: socket may have at most 107 characters.
        self.temp_dir = Path(tempfile.mkdtemp(prefix="mray-", dir="/tmp"))
        #: The nodes that the test has added, in order. Dead nodes stay in the list.
        self.nodes: list[RayNode] = []
        self._keeper = subprocess.Popen(
            (sys.executable, "-I", "-S", keeper.__file__, str(self.temp_dir)),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            start_new_session=True,
        )
        self._ports: list[PortsReserved] = []
        gcs, dashboard, client, agent = self._reserve("head", "gcs", "dashboard", "client", "agent")
        #: URL of the dashboard, for `JobSubmissionClient`.
        self.address = f"http://{HOST}:{dashboard}"
        #: HOST:PORT of the control store, for `ray.init` and GcsClient.
        self.gcs_address = f"{HOST}:{gcs}"
        #: Further environment variables of a client of this cluster.
        self.env = dict(RAY_ENV)
        health = FAST_HEALTH if is_fast_to_notice else {}
        try:
            #: Process id of the head's `ray start --block`.
            self.head = self._spawn(
                "head",
                (
                    "-m",
                    "ray.scripts.scripts",
                    "start",
                    "--head",
                    f"--node-ip-address={HOST}",
                    f"--port={gcs}",
                    f"--ray-client-server-port={client}",
                    f"--dashboard-host={HOST}",
                    f"--dashboard-port={dashboard}",
                    "--num-cpus=0",
                    "--num-gpus=0",
                    *(self._autoscaler_options(most_nodes, autoscaler) if most_nodes else ()),
                    *_common_options(agent),
                ),
                {
                    **health,
                    **(head_env or {}),
                    **(_FAKE_NODES if most_nodes else {}),
                    **(_FAKE_NODES_OF_2 if most_nodes and autoscaler == 2 else {}),
                },
            )
            # The dashboard answers `GET /api/jobs/` only after the head's raylet has started.
            self._until_answers(f"{self.address}/api/jobs/", self.head, "head")
        except BaseException:
            self.stop()
            raise

    def _autoscaler_options(self, most_nodes: int, version: int) -> tuple[str, ...]:
        """Write the configuration of Ray's autoscaler, and return the options of `ray start`.

        Source of the configuration: AutoscalingCluster in ray/cluster_utils.py. The test does not
        use this class, because this class would stop all Ray clusters of this machine.

        Args:
            most_nodes: Maximum number of nodes.
            version: Version of the autoscaler, 1 or 2.
        """
        keys_of_2 = {"launch_multiple": True, "head_node_id": _FAKE_HEAD} if version == 2 else {}
        provider = {
            # Do not use Ray's type `fake_multinode`, which has the same node provider. With that
            # type, Ray reads a file that its wheel does not contain.
            "type": "external",
            "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
            "gcs_address": self.gcs_address,
            # All nodes have the same address, so the address cannot identify a node.
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
            **keys_of_2,
        }
        resources = {"CPU": 32, "GPU": 8, "object_store_memory": _OBJECT_STORE_BYTES}
        types = {
            "ray.head.default": {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0},
            "eight": {
                "resources": resources,
                "node_config": {},
                "min_workers": 0,
                "max_workers": most_nodes,
            },
        }
        config = {
            "cluster_name": "autoscaled",
            "max_workers": most_nodes,
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
    def run(
        cls,
        *,
        nodes: int = 2,
        gpus_per_node: int = 8,
        cpus_per_node: int = 32,
        is_fast_to_notice: bool = False,
        head_env: dict[str, str] | None = None,
    ) -> Iterator[RayCluster]:
        """Run a Ray cluster while the context is open. Then end all processes of the cluster.

        Args:
            nodes: Number of nodes, in addition to the head node.
            gpus_per_node: Number of logical GPUs of each node.
            cpus_per_node: Number of logical CPUs of each node.
            is_fast_to_notice: True if Ray shall notice dead nodes within seconds (`FAST_HEALTH`).
            head_env: Further environment variables of the head's processes.
        """
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
        """Start a node, and wait until the cluster reports the node as alive and its agent answers.

        Args:
            gpus: Number of logical GPUs.
            cpus: Number of logical CPUs.
            resources: Custom resources of the node. If None, {"worker_node": 100}.
        """
        name = f"node-{len(self.nodes)}"
        [agent] = self._reserve(name, "agent")
        custom_resources = {"worker_node": 100} if resources is None else resources
        starter = self._spawn(
            name,
            (
                "-m",
                "deployments.stack.ray_node",
                self.gcs_address,
                f"--num-cpus={cpus}",
                f"--num-gpus={gpus}",
                f"--resources={json.dumps(custom_resources)}",
                # This node needs no log monitor, because all nodes are on one machine. The log
                # monitor of the head node reads the logs of all nodes.
                "--include-log-monitor=false",
                *_common_options(agent),
            ),
            {},
        )
        # The node's agent answers this request only after the cluster has registered the node's
        # raylet as alive.
        self._until_answers(f"http://{HOST}:{agent}/api/local_raylet_healthz", starter, name)
        raylet = _find_descendant(starter, "raylet")
        option = "--node_id="
        [node_id] = (
            argument.removeprefix(option)
            for argument in _argv(raylet)
            if argument.startswith(option)
        )
        node = RayNode(
            node_id=node_id, starter=starter, raylet=raylet, agent_port=agent, gpus=gpus, cpus=cpus
        )
        self.nodes.append(node)
        return node

    def kill_node(self, index: int) -> RayNode:
        """Send SIGKILL to the raylet of `nodes[index]`, and return the node.

        The other processes of the node are not killed.
        """
        node = self.nodes[index]
        os.kill(node.raylet, signal.SIGKILL)
        return node

    def kill_head(self) -> None:
        """Send SIGKILL to all processes of the head: GCS, dashboard, raylet and agents."""
        for pid in (self.head, *keeper.list_descendants(self.head)):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def pids(self) -> list[int]:
        """Return the process ids of the cluster and of the programs that run in it."""
        return [] if self._keeper.poll() is not None else keeper.list_descendants(self._keeper.pid)

    def stop(self) -> None:
        """Kill all processes of the cluster, and remove its directory. A second call has no effect.

        Raises:
            AssertionError: A process survived.
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
        """Reserve TCP ports until the end of the cluster, and return their numbers.

        Args:
            name: Name of the node.
            *uses: Purpose of each port, for example `agent`. One port is reserved for each purpose.
        """
        ports = PortsReserved(f"{name}.{use}" for use in uses)
        self._ports.append(ports)
        ports.release(name)
        return list(ports.numbers.values())

    def _spawn(self, name: str, arguments: Sequence[str], variables: dict[str, str]) -> int:
        """Start a node through the program `keeper`, which later ends all processes of the cluster.

        The function returns the process id of the node's `ray start --block`.

        Args:
            name: Name of the node.
            arguments: Arguments of the Python interpreter.
            variables: Further environment variables.
        """
        inherited = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith("RAY_") and key not in _COMPONENT_VARIABLES
        }
        command = {
            "argv": [sys.executable, *arguments, f"--temp-dir={self.temp_dir / 'ray'}"],
            "env": {
                **inherited,
                **RAY_ENV,
                **variables,
                # Jobs run the command `python`, which must be the interpreter with Ray.
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
        """Wait until a node answers a request.

        Args:
            url: URL of the request.
            starter: Process id of the node's `ray start --block`.
            name: Name of the node.

        Raises:
            AssertionError: The node has ended, or did not answer in time.
        """

        def has_answered() -> bool:
            assert Path(f"/proc/{starter}").exists(), self._describe_failure(name, "has ended")
            with suppress(httpx.HTTPError):
                return httpx.get(url, trust_env=False, timeout=10.0).is_success
            return False

        _until(has_answered, lambda: self._describe_failure(name, f"does not answer GET {url}"))

    def _describe_failure(self, name: str, predicate: str) -> str:
        """Return a sentence about the failure of a node, with the end of the node's log.

        Args:
            name: Name of the node.
            predicate: The failure, for example `has ended`.
        """
        tail = self._log(name).read_text(errors="replace")[-2000:]
        return f"the {name} of the Ray cluster {predicate}; its log ends:\n{tail}"

    def _log(self, name: str) -> Path:
        return self.temp_dir / f"{name}.log"


def _common_options(agent_port: int) -> tuple[str, ...]:
    """Return the options of `ray start` that the head node and the other nodes have in common."""
    return (
        # All nodes share one address, so each agent needs its own port. Otherwise `get_job_logs`
        # fails with HTTP 500 for jobs of the other nodes.
        f"--dashboard-agent-listen-port={agent_port}",
        # 0 means any free port. Ray's default is a range that other programs use, too.
        "--min-worker-port=0",
        "--max-worker-port=0",
        f"--object-store-memory={_OBJECT_STORE_BYTES}",
        "--block",
        "--disable-usage-stats",
        "--log-style=record",
        "--log-color=false",
    )


def _find_descendant(ancestor: int, program: str) -> int:
    """Return the process id of the only descendant process that runs a program.

    Args:
        ancestor: Process id of the process whose descendants are searched.
        program: File name of the program, for example "raylet".
    """
    [pid] = (
        pid
        for pid in keeper.list_descendants(ancestor)
        if Path((_argv(pid) or [""])[0]).name == program
    )
    return pid


def _argv(pid: int) -> list[str]:
    """Return the command line of a process; an empty list if the process has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return []


def _until(condition: Callable[[], bool], describe_failure: Callable[[], str]) -> None:
    """Wait until a condition is true.

    Raises:
        AssertionError: The condition was not true within `_READY_WITHIN_S`.
    """
    deadline = time.monotonic() + _READY_WITHIN_S
    while not condition():
        is_late = time.monotonic() >= deadline
        assert not is_late, f"{describe_failure()}\n(within {_READY_WITHIN_S:.0f} s)"
        time.sleep(_CHECK_EVERY_S)
