"""Saves for longer than `stall_after_s`, with a file that grows: that is no stall."""

import time

from trainer import FOLDER, PAUSE_S, train

train(1, 11)
(FOLDER / "step_10").mkdir(parents=True, exist_ok=True)
for _ in range(16):
    with open(FOLDER / "step_10" / "m.pt", "a", encoding="utf-8") as file:
        file.write("x")
    time.sleep(PAUSE_S)
train(11, 31)
