"""A trainer that completes the run. Its folders look like exported models, so Muster ignores them.

The run has a warning, which names the folders and the remedy.
"""

from trainer import FOLDER, log, train

train(1, 30)
for step in (20, 30):
    (FOLDER / f"it{step:06}").mkdir(parents=True)
    (FOLDER / f"it{step:06}" / "weights.bin").write_text("w")
log(30)
