"""A trainer that is killed during its second save, when the pointer already names step_20.

step_20 has shards but no `.metadata`. Muster must keep step_10 and resume from step_10.
"""

import time
from pathlib import Path

from trainer import ATTEMPT, FOLDER, PAUSE_S, RESUME_FROM, START, die, save, train

assert not RESUME_FROM or (Path(RESUME_FROM) / ".metadata").exists()
train(START + 1, 11)
save(10)
train(11, 21)
if ATTEMPT == 1:
    save(20, "__0_0.distcp")
    (FOLDER / "latest").write_text("step_20")
    time.sleep(3 * PAUSE_S)
    die()
train(21, 31)
