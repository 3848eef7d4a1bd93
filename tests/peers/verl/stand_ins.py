"""Make verl's configuration importable without torch and other dependencies of verl.

verl's configuration consists of dataclasses and simple checks. But importing it also imports torch,
Ray and CUDA libraries. So each missing module gets a stand-in. Packages of verl whose `__init__`
only imports names are used without their `__init__`.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

#: Packages that are imported as usual, in addition to the standard library. All other packages get
#: stand-ins.
PRESENT = frozenset({"verl", "hydra", "omegaconf", "antlr4", "yaml", "packaging", "deployments"})
#: Packages of verl whose `__init__` is not executed, because it would import missing packages.
HOLLOW = ("verl", "verl.utils", "verl.workers", "verl.trainer.ppo", "verl.trainer.distillation")


class _Anything(type):
    """Metaclass of `Absent`. The metaclass supports all operations that an import of verl needs."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls is not Absent:
            return super().__call__(*args, **kwargs)
        # A decorator must return the function that it decorates.
        return args[0] if len(args) == 1 and callable(args[0]) else Absent

    def __getitem__(cls, _: object) -> Any:
        return Absent

    def __or__(cls, _: object) -> Any:
        return Absent

    __ror__ = __or__

    def __bool__(cls) -> bool:
        return False


class Absent(metaclass=_Anything):
    """A stand-in for any class, function or value of a missing module."""


class _AbsentModule(ModuleType):
    """A stand-in for a missing module: each of its attributes is `Absent`."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """An import finder and loader that makes a stand-in for every missing module."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        top = name.partition(".")[0]
        if top in PRESENT or top in sys.stdlib_module_names:
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _AbsentModule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Do nothing, because a stand-in module has no code."""


def install(folder: Path) -> None:
    """Make this process import verl from the folder, with stand-ins for all missing modules."""
    for name in HOLLOW:
        package = _AbsentModule(name)
        package.__path__ = [str(folder / name.replace(".", "/"))]
        sys.modules[name] = package
    sys.path.insert(0, str(folder))
    sys.meta_path.append(_Finder())
