"""Tests of finding checkpoints in the layouts of several trainers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import yaml

from tasks.record.checkpoints import (
    describe_unrecognised,
    explain_lack_of_checkpoints,
    find_latest_checkpoint,
    find_resume_checkpoint,
    find_superfluous_checkpoints,
    is_writing_checkpoint,
    plan_resume,
    remove_checkpoint,
)
from tasks.record.places import RunPlace
from tasks.record.retries import find_blamed_nodes, has_failed_by_checkpoint, list_counted_failures
from tasks.record.run_json import AttemptRecord
from tasks.spec.run import Progress, RunSpec


def create_files(root: Path, *paths: str) -> None:
    """Create files and folders in `root`. The first path gets the oldest modification time.

    A path that ends with a slash becomes a folder.
    """
    for age, name in enumerate(paths):
        path = root / name
        if name.endswith("/"):
            path.mkdir(parents=True, exist_ok=True)
            (path / "model.pt").write_text("weights")
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("{}" if path.suffix == ".json" else "weights")
        os.utime(path, (1000 + age, 1000 + age))


@pytest.mark.parametrize(
    ("paths", "found"),
    [
        (["step-000010.npz", "step-000009.npz"], "step-000010.npz"),  # sorted by step, not by age
        # the folders are sorted by number, not alphabetically
        (
            ["checkpoint-500/", "checkpoint-1000/"],
            "checkpoint-1000",
        ),
        # a file name has several numbers: the last number is the step
        (
            ["model-7b-step-20.pt", "model-7b-step-3.pt"],
            "model-7b-step-20.pt",
        ),
        (["step-10.pt", "step-20.pt.tmp"], "step-10.pt"),
        (["step-10.pt", ".step-20.pt"], "step-10.pt"),
        # Hugging Face's Trainer uses the prefix `tmp-` for an incomplete checkpoint, so step 20 is
        # not used
        (
            ["step-10.pt", "tmp-checkpoint-20/"],
            "step-10.pt",
        ),
        (
            [
                "checkpoint-10/model.pt",
                "checkpoint-10/trainer_state.json",
                "checkpoint-20/model.pt",
            ],
            "checkpoint-10",
        ),
        (["config.json", "events.log"], None),  # no file name contains a step
        # verl and SkyRL write a pointer file after the checkpoint. The pointer file is missing
        # here, so the checkpoint is incomplete
        (["global_step_5/"], None),
        (["iter_0000005/"], None),
        ([], None),
    ],
)
def test_last_complete_checkpoint_of_a_folder_is_found(
    tmp_path: Path, paths: list[str], found: str | None
) -> None:
    create_files(tmp_path, *paths)

    expected = tmp_path / found if found else None
    assert find_latest_checkpoint(str(tmp_path), Path("/")) == expected


@pytest.mark.parametrize(
    ("pointer", "says", "paths", "found"),
    [
        ("latest", "step-000010.npz\n", ["step-000010.npz", "step-000020.npz"], "step-000010.npz"),
        ("latest", "global_step10", ["global_step10/", "global_step20/"], "global_step10"),
        (
            "latest_checkpointed_iteration.txt",  # the pointer file of verl
            "10",
            ["global_step_10/", "global_step_20/"],
            "global_step_10",
        ),
        ("latest_checkpointed_iteration.txt", "10\n", ["iter_0000010/"], "iter_0000010"),
        (
            "latest_ckpt_global_step.txt",
            "4",
            ["global_step_4/", "global_step_40/"],
            "global_step_4",
        ),
        ("latest_checkpointed_iteration.txt", "release", ["release/"], "release"),  # Megatron
        # the pointer file `latest` points to a deleted checkpoint. The only existing checkpoint is
        # newer and may be incomplete, so no checkpoint is used
        (
            "latest",
            "step-000010.npz",
            ["step-000020.npz"],
            None,
        ),
        ("latest", "", ["step-000020.npz"], None),  # a full disk left the pointer file empty
        ("latest_checkpointed_iteration.txt", "10", ["global_step_20/"], None),
        # the pointer file points to a deleted checkpoint. Checkpoints with lower steps are
        # complete, so the newest of them is used
        ("latest", "step-30.pt", ["step-10.pt", "step-20.pt", "step-40.pt"], "step-20.pt"),
        # the pointer file is damaged, so the newest checkpoint may be incomplete and is not used
        ("latest", "", ["step-10.pt", "step-20.pt", "step-40.pt"], "step-20.pt"),
        ("latest", "step-1", ["step-10.pt", "step-20.pt", "step-40.pt"], "step-20.pt"),
        ("latest_checkpointed_iteration.txt", "1", ["iter_10/", "iter_20/"], "iter_10"),
        ("latest_ckpt_global_step.txt", "3", ["global_step_2/", "global_step_4/"], "global_step_2"),
    ],
)
def test_pointer_file_names_the_complete_checkpoint(
    tmp_path: Path, pointer: str, says: str, paths: list[str], found: str | None
) -> None:
    create_files(tmp_path, *paths)
    (tmp_path / pointer).write_text(says)

    expected = tmp_path / found if found else None
    assert find_latest_checkpoint(str(tmp_path), Path("/")) == expected


@pytest.mark.parametrize(
    ("paths", "found"),
    [
        (["step-10.pt", "events.out.tfevents.1763900000.host.4123.0"], "step-10.pt"),
        (["step-10.pt", "train_rank20.log", "config_v30.yaml"], "step-10.pt"),
        (["step_10-loss_0.31.ckpt", "step_20-loss_0.25.ckpt"], "step_20-loss_0.25.ckpt"),
        (["epoch=1-step=200.ckpt", "epoch=2-step=300.ckpt"], "epoch=2-step=300.ckpt"),
    ],
)
def test_other_numbers_are_not_mistaken_for_a_step(
    tmp_path: Path, paths: list[str], found: str
) -> None:
    create_files(tmp_path, *paths)

    assert find_latest_checkpoint(str(tmp_path), Path("/")) == tmp_path / found


def test_pointer_may_be_a_symbolic_link(tmp_path: Path) -> None:
    create_files(tmp_path, "global_step_10/", "global_step_20/", "global_step_30/")
    (tmp_path / "latest").symlink_to("global_step_20")

    assert find_latest_checkpoint(str(tmp_path), Path("/")) == tmp_path / "global_step_20"


def test_empty_files_and_folders_are_no_checkpoints(tmp_path: Path) -> None:
    create_files(tmp_path, "step-10.pt")
    (tmp_path / "step-20.pt").touch()
    (tmp_path / "checkpoint-30").mkdir()

    assert find_latest_checkpoint(str(tmp_path), Path("/")) == tmp_path / "step-10.pt"


def test_pattern_matches_the_checkpoints_themselves(tmp_path: Path) -> None:
    create_files(tmp_path, "a/global_step_5/", "b/global_step_7/", "b/other-9/")

    found = find_latest_checkpoint("*/global_step_*", tmp_path)

    assert found == tmp_path / "b" / "global_step_7"


def test_newest_checkpoint_wins_if_names_have_no_step(tmp_path: Path) -> None:
    create_files(tmp_path, "best.pt", "final.pt")

    assert find_latest_checkpoint("*.pt", tmp_path) == tmp_path / "final.pt"


def test_path_of_a_file_is_the_checkpoint(tmp_path: Path) -> None:
    create_files(tmp_path, "last.pt")

    assert find_latest_checkpoint("last.pt", tmp_path) == tmp_path / "last.pt"


def test_missing_folder_has_no_checkpoints(tmp_path: Path) -> None:
    assert find_latest_checkpoint("checkpoints", tmp_path) is None
    assert find_latest_checkpoint("checkpoints/*", tmp_path) is None


def test_folder_name_with_pattern_characters_is_not_read_as_a_pattern(tmp_path: Path) -> None:
    create_files(tmp_path, "runs [old]/step-1.pt")

    assert find_latest_checkpoint("runs [old]", tmp_path) == tmp_path / "runs [old]" / "step-1.pt"


def attempts(count: int, **of_last: object) -> list[AttemptRecord]:
    """Return the records of `count` failed attempts.

    The keyword arguments are further fields of the last attempt.
    """
    attempt_fields: list[dict[str, object]] = [{} for _ in range(count)]
    for last in attempt_fields[-1:]:
        last.update(of_last)
    return [
        AttemptRecord.model_validate({"number": number, "state": "failed", **more})
        for number, more in enumerate(attempt_fields, 1)
    ]


def run_of(
    tmp_path: Path, checkpoints: str | None, attempts: int, keep: int | None = None
) -> tuple[RunSpec, RunPlace]:
    """Write the files of a run with some failed attempts, and return the run's spec and paths.

    Args:
        tmp_path: Directory for the files.
        checkpoints: Key `checkpoints` of the trainer. None for a trainer without checkpoints.
        attempts: Number of attempts.
        keep: Key `keep` of the trainer.
    """
    trainer: dict[str, object] = {"command": ["python"], "cwd": str(tmp_path), "keep": keep}
    if checkpoints is not None:
        trainer["checkpoints"] = checkpoints
    data = {"name": "x", "workload": "grpo", "components": {"trainer": trainer}}
    place = RunPlace(directory=tmp_path / "run")
    for number in range(1, attempts + 1):
        attempt = place.attempt(number)
        attempt.directory.mkdir(parents=True)
        text = yaml.safe_dump(data).replace("${attempt.dir}", str(attempt.directory))
        attempt.spec.write_text(text.replace("${run.dir}", str(place.directory)))
    return RunSpec.model_validate(data), place


def test_first_attempt_has_no_checkpoint(tmp_path: Path) -> None:
    spec, place = run_of(tmp_path, "${run.dir}/checkpoints", 0)

    assert find_resume_checkpoint(spec, place, attempts(0)) is None


def test_component_without_checkpoints_is_not_resumed(tmp_path: Path) -> None:
    spec, place = run_of(tmp_path, None, 2)

    assert find_resume_checkpoint(spec, place, attempts(2)) is None


def test_all_attempts_share_the_folder_of_the_run(tmp_path: Path) -> None:
    spec, place = run_of(tmp_path, "${run.dir}/checkpoints", 2)
    create_files(place.directory, "checkpoints/step-10.pt")

    assert (
        find_resume_checkpoint(spec, place, attempts(2))
        == place.directory / "checkpoints" / "step-10.pt"
    )


def test_checkpoint_of_an_earlier_attempt_is_used(tmp_path: Path) -> None:
    spec, place = run_of(tmp_path, "${attempt.dir}/checkpoints", 3)
    create_files(place.attempt(1).directory, "checkpoints/step-30.pt")
    create_files(place.attempt(2).directory, "checkpoints/step-20.pt")

    found = find_resume_checkpoint(spec, place, attempts(3))

    assert found == place.attempt(2).directory / "checkpoints" / "step-20.pt"


def test_relative_folder_starts_at_the_component_directory(tmp_path: Path) -> None:
    spec, place = run_of(tmp_path, "checkpoints", 1)
    create_files(tmp_path, "checkpoints/step-1.pt")

    assert (
        find_resume_checkpoint(spec, place, attempts(1)) == tmp_path / "checkpoints" / "step-1.pt"
    )


def test_attempt_with_deleted_files_has_no_checkpoint(tmp_path: Path) -> None:
    spec, place = run_of(tmp_path, "${run.dir}/checkpoints", 1)
    place.attempt(1).spec.write_text("{")

    assert find_resume_checkpoint(spec, place, attempts(1)) is None


def failed(kind: str, **more: object) -> dict[str, object]:
    return {"failure": {"kind": kind, "component": "trainer", "message": "it happened"}, **more}


def recorded(*attempts: dict[str, object]) -> list[AttemptRecord]:
    return [
        AttemptRecord.model_validate({"number": number, "state": "failed", **attempt})
        for number, attempt in enumerate(attempts, 1)
    ]


def failed_to_load(checkpoint: Path, kind: str = "USER_ERROR") -> dict[str, object]:
    """Return the fields of an attempt that failed while it loaded a checkpoint."""
    attempt = failed(kind, resume_from=str(checkpoint))
    message = f"RuntimeError: cannot load {checkpoint.name}"
    attempt["failure"] = {**attempt["failure"], "message": message}  # type: ignore[dict-item]
    return attempt


@pytest.mark.parametrize("progress", [Progress(jsonl="m", step="step"), None])
def test_older_checkpoint_is_used_if_loading_failed(
    tmp_path: Path, progress: Progress | None
) -> None:
    spec, place = run_of(tmp_path, "${run.dir}/checkpoints", 5)
    spec = spec.model_copy(update={"progress": progress})
    folder = place.directory / "checkpoints"
    create_files(folder, "step-10.pt", "step-20.pt", "step-30.pt")
    (folder / "latest").write_text("step-30.pt")
    first = failed("NODE_LOST", step=35)
    back = [failed_to_load(folder / f"step-{number}.pt") for number in (30, 20, 10)]

    found = [
        find_resume_checkpoint(spec, place, recorded(first, *back[:count])) for count in range(4)
    ]

    # Each checkpoint has failed to load once. After that, the newest checkpoint is used again,
    # because a start without a checkpoint could overwrite the checkpoints.
    names = ["step-30.pt", "step-20.pt", "step-10.pt", "step-30.pt"]
    assert found == [folder / name for name in names]
    assert has_failed_by_checkpoint(spec, recorded(first, back[0]))
    assert not has_failed_by_checkpoint(spec, recorded(first))
    assert not has_failed_by_checkpoint(spec, recorded(first, *back, back[0]))


def test_replaced_checkpoint_is_usable_again(tmp_path: Path) -> None:
    spec, place = run_of(tmp_path, "${run.dir}/checkpoints", 3)
    folder = place.directory / "checkpoints"
    create_files(folder, "step-10.pt", "step-20.pt")
    unloadable = failed_to_load(folder / "step-20.pt")
    again = failed("NODE_LOST", resume_from=str(folder / "step-10.pt"), step=25)

    attempts = recorded(failed("NODE_LOST", step=22), unloadable, again)

    assert find_resume_checkpoint(spec, place, attempts) == folder / "step-20.pt"


def test_run_resumes_from_before_an_alarm(tmp_path: Path) -> None:
    spec, place = run_of(tmp_path, "${run.dir}/checkpoints", 2)
    folder = place.directory / "checkpoints"
    create_files(folder, "step-10.pt", "step-20.pt", "step-30.pt")
    alarm = {"rule": "kl", "since": 19.0, "step": 24.0}
    ended = failed("ALARM", step=32, alarms=[alarm])

    assert find_resume_checkpoint(spec, place, recorded(ended)) == folder / "step-10.pt"
    beyond = failed("NODE_LOST", step=33)
    assert find_resume_checkpoint(spec, place, recorded(ended, beyond)) == folder / "step-30.pt"
    # The alarm `kl` ended the attempt. A second alarm came later and only notified the user (`then:
    # tell`). This second alarm does not change the checkpoint to resume from.
    later = {"rule": "length", "since": 31.0, "step": 32.0}
    ended = failed("ALARM", step=32, alarms=[alarm, later])
    ended["failure"] = {**ended["failure"], "rule": "watch-kl"}  # type: ignore[dict-item]
    assert find_resume_checkpoint(spec, place, recorded(ended)) == folder / "step-10.pt"


@pytest.mark.parametrize(
    ("attempts", "count"),
    [
        ([{"step": 5}], 0),
        # the second attempt ended at the same step as the first, so one attempt made no progress
        ([{"step": 5}, {"step": 5}], 1),
        ([{"step": 5}, {}, {"step": 4}], 2),
        ([{}, {}, {"step": 1}], 0),
        ([{"step": 5}, {}, {"step": 9}, {}], 1),
        # all steps are unknown, so no attempt shows progress
        ([{}, {}, {}], 2),
        # the second failure is blamed on the checkpoint and is not counted
        ([{"step": 5}, failed("USER_ERROR", resume_from="step-5"), {}], 1),
    ],
)
def test_only_attempts_since_the_last_new_step_count(
    tmp_path: Path, attempts: list[dict[str, object]], count: int
) -> None:
    spec, _ = run_of(tmp_path, "c", 0)
    spec = spec.model_copy(update={"progress": Progress(jsonl="m", step="step")})
    attempt_fields = [{**failed("NODE_LOST"), **attempt} for attempt in attempts]

    assert len(list_counted_failures(spec, recorded(*attempt_fields))) == count


@pytest.mark.parametrize(
    ("progress", "failure", "count"),
    [
        # four attempts fail with the same checkpoint. At most one failure is blamed on a
        # checkpoint, so the other three failures count against the retry limit
        (None, {}, 3),
        # `api` fails instead of the trainer, so no failure is blamed on the checkpoint
        (Progress(jsonl="m", step="step"), {"component": "api"}, 4),
        # a progress metric is configured, but the attempts report no step: the first failure is
        # blamed on the checkpoint and is not counted
        (Progress(jsonl="m", step="step"), {}, 3),
        # step 50 is no progress after checkpoint 50: the trainer reports the checkpoint's step
        # before it trains
        (Progress(http="http://a", step="step"), {"step": 50}, 3),
        (Progress(jsonl="m", step="step"), {"step": 50}, 3),
        (Progress(jsonl="m", step="step"), {"step": 51}, 4),
    ],
)
def test_attempts_blamed_on_a_checkpoint_do_not_count(
    tmp_path: Path, progress: Progress | None, failure: dict[str, object], count: int
) -> None:
    spec, place = run_of(tmp_path, "${run.dir}/checkpoints", 5)
    spec = spec.model_copy(update={"progress": progress})
    create_files(place.directory / "checkpoints", "step-50.pt")
    step = {key: failure[key] for key in ("step",) if key in failure}
    one = failed("STORAGE", resume_from="checkpoints/step-50.pt", **step)
    blame = {"rule": "checkpoint-cut-short", "component": failure.get("component", "trainer")}
    one["failure"] = {**one["failure"], **blame}  # type: ignore[dict-item]

    assert len(list_counted_failures(spec, recorded(*[one] * 4, {}))) == count
    failure_of = recorded(one)[0].failure
    assert find_blamed_nodes(failure_of, ["n1"]) == []


@pytest.mark.parametrize(
    ("paths", "says", "resumed_from", "gone"),
    [
        # step 3 is complete, because the pointer file names it; newer checkpoints may be incomplete
        (["step-1.pt", "step-2.pt", "step-3.pt", "step-4.pt"], "step-3.pt", "", ["step-1.pt"]),
        # no pointer file names the last complete checkpoint. So step 4 may be incomplete, and does
        # not count for the limit `keep: 2`
        (["step-1.pt", "step-2.pt", "step-3.pt", "step-4.pt"], "", "", ["step-1.pt"]),
        (
            ["a-1/trainer_state.json", "a-2/trainer_state.json", "a-3/trainer_state.json"],
            "",
            "",
            ["a-1"],
        ),
        # the newest checkpoint is incomplete, so this checkpoint does not count for the limit
        # `keep`
        (["a-1/trainer_state.json", "a-2/trainer_state.json", "a-3/model.pt"], "", "", []),
        (["step-1.pt", "step-2.pt", "step-3.pt"], "step-3.pt", "step-1.pt", []),
        (["step-1.pt", "step-2.pt"], "step-2.pt", "", []),
        # the folder also contains files that are no checkpoints (`.cfg`), which are always kept
        (
            ["a1.cfg", "b2.cfg", "step-3.pt", "step-4.pt", "step-5.pt"],
            "step-5.pt",
            "",
            ["step-3.pt"],
        ),
        ([], "", "", []),
    ],
)
def test_oldest_checkpoints_exceed_keep(
    tmp_path: Path, paths: list[str], says: str, resumed_from: str, gone: list[str]
) -> None:
    spec, place = run_of(tmp_path, "${run.dir}/checkpoints", 1, keep=2)
    folder = place.directory / "checkpoints"
    folder.mkdir()
    create_files(folder, *paths)
    if says:
        (folder / "latest").write_text(says)

    found = find_superfluous_checkpoints(
        spec, place, attempts(1, resume_from=str(folder / resumed_from))
    )

    assert found == [folder / name for name in gone]


def test_keep_counts_over_all_attempts_and_spares_link_targets(
    tmp_path: Path,
) -> None:
    spec, place = run_of(tmp_path, "${attempt.dir}/checkpoints", 2, keep=1)
    first, second = (place.attempt(n).directory / "checkpoints" for n in (1, 2))
    create_files(first, "step-10.pt", "step-20.pt")
    create_files(second, "step-30.pt", "step-35.pt", "step-40.pt", "step-50.pt")
    (second / "latest").write_text("step-50.pt")
    (second / "best").symlink_to("step-30.pt")

    found = find_superfluous_checkpoints(
        spec, place, attempts(2, resume_from=str(first / "step-20.pt"))
    )

    # `found` contains the checkpoints to delete. The newest checkpoint (step 50) is kept. Step 40
    # is also kept, in case step 50 is damaged.
    assert found == [first / "step-10.pt", second / "step-35.pt"]


def test_unloadable_checkpoint_does_not_count_for_keep(tmp_path: Path) -> None:
    spec, place = run_of(tmp_path, "${run.dir}/checkpoints", 2, keep=1)
    folder = place.directory / "checkpoints"
    create_files(folder, "step-10.pt", "step-20.pt")
    (folder / "latest").write_text("step-20.pt")
    broken = failed_to_load(folder / "step-20.pt")

    assert (
        find_superfluous_checkpoints(
            spec, place, recorded(failed("NODE_LOST", step=25), broken, {})
        )
        == []
    )


def test_interrupted_removal_is_finished_by_the_next_removal(
    tmp_path: Path,
) -> None:
    create_files(tmp_path, "step-1/", "step-2.pt", "step-3.pt")
    (tmp_path / "step-1").rename(tmp_path / ".step-1.muster-old")

    remove_checkpoint(tmp_path / "step-2.pt")

    assert [path.name for path in tmp_path.iterdir()] == ["step-3.pt"]


@pytest.mark.parametrize(
    ("paths", "says", "grows"),
    [
        (["global_step_10/", "global_step_20/"], "10", True),
        # the pointer file says that step 10 is complete, so no checkpoint is being saved
        (["global_step_10/"], "10", False),
        # no pointer file says that step 10 is complete, so this checkpoint is still being saved
        (["global_step_10/"], "", True),
        # the checkpoint of step 20 is incomplete, so this checkpoint is still being saved
        (["checkpoint-10/trainer_state.json", "checkpoint-20/model.pt"], "", True),
        (["step-10.pt", ".step-20.pt.tmp"], "", True),
        # an events file is not a checkpoint
        (["global_step_10/", "events.tfevents.99"], "10", False),
        (["step-10.pt", "events.log", ".step-5.pt.muster-old"], "", False),
        ([], "", False),
    ],
)
def test_growing_incomplete_checkpoint_is_being_saved(
    tmp_path: Path, paths: list[str], says: str, grows: bool
) -> None:
    create_files(tmp_path, *paths)
    if says:
        (tmp_path / "latest_checkpointed_iteration.txt").write_text(says)
    for path in tmp_path.rglob("*"):
        os.utime(path)
    now = is_writing_checkpoint(".", tmp_path)
    for path in tmp_path.rglob("*"):
        os.utime(path, (1000, 1000))

    # All files are old now. An incomplete checkpoint with old files is the leftover of a crash, so
    # no program is writing this checkpoint.
    assert (now, is_writing_checkpoint(".", tmp_path)) == (grows, False)


def test_folder_that_was_renamed_after_its_last_write_is_not_being_saved(tmp_path: Path) -> None:
    temporary = tmp_path / "step-10.tmp"
    folder = tmp_path / "step-10"
    create_files(temporary, "state.json", "model/part-0")
    while_written = is_writing_checkpoint(".", tmp_path)
    wait_for_next_tick(temporary)
    temporary.rename(folder)
    renamed = is_writing_checkpoint(".", tmp_path)
    wait_for_next_tick(folder)
    (folder / "model" / "part-1").write_text("more")

    assert (while_written, renamed) == (True, False)
    assert is_writing_checkpoint(".", tmp_path)


def wait_for_next_tick(folder: Path) -> None:
    """Wait until the clock of the file system has passed the times of all files of a folder."""
    latest = max(path.stat().st_ctime_ns for path in (folder, *folder.rglob("*")))
    probe = folder.parent / "probe"
    while True:
        probe.touch()
        now = probe.stat().st_ctime_ns
        probe.unlink()
        if now > latest:
            return


def test_interrupted_removal_does_not_block_the_same_name(tmp_path: Path) -> None:
    create_files(tmp_path, "step-1/")
    create_files(tmp_path / ".step-1.muster-old", "part")

    remove_checkpoint(tmp_path / "step-1")

    assert [*tmp_path.iterdir()] == []


def test_link_target_is_kept_if_the_folder_is_a_link(
    tmp_path: Path,
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "home").symlink_to("real")
    spec, place = run_of(tmp_path / "home", "${run.dir}/checkpoints", 1, keep=1)
    folder = place.directory / "checkpoints"
    create_files(folder, "step-10.pt", "step-20.pt", "step-30.pt", "step-40.pt")
    (folder / "latest").write_text("step-40.pt")
    (folder / "best").symlink_to("step-10.pt")

    assert find_superfluous_checkpoints(spec, place, attempts(1)) == [folder / "step-20.pt"]


@pytest.mark.parametrize(
    ("written", "names", "shown", "remedy"),
    [
        # The folders may be checkpoints or exported models, so Muster uses none of the folders.
        (
            "${run.dir}/ckpts",
            ["it000005/weights.bin", "it000010/weights.bin"],
            "it000005, it000010 in FOLDER as checkpoints",
            "${run.dir}/ckpts/it*",
        ),
        (
            "${run.dir}/ckpts/",
            [f"{step}/state.json" for step in range(10, 15)],
            "10, 11, 12 and 2 more in FOLDER as checkpoints",
            "${run.dir}/ckpts/[0-9]*",
        ),
        (
            "${run.dir}/ckpts",
            ["actor-5/optim.bin", "actor-6/optim.bin", "critic-6/optim.bin"],
            "actor-5, actor-6, critic-6 in FOLDER as checkpoints",
            "${run.dir}/ckpts/actor-*",
        ),
        # The pattern `step*` in the spec does not match the folder `it5`.
        (
            "${run.dir}/ckpts/step*",
            ["it5/weights.pt", "readme.md"],
            "it5 in FOLDER as a checkpoint",
            "${run.dir}/ckpts/it*",
        ),
        # The name `rollout_51` may belong to a result of the run instead of a checkpoint.
        (
            "${run.dir}/ckpts",
            ["rollout_51/weights.pt"],
            "rollout_51 in FOLDER as a checkpoint",
            "${run.dir}/ckpts/rollout_*",
        ),
        # The name contains no step.
        (
            "${run.dir}/ckpts",
            ["weights.bin"],
            "weights.bin in FOLDER as a checkpoint",
            "${run.dir}/ckpts/weights.bin",
        ),
    ],
)
def test_unrecognised_checkpoints_are_named_and_the_remedy_helps(
    tmp_path: Path, written: str, names: list[str], shown: str, remedy: str
) -> None:
    spec, place = run_of(tmp_path, written, 1)
    create_files(place.directory / "ckpts", *names)

    plan = plan_resume(spec, place, attempts(1))

    found = shown.replace("FOLDER", str(place.directory / "ckpts"))
    subject = "it is a checkpoint" if shown.endswith("a checkpoint") else "they are checkpoints"
    assert plan.unrecognised == (
        f"Muster does not recognise {found}. If {subject}, write a pattern into the spec: "
        f'`checkpoints: "{remedy}"`'
    )
    assert plan.rule.endswith(f"checkpoint was found. {plan.unrecognised}")

    remedied = remedy.replace("${run.dir}", str(place.directory))
    assert find_latest_checkpoint(remedied, tmp_path) is not None


@pytest.mark.parametrize(
    ("written", "count", "exists", "searched"),
    [
        ("${run.dir}/ckpts", 1, False, "in RUN/ckpts, which does not exist"),
        ("${run.dir}/ckpts", 2, True, "in RUN/ckpts"),
        ("${run.dir}/ckpts/step*", 1, True, "that matches RUN/ckpts/step*"),
        (
            "${attempt.dir}/ckpts",
            2,
            False,
            "in RUN/attempt-02/ckpts or in the folders of earlier attempts",
        ),
        (
            "${attempt.dir}/ckpts/step*",
            2,
            False,
            "that matches RUN/attempt-02/ckpts/step* or the patterns of earlier attempts",
        ),
    ],
)
def test_searched_folder_without_a_checkpoint_is_named(
    tmp_path: Path, written: str, count: int, exists: bool, searched: str
) -> None:
    spec, place = run_of(tmp_path, written, count)
    if exists:
        (place.directory / "ckpts").mkdir()

    plan = plan_resume(spec, place, attempts(count))
    text = explain_lack_of_checkpoints(spec, place, attempts(count))

    rule = f"no checkpoint was found {searched.replace('RUN', str(place.directory))}"
    assert plan.rule == rule
    assert text == rule


def test_run_with_a_checkpoint_has_no_lack_of_checkpoints(tmp_path: Path) -> None:
    spec, place = run_of(tmp_path, "${run.dir}/ckpts", 1)
    create_files(place.directory / "ckpts", "step-10.pt", "step-20.pt")

    assert explain_lack_of_checkpoints(spec, place, attempts(1)) == ""


def test_folder_of_checkpoints_in_the_checkpoint_folder_is_named(tmp_path: Path) -> None:
    spec, place = run_of(tmp_path, "${run.dir}/ckpts", 1)
    create_files(place.directory / "ckpts", "tinylm/step-5.pt", "tinylm/step-6.pt")

    text = describe_unrecognised(spec, place, attempts(1))

    assert text.endswith(
        "as a checkpoint. To use the checkpoints in tinylm, write "
        '`checkpoints: "${run.dir}/ckpts/tinylm"` into the spec'
    )


@pytest.mark.parametrize(
    "names",
    [
        [],
        ["step-5.pt", "it6/weights.bin"],
        ["log-5/train.log", "plots/5.png", "events.out.tfevents.1", "config.yaml", ".cache/a.pt"],
        ["rollout_51/answers.json", "attempt-01/run.json", "latest", "it5.tmp/weights.pt"],
    ],
)
def test_other_files_are_not_named_as_unrecognised(tmp_path: Path, names: list[str]) -> None:
    spec, place = run_of(tmp_path, "${run.dir}/ckpts", 1)
    create_files(place.directory / "ckpts", *names)

    assert describe_unrecognised(spec, place, attempts(1)) == ""
