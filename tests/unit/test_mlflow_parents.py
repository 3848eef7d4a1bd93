"""Tests of the search for the parent run in MLflow, with a fake package `mlflow`.

`tests/integration/test_trackers.py` uses the real package.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.spec.loading import parse_spec
from tasks.spec.run import RunSpec
from tasks.train.mlflow_parents import find_mlflow_parents

RUN_ID = "x-sft-20260101-000000-abcd91c2"
PARENT = "0123456789abcdef0123456789abcdef"
#: Source of a fake package `mlflow`, with one run of an earlier attempt. Each call of a function of
#: the package is appended to the file that the environment variable CALLS names.
FAKE_MLFLOW = f"""
import os
from types import SimpleNamespace as Namespace

def write(*words):
    with open(os.environ["CALLS"], "a") as file:
        print(*words, file=file)

class Page(list):
    token = None

class MlflowClient:
    def search_experiments(self, page_token=None):
        return Page([Namespace(experiment_id="7")])

    def search_runs(self, experiments, condition, max_results):
        write("search", condition)
        info = Namespace(run_id="of-attempt-1", experiment_id="7", status="RUNNING")
        return [Namespace(info=info, data=Namespace(tags={{"muster.attempt": "1"}}))]

    def create_run(self, experiment, tags, run_name):
        write("create", experiment, run_name)
        return Namespace(info=Namespace(run_id="{PARENT}"))

    def set_tag(self, run_id, name, value):
        write("tag", run_id, name, value)

    def set_terminated(self, run_id, status):
        write("end", run_id, status)
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Install a fake `mlflow` for components, and return the file with all calls of the fake."""
    for name in ("MLFLOW_RUN_ID", "MLFLOW_RUN_CONTEXT"):
        monkeypatch.delenv(name, raising=False)
    write_fake(tmp_path, FAKE_MLFLOW)
    file = tmp_path / "calls"
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packages"))
    monkeypatch.setenv("CALLS", str(file))
    return file


def write_fake(folder: Path, source: str) -> None:
    package = folder / "packages" / "mlflow.py"
    package.parent.mkdir(exist_ok=True)
    package.write_text(source)


def make_spec(**keys: object) -> RunSpec:
    content = {
        "name": "x",
        "workload": "sft",
        "env": {"MLFLOW_TRACKING_URI": "http://127.0.0.1:1"},
        "components": {"trainer": {"command": ["python", "train.py"]}},
    }
    return parse_spec(content | keys)


def find(
    spec: RunSpec, attempt: int = 2, *, must_end: bool = False, limit_s: float = 60
) -> tuple[dict[str, str], list[str]]:
    """Return the ids of the parent runs in MLflow, and the warnings of the search.

    Args:
        spec: Spec of the run.
        attempt: Number of the attempt.
        must_end: True if the run is ending. The search then stops at once.
        limit_s: Time limit of the search, in seconds.
    """
    warnings: list[str] = []
    parents = find_mlflow_parents(
        spec,
        RUN_ID,
        attempt,
        must_end=lambda: must_end,
        warn=warnings.append,
        limit_s=limit_s,
    )
    return parents, warnings


def test_second_attempt_creates_the_parent_of_all_attempts(calls: Path) -> None:
    parents, warnings = find(make_spec())

    assert (parents, warnings) == ({"trainer": PARENT}, [])
    assert calls.read_text().splitlines() == [
        f"search tags.`muster.run` = '{RUN_ID}'",
        f"create 7 {RUN_ID}",
        f"end {PARENT} FINISHED",
        f"tag of-attempt-1 mlflow.parentRunId {PARENT}",
        "end of-attempt-1 KILLED",
    ]


def test_keys_of_the_prefect_server_are_not_passed_to_mlflow(
    calls: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PREFECT_API_KEY", "pnu-secret")
    write_fake(tmp_path, "import os; open(os.environ['CALLS'], 'w').write(str(dict(os.environ)))")
    job = {"command": ["python", "train.py"], "launcher": "ray_job"}

    find(make_spec(components={"trainer": job}, ray={"address": "http://127.0.0.1:8265"}))

    assert "MLFLOW_TRACKING_URI" in calls.read_text()
    assert "pnu-secret" not in calls.read_text()


def test_components_with_the_same_store_share_one_request(calls: Path) -> None:
    program = {"command": ["python", "run.py"]}

    parents, _ = find(make_spec(components={"api": program, "trainer": program}))

    assert parents == {"api": PARENT, "trainer": PARENT}
    assert calls.read_text().count("search") == 1


@pytest.mark.parametrize(
    ("keys", "attempt"),
    [
        ({}, 1),
        ({"tracker": "off"}, 2),
        ({"env": {}}, 2),
        ({"env": {"MLFLOW_TRACKING_URI": "http://x", "MLFLOW_RUN_ID": "mine"}}, 2),
    ],
    ids=["first attempt", "tracker off", "no MLflow", "run chosen by the spec"],
)
def test_mlflow_is_not_asked_without_need(
    calls: Path, keys: dict[str, object], attempt: int
) -> None:
    parents, warnings = find(make_spec(**keys), attempt)

    assert (parents, warnings, calls.exists()) == ({}, [], False)


def test_component_without_the_package_has_no_parent(calls: Path, tmp_path: Path) -> None:
    write_fake(tmp_path, "raise ImportError('not installed')")

    assert find(make_spec()) == ({}, [])


def test_error_of_mlflow_is_a_warning(calls: Path, tmp_path: Path) -> None:
    write_fake(tmp_path, "raise RuntimeError('no such server')")

    parents, [warning] = find(make_spec())

    assert parents == {}
    assert "RuntimeError: no such server" in warning
    assert "tracker: off" in warning


def test_silent_server_is_given_up_with_a_warning(calls: Path, tmp_path: Path) -> None:
    write_fake(tmp_path, "import time; time.sleep(600)")

    parents, [warning] = find(make_spec(), limit_s=0.5)

    assert parents == {}
    assert "no answer within 0.5 s" in warning


def test_end_of_the_run_ends_the_search_without_a_warning(calls: Path, tmp_path: Path) -> None:
    write_fake(tmp_path, "import time; time.sleep(600)")

    result = find(make_spec(), must_end=True)

    assert result == ({}, [])
