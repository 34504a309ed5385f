"""Recordings of runs, in files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_hybrid.core.config import HybridConfig
from lightning_hybrid.core.errors import ConfigError, PlanError
from lightning_hybrid.core.recording import KeptSteps, RecordedRun, since_all_kept
from lightning_hybrid.core.state import Mode

if TYPE_CHECKING:  # it loads torch, which who only reads a recording need not have
    from lightning_hybrid.runtime.spec import EpochSpec


class Recording(RecordedRun):
    """The steps of all replicas in one pass of the Trainer over one loader, as ``callback.recording`` gives them.

    `lightning_hybrid.replay` and ``python -m lightning_hybrid simulate --replay FILE`` run it again in virtual time,
    under the same or another policy.
    """

    def save(self, path: str | Path) -> None:
        """Writes it to a file, as lines of JSON."""
        Path(path).write_text(self.to_lines(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Recording:
        """What `save` wrote.

        Raises:
            PlanError: the file holds no recording; names the file and the line.
            OSError: it cannot be read.
        """
        try:
            return cls.from_lines(Path(path).read_text(encoding="utf-8"))
        except (PlanError, ConfigError, UnicodeDecodeError) as err:
            raise PlanError(f"{path} holds no recording: {err}") from err


def recording_of(spec: EpochSpec, mode: Mode, config: HybridConfig, kept: Mapping[int, KeptSteps]) -> Recording:
    """The recording of a pass.

    Args:
        spec: The pass.
        mode: How it was dealt out.
        config: Its settings.
        kept: The steps that each replica has kept, on one clock.
    """
    steps, left_out = since_all_kept([kept[replica] for replica in sorted(kept)])
    return Recording(
        stage=spec.stage,
        mode=mode,
        num_replicas=len(kept),
        steps=steps,
        loader_idx=spec.loader_idx,
        steps_left_out=left_out,
        costs_given=spec.costs is not None,
        first_rounds=spec.first_rounds,
        config=config,
    )
