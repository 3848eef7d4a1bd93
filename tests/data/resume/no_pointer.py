"""A trainer that writes checkpoint folders of verl, but no pointer file.

Muster must use each folder, or refuse the folder with a reason.
"""

from trainer import ATTEMPT, FOLDER, START, die, train

for name in ("global_step_5", "global_step_10"):
    (FOLDER / name).mkdir(parents=True, exist_ok=True)
    (FOLDER / name / "m.pt").write_text("w")
train(START + 1, 13)
if ATTEMPT == 1:
    die()
train(13, 31)
