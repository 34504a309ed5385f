"""What the memory benchmark runs: Trainers on devices whose memory is emulated, and a real model under a limit."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import lightning.pytorch as pl
import torch
import torchmetrics
from torch import Tensor
from torch.utils.data import DataLoader

from benchmarks.ordering import Counted, TokenisedTexts
from benchmarks.trainers import quiet_trainer
from examples.embed_text import Collate
from lightning_hybrid import HybridBalanceCallback, HybridConfig
from lightning_hybrid.lightning.steps import Steps
from lightning_hybrid.probes.live_bytes import LiveBytes
from tests.lightning.scenes import Ids
from tests.memory_device import EmulatedMemory, metered

BATCH = 64
FIXED_S, PER_SAMPLE_S = 0.002, 0.0003
"""An emulated step takes so long, and so much more for each of its samples."""


# --- a capacity that shrinks and grows -------------------------------------------------------------------------------


def capacities(steps: int, seed: int) -> list[int]:
    """Samples that fit at each step: another number after 20 to 200 steps, from three tenths of a batch to a whole."""
    rng, found = random.Random(seed), []
    while len(found) < steps:
        found += [rng.randint(3 * BATCH // 10, BATCH)] * rng.randint(20, 200)
    return found[:steps]


class Emulated(pl.LightningModule):
    """Waits as long as a step takes; runs out of memory where a batch does not fit, or runs it in the right parts."""

    def __init__(self, fits: Sequence[int], *, knows: bool) -> None:
        super().__init__()
        self._fits, self._knows, self._step = fits, knows, 0
        self.device_memory = EmulatedMemory(lambda _: fits[self._step], bytes_per_element=1)
        self._times_s: list[float] = []

    @property
    def loop_s(self) -> float:
        """Seconds from the begin of the first step to the end of the last."""
        return self._times_s[-1] - self._times_s[0]

    def predict_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        """Twice the batch."""
        self._step = batch_idx
        self._times_s.append(time.perf_counter())
        if self._knows:
            parts = -(-len(batch) // self._fits[batch_idx])
            for part in batch.tensor_split(parts):
                time.sleep(FIXED_S + PER_SAMPLE_S * len(part))
        else:
            try:
                self.device_memory.allocate(batch)
            except torch.OutOfMemoryError:  # it got as far as the device was large
                time.sleep(FIXED_S + PER_SAMPLE_S * self._fits[batch_idx])
                raise
            time.sleep(FIXED_S + PER_SAMPLE_S * len(batch))
        self._times_s.append(time.perf_counter())
        return batch * 2


def shrinking(steps: int, seed: int) -> dict[str, Any]:
    """A device whose capacity changes at random, with its memory known and unknown, against one that knows it."""
    fits = capacities(steps, seed)
    changes = sum(now != before for before, now in itertools.pairwise(fits))
    oracle, known, blind = (Emulated(fits, knows=knows) for knows in (True, False, False))
    loader = DataLoader(Ids(BATCH * steps), BATCH)
    expected = _predicted(quiet_trainer(), oracle, loader)
    with metered(known.device_memory):
        found = _predicted(quiet_trainer(HybridBalanceCallback()), known, loader)
    found_blind = _predicted(quiet_trainer(HybridBalanceCallback()), blind, loader)
    return {
        "identical": torch.equal(found, expected) and torch.equal(found_blind, expected),
        "throughput_over_oracle": oracle.loop_s / known.loop_s,
        "wasted_work_frac": _wasted(known),
        "failed_attempts_per_change": known.device_memory.num_failed / changes,
        "blind_throughput_over_oracle": oracle.loop_s / blind.loop_s,
        "blind_wasted_work_frac": _wasted(blind),
        "blind_failed_attempts_per_change": blind.device_memory.num_failed / changes,
        "capacity_changes": changes,
    }


def _predicted(runner: pl.Trainer, model: pl.LightningModule, loader: DataLoader[Any]) -> Tensor:
    outputs: Any = runner.predict(model, loader)
    return torch.cat(outputs)


def _wasted(model: Emulated) -> float:
    attempts = model.device_memory.attempts
    return sum(each.samples for each in attempts if not each.ok) / sum(each.samples for each in attempts)


# --- asked for more than fits ----------------------------------------------------------------------------------------


def limited(limit: int, asked: int, batches: int) -> dict[str, Any]:
    """Batches of ``asked`` samples on a device whose memory is unknown and that ``limit`` samples fit into."""
    model = Emulated([limit] * asked * batches, knows=False)
    callback = HybridBalanceCallback(micro_batch_size="auto", max_micro_batch_size=asked)
    quiet_trainer(callback).predict(model, DataLoader(Ids(asked * batches), asked))
    sizes = [each.samples for each in model.device_memory.attempts]
    settled = int(median(sizes[len(sizes) // 2 :]))
    reported = callback.statistics.replicas[0].micro_batch_size if callback.statistics else None

    def per_s(size: int) -> float:
        return size / (FIXED_S + PER_SAMPLE_S * size)

    return {
        "settled_size": settled,
        "reported_size": reported,
        "attempts_to_settle": len(set(sizes)),
        "settled_throughput_frac": per_s(settled) / per_s(limit),
    }


# --- a real model ----------------------------------------------------------------------------------------------------


class Watched(Counted):
    """The example's model; where it is watched, it notes the most bytes that were alive in each step."""

    def __init__(self) -> None:
        super().__init__()
        self.is_watched = False
        self.peaks: list[int] = []

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """The embeddings of one batch."""
        if not self.is_watched:
            return super().predict_step(batch, batch_idx)
        with LiveBytes() as live:
            output = super().predict_step(batch, batch_idx)
        self.peaks.append(live.peak_bytes)
        return output


