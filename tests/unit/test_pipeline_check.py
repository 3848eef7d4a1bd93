"""Checks of a pipeline: resources of its stages against the nodes of the queue, and `--matrix`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from cyclopts import App

from tasks.ray.dashboard import LiveNode
from tasks.ray.usage import Cluster, ClusterNode
from tasks.show.arguments import run
from tasks.spec.errors import BadArgument, InvalidSpec
from tasks.spec.loading import parse_spec
from tasks.spec.pipeline import parse_pipeline
from tasks.spec.run import RunSpec
from tasks.train.checking import check
from tasks.train.pipeline_check import (
    KnownCluster,
    build_pipeline_of_evaluations,
    compare_stages,
    rename_stage_path,
)
from tasks.train.submit_matrix import make_matrix_pipeline

RAY = "http://10.0.0.1:8265"
OTHER = "http://10.0.0.2:8265"


def known(*, may_grow: bool = False) -> KnownCluster:
    """Return a Ray cluster whose only node has 2 GPUs, 8 CPUs, 4 GiB of memory and a label.

    If `may_grow` is True, an autoscaler may add nodes to the cluster.
    """
    node = LiveNode(
        node_id="a",
        ip="10.0.0.1",
        name="n1",
        is_head=False,
        resources_total={"CPU": 8, "GPU": 2, "memory": 4 << 30},
        labels={"zone": "a"},
    )
    cluster = Cluster(nodes=(ClusterNode(name="n1", gpus=2, cpus=8),))
    return KnownCluster(cluster=cluster, ray_nodes=[node], may_grow=may_grow)


def compare(clusters: dict[str, KnownCluster], **stage: Any) -> list[str]:
    pipeline = parse_pipeline(
        {"name": "p", "stages": [{"name": "a", "command": ["true"], **stage}]}
    )
    return [str(fault) for fault in compare_stages(pipeline, clusters)]


@pytest.mark.parametrize(
    ("resources", "fault"),
    [
        ({"gpus": 2, "cpus": 8}, ""),
        ({"cpus": 8, "memory_gib": 4, "labels": {"zone": "a"}}, ""),
        ({"labels": {"zone": "!b"}}, ""),
        ({"gpus": 3}, "stages.0.resources.gpus: the run needs"),
        ({"cpus": 9}, "stages.0.resources.cpus: the step needs 9 CPUs, but no node has more than"),
        ({"memory_gib": 5}, "stages.0.resources.memory_gib: the step needs 5 GiB, but no node"),
        ({"labels": {"zone": "b"}}, "stages.0.resources.labels.zone: no node has the label"),
    ],
)
def test_resources_that_no_node_has_are_reported(resources: dict[str, Any], fault: str) -> None:
    faults = compare({RAY: known()}, resources=resources)

    assert [found[: len(fault)] for found in faults] == ([fault] if fault else [])


@pytest.mark.parametrize(
    ("resources", "fault"),
    [
        ({"gpus": 2}, ""),
        ({"gpus": 3}, "evals.math.resources.gpus: the run needs"),
        ({"cpus": 9}, "evals.math.resources.cpus: the step needs 9 CPUs"),
    ],
)
def test_resources_of_evaluations_are_compared_with_the_nodes(
    resources: dict[str, Any], fault: str
) -> None:
    trainer = {"command": ["true"], "checkpoints": "${run.dir}/checkpoints"}
    evaluation = {"command": ["true", "${checkpoint}"], "resources": resources}
    spec = parse_spec(
        {
            "name": "x",
            "workload": "sft",
            "ray": {"address": RAY},
            "components": {"trainer": trainer},
            "evals": {"code": {"command": ["true"]}, "math": evaluation},
        }
    )

    faults = compare_stages(build_pipeline_of_evaluations(spec), {RAY: known()})
    renamed = [str(rename_stage_path(one, [*spec.evals])) for one in faults]

    assert [found[: len(fault)] for found in renamed] == ([fault] if fault else [])


def test_clusters_that_may_grow_or_do_not_answer_cause_no_fault() -> None:
    resources = {"gpus": 64}

    assert compare({RAY: known(may_grow=True)}, resources=resources) == []
    assert compare({RAY: KnownCluster(cluster=None)}, resources=resources) == []


def test_step_on_ray_needs_one_listed_cluster() -> None:
    [none] = compare({"": known()})
    [two] = compare({RAY: known(), OTHER: known()})

    assert none.startswith("stages.0.on: the address of the Ray cluster is missing")
    assert f"2 clusters: {RAY}, {OTHER}" in two
    assert compare({"": known()}, on="host") == []


@pytest.mark.usefixtures("muster_home")
def test_check_accepts_a_pipeline_and_lists_its_faults(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    app = App(name="check", default_command=check)
    path = tmp_path / "pipeline.yaml"
    stage = {"name": "a", "command": ["true"]}
    path.write_text(yaml.safe_dump({"name": "p", "stages": [stage]}))

    code = run(app, [str(path), "--json"])
    answer = json.loads(capsys.readouterr().out)
    path.write_text(yaml.safe_dump({"name": "p", "stages": [{**stage, "needs": ["b"]}]}))
    faulty_code = run(app, [str(path)])

    assert (code, answer) == (0, {"stages": ["a"], "unfit": []})
    assert faulty_code == 2
    assert "stages.0.needs.0: there is no stage 'b'" in capsys.readouterr().err


@pytest.fixture
def spec() -> RunSpec:
    trainer = {"command": ["true"], "env": {"SEED": "0"}}
    return parse_spec(
        {
            "name": "one",
            "workload": "sft",
            "env": {"LR": "1e-4"},
            "components": {"trainer": trainer},
        }
    )


def test_options_become_the_points_of_a_matrix(spec: RunSpec) -> None:
    pipeline = make_matrix_pipeline(spec, ["lr=1e-5,3e-5", "seed=1..3"], at_most=2)

    [stage] = pipeline.stages
    run_specs = [RunSpec.model_validate(pipeline.run_spec(unit)) for unit in stage.units]
    values = [(one.env["LR"], one.processes["trainer"].env["SEED"]) for one in run_specs]
    assert values == [(lr, seed) for lr in ("1e-5", "3e-5") for seed in ("1", "2", "3")]
    assert stage.at_most == 2


@pytest.mark.parametrize(
    ("option", "problem"),
    [
        ("lr", "write KEY=VALUE,VALUE"),
        ("lr=", "write KEY=VALUE,VALUE"),
        ("lrr=1", "did you mean `lr`?"),
        ("seed=4..1", "the range 4..1 must have between 1 and 1000 numbers"),
        ("seed=1..5000", "must have between 1 and 1000 numbers"),
    ],
)
def test_malformed_matrix_option_is_refused(spec: RunSpec, option: str, problem: str) -> None:
    with pytest.raises(BadArgument) as caught:
        make_matrix_pipeline(spec, [option])

    assert problem in str(caught.value)


def test_invalid_point_is_refused(spec: RunSpec) -> None:
    with pytest.raises(InvalidSpec, match=r"stages.0.matrix.workload.1: workload: must be"):
        make_matrix_pipeline(spec, ["workload=sft,dance"])
