"""Is killed during its second save, when the pointer names that checkpoint already.

step_20 has shards but no `.metadata`: step_10 must stay and be used.
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
