"""A trainer that is killed between its last step and its last checkpoint.

The next attempt must resume from step_20.
"""

from trainer import ATTEMPT, START, die, save, train

train(START + 1, 21)
save(20)
train(21, 31)
if ATTEMPT == 1:
    die()
save(30)
