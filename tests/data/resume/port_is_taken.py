"""A trainer that fails in attempts 2 and 3 before its first step, because its port is in use.

The checkpoint cannot cause this failure, so each next attempt must start from step_20 again.
"""

from trainer import ATTEMPT, START, die, save, train

if ATTEMPT in (2, 3):
    raise OSError(98, "Address already in use")
train(START + 1, 25)
save(20)
if ATTEMPT == 1:
    die()
train(25, 31)
