"""Recommendations about what went wrong in a run and was survived: memory that ran out, samples that were left out."""

from __future__ import annotations

from lightning_hybrid.core.recommend import Recommendation
from lightning_hybrid.core.state import BalanceSnapshot

_REPEATED = 2
"""So many failures for want of memory are no chance."""
_HIGH_ERROR_FRAC = 0.01


def out_of_memory(snapshot: BalanceSnapshot) -> Recommendation | None:
    """What to do about steps that ran out of memory again and again and were run in parts.

    Returns:
        ``None`` where that happened less than twice on every replica.
    """
    worst = max(snapshot.replicas, key=lambda record: (record.memory_failures, -record.replica), default=None)
    if worst is None or worst.memory_failures < _REPEATED:
        return None
    size = worst.micro_batch_size
    in_the_end = "" if size is None else f" In the end its steps had {size:,.1f} samples in the mean."
    return Recommendation(
        id=f"out_of_memory/{snapshot.stage}/replica{worst.replica}",
        kind="out_of_memory",
        priority="medium",
        action=f"Make the batches of {snapshot.stage} smaller",
        description=(
            f"{worst.memory_failures} steps of replica {worst.replica} ran out of memory and were run again in parts;"
            f" nothing is lost but the time of those steps.{in_the_end}"
        ),
        evidence={"memory_failures": float(worst.memory_failures), "micro_batch_size": size},
        expected_gain_s=None,
        expected_gain_frac=None,
        how_to=(
            'Pass HybridBalanceCallback(micro_batch_size="auto"), which finds the size that fits and runs fastest, or'
            " give the DataLoader a smaller batch_size. How much time it saves is not known: what failed attempts took"
            " is not told apart from the steps."
        ),
        device=None if worst.device is None else worst.device.name,
    )


def failed_samples(snapshot: BalanceSnapshot) -> Recommendation | None:
    """What to do about samples that were left out (``on_error="skip"``); ``None`` where there are none."""
    failed, frac = snapshot.samples_failed, snapshot.error_frac
    if not failed:
        return None
    return Recommendation(
        id=f"failed_samples/{snapshot.stage}",
        kind="failed_samples",
        priority="high" if frac is not None and frac >= _HIGH_ERROR_FRAC else "medium",
        action=f"Look at the {failed:,} samples that {snapshot.stage} left out",
        description=(
            f"{failed:,} samples could not be loaded or run and were left out; metrics and results are those of the"
            " others."
        ),
        evidence={"samples_failed": float(failed), "error_frac": frac},
        expected_gain_s=None,
        expected_gain_frac=None,
        how_to="`callback.failures` names each one by dataset index, with what was raised and where.",
    )
