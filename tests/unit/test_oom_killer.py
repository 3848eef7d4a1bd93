"""Tests of the kernel's record of OOM kills, with the files of both versions of cgroups."""

from __future__ import annotations

from pathlib import Path

import pytest

from tasks.processes.oom_killer import (
    MemoryGroup,
    count_kills_of_machine,
    find_directory,
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
        # A container with its own cgroup namespace sees only the root of the cgroup hierarchy.
        ("0::/\n", V2, ["/sys/fs/cgroup"]),
        # The mounted cgroup file systems do not contain the cgroup of the process, so no cgroup is
        # found.
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
        # Before Linux 5.19, cgroups have no file memory.peak, so the peak is unknown.
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
6,99,4999000,-;oom-kill:constraint=CONSTRAINT_NONE,nodemask=(null),cpuset=/,mems_allowed=0,\
global_oom,task_memcg=/job,task=python3,pid=7,uid=0
3,100,5000000,-;Out of memory: Killed process 7 (python3) total-vm:9kB, anon-rss:1024kB, \
file-rss:6676kB, shmem-rss:0kB, UID:0 pgtables:188kB oom_score_adj:0
6,101,8000000,-;EXT4-fs (loop0): mounted
6,102,8999000,-;oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=/,mems_allowed=0,\
oom_memcg=/job,task_memcg=/job/part,task=ray::Wor (x),pid=8,uid=0
3,103,9000000,-;Memory cgroup out of memory: Killed process 8 (ray::Wor (x)) total-vm:221368kB, \
anon-rss:65280kB, file-rss:6676kB, shmem-rss:0kB, UID:0 pgtables:188kB oom_score_adj:0
"""


def test_kernel_log_names_the_killed_processes() -> None:
    [machine_wide, limited] = find_logged_kills(KERNEL_LOG, {7, 8, 9}, since_s=0.0)

    assert (machine_wide.pid, machine_wide.limiting_group) == (7, None)
    assert (limited.pid, limited.name, limited.limiting_group) == (8, "ray::Wor (x)", "/job")
    assert limited.memory_bytes == 65280 * 1024


def test_kills_of_other_processes_and_earlier_kills_are_ignored() -> None:
    assert find_logged_kills(KERNEL_LOG, {9}, since_s=0.0) == []
    assert find_logged_kills(KERNEL_LOG, {7}, since_s=6.0) == []


def test_kill_without_the_name_of_its_cgroup_has_an_empty_name() -> None:
    without_names = "".join(
        line for line in KERNEL_LOG.splitlines(keepends=True) if "oom_memcg" not in line
    )

    [limited] = find_logged_kills(without_names, {8}, since_s=0.0)

    assert limited.limiting_group == ""


@pytest.mark.parametrize(
    ("path", "mountinfo", "directory"),
    [
        ("/job", HYBRID_V2 + V1, "/sys/fs/cgroup/memory/job"),
        ("/job", V2, "/sys/fs/cgroup/job"),
        ("/docker/ab/part", CONTAINER_V1, "/sys/fs/cgroup/memory/part"),
        ("/other", CONTAINER_V1, None),
    ],
)
def test_directory_of_a_cgroup_in_the_kernel_log_is_found(
    path: str, mountinfo: str, directory: str | None
) -> None:
    found = find_directory(path, mountinfo)

    assert found == (Path(directory) if directory is not None else None)


def test_lowest_limit_that_was_reached_is_named() -> None:
    def group(limit_bytes: int | None, peak_bytes: int | None) -> MemoryGroup:
        return MemoryGroup(path=Path("/g"), kills=0, limit_bytes=limit_bytes, peak_bytes=peak_bytes)

    unlimited = group(None, 400)
    not_reached = group(100, 50)
    reached = group(200, 199)

    assert select_reached_limit([unlimited, not_reached, reached]) is reached
    assert select_reached_limit([unlimited, not_reached]) is None
