"""Pictures of simulated runs."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from lightning_hybrid.core.errors import ConfigError
from lightning_hybrid.core.simulated import Origin
from lightning_hybrid.reports.gantt import (
    FIRST,
    STOLEN,
    Bar,
    bars,
    check_picture,
    gantt_text,
    kind_of,
    sample,
    save_gantt,
)
from tests import simulated
from tests.simulated import DEALT, HYBRID, run_of


def test_a_bar_tells_how_the_replica_came_by_the_cell() -> None:
    run = run_of((0, 0.0, 1.0, DEALT), (0, 1.0, 2.0, HYBRID), (1, 0.0, 2.0, simulated.STOLEN))
    assert [kind_of(step) for step in run.steps] == [FIRST, "hybrid", STOLEN]


def test_a_cell_of_a_dead_replica_was_taken_from_it() -> None:
    assert kind_of(run_of((0, 0.0, 1.0, Origin(None, True))).steps[0]) == STOLEN


def test_bars_are_in_order_of_time() -> None:
    run = run_of((0, 2.0, 3.0, HYBRID), (1, 0.0, 1.0, HYBRID), (0, 0.0, 2.0, DEALT))
    assert bars(run.steps, [0], None) == {0: [Bar(FIRST, 0.0, 2.0), Bar("hybrid", 2.0, 3.0)]}


def test_bars_of_one_kind_that_are_close_are_merged() -> None:
    run = run_of((0, 0.0, 1.0, HYBRID), (0, 1.0, 2.0, HYBRID), (0, 2.5, 3.0, HYBRID), (0, 3.0, 4.0, simulated.STOLEN))
    assert bars(run.steps, [0], 0.1) == {0: [Bar("hybrid", 0.0, 2.0), Bar("hybrid", 2.5, 3.0), Bar(STOLEN, 3.0, 4.0)]}


@pytest.mark.parametrize(("num_replicas", "most", "shown"), [(3, 8, [0, 1, 2]), (1, 8, [0]), (9, 3, [0, 4, 8])])
def test_of_many_replicas_a_sample_is_shown(num_replicas: int, most: int, shown: list[int]) -> None:
    assert sample(run_of(num_replicas=num_replicas), most) == shown


def test_the_replica_that_ends_last_is_among_the_sample() -> None:
    run = run_of((5, 0.0, 9.0, HYBRID), (0, 0.0, 8.0, HYBRID), num_replicas=9)
    assert sample(run, 3) == [0, 5, 8]


# --- as text --------------------------------------------------------------------------------------------------------


def test_text_has_one_line_per_replica() -> None:
    run = run_of(
        (0, 0.0, 1.0, DEALT),
        (0, 1.0, 4.0, HYBRID),
        (1, 0.0, 1.0, DEALT),
        (1, 1.0, 2.0, HYBRID),
        (1, 3.0, 4.0, simulated.STOLEN),
    )
    assert gantt_text(run, 52).splitlines() == [
        "replica 0 |..........hhhhhhhhhhhhhhhhhhhhhhhhhhhhhh|",
        "replica 1 |..........hhhhhhhhhh          ##########|",
        "           0 s                     4 s, bound 3.5 s",
        ". dealt at the start  h hybrid  # taken from another replica  blank: idle",
    ]


def test_policies_that_begin_alike_get_letters_of_their_own() -> None:
    run = run_of((0, 0.0, 1.0, Origin("hybrid", False)), (0, 1.0, 2.0, Origin("heavy", False)), num_replicas=1)
    assert gantt_text(run, 60).splitlines()[-1] == "h hybrid  e heavy  blank: idle"


def test_text_says_that_it_shows_a_sample() -> None:
    run = run_of(*((r, 0.0, 1.0, HYBRID) for r in range(100)), num_replicas=100)
    lines = gantt_text(run, 80).splitlines()
    assert lines[-1] == "24 of 100 replicas"
    assert len([line for line in lines if "|" in line]) == 24


def test_text_that_nobody_could_read_is_refused() -> None:
    with pytest.raises(ConfigError, match="width must be at least 40, got 39"):
        gantt_text(run_of(), 39)


def test_text_of_a_run_without_steps_is_blank() -> None:
    assert set(gantt_text(run_of(), 60).splitlines()[0].partition("|")[2]) == {" ", "|"}


# --- as a picture ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "begins"), [("run.png", b"\x89PNG"), ("run.svg", b"<?xml"), ("run.pdf", b"%PDF")])
def test_picture_is_what_its_ending_says(tmp_path: Path, name: str, begins: bytes) -> None:
    pytest.importorskip("matplotlib")
    run = run_of((0, 0.0, 1.0, DEALT), (1, 0.0, 2.0, HYBRID), (0, 1.0, 1.5, simulated.STOLEN))
    save_gantt(run, tmp_path / name, "a run", recorded_s=2.5)
    assert (tmp_path / name).read_bytes().startswith(begins)


def test_picture_of_very_many_steps_stays_small(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    run = run_of(*((n % 4, 0.1 * (n // 4), 0.1 * (n // 4 + 1), HYBRID) for n in range(20_000)), num_replicas=4)
    save_gantt(run, tmp_path / "run.svg", "a run")
    assert (tmp_path / "run.svg").stat().st_size < 200_000


def test_another_ending_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"path must end in \.png, \.svg, \.pdf, got 'run\.gif'"):
        check_picture("run.gif")


def test_without_matplotlib_the_error_tells_how_to_install_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r'needs matplotlib: pip install "lightning-hybrid\[plots\]"'):
        save_gantt(run_of((0, 0.0, 1.0, HYBRID)), tmp_path / "run.png", "a run")
