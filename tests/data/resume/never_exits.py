"""Reaches its last step and hangs: completed, not STALLED, and not trained again."""

from trainer import START, hang, train

train(START + 1, 31)
hang()