class RealModel:
    """The same texts with steps of fixed sizes and of the size that is found, heavy first."""

    def __init__(self, texts: Sequence[str], limit_bytes: int) -> None:
        self._model = Watched()
        self._limit_bytes = limit_bytes
        self._tokenizer = Collate().tokenizer
        self._data = TokenisedTexts(texts, self._tokenizer)

    def cpu_s(self, size: int | None) -> float:
        """Seconds of the process for one pass; ``None``: with the size that is found."""
        began_s = time.process_time()
        self._predict(size)
        return time.process_time() - began_s

    def peaks(self, size: int | None) -> list[int]:
        """The most bytes alive in each step of a pass."""
        self._model.is_watched, self._model.peaks = True, []
        self._predict(size)
        self._model.is_watched = False
        return self._model.peaks

    def embeddings(self, size: int | None) -> Tensor:
        """Of all texts."""
        return self._predict(size)

    def _predict(self, size: int | None) -> Tensor:
        def pad(samples: list[list[int]]) -> dict[str, Tensor]:
            return dict(self._tokenizer.pad({"input_ids": samples}, return_tensors="pt"))

        callback = HybridBalanceCallback(cost="input_ids")
        if size is None:
            config = HybridConfig(memory_limit_bytes=self._limit_bytes)
            callback = HybridBalanceCallback(
                cost="input_ids", micro_batch_size="auto", max_micro_batch_size=256, config=config
            )
        return _predicted(quiet_trainer(callback), self._model, DataLoader(self._data, size or 16, collate_fn=pad))


# --- overhead --------------------------------------------------------------------------------------------------------


class WithMetrics(pl.LightningModule):
    """A step that does next to nothing but update 20 small metric states."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics = torch.nn.ModuleList([torchmetrics.MeanMetric() for _ in range(10)])

    def test_step(self, batch: Tensor, batch_idx: int) -> None:
        """Updates all metrics and logs a number."""
        for metric in self.metrics:
            metric.update(batch)
        self.log("mean", batch.mean(), batch_size=len(batch))


def overhead(steps: int) -> dict[str, Any]:
    """What the code around the user's step costs when nothing fails, in microseconds."""
    around_s: list[float] = []
    run = Steps.run

    def timed(self: Steps, epoch: Any, original: Callable[..., Any], args: Any, kwargs: Any, elements: Any) -> Any:
        inside_s = 0.0

        def step(*args: Any, **kwargs: Any) -> Any:
            nonlocal inside_s
            began_s = time.perf_counter()
            output = original(*args, **kwargs)
            inside_s = time.perf_counter() - began_s
            return output

        began_s = time.perf_counter()
        output = run(self, epoch, step, args, kwargs, elements)
        around_s.append(time.perf_counter() - began_s - inside_s)
        return output

    Steps.run = timed  # type: ignore[method-assign]
    try:
        quiet_trainer(HybridBalanceCallback()).test(WithMetrics(), DataLoader(Ids(4 * steps), 4), verbose=False)
    finally:
        Steps.run = run  # type: ignore[method-assign]
    return {"recovery_us_per_step": 1e6 * median(around_s)}
