"""Which of the two packages that hold Lightning is in use."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

PACKAGES = ("lightning.pytorch", "pytorch_lightning")


def imported_package() -> ModuleType:
    """The Lightning package that the user works with: the one that is imported already, else ``lightning.pytorch``."""
    for name in PACKAGES:
        if name in sys.modules:
            return sys.modules[name]
    return importlib.import_module(PACKAGES[0])


def package_of(trainer: Trainer) -> ModuleType:
    """The package that a Trainer comes from, also for a subclass of the user's."""
    for cls in type(trainer).__mro__:
        for name in PACKAGES:
            if cls.__module__.startswith(name + "."):
                return sys.modules[name]
    raise TypeError(f"trainer must be a Trainer of {' or '.join(PACKAGES)}, got {type(trainer)!r}")
