"""Rules that turn a run's own measurements into recommendations, and their text form.

A gain is computed by re-running the arithmetic of the run without the cause; it is never a fixed range.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Literal

from lightning_hybrid.core.causes import causes_of_slowness
from lightning_hybrid.core.conditions import UNKNOWN, Cause, Condition
from lightning_hybrid.core.errors import ConfigError
from lightning_hybrid.core.state import BalanceSnapshot, ReplicaRecord

Priority = Literal["high", "medium", "low"]

_HIGH_GAIN_FRAC = 0.20
_MEDIUM_GAIN_FRAC = 0.05

_WHERE_TO_LOOK = {
    "cuda": "On its machine, `nvidia-smi` lists the other processes on that GPU, and"
    " `nvidia-smi -q -d PERFORMANCE` says whether heat or power holds its clocks down. End, move or cool what you find,"
    " or use a GPU like the others.",
    "cpu": "On its machine, `top` lists what else uses the cores. Give every rank cores of its own (`taskset`,"
    " `OMP_NUM_THREADS`) and move the other work away.",
}
_WHERE_TO_LOOK_ANYWHERE = (
    "On its machine, look for other work on that device, for heat or power limits, and whether it is of a smaller kind."
)
_REMEDIES = {
    "thermal_throttling": "Cool it: look for blocked air, failed fans and hot neighbours.",
    "hardware_slowdown": "Look at its power supply and power cables: the board itself holds the clocks down.",
    "power_cap": "Give it the power limit of the others (`nvidia-smi -i N -pl WATTS`), if supply and cooling allow.",
    "low_clocks": "Let it clock like the others: `nvidia-smi -i N -q -d CLOCK` shows its settings, and `-rac` and"
    " `-rgc` reset them.",
    "co_tenants": "End or move the other processes that `nvidia-smi -i N` lists on it.",
    "narrow_pcie": "Seat the card anew, or put it into a slot with as many lanes as the others have.",
    "host_steal": "Move it to a host that is not overbooked: other virtual machines take its CPU time.",
    "cpu_quota": "Raise the CPU limit of its container: it runs out.",
    "dataloader_wait": "Give its loader more workers, or faster storage.",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Recommendation:
    """One thing that the user can do, why, and what it would gain; a field that is not known is ``None``."""

    id: str
    """The same for the same finding, whatever its numbers: what reports use to find repetitions."""
    kind: str
    """Name of the rule."""
    priority: Priority
    action: str
    """What to do, one short imperative sentence without a full stop."""
    description: str
    """What was found and what it costs, in whole sentences."""
    evidence: Mapping[str, float | None]
    """The measured numbers behind it, with units in their names."""
    expected_gain_s: float | None
    """Seconds that this run would have been shorter."""
    expected_gain_frac: float | None
    """The same as a share of the run's time, 0..1."""
    how_to: str
    """How to do it, in whole sentences."""
    device: str | None = None
    """The device that it is about."""


@dataclass(frozen=True, slots=True)
class _Dealing:
    """Seconds of the run per sample under one way of dealing the samples out."""

    now_s: float
    without_straggler_s: float

    @property
    def gain_s(self) -> float:
        return self.now_s - self.without_straggler_s

    @property
    def gain_frac(self) -> float:
        return self.gain_s / self.now_s


