"""Tests of `muster check` without a Prefect server, and of its answer for a cluster."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from cyclopts import App
from prefect.client.schemas.objects import WorkerStatus
from prefect.settings import PREFECT_API_URL, temporary_settings

from tasks.processes.identity import host_name
from tasks.queue.nodes import NO_TABLE
from tasks.ray.usage import Cluster, ClusterNode
from tasks.show.arguments import run
from tasks.spec.run import RunSpec
from tasks.train import checking
from tasks.train.checking import Fit, check, explain_misfit

pytestmark = pytest.mark.usefixtures("muster_home")

CHECK = App(name="check", default_command=check)
SPEC = {
    "name": "trial",
    "workload": "sft",
    "components": {"trainer": {"command": ["python", "train.py"]}},
}


@pytest.fixture
def spec(tmp_path: Path) -> Path:
    (tmp_path / "train.py").touch()
    path = tmp_path / "muster.yaml"
    path.write_text(yaml.safe_dump(SPEC))
    return path


def read_answer(
    spec: Path, capsys: pytest.CaptureFixture[str], *words: str
) -> tuple[int, dict[str, Any]]:
    """Run `muster check --json`, and return the exit code and the printed JSON."""
    code = run(CHECK, [str(spec), "--json", *words])
    return code, json.loads(capsys.readouterr().out)


def test_spec_without_gpus_is_valid_and_needs_no_cluster(
    spec: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, answer = read_answer(spec, capsys)

    assert code == 0 and answer["clusters"] == []


@pytest.mark.parametrize(("gpus", "fits"), [("0-7", True), ("0-3", False)])
def test_gpus_of_this_machine_are_compared_with_the_demand(
    spec: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    gpus: str,
    fits: bool,
) -> None:
    monkeypatch.setenv("MUSTER_GPUS", gpus)

    code, answer = read_answer(spec, capsys, "--set", "gang.gpus_per_node=8")

    # Without a Prefect server, Muster knows only this machine. The run may fit on other machines,
    # so the exit code is 0 even if this machine has too few GPUs.
    assert code == 0
    [cluster] = answer["clusters"]
    assert cluster["fits"] is fits
    assert ("this machine has 4 GPUs" in cluster["reason"]) is not fits


@pytest.mark.parametrize(("gang", "expected_code"), [("null", 2), ("{gpus_per_node: 1}", 0)])
def test_missing_program_is_a_fault_without_a_server_unless_the_run_needs_gpus(
    spec: Path, capsys: pytest.CaptureFixture[str], gang: str, expected_code: int
) -> None:
    words = ("--set", "components.trainer.command=[no-such-program]", "--set", f"gang={gang}")

    code, answer = read_answer(spec, capsys, *words)

    assert code == expected_code
    assert "no-such-program" in answer["missing_programs"][0]


@pytest.mark.parametrize(
    ("workers", "expected_code"),
    [
        ({"HERE": "ONLINE"}, 2),
        ({"a@HERE": "ONLINE", "b@HERE": "ONLINE", "elsewhere": "OFFLINE"}, 2),
        ({"HERE": "ONLINE", "b@elsewhere": "ONLINE"}, 0),
        ({"HERE": "OFFLINE"}, 0),
        ({}, 0),
    ],
)
def test_missing_program_is_a_fault_if_all_workers_are_on_this_machine(
    spec: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    workers: dict[str, str],
    expected_code: int,
) -> None:
    class Client:
        def read_work_pools(self, **_filters: Any) -> list[SimpleNamespace]:
            return [SimpleNamespace(name="gang")]

        def read_workers_for_work_pool(self, _pool: str) -> list[SimpleNamespace]:
            return [
                SimpleNamespace(name=name.replace("HERE", host_name()), status=WorkerStatus[status])
                for name, status in workers.items()
            ]

    monkeypatch.setattr(checking, "connect_to_server", lambda _: nullcontext(Client()))
    words = ("--set", "components.trainer.command=[no-such-program]")

    with temporary_settings({PREFECT_API_URL: "http://a/api"}):
        code = run(CHECK, [str(spec), *words])

    output = capsys.readouterr()
    assert code == expected_code
    assert ("The run of trial cannot start on this machine." in output.out) is (code == 2)
    assert ("The spec of trial is valid." in output.out) is (code == 0)
    assert ("Check that the host on which the run starts" in output.err) is (code == 0)


def test_check_names_the_python_and_says_where_a_missing_program_was_searched(
    spec: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        monkeypatch.delenv(variable, raising=False)
    words = ("--set", "components.trainer.command=[no-such-program]")

    code = run(CHECK, [str(spec), *words])

    output = capsys.readouterr()
    assert code == 2
    assert (
        f"python {sys.executable} (Muster's own Python, because the project has no .venv"
        in output.out
    )
    assert f"Muster searches for programs in {Path(sys.executable).parent}" in output.err
    assert f"create the environment as {spec.parent / '.venv'}, or activate it" in output.err


def test_run_that_fits_on_no_cluster_has_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    gang = {"nodes": 1, "gpus_per_node": 4}
    run_spec = RunSpec.model_validate({**SPEC, "gang": gang})
    too_small = Fit(cluster="nodes of the queue", fits=False, reason="too small")
    unknown = Fit(cluster="http://ray", fits=None, reason="no answer")

    async def answer(fits: list[Fit]) -> list[Fit]:
        return fits

    for fits, reason in (([too_small], "too small"), ([too_small, unknown], ""), ([], "")):
        monkeypatch.setattr(checking, "_check_clusters", lambda *_, fits=fits: answer(fits))
        assert explain_misfit(run_spec) == reason
    assert explain_misfit(RunSpec.model_validate(SPEC)) == ""


@pytest.mark.parametrize(
    ("clusters", "errors", "reason"),
    [
        # no run waits for the nodes of the queue, so the nodes were not read
        ({}, {}, "the work pool lists no nodes"),
        ({"http://ray": Cluster(nodes=())}, {}, "the work pool lists no nodes"),
        ({}, {"": NO_TABLE}, "the work pool lists no nodes"),
        ({}, {"": "the GPU driver does not answer"}, ""),
        ({"": Cluster(nodes=(ClusterNode(name="n1", gpus=8, cpus=None),))}, {}, ""),
    ],
)
def test_run_that_needs_gpus_does_not_fit_if_the_pool_lists_no_nodes(
    monkeypatch: pytest.MonkeyPatch,
    clusters: dict[str, Cluster],
    errors: dict[str, str],
    reason: str,
) -> None:
    class Reader:
        def __init__(self, *_arguments: object) -> None:
            pass

        async def run_pass(self) -> SimpleNamespace:
            return SimpleNamespace(clusters=clusters, cluster_errors=errors)

    @asynccontextmanager
    async def connect() -> AsyncIterator[None]:
        yield None

    monkeypatch.setattr(checking, "QueueReader", Reader)
    monkeypatch.setattr(checking, "LedgerReader", lambda _client: None)
    monkeypatch.setattr(checking, "connected", connect)

    explained = explain_misfit(RunSpec.model_validate({**SPEC, "gang": {"gpus_per_node": 1}}))

    assert explained.startswith(reason) and bool(explained) is bool(reason)
    assert ("muster queue set node.HOST=N" in explained) is bool(reason)


def test_invalid_spec_is_refused(spec: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(CHECK, [str(spec), "--set", "workload=x"]) == 2

    assert "workload" in capsys.readouterr().err


def test_dash_stands_for_standard_input(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    text = yaml.safe_dump(SPEC | {"name": "piped"})
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))

    code = run(CHECK, ["-"])

    assert code == 0
    assert "The spec of piped is valid." in capsys.readouterr().out
