"""A trainer that reaches its last step without a save, and crashes at the interpreter's exit."""

import os
import signal

from trainer import train

train(1, 31)
os.kill(os.getpid(), signal.SIGSEGV)
