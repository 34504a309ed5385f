"""Every threshold, weight, period, window, deadline and bound, in one frozen record."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, get_type_hints

from lightning_hybrid.core.errors import ConfigError
from lightning_hybrid.core.fields import POSITIVE, check_range, check_type, parse

ModeOption = Literal["auto", "queue", "lockstep"]
OrderOption = Literal["loader", "dataset"]
GatherOption = Literal["all", "rank_zero", "none"]
IterableOption = Literal["stock", "claim", "sharded"]
CommProbeOption = Literal["quick", "full", "off"]
ErrorOption = Literal["raise", "skip"]

ENVIRONMENT_PREFIX = "LIGHTNING_HYBRID_"
_LOOK_AHEAD = 0.2
"""Part of the time that is left after which very many replicas look at each other again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class HybridConfig:
    """Settings of the whole package; the callback's keyword arguments are its common fields.

    Raises:
        ConfigError: a field has the wrong type or is out of its range; names the field, the value and the rule.
    """

    enabled: bool = True
    """``False`` leaves the Trainer exactly as it is."""
    mode: ModeOption = "auto"
    """``queue``: replicas claim work as they go. ``lockstep``: equal step counts, sizes by speed."""
    order: OrderOption = "loader"
    """Order of `rows()`: the loader's, or by dataset index."""
    gather: GatherOption = "all"
    """Which ranks get the whole list from `trainer.predict`; ``none`` leaves each rank its own share."""
    iterable: IterableOption = "stock"
    """``stock``: every rank runs a whole `IterableDataset`, and is told so. ``claim``: every rank reads it, and each of
    its batches is run by one of them. ``sharded``: the dataset shards itself."""
    micro_batch_size: int | Literal["auto"] | None = None
    """Samples of one step; ``None``: the loader's batches; ``auto``: as many as run fastest, found as the loop runs."""
    max_micro_batch_size: int | None = None
    """Most samples of one step; ``None``: the loader's batch size, with ``auto`` sixteen times that."""
    batch_dependent: bool | None = None
    """``True``: the step's result depends on the whole batch, so batches are never cut anew."""
    on_error: ErrorOption = "raise"
    """``skip``: a sample that cannot be loaded, or whose step raises, is left out and told in ``callback.failures``."""
    max_errors: int | None = None
    """Most samples that may be left out before the run ends; ``None``: any number."""
    memory_limit_bytes: int | None = None
    """Most bytes that this process may have allocated on its device; ``None``: as many as there are."""
    memory_safety_frac: float = 0.9
    """Part of the memory that is free before a step which the step is let have."""
    order_by_cost: bool = True
    """Where costs are given: whether batches are cut anew from the samples in order of cost, heavy first."""

    policy: str = "auto"
    """Name of the scheduling policy; ``auto``: chosen while the loop runs, starting with ``hybrid``."""
    target_throughput_per_s: float | None = None
    """Samples per second that all replicas together should reach; ``None``: as many as they can."""

    memory_weight: float = 0.4
    compute_weight: float = 0.4
    network_weight: float = 0.2
    """Weights of the load score that stands in for a speed before the first measurement."""

    hybrid_balance_weight: float = 0.5
    """Weight of ``load_balanced`` in ``hybrid``; one of the three weights must be positive."""
    hybrid_performance_weight: float = 0.25
    """Weight of ``performance_optimized`` in ``hybrid``."""
    hybrid_memory_weight: float = 0.25
    """Weight of ``memory_aware`` in ``hybrid``."""
    heavy_margin_frac: float = 0.25
    """How much more memory (io) than compute a cell must cost, each by its mean, to be memory-heavy (io-bound)."""
    head_margin_frac: float = 0.1
    """How far below the mean speed (free memory) a replica may be that takes from the heavy end of the queue."""
    middle_frac: float = 0.05
    """Part of the work, in the lightest cells, that stands where takers from both ends of the queue meet."""

    memory_pressure_threshold_frac: float = 0.8
    """Used part of the fullest replica's memory above which ``memory_aware`` is chosen."""
    performance_pressure_threshold_frac: float = 0.8
    """Target over measured throughput above which ``performance_optimized`` is chosen."""
    load_imbalance_threshold_frac: float = 0.5
    """(max - min) / (max + min) of the load scores above which ``load_balanced`` is chosen."""
    switch_hysteresis_frac: float = 0.1
    """How far below its threshold a pressure must fall before its policy is left."""
    switch_dwell_s: float = 5.0
    """Least time between two decisions for another policy."""
    switch_settle_s: float = 1.0
    """Time after a switch that is not measured: what was claimed before still runs in the old order."""
    switch_trial_s: float = 4.0
    """Time over which the throughput before and after a switch is measured."""
    switch_trial_steps: int = 8
    """Usual steps that this time has at least, however long they are."""
    switch_regret_frac: float = 0.05
    """A switch after which the throughput is lower by more than this is undone."""
    switch_retry_s: float = 30.0
    """Time before an undone switch is tried again; twice as long each time that it is undone again."""
    self_check_s: float = 10.0
    """Balancing is turned off when it costs more than it gains for this long."""
    overhead_tolerated_frac: float = 0.02
    """Part of the time that balancing may cost in any case: it guards against what has not happened yet."""
    max_schedules: int = 100
    """Most plan versions that the history holds."""
    trimmed_schedules: int = 50
    """To how many of the newest the history is cut when it is full."""
    recorded_steps: int = 2048
    """How many of the newest steps of each replica are kept for `callback.recording`; 0: none."""
    recent_schedules: int = 10
    """How many of the newest the statistics show as the recent ones."""

    claim_frac: float = 0.5
    """Part of its fair share of the unclaimed cells that a replica claims at once (guided self-scheduling)."""
    reserve_frac: float = 0.25
    """Part of the time left that a replica may hold as cells which cannot be stolen."""
    reserve_ahead_s: float = 0.25
    """Most seconds of work that a replica holds as cells which cannot be stolen; one cell may last longer."""
    publish_period_s: float = 0.2
    """How often a replica publishes its record and reads the others'."""
    most_exchanges_per_s: float = 5000.0
    """How often all replicas together do that at most: of very many, each does it less often."""
    look_replicas: int = 64
    """Most other replicas whose records one look reads; of more, each look reads a sample."""
    endgame_poll_s: float = 0.01
    """How often a replica without work looks for some; more often where steps are shorter than ten times this."""
    stream_ahead_s: float = 0.02
    """How long before a replica is expected to ask for it the next batch of a stream is claimed."""
    claim_deadline_s: float = 1800.0
    """Longest wait during which no replica finishes a step; as long as a process group of torch waits by default."""
    alarm_grace_s: float = 2.0
    """How long a failing replica 0, which holds the store, waits at most for the others to learn why it fails."""
    lease_s: float | None = None
    """A replica whose progress stands still this long is taken for dead, and its claims are taken over when as long
    again nobody else has spoken of them; ``None``: never. It must be longer than the longest step, or a living replica
    is taken for dead and its cell run twice."""

    speed_window_steps: int = 5
    """Steps whose median is the current speed."""
    speed_change_frac: float = 0.1
    """Lockstep shares move only when a speed differs by more than this from the one they were cut for."""
    in_flight_steps: int = 2
    """Most steps that run ahead of an asynchronous device."""
    lockstep_block_rounds: int = 8
    """Rounds that one published plan of lockstep covers once speeds are known."""

    gather_chunk_bytes: int = 16 * 2**20
    """Most bytes of results that one rank sends in one piece."""
    count_flops: bool = False
    """Whether every rank runs one step more, before its first one and without a trace, whose operations are counted for
    ``callback.system_state``."""
    device_period_s: float = 1.0
    """How often the state of the device is read."""
    comm_probe: CommProbeOption = "quick"
    """What is measured of the links before the first step: a few pairs (0.2 s at most), all pairs (2 s), or nothing."""
    comm_probe_patience_s: float = 5.0
    """Longest wait for the other ranks to be ready for that; nothing is measured where one is not."""
    straggler_threshold_frac: float = 0.25
    """How much slower than the median of the others a replica must be to be called a straggler."""

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for field in fields(self):
            check_type(field.name, getattr(self, field.name), hints[field.name])
        for name, low, high in _RANGES:
            check_range(name, getattr(self, name), low, high)
        weights = self.hybrid_balance_weight, self.hybrid_performance_weight, self.hybrid_memory_weight
        if not any(weights):
            raise ConfigError("hybrid_balance_weight", 0, "be positive where the two other weights of hybrid are 0")

    def exchange_period_s(self, num_replicas: int, step_s: float | None = None, left_s: float | None = None) -> float:
        """How often each of that many replicas publishes its record and reads the others'.

        Where each look reads a sample only, not more often than it finishes a step of ``step_s``, and less often
        while ``left_s``, the time to the end, is long.
        """
        period_s = max(self.publish_period_s, num_replicas / self.most_exchanges_per_s)
        if num_replicas <= self.look_replicas:
            return period_s
        return max(period_s, step_s or 0.0, min(_LOOK_AHEAD * (left_s or 0.0), self.switch_dwell_s))

    def but(self, **given: Any) -> HybridConfig:
        """This config with other values for the fields in ``given``."""
        return replace(self, **given)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str], **given: Any) -> HybridConfig:
        """A config with ``LIGHTNING_HYBRID_<FIELD>`` of ``environment`` for the fields that ``given`` leaves out.

        Values are parsed by the field's type; ``none`` (any case) is ``None``.

        Raises:
            ConfigError: a variable names no field, or its text does not parse.
        """
        hints = get_type_hints(cls)
        values: dict[str, Any] = {}
        for variable, text in environment.items():
            if not variable.startswith(ENVIRONMENT_PREFIX):
                continue
            name = variable.removeprefix(ENVIRONMENT_PREFIX).lower()
            if name not in hints:
                raise ConfigError(variable, text, f"name a field of HybridConfig ({', '.join(sorted(hints))})")
            values[name] = parse(variable, text, hints[name])
        return cls(**(values | given))


