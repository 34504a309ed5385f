"""What rank zero logs of other ranks' scripted GPUs, and what a driver that fails does to a run."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lightning_hybrid import DeviceStateMonitor, HybridBalanceCallback
from tests.lightning.devices import (
    Model,
    Scripted,
    csv_columns,
    csv_logger,
    monitored,
    run,
    steps_of,
    threads_of_ours,
    wait_until,
)
from tests.lightning.scenes import ids
from tests.probes.nvml_library import calls, compiled, gpu, write
from tests.ranks import run_ranks

DEADLINE_S = 40.0

# the model validates in other runs
pytestmark = pytest.mark.filterwarnings("ignore:You defined a `validation_step` but have no `val_dataloader`")


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("nvml"))


def played(function: Callable[..., Any], world: int, script: Path, *arguments: Any) -> list[Any]:
    """What ``function(rank, *arguments)`` returns on ranks whose NVML plays ``script``."""
    environment = {"NVML_SCRIPT": str(script), "NVML_CALLS": str(script.with_suffix(".calls"))}
    return run_ranks(function, world, *arguments, deadline_s=DEADLINE_S, env=environment)


def monitor_of(module: Any) -> DeviceStateMonitor:
    return next(each for each in module.trainer.callbacks if isinstance(each, DeviceStateMonitor))


def all_known(module: Any) -> bool:
    """Whether rank zero knows the power of both GPUs; the other rank knows nothing of it, and does not wait."""
    powers = [state.power_w for state in monitor_of(module).states.values()]
    return module.global_rank > 0 or (len(powers) == 2 and None not in powers)


# --- two ranks -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stage", ["fit", "validate", "predict"])
@pytest.mark.parametrize("is_balanced", [False, True], ids=["alone", "balanced"])
def test_rank_zero_logs_the_gpu_of_every_rank(stage: str, is_balanced: bool, library: Path, tmp_path: Path) -> None:
    def rank(rank: int) -> Any:
        monitor = DeviceStateMonitor(device_period_s=0.02, most_overhead_frac=1.0, probe=Scripted(library))
        others = [HybridBalanceCallback()] if is_balanced else []
        model = Model(lambda module, _: wait_until(lambda: all_known(module)))
        trainer = monitored(2, monitor, *others, logger=csv_logger(tmp_path / str(rank)))
        run(trainer, stage, model, ids(40))
        wait_until(lambda: threads_of_ours() == [])
        return [[state.power_w for state in monitor.states.values()], threading.get_native_id()]

    script = tmp_path / "gpus.txt"
    write(script, gpu(0, power=100_000), gpu(1, power=200_000, memory__used=2**30))

    found = played(rank, 2, script)

    assert [powers for powers, _ in found] == [[100.0, 200.0], [200.0]]
    columns = csv_columns(tmp_path / "0")
    assert {value for _, value in columns[f"devices/{stage}/power_w/rank0"]} == {100.0}
    assert {value for _, value in columns[f"devices/{stage}/power_w/rank1"]} == {200.0}
    assert columns[f"devices/{stage}/memory_used_gib/rank1"][-1][1] == 1.0
    assert [key for key in columns if "/replica" in key and key.startswith("devices/")] == []
    last = 10 if stage == "fit" else 40
    for number in (0, 1):
        steps = steps_of(columns, f"devices/{stage}/power_w/rank{number}")
        assert steps[-1] == last
        assert steps == sorted(set(steps))
    assert not [key for key in csv_columns(tmp_path / "1") if key.startswith("devices/")]
    stepping = {thread for _, thread in found}
    noted = calls(script.with_suffix(".calls"))
    assert len(noted) > 20
    assert stepping.isdisjoint({thread for thread, _, _ in noted})


def test_two_runs_on_one_trainer_end_with_the_last_one_known(library: Path, tmp_path: Path) -> None:
    def rank(rank: int) -> list[int]:
        monitor = DeviceStateMonitor(device_period_s=0.02, most_overhead_frac=1.0, probe=Scripted(library))
        trainer = monitored(2, monitor, logger=csv_logger(tmp_path) if rank == 0 else False)
        for _ in range(2):
            run(trainer, "validate", Model(lambda module, _: wait_until(lambda: all_known(module))), ids(6))
        return sorted(monitor.states)

    script = tmp_path / "gpus.txt"
    write(script, gpu(0), gpu(1))

    assert played(rank, 2, script) == [[0, 1], [1]]
    steps = steps_of(csv_columns(tmp_path), "devices/validate/power_w/rank1")
    assert (steps[0], steps[-1]) == (4, 12)


# --- drivers that fail -----------------------------------------------------------------------------------------------


def test_a_gpu_lost_in_the_run_is_shown_as_lost_and_the_run_goes_on(library: Path, tmp_path: Path) -> None:
    script = tmp_path / "gpus.txt"

    def rank(_: int) -> Any:
        def during(module: Any, batch_idx: int) -> None:
            if batch_idx == 3:
                write(script, gpu(0, lost=1))
            is_active = batch_idx < 3
            wait_until(lambda: monitor_of(module).states[0].active is is_active)

        monitor = DeviceStateMonitor(device_period_s=0.01, most_overhead_frac=1.0, probe=Scripted(library))
        run(monitored(1, monitor, logger=csv_logger(tmp_path)), "predict", Model(during), ids(12))
        return monitor.states[0].error

    write(script, gpu(0))

    assert played(rank, 1, script) == ["the GPU is lost: it fell off the bus"]
    columns = csv_columns(tmp_path)
    shown = [value for _, value in columns["device_health/predict/active/rank0"]]
    assert (shown[0], shown[-1]) == (1.0, 0.0)
    assert shown == sorted(shown, reverse=True)
    assert max(steps_of(columns, "devices/predict/power_w/rank0")) <= 6


def test_a_driver_that_hangs_delays_neither_the_steps_nor_the_end(library: Path, tmp_path: Path) -> None:
    def rank(_: int) -> Any:
        began_s: list[float] = []
        monitor = DeviceStateMonitor(device_period_s=0.01, most_overhead_frac=1.0, probe=Scripted(library))
        trainer = monitored(1, monitor, logger=csv_logger(tmp_path))
        run(trainer, "validate", Model(lambda *_: began_s.append(time.perf_counter())), ids(200))
        return time.perf_counter() - began_s[0]

    script = tmp_path / "gpus.txt"
    write(script, gpu(0), hang__nvmlDeviceGetPowerUsage=10)

    (seconds,) = played(rank, 1, script)

    assert seconds < 5.0  # half a second of waiting for a first reading at the end, in it
    assert csv_columns(tmp_path) == {}


def in_a_process(function: Callable[..., None], *arguments: Any, method: str = "fork") -> float:
    """Seconds from the end of ``function`` to the end of its process."""
    context: Any = multiprocessing.get_context(method)
    ended_s = context.Value("d", 0.0)

    process = context.Process(target=_run_and_note, args=(function, arguments, ended_s))
    process.start()
    process.join(DEADLINE_S)
    gone_s = time.monotonic()
    if process.is_alive():
        process.kill()
        process.join()
    assert process.exitcode == 0
    return gone_s - ended_s.value


def _run_and_note(function: Callable[..., None], arguments: tuple[Any, ...], ended_s: Any) -> None:
    function(*arguments)
    ended_s.value = time.monotonic()


def test_a_driver_that_hangs_does_not_keep_the_process_alive(
    library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def predict() -> None:
        monitor = DeviceStateMonitor(device_period_s=0.01, most_overhead_frac=1.0, probe=Scripted(library))
        trainer = monitored(1, monitor, logger=False)
        began = lambda *_: wait_until(script.with_suffix(".calls").exists)  # noqa: E731
        run(trainer, "predict", Model(began), ids(4))

    script = tmp_path / "gpus.txt"
    write(script, gpu(0), hang__nvmlDeviceGetCount_v2=90)
    monkeypatch.setenv("NVML_SCRIPT", str(script))
    monkeypatch.setenv("NVML_CALLS", str(script.with_suffix(".calls")))

    assert in_a_process(predict) < 10


# --- launchers that fork ---------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Experiment logs directory")  # the loggers' processes know nothing of each other
@pytest.mark.parametrize("strategy", ["ddp_fork", "ddp_spawn"])
def test_with_launchers_that_fork_or_spawn_the_axis_goes_on_from_run_to_run(strategy: str, tmp_path: Path) -> None:
    def tested_twice() -> None:
        world = 2 if strategy == "ddp_fork" else 1  # to spawn a rank takes seconds
        monitor = DeviceStateMonitor()
        options = {"strategy": strategy, "logger": csv_logger(tmp_path)}
        run(monitored(world, monitor, **options), "test", Model(), ids(8))
        run(monitored(world, monitor, **options | {"strategy": "ddp_fork"}), "test", Model(), ids(8))

    in_a_process(tested_twice)

    assert steps_of(csv_columns(tmp_path), "devices/test/process_memory_gib/rank0")[-1] == 16


def test_a_store_that_cannot_be_opened_costs_the_others_states_and_nothing_else(tmp_path: Path) -> None:
    def rank(_: int) -> Any:
        from lightning_hybrid.runtime import store as stores

        def refuse(_: Any) -> Any:
            raise RuntimeError("too many open files")

        before, stores._own_client = stores._own_client, refuse
        monitor = DeviceStateMonitor()
        trainer = monitored(2, monitor)
        try:
            trainer.predict(Model(), ids(4, 1))
        finally:
            stores._own_client = before
        trainer.predict(Model(), ids(4, 1))  # nothing of the first run stands in the way
        return sorted(monitor.states), threads_of_ours()

    for states, threads in run_ranks(rank, 2, deadline_s=DEADLINE_S):
        assert states
        assert threads == []
