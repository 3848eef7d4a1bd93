"""Run Muster's agent on each node of a Ray cluster, and the driver process that starts the agents.

An *agent* is a detached Ray actor that holds no resources. It carries out requests on its node, for
example to kill the leftover processes of a run. Such a request is called an *order*. The agent
listens at its node's address, so an order need not be sent through Ray. These rules make the agent
safe:

- It obeys only signed orders. The agent knows only the public key, so other jobs of the cluster
  cannot learn from it how to sign an order.
- The signature covers a random number that the agent chose for the connection. An order can
  therefore not be repeated or sent to another node.
- It refuses to kill processes of a run while the cluster has an active job of the run.

Ray ships the agent's code by value, so Muster need not be installed on the nodes. The agent's name
contains a digest of its code. After an update of Muster, the agents with the old code end
themselves.

The *driver* is the program `python -m tasks.ray.node_agent`, which `nodes.NodeClient` starts as a
child process. It reads questions from stdin and writes answers to stdout, one line of JSON each. It
exits when its stdin closes. It sends orders to the agents through Ray, so it also reaches agents
whose network address is not reachable.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import os
import queue
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import tasks
from tasks.processes.ending import end_carriers
from tasks.processes.hang_report import examine_carriers
from tasks.processes.machine import (
    find_unreadable_files,
    gather_facts,
    read_gpus,
    remove_test_files,
)
from tasks.processes.tree import all_pids, belongs_to_own_user, machine, read_environment
from tasks.processes.warning_signal import warn_carriers

#: Name of the Ray namespace of the agents. The agents also publish their addresses in the key-value
#: table of the cluster, in a namespace with the same name.
NAMESPACE = "muster"


def _look_at_machine(**arguments: Any) -> dict[str, Any]:
    """Return facts about this node, with the leftover processes of runs that have ended.

    Args:
        arguments: Arguments of `gather_facts`.
    """
    result = gather_facts(**arguments)
    run_ids = {carrier["run_id"] for carrier in result["carriers"]}
    active_ids = {run_id for run_id in run_ids if _find_activity({"MUSTER_RUN_ID": run_id})}
    leftovers = [carrier for carrier in result["carriers"] if carrier["run_id"] not in active_ids]
    return result | {"carriers": leftovers}


#: Mapping from the name of an order to the function that carries out the order. An order is a
#: request to an agent. Each function runs on this machine for a short time, and returns JSON data.
#: A function may be called again with the same arguments, because a client repeats a lost order.
ORDERS: Mapping[str, Callable[..., Mapping[str, Any]]] = {
    "sweep": end_carriers,
    "examine": examine_carriers,
    "warn": warn_carriers,
    "look": _look_at_machine,
    "compare": find_unreadable_files,
    "tidy": remove_test_files,
    "gpus": read_gpus,
    "greet": dict,
}
#: Names of the orders (requests to agents) that act on a whole machine. If several Ray nodes run on
#: one machine, only one agent on this machine gets the order.
OF_MACHINES = ("sweep", "examine", "warn")
#: An agent of Muster ends itself after this number of seconds without an order (request). So no
#: agent stays in a cluster that Muster no longer uses.
_UNUSED_S = 24 * 3600.0
#: An agent with the code of an older Muster ends itself after this number of seconds without an
#: order (request). Every order takes less time, so the agent does not end during an order.
_REPLACED_UNUSED_S = 60.0
#: Seconds within which a client must send its order (request) after it has connected to an agent.
_ORDER_TIMEOUT_S = 10.0
#: Largest number of clients that an agent serves at the same time.
_MAX_CLIENTS = 64
#: Longest line that an agent reads, in bytes.
_MAX_ORDER_BYTES = 1 << 20
#: Namespace of Ray's records of submitted jobs in the cluster's key-value table.
#: Source: ray 2.60, ray/dashboard/modules/job/common.py, JobInfoStorageClient.
_JOBS = "job"
#: Prefix of the keys of Ray's records of submitted jobs. The submission id of the job follows.
_JOB = "_ray_internal_job_info_"
#: Statuses of a Ray job that has ended.
_FINAL = ("STOPPED", "SUCCEEDED", "FAILED")


def signed_text(node_id: str, nonce: str, order: bytes) -> bytes:
    """Return the text that the sender of an order must sign. An order is a request to an agent.

    Args:
        node_id: Ray's id of the node that receives the order, in hex.
        nonce: Random number that the agent of the node has sent over the same connection.
        order: The order as a line of JSON.
    """
    return f"muster {node_id} {nonce} ".encode() + order


def is_signed(modulus: int, text: bytes, signature: bytes) -> bool:
    """Return True if a text was signed with the RSA key that has the given modulus.

    The signature scheme is PKCS #1 v1.5 with SHA-256 and exponent 65537. The scheme is implemented
    here because a node may have no cryptography package. Source: RFC 8017, 8.2.2 and 9.2.
    """
    size = (modulus.bit_length() + 7) // 8
    prefix = bytes.fromhex("3031300d060960864801650304020105000420")
    digest_info = prefix + hashlib.sha256(text).digest()
    expected = b"\0\1" + b"\xff" * (size - 3 - len(digest_info)) + b"\0" + digest_info
    decrypted = pow(int.from_bytes(signature, "big"), 65537, modulus)
    return len(signature) == size and decrypted.to_bytes(size, "big") == expected


def execute_order(what: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Carry out an order, which is a request such as `sweep`, on this machine.

    Args:
        what: Name of the order, from ORDERS.
        given: Arguments of the order.

    Returns:
        `{"answer": result}`, or `{"why": reason}` if the order failed or was refused. The dict also
        has the key `at`, the time of this machine's clock in UTC epoch seconds.
    """
    try:
        if what == "sweep" and (activity := _find_activity(given["wanted"])):
            answer: dict[str, Any] = {"why": f"refused: {activity}"}
        else:
            answer = {"answer": ORDERS[what](**given)}
    except Exception as error:
        answer = {"why": _describe_error(error)}
    return answer | {"at": time.time()}