def straggler(snapshot: BalanceSnapshot, *, threshold_frac: float = 0.25) -> Recommendation | None:
    """The slowest replica, if it is much slower than the others, and what that costs the run.

    The run's time is computed from speeds, not read from the clock: samples / sum of speeds where the samples are dealt
    out by speed, samples / replicas / slowest speed where the shares are equal. The gain is the difference to the same
    sum with the straggler at the median speed of the others. Speeds are means over the whole run and per unit of cost,
    told in samples of the run's mean cost, so that a replica with longer samples is no straggler; replicas without a
    known speed are left out. Where what is known of the devices names a cause (`causes_of_slowness`), description,
    evidence and advice tell of it.

    Args:
        snapshot: The newest records of all replicas.
        threshold_frac: How much slower is much: 0.25 means more than 1.25 times the others' time per sample.

    Returns:
        ``None`` where fewer than two replicas have a known speed, or none is slower than the threshold by more than
        twice the error of its speed.

    Raises:
        ConfigError: ``threshold_frac`` is negative.

    Example:
        >>> records = tuple(ReplicaRecord(replica=r, speed_per_s=s) for r, s in enumerate((200.0, 50.0)))
        >>> run = dict(stage="predict", mode="queue", loader_idx=0, epoch=0, samples_total=1000)
        >>> found = straggler(BalanceSnapshot(replicas=records, **run))
        >>> found.id, found.expected_gain_s, found.expected_gain_frac
        ('straggler/predict/replica1', 1.5, 0.375)
    """
    if threshold_frac < 0:
        raise ConfigError("threshold_frac", threshold_frac, "be at least 0")
    # a replica whose only step was its first has shown how long it warms up, not how fast it is
    records = [record for record in snapshot.replicas if record.steps != 1]
    speeds = {r.replica: speed for r in records if (speed := snapshot.mean_speed_of(r) or snapshot.speed_of(r))}
    if len(speeds) < 2:
        return None
    slowest = min((r for r in snapshot.replicas if r.replica in speeds), key=lambda r: (speeds[r.replica], r.replica))
    slow_per_s = speeds.pop(slowest.replica)
    others_per_s = median(speeds.values())
    doubt_frac = 2 * (slowest.cost_speed_error_frac or 0.0)
    if others_per_s / slow_per_s * (1 - doubt_frac) <= 1 + threshold_frac:
        return None
    others = [Condition.of(r, speeds[r.replica]) for r in records if r.replica in speeds]
    found = causes_of_slowness(Condition.of(slowest, slow_per_s), others, threshold_frac=threshold_frac)
    causes = [cause for cause in found if cause is not UNKNOWN]
    return _with_causes(
        _recommend_straggler(snapshot, slowest, slow_per_s, others_per_s, list(speeds.values())), causes
    )


def format_markdown(recommendations: Sequence[Recommendation]) -> str:
    """The recommendations as Markdown, most urgent first: what to do, why, how, and a table of the evidence.

    Every table has a blank line before it, no indent and no HTML, which TensorBoard would not show as meant. A number
    that is not known is shown as ``-``.

    Example:
        >>> format_markdown([])
        'No recommendation.'
    """
    if not recommendations:
        return "No recommendation."
    rank = {"high": 0, "medium": 1, "low": 2}
    ordered = sorted(recommendations, key=lambda recommendation: rank[recommendation.priority])
    return "\n\n".join(_markdown(recommendation) for recommendation in ordered)


def _recommend_straggler(
    snapshot: BalanceSnapshot, record: ReplicaRecord, slow_per_s: float, others_per_s: float, others: list[float]
) -> Recommendation:
    by_speed = _Dealing(1 / (sum(others) + slow_per_s), 1 / (sum(others) + others_per_s))
    num_replicas = len(others) + 1
    equal_shares = _Dealing(1 / num_replicas / slow_per_s, 1 / num_replicas / min(others))
    dealing = equal_shares if snapshot.mode == "static" else by_speed
    total = snapshot.samples_total or snapshot.samples_done or None
    kind = None if record.device is None else record.device.kind
    return Recommendation(
        id=f"straggler/{snapshot.stage}/replica{record.replica}",
        kind="straggler",
        priority=_priority(dealing.gain_frac),
        action=f"Find out what slows replica {record.replica} down",
        description=f"{_who(record.replica, slow_per_s, others_per_s, len(others))}"
        f" {_cost(total, by_speed, equal_shares, static=snapshot.mode == 'static')}",
        evidence={
            "replica_speed_per_s": slow_per_s,
            "median_speed_of_others_per_s": others_per_s,
            "times_slower": others_per_s / slow_per_s,
            "num_replicas": num_replicas,
            "num_samples": total,
            "dealt_by_speed_s": total and total * by_speed.now_s,
            "dealt_by_speed_without_straggler_s": total and total * by_speed.without_straggler_s,
            "equal_shares_s": total and total * equal_shares.now_s,
            "equal_shares_without_straggler_s": total and total * equal_shares.without_straggler_s,
            "wall_so_far_s": snapshot.wall_s or None,
        },
        expected_gain_s=total and total * dealing.gain_s,
        expected_gain_frac=dealing.gain_frac,
        how_to=_WHERE_TO_LOOK.get(kind or "", _WHERE_TO_LOOK_ANYWHERE),
        device=None if record.device is None else record.device.name or kind,
    )


