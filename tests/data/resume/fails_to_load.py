"""A trainer that fails to load step_20, with an error message.

The next attempt must start from step_10.
"""

from trainer import ATTEMPT, START, die, save, train


def load_checkpoint() -> None:
    if START == 20:
        raise ValueError("unexpected key: layers.0.bias")


load_checkpoint()
train(START + 1, 11)
save(10)
train(11, 23)
save(20)
if ATTEMPT == 1:
    die()
train(23, 31)