def _find_activity(wanted: Mapping[str, str]) -> str:
    """Return the reason why certain processes must not be killed, or an empty string.

    Processes must not be killed while a Ray job of their run is active, or while their guardian
    process runs on this machine. The guardian process is the Muster process that owns the processes
    of a component.

    Args:
        wanted: Environment variables that the processes have: MUSTER_RUN_ID, and optionally
            MUSTER_ATTEMPT and MUSTER_COMPONENT.
    """
    table: Any = importlib.import_module("ray.experimental.internal_kv")
    run_id = wanted.get("MUSTER_RUN_ID", "")
    attempt = wanted.get("MUSTER_ATTEMPT", "")
    component = wanted.get("MUSTER_COMPONENT", "")

    for key in table._internal_kv_list(f"{_JOB}{run_id}--", namespace=_JOBS):
        # A submission id is `<run id>--aNN` or `<run id>--aNN-<component>`, where NN is the number
        # of the attempt.
        suffix = key.decode().removeprefix(f"{_JOB}{run_id}--")
        job_attempt, _, job_component = suffix.partition("-")
        is_other_attempt = attempt and job_attempt != f"a{int(attempt):02d}"
        is_other_component = component and job_component not in ("", component)
        if is_other_attempt or is_other_component:
            continue
        status = json.loads(table._internal_kv_get(key, namespace=_JOBS))["status"]
        if status not in _FINAL:
            return f"job {key.decode().removeprefix(_JOB)} of the run is still {status}"

    guardian_variables = {**wanted, "MUSTER_ROLE": "guardian"}.items()
    for pid in all_pids():
        with suppress(PermissionError):
            if belongs_to_own_user(pid) and guardian_variables <= read_environment(pid).items():
                return f"the component's guardian process (pid {pid}) is still running"
    return ""


