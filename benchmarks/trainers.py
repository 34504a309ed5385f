"""The Trainer of the benchmarks."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl


def quiet_trainer(*callbacks: pl.Callback, **settings: Any) -> pl.Trainer:
    """A Trainer on one CPU device, or as ``settings`` say, that writes and shows nothing of its own."""
    defaults: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "callbacks": list(callbacks),
        "logger": False,
        "enable_progress_bar": False,
        "enable_checkpointing": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(**(defaults | settings))
