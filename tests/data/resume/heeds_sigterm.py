"""A trainer that gets SIGTERM after step 12, saves a checkpoint, and ends with exit code 0.

The trainer sends the signal to itself. Muster sees no difference to a signal from outside.
"""

import os
import signal
import sys

from trainer import ATTEMPT, START, save, train


def stop(number: int, frame: object) -> None:
    print("received SIGTERM, saving", flush=True)
    save(12)
    sys.exit(0)


signal.signal(signal.SIGTERM, stop)
train(START + 1, 13)
if ATTEMPT == 1:
    os.kill(os.getpid(), signal.SIGTERM)
train(max(START + 1, 13), 31)
