"""A trainer that trains slowly in attempt 1, and saves a checkpoint when it gets SIGUSR1.

The trainer first completes its current step, and continues after the save.
"""

import os
import signal
import time

from trainer import ATTEMPT, FOLDER, PAUSE_S, START, log, save, train

is_warned = False


def warn(number: int, frame: object) -> None:
    global is_warned
    is_warned = True


signal.signal(signal.SIGUSR1, warn)
FOLDER.mkdir(parents=True, exist_ok=True)
(FOLDER.parent / f"deadline-{ATTEMPT}").write_text(os.environ.get("MUSTER_DEADLINE", ""))
step = START
while ATTEMPT == 1:
    step += 1
    log(step)
    time.sleep(PAUSE_S)
    if is_warned:
        is_warned = False
        save(step)
train(START + 1, 31)
