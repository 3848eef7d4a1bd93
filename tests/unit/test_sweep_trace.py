"""The idle times of GPUs in the benchmark `sweep`, computed from the traces of its programs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.sweep_trace import Work, count_ends, list_idle_ns, read_trace


def write_trace(folder: Path, *lines: str) -> Path:
    path = folder / "trace"
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def make_work(number: int, gpu: str, began_ns: int, ended_ns: int) -> Work:
    return Work(number=number, gpu=gpu, began_ns=began_ns, ended_ns=ended_ns)


def test_trace_gives_the_work_of_each_point_in_the_order_of_begins(tmp_path: Path) -> None:
    path = write_trace(
        tmp_path, "begin 2 0 10", "begin 1 1 5", "end 1 1 30", "end 2 0 20", "begin 3 0 25"
    )
    with path.open("a") as file:
        file.write("end 3 0 40\n")

    assert read_trace(path) == [
        make_work(1, "1", 5, 30),
        make_work(2, "0", 10, 20),
        make_work(3, "0", 25, 40),
    ]
    assert count_ends(path) == 3


@pytest.mark.parametrize(
    "lines",
    [
        ("begin 1 0 1", "end 1 0 2", "begin 1 0 3", "end 1 0 4"),
        ("begin 1 0 1",),
        ("begin 1 0 1", "end 1 3 2"),
    ],
    ids=["a point ran twice", "a point has not ended", "a point changed its GPU"],
)
def test_trace_of_a_faulty_sweep_is_rejected(tmp_path: Path, lines: tuple[str, ...]) -> None:
    path = write_trace(tmp_path, *lines)

    with pytest.raises(ValueError):
        read_trace(path)


def test_gpu_is_idle_between_two_points_and_before_its_first_point() -> None:
    works = [make_work(1, "0", 0, 10), make_work(2, "1", 4, 30), make_work(3, "0", 13, 20)]

    assert sorted(list_idle_ns(works, 2)) == [3, 4]


def test_gpu_without_work_is_idle_until_the_last_point_begins() -> None:
    works = [make_work(1, "0", 0, 10), make_work(2, "0", 12, 30)]

    assert sorted(list_idle_ns(works, 2)) == [2, 12]


def test_gpu_that_gets_no_further_point_is_idle_until_the_last_point_begins() -> None:
    works = [make_work(1, "0", 0, 10), make_work(2, "1", 0, 5), make_work(3, "0", 15, 20)]

    assert sorted(list_idle_ns(works, 2)) == [5, 10]


def test_two_points_on_one_gpu_at_once_are_rejected() -> None:
    works = [make_work(1, "0", 0, 10), make_work(2, "0", 9, 30)]

    with pytest.raises(ValueError, match="point 2 began on GPU 0"):
        list_idle_ns(works, 2)


def test_more_gpus_than_the_cluster_has_are_rejected() -> None:
    works = [make_work(1, "0", 0, 10), make_work(2, "1", 9, 30)]

    with pytest.raises(ValueError, match="2 GPUs, not 1"):
        list_idle_ns(works, 1)
