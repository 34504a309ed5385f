"""Keeps every device busy, and loses nothing, while a model predicts, validates or tests under PyTorch Lightning.

The stages, in the order in which data flows through them: the state of the devices is *captured*, the epoch's batches
are *dealt out* by measured speed, the user's steps are *run* and timed, results and metrics are *put together* again
as one device would have given them, and what was found is *reported* to the trainer's loggers.

Importing this package loads neither ``lightning`` nor ``pytorch_lightning``; the names that need one of them load it
when they are first used, and prefer the one that is imported already.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_hybrid.core.communication import CommunicationState
    from lightning_hybrid.core.config import HybridConfig
    from lightning_hybrid.core.errors import (
        BatchError,
        CollectiveInQueueMode,
        ConfigError,
        CoordinationTimeout,
        CostError,
        HybridError,
        PeerFailed,
        PlanError,
        ResultsError,
        SampleTooLarge,
        TooManyErrors,
    )
    from lightning_hybrid.core.failures import SampleFailure
    from lightning_hybrid.core.plan import Plan
    from lightning_hybrid.core.policies import register_policy
    from lightning_hybrid.core.recommend import Recommendation
    from lightning_hybrid.core.state import BalanceSnapshot, DeviceState, ReplicaRecord
    from lightning_hybrid.core.statistics import Statistics
    from lightning_hybrid.core.system_state import SystemState
    from lightning_hybrid.core.traces import SpeedTrace
    from lightning_hybrid.lightning.callback import HybridBalanceCallback
    from lightning_hybrid.lightning.device_state_monitor import DeviceStateMonitor
    from lightning_hybrid.lightning.strategy import HybridDDPStrategy
    from lightning_hybrid.reports.simulated import SimulationResult
    from lightning_hybrid.runtime.recording import Recording
    from lightning_hybrid.simulation import replay, simulate

__version__ = "0.1.0.dev0"

__all__ = [
    "BalanceSnapshot",
    "BatchError",
    "CollectiveInQueueMode",
    "CommunicationState",
    "ConfigError",
    "CoordinationTimeout",
    "CostError",
    "DeviceState",
    "DeviceStateMonitor",
    "HybridBalanceCallback",
    "HybridConfig",
    "HybridDDPStrategy",
    "HybridError",
    "PeerFailed",
    "Plan",
    "PlanError",
    "Recommendation",
    "Recording",
    "ReplicaRecord",
    "ResultsError",
    "SampleFailure",
    "SampleTooLarge",
    "SimulationResult",
    "SpeedTrace",
    "Statistics",
    "SystemState",
    "TooManyErrors",
    "register_policy",
    "replay",
    "simulate",
]

_HOMES = {
    "BalanceSnapshot": "core.state",
    "BatchError": "core.errors",
    "CollectiveInQueueMode": "core.errors",
    "CommunicationState": "core.communication",
    "ConfigError": "core.errors",
    "CoordinationTimeout": "core.errors",
    "CostError": "core.errors",
    "DeviceState": "core.state",
    "DeviceStateMonitor": "lightning.device_state_monitor",
    "HybridBalanceCallback": "lightning.callback",
    "HybridConfig": "core.config",
    "HybridDDPStrategy": "lightning.strategy",
    "HybridError": "core.errors",
    "PeerFailed": "core.errors",
    "Plan": "core.plan",
    "PlanError": "core.errors",
    "Recommendation": "core.recommend",
    "Recording": "runtime.recording",
    "ReplicaRecord": "core.state",
    "ResultsError": "core.errors",
    "SampleFailure": "core.failures",
    "SampleTooLarge": "core.errors",
    "SimulationResult": "reports.simulated",
    "SpeedTrace": "core.traces",
    "Statistics": "core.statistics",
    "SystemState": "core.system_state",
    "TooManyErrors": "core.errors",
    "register_policy": "core.policies",
    "replay": "simulation",
    "simulate": "simulation",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = _HOMES[name]
    module = importlib.import_module(f"{__name__}.{home}")
    if home.startswith("lightning."):
        importlib.import_module(f"{__name__}.lightning.strategy").register()
    return getattr(module, name)


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])


if "lightning.pytorch" in sys.modules or "pytorch_lightning" in sys.modules:
    importlib.import_module(f"{__name__}.lightning.strategy").register()
