"""A trainer that ignores the checkpoint that it gets, and starts from the beginning."""

from trainer import ATTEMPT, die, save, train

train(1, 6)
if ATTEMPT == 1:
    save(5)
train(6, 21)
if ATTEMPT == 1:
    die()
train(21, 31)
