"""The command that uploads the offline runs of W&B names only folders of the run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.record.places import RunPlace
from tasks.record.run_json import RunJson
from tasks.record.states import RunState
from tasks.show.offline_tracker import make_sync_command
from tasks.show.page import show_summary
from tasks.show.run_view import ObservedRun, RunView
from tasks.spec.run import RunSpec

RUN_ID = "x-sft-20260101-000000-abcd91c2"
OTHER = "x-sft-20260101-000000-abcd91c3"


def make_spec(cwd: Path, **env: str) -> RunSpec:
    return RunSpec.model_validate(
        {
            "name": "x",
            "workload": "sft",
            "cwd": str(cwd),
            "env": env,
            "components": {"trainer": {"command": ["true"]}},
        }
    )


def write_run(folder: Path, id: str, run_id: str, *, is_uploaded: bool = False) -> Path:
    directory = folder / "wandb" / f"offline-run-20260101_000000-{id}"
    directory.mkdir(parents=True)
    file = directory / f"run-{id}.wandb"
    file.write_bytes(b":W&B\x00" + b"\x1a" + f"{run_id}--a01-trainer".encode())
    if is_uploaded:
        file.with_name(f"{file.name}.synced").touch()
    return directory


def test_command_names_the_folders_of_all_attempts_that_were_not_uploaded(tmp_path: Path) -> None:
    first = write_run(tmp_path, "a", RUN_ID)
    second = write_run(tmp_path, "b", RUN_ID)
    write_run(tmp_path, "c", OTHER)
    write_run(tmp_path, "d", RUN_ID, is_uploaded=True)

    assert make_sync_command(RUN_ID, make_spec(tmp_path)) == f"wandb sync {first} {second}"


def test_folder_of_the_variable_of_wandb_is_searched(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "my runs", "a", RUN_ID)

    spec = make_spec(tmp_path, WANDB_DIR=str(tmp_path / "my runs"))

    assert make_sync_command(RUN_ID, spec) == f"wandb sync '{folder}'"


def test_page_shows_the_command_with_the_name_of_the_tracker(tmp_path: Path) -> None:
    folder = write_run(tmp_path, "a", RUN_ID)
    spec = make_spec(tmp_path)
    view = RunView(
        at=2.0,
        spec=spec,
        record=RunJson(run_id=RUN_ID, state=RunState.COMPLETED),
        place=RunPlace(directory=tmp_path / RUN_ID),
        seen=ObservedRun(spec),
    )

    summary = show_summary(view)

    assert f"- **Upload to W&B**: `wandb sync {folder}`" in str(summary.data)


@pytest.mark.parametrize("run_id", ["", OTHER])
def test_run_without_offline_folders_has_no_command(tmp_path: Path, run_id: str) -> None:
    if run_id:
        write_run(tmp_path, "a", run_id)

    assert make_sync_command(RUN_ID, make_spec(tmp_path)) == ""
