"""Tests of the layouts of checkpoints: which checkpoints count as complete or incomplete."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from tasks.record import checkpoint_folder
from tasks.record.checkpoint_folder import Completeness, Listing, list_checkpoints
from tasks.record.checkpoint_names import NameKind, classify_name, read_step
from tests.support import checkpoint_files as files
from tests.support.checkpoint_files import LAYOUTS, Write


def list_folder(folder: Path, *, is_running: bool = False) -> Listing:
    return list_checkpoints(str(folder), Path("/"), is_running=is_running)


def newest_of(folder: Path) -> Path | None:
    complete = list_folder(folder).complete
    return complete[-1].path if complete else None


def files_below(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    return sorted(file for file in path.rglob("*") if file.is_file() and not file.is_symlink())


@pytest.mark.parametrize("write", LAYOUTS.values(), ids=LAYOUTS.keys())
def test_newest_whole_checkpoint_is_found(tmp_path: Path, write: Write) -> None:
    for step in (9, 10, 100):
        newest = write(tmp_path, step)

    listing = list_folder(tmp_path)

    assert listing.complete[-1].path == newest
    assert [checkpoint.step for checkpoint in listing.complete] == [9, 10, 100]
    assert listing.notes == ()


@pytest.mark.parametrize("write", LAYOUTS.values(), ids=LAYOUTS.keys())
@pytest.mark.parametrize("damage", ["empty", "half", "missing"])
def test_damaged_checkpoint_is_not_complete(tmp_path: Path, write: Write, damage: str) -> None:
    original = tmp_path / "original"
    older = write(original, 10)
    newest = write(original, 20)
    # Muster does not notice two kinds of damage:
    # - A wrong content of the marker file `STABLE`, because only the existence of this file counts.
    # - A missing data file of Orbax, because a checkpoint of Orbax counts as complete if its folder
    #   has the final name.
    unnoticed = {"STABLE"} if damage in ("empty", "half") else {"d/0123abcd"}
    for file in files_below(newest):
        name = file.relative_to(original).as_posix()
        if name.endswith(tuple(unnoticed)) or (damage == "half" and file.stat().st_size < 64):
            continue
        folder = tmp_path / "damaged"
        shutil.copytree(original, folder, symlinks=True)
        target = folder / name
        if damage == "missing":
            target.unlink()
        else:
            content = target.read_bytes()
            target.write_bytes(content[: len(content) // 2] if damage == "half" else b"")

        found = newest_of(folder)

        assert found == folder / older.relative_to(original), (damage, name)
        shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("write", "last_file"),
    [
        (files.hugging_face, "trainer_state.json"),
        (files.accelerate, "random_states_0.pkl"),
        (files.distributed, ".metadata"),
        (files.megatron_distributed, "metadata.json"),
        (files.verl, "actor/optim_world_size_2_rank_1.pt"),
        (files.deepspeed, "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"),
        (files.slime, "optimizer/.metadata"),
        (files.skyrl, "policy/.metadata"),
    ],
)
def test_first_checkpoint_of_a_run_is_refused_without_its_last_file(
    tmp_path: Path, write: Write, last_file: str
) -> None:
    checkpoint = write(tmp_path, 10)
    (checkpoint / last_file).unlink()

    [found] = list_folder(tmp_path).checkpoints

    assert found.completeness is Completeness.INCOMPLETE
    assert found.reason


@pytest.mark.parametrize(
    "write",
    [
        files.hugging_face,
        files.accelerate,
        files.distributed,
        files.lightning,
        files.megatron_distributed,
        files.verl,
        files.orbax,
        files.nemo_rl,
        files.prime_rl,
        files.plain_torch,
        files.plain_npz,
    ],
)
def test_some_layouts_prove_their_completeness_while_the_trainer_runs(
    tmp_path: Path, write: Write
) -> None:
    write(tmp_path, 10)

    [found] = list_folder(tmp_path, is_running=True).checkpoints

    assert found.is_complete, found.reason


@pytest.mark.parametrize(
    "names",
    [
        ["step_30_hf/model.safetensors", "hf_step_30/model.safetensors"],
        ["eval_1000/results.json", "global_step30_hf/model.safetensors"],
        ["rollout_40.pt", "samples-step-50.json", "step_60.onnx"],
        ["step_40.pt.tmp", ".step_41.pt", "tmp-step_42/model.pt", "step_43.partial"],
        ["events.out.tfevents.1763900000.host.4123.0", "train_rank20.log", "attempt-02/m.pt"],
        ["45.orbax-checkpoint-tmp-7/_CHECKPOINT_METADATA", "run-50.yaml"],
    ],
)
def test_other_files_with_numbers_are_no_checkpoints(tmp_path: Path, names: list[str]) -> None:
    checkpoint = files.plain_torch(tmp_path, 20)
    for name in names:
        files.write_text(tmp_path / name, '{"x": 1}')

    listing = list_folder(tmp_path)

    assert [found.path for found in listing.checkpoints] == [checkpoint]
    shutil.rmtree(tmp_path / "step_20.pt", ignore_errors=True)
    checkpoint.unlink()
    assert list_folder(tmp_path).checkpoints == ()


def test_result_next_to_checkpoint_folders_is_no_checkpoint(tmp_path: Path) -> None:
    checkpoint = files.distributed(tmp_path, 20)
    files.write_safetensors(tmp_path / "policy-30" / "model.safetensors")
    files.write_safetensors(tmp_path / "qwen-step-40" / "model.safetensors")

    assert newest_of(tmp_path) == checkpoint


@pytest.mark.parametrize(
    ("pointer", "text", "shown_text"),
    [
        ("latest_checkpointed_iteration.txt", "10", "says '10'"),
        ("latest_checkpointed_iteration.txt", "40", "says '40'"),
        ("latest_checkpointed_iteration.txt", "", "is empty"),
    ],
)
def test_pointer_that_disagrees_with_the_checkpoints_is_reported(
    tmp_path: Path, pointer: str, text: str, shown_text: str
) -> None:
    for step in (10, 20):
        newest = files.verl(tmp_path, step)
    files.write_text(tmp_path / pointer, text)

    listing = list_folder(tmp_path)

    assert listing.complete[-1].path == newest
    [remark] = listing.notes
    assert f"{pointer} {shown_text}" in remark
    assert f"the newest complete checkpoint is {newest.name}" in remark


def test_pointer_does_not_make_a_damaged_checkpoint_complete(tmp_path: Path) -> None:
    older = files.distributed(tmp_path, 10)
    newest = files.distributed(tmp_path, 20)
    (newest / ".metadata").unlink()
    files.write_text(tmp_path / "latest", newest.name)

    assert newest_of(tmp_path) == older


def test_dangling_link_is_no_checkpoint(tmp_path: Path) -> None:
    older = files.plain_torch(tmp_path, 10)
    (tmp_path / "last").symlink_to("step_20.pt")

    listing = list_folder(tmp_path)

    assert listing.complete[-1].path == older
    assert "the pointer file last says 'step_20.pt'" in listing.notes[0]


def test_rolling_file_is_a_checkpoint_with_the_step_in_it(tmp_path: Path) -> None:
    files.write_torch(tmp_path / "last.ckpt", {"epoch": 1, "global_step": 37})

    [found] = list_folder(tmp_path).checkpoints

    assert (found.path.name, found.step, found.is_complete) == ("last.ckpt", 37, True)


def test_rolling_folder_is_a_checkpoint(tmp_path: Path) -> None:
    files.write_distributed(tmp_path / "state")

    assert newest_of(tmp_path / "state") == tmp_path / "state"


def test_last_ckpt_of_lightning_is_used_if_its_step_is_the_newest(tmp_path: Path) -> None:
    files.lightning(tmp_path, 20)
    files.write_torch(tmp_path / "last.ckpt", {"global_step": 25})

    assert newest_of(tmp_path) == tmp_path / "last.ckpt"


def test_unfinished_mark_of_nemo_refuses_a_checkpoint(tmp_path: Path) -> None:
    older = files.lightning_of_nemo(tmp_path, 10)
    newer = files.lightning_of_nemo(tmp_path, 20)
    newer.with_name(f"{newer.name}-unfinished").touch()

    assert newest_of(tmp_path) == older


def test_unknown_layout_waits_for_a_confirmation(tmp_path: Path) -> None:
    first = files.write_text(tmp_path / "step_10" / "weights.raw", "w").parent

    [running] = list_folder(tmp_path, is_running=True).checkpoints
    [ended] = list_folder(tmp_path, is_running=False).checkpoints
    files.write_text(tmp_path / "step_20" / "weights.raw", "w")
    [older, newer] = list_folder(tmp_path, is_running=True).checkpoints

    assert running.completeness is Completeness.UNKNOWN
    assert ended.is_complete and "since the trainer ended" in ended.reason
    assert (older.path, older.is_complete) == (first, True)
    assert "step_20 was saved later" in older.reason
    assert newer.completeness is Completeness.UNKNOWN


def test_folder_of_zeros_after_a_full_disk_is_not_complete(tmp_path: Path) -> None:
    older = files.plain_torch(tmp_path, 10)
    newer = files.plain_torch(tmp_path, 20)
    newer.write_bytes(bytes(newer.stat().st_size))

    assert newest_of(tmp_path) == older


def test_checkpoint_that_is_far_smaller_than_earlier_checkpoints_is_not_complete(
    tmp_path: Path,
) -> None:
    for step, size in ((10, 1000), (20, 1000), (30, 20)):
        files.write_text(tmp_path / f"step_{step}" / "weights.bin", "w" * size)

    assert newest_of(tmp_path) == tmp_path / "step_20"


def test_unreadable_folder_is_not_mistaken_for_an_empty_folder(tmp_path: Path) -> None:
    if os.getuid() == 0:
        pytest.skip("root may read every folder")
    (tmp_path / "c").mkdir(mode=0)

    with pytest.raises(OSError):
        list_folder(tmp_path / "c")


@pytest.mark.parametrize(
    ("name", "step"),
    [
        ("epoch_2_step_5", 5),
        ("epoch1epochstep5globalstep20", 20),
        ("rl_model_1000_steps.zip", 1000),
        ("ep0-ba100-rank0.pt", 100),
        ("checkpoint_1_500.pt", 500),
        ("step_10-loss_0.31.ckpt", 10),
        ("Qwen2.5-1.5B-step-40", 40),
        ("last-v1.ckpt", None),
        ("ckpt_step5_world_size_8_rank_3.pt", 5),
    ],
)
def test_step_is_read_from_a_name(name: str, step: int | None) -> None:
    assert read_step(name) == step
    assert classify_name(name) is not NameKind.OTHER


def test_pipes_and_sockets_are_ignored(tmp_path: Path) -> None:
    checkpoint = files.distributed(tmp_path, 10)
    os.mkfifo(checkpoint / "control.pt")
    os.mkfifo(tmp_path / "step_20.pt")

    assert newest_of(tmp_path) == checkpoint


def test_missing_folder_has_no_checkpoints(tmp_path: Path) -> None:
    assert list_folder(tmp_path / "c") == Listing()
    assert list_checkpoints("c/*", tmp_path, is_running=False) == Listing()


def test_file_that_disappears_during_the_listing_does_not_empty_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    older = files.plain_torch(tmp_path, 10)
    newer = files.plain_torch(tmp_path, 20)
    judge = checkpoint_folder._judge

    def remove_and_judge(*arguments: Any, **options: Any) -> Listing:
        if newer.exists():
            newer.unlink()
            raise FileNotFoundError(newer)
        return judge(*arguments, **options)

    monkeypatch.setattr(checkpoint_folder, "_judge", remove_and_judge)

    assert newest_of(tmp_path) == older


def test_checkpoint_that_was_partly_overwritten_is_not_complete(tmp_path: Path) -> None:
    older = files.distributed(tmp_path, 10)
    newest = files.distributed(tmp_path, 20)
    os.utime(newest / ".metadata", (1000, 1000))

    listing = list_folder(tmp_path)

    assert listing.complete[-1].path == older
    assert "is newer than .metadata" in listing.checkpoints[-1].reason


def test_link_that_leads_back_to_its_own_folder_is_not_followed(tmp_path: Path) -> None:
    checkpoint = files.distributed(tmp_path, 10)
    (checkpoint / "self").symlink_to(checkpoint)

    assert newest_of(tmp_path) == checkpoint


def test_checkpoint_that_is_a_link_to_a_folder_is_examined(tmp_path: Path) -> None:
    elsewhere = files.distributed(tmp_path / "fast", 20)
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "step-20").symlink_to(elsewhere)

    assert newest_of(tmp_path / "c") == tmp_path / "c" / "step-20"


@pytest.mark.parametrize(
    ("names", "file_names"),
    [
        (("it00010", "it00020"), ("rank0.pt", "rank1.pt", "meta.json")),
        (("10", "20"), ("state.pt",)),
        (("000010", "000020"), ("model.pth", "optimizer.pth")),
        (("s10", "s20"), ("params.npz",)),
    ],
)
@pytest.mark.parametrize("pattern", ["", "/*"])
def test_numbered_folder_with_files_of_a_training_is_a_checkpoint(
    tmp_path: Path, names: tuple[str, ...], file_names: tuple[str, ...], pattern: str
) -> None:
    for name in names:
        (tmp_path / name).mkdir()
        for file_name in file_names:
            (tmp_path / name / file_name).write_bytes(b"state")

    listing = list_checkpoints(f"{tmp_path}{pattern}", tmp_path, is_running=False)

    assert [checkpoint.step for checkpoint in listing.checkpoints] == [10, 20]


def test_numbered_folder_with_only_an_exported_model_is_no_checkpoint(tmp_path: Path) -> None:
    for name in ("10", "20"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"weights")

    assert list_checkpoints(str(tmp_path), tmp_path, is_running=False).checkpoints == ()


TRAINING = ("weights.bin", "optim.bin", "state.json")


def write_folders(folder: Path, names: Iterable[str], file_names: Iterable[str]) -> None:
    for name in names:
        for file_name in file_names:
            path = folder / name / file_name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("{}")


@pytest.mark.parametrize(
    "names",
    [
        ("it000005", "it000010"),
        ("it_000005", "it_000010"),
        ("iter5", "iter10"),
        ("000005", "000010"),
        ("5", "10"),
        ("tinylm-5", "tinylm-10"),
        ("Qwen2.5-1.5B-5", "Qwen2.5-1.5B-10"),
        ("e1s5", "e1s10"),
        ("t5.ckpt", "t10.ckpt"),
        ("epoch0-it000005", "epoch0-it000010"),
    ],
)
@pytest.mark.parametrize(
    "file_names",
    [
        TRAINING,
        ("model.safetensors", "optimizer.safetensors", "config.json"),
        ("params.bin", "lr_scheduler.json"),
        ("weights.bin", "train_state.json", "config.json"),
    ],
)
def test_series_of_folders_with_the_state_of_a_training_is_recognised(
    tmp_path: Path, names: tuple[str, ...], file_names: tuple[str, ...]
) -> None:
    write_folders(tmp_path, names, file_names)
    for path in tmp_path.glob("*/*.safetensors"):
        files.write_safetensors(path)

    checkpoints = list_folder(tmp_path).checkpoints

    assert [(one.step, one.is_complete) for one in checkpoints] == [(5, True), (10, True)]


def test_series_of_files_without_a_suffix_is_recognised_by_its_format(tmp_path: Path) -> None:
    for step in (5, 19):
        files.write_torch(tmp_path / f"tinylm-{step}", {"step": step})
    files.write_text(tmp_path / "notes-7", "no checkpoint")

    assert [one.step for one in list_folder(tmp_path).complete] == [5, 19]


@pytest.mark.parametrize(
    ("names", "file_names"),
    [
        (("2026-11-26", "2026-11-27"), TRAINING),
        (("20261126-164008", "20261127-164008"), TRAINING),
        (("version_0", "version_1"), TRAINING),
        (("v1", "v2"), TRAINING),
        (("1.2.0", "1.2.1"), TRAINING),
        (("run-1", "run-2"), TRAINING),
        (("rollout_51", "rollout_52"), TRAINING),
        (("logs5", "logs10"), TRAINING),
        (("actor-5", "critic-5"), TRAINING),
        (("group5", "group6"), ("it5/optim.bin", "it5/weights.bin")),
        (("answers-51",), ("metrics.json", "state.json", "answers.txt")),
        (("it5", "it6"), ("model.safetensors", "config.json", "tokenizer.model")),
        (("it5", "it6"), ("state_dict.bin", "opt-125m.bin")),
    ],
)
def test_numbered_folders_that_may_be_something_else_are_no_checkpoints(
    tmp_path: Path, names: tuple[str, ...], file_names: tuple[str, ...]
) -> None:
    write_folders(tmp_path, names, file_names)

    assert list_folder(tmp_path).checkpoints == ()


@pytest.mark.parametrize("name", ["vit_e00_s{:05}.pt", "vit_step_{:05}.pt", "vit_{:05}.pt"])
def test_numbered_files_beside_last_are_checkpoints(tmp_path: Path, name: str) -> None:
    for step in (10, 20):
        files.write_torch(tmp_path / name.format(step), {"step": step})
    files.write_torch(tmp_path / "last.pt", {"step": 20})

    listing = list_folder(tmp_path)

    assert {(found.path.name, found.step) for found in listing.complete} == {
        (name.format(10), 10),
        (name.format(20), 20),
        ("last.pt", 20),
    }
    assert listing.others == ()


def test_numbered_files_without_a_step_are_no_checkpoints_beside_last(tmp_path: Path) -> None:
    for number in (10, 20):
        files.write_torch(tmp_path / f"embedding_{number}.pt")
    files.write_torch(tmp_path / "last.pt", {"step": 20})

    listing = list_folder(tmp_path)

    assert [found.path.name for found in listing.complete] == ["last.pt"]
    assert len(listing.others) == 2


def test_truncated_last_is_refused_because_it_is_truncated(tmp_path: Path) -> None:
    for step in (10, 20):
        files.write_torch(tmp_path / f"vit_{step:05}.pt", {"step": step})
    last = files.write_torch(tmp_path / "last.pt", {"step": 20})
    last.write_bytes(last.read_bytes()[:-300])

    listing = list_folder(tmp_path)

    assert [found.step for found in listing.complete] == [10, 20]
    [(path, reason)] = [
        *listing.others,
        *((found.path, found.reason) for found in listing.checkpoints if not found.is_complete),
    ]
    assert path.name == "last.pt" and "same kind" not in reason
