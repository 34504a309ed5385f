from __future__ import annotations

import pytest

from lightning_hybrid.core.errors import ConfigError
from lightning_hybrid.core.state import DeviceState
from lightning_hybrid.probes.base import DeviceProbe, FakeProbe, NullProbe


def test_the_null_probe_knows_only_the_kind() -> None:
    probe: DeviceProbe = NullProbe("cuda")

    assert probe.read() == DeviceState(kind="cuda")


def test_the_fake_probe_replays_and_then_repeats_the_last() -> None:
    cool, warm = DeviceState(kind="cuda", utilization_frac=0.1), DeviceState(kind="cuda", utilization_frac=0.9)
    probe: DeviceProbe = FakeProbe([cool, warm])

    assert [probe.read(), probe.read(), probe.read()] == [cool, warm, warm]


def test_an_empty_recording_is_refused() -> None:
    with pytest.raises(ConfigError, match="states must hold at least one state"):
        FakeProbe([])
