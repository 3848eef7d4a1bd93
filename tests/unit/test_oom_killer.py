"""Tests of the kernel's record of OOM kills, with the files of both versions of cgroups."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.processes.oom_killer import (
    MemoryGroup,
    count_kills_of_machine,
    find_logged_kills,
    find_memory_groups,
    read_memory_group,
    select_reached_limit,
)

V2 = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "31 23 0:27 / /sys/fs/cgroup/memory rw,nosuid - cgroup cgroup rw,memory\n"
V1_CPU = "32 23 0:28 / /sys/fs/cgroup/cpu rw,nosuid - cgroup cgroup rw,cpu,cpuacct\n"
HYBRID_V2 = "33 23 0:29 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n"
CONTAINER_V1 = "34 23 0:27 /docker/ab /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"


@pytest.mark.parametrize(
    ("memberships", "mountinfo", "groups"),
    [
        (
            "0::/user.slice/job.scope\n",
            V2,
            ["/sys/fs/cgroup/user.slice/job.scope", "/sys/fs/cgroup/user.slice", "/sys/fs/cgroup"],
        ),
        (
            "5:cpu,cpuacct:/x\n4:memory:/job\n0::/\n",
            HYBRID_V2 + V1_CPU + V1,
            ["/sys/fs/cgroup/memory/job", "/sys/fs/cgroup/memory"],
        ),
        (
            "4:memory:/docker/ab/part\n",
            CONTAINER_V1,
            ["/sys/fs/cgroup/memory/part", "/sys/fs/cgroup/memory"],
        ),
        # A container with its own cgroup namespace.
        ("0::/\n", V2, ["/sys/fs/cgroup"]),
        # The cgroup of the process is outside the part of the hierarchy that is mounted.
        ("4:memory:/other\n", CONTAINER_V1, []),
        ("0::/job\n", V1, []),
        ("", V2, []),
    ],
)
def test_memory_groups_of_a_process_are_listed_from_the_innermost(
    memberships: str, mountinfo: str, groups: list[str]
) -> None:
    assert find_memory_groups(memberships, mountinfo) == tuple(map(Path, groups))


@pytest.mark.parametrize(
    ("files", "kills", "limit_bytes", "peak_bytes"),
    [
        (
            {
                "memory.events": "low 0\nmax 9\noom 2\noom_kill 2\noom_group_kill 0\n",
                "memory.max": "67108864\n",
                "memory.peak": "67104768\n",
            },
            2,
            67108864,
            67104768,
        ),
        # memory.peak exists since Linux 5.19.
        ({"memory.events": "oom_kill 0\n", "memory.max": "max\n"}, 0, None, None),
        (
            {
                "memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 1\n",
                "memory.limit_in_bytes": "9223372036854771712\n",
                "memory.max_usage_in_bytes": "4096\n",
            },
            1,
            None,
            4096,
        ),
    ],
)
def test_counters_of_both_versions_are_read(
    tmp_path: Path,
    files: dict[str, str],
    kills: int,
    limit_bytes: int | None,
    peak_bytes: int | None,
) -> None:
    for name, content in files.items():
        (tmp_path / name).write_text(content)

    assert read_memory_group(tmp_path) == MemoryGroup(
        path=tmp_path, kills=kills, limit_bytes=limit_bytes, peak_bytes=peak_bytes
    )


def test_cgroup_without_memory_controller_has_no_state(tmp_path: Path) -> None:
    assert read_memory_group(tmp_path) is None
    assert count_kills_of_machine(tmp_path / "vmstat") is None


#: Entries of the kernel log of Linux 6.18.
KERNEL_LOG = """\
3,100,5000000,-;Out of memory: Killed process 7 (python3) total-vm:9kB, anon-rss:1024kB, \
file-rss:6676kB, shmem-rss:0kB, UID:0 pgtables:188kB oom_score_adj:0
6,101,8000000,-;EXT4-fs (loop0): mounted
3,102,9000000,-;Memory cgroup out of memory: Killed process 8 (ray::Wor (x)) total-vm:221368kB, \
anon-rss:65280kB, file-rss:6676kB, shmem-rss:0kB, UID:0 pgtables:188kB oom_score_adj:0
"""


def test_kernel_log_names_the_killed_processes() -> None:
    [machine_wide, limited] = find_logged_kills(KERNEL_LOG, {7, 8, 9}, since_s=0.0)

    assert (machine_wide.pid, machine_wide.is_for_cgroup) == (7, False)
    assert (limited.pid, limited.name, limited.is_for_cgroup) == (8, "ray::Wor (x)", True)
    assert limited.memory_bytes == 65280 * 1024


def test_kills_of_other_processes_and_earlier_kills_are_ignored() -> None:
    assert find_logged_kills(KERNEL_LOG, {9}, since_s=0.0) == []
    assert find_logged_kills(KERNEL_LOG, {7}, since_s=6.0) == []


def test_lowest_limit_that_was_reached_is_named() -> None:
    def group(limit_bytes: int | None, peak_bytes: int | None) -> MemoryGroup:
        return MemoryGroup(path=Path("/g"), kills=0, limit_bytes=limit_bytes, peak_bytes=peak_bytes)

    unlimited = group(None, 400)
    not_reached = group(100, 50)
    reached = group(200, 199)

    assert select_reached_limit([unlimited, not_reached, reached]) is reached
    assert select_reached_limit([unlimited, not_reached]) is None
