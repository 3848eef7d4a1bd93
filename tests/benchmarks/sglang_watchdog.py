"""SGLang's own SubprocessWatchdog, taken out of its wheel, over three components.

Its source file is loaded alone, since the package around it needs torch; what the file imports from
there, it never calls here. `python -m tests.benchmarks.sglang_watchdog FILE FOLDER` starts the
components as SGLang starts its own, by multiprocessing, and lets the class watch them. On SIGQUIT,
by which it says that one has died, SGLang kills its whole tree; here the others get SIGTERM, so
that they can note it.
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

from tests.benchmarks.part import wait as wait_for_sigterm
from tests.benchmarks.report import NotHere
from tests.benchmarks.stage import NAMES
from tests.peers.pip import NoWheel, fetch

#: As in tests/peers/backends/.
VERSION = "0.5.23"
_MODULE = "sglang/srt/utils/watchdog.py"
_CLASS = "SubprocessWatchdog"


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The file of one version."""

    path: Path
    version: str


@contextmanager
def source() -> Iterator[Source]:
    """Raises: NotHere."""
    with tempfile.TemporaryDirectory(prefix="muster-bench-sglang-") as place:
        try:
            package = fetch(f"sglang=={VERSION}", Path(place), only=".py")
        except NoWheel as reason:
            words = str(reason).splitlines()[-1:]
            raise NotHere(f"pip did not get sglang's wheel: {' '.join(words)}") from reason
        yield Source(path=package.folder / _MODULE, version=package.version)


def watch(path: Path, place: Path) -> None:
    """Start the components, and end when the class has said that one of them has died."""
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
    watchdog = loaded(path)(processes=processes, process_names=list(NAMES))
    watchdog.start()
    for process in processes:
        process.join()
    watchdog.stop()


def loaded(path: Path) -> type[Any]:
    """The class of a source file, whose package is not there."""
    # What the file imports from its package leads to torch.
    sys.meta_path.insert(0, _Stubs())
    spec = importlib.util.spec_from_file_location("watchdog", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: type[Any] = getattr(module, _CLASS)
    return found


class _Stubs(MetaPathFinder, Loader):
    """In the place of the package `sglang`: modules with every name, and nothing behind them."""

    def find_spec(self, fullname: str, path: object, target: object = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] != "sglang":
            return None
        return ModuleSpec(fullname, self, is_package=True)

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class _Stub(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


if __name__ == "__main__":
    watch(Path(sys.argv[1]), Path(sys.argv[2]))
