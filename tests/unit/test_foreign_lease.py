"""Another user tries to lease a device number that represents a GPU of this user."""

from __future__ import annotations

import hashlib
from pathlib import Path

from tasks.processes.devices import DeviceLease, Devices
from tasks.processes.identity import host_name
from tests.support.another_user import end_process, needs_another_user, start_as_another_user

#: Program that binds the given names in the kernel's abstract socket namespace.
_SQUAT = """
held = [socket.socket(socket.AF_UNIX) for _ in sys.argv[1:]]
for listener, name in zip(held, sys.argv[1:]):
    listener.bind("\\0" + name)
print("held", flush=True)
time.sleep(600)
"""


@needs_another_user
def test_other_users_cannot_lease_a_device_number(muster_home: Path) -> None:
    devices = Devices(kind="nvidia", indices=(0,), uuids={}, problems={})
    # Another user does not know the name of the lease. These names are guesses from public facts
    # about the device.
    known = [f"{muster_home} {host_name()} 0", f"device {host_name()} 0", f"{host_name()} 0", "0"]
    guesses = [hashlib.sha256(text.encode()).hexdigest()[:32] for text in known]
    process = start_as_another_user(_SQUAT, *(f"muster/device/{guess}" for guess in guesses))
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"

    try:
        lease = DeviceLease(devices, [0], "a-flow-run")
    finally:
        end_process(process)

    lease.close()
