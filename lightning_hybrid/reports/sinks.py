"""Writes snapshots and recommendations to the trainer's loggers.

The loggers are used by what they can do, not by their class, so nothing of Lightning or TensorBoard is imported here.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from lightning_hybrid.core.communication import CommunicationState
from lightning_hybrid.core.device_state import DeviceState
from lightning_hybrid.core.recommend import Recommendation, format_markdown
from lightning_hybrid.core.state import BalanceSnapshot
from lightning_hybrid.core.statistics import Statistics
from lightning_hybrid.reports.scalars import custom_scalars_layout, device_scalars, link_scalars, scalars

_log = logging.getLogger(__name__)


class MetricsLogger(Protocol):
    """What a logger must be able to do; every logger of Lightning can."""

    def log_metrics(self, metrics: Any, step: int | None = None) -> Any:
        """Record the numbers, a dict of floats, at this point of the x axis."""
        ...


class LoggerReport:
    """Writes to every logger of a trainer, on rank zero only.

    A logger gets the numbers of `lightning_hybrid.reports.scalars.scalars`. One whose experiment can show text (as
    TensorBoard's) gets the recommendations there under ``recommendations/<stage>``, the timeline of the policies under
    ``policies/<stage>``, and charts that show all replicas together; one that has a local log directory (as the CSV
    logger's) gets the texts in ``recommendations.md`` and ``policies.md`` beside its metrics. What was written is
    flushed, so that it survives a crash.

    The x axis of a stage never goes back: a smaller step than the stage's last one is raised to it, because
    TensorBoard's server drops what it had when the steps of a tag decrease.

    Keep one report for the Trainer's life: it remembers the last steps, and which charts were laid out.

    A logger that raises is named once in this package's log, with its error, and left alone from then on.

    Args:
        loggers: The trainer's loggers; none is fine.
    """

    def __init__(self, loggers: Iterable[MetricsLogger]) -> None:
        self._sinks = [_Sink(logger) for logger in loggers]
        self._devices: dict[str, dict[int, tuple[int, DeviceState]]] = {}

    def log_snapshot(self, snapshot: BalanceSnapshot, step: int, *, devices: bool = True) -> None:
        """Write the numbers of ``snapshot`` at ``step`` of the x axis, those of the ``devices`` too unless told not."""
        metrics = scalars(snapshot, devices=devices)
        for sink in self._sinks:
            sink.try_to(sink.write_metrics, snapshot.stage, metrics, step)

    def log_devices(self, states: Mapping[int, DeviceState], step: int, *, stage: str, again: bool = False) -> bool:
        """Write the numbers of the ranks' devices at ``step`` of the x axis, each rank's once at a point.

        Args:
            states: By rank. Those that were written last under this stage are left out, but with ``again``.
            step: The point.
            stage: Part of the tag, and whose axis it is.
            again: Write them all.

        Returns:
            Whether there was anything to write.
        """
        last = self._devices.setdefault(stage, {})
        news = {rank: state for rank, state in states.items() if last.get(rank, (None, None))[0] != step}
        if not again:
            news = {rank: state for rank, state in news.items() if last.get(rank, (None, None))[1] != state}
        metrics = device_scalars(stage, news)
        if not metrics:
            return False
        last.update({rank: (step, state) for rank, state in news.items()})
        for sink in self._sinks:
            sink.try_to(sink.write_metrics, stage, metrics, step, "devices")
        return True

    def log_recommendations(self, recommendations: Sequence[Recommendation], step: int, *, stage: str) -> None:
        """Write the text of ``recommendations``, unless it is the stage's last text again.

        An empty sequence is written only where it takes back recommendations that are on show.
        """
        text = format_markdown(recommendations)
        for sink in self._sinks:
            if sink.is_news(f"recommendations/{stage}", text, takes_back=not recommendations):
                sink.try_to(sink.write_text, stage, text, step)

    def log_policies(self, policies: Statistics, step: int, *, stage: str) -> None:
        """Write the numbers of one stage's policies, and their timeline as text unless it is the last text again."""
        metrics, text = policies.scalars(stage), policies.format_markdown()
        for sink in self._sinks:
            sink.try_to(sink.write_metrics, stage, metrics, step)
            if sink.is_news(f"policies/{stage}", text, takes_back=not policies.num_schedules):
                sink.try_to(sink.write_text, stage, text, step, "policies")

    def log_communication(self, communication: CommunicationState, step: int, *, stage: str) -> None:
        """Write what the links between ranks carry, as measured before the stage's first step."""
        metrics = link_scalars(communication, stage)
        for sink in self._sinks:
            sink.try_to(sink.write_metrics, stage, metrics, step)

    def close(self) -> None:
        """Flush every logger; the loggers themselves belong to the trainer and stay open."""
        for sink in self._sinks:
            sink.try_to(sink.flush)


class _Sink:
    """One logger, and what it was given last."""

    def __init__(self, logger: Any) -> None:
        self._logger = logger
        self._failed = False
        self._last_step: dict[str, int] = {}
        self._last_text: dict[str, str] = {}
        self._stages_in_layout: dict[str, list[str]] = {"balance": [], "devices": []}
        self._names_in_layout: set[str] = set()

    def try_to(self, write: Callable[..., None], *args: object) -> None:
        if self._failed:
            return
        try:
            write(*args)
        except Exception as err:
            self._failed = True
            _log.warning(
                "%s gets no more figures and recommendations of this package: it raised %s: %s",
                type(self._logger).__name__,
                type(err).__name__,
                err,
            )

    def write_metrics(self, stage: str, metrics: dict[str, float], step: int, page: str = "balance") -> None:
        if not metrics:
            return
        self._logger.log_metrics(dict(metrics), self._forward(stage, step))
        self._write_layout(page, stage, metrics)
        self.flush()

    def is_news(self, page: str, text: str, *, takes_back: bool) -> bool:
        last = self._last_text.get(page)
        return last != text and not (takes_back and last is None)

    def write_text(self, stage: str, text: str, step: int, page: str = "recommendations") -> None:
        step = self._forward(stage, step)
        self._last_text[f"{page}/{stage}"] = text
        add_text = self._ability("add_text")
        if add_text is not None:
            add_text(f"{page}/{stage}", text, step)
        else:
            self._append_to_text_file(f"{page}.md", f"## {stage}, step {step}\n\n{text.strip()}\n\n")
        self.flush()

    def flush(self) -> None:
        # Other experiments have a `flush` too that waits for the network: only one that is a summary writer is asked.
        writes_summaries = self._ability("add_text") is not None
        flush = self._ability("flush") if writes_summaries else getattr(self._logger, "save", None)
        if callable(flush):
            flush()

    def _forward(self, stage: str, step: int) -> int:
        self._last_step[stage] = max(int(step), self._last_step.get(stage, 0))
        return self._last_step[stage]

    def _write_layout(self, page: str, stage: str, metrics: Mapping[str, float]) -> None:
        names = {tag.split("/")[2] for tag in metrics} if page == "devices" else set()
        stages = self._stages_in_layout[page]
        if stage in stages and names <= self._names_in_layout:
            return
        add_custom_scalars = self._ability("add_custom_scalars")
        if add_custom_scalars is None:
            return
        self._names_in_layout |= names
        if stage not in stages:
            stages.append(stage)
        pages = self._stages_in_layout
        add_custom_scalars(custom_scalars_layout(pages["balance"], pages["devices"], self._names_in_layout))

    def _append_to_text_file(self, name: str, text: str) -> None:
        directory = getattr(self._logger, "log_dir", None)
        if not isinstance(directory, (str, os.PathLike)) or "://" in os.fspath(directory):
            return
        path = Path(directory) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(text)

    def _ability(self, name: str) -> Callable[..., object] | None:
        method = getattr(getattr(self._logger, "experiment", None), name, None)
        return method if callable(method) else None
