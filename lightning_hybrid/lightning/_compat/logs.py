"""Private names of Lightning and torchmetrics around logged values and metrics."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from lightning_hybrid.lightning._compat.packages import package_of
from lightning_hybrid.lightning.patches import Patches
from lightning_hybrid.runtime.metrics import Partial, Reduction
from lightning_hybrid.runtime.spec import Stage

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer


def hook_epoch_end(patches: Patches, trainer: Trainer, make: Callable[[Any], Any]) -> None:
    """Replaces what the evaluation loop calls when a loader is used up, right before epoch values are computed."""
    patches.replace(trainer._logger_connector, "epoch_end_reached", make)


class Logged(NamedTuple):
    """One rank's part of a logged number, and what Lightning knows of the number."""

    part: Partial
    fields: dict[str, Any]


_META = ("fx", "name", "prog_bar", "logger", "on_step", "on_epoch", "add_dataloader_idx", "dataloader_idx")


def logged(trainer: Trainer, stage: Stage) -> dict[str, Logged]:
    """This rank's part of every number logged per batch of the present loader whose epoch value is due."""
    found = {}
    for key, metric in _due(trainer, stage):
        part = Partial(_reduction(metric), float(metric.value), float(getattr(metric, "cumulated_batch_size", 0)))
        found[key] = Logged(part, {name: getattr(metric.meta, name) for name in _META})
    return found


def set_epoch_values(trainer: Trainer, stage: Stage, values: dict[str, float], logs: dict[str, Logged]) -> list[str]:
    """Sets epoch values, so that Lightning does not reduce them again.

    ``logs`` are the numbers that any rank logged. One that this rank did not log, as from a hook that did not fire
    here or a step that logs only for some batches, is reported here all the same.

    Returns:
        The keys of those, to be given to `forget` once they were reported.
    """
    due = dict(_due(trainer, stage))
    adopted = [key for key in values if key not in due]
    due |= {key: _adopted(trainer, key, logs[key]) for key in adopted}
    for key, value in values.items():
        due[key]._computed = due[key].value.new_tensor(value)
    return adopted


def forget(trainer: Trainer, keys: list[str]) -> None:
    """Removes adopted numbers, which the user's next log of the same name would not match."""
    results: Any = trainer._results
    for key in keys:
        results.pop(key, None)


def _adopted(trainer: Trainer, key: str, log: Logged) -> Any:
    module = importlib.import_module(f"{package_of(trainer).__name__}.trainer.connectors.logger_connector.result")
    meta = module._Metadata(**log.fields, reduce_fx=log.part.reduction)
    meta.sync = module._Sync()
    results: Any = trainer._results
    metric = results[key] = module._ResultMetric(meta, is_tensor=True).to(trainer.strategy.root_device)
    metric._update_count = 1
    return metric


def _due(trainer: Trainer, stage: Stage) -> Iterator[tuple[str, Any]]:
    results = trainer._results
    assert results is not None
    hook = "validation" if stage == "validate" else stage
    per_batch = {f"{hook}_step", f"on_{hook}_batch_start", f"on_{hook}_batch_end"}
    for key, metric in results.valid_items():
        meta = metric.meta
        is_ours = metric.is_tensor and meta.on_epoch and not meta.sync.rank_zero_only
        if is_ours and metric._computed is None and meta.fx.split(".")[0] in per_batch:
            yield key, metric


def _reduction(metric: Any) -> Reduction:
    meta = metric.meta
    if meta.is_mean_reduction:
        return "mean"
    if meta.is_sum_reduction:
        return "sum"
    return "max" if meta.is_max_reduction else "min"


@contextmanager
def logs_taken_back(trainer: Trainer) -> Iterator[None]:
    """Undoes what is logged inside: known numbers get their values back, new ones the neutral element."""
    before = {key: _state(metric) for key, metric in (trainer._results or {}).items() if metric.is_tensor}
    yield
    for key, metric in (trainer._results or {}).items():
        if metric.is_tensor:
            neutral = {name: default.clone().to(metric.value.device) for name, default in metric._defaults.items()}
            for name, value in before.get(key, neutral | {"_computed": None}).items():
                setattr(metric, name, value)


def _state(metric: Any) -> dict[str, Any]:
    # not ``has_reset``: a key that the step logs must be due on every rank, or their collectives do not match
    return {name: getattr(metric, name) for name in [*metric._defaults, "_forward_cache", "_computed"]}


