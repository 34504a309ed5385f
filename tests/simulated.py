"""Simulated runs that tests of reports and pictures are told with."""

from __future__ import annotations

import numpy as np

from lightning_hybrid.core.cost import Costs
from lightning_hybrid.core.simulated import Origin, SimulatedRun, SimulatedStep, Workload
from lightning_hybrid.core.traces import SpeedTrace

DEALT, HYBRID, STOLEN = Origin(None, False), Origin("hybrid", False), Origin("hybrid", True)


def run_of(*steps: tuple[int, float, float, Origin], num_replicas: int = 2) -> SimulatedRun:
    """A run of these steps: replica, begin, end and origin of each; their cells are numbered."""
    return SimulatedRun(
        workload=Workload(
            costs=Costs(compute=np.array([stop - start for _, start, stop, _ in steps])),
            traces=(SpeedTrace.constant(1.0),) * num_replicas,
        ),
        steps=[SimulatedStep(r, cell, start, stop, origin) for cell, (r, start, stop, origin) in enumerate(steps)],
        makespan_s=max((stop for _, _, stop, _ in steps), default=0.0),
        store_requests=24,
        claims=4,
        cells_stolen=sum(origin.is_stolen for *_, origin in steps),
        out_of_memory=0,
    )