_RANGES: tuple[tuple[str, float, float], ...] = (
    ("micro_batch_size", 1, math.inf),
    ("max_micro_batch_size", 1, math.inf),
    ("memory_weight", 0, math.inf),
    ("compute_weight", 0, math.inf),
    ("network_weight", 0, math.inf),
    ("target_throughput_per_s", POSITIVE, math.inf),
    ("hybrid_balance_weight", 0, math.inf),
    ("hybrid_performance_weight", 0, math.inf),
    ("hybrid_memory_weight", 0, math.inf),
    ("heavy_margin_frac", 0, math.inf),
    ("head_margin_frac", 0, 1),
    ("middle_frac", 0, 1),
    ("memory_pressure_threshold_frac", 0, 1),
    ("performance_pressure_threshold_frac", 0, math.inf),
    ("load_imbalance_threshold_frac", 0, 1),
    ("switch_hysteresis_frac", 0, math.inf),
    ("switch_dwell_s", 0, math.inf),
    ("switch_settle_s", 0, math.inf),
    ("switch_trial_s", POSITIVE, math.inf),
    ("switch_trial_steps", 0, math.inf),
    ("switch_regret_frac", 0, 1),
    ("switch_retry_s", 0, math.inf),
    ("self_check_s", 0, math.inf),
    ("overhead_tolerated_frac", 0, 1),
    ("max_schedules", 1, math.inf),
    ("trimmed_schedules", 1, math.inf),
    ("recorded_steps", 0, math.inf),
    ("recent_schedules", 1, math.inf),
    ("max_errors", 0, math.inf),
    ("memory_limit_bytes", 1, math.inf),
    ("memory_safety_frac", POSITIVE, 1),
    ("claim_frac", POSITIVE, 1),
    ("reserve_frac", 0, 1),
    ("reserve_ahead_s", 0, math.inf),
    ("publish_period_s", POSITIVE, math.inf),
    ("most_exchanges_per_s", POSITIVE, math.inf),
    ("look_replicas", 1, math.inf),
    ("endgame_poll_s", POSITIVE, math.inf),
    ("stream_ahead_s", 0, math.inf),
    ("claim_deadline_s", POSITIVE, math.inf),
    ("alarm_grace_s", 0, math.inf),
    ("lease_s", POSITIVE, math.inf),
    ("speed_window_steps", 1, math.inf),
    ("speed_change_frac", 0, math.inf),
    ("in_flight_steps", 1, math.inf),
    ("lockstep_block_rounds", 1, math.inf),
    ("gather_chunk_bytes", 1, math.inf),
    ("device_period_s", POSITIVE, math.inf),
    ("comm_probe_patience_s", 0, math.inf),
    ("straggler_threshold_frac", 0, math.inf),
)
