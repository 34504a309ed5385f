"""What `import lightning_hybrid` gives, and what it does not load."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_hybrid

PUBLIC = [
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
"""Frozen: a name that comes or goes here is a decision."""


def _run(code: str) -> list[str]:
    """The lines that a fresh interpreter prints."""
    path = os.pathsep.join([str(Path(lightning_hybrid.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_public_names_are_frozen_and_sorted() -> None:
    assert lightning_hybrid.__all__ == PUBLIC
    assert sorted(PUBLIC) == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_is_there_and_documented(name: str) -> None:
    value = getattr(lightning_hybrid, name)
    assert value.__name__ == name
    assert value.__doc__


def test_other_names_are_not_there() -> None:
    assert dir(lightning_hybrid) == sorted([*PUBLIC, "__version__"])
    with pytest.raises(AttributeError, match="no attribute 'HybridBalance'"):
        lightning_hybrid.HybridBalance  # noqa: B018 - the look-up is the case


def test_star_import_gives_the_public_names() -> None:
    space: dict[str, object] = {}
    exec("from lightning_hybrid import *", space)
    assert set(PUBLIC) <= space.keys()


def test_version_is_one_that_packaging_understands() -> None:
    from packaging.version import Version

    assert Version(lightning_hybrid.__version__) >= Version("0.1.0.dev0")


def test_import_loads_no_framework() -> None:
    code = """
import sys
import lightning_hybrid
lightning_hybrid.__version__, lightning_hybrid.__all__, dir(lightning_hybrid)
heavy = ("lightning", "lightning_fabric", "pytorch_lightning", "torch", "torchmetrics", "numpy", "pynvml", "psutil")
print([name for name in heavy if name in sys.modules])
"""
    assert _run(code) == ["[]"]


def test_simulate_is_the_function_whatever_was_imported_before() -> None:
    code = """
import lightning_hybrid.simulation, lightning_hybrid.cli
from lightning_hybrid import simulate
print(simulate("2x1", num_cells=8).exactly_once)
"""
    assert _run(code) == ["True"]


def test_settings_and_errors_load_no_framework() -> None:
    code = """
import sys
from lightning_hybrid import ConfigError, HybridConfig, PeerFailed, Recommendation
HybridConfig(mode="lockstep")
print([name for name in ("lightning", "pytorch_lightning", "torch", "torchmetrics") if name in sys.modules])
"""
    assert _run(code) == ["[]"]


@pytest.mark.parametrize(
    ("user", "other"), [("pytorch_lightning", "lightning"), ("lightning.pytorch", "pytorch_lightning")]
)
def test_callback_is_built_for_the_package_that_is_imported_already(user: str, other: str) -> None:
    code = f"""
import sys
import {user} as pl
from lightning_hybrid import HybridBalanceCallback, HybridDDPStrategy
print(issubclass(HybridBalanceCallback, pl.Callback), issubclass(HybridDDPStrategy, pl.strategies.DDPStrategy))
print("hybrid_ddp" in pl.strategies.StrategyRegistry, {other!r} in sys.modules)
"""
    assert _run(code) == ["True True", "True False"]


def test_without_any_package_imported_lightning_is_taken() -> None:
    code = """
import sys
import lightning_hybrid
lightning_hybrid.HybridBalanceCallback
print("lightning.pytorch" in sys.modules, "pytorch_lightning" in sys.modules)
"""
    assert _run(code) == ["True False"]


def test_package_is_typed() -> None:
    assert (Path(lightning_hybrid.__file__).parent / "py.typed").exists()
