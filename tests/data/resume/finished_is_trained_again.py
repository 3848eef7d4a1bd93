"""Is killed after its last checkpoint: the run is completed, and nothing is trained again."""

from trainer import ATTEMPT, START, die, save, train

train(START + 1, 31)
save(30)
if ATTEMPT == 1:
    die()
