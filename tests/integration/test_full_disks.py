"""Components whose log is on a full file system. The tests need root, because they mount it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tasks.spec.failure_kinds import FailureKind
from tests.faults.injections import mounted, why_no_mounts
from tests.support.supervised_components import ComponentHarness, python

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0 or bool(why_no_mounts()), reason="only root may mount a file system"
)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Yield the path of a mounted file system of 256 KiB."""
    with mounted(tmp_path / "disk", "-t", "tmpfs", "-o", "size=256k,mode=700", "none"):
        yield tmp_path / "disk"


def test_component_that_fills_the_disk_of_its_log_fails_with_storage(
    small_disk: Path, harness: ComponentHarness
) -> None:
    program = "import os\nwhile True: os.write(1, b'x' * 9999 + b'\\n')"
    trainer = harness.component("trainer", python(program), log=small_disk / "trainer.log")

    failure = harness.run(trainer).failure

    assert failure is not None
    assert failure.kind is FailureKind.STORAGE
    assert f"{small_disk} has 0 of 262144 bytes free" in failure.message


def test_log_with_another_cause_is_preferred_to_a_full_disk(
    small_disk: Path, harness: ComponentHarness
) -> None:
    program = (
        "import sys\n"
        "print('ValueError: a wrong argument', file=sys.stderr)\n"
        f"filler = open({str(small_disk / 'filler')!r}, 'wb', buffering=0)\n"
        "try:\n"
        "    while filler.write(b'x' * 4096): pass\n"
        "except OSError: sys.exit(1)\n"
    )
    trainer = harness.component("trainer", python(program), log=small_disk / "trainer.log")

    failure = harness.run(trainer).failure

    assert failure is not None
    assert failure.kind is FailureKind.USER_ERROR


#: Program that mounts a small /dev/shm in its own mount namespace, and runs a component that fills
#: this file system. The program prints the kind and the message of the failure.
FILL_SHARED_MEMORY = """
import subprocess, sys
from pathlib import Path
from tests.support.supervised_components import ComponentHarness
subprocess.run(["mount", "--make-rprivate", "/"], check=True)
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", "/dev/shm"], check=True)
program = '''
import mmap, os
fd = os.open("/dev/shm/segment", os.O_RDWR | os.O_CREAT)
os.ftruncate(fd, 8 << 20)
memory = mmap.mmap(fd, 8 << 20)
for at in range(0, 8 << 20, 4096): memory[at] = 1
'''
harness = ComponentHarness(Path(sys.argv[1]))
failure = harness.run(harness.component("trainer", (sys.executable, "-c", program))).failure
print(failure.kind.value, failure.message)
"""


@pytest.mark.thorough
@pytest.mark.skipif(shutil.which("unshare") is None, reason="this machine has no unshare")
def test_full_shared_memory_is_named_after_sigbus(tmp_path: Path) -> None:
    result = subprocess.run(
        ["unshare", "--mount", sys.executable, "-c", FILL_SHARED_MEMORY, tmp_path],
        cwd=Path(__file__).resolve().parents[2],
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert result.stdout.startswith("HOST_OOM"), result.stdout + result.stderr
    assert "/dev/shm has 0 of 1048576 bytes free" in result.stdout
