"""Gets SIGTERM from outside at step 12, saves, and ends with exit code 0."""

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
