"""Tests of `muster_metrics.py`, the module with which a training script writes its metrics."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tasks.spec.draft import read_hook

DOCUMENT = Path(__file__).parents[2] / "docs" / "your-training.md"


@pytest.fixture
def metrics_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "metrics.jsonl"
    monkeypatch.setenv("METRICS", str(path))
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    return path


def load_hook() -> Any:
    """Import and return the module `muster_metrics`, which training scripts may use."""
    module = ModuleType("muster_metrics")
    exec(compile(read_hook(), "muster_metrics.py", "exec"), vars(module))
    return module


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_loop_writes_one_line_per_step(metrics_file: Path) -> None:
    hook = load_hook()

    hook.log(1, loss=0.5)
    hook.log(2, loss=0.25)

    assert read_lines(metrics_file) == [{"loss": 0.5, "step": 1}, {"loss": 0.25, "step": 2}]


def test_rank_of_the_shell_is_reported_once(
    metrics_file: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "3")
    hook = load_hook()

    hook.log(1, loss=0.5)
    hook.log(2, loss=0.5)

    error_lines = capsys.readouterr().err.splitlines()
    assert not metrics_file.exists()
    assert len(error_lines) == 1
    assert "RANK is 3" in error_lines[0] and "unset RANK" in error_lines[0]


@pytest.mark.parametrize("rank", [0, 1])
def test_process_group_of_torch_is_preferred_to_the_variable(
    metrics_file: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    distributed = SimpleNamespace(
        is_available=lambda: True, is_initialized=lambda: True, get_rank=lambda: rank
    )
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(distributed=distributed))
    monkeypatch.setenv("RANK", "7")

    load_hook().log(1, loss=0.5)

    assert metrics_file.exists() is (rank == 0)


def test_without_the_variable_nothing_is_written(
    metrics_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("METRICS")

    load_hook().log(1, loss=0.5)

    assert not metrics_file.exists()


@pytest.mark.parametrize("is_first", [True, False])
def test_callback_of_transformers_writes_in_the_first_process(
    metrics_file: Path, monkeypatch: pytest.MonkeyPatch, is_first: bool
) -> None:
    transformers = SimpleNamespace(TrainerCallback=object)
    monkeypatch.setitem(sys.modules, "transformers", transformers)
    state = SimpleNamespace(is_world_process_zero=is_first, global_step=7)

    load_hook().transformers_callback().on_log(None, state, None, logs={"loss": 0.5})

    lines = read_lines(metrics_file) if is_first else []
    assert lines == ([{"loss": 0.5, "step": 7}] if is_first else [])
    assert metrics_file.exists() is is_first


def test_callback_of_lightning_writes_each_step(
    metrics_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "lightning", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "lightning.pytorch", SimpleNamespace(Callback=object))
    trainer = SimpleNamespace(is_global_zero=True, global_step=3, callback_metrics={"acc": 0.75})

    load_hook().lightning_callback().on_train_batch_end(trainer, None, {"loss": 0.5}, None, 0)

    assert read_lines(metrics_file) == [{"loss": 0.5, "acc": 0.75, "step": 3}]


def test_document_shows_the_module() -> None:
    assert f"```python\n{read_hook()}```" in DOCUMENT.read_text()
