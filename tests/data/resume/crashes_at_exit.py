"""Reaches its last step and saves nothing; the interpreter crashes at its exit."""

import os
import signal

from trainer import train

train(1, 31)
os.kill(os.getpid(), signal.SIGSEGV)
