"""The schedules of a run: which policy was in force when, why, for how many samples, and what a switch did."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from lightning_hybrid.core.config import HybridConfig

ScheduleKind = Literal["start", "switch", "undo", "off"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """One plan version: the first of an epoch, or what a switch made of the rest."""

    stage: str
    policy: str
    kind: ScheduleKind
    reason: str
    start_s: float
    """On the clock of whoever keeps the history."""
    samples: int = 0
    """Samples that were finished while it was the newest."""
    before_per_s: float | None = None
    """Throughput before the switch in cost units per second; ``None`` where it was not measured."""
    after_per_s: float | None = None
    """The same after the switch."""

    @property
    def effect_frac(self) -> float | None:
        """Part of the throughput that the switch won; negative where it lost."""
        if not self.before_per_s or self.after_per_s is None:
            return None
        return self.after_per_s / self.before_per_s - 1


@dataclass(frozen=True, kw_only=True, slots=True)
class PolicyTotal:
    """Everything that one policy did in one stage, schedules that the history has forgotten included."""

    stage: str
    policy: str
    schedules: int = 0
    samples: int = 0
    switches: int = 0
    """Schedules of it that began in the middle of an epoch."""
    undos: int = 0
    """Of these, those that took another switch back."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Statistics:
    """Which policies were in force in this run, how long, and what switching between them did.

    Counts and means are over the whole run, ``schedules`` holds the newest of it, oldest first.
    """

    totals: tuple[PolicyTotal, ...] = ()
    schedules: tuple[Schedule, ...] = ()
    num_recent: int = 10

    @property
    def num_schedules(self) -> int:
        """Plan versions of all stages."""
        return sum(total.schedules for total in self.totals)

    @property
    def num_samples(self) -> int:
        """Samples finished in all of them."""
        return sum(total.samples for total in self.totals)

    @property
    def num_switches(self) -> int:
        """Changes of policy in the middle of an epoch, undoing and turning off included."""
        return sum(total.switches for total in self.totals)

    @property
    def distribution(self) -> dict[str, int]:
        """Schedules of each policy."""
        counts: Counter[str] = Counter()
        for total in self.totals:
            counts[total.policy] += total.schedules
        return dict(counts)

    @property
    def mean_samples(self) -> float | None:
        """Samples per schedule."""
        return self.num_samples / self.num_schedules if self.num_schedules else None

    @property
    def recent(self) -> tuple[Schedule, ...]:
        """The last ten, or what the configuration says, the newest last."""
        return self.schedules[-self.num_recent :]

    @property
    def switches(self) -> tuple[Schedule, ...]:
        """The changes of policy in the middle of an epoch that are still known, the newest last."""
        return tuple(schedule for schedule in self.schedules if schedule.kind != "start")

    def of_stage(self, stage: str) -> Statistics:
        """The part of it that belongs to one stage."""
        return replace(
            self,
            totals=tuple(total for total in self.totals if total.stage == stage),
            schedules=tuple(schedule for schedule in self.schedules if schedule.stage == stage),
        )

    def scalars(self, stage: str) -> dict[str, float]:
        """Every known number of one stage under its tag; what is not known is left out.

        =======================================================  ===================================================
        key                                                      meaning
        =======================================================  ===================================================
        ``balance/<stage>/policy/num_schedules``                 plan versions so far
        ``balance/<stage>/policy/num_switches``                  changes of policy in the middle of an epoch
        ``balance/<stage>/policy/num_undone``                    switches taken back because they measured worse
        ``balance/<stage>/policy/mean_samples_per_schedule``     samples per plan version
        ``balance/<stage>/policy/share_frac/<policy>``           share of the finished samples under this policy, 0..1
        ``balance/<stage>/policy/last_effect_frac``              throughput won by the newest measured switch
        =======================================================  ===================================================
        """
        part = self.of_stage(stage)
        found: dict[str, float | None] = {
            "num_schedules": part.num_schedules,
            "num_switches": part.num_switches,
            "num_undone": sum(total.undos for total in part.totals),
            "mean_samples_per_schedule": part.mean_samples,
            "last_effect_frac": next(part._effects_newest_first(), None),
        }
        for total in part.totals:
            found[f"share_frac/{total.policy}"] = total.samples / part.num_samples if part.num_samples else None
        return {f"balance/{stage}/policy/{name}": float(value) for name, value in found.items() if value is not None}

    def format_markdown(self) -> str:
        """A sentence and a timeline as Markdown, the newest schedule last.

        The table has a blank line before it, no indent and no HTML, which TensorBoard would not show as meant. What is
        not known is shown as ``-``.

        Example:
            >>> Statistics().format_markdown()
            'No schedule yet.'
        """
        if not self.num_schedules:
            return "No schedule yet."
        first_s = self.schedules[0].start_s if self.schedules else 0.0
        left_out = self.num_schedules - len(self.schedules)
        rows = [_row(schedule, first_s) for schedule in self.schedules]
        earlier = f" The {left_out:,} oldest are left out." if left_out else ""
        header = "| start s | stage | policy | samples | before /s | after /s | effect % | why |"
        return "\n".join([f"{self._summary()}{earlier}", "", header, "|---|---|---|---|---|---|---|---|", *rows])

    def to_json(self) -> str:
        """The record as one line of JSON."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> Statistics:
        """The record that `to_json` wrote."""
        fields: dict[str, Any] = json.loads(text)
        return cls(
            totals=tuple(PolicyTotal(**total) for total in fields["totals"]),
            schedules=tuple(Schedule(**schedule) for schedule in fields["schedules"]),
            num_recent=fields["num_recent"],
        )

    def _effects_newest_first(self) -> Iterator[float]:
        for schedule in reversed(self.schedules):
            if schedule.effect_frac is not None:
                yield schedule.effect_frac

    def _summary(self) -> str:
        parts = ", ".join(f"{policy} {count:,}" for policy, count in self.distribution.items())
        schedules = "1 schedule" if self.num_schedules == 1 else f"{self.num_schedules:,} schedules"
        switches = "1 switch" if self.num_switches == 1 else f"{self.num_switches:,} switches"
        return f"{schedules} ({parts}), {self.mean_samples:,.1f} samples each in the mean, {switches}."


class History:
    """Keeps the newest schedules of a run, and the totals of all of them.

    Args:
        config: How many schedules are kept.

    Example:
        >>> history = History(HybridConfig())
        >>> history.begin("predict", "hybrid", start_s=0.0)
        >>> history.add_samples(96)
        >>> history.begin("predict", "load_balanced", start_s=2.0, kind="switch", reason="load imbalance 0.60")
        >>> history.add_samples(32)
        >>> history.statistics.distribution, history.statistics.mean_samples
        ({'hybrid': 1, 'load_balanced': 1}, 64.0)
    """

    def __init__(self, config: HybridConfig) -> None:
        self._config = config
        self._schedules: list[Schedule] = []
        self._totals: dict[tuple[str, str], PolicyTotal] = {}

    def begin(
        self,
        stage: str,
        policy: str,
        *,
        start_s: float,
        kind: ScheduleKind = "start",
        reason: str = "first of an epoch",
    ) -> None:
        """Records that a plan version begins."""
        self._schedules.append(Schedule(stage=stage, policy=policy, kind=kind, reason=reason, start_s=start_s))
        if len(self._schedules) > self._config.max_schedules:
            del self._schedules[: -min(self._config.trimmed_schedules, self._config.max_schedules)]
        total = self._totals.get((stage, policy), PolicyTotal(stage=stage, policy=policy))
        self._totals[stage, policy] = replace(
            total,
            schedules=total.schedules + 1,
            switches=total.switches + (kind != "start"),
            undos=total.undos + (kind == "undo"),
        )

    def add_samples(self, num_samples: int) -> None:
        """Counts samples that were finished since the last call for the newest schedule."""
        if not self._schedules:
            return
        newest = self._schedules[-1]
        self._schedules[-1] = replace(newest, samples=newest.samples + num_samples)
        total = self._totals[newest.stage, newest.policy]
        self._totals[newest.stage, newest.policy] = replace(total, samples=total.samples + num_samples)

    def add_effect(self, before_per_s: float | None, after_per_s: float | None) -> None:
        """Records the throughput before and after the newest switch."""
        for number in reversed(range(len(self._schedules))):
            if self._schedules[number].kind == "switch":
                self._schedules[number] = replace(
                    self._schedules[number], before_per_s=before_per_s, after_per_s=after_per_s
                )
                return

    @property
    def statistics(self) -> Statistics:
        """What is known by now."""
        return Statistics(
            totals=tuple(self._totals.values()),
            schedules=tuple(self._schedules),
            num_recent=self._config.recent_schedules,
        )


def _row(schedule: Schedule, first_s: float) -> str:
    effect = "-" if schedule.effect_frac is None else f"{100 * schedule.effect_frac:+.1f}"
    cells = (
        f"{schedule.start_s - first_s:,.1f}",
        schedule.stage,
        schedule.policy,
        f"{schedule.samples:,}",
        _number(schedule.before_per_s),
        _number(schedule.after_per_s),
        effect,
        f"{schedule.kind}: {' '.join(schedule.reason.split())}".replace("|", "\\|"),
    )
    return f"| {' | '.join(cells)} |"


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
