"""Submit and inspect runs from Python: `import muster`.

The wheel installs this file as the package `muster`. The functions use the same Prefect server as
the command `muster`:

    import muster

    run = muster.submit("muster.yaml")
    run.wait()

Import this package before Prefect, because Prefect reads the address of its server only once.

A project may contain packages named `tasks`, `flows` or `deployments`, as Muster does. So this
package loads Muster's own modules, and then removes them from `sys.modules`. The names stay free
for the packages of the project.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

__all__ = ["BadArgument", "InvalidSpec", "MusterError", "RunHandle", "find", "submit"]

#: Names of Muster's packages.
_PACKAGES = ("tasks", "flows", "deployments")
#: Path of a file that only Muster's package `tasks` contains. A user's project may have another
#: package `tasks`.
_MARKER = Path("tasks", "processes", "own_modules.py")


class _OwnFinder:
    """Import hook that finds Muster's packages before the user's packages with the same names."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the spec of a package of Muster, or None for every other module."""
        return PathFinder.find_spec(name, [str(self._folder)]) if name in _PACKAGES else None


def _find_folder() -> Path:
    """Return the folder that contains Muster's packages.

    Usually, the folder is the one that contains the package `muster`. In an editable installation,
    the folder is Muster's checkout, which is on the import path.

    Raises:
        ImportError: No folder contains Muster's packages.
    """
    folders = [Path(__file__).resolve().parent.parent, *map(Path, sys.path)]
    for folder in folders:
        if (folder / _MARKER).is_file():
            return folder
    raise ImportError(
        f"the packages of Muster are not installed for {sys.executable}: install Muster again"
    )


def _pop_modules() -> dict[str, ModuleType]:
    """Remove all modules of the packages `tasks`, `flows` and `deployments` from `sys.modules`.

    The project of the user may have packages with these names, too. After the removal, an import
    loads Muster's packages.

    Returns:
        The removed modules by name.
    """
    names = [name for name in sys.modules if name.partition(".")[0] in _PACKAGES]
    return {name: sys.modules.pop(name) for name in names}


def _load_client() -> tuple[ModuleType, ModuleType]:
    """Return Muster's modules `tasks.client` and `tasks.spec.errors`.

    After the call, `sys.modules` and the import hooks are as before.
    """
    finder = _OwnFinder(_find_folder())
    modules_of_project = _pop_modules()
    sys.meta_path.insert(0, finder)
    try:
        return import_module("tasks.client"), import_module("tasks.spec.errors")
    finally:
        sys.meta_path.remove(finder)
        _pop_modules()
        sys.modules.update(modules_of_project)


_client, _errors = _load_client()

find = _client.find
submit = _client.submit
RunHandle = _client.RunHandle
MusterError = _errors.MusterError
InvalidSpec = _errors.InvalidSpec
BadArgument = _errors.BadArgument

# Set the module name of these classes to this module. A pickled object contains the module name of
# its class. With the module name `tasks.client`, Python could load a package `tasks` of the user's
# project instead of Muster's.
for _class in (RunHandle, MusterError, InvalidSpec, BadArgument):
    _class.__module__ = __name__
