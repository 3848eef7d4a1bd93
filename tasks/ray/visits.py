"""What stays on the nodes of a cluster and is asked there, and the driver that puts it there,
`python -m tasks.ray.visits`, a child of whoever asks (`nodes.visiting`).

Each node has an agent: a detached actor without resources, which listens on its node's address and
is asked without any Ray. It does nothing but what carries a signature: over a nonce of its own, so
that nothing can be sent twice or to another node, and by a key of which it has the public half
only, so that nothing that jobs can read lets them order anything. What has not ended by the
cluster's own word it does not end even so. Its code goes there by value, so that no code of Muster
need be there; its name says which code it is, and one that has been replaced ends once nobody asks
it any more.

The driver reads questions from stdin and writes answers to stdout, a line of JSON each, and ends
with its stdin. It has agents do what is asked by Ray's own ways, which lead to those, too, whose
address can't be reached.
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
from tasks.processes.machine import forget, gpus_seen, look, names_unseen
from tasks.processes.tree import all_pids, environment_of, machine

#: Of the agents' names, at Ray and in the control store's table of where they listen.
NAMESPACE = "muster"


def _seen_here(**given: Any) -> dict[str, Any]:
    """See `look`; of its carriers those alone whose run has ended, see `_not_ended`."""
    seen = look(**given)
    runs = {carrier["run_id"] for carrier in seen["carriers"]}
    live = {run_id for run_id in runs if _not_ended({"MUSTER_RUN_ID": run_id})}
    return seen | {"carriers": [one for one in seen["carriers"] if one["run_id"] not in live]}


#: By the name that is ordered. Each is short and idempotent, and gives plain data.
ORDERS: Mapping[str, Callable[..., Mapping[str, Any]]] = {
    "sweep": end_carriers,
    "examine": examine_carriers,
    "look": _seen_here,
    "compare": names_unseen,
    "tidy": forget,
    "gpus": gpus_seen,
    "greet": dict,
}
#: Nodes that see the same processes do the same by these: one of them is enough.
OF_MACHINES = ("sweep", "examine")
#: An agent that nobody has asked for so long ends; one that has been replaced ends sooner, but not
#: before the longest order.
_UNUSED_S, _REPLACED_UNUSED_S = 24 * 3600.0, 60.0
#: For whoever connects to say what is wanted; and how many may be at it.
_ORDERED_WITHIN_S = 10.0
_AT_ONCE = 64
_ORDER_BYTES = 1 << 20
#: Source: ray 2.60, ray/dashboard/modules/job/common.py, JobInfoStorageClient.
_JOBS, _JOB = "job", "_ray_internal_job_info_"
_FINAL = ("STOPPED", "SUCCEEDED", "FAILED")


def signed_text(node_id: str, nonce: str, order: bytes) -> bytes:
    """What is signed of an order."""
    return f"muster {node_id} {nonce} ".encode() + order


def is_signed(modulus: int, text: bytes, signature: bytes) -> bool:
    """Whether it is that of an RSA key, by PKCS #1 v1.5 with SHA-256 and exponent 65537.

    Nodes have nothing but the standard library for it. Source: RFC 8017, 8.2.2 and 9.2.
    """
    size = (modulus.bit_length() + 7) // 8
    digest = bytes.fromhex("3031300d060960864801650304020105000420") + hashlib.sha256(text).digest()
    wanted = b"\0\1" + b"\xff" * (size - 3 - len(digest)) + b"\0" + digest
    found = pow(int.from_bytes(signature, "big"), 65537, modulus)
    return len(signature) == size and found.to_bytes(size, "big") == wanted


def perform(what: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Returns: `{"answer": ...}`, or `{"why": "why there is none"}`; with the clock, as `at`."""
    try:
        if what == "sweep" and (why := _not_ended(given["wanted"])):
            answer: dict[str, Any] = {"why": f"refused: {why}"}
        else:
            answer = {"answer": ORDERS[what](**given)}
    except Exception as error:
        answer = {"why": _words(error)}
    return answer | {"at": time.time()}


def _not_ended(wanted: Mapping[str, str]) -> str:
    """What of this has not ended by its cluster's word, or has a guardian here; empty: nothing."""
    table: Any = importlib.import_module("ray.experimental.internal_kv")
    run_id, attempt, component = (
        wanted.get(f"MUSTER_{name}", "") for name in ("RUN_ID", "ATTEMPT", "COMPONENT")
    )
    for key in table._internal_kv_list(f"{_JOB}{run_id}--", namespace=_JOBS):
        # See `submission_id`.
        number, _, name = key.decode().removeprefix(f"{_JOB}{run_id}--").partition("-")
        if (attempt and number != f"a{int(attempt):02d}") or (
            component and name not in ("", component)
        ):
            continue
        status = json.loads(table._internal_kv_get(key, namespace=_JOBS))["status"]
        if status not in _FINAL:
            return f"job {key.decode().removeprefix(_JOB)} is {status}"
    guardian = {**wanted, "MUSTER_ROLE": "guardian"}.items()
    for pid in all_pids():
        with suppress(PermissionError):
            if guardian <= environment_of(pid).items():
                return f"guardian {pid} of it is at work"
    return ""


