"""The numbers that go to the trainer's loggers, under the names that they get there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from lightning_hybrid.core.communication import CommunicationState
from lightning_hybrid.core.state import BalanceSnapshot, DeviceState, ReplicaRecord

_GIB = 2**30

_BALANCE_CHARTS = {
    "share of the samples": "share_frac",
    "speed in samples per second": "speed_samples_per_s",
    "busy fraction": "busy_frac",
}

_DEVICE_CHARTS = {
    "utilization, 0 to 1": "utilization_frac",
    "device memory in use, GiB": "memory_used_gib",
    "power, W": "power_w",
    "temperature, degrees Celsius": "temperature_celsius",
    "SM clock, MHz": "sm_clock_mhz",
    "CPU use of the machine, 0 to 1": "host_cpu_frac",
    "RAM of the rank's process, GiB": "process_memory_gib",
}


def scalars(snapshot: BalanceSnapshot, *, devices: bool = True) -> dict[str, float]:
    """Every known number of ``snapshot`` under its tag; what is not known is left out.

    The x axis is the number of samples done (``global_step`` inside ``fit``). Several loaders of one stage share their
    tags: the axis goes on counting.

    ======================================================  ========================================================
    key                                                     meaning
    ======================================================  ========================================================
    ``balance/<stage>/share_frac/replica<r>``               share of the finished samples that this replica did, 0..1
    ``balance/<stage>/speed_samples_per_s/replica<r>``      its speed now in samples of mean cost, without waiting
    ``balance/<stage>/busy_frac/replica<r>``                share of the wall time spent in the user's step, 0..1
    ``balance/<stage>/load_imbalance``                      (max - min) / (max + min) of busy times; 0 is even
    ``balance/<stage>/throughput_samples_per_s``            samples per second of all replicas together
    ``balance/<stage>/reused_samples``                      samples that were not run, because an equal one was
    ``balance/<stage>/overhead_us_per_step``                this package's own time per step, of the worst replica
    ``balance/<stage>/micro_batch_size/replica<r>``         mean samples of its newest steps, or of their parts
    ``balance/<stage>/memory_failures/replica<r>``          its steps that ran out of memory, once there are some
    ``balance/<stage>/failed_samples``                      samples that were left out, once there are some
    ``performance/<stage>/error_frac``                      the same over the finished samples, 0..1
    ``performance/<stage>/communication_frac/replica<r>``   share of its step time in collectives; lockstep only
    ``devices/<stage>/<name>/replica<r>``                   utilization, memory, power, heat, SM clock, host CPU, RAM
    ======================================================  ========================================================

    Args:
        snapshot: The records of all replicas.
        devices: Whether the replicas' devices are among them.

    Example:
        >>> records = (ReplicaRecord(replica=0, samples=3), ReplicaRecord(replica=1, samples=1))
        >>> run = dict(stage="test", mode="queue", loader_idx=0, epoch=0, samples_total=8)
        >>> scalars(BalanceSnapshot(replicas=records, **run))
        {'balance/test/share_frac/replica0': 0.75, 'balance/test/share_frac/replica1': 0.25}
    """
    found: dict[str, float | None] = {
        f"balance/{snapshot.stage}/load_imbalance": snapshot.load_imbalance,
        f"balance/{snapshot.stage}/throughput_samples_per_s": snapshot.throughput_per_s,
        f"balance/{snapshot.stage}/reused_samples": snapshot.samples_reused or None,
        f"balance/{snapshot.stage}/overhead_us_per_step": overhead_us_per_step(snapshot),
        f"balance/{snapshot.stage}/failed_samples": snapshot.samples_failed or None,
        f"performance/{snapshot.stage}/error_frac": snapshot.error_frac if snapshot.samples_failed else None,
    }
    for record in snapshot.replicas:
        for name, value in _replica_numbers(snapshot, record):
            found[f"balance/{snapshot.stage}/{name}/replica{record.replica}"] = value
        found[f"performance/{snapshot.stage}/communication_frac/replica{record.replica}"] = record.collective_frac
        if devices and record.device is not None:
            found |= _tagged(f"devices/{snapshot.stage}", f"replica{record.replica}", record.device, _DEVICE_NUMBERS)
    return {tag: float(value) for tag, value in found.items() if value is not None}


def device_scalars(stage: str, states: Mapping[int, DeviceState]) -> dict[str, float]:
    """Every known number of the ranks' devices under its tag; what is not known is left out.

    ====================================================  ==========================================================
    name in ``devices/<stage>/<name>/rank<r>``            meaning
    ====================================================  ==========================================================
    ``memory_used_gib``, ``memory_frac``                  device memory in use by all processes; its share of the total
    ``memory_allocated_gib``, ``memory_reserved_gib``     of this rank's tensors; held by its caching allocator
    ``memory_others_gib``                                 device memory of everybody but this rank's process
    ``utilization_frac``                                  share of the last sampling period with work on it, 0..1
    ``memory_utilization_frac``, ``sm_active_frac``,      share of time with memory traffic; of SMs busy, of tensor
    ``tensor_active_frac``, ``dram_active_frac``          cores busy; memory bandwidth over its peak; 0..1
    ``sm_clock_mhz``, ``memory_clock_mhz``                clocks
    ``temperature_celsius``                               of the GPU; ``memory_temperature_celsius`` of its memory
    ``power_w``, ``energy_kj``                            power drawn; energy since the probe's first reading
    ``pcie_tx_gib_per_s``, ``pcie_rx_gib_per_s``          sent and received by the device
    ``nvlink_tx_gib_per_s``, ``nvlink_rx_gib_per_s``      the same over all NVLinks
    ``host_cpu_frac``, ``host_memory_used_gib``           use of all cores of the rank's machine, 0..1; its RAM in use
    ``host_load_average``, ``host_temperature_celsius``   runnable processes, 1 min mean; hottest CPU sensor
    ``host_steal_frac``, ``host_throttled_frac``          CPU time taken by other machines; CPU quota periods used up
    ``process_memory_gib``                                RAM of this rank's process (resident set)
    ====================================================  ==========================================================

    ====================================================  ==========================================================
    name in ``device_health/<stage>/<name>/rank<r>``      meaning
    ====================================================  ==========================================================
    ``active``                                            1: the device answers, 0: it is lost
    ``power_capped``, ``thermally_slowed``                1: the clock is held down by power, by heat; else 0
    ``pcie_generation``, ``pcie_width``                   of the link now: lower than usual under load is a fault
    ``pcie_replays``, ``num_nvlinks_active``              packets sent again so far; NVLinks that are up
    ``ecc_corrected``, ``ecc_uncorrected``                memory errors since the driver started
    ``remapped_rows_corrected``, ``..._uncorrected``      memory rows replaced after such errors
    ``remapping_failed``, ``newest_xid``                  1: a row could not be replaced; number of the newest XID error
    ====================================================  ==========================================================

    Args:
        stage: Part of the tag.
        states: By rank.

    Example:
        >>> device_scalars("fit", {1: DeviceState(kind="cuda", power_w=250.0)})
        {'devices/fit/power_w/rank1': 250.0}
    """
    found: dict[str, float | None] = {}
    for rank, state in states.items():
        found |= _tagged(f"devices/{stage}", f"rank{rank}", state, _DEVICE_NUMBERS | _MORE_DEVICE_NUMBERS)
        found |= _tagged(f"device_health/{stage}", f"rank{rank}", state, _HEALTH_NUMBERS)
    return {tag: float(value) for tag, value in found.items() if value is not None}


def link_scalars(communication: CommunicationState, stage: str) -> dict[str, float]:
    """What is known of the links between ranks under its tags, measured before the stage began.

    ======================================================  ========================================================
    key                                                     meaning
    ======================================================  ========================================================
    ``performance/<stage>/link_latency_us``                 of a small message, of the pair where it is longest
    ``performance/<stage>/link_gib_per_s``                  of a large message, of the pair where it is lowest
    ``performance/<stage>/link_contention_frac``            1 - bandwidth of pairs at once / of each alone, 0..1
    ``performance/<stage>/all_reduce_latency_us``           of a small tensor, on the slowest rank
    ``performance/<stage>/all_reduce_bus_gib_per_s``        of a large one: tensor over time, times 2 (n - 1) / n
    ``performance/<stage>/host_to_device_gib_per_s/rank<r>``         copies from pageable memory
    ``performance/<stage>/host_to_device_pinned_gib_per_s/rank<r>``  copies from pinned memory
    ======================================================  ========================================================
    """
    group = communication.group
    found: dict[str, float | None] = {
        "link_latency_us": _us(communication.slowest_latency_s),
        "link_gib_per_s": _gib(communication.slowest_bandwidth_bytes_per_s),
        "link_contention_frac": communication.contention_frac,
        "all_reduce_latency_us": _us(group.all_reduce_latency_s),
        "all_reduce_bus_gib_per_s": _gib(group.bus_bandwidth_bytes_per_s),
    }
    for host in communication.hosts:
        found[f"host_to_device_gib_per_s/rank{host.rank}"] = _gib(host.pageable_bytes_per_s)
        found[f"host_to_device_pinned_gib_per_s/rank{host.rank}"] = _gib(host.pinned_bytes_per_s)
    return {f"performance/{stage}/{name}": value for name, value in found.items() if value is not None}


def overhead_us_per_step(snapshot: BalanceSnapshot) -> float | None:
    """This package's own microseconds per step on the loop's thread, of the replica where they are most."""
    known = [record.overhead_s_per_step for record in snapshot.replicas if record.overhead_s_per_step is not None]
    return 1e6 * max(known) if known else None


def custom_scalars_layout(
    stages: Iterable[str], devices: Iterable[str] = (), logged: Iterable[str] = ()
) -> dict[str, dict[str, tuple[str, list[str]]]]:
    """The layout for ``SummaryWriter.add_custom_scalars``: for each stage, charts that show all replicas together.

    TensorBoard otherwise gives each replica an auto-scaled chart of its own, where nobody sees the imbalance.

    Args:
        stages: Those of which `scalars` were logged.
        devices: Those of which `device_scalars` were logged.
        logged: The names of these; a chart of another would be empty.
    """
    names = set(logged)
    balance = {f"balance of {stage}": _charts(f"balance/{stage}", _BALANCE_CHARTS, "replica") for stage in stages}
    shown = {title: name for title, name in _DEVICE_CHARTS.items() if name in names}
    return balance | {f"devices in {stage}": _charts(f"devices/{stage}", shown, "rank") for stage in devices}


def _charts(group: str, charts: Mapping[str, str], each: str) -> dict[str, tuple[str, list[str]]]:
    # a logger's prefix comes before the tag, joined by a dash
    return {
        f"{title}, one line per {each}": ("Multiline", [f"(.*-)?{group}/{name}/{each}.*"])
        for title, name in charts.items()
    }


def _replica_numbers(snapshot: BalanceSnapshot, record: ReplicaRecord) -> Iterator[tuple[str, float | None]]:
    yield "share_frac", snapshot.share_frac(record)
    yield "speed_samples_per_s", snapshot.speed_of(record)
    yield "busy_frac", record.busy_frac
    yield "micro_batch_size", record.micro_batch_size
    yield "memory_failures", record.memory_failures or None


def _tagged(group: str, who: str, state: DeviceState, numbers: Mapping[str, _Number]) -> dict[str, float | None]:
    return {f"{group}/{name}/{who}": number(state) for name, number in numbers.items()}


def _us(seconds: float | None) -> float | None:
    return None if seconds is None else 1e6 * seconds


def _gib(num_bytes: float | None) -> float | None:
    return None if num_bytes is None else num_bytes / _GIB


def _held_down_by(*reasons: str) -> _Number:
    def number(state: DeviceState) -> float | None:
        found = state.clock_event_reasons
        return None if found is None else float(any(reason in found for reason in reasons))

    return number


def _newest_xid(state: DeviceState) -> float | None:
    return state.xid_events[-1] if state.xid_events else None


_Number = Callable[[DeviceState], float | None]

_DEVICE_NUMBERS: dict[str, _Number] = {
    "memory_used_gib": lambda state: _gib(state.memory_used_bytes),
    "memory_allocated_gib": lambda state: _gib(state.memory_allocated_bytes),
    "memory_frac": lambda state: state.memory_frac,
    "utilization_frac": lambda state: state.utilization_frac,
    "host_cpu_frac": lambda state: state.host_cpu_frac,
    "host_memory_used_gib": lambda state: _gib(state.host_memory_used_bytes),
    "process_memory_gib": lambda state: _gib(state.process_memory_bytes),
}
"""What everybody wants to know of a device, by name in its tag."""

_MORE_DEVICE_NUMBERS: dict[str, _Number] = {
    "memory_reserved_gib": lambda state: _gib(state.memory_reserved_bytes),
    "memory_others_gib": lambda state: _gib(state.memory_others_bytes),
    "memory_utilization_frac": lambda state: state.memory_utilization_frac,
    "sm_active_frac": lambda state: state.sm_active_frac,
    "tensor_active_frac": lambda state: state.tensor_active_frac,
    "dram_active_frac": lambda state: state.dram_active_frac,
    "sm_clock_mhz": lambda state: state.sm_clock_mhz,
    "memory_clock_mhz": lambda state: state.memory_clock_mhz,
    "temperature_celsius": lambda state: state.temperature_celsius,
    "memory_temperature_celsius": lambda state: state.memory_temperature_celsius,
    "power_w": lambda state: state.power_w,
    "energy_kj": lambda state: None if state.energy_j is None else state.energy_j / 1000,
    "pcie_tx_gib_per_s": lambda state: _gib(state.pcie_tx_bytes_per_s),
    "pcie_rx_gib_per_s": lambda state: _gib(state.pcie_rx_bytes_per_s),
    "nvlink_tx_gib_per_s": lambda state: _gib(state.nvlink_tx_bytes_per_s),
    "nvlink_rx_gib_per_s": lambda state: _gib(state.nvlink_rx_bytes_per_s),
    "host_load_average": lambda state: state.host_load_average,
    "host_temperature_celsius": lambda state: state.host_temperature_celsius,
    "host_steal_frac": lambda state: state.host_steal_frac,
    "host_throttled_frac": lambda state: state.host_throttled_frac,
}
"""What else there is of load, memory, heat and traffic."""

_HEALTH_NUMBERS: dict[str, _Number] = {
    "active": lambda state: state.active,
    "power_capped": _held_down_by("sw_power_cap", "hw_power_brake_slowdown"),
    "thermally_slowed": _held_down_by("sw_thermal_slowdown", "hw_thermal_slowdown"),
    "pcie_generation": lambda state: state.pcie_generation,
    "pcie_width": lambda state: state.pcie_width,
    "num_nvlinks_active": lambda state: state.num_nvlinks_active,
    "ecc_corrected": lambda state: state.ecc_corrected,
    "ecc_uncorrected": lambda state: state.ecc_uncorrected,
    "remapped_rows_corrected": lambda state: state.remapped_rows_corrected,
    "remapped_rows_uncorrected": lambda state: state.remapped_rows_uncorrected,
    "remapping_failed": lambda state: state.remapping_failed,
    "pcie_replays": lambda state: state.pcie_replays,
    "newest_xid": _newest_xid,
}
"""What says that a device is not well, or about to fail."""