def _with_causes(recommendation: Recommendation, causes: Sequence[Cause]) -> Recommendation:
    if not causes:
        return recommendation
    told = causes[0].format() if len(causes) == 1 else "; ".join(f"{i}. {c.format()}" for i, c in enumerate(causes, 1))
    numbers = {field: value for cause in causes for field, value, _ in cause.evidence if not isinstance(value, str)}
    return replace(
        recommendation,
        description=f"{recommendation.description} Likely {'cause' if len(causes) == 1 else 'causes'}: {told}.",
        evidence={**recommendation.evidence, **numbers},
        how_to=" ".join([*(_REMEDIES[cause.name] for cause in causes), recommendation.how_to]),
    )


def _priority(gain_frac: float) -> Priority:
    if gain_frac >= _HIGH_GAIN_FRAC:
        return "high"
    return "medium" if gain_frac >= _MEDIUM_GAIN_FRAC else "low"


def _who(replica: int, slow_per_s: float, others_per_s: float, num_others: int) -> str:
    whom = "the other replica" if num_others == 1 else f"the median of the {num_others} others"
    return (
        f"Replica {replica} needs {_number(others_per_s / slow_per_s)} times as long per sample as {whom}"
        f" ({_number(slow_per_s)} against {_number(others_per_s)} samples/s)."
    )


def _cost(total: int | None, by_speed: _Dealing, equal_shares: _Dealing, *, static: bool) -> str:
    dealing = equal_shares if static else by_speed
    percent = f"{100 * dealing.gain_frac:.1f} %"
    if total is None:
        return f"At the others' speed the run would be {percent} shorter."
    now_s, gain_s = total * dealing.now_s, total * dealing.gain_s
    by_speed_s, equal_shares_s = total * by_speed.now_s, total * equal_shares.now_s
    if static:
        how, other_way = "in equal shares", f"Dealt out by speed they would take {_seconds(by_speed_s)}."
    else:
        how = "dealt out by speed"
        other_way = (
            f"In equal shares, as stock Lightning deals them, they would take {_seconds(equal_shares_s)}:"
            f" dealing by speed saves {_seconds(equal_shares_s - by_speed_s)}."
        )
    return (
        f"At these speeds the {total:,} samples of this run, {how}, take {_seconds(now_s)}. With this replica as fast"
        f" as the others they would take {_seconds(now_s - gain_s)}, which is {_seconds(gain_s)} ({percent}) less."
        f" {other_way}"
    )


def _markdown(recommendation: Recommendation) -> str:
    urgency = f"{recommendation.priority} priority, expected gain {_gain(recommendation)}"
    paragraphs = [
        f"**{_line(recommendation.action)}** ({urgency})",
        _line(recommendation.description),
        _line(recommendation.how_to),
    ]
    if recommendation.evidence:
        # short cells only: TensorBoard squeezes a column beside long text until it breaks words
        rows = [
            f"| {name} | {'-' if value is None else _number(value)} |"
            for name, value in recommendation.evidence.items()
        ]
        paragraphs.append("\n".join([f"| evidence{_on(recommendation)} | value |", "|---|---|", *rows]))
    return "\n\n".join(paragraphs)


def _on(recommendation: Recommendation) -> str:
    return "" if recommendation.device is None else f" ({_line(recommendation.device)})"


def _gain(recommendation: Recommendation) -> str:
    seconds, frac = recommendation.expected_gain_s, recommendation.expected_gain_frac
    parts = [
        *(() if seconds is None else (_seconds(seconds),)),
        *(() if frac is None else (f"{100 * frac:.1f} % of the run",)),
    ]
    return ", ".join(parts) or "not known"


def _line(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _number(value: float) -> str:
    """Three significant digits, never an exponent for what people read as a plain number."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _seconds(value_s: float) -> str:
    digits = 0 if value_s >= 100 else 1 if value_s >= 10 else 2 if value_s >= 0.1 else 4
    return f"{value_s:,.{digits}f} s"
