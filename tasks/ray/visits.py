"""The process that visits nodes: `python -m tasks.ray.visits`, started by `visiting`.

A Ray driver of its own, so that the process that asks stays none: a driver takes 100 MB and
threads, and waits for minutes, or aborts, when its cluster is gone. It reads questions from stdin
and writes answers to stdout, a line of JSON each, and ends with its stdin.

What is done on a node is short and idempotent. The functions are sent there by value, so that no
code of Muster needs to be there, no package is uploaded, and a node on which runtime environments
fail is reached all the same. Through prefect-ray each visit is a task run of the flow run that
asks. A node where that fails (it has no Prefect, say), and every node where there is no Prefect
server, is visited by a plain Ray task: the engine that prefect-ray runs there would start a
temporary server on each node.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from typing import Any
from uuid import UUID

import ray
from prefect import Flow, Task, task
from prefect.cache_policies import NO_CACHE
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun
from prefect.context import FlowRunContext
from prefect.results import ResultStore
from prefect.settings import PREFECT_API_URL
from prefect.states import Crashed
from prefect_ray import RayTaskRunner
from prefect_ray.context import remote_options
from ray import cloudpickle
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import tasks
from tasks.processes.ending import end_carriers
from tasks.processes.hang_report import examine_carriers
from tasks.processes.machine import forget, look, names_unseen
from tasks.ray.dashboard import accelerators


def clock() -> float:
    """UTC epoch seconds by the node's clock. No task: its overhead would be the measurement."""
    return time.time()


#: By the name that a visitor asks for.
VISITS: Mapping[str, Task[..., dict[str, Any]]] = {
    name: task(name=name, persist_result=False, cache_policy=NO_CACHE)(function)
    for name, function in (
        ("sweep", end_carriers),
        ("examine", examine_carriers),
        ("look", look),
        ("compare", names_unseen),
        ("tidy", forget),
    )
}


#: Of the time for a visit, what prefect-ray has before plain Ray tasks are tried.
_PREFECT_SHARE = 0.7
#: The first ping of a worker is slow; the best of a few counts.
_PINGS = 4


def _visit(
    runner: RayTaskRunner[Any] | None, what: str, each: Mapping[str, Any], within_s: float
) -> dict[str, Any]:
    """
    Args:
        each: `arguments[node id]`.

    Returns: `{"answers": {node id: ...}, "unreached": {node id: why}}`.
    """
    deadline = time.monotonic() + within_s
    answers: dict[str, Any] = {}
    unreached: dict[str, str] = {}
    if runner is not None:
        answers = _by_prefect(runner, what, each, time.monotonic() + within_s * _PREFECT_SHARE)
    rest = {node: given for node, given in each.items() if node not in answers}
    function = VISITS[what].fn
    refs = {
        _pinned(function, node).options(name=what).remote(**given): node
        for node, given in rest.items()
    }
    for ref, node in _ended(refs, deadline):
        answer, why = _answer_of(ref)
        if why:
            unreached[node] = why
        else:
            answers[node] = answer
    for node in rest.keys() - answers.keys() - unreached.keys():
        unreached[node] = f"no answer within {within_s:g} s"
    return {"answers": answers, "unreached": unreached}


def _clocks(nodes: Iterable[str], within_s: float) -> dict[str, Any]:
    """`{"answers": {node id: [skew, error]}}` against this machine's clock, in seconds."""
    deadline = time.monotonic() + within_s
    best: dict[str, tuple[float, float]] = {}
    for node in nodes:
        ping = _pinned(clock, node)
        for _ in range(_PINGS):
            began = time.time()
            began_s = time.monotonic()
            ref = ping.remote()
            for _ in _ended({ref: node}, deadline):
                there, why = _answer_of(ref)
                error_s = (time.monotonic() - began_s) / 2
                if not why and (node not in best or error_s < best[node][1]):
                    best[node] = (there - began - error_s, error_s)
    return {"answers": best, "unreached": {}}


