"""A trainer that is stopped at its time limit, during a save longer than its grace period."""

import time

from trainer import ATTEMPT, FOLDER, PAUSE_S, START, hang, save, train

if ATTEMPT == 1:
    train(1, 11)
    (FOLDER / "step_10").mkdir(parents=True)
    for _ in range(20):
        with open(FOLDER / "step_10" / "__0_0.distcp", "a", encoding="utf-8") as file:
            file.write("x")
        time.sleep(PAUSE_S)
    save(10)
    hang()
train(START + 1, 31)
