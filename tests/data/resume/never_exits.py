"""A trainer that reaches its last step and then hangs.

The run must be completed, not STALLED, and no step is trained again.
"""

from trainer import START, hang, train

train(START + 1, 31)
hang()
