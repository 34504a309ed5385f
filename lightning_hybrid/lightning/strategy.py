"""DDP with the callback built in, for both Lightning packages."""

from __future__ import annotations

import functools
import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

import torch

from lightning_hybrid.core.errors import ConfigError
from lightning_hybrid.lightning import _compat

if TYPE_CHECKING:
    from lightning.pytorch.strategies import DDPStrategy

    HybridDDPStrategy: type[DDPStrategy]

NAME = "hybrid_ddp"


class _HybridDDP:
    """`DDPStrategy` that adds `HybridBalanceCallback` to the Trainer, unless it has one.

    Under torchrun it follows the number of ranks that there are, so that an elastic job may go on with fewer (or more)
    than ``devices`` names: stock Lightning raises then.
    """

    def __repr__(self) -> str:
        package = type(self)._package  # type: ignore[attr-defined]  # set where the class is made
        other = next(name for name in _compat.PACKAGES if name != package)
        return (
            f"HybridDDPStrategy of {package} (a Trainer of {other} takes"
            f" lightning_hybrid.lightning.strategy.hybrid_ddp_class({other!r}))"
        )

    @property
    def num_processes(self) -> int:
        """Ranks on this node: as many as torchrun has started, else as many as ``devices`` names."""
        elastic = _elastic_ranks_on_node(getattr(self, "cluster_environment", None))
        return super().num_processes if elastic is None else elastic  # type: ignore[misc]  # DDPStrategy has it

    @property
    def root_device(self) -> torch.device:
        """This rank's device; ranks beyond those that ``devices`` names get the devices that follow."""
        devices: list[torch.device] = self.parallel_devices or []  # type: ignore[attr-defined]  # DDPStrategy has it
        rank: int = self.local_rank  # type: ignore[attr-defined]  # DDPStrategy has it
        if rank < len(devices):
            return devices[rank]
        kind = devices[0].type
        if kind == "cuda" and rank >= torch.cuda.device_count():
            raise ConfigError("devices", len(devices), f"leave a GPU for local rank {rank} that torchrun has started")
        return torch.device("cpu") if kind == "cpu" else torch.device(kind, rank)

    def setup_environment(self) -> None:
        """Sets up the process group and adds the callback."""
        super().setup_environment()  # type: ignore[misc]  # DDPStrategy has it
        from lightning_hybrid.lightning.callback import HybridBalanceCallback

        trainer: Any = self.lightning_module.trainer  # type: ignore[attr-defined]  # DDPStrategy has it
        if not any(isinstance(callback, HybridBalanceCallback) for callback in trainer.callbacks):
            trainer.callbacks.insert(0, HybridBalanceCallback())


def _elastic_ranks_on_node(environment: object) -> int | None:
    if type(environment).__name__ != "TorchElasticEnvironment":
        return None
    ranks = os.environ.get("LOCAL_WORLD_SIZE")
    return None if ranks is None else int(ranks)


@functools.cache
def hybrid_ddp_class(package: str) -> type[DDPStrategy]:
    """The strategy class for Trainers of ``"lightning.pytorch"`` or ``"pytorch_lightning"``."""
    base: Any = importlib.import_module(f"{package}.strategies").DDPStrategy
    namespace = {"__doc__": _HybridDDP.__doc__, "__module__": __name__, "_package": package}
    cls: type[DDPStrategy] = type("HybridDDPStrategy", (_HybridDDP, base), namespace)
    return cls


def register() -> None:
    """Makes ``strategy="hybrid_ddp"`` known to every Lightning package that is imported."""
    for package in _compat.PACKAGES:
        if package not in sys.modules:
            continue
        registry: Any = importlib.import_module(f"{package}.strategies").StrategyRegistry
        if NAME not in registry:
            registry.register(
                NAME, hybrid_ddp_class(package), description="DDP that shares inference by measured speed"
            )


def __getattr__(name: str) -> Any:
    if name == "HybridDDPStrategy":
        return hybrid_ddp_class(_compat.imported_package().__name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
