"""A trainer that saves after SIGTERM and then ends.

The save takes longer than the grace period, and a file of the checkpoint grows during the save.
"""

import signal
import sys
import time

from trainer import ATTEMPT, FOLDER, PAUSE_S, START, hang, save, train


def stop(number: int, frame: object) -> None:
    (FOLDER / "step_10").mkdir(parents=True)
    for _ in range(8):
        with open(FOLDER / "step_10" / "__0_0.distcp", "a", encoding="utf-8") as file:
            file.write("x")
        time.sleep(PAUSE_S)
    save(10)
    sys.exit(0)


if ATTEMPT == 1:
    signal.signal(signal.SIGTERM, stop)
    train(1, 11)
    hang()
train(START + 1, 31)
