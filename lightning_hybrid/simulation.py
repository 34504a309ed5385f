"""Runs the Trainer's scheduler in virtual time, on devices and cells of your choice or on a recorded run.

How well a replay tells what a run takes is ``replay(recording).makespan_s`` over ``.recorded_s``; what another policy
would have taken is ``replay(recording, policy=name).makespan_s``.

The file is not called ``simulate.py``, because a submodule of that name would take the place of the function
`lightning_hybrid.simulate` as soon as it was imported.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from lightning_hybrid.core.config import HybridConfig
from lightning_hybrid.core.cost import ArrayLike, Costs, check_costs
from lightning_hybrid.core.errors import ConfigError, CostError
from lightning_hybrid.core.policies import policy_names
from lightning_hybrid.core.recording import RecordedRun
from lightning_hybrid.core.selector import AUTO
from lightning_hybrid.core.simulate import Simulation
from lightning_hybrid.core.simulated import Workload
from lightning_hybrid.core.workloads import Device, devices, drawn_costs, traces_for
from lightning_hybrid.reports.simulated import SimulationResult

CELLS_PER_REPLICA = 50
"""How many cells are drawn where it is not said."""
_LATENCY_S = 2e-4


def simulate(
    speeds: str | Sequence[Device],
    *,
    costs: str | Path | ArrayLike | Costs = "equal",
    num_cells: int | None = None,
    batch_size: int = 1,
    costs_known: bool = True,
    policy: str | None = None,
    store_latency_s: float = _LATENCY_S,
    seed: int = 0,
    config: HybridConfig | None = None,
) -> SimulationResult:
    """Runs cells on devices in virtual time, by the queue, policies and selector that the Trainer runs by.

    A cell is what one replica runs in one step. One of cost 1 takes a device of speed 1 one second.

    Args:
        speeds: One entry per device: a speed, a `SpeedTrace`, or a text such as ``"6x1"``, ``"1..8"``,
            ``"drift:1:0.5:30"``, ``"sudden:1:10:0.25"``, ``"periodic:1:0.5:4"`` or ``"failing:1:10"`` (see
            `lightning_hybrid.core.workloads`); or such texts in one string, separated by commas.
        costs: ``"equal"``, ``"uniform:LOW:HIGH"`` or ``"lognormal:SIGMA"``, with a mean of 1; or one number per sample,
            or a file of them: text, separated by blanks, commas or lines, or ``.npy``; or `Costs` of the samples.
        num_cells: How many are drawn; 50 per device where it is not said.
        batch_size: Samples of a cell, where the costs of samples are given.
        costs_known: Whether the scheduler knows the costs before it runs the cells. Then heavy ones stand first, as the
            Trainer arranges them with ``cost=``.
        policy: A name, or ``auto``; in place of the one of ``config``.
        store_latency_s: Seconds of one request to the store that the replicas coordinate through.
        seed: Of everything that is drawn.
        config: Settings as in the Trainer. Where a device fails, ``lease_s`` must be set: after that time others take
            over its cells.

    Raises:
        ConfigError: an argument is not what it must be; names it, what was given, and the rule.
        CostError: a cost is negative, NaN, infinite or no number; names its index.

    Example:
        >>> from lightning_hybrid import simulate
        >>> result = simulate("3x1,0.25", costs="lognormal:1", num_cells=200)
        >>> result.exactly_once, result.over_bound < 1.05
        (True, True)
    """
    if seed < 0:
        raise ConfigError("seed", seed, "be at least 0")
    config = _with_policy(config or HybridConfig(), policy)
    found = devices(speeds, seed=seed)
    if isinstance(costs, str):
        cells = _drawn(costs, CELLS_PER_REPLICA * len(found) if num_cells is None else num_cells, batch_size, seed)
        cells = _heavy_first(cells) if costs_known else cells
    else:
        cells = _given(costs, num_cells, batch_size, is_ordered=costs_known)
    traces = traces_for(found, float(cells.compute.sum()))
    if config.lease_s is None and any(trace.speeds[-1] == 0 for trace in traces):
        raise ConfigError("lease_s", None, "be set where a device fails, or nobody takes over what it leaves")
    if not 0 <= store_latency_s < np.inf:
        raise ConfigError("store_latency_s", store_latency_s, "be at least 0 and finite")
    workload = Workload(costs=cells, traces=traces, costs_known=costs_known, store_latency_s=store_latency_s)
    return _run(workload, config)


def replay(
    recording: RecordedRun, *, policy: str | None = None, store_latency_s: float = _LATENCY_S
) -> SimulationResult:
    """Runs a recorded run of the Trainer again in virtual time, under the same policy or another one.

    The result's ``recorded_s`` is what the run took; ``makespan_s`` what it would have taken. A run in lockstep mode is
    run as a queue.

    Args:
        recording: Of the run: ``callback.recording``, or what `Recording.load` reads.
        policy: Instead of the one that it was run by.
        store_latency_s: Seconds of one request to the store.

    Raises:
        ConfigError: there is no such policy.
        PlanError: the recording holds no step.

    Example:
        >>> from lightning_hybrid.core.recording import RecordedRun, RecordedStep
        >>> steps = tuple(RecordedStep(n % 2, n, n + 1, n // 2, 1.0) for n in range(20))
        >>> result = replay(RecordedRun(stage="predict", mode="queue", num_replicas=2, steps=steps))
        >>> result.recorded_s, round(result.makespan_s)
        (10.0, 10)
    """
    workload = recording.to_workload(store_latency_s=store_latency_s)
    return _run(workload, _with_policy(recording.config, policy), recording)


def _with_policy(config: HybridConfig, policy: str | None) -> HybridConfig:
    config = config if policy is None else config.but(policy=policy)
    if config.policy != AUTO and config.policy not in policy_names():
        raise ConfigError("policy", config.policy, f"be one of {', '.join(map(repr, (AUTO, *policy_names())))}")
    return config


def _run(workload: Workload, config: HybridConfig, recording: RecordedRun | None = None) -> SimulationResult:
    simulation = Simulation(workload, config)
    run = simulation.run()
    return SimulationResult(run=run, statistics=simulation.history.statistics, config=config, recording=recording)


def _drawn(distribution: str, num_cells: int, batch_size: int, seed: int) -> Costs:
    if batch_size != 1:
        raise ConfigError("batch_size", batch_size, "be left out where the costs of cells are drawn")
    return drawn_costs(distribution, num_cells, seed=seed)


def _given(costs: Path | ArrayLike | Costs, num_cells: int | None, batch_size: int, *, is_ordered: bool) -> Costs:
    if num_cells is not None:
        raise ConfigError("num_cells", num_cells, "be left out where costs are given")
    if batch_size < 1:
        raise ConfigError("batch_size", batch_size, "be at least 1")
    samples = costs if isinstance(costs, Costs) else _checked(_read(costs) if isinstance(costs, Path) else costs)
    if is_ordered:
        samples = _heavy_first(samples)
    return samples.of_cells(np.append(np.arange(0, len(samples), batch_size), len(samples)))


def _heavy_first(costs: Costs) -> Costs:
    return costs.take(np.argsort(-costs.compute, kind="stable"))


def _checked(values: ArrayLike) -> Costs:
    if len(values) == 0:
        raise CostError("costs must have at least one entry, got none")
    return Costs(compute=check_costs(values, len(values)))


def _read(path: Path) -> ArrayLike:
    if path.suffix == ".npy":
        array: ArrayLike = np.load(path, allow_pickle=False)
        return array
    words = path.read_text(encoding="utf-8").replace(",", " ").split()
    try:
        return [float(word) for word in words]
    except ValueError:
        index, word = next((i, word) for i, word in enumerate(words) if not _is_number(word))
        raise CostError(f"cost of sample {index} must be a number, got {word!r} in {path}") from None


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True