class NodeAgent:
    """Muster's agent on a Ray node: a Ray actor that carries out orders (requests such as `sweep`).

    The agent listens for clients until the node or the cluster ends, or until no order has arrived
    for a day. When a client connects, the agent sends a greeting: one line with the agent's
    identity. The client sends two lines: the order and the signature of the order. The agent
    replies with one line: the result of the order, or the reason why the order was not carried out.
    """

    def __init__(self, node_id: str, host: str, modulus: int, name: str) -> None:
        """Create the agent in its actor process on the node, and begin to listen for clients.

        Args:
            node_id: Ray's id of the agent's node, in hex.
            host: IP address of the node, at which the agent listens.
            modulus: Modulus of the RSA public key that verifies requests. If 0, the agent does not
                listen, and requests can arrive only through Ray.
            name: Name of the Ray actor. In the cluster's key-value table, this name is also the key
                of the agent's address.
        """
        ray: Any = importlib.import_module("ray")
        self._table: Any = importlib.import_module("ray.experimental.internal_kv")
        self._node_id = node_id
        self._modulus = modulus
        self._name = name
        self._own = ray.get_runtime_context().current_actor
        #: Time of the last request to this agent, in CLOCK_MONOTONIC seconds.
        self._asked_s = time.monotonic()
        self._client_slots = threading.Semaphore(_MAX_CLIENTS)
        #: Address of the agent as `HOST:PORT`, or an empty string if the agent does not listen.
        self.address = ""
        if modulus:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._socket = socket.create_server((host, 0), family=family)
            self.address = f"{host}:{self._socket.getsockname()[1]}"
            self._table._internal_kv_put(name, self.address, namespace=NAMESPACE)
            threading.Thread(target=self._listen, daemon=True).start()
        self.end_unused(_UNUSED_S)

    def asked_by_ray(self, what: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """Carry out an order (a request to this agent) that arrives through Ray.

        An order through Ray needs no signature, because every job of the cluster can run any
        program on this node, even without the agent.

        Returns:
            The result of `execute_order`, with one more key: `address`, the agent's address.
        """
        self._asked_s = time.monotonic()
        return execute_order(what, given) | {"address": self.address}

    def end_unused(self, unused_s: float) -> None:
        """End the agent as soon as no request has arrived for `unused_s` seconds.

        The call returns at once. A thread waits and then ends the agent.
        """

        def end() -> None:
            while (left_s := self._asked_s + unused_s - time.monotonic()) > 0:
                time.sleep(left_s)
            self._table._internal_kv_del(self._name, namespace=NAMESPACE)
            importlib.import_module("ray").kill(self._own)

        threading.Thread(target=end, daemon=True).start()

    def _listen(self) -> None:
        """Accept clients in an endless loop, and serve each client in its own thread."""
        while True:
            connection, _ = self._socket.accept()
            if self._client_slots.acquire(blocking=False):
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
            else:
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        """Read one request from a client, and carry out the request if its signature is valid."""
        nonce = os.urandom(16).hex()
        # Name the machine and the user in the first message. Agents with the same machine and user
        # can kill the same processes, so a client needs only one of these agents.
        sees = f"{machine()} {os.getuid()}"
        try:
            with suppress(OSError, ValueError), connection, connection.makefile("rwb") as file:

                def send(**fields: Any) -> None:
                    file.write(json.dumps(fields).encode() + b"\n")
                    file.flush()

                connection.settimeout(_ORDER_TIMEOUT_S)
                send(node_id=self._node_id, nonce=nonce, sees=sees, at=time.time())
                order = file.readline(_MAX_ORDER_BYTES)
                signature = file.readline(_MAX_ORDER_BYTES)
                text = signed_text(self._node_id, nonce, order)
                if is_signed(self._modulus, text, bytes.fromhex(signature.decode())):
                    self._asked_s = time.monotonic()
                    send(**execute_order(**json.loads(order)))
                elif order:
                    send(
                        why="refused: the request is not signed with the key of Muster's "
                        "agent on this node"
                    )
        finally:
            self._client_slots.release()


def _ask_agents(
    modulus: str, prefix: str, what: str, each: Mapping[str, Any], within_s: float
) -> dict[str, Any]:
    """Send an order (a request) to the agents of nodes through Ray, and start missing agents.

    Args:
        modulus: Modulus of the RSA public key that verifies orders, in hex.
        prefix: Start of the agents' names. Each name ends with the id of the agent's node. The last
            part of the prefix is the digest of the agents' code.
        what: Name of the order, such as `sweep`, from ORDERS.
        each: Mapping from node id to the arguments of the order, for all nodes that receive the
            order.
        within_s: Deadline for all nodes together, in seconds.

    Returns:
        `{"answers": {node id: answer}, "unreached": {node id: reason}}`. An answer is the result of
        `asked_by_ray` with one more key, `clock`. The value of `clock` is a pair: the difference
        between the node's clock and this machine's clock, and the largest error of this difference,
        both in seconds.
    """
    ray: Any = importlib.import_module("ray")
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    started_at = time.time()
    started_s = time.monotonic()
    hosts = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    answers: dict[str, Any] = {}
    unreached: dict[str, str] = {}
    #: Mapping from the Ray future of each agent's answer to the agent's node id and actor handle.
    agents: dict[Any, Any] = {}

    for node_id, arguments in each.items():
        actor = ray.remote(NodeAgent).options(
            name=f"{prefix}{node_id}",
            lifetime="detached",
            get_if_exists=True,
            max_restarts=0,
            # An agent may carry out up to 8 requests at the same time.
            max_concurrency=8,
            num_cpus=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        )
        host = hosts.get(node_id, "")
        agent = actor.remote(node_id, host, int(modulus, 16), f"{prefix}{node_id}")
        agents[agent.asked_by_ray.remote(what, arguments)] = node_id, agent

    pending = list(agents)
    while pending:
        left_s = max(0.0, started_s + within_s - time.monotonic())
        done, pending = ray.wait(pending, num_returns=1, timeout=left_s)
        if not done:
            break
        node_id, _ = agents[done[0]]
        try:
            answer = ray.get(done[0], timeout=5.0)
        except Exception as error:
            unreached[node_id] = _describe_error(error)
            continue
        error_s = (time.monotonic() - started_s) / 2
        answers[node_id] = answer | {"clock": [answer["at"] - started_at - error_s, error_s]}

    # Kill the agents that have not answered in time. The next request to their nodes starts new
    # agents.
    for ref in pending:
        node_id, agent = agents[ref]
        unreached[node_id] = f"no answer within {within_s:g} s"
        with suppress(Exception):
            ray.kill(agent)

    # The name of an agent contains a digest of the agent's code. Agents with another digest run the
    # code of an older Muster. Ask these agents to end themselves.
    key_prefix = prefix.rstrip("-").rpartition("-")[0]
    for entry in ray.util.list_named_actors(all_namespaces=True):
        name = entry["name"]
        node_id = name.rpartition("-")[2]
        is_ours = entry["namespace"] == NAMESPACE and name.startswith(key_prefix)
        if is_ours and node_id in answers and not name.startswith(prefix):
            with suppress(Exception):
                ray.get_actor(name).end_unused.remote(_REPLACED_UNUSED_S)
    return {"answers": answers, "unreached": unreached}


def main() -> int:
    """Run the program that sends requests to the agents on Ray nodes, as a Ray driver.

    The parent process writes requests to stdin, and reads the answers from stdout. The function
    does not return: the process exits when stdin closes.
    """
    # The parent process reads answers from stdout. Redirect all other output to stderr.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    questions: queue.Queue[dict[str, Any]] = queue.Queue()
    threading.Thread(target=_read_questions, args=(questions,), daemon=True).start()
    import ray
    from ray import cloudpickle

    cloudpickle.register_pickle_by_value(tasks)  # type: ignore[no-untyped-call]
    hello = questions.get()
    ray.init(
        hello.pop("gcs_address"),
        namespace=NAMESPACE,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    answer: dict[str, Any] = {}
    while True:
        print(json.dumps(answer), file=answers, flush=True)
        answer = _ask_agents(**hello, **questions.get())


def _read_questions(questions: queue.Queue[dict[str, Any]]) -> None:
    """Parse each line of stdin as JSON, and put the result into a queue. Exit when stdin closes."""
    for line in sys.stdin:
        questions.put(json.loads(line))
    # The parent process has ended or needs no more answers. Skip Ray's own shutdown, which takes
    # seconds.
    os._exit(0)


def _describe_error(error: Exception) -> str:
    """Return the type and the last line of an error, shortened to 300 characters."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"[:300]


if __name__ == "__main__":
    raise SystemExit(main())