def _by_prefect(
    runner: RayTaskRunner[Any], what: str, each: Mapping[str, Any], deadline: float
) -> dict[str, Any]:
    """The answers; a node that gave none is missing, and its task run is closed."""
    futures = {}
    for node, given in each.items():
        named = VISITS[what].with_options(task_run_name=f"{what} {node[:8]}")
        with remote_options(**_options(node)):
            future = runner.submit(named, parameters=dict(given))
        futures[future.wrapped_future] = (future, node)
    answers: dict[str, Any] = {}
    why_not = {ref: "no answer in time" for ref in futures}
    for ref, node in _ended({ref: node for ref, (_, node) in futures.items()}, deadline):
        try:
            answers[node] = futures[ref][0].result(timeout=1.0)
            del why_not[ref]
        except Exception as error:
            why_not[ref] = _words(error)
    _close_task_runs({futures[ref][0].task_run_id: why for ref, why in why_not.items()})
    return answers


def main() -> int:
    # What anything below prints must not stand among the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    questions: queue.Queue[dict[str, Any]] = queue.Queue()
    threading.Thread(target=_read, args=(questions,), daemon=True).start()

    def say(answer: Mapping[str, Any]) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    hello = questions.get()
    cloudpickle.register_pickle_by_value(tasks)  # type: ignore[no-untyped-call]
    ray.init(hello["gcs_address"], log_to_driver=False, logging_level=logging.ERROR)
    with _runner(hello["flow_run"]) as runner:
        nodes = ray.nodes()  # type: ignore[no-untyped-call]
        say({"nodes": [_node(node) for node in nodes]})
        while True:
            ask = questions.get()
            if ask["visit"] == "clock":
                say(_clocks(ask["each"], ask["within_s"]))
            else:
                say(_visit(runner, ask["visit"], ask["each"], ask["within_s"]))


def _read(questions: queue.Queue[dict[str, Any]]) -> None:
    for line in sys.stdin:
        questions.put(json.loads(line))
    # Whoever asked has ended, or wants no more. A driver's own shutdown takes seconds.
    os._exit(0)


@contextmanager
def _runner(flow_run: Mapping[str, str] | None) -> Iterator[RayTaskRunner[Any] | None]:
    """prefect-ray's, in the context of the flow run that asks; None without a Prefect server."""
    if not PREFECT_API_URL.value():
        yield None
        return
    with ExitStack() as stack:
        runner = stack.enter_context(RayTaskRunner())
        if flow_run is not None:
            context = FlowRunContext(
                # Not the flow that asks: the nodes need not have its code.
                flow=Flow(_nothing, name="visit", validate_parameters=False),
                flow_run=FlowRun.model_validate(flow_run),
                task_runner=runner,
                client=stack.enter_context(get_client(sync_client=True)),
                result_store=ResultStore(),
                parameters={},
                detached=True,
            )
            stack.enter_context(context)
        yield runner


def _nothing() -> None:
    """Stands for the flow that asks."""


def _node(node: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "node_id": node["NodeID"],
        "ip": node["NodeManagerAddress"],
        "is_alive": node["Alive"],
        "gpus": accelerators(node["Resources"]),
        # .../session_2026-.../sockets/raylet
        "ray_dir": os.path.dirname(os.path.dirname(node["RayletSocketName"])),
    }


def _options(node: str) -> dict[str, Any]:
    return {
        "num_cpus": 0,
        # What was lost is tried again by other means, and known to be.
        "max_retries": 0,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node, soft=False),
    }


def _pinned(function: Any, node: str) -> Any:
    return ray.remote(**_options(node))(function)


def _ended(refs: Mapping[Any, str], deadline: float) -> Iterator[tuple[Any, str]]:
    """Each as it ends; what has not by the deadline is given up."""
    waiting = list(refs)
    while waiting:
        left_s = deadline - time.monotonic()
        done, waiting = ray.wait(waiting, num_returns=1, timeout=max(0.0, left_s))
        if not done:
            break
        for ref in done:
            yield ref, refs[ref]
    for ref in waiting:
        with suppress(Exception):
            ray.cancel(ref, force=True)


def _answer_of(ref: Any) -> tuple[Any, str]:
    """The answer, or why there is none."""
    try:
        return ray.get(ref, timeout=5.0), ""
    except Exception as error:
        return None, _words(error)


def _words(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[-1] if lines else ''}"[:300]


def _close_task_runs(why_not: Mapping[UUID, str]) -> None:
    """A task whose Ray worker died tells nobody: its task run would be Running for ever."""
    if not why_not:
        return
    with suppress(Exception), get_client(sync_client=True) as client:
        for task_run_id, why in why_not.items():
            with suppress(Exception):  # It may never have begun.
                client.set_task_run_state(task_run_id, Crashed(message=why), force=True)


if __name__ == "__main__":
    raise SystemExit(main())
