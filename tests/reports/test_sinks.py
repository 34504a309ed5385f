from __future__ import annotations

import csv
import logging
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger, TensorBoardLogger
from lightning.pytorch.loggers.logger import DummyLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout

from lightning_hybrid.core.device_state import DeviceState
from lightning_hybrid.core.recommend import Recommendation, format_markdown
from lightning_hybrid.core.state import BalanceSnapshot, ReplicaRecord
from lightning_hybrid.reports.sinks import LoggerReport

RECOMMENDATION = Recommendation(
    id="straggler/predict/replica1",
    kind="straggler",
    priority="high",
    action="Find out what slows replica 1 down",
    description="Replica 1 is slow.",
    evidence={"times_slower": 3.0},
    expected_gain_s=1.5,
    expected_gain_frac=0.25,
    how_to="Look.",
)


def snapshot_of(stage: Any = "predict", samples: int = 4, speed_per_s: float | None = None) -> BalanceSnapshot:
    records = (ReplicaRecord(replica=0, samples=samples, speed_per_s=speed_per_s), ReplicaRecord(replica=1, samples=4))
    return BalanceSnapshot(stage=stage, mode="queue", loader_idx=0, epoch=0, samples_total=40, replicas=records)


class RecordingLogger:
    """Keeps what it was given; it has neither an experiment nor a directory."""

    def __init__(self) -> None:
        self.calls: list[tuple[dict[str, float], int | None]] = []

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.calls.append((metrics, step))


class BrokenLogger(RecordingLogger):
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        super().log_metrics(metrics, step)
        raise ConnectionError("no route to the server")


@pytest.fixture
def tensorboard(tmp_path: Path) -> TensorBoardLogger:
    return TensorBoardLogger(tmp_path, name="tb")


@pytest.fixture
def csv_logger(tmp_path: Path) -> CSVLogger:
    return CSVLogger(tmp_path, name="csv")


def read_events(logger: TensorBoardLogger) -> EventAccumulator:
    events = EventAccumulator(logger.log_dir)
    events.Reload()
    return events


