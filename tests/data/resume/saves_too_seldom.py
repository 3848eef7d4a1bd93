"""A trainer that hangs in each attempt before its first checkpoint."""

from trainer import hang, train

train(1, 12)
hang()
