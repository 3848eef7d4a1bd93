"""A trainer that hangs while it resumes from step_20.

The next attempt must start from step_10.
"""

from trainer import ATTEMPT, START, die, hang, save, train

if START == 20:
    hang()
train(START + 1, 11)
save(10)
train(11, 23)
save(20)
if ATTEMPT == 1:
    die()
train(23, 31)
