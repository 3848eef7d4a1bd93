"""A trainer that fails in attempt 2 for a reason that no checkpoint can cause.

Attempt 3 must start from step_20.
"""

from trainer import ATTEMPT, START, die, save, train

if ATTEMPT == 2:
    raise RuntimeError("No CUDA GPUs are available")
train(START + 1, 25)
save(20)
if ATTEMPT == 1:
    die()
train(25, 31)
