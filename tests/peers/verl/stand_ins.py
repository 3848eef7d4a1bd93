"""Makes verl's own configuration importable where torch and the rest of what it needs is not.

verl's configuration is dataclasses and plain checks, but what lies beside them imports torch, Ray
and CUDA libraries on the way. Each module that is absent is given a stand-in, and the packages of
verl whose `__init__` only gathers names are entered without it.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

#: What is really there, beside the standard library.
PRESENT = frozenset({"verl", "hydra", "omegaconf", "antlr4", "yaml", "packaging", "deployments"})
#: Packages of verl that are entered without their `__init__`.
HOLLOW = ("verl", "verl.utils", "verl.workers", "verl.trainer.ppo", "verl.trainer.distillation")


class _Anything(type):
    """A class that can stand wherever a module of verl uses an absent one while it is imported."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if cls is not Absent:
            return super().__call__(*args, **kwargs)
        # A decorator gives back what it decorates.
        return args[0] if len(args) == 1 and callable(args[0]) else Absent

    def __getitem__(cls, _: object) -> Any:
        return Absent

    def __or__(cls, _: object) -> Any:
        return Absent

    __ror__ = __or__

    def __bool__(cls) -> bool:
        return False


class Absent(metaclass=_Anything):
    """Stands for any class, function or value of an absent module."""


class _AbsentModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Absent


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
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
        """Nothing: it has no code."""


def install(folder: Path) -> None:
    """From here on the process imports verl from `folder`, and what is absent as a stand-in."""
    for name in HOLLOW:
        package = _AbsentModule(name)
        package.__path__ = [str(folder / name.replace(".", "/"))]
        sys.modules[name] = package
    sys.path.insert(0, str(folder))
    sys.meta_path.append(_Finder())