def read_rows(logger: CSVLogger) -> list[dict[str, str]]:
    with Path(logger.log_dir, "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def read_layout(logger: TensorBoardLogger) -> list[str]:
    newest = read_events(logger).Tensors("custom_scalars__config__")[-1]
    layout = Layout()
    layout.ParseFromString(newest.tensor_proto.string_val[0])
    return [category.title for category in layout.category]


def test_tensorboard_gets_the_numbers_before_anything_is_closed(tensorboard: TensorBoardLogger) -> None:
    report = LoggerReport([tensorboard])

    report.log_snapshot(snapshot_of(samples=4), step=8)
    report.log_snapshot(snapshot_of(samples=12), step=16)

    points = read_events(tensorboard).Scalars("balance/predict/share_frac/replica0")
    assert [(point.step, point.value) for point in points] == [(8, 0.5), (16, 0.75)]


def test_tensorboard_gets_the_text_as_markdown(tensorboard: TensorBoardLogger) -> None:
    LoggerReport([tensorboard]).log_recommendations([RECOMMENDATION], step=16, stage="predict")

    (point,) = read_events(tensorboard).Tensors("recommendations/predict/text_summary")
    assert point.step == 16
    assert point.tensor_proto.string_val[0].decode() == format_markdown([RECOMMENDATION])


def test_tensorboard_gets_the_shared_charts_once_per_stage(tensorboard: TensorBoardLogger) -> None:
    report = LoggerReport([tensorboard])

    report.log_snapshot(snapshot_of("predict"), step=8)
    report.log_snapshot(snapshot_of("predict"), step=16)
    assert read_layout(tensorboard) == ["balance of predict"]

    report.log_snapshot(snapshot_of("test"), step=8)
    assert read_layout(tensorboard) == ["balance of predict", "balance of test"]
    assert len(read_events(tensorboard).Tensors("custom_scalars__config__")) == 2


def test_a_smaller_step_is_raised_so_that_tensorboard_keeps_the_earlier_points(tensorboard: TensorBoardLogger) -> None:
    report = LoggerReport([tensorboard])

    for step in (8, 16, 2):
        report.log_snapshot(snapshot_of(), step=step)

    points = read_events(tensorboard).Scalars("balance/predict/share_frac/replica0")
    assert [point.step for point in points] == [8, 16, 16]


def test_each_stage_has_its_own_axis() -> None:
    logger = RecordingLogger()
    report = LoggerReport([logger])

    report.log_snapshot(snapshot_of("validate"), step=100)
    report.log_snapshot(snapshot_of("predict"), step=8)

    assert [step for _, step in logger.calls] == [100, 8]


def test_csv_gets_the_numbers_and_the_text_beside_them(csv_logger: CSVLogger) -> None:
    report = LoggerReport([csv_logger])

    report.log_snapshot(snapshot_of(samples=12), step=16)
    report.log_recommendations([RECOMMENDATION], step=16, stage="predict")

    assert read_rows(csv_logger) == [
        {
            "step": "16",
            "balance/predict/share_frac/replica0": "0.75",
            "balance/predict/share_frac/replica1": "0.25",
        }
    ]
    text = Path(csv_logger.log_dir, "recommendations.md").read_text()
    assert text == f"## predict, step 16\n\n{format_markdown([RECOMMENDATION])}\n\n"


def test_csv_keeps_its_rows_when_later_ones_have_more_keys(csv_logger: CSVLogger) -> None:
    report = LoggerReport([csv_logger])

    report.log_snapshot(snapshot_of(), step=8)
    report.log_snapshot(snapshot_of(speed_per_s=2.0), step=16)

    speeds = [row["balance/predict/speed_samples_per_s/replica0"] for row in read_rows(csv_logger)]
    assert speeds == ["", "2.0"]


def test_the_dummy_logger_that_answers_to_everything_is_harmless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    report = LoggerReport([DummyLogger()])

    report.log_snapshot(snapshot_of(), step=8)
    report.log_recommendations([RECOMMENDATION], step=8, stage="predict")
    report.close()

    assert caplog.records == []
    assert list(tmp_path.iterdir()) == []


def test_no_logger_is_fine() -> None:
    report = LoggerReport([])

    report.log_snapshot(snapshot_of(), step=8)
    report.log_recommendations([RECOMMENDATION], step=8, stage="predict")
    report.close()


def test_several_loggers_get_the_same(tensorboard: TensorBoardLogger, csv_logger: CSVLogger) -> None:
    LoggerReport([csv_logger, tensorboard]).log_snapshot(snapshot_of(samples=12), step=16)

    assert read_rows(csv_logger)[0]["balance/predict/share_frac/replica0"] == "0.75"
    assert read_events(tensorboard).Scalars("balance/predict/share_frac/replica0")[0].value == 0.75


def test_a_logger_that_raises_is_named_once_and_left_alone(caplog: pytest.LogCaptureFixture) -> None:
    broken, sound = BrokenLogger(), RecordingLogger()
    report = LoggerReport([broken, sound])

    with caplog.at_level(logging.WARNING):
        report.log_snapshot(snapshot_of(), step=8)
        report.log_snapshot(snapshot_of(), step=16)
        report.close()

    assert [record.getMessage() for record in caplog.records] == [
        "BrokenLogger gets no more figures and recommendations of this package:"
        " it raised ConnectionError: no route to the server"
    ]
    assert [step for _, step in broken.calls] == [8]
    assert [step for _, step in sound.calls] == [8, 16]


def test_a_logger_may_change_what_it_is_given() -> None:
    class Greedy(RecordingLogger):
        def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
            metrics.clear()

    sound = RecordingLogger()

    LoggerReport([Greedy(), sound]).log_snapshot(snapshot_of(), step=8)

    assert len(sound.calls[0][0]) == 2


def test_nothing_known_writes_nothing() -> None:
    logger = RecordingLogger()
    nothing = BalanceSnapshot(stage="test", mode="queue", loader_idx=0, epoch=0, samples_total=0, replicas=())

    LoggerReport([logger]).log_snapshot(nothing, step=0)

    assert logger.calls == []


def test_the_same_text_is_written_once(csv_logger: CSVLogger) -> None:
    report = LoggerReport([csv_logger])

    report.log_recommendations([RECOMMENDATION], step=8, stage="predict")
    report.log_recommendations([RECOMMENDATION], step=16, stage="predict")

    assert Path(csv_logger.log_dir, "recommendations.md").read_text().count("## predict") == 1


def test_an_empty_list_only_takes_back_what_is_on_show(csv_logger: CSVLogger) -> None:
    report = LoggerReport([csv_logger])

    report.log_recommendations([], step=8, stage="predict")
    assert not Path(csv_logger.log_dir, "recommendations.md").exists()

    report.log_recommendations([RECOMMENDATION], step=16, stage="predict")
    report.log_recommendations([], step=24, stage="predict")
    text = Path(csv_logger.log_dir, "recommendations.md").read_text()
    assert text.endswith("## predict, step 24\n\nNo recommendation.\n\n")


def test_a_remote_directory_gets_no_local_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    logger = RecordingLogger()
    logger.log_dir = "memory://runs/version_0"  # type: ignore[attr-defined]

    LoggerReport([logger]).log_recommendations([RECOMMENDATION], step=8, stage="predict")

    assert list(tmp_path.iterdir()) == []


def device(power_w: float | None, timestamp_s: float = 1.0) -> DeviceState:
    return DeviceState(kind="cuda", power_w=power_w, timestamp_s=timestamp_s)


def test_each_reading_of_a_device_is_written_once_per_stage() -> None:
    logger = RecordingLogger()
    report = LoggerReport([logger])
    report.log_devices({0: device(1.0), 1: device(5.0)}, 10, stage="fit")
    report.log_devices({0: device(1.0), 1: device(5.0)}, 20, stage="fit")
    report.log_devices({0: device(2.0, 2.0), 1: device(5.0)}, 30, stage="fit")
    report.log_devices({0: device(2.0, 2.0), 1: device(None)}, 30, stage="validate")

    assert logger.calls == [
        ({"devices/fit/power_w/rank0": 1.0, "devices/fit/power_w/rank1": 5.0}, 10),
        ({"devices/fit/power_w/rank0": 2.0}, 30),
        ({"devices/validate/power_w/rank0": 2.0}, 30),
    ]


def test_the_last_point_has_every_device_and_none_twice() -> None:
    logger = RecordingLogger()
    report = LoggerReport([logger])
    report.log_devices({0: device(1.0), 1: device(5.0)}, 10, stage="fit")
    report.log_devices({0: device(2.0, 2.0), 1: device(5.0)}, 30, stage="fit")
    report.log_devices({0: device(3.0, 3.0), 1: device(5.0)}, 30, stage="fit", again=True)
    report.log_devices({0: device(3.0, 3.0), 1: device(5.0)}, 30, stage="fit", again=True)

    assert logger.calls[1:] == [({"devices/fit/power_w/rank0": 2.0}, 30), ({"devices/fit/power_w/rank1": 5.0}, 30)]


def test_the_charts_follow_the_numbers_that_are_known(tensorboard: TensorBoardLogger) -> None:
    report = LoggerReport([tensorboard])
    report.log_snapshot(snapshot_of(), 4)
    report.log_devices({0: device(1.0)}, 4, stage="predict")
    report.log_devices({0: DeviceState(kind="cuda", temperature_celsius=50)}, 8, stage="predict")

    events = EventAccumulator(str(tensorboard.log_dir), size_guidance={"tensors": 0}).Reload()
    (*_, newest) = events.Tensors("custom_scalars__config__")
    layout = Layout.FromString(newest.tensor_proto.string_val[0])
    assert {category.title: [chart.title for chart in category.chart] for category in layout.category} == {
        "balance of predict": [
            "share of the samples, one line per replica",
            "speed in samples per second, one line per replica",
            "busy fraction, one line per replica",
        ],
        "devices in predict": ["power, W, one line per rank", "temperature, degrees Celsius, one line per rank"],
    }
