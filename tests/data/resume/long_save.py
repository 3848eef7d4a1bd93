"""A trainer whose save takes longer than `stall_after_s`.

This is no stall, because a file of the checkpoint grows during the save.
"""

import time

from trainer import FOLDER, PAUSE_S, train

train(1, 11)
(FOLDER / "step_10").mkdir(parents=True, exist_ok=True)
for _ in range(16):
    with open(FOLDER / "step_10" / "m.pt", "a", encoding="utf-8") as file:
        file.write("x")
    time.sleep(PAUSE_S)
train(11, 31)
