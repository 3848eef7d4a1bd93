"""A trainer that is killed after its last checkpoint.

The run must be completed, and no step is trained again.
"""

from trainer import ATTEMPT, START, die, save, train

train(START + 1, 31)
save(30)
if ATTEMPT == 1:
    die()
