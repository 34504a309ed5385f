"""When the links between ranks are measured: once for a Trainer and its process group, before a step that is shared."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from lightning_hybrid.core.communication import CommunicationState
from lightning_hybrid.core.config import CommProbeOption
from lightning_hybrid.engine import Engine

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

_FOUND: weakref.WeakKeyDictionary[Any, tuple[weakref.ref[Any], CommunicationState]] = weakref.WeakKeyDictionary()
"""Trainers, the process group that was measured for each, and what was found."""


class Links:
    """The links that one run of a Trainer uses.

    Args:
        trainer: The Trainer.
        engine: Measures them.
        depth: How much is measured; the same on every rank.
    """

    def __init__(self, trainer: Trainer, engine: Engine, depth: CommProbeOption) -> None:
        self._trainer, self._engine, self._depth = trainer, engine, depth
        self.are_used = False
        """Whether the replicas share a loader of the present loop, which all ranks know alike."""

    def measure(self) -> CommunicationState | None:
        """What is known of them; measured now where that has not been done, on all ranks or on none.

        Called on the loop's thread of every rank before the first step of a loop.

        Raises:
            PeerFailed: a rank ended meanwhile.
        """
        if self._depth == "off" or not self.are_used or self._trainer.sanity_checking:
            return None
        group, known = dist.group.WORLD, _FOUND.get(self._trainer)
        if known is not None and known[0]() is group and known[1].depth == self._depth:
            return known[1]
        found = self._engine.measure_links(self._depth, self._trainer.strategy.root_device)
        if found is not None:
            _FOUND[self._trainer] = weakref.ref(group), found
        return found
