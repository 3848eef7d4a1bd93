"""Traces of real clusters, replayed through the queue's policy in virtual time."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from tasks.queue.packing import Policy
from tasks.ray.usage import ClusterNode
from tests.benchmarks import queue
from tests.benchmarks.queue_replay import Replay, replay
from tests.benchmarks.queue_trace import read_trace
from tests.benchmarks.report import Row

TRACES = Path(__file__).resolve().parents[1] / "data" / "traces"
PHILLY, KALOS = TRACES / "philly_vc_ee9e8c.csv", TRACES / "acme_kalos_completed.csv"


def replayed(trace: Path, nodes: int, policy: Policy, compress: float = 1.0) -> Replay:
    cluster = [ClusterNode(name=f"n{i}", gpus=8) for i in range(nodes)]
    return replay(read_trace(trace, gpus_per_node=8, compress=compress), cluster, policy)


@pytest.mark.parametrize(
    ("trace", "nodes", "compress", "policy", "mean_h", "p95_h", "max_h"),
    [
        (PHILLY, 16, 1, "fifo", 165.8, 354.7, 384.2),
        (PHILLY, 16, 1, "backfill", 90.6, 298.4, 367.2),
        (PHILLY, 20, 1, "fifo", 48.1, 161.2, 196.1),
        (PHILLY, 20, 1, "backfill", 23.4, 126.2, 200.2),
        # the busiest trace: the jobs of four days are submitted within one day (`compress` is 4)
        (KALOS, 128, 4, "fifo", 40.8, 149.5, 153.7),
        (KALOS, 128, 4, "backfill", 29.5, 143.5, 147.7),
    ],
)
def test_waits_of_a_real_trace_are_unchanged(
    trace: Path,
    nodes: int,
    compress: float,
    policy: Policy,
    mean_h: float,
    p95_h: float,
    max_h: float,
) -> None:
    result = replayed(trace, nodes, policy, compress)

    waits = Row(way="", values=[wait / 3600 for wait in result.waits_s])
    assert not result.infeasible
    assert round(sum(waits.values) / waits.n, 1) == mean_h
    assert round(waits.quantile(0.95), 1) == p95_h
    assert round(max(waits.values), 1) == max_h


def write(path: Path, *rows: str, columns: str = "job_id,submit_s,duration_s,gpus") -> Path:
    path.write_text("\n".join([columns, *rows]) + "\n", encoding="utf-8")
    return path


def simulate(trace: Path, out: Path, *more: str) -> int:
    """Simulate the queue for the jobs of a trace, on two nodes with four GPUs each.

    Args:
        trace: CSV file with the jobs.
        out: CSV file for the start time of each job.
        *more: Further command-line arguments.

    Returns:
        Exit code of the simulation program, 0 for success.
    """
    nodes = ("--nodes", "2", "--gpus-per-node", "4", "--policy", "fifo")
    return queue.main(["--trace", str(trace), *nodes, "--out", str(out), *more])


def starts(out: Path) -> dict[str, float]:
    with out.open(newline="") as f:
        return {row["job_id"]: float(row["start_s"]) for row in csv.DictReader(f)}


def test_starts_are_written_in_the_order_of_submission(tmp_path: Path) -> None:
    trace = write(tmp_path / "t.csv", "late,60,10,4", "early,0,1000.5,8", "at once,60,10,1")

    code = simulate(trace, tmp_path / "starts.csv")

    assert code == 0
    assert (tmp_path / "starts.csv").read_text() == (
        "job_id,start_s\nearly,0.0\nlate,1000.5\nat once,1000.5\n"
    )


@pytest.mark.parametrize(
    ("rows", "options", "started"),
    [
        # At 60 s, `whole` ends, and `pair` and `short` are submitted. The same scheduling pass
        # considers all three events. `pair` is before `short` in the trace, so `pair` gets all GPUs
        (
            ("whole,0,60,8", "pair,60,60,8", "short,60,60,1"),
            ("--policy", "backfill"),
            {"whole": 0, "pair": 60, "short": 120},
        ),
        # The policy `backfill` rounds the duration of `half` up to 3600 s, so `head` is expected to
        # start at 3600 s. `fits` may start earlier, because `fits` ends before 3600 s
        (
            ("half,0,3000,4", "head,1,100,8", "fits,2,600,4", "long,3,3000,4"),
            ("--policy", "backfill"),
            {"half": 0, "fits": 2, "head": 3000, "long": 3100},
        ),
        # `--compress 4` divides each submission time by 4, but not the durations
        (
            ("a,0,100,8", "b,400,100,8", "c,1000,100,8"),
            ("--compress", "4"),
            {"a": 0, "b": 100, "c": 250},
        ),
        # a job without duration takes one second
        (("a,0,0,8", "b,0,0.2,8", "c,0,5,8"), (), {"a": 0, "b": 1, "c": 2}),
    ],
)
def test_jobs_start_as_the_policy_decides(
    tmp_path: Path, rows: tuple[str, ...], options: tuple[str, ...], started: dict[str, float]
) -> None:
    simulate(write(tmp_path / "t.csv", *rows), tmp_path / "starts.csv", *options)

    assert starts(tmp_path / "starts.csv") == started


def test_infeasible_jobs_are_left_out_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = write(
        tmp_path / "t.csv",
        *("three nodes,0,10,3,3,1", "five on a node,0,10,5,1,5", "fits,0,10,8,2,4"),
        columns="job_id,submit_s,duration_s,gpus,nodes,gpus_per_node",
    )

    code = simulate(trace, tmp_path / "starts.csv")

    assert code == 0
    assert starts(tmp_path / "starts.csv") == {"fits": 0}
    assert "1; 2 can never fit and are left out" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("gpus", "nodes", "per_node", "expected"),
    [
        (6, 3, 2, (3, 2)),
        # without a number of nodes, a job gets as few nodes as possible, with the same number of
        # GPUs on each node
        (3, "", "", (1, 3)),
        (6, "", "", (2, 3)),
        (10, "", "", (3, 4)),
        (6, "", 2, (3, 2)),
        ("", 2, 4, (2, 4)),
        ("8.0", "", "", (2, 4)),
    ],
)
def test_unknown_shape_follows_from_the_gpus(
    tmp_path: Path, gpus: object, nodes: object, per_node: object, expected: tuple[int, int]
) -> None:
    trace = write(
        tmp_path / "t.csv",
        f"a,0,10,{gpus},{nodes},{per_node}",
        columns="job_id,submit_s,duration_s,gpus,nodes,gpus_per_node",
    )

    (job,) = read_trace(trace, gpus_per_node=4)

    assert (job.demand.nodes, job.demand.gpus_per_node) == expected


def test_figures_are_compared_with_fifo(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = queue.main(
        [
            *("--trace", str(PHILLY), "--nodes", "20", "--gpus-per-node", "8"),
            *("--policy", "backfill", "--out", str(tmp_path / "starts.csv")),
        ]
    )

    printed = capsys.readouterr().out
    assert code == 0
    for figure in (
        r"^backfill, 20 nodes with 8 GPUs each$",
        r"^jobs +1511; 0 can never fit and are left out$",
        r"^mean wait +23\.4 h \(\d+ s\)$",
        r"^p95 wait +126\.2 h \(\d+ s\)$",
        r"^maximum wait +200\.2 h \(\d+ s\)$",
        r"^utilisation +72\.6 %$",
        r"^worst delay against FIFO +22\.5 h \(\d+ s\) \(ph-\d+\)$",
        r"^time of a pass +mean \d+\.\d\d ms, maximum \d+\.\d\d ms \(\d+ passes\)$",
    ):
        assert re.search(figure, printed, re.MULTILINE), figure
    assert len(starts(tmp_path / "starts.csv")) == 1511


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "missing columns: job_id, submit_s, duration_s, gpus, or nodes and"),
        ("job_id,duration_s,gpus\n", "missing columns: submit_s; there are: job_id, duration_s"),
        ("job_id,submit_s,duration_s,nodes\n", "missing columns: gpus, or nodes and gpus_per_node"),
        ("job_id,submit_s,duration_s,gpus\n", "has no jobs"),
        # an empty cell in a column that requires a value is reported
        ("job_id,submit_s,duration_s,gpus\na,0,1,1\nb,,1,1\n", "line 3: submit_s is empty"),
        ("job_id,submit_s,duration_s,gpus\na,0,1,\n", "line 2: gpus is empty, and so is nodes or"),
        # a row of the CSV file has too few cells, which is reported
        ("job_id,submit_s,duration_s,gpus\na,0,1\n", "line 2: gpus is empty"),
        ("job_id,submit_s,duration_s,gpus\na,soon,1,1\n", "submit_s is 'soon', no number"),
        ("job_id,submit_s,duration_s,gpus\na,0,-1,1\n", "duration_s is '-1', no number"),
        ("job_id,submit_s,duration_s,gpus\na,0,1,0\n", "gpus is '0', no whole number from 1"),
        ("job_id,submit_s,duration_s,gpus\na,0,1,1.5\n", "gpus is '1.5', no whole number from 1"),
        ("job_id,submit_s,duration_s,gpus\na,0,1,1\na,1,1,1\n", "job_id 'a' occurs more"),
    ],
)
def test_invalid_trace_is_refused_with_its_fault(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, complaint: str
) -> None:
    trace = tmp_path / "t.csv"
    trace.write_text(text, encoding="utf-8")

    code = simulate(trace, tmp_path / "starts.csv")

    assert code == 2
    assert complaint in capsys.readouterr().err
    assert not (tmp_path / "starts.csv").exists()


def test_file_that_is_no_trace_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "binary.csv").write_bytes(b"\xff\xfe\x00")

    codes = [simulate(tmp_path / name, tmp_path / "s.csv") for name in ("none.csv", "binary.csv")]

    complaints = capsys.readouterr().err
    assert codes == [2, 2]
    assert "none.csv: No such file or directory" in complaints
    assert "binary.csv is no CSV file" in complaints


@pytest.mark.parametrize(
    "option",
    [
        ("--nodes", "0"),
        ("--gpus-per-node", "-1"),
        ("--policy", "lifo"),
        ("--compress", "0"),
        ("--compress", "inf"),
        ("--shuffle", "1"),
    ],
)
def test_invalid_options_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], option: tuple[str, str]
) -> None:
    trace = write(tmp_path / "t.csv", "a,0,1,1")

    with pytest.raises(SystemExit) as refused:
        simulate(trace, tmp_path / "starts.csv", *option)

    assert refused.value.code == 2
    assert option[0] in capsys.readouterr().err
    assert not (tmp_path / "starts.csv").exists()


def test_passes_are_compared_with_the_slow_plan() -> None:
    result = queue.measure(quick=True)

    assert result.name == "queue"
    assert len({row.group for row in result.rows}) == len(result.rows) / 2
    for row in result.rows:
        assert row.values and min(row.values) > 0
