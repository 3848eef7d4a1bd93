"""Looking at every node of a cluster before runs are sent to it."""

from __future__ import annotations

import asyncio
import shutil
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from prefect import task
from prefect.artifacts import create_markdown_artifact
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.logging import get_run_logger
from prefect.states import Completed, Failed

from tasks.processes.identity import host_name
from tasks.processes.machine import code_here, look, names_unseen
from tasks.processes.registry import owner_of
from tasks.ray.dashboard import Dashboard, Denied, NoAnswer
from tasks.ray.nodes import Node, NodeVisitor, NotVisited, visiting
from tasks.record.places import muster_home
from tasks.upkeep.node_health import CALLER, Limits, NodeSeen, Survey, Verdict, judged

LOOK_WITHIN_S = 60.0


@task(name="survey", persist_result=False, cache_policy=NO_CACHE)
def survey_cluster(address: str, shared: str | None, within_s: float) -> Survey:
    """Look at all nodes at once, each by a task run of its own through prefect-ray.

    Args:
        address: The URL of the Ray dashboard.
        shared: The directory that has to be the same everywhere; None: MUSTER_HOME.
        within_s: For each of the steps: connecting, looking, comparing.

    Raises: NotVisited, where the cluster can't be asked at all; OSError, where there can be no
    MUSTER_HOME.
    """
    place = Path(shared) if shared else muster_home()
    if not shared:
        # As the first run does.
        place.mkdir(parents=True, exist_ok=True)
    return asyncio.run(_survey(address, place.absolute(), within_s))


def judge_nodes(survey: Survey, limits: Limits) -> Verdict:
    """What is wrong with which node."""
    return judged(survey, limits)


@task(name="publish", persist_result=False, cache_policy=NO_CACHE)
def publish_verdict(verdict: Verdict) -> None:
    """Leave a table on the flow run, and a line in its log for each thing that is wrong."""
    log = get_run_logger()
    for finding in verdict.findings:
        log.error("%s", finding)
    try:
        create_markdown_artifact(
            key="preflight", markdown=verdict.as_markdown(), description=verdict.summary[:500]
        )
    except Exception as error:
        log.warning("the artifact was not made: %r", error)


def conclude_preflight(verdict: Verdict) -> State[Verdict]:
    """The flow run's end: failed where a node is not fit, with the node and the remedy."""
    end = Failed if verdict.findings else Completed
    return end(message=verdict.summary, data=verdict)


async def _survey(address: str, shared: Path, within_s: float) -> Survey:
    dashboard = Dashboard(address)
    try:
        gcs_address = await dashboard.gcs_address()
        async with visiting(gcs_address, within_s=within_s) as visitor:
            seen = await _nodes_seen(visitor, shared, within_s)
        return Survey(
            nodes=seen,
            shared=str(shared),
            code=code_here()["digest"],
            is_live=await _live_runs(dashboard, seen),
        )
    except (NoAnswer, Denied) as error:
        raise NotVisited(str(error)) from error
    finally:
        await dashboard.close()


async def _nodes_seen(visitor: NodeVisitor, shared: Path, within_s: float) -> tuple[NodeSeen, ...]:
    """Each node leaves a file in the shared directory; once all have, each reads all of them."""
    nodes = visitor.alive
    folder = shared / f".muster-preflight-{uuid.uuid4().hex[:12]}"
    caller = look(str(shared), str(folder), CALLER, str(shared))
    try:
        each = {
            node.node_id: {
                "shared": str(shared),
                "folder": str(folder),
                "name": node.node_id,
                "ray_dir": node.ray_dir,
            }
            for node in nodes
        }
        looked = await visitor.visit("look", each, within_s)
        wrote = [node for node, found in looked.answers.items() if not found["shared_problem"]]
        names = [*wrote, *([] if caller["shared_problem"] else [CALLER])]
        compare = {node: {"folder": str(folder), "names": names} for node in wrote}
        compared = await visitor.visit("compare", compare, within_s)
        clocks = await visitor.visit("clock", dict.fromkeys(looked.answers), within_s)
        unseen = {node: answer["unseen"] for node, answer in compared.answers.items()}
        unseen[CALLER] = names_unseen(str(folder), _alike(unseen))["unseen"]
        if any(unseen.values()):
            # On a node where the directory is another, the caller can't remove what was left.
            await visitor.visit("tidy", {node: {"folder": str(folder)} for node in wrote}, within_s)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    unreached = {**looked.unreached, **compared.unreached}
    shown = {node.node_id: node.name for node in nodes} | {CALLER: CALLER}
    blamed = _blamed(unseen)
    this = NodeSeen(
        name=CALLER,
        look={"shared_problem": caller["shared_problem"]} if caller["shared_problem"] else {},
        unseen=tuple(shown[name] for name in blamed[CALLER]),
    )
    return (
        this,
        *(
            replace(
                _seen(node, looked.answers, unreached, clocks.answers),
                unseen=tuple(shown[name] for name in blamed.get(node.node_id, ())),
            )
            for node in nodes
        ),
    )


def _alike(unseen: Mapping[str, Sequence[str]]) -> list[str]:
    """The nodes that see what the caller wrote."""
    return [node for node, names in unseen.items() if CALLER not in names]


def _blamed(unseen: Mapping[str, Sequence[str]]) -> dict[str, list[str]]:
    """A node whose directory is another is blamed for it, and not everyone that can't see it."""
    alike = {*_alike(unseen), CALLER}
    return {
        node: [name for name in names if name in alike] if node in alike else [CALLER]
        for node, names in unseen.items()
    }


def _seen(
    node: Node,
    looks: Mapping[str, Any],
    unreached: Mapping[str, str],
    clocks: Mapping[str, Sequence[float]],
) -> NodeSeen:
    skew_s, error_s = clocks.get(node.node_id, (None, 0.0))
    return NodeSeen(
        name=node.name,
        gpus=node.gpus,
        look=looks.get(node.node_id, {}),
        unreached=unreached.get(node.node_id, ""),
        skew_s=skew_s,
        skew_error_s=error_s or 0.0,
    )


async def _live_runs(dashboard: Dashboard, nodes: Sequence[NodeSeen]) -> dict[str, bool]:
    """Of the runs that have processes on nodes, those that are meant to."""
    attempts: dict[str, set[str]] = {}
    for node in nodes:
        for carrier in node.look.get("carriers", ()):
            attempts.setdefault(carrier["run_id"], set()).add(carrier["attempt"])
    found = {}
    for run_id, numbers in attempts.items():
        jobs = [await dashboard.job(f"{run_id}--a{int(n):02d}") for n in numbers if n.isdigit()]
        has_job = any(job is not None and not job.is_final for job in jobs)
        found[run_id] = has_job or _has_owner(run_id)
    return found


def _has_owner(run_id: str) -> bool:
    """A process of another host, in a registry that hosts share, can't be asked: it may live."""
    owner = owner_of(run_id)
    return owner is not None and (owner.host != host_name() or owner.process.is_alive())
