"""Run three components under SGLang's own SubprocessWatchdog, loaded from SGLang's wheel.

    python -m tests.benchmarks.sglang_watchdog FILE FOLDER

The rest of the package needs torch, so the program loads only the source file FILE of the class.
The class does not call its imports from the package here. The program starts the components with
multiprocessing, as SGLang does, and lets the class watch them.

If a component dies, the class sends SIGQUIT to the program. SGLang then kills its whole process
tree. This program sends SIGTERM to the other components instead, so that they can record the time.
"""

from __future__ import annotations

import importlib.util
import multiprocessing
import signal
import sys
import tempfile
import types
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

from tests.benchmarks.harness import NAMES
from tests.benchmarks.part import wait as wait_for_sigterm
from tests.benchmarks.report import NotHere
from tests.peers.pip import NoWheel, fetch

#: Version of SGLang. tests/peers/backends/ uses the same version.
VERSION = "0.5.23"
_MODULE = "sglang/srt/utils/watchdog.py"
_CLASS = "SubprocessWatchdog"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """Source file of the class SubprocessWatchdog."""

    #: Path of the source file.
    path: Path
    #: Version of SGLang.
    version: str


@contextmanager
def source() -> Iterator[Source]:
    """Download SGLang's wheel, and yield the source file of its watchdog class.

    Raises:
        NotHere: pip cannot download the wheel.
    """
    with tempfile.TemporaryDirectory(prefix="muster-bench-sglang-") as place:
        try:
            package = fetch(f"sglang=={VERSION}", Path(place), only=".py")
        except NoWheel as reason:
            words = str(reason).splitlines()[-1:]
            raise NotHere(f"pip did not get sglang's wheel: {' '.join(words)}") from reason
        yield Source(path=package.folder / _MODULE, version=package.version)


def watch(path: Path, place: Path) -> None:
    """Let SGLang's watchdog class supervise the components until all components have ended.

    Args:
        path: Source file of the watchdog class.
        place: Folder in which each component records when it received SIGTERM.
    """
    context = multiprocessing.get_context("spawn")
    processes = [
        context.Process(target=wait_for_sigterm, args=(name, str(place)), daemon=True)
        for name in NAMES
    ]

    def on_quit(signum: int, frame: object) -> None:
        for process in processes:
            process.terminate()

    signal.signal(signal.SIGQUIT, on_quit)
    for process in processes:
        process.start()
    watchdog = load_class(path)(processes=processes, process_names=list(NAMES))
    watchdog.start()
    for process in processes:
        process.join()
    watchdog.stop()


def load_class(path: Path) -> type[Any]:
    """Load the class SubprocessWatchdog from its source file, without the package `sglang`."""
    # The file imports modules of the package `sglang`, which would import torch. So these modules
    # are replaced by empty modules.
    sys.meta_path.insert(0, _Stubs())
    spec = importlib.util.spec_from_file_location("watchdog", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    loaded_class: type[Any] = getattr(module, _CLASS)
    return loaded_class


class _Stubs(MetaPathFinder, Loader):
    """Importer that replaces the package `sglang` by empty modules."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] != "sglang":
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class _Stub(types.ModuleType):
    """Module in which each name has the value None."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


if __name__ == "__main__":
    watch(Path(sys.argv[1]), Path(sys.argv[2]))