@contextmanager
def metrics_taken_back(module: LightningModule) -> Iterator[None]:
    """Undoes what torchmetrics below ``module`` take in inside."""
    metrics = _metrics_of(module)
    saved = [(metric, metric._update_count, _metric_state(metric)) for metric in metrics]
    yield
    for metric, count, state in saved:
        if metric._update_count == count:
            continue
        for name, value in state.items():
            setattr(metric, name, value)
        # it counts as updated and not computed yet: what it does at the epoch's end must be what it does elsewhere
        metric._update_count, metric._computed = max(1, count), None


def _metric_state(metric: Any) -> dict[str, Any]:
    states = {name: getattr(metric, name) for name in metric._defaults}
    kept = {name: list(s) if isinstance(s, list) else s.detach().clone() for name, s in states.items()}
    return kept | {"_forward_cache": metric._forward_cache}


# --- steps that are run again, or in parts ---------------------------------------------------------------------------


_COUNTERS = ["_update_count", "_computed", "_forward_cache"]
_LOG = ("value", "_update_count", "_computed", "_forward_cache", "has_reset")


def metric_states(module: LightningModule) -> list[tuple[dict[str, Any], list[str], list[str]]]:
    """For each torchmetric below ``module`` all its attributes, the names of its states, and those of its counters."""
    return [(vars(metric), list(metric._defaults), _COUNTERS) for metric in _metrics_of(module)]


def logged_now(log: Any) -> dict[str, Any]:
    """The attributes of a logged number that the next log of it changes."""
    attributes = vars(log)
    kept = {name: attributes[name] for name in _LOG}
    if "cumulated_batch_size" in attributes:
        kept["cumulated_batch_size"] = attributes["cumulated_batch_size"]
    return kept


def results_of(trainer: Trainer) -> dict[str, Any] | None:
    """The numbers that were logged in the present loop, by key; ``None`` where nothing can be logged."""
    return trainer._results


def _metrics_of(module: LightningModule) -> list[Any]:
    from torchmetrics import Metric

    return [child for child in module.modules() if isinstance(child, Metric)]


class PartLogs:
    """Makes what the parts of a batch log one log of the whole batch.

    Means are weighted by samples, sums are added. A ``batch_size=`` of the user's that is that of the part counts as
    such; one that is the same for parts of all sizes is that of the whole batch.

    Args:
        trainer: The running Trainer.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._results: Any = trainer._results
        self._parts: list[tuple[int, dict[str, tuple[Any, int]]]] = []
        self._part: dict[str, tuple[Any, int]] = {}
        self._patches = Patches()
        if self._results is not None:
            self._whole = self._results.batch, self._results.batch_size
            self._patches.replace(self._results, "update_metrics", self._noting)

    def begin(self, part: Any) -> None:
        """The next part is about to be run; again when it failed."""
        self._part = {}
        if self._results is not None:
            self._results.batch, self._results.batch_size = part, None

    def end(self, size: int) -> None:
        """It was run."""
        self._parts.append((size, self._part))

    def close(self) -> None:
        """Logs for the whole batch, unless nothing was run."""
        self._patches.undo()
        if self._results is None:
            return
        self._results.batch, self._results.batch_size = self._whole
        for key in dict.fromkeys(key for _, part in self._parts for key in part):
            logs = [(size, *part[key]) for size, part in self._parts if key in part]
            self._results.update_metrics(key, *_whole_log(logs, _reduction(self._results[key])))

    def _noting(self, original: Any) -> Any:
        def update_metrics(key: str, value: Any, batch_size: int) -> None:
            if self._results[key].is_tensor:
                self._part[key] = value, batch_size
                self._results[key].has_reset = False
            else:
                original(key, value, batch_size)

        return update_metrics


def _whole_log(logs: list[tuple[int, Any, int]], reduction: Reduction) -> tuple[Any, int]:
    """Value and batch size of the whole batch, from (samples, value, batch size) of its parts."""
    sizes, values, batch_sizes = zip(*logs, strict=True)
    if reduction == "mean":
        is_of_whole = len(set(batch_sizes)) == 1 and batch_sizes != sizes
        weights = sizes if is_of_whole else batch_sizes
        mean = sum(value * (weight / sum(weights)) for value, weight in zip(values, weights, strict=True))
        return mean, batch_sizes[0] if is_of_whole else sum(batch_sizes)
    if reduction == "sum":
        return sum(values), sum(batch_sizes)
    stacked = torch.stack([torch.as_tensor(value) for value in values])
    return stacked.amax(0) if reduction == "max" else stacked.amin(0), sum(batch_sizes)