class NodeAgent:
    """Listens on its node until that, or its cluster, ends, or nobody asks it any more.

    To whoever connects it says a line, who it is; it takes a line, the order, and another, its
    signature, and says a line: the answer, or why there is none.
    """

    def __init__(self, node_id: str, host: str, modulus: int, name: str) -> None:
        """
        Args:
            modulus: of the key; 0: it listens nowhere, and is asked by Ray alone.
        """
        ray: Any = importlib.import_module("ray")
        self._table: Any = importlib.import_module("ray.experimental.internal_kv")
        self._node_id, self._modulus, self._name = node_id, modulus, name
        self._own = ray.get_runtime_context().current_actor
        self._asked_s = time.monotonic()
        self._places = threading.Semaphore(_AT_ONCE)
        #: `HOST:PORT`; empty where it listens nowhere.
        self.address = ""
        if modulus:
            family = socket.AF_INET6 if ":" in host else socket.AF_INET
            self._socket = socket.create_server((host, 0), family=family)
            self.address = f"{host}:{self._socket.getsockname()[1]}"
            self._table._internal_kv_put(name, self.address, namespace=NAMESPACE)
            threading.Thread(target=self._listen, daemon=True).start()
        self.end_unused(_UNUSED_S)

    def asked_by_ray(self, what: str, given: Mapping[str, Any]) -> dict[str, Any]:
        """Any job of the cluster may do as much by itself, so nothing is signed.

        Returns: what `perform` gives, with the `address`.
        """
        self._asked_s = time.monotonic()
        return perform(what, given) | {"address": self.address}

    def end_unused(self, unused_s: float) -> None:
        """Have it end once nobody has asked it for so long. Returns at once."""

        def end() -> None:
            while (left_s := self._asked_s + unused_s - time.monotonic()) > 0:
                time.sleep(left_s)
            self._table._internal_kv_del(self._name, namespace=NAMESPACE)
            importlib.import_module("ray").kill(self._own)

        threading.Thread(target=end, daemon=True).start()

    def _listen(self) -> None:
        while True:
            connection, _ = self._socket.accept()
            if self._places.acquire(blocking=False):
                threading.Thread(target=self._serve, args=(connection,), daemon=True).start()
            else:
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        nonce = os.urandom(16).hex()
        # Those of a machine see the same processes, and may end those of their user.
        sees = f"{machine()} {os.getuid()}"
        try:
            with suppress(OSError, ValueError), connection, connection.makefile("rwb") as file:

                def say(**fields: Any) -> None:
                    file.write(json.dumps(fields).encode() + b"\n")
                    file.flush()

                connection.settimeout(_ORDERED_WITHIN_S)
                say(node_id=self._node_id, nonce=nonce, sees=sees, at=time.time())
                order, signature = file.readline(_ORDER_BYTES), file.readline(_ORDER_BYTES)
                text = signed_text(self._node_id, nonce, order)
                if is_signed(self._modulus, text, bytes.fromhex(signature.decode())):
                    self._asked_s = time.monotonic()
                    say(**perform(**json.loads(order)))
                elif order:
                    say(why="refused: it is not signed with the key of this agent")
        finally:
            self._places.release()


def _visit(
    modulus: str, prefix: str, what: str, each: Mapping[str, Any], within_s: float
) -> dict[str, Any]:
    """Have agents do something, each at its node, where it is put if there is none.

    Args:
        prefix: of their names, before the node's id; its last part is their code's.
        each: `arguments[node id]`.

    Returns: `{"answers": {node id: ...}, "unreached": {node id: why}}`; an answer is what
        `asked_by_ray` gives, with `clock`: its node's against this machine's, and by how much that
        may be wrong, seconds.
    """
    ray: Any = importlib.import_module("ray")
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    began, began_s = time.time(), time.monotonic()
    hosts = {node["NodeID"]: node["NodeManagerAddress"] for node in ray.nodes()}
    answers, unreached, agents = dict[str, Any](), dict[str, str](), dict[Any, Any]()
    for node_id, given in each.items():
        actor = ray.remote(NodeAgent).options(
            name=f"{prefix}{node_id}",
            lifetime="detached",
            get_if_exists=True,
            max_restarts=0,
            # None waits for another's order.
            max_concurrency=8,
            num_cpus=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        )
        host = hosts.get(node_id, "")
        agent = actor.remote(node_id, host, int(modulus, 16), f"{prefix}{node_id}")
        agents[agent.asked_by_ray.remote(what, given)] = node_id, agent
    waiting = list(agents)
    while waiting:
        left_s = max(0.0, began_s + within_s - time.monotonic())
        done, waiting = ray.wait(waiting, num_returns=1, timeout=left_s)
        if not done:
            break
        node_id, _ = agents[done[0]]
        try:
            answer = ray.get(done[0], timeout=5.0)
        except Exception as error:
            unreached[node_id] = _words(error)
            continue
        error_s = (time.monotonic() - began_s) / 2
        answers[node_id] = answer | {"clock": [answer["at"] - began - error_s, error_s]}
    for ref in waiting:
        node_id, agent = agents[ref]
        unreached[node_id] = f"no answer within {within_s:g} s"
        with suppress(Exception):
            ray.kill(agent)
    family = prefix.rstrip("-").rpartition("-")[0]
    for one in ray.util.list_named_actors(all_namespaces=True):
        name, node_id = one["name"], one["name"].rpartition("-")[2]
        is_ours = one["namespace"] == NAMESPACE and name.startswith(family)
        if is_ours and node_id in answers and not name.startswith(prefix):
            with suppress(Exception):
                ray.get_actor(name).end_unused.remote(_REPLACED_UNUSED_S)
    return {"answers": answers, "unreached": unreached}


def main() -> int:
    # What anything below prints must not stand among the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    questions: queue.Queue[dict[str, Any]] = queue.Queue()
    threading.Thread(target=_read, args=(questions,), daemon=True).start()
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
        answer = _visit(**hello, **questions.get())


def _read(questions: queue.Queue[dict[str, Any]]) -> None:
    for line in sys.stdin:
        questions.put(json.loads(line))
    # Whoever asked has ended, or wants no more. A driver's own shutdown takes seconds.
    os._exit(0)


def _words(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"[:300]


if __name__ == "__main__":
    raise SystemExit(main())
