"""The command ``lightning-hybrid``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import lightning_hybrid
from lightning_hybrid import Recording
from lightning_hybrid.cli import main
from lightning_hybrid.core.recording import RecordedStep


def recorded(path: Path) -> str:
    steps = tuple(RecordedStep(n % 2, n, n + 1, 1.0 * (n // 2), 1.0) for n in range(40))
    Recording(stage="predict", mode="queue", num_replicas=2, steps=steps).save(path)
    return str(path)


def test_simulate_prints_a_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--speeds", "3x1,0.25", "--costs", "lognormal:1", "--num-cells", "120"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("simulated: 120 cells on 4 replicas, policy auto, costs known\n")
    assert err == ""


def test_json_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--costs-unknown", "--policy", "load_balanced", "--json", "--gantt", "-"]) == 0
    out, err = capsys.readouterr()
    figures = json.loads(out)
    assert out.count("\n") == 1
    assert (figures["replicas"], figures["cells"]) == (4, 200)
    assert (figures["policy"], figures["costs_known"], figures["exactly_once_violations"]) == (
        "load_balanced",
        False,
        0,
    )
    assert "replica 3 |" in err


def test_text_picture_follows_the_report(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--gantt", "-"]) == 0
    assert "replica 3 |" in capsys.readouterr().out


def test_picture_is_drawn_into_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    assert main(["simulate", "--gantt", str(tmp_path / "run.svg")]) == 0
    assert (tmp_path / "run.svg").read_text().startswith("<?xml")


def test_lengths_come_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "lengths.txt").write_text(" ".join(map(str, range(1, 101))))
    assert main(["simulate", "--lengths", str(tmp_path / "lengths.txt"), "--batch-size", "5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cells"] == 20


def test_a_recorded_run_is_replayed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = recorded(tmp_path / "run.jsonl")
    assert main(["simulate", "--replay", path, "--policy", "memory_aware", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)
    assert (figures["policy"], figures["recorded_s"]) == ("memory_aware", 20.0)


def test_cells_that_nobody_ran_are_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--speeds", "2xfailing:1:3", "--lease-s", "1"]) == 1
    assert "NO: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--speeds 1,fast", r"--speeds[1] must be a number, LOW..HIGH or one of drift:SPEED"),
        ("--speeds failing:1:5", "--lease-s must be set where a device fails"),
        ("--lease-s 0", "--lease-s must be positive and finite, got 0.0"),
        ("--costs gauss", "--costs must be one of equal, uniform:LOW:HIGH, lognormal:SIGMA, got 'gauss'"),
        ("--num-cells 0", "--num-cells must be at least 1, got 0"),
        ("--policy best", "--policy must be one of 'auto', 'load_balanced'"),
        ("--store-latency-s -1", "--store-latency-s must be at least 0 and finite, got -1.0"),
        ("--seed -1", "--seed must be at least 0, got -1"),
        ("--batch-size 4", "--batch-size must be left out where the costs of cells are drawn, got 4"),
        ("--lengths none.txt", "none.txt: No such file or directory"),
        ("--lengths none.txt --costs equal", "--costs must be left out with --lengths, got 'equal'"),
        ("--replay none.jsonl", "none.jsonl: No such file or directory"),
        ("--replay none.jsonl --speeds 4x1", "--speeds must be left out with --replay, which tells it, got '4x1'"),
        ("--replay none.jsonl --costs-unknown", "--costs-unknown must be left out with --replay"),
        ("--gantt run.gif", "--gantt must end in .png, .svg, .pdf, got 'run.gif'"),
    ],
)
def test_bad_input_is_named_with_its_option(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["simulate", *arguments.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"lightning-hybrid simulate: error: {message}")
    assert err.count("\n") == 1


def test_a_file_that_is_no_recording_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    assert main(["simulate", "--replay", str(tmp_path / "notes.txt")]) == 2
    assert "notes.txt holds no recording: line 1 must be JSON, got 'hello'" in capsys.readouterr().err


def test_without_matplotlib_the_error_tells_how_to_install_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert main(["simulate", "--gantt", "run.png"]) == 2
    assert 'pip install "lightning-hybrid[plots]"' in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["dance"], ["simulate", "--num-cells", "many"]])
def test_argparse_refuses_what_is_no_command(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    assert stop.value.code == 2
    assert "usage: lightning-hybrid" in capsys.readouterr().err


def _python(*arguments: str) -> subprocess.CompletedProcess[str]:
    root = str(Path(lightning_hybrid.__file__).parents[1])
    return subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([root, os.environ.get("PYTHONPATH", "")])},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


def test_the_package_is_a_command() -> None:
    done = _python("-m", "lightning_hybrid", "simulate", "--num-cells", "40", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["cells"] == 40


def test_the_command_loads_no_framework() -> None:
    code = """
import sys
from lightning_hybrid.cli import main
main(["simulate", "--num-cells", "40", "--json"])
heavy = ("lightning", "matplotlib", "pytorch_lightning", "torch", "torchmetrics", "pynvml", "psutil")
print([name for name in heavy if name in sys.modules])
"""
    assert _python("-c", code).stdout.splitlines()[-1] == "[]"
