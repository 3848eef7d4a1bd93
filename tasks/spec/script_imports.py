"""Find the modules of a project that a Python script imports, without running the script.

`muster init` uses this module to recognise a training whose script imports the training loop.
"""

from __future__ import annotations

import ast
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tasks.spec.script_structure import parse_source

#: Depth up to which the imports of a script are followed. If the script imports module `a`, and `a`
#: imports module `b`, the depth is 1 for `a` and 2 for `b`.
_MAX_LEVELS = 4
#: Largest number of modules that are returned for a script.
_MAX_MODULES = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class _Import:
    """An import of a module, or of a name in a module."""

    #: Number of leading dots, as in `from ..a import b`, or 0.
    dots: int
    #: Parts of the imported name. Both `import a.b` and `from a import b` have the parts `a` and
    #: `b`. The last part may be a function in a module.
    parts: tuple[str, ...]


class ImportFinder:
    """Finds the modules that the scripts of a project import from the same project.

    Each file is parsed only once.
    """

    def __init__(self, root: Path, read: Callable[[Path], str]) -> None:
        """
        Args:
            root: Absolute path of the root folder of the project.
            read: Function that returns the text of a file, or "" if the file cannot be read.
        """
        self._root = root
        self._read = read
        self._imports: dict[Path, tuple[_Import, ...]] = {}
        #: Imported modules of each file. A key consists of the folder of the script and the path of
        #: the file.
        self._modules: dict[tuple[Path, Path], tuple[Path, ...]] = {}
        self._files: dict[tuple[Path, tuple[str, ...]], Path | None] = {}

    def find_modules(self, script: Path) -> tuple[Path, ...]:
        """Return the modules of the project that a script imports, directly or through others.

        Args:
            script: Absolute path of the Python script.

        Returns:
            Absolute paths of at most `_MAX_MODULES` modules. The modules that the script itself
            imports come first.
        """
        folders = self._list_search_folders(script)
        # The keys are the files. A dict keeps their order, and a set does not.
        found: dict[Path, None] = {script: None}
        level = [script]
        for _ in range(_MAX_LEVELS):
            imported: dict[Path, None] = {}
            for file in level:
                key = script.parent, file
                if key not in self._modules:
                    self._modules[key] = tuple(self._resolve(file, folders))
                imported |= dict.fromkeys(self._modules[key])
            level = [module for module in imported if module not in found]
            found |= dict.fromkeys(level)
            if len(found) > _MAX_MODULES:
                break
        return tuple(found)[1 : _MAX_MODULES + 1]

    def _list_search_folders(self, script: Path) -> tuple[Path, ...]:
        """Return the folders of the project in which the modules of a script may be.

        These are the folder of the script, its parent folders up to the root of the project, and
        the subfolder `src` of each of these folders.
        """
        above = [folder for folder in script.parents if folder.is_relative_to(self._root)]
        folders = dict.fromkeys((script.parent, *above))
        return tuple(path for folder in folders for path in (folder, folder / "src"))

    def _resolve(self, file: Path, folders: Sequence[Path]) -> Iterator[Path]:
        """Yield the modules of the project that a file imports directly."""
        if file not in self._imports:
            self._imports[file] = tuple(_list_imports(self._read(file)))
        for item in self._imports[file]:
            searched = folders
            if item.dots:
                searched = file.parents[item.dots - 1 : item.dots]
            # The last part may be a function. Then only the other parts are the name of the module.
            for parts in (item.parts, item.parts[:-1]):
                modules = (self._find_file(folder, parts, item.dots > 0) for folder in searched)
                module = next(filter(None, modules), None)
                if module is not None:
                    yield module
                    break

    def _find_file(self, folder: Path, parts: tuple[str, ...], is_package: bool) -> Path | None:
        """Return the file of a module, or None if the folder does not contain the module.

        Args:
            folder: A folder in which Python searches for modules, or the folder of a package.
            parts: Parts of the module's name. Empty for the package whose folder is `folder`.
            is_package: True if `folder` is the folder of a package.
        """
        if not parts and not is_package:
            return None
        key = folder, parts
        if key not in self._files:
            # These functions are several times as fast as the methods of Path.
            path = os.path.join(folder, *parts)
            paths = [os.path.join(path, "__init__.py")]
            if parts:
                paths.append(f"{path}.py")
            file = next(filter(os.path.isfile, paths), None)
            self._files[key] = Path(file) if file is not None else None
        return self._files[key]


def _list_imports(source: str) -> Iterator[_Import]:
    tree = parse_source(source)
    for node in ast.walk(tree) if tree is not None else ():
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield _Import(dots=0, parts=tuple(alias.name.split(".")))
        elif isinstance(node, ast.ImportFrom):
            module = tuple(node.module.split(".")) if node.module else ()
            for alias in node.names:
                yield _Import(dots=node.level, parts=(*module, alias.name))
