#!python
"""Start programs of Muster with Muster's own modules, whatever PYTHONPATH holds.

    muster VERB ARGUMENT...                      the command of the user
    python -P own_modules.py -m MODULE ...       a program that Muster starts itself

The project of a user may contain packages named `tasks`, `flows` or `deployments`, as Muster does.
If PYTHONPATH, the working directory or the user's own site-packages hold such a package, Python
would import that package instead of Muster's. This file therefore removes these folders from the
import path, before the first module of Muster is imported.

The environment variables stay as they are, because the components of a run inherit them: the
programs of a project import the project's own packages.

The wheel installs this file a second time, as the program `muster`. The first line is for the
installer, which replaces that line by the path of the Python interpreter. The file imports only the
standard library.
"""

from __future__ import annotations

import os
import runpy
import site
import sys
from collections.abc import Iterable

#: Option that names the module of a program that Muster starts itself.
_MODULE_OPTION = "-m"
#: Module of the command `muster`.
_COMMAND = "tasks.command"


def make_own_command(module: str) -> tuple[str, ...]:
    """Return the beginning of a command that runs a module of Muster in a new process.

    The command has the effect of `python -m MODULE`. The caller adds the arguments of the module.

    Args:
        module: Name of the module, for example `deployments.upkeep`.
    """
    # With -P, Python does not put the folder of this file on the import path.
    return (sys.executable, "-P", os.path.abspath(__file__), _MODULE_OPTION, module)


def make_own_env() -> dict[str, str]:
    """Return environment variables for a program whose child processes import Muster's modules.

    An example is a Prefect worker: the processes of flow runs are its children. The variables
    remove the folders of the user from the import path of Python. The components of a run import
    packages from these folders, so do not pass the variables to a component.
    """
    return {"PYTHONPATH": "", "PYTHONNOUSERSITE": "1", "PYTHONSAFEPATH": "1"}


def select_own_path(
    path: Iterable[str], *, foreign: Iterable[str], own: Iterable[str]
) -> list[str]:
    """Return the import path without the user's folders, such as those in PYTHONPATH.

    Args:
        path: The import path, as `sys.path`.
        foreign: The user's folders, see `find_foreign_folders`. A folder in which Muster is
            installed stays on the path.
        own: Folders that stay on the path, even if `foreign` contains them.
    """
    own_folders = set(map(os.path.realpath, own))
    foreign_folders = set(map(os.path.realpath, foreign)) - own_folders
    return [
        entry
        for entry in path
        if os.path.realpath(entry) not in foreign_folders or _has_muster(entry)
    ]


def find_foreign_folders() -> list[str]:
    """Return the folders of the user on the import path of this process.

    These folders are the folder of the started script, the entries of PYTHONPATH, and the user's
    own site-packages with the folders that its `.pth` files add.
    """
    foreign = [os.path.dirname(os.path.abspath(sys.argv[0]))]
    if python_path := os.environ.get("PYTHONPATH"):
        # An empty entry in PYTHONPATH means the working directory.
        foreign += python_path.split(os.pathsep)
    user_packages = site.getusersitepackages()
    if site.ENABLE_USER_SITE and not _has_muster(user_packages):
        foreign += [user_packages, *_list_pth_folders(user_packages)]
    return foreign


def find_own_folders() -> list[str]:
    """Return the folders from which this Python installation imports installed packages.

    These folders are the site-packages folders, and the folders that `.pth` files in site-packages
    add. An example of an added folder is Muster's checkout after an editable installation.
    """
    packages = site.getsitepackages()
    return [*packages, *(folder for place in packages for folder in _list_pth_folders(place))]


def _has_muster(folder: str) -> bool:
    """Return True if a folder is a site-packages folder in which Muster is installed."""
    try:
        names = os.listdir(folder or ".")
    except OSError:
        return False
    return any(name.startswith("muster-") and name.endswith(".dist-info") for name in names)


def _list_pth_folders(folder: str) -> list[str]:
    """Return the folders that the `.pth` files of a site-packages folder add to the import path."""
    folders: list[str] = []
    try:
        names = [name for name in os.listdir(folder) if name.endswith(".pth")]
    except OSError:
        return folders
    for name in names:
        try:
            with open(os.path.join(folder, name), encoding="utf-8") as file:
                lines = file.read().splitlines()
        except (OSError, UnicodeError):
            continue
        folders += [
            os.path.join(folder, line.strip())
            for line in lines
            if line.strip() and not line.startswith(("#", "import "))
        ]
    return folders


def main() -> None:
    """Run the command `muster`, or the module that follows the option -m.

    Before that, remove the folders of the user from the import path, so that Python imports
    Muster's own packages.
    """
    own = find_own_folders()
    is_own_program = sys.argv[1:2] == [_MODULE_OPTION]
    if is_own_program:
        # Keep the folder of Muster's packages on the import path. With the option -m, this file is
        # inside that folder, so take the folder from the path of this file. Without the option,
        # the path would be wrong: the program `muster` is a copy of this file in another folder.
        own.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    sys.path[:] = select_own_path(sys.path, foreign=find_foreign_folders(), own=own)
    module = _COMMAND
    if is_own_program:
        if os.path.realpath(own[-1]) not in map(os.path.realpath, sys.path):
            sys.path.append(own[-1])
        module = sys.argv[2]
        sys.argv[:] = sys.argv[2:]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
