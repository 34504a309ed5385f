from __future__ import annotations

import json

import pytest
import torch

from benchmarks import gpu_check


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_without_a_gpu_it_says_so_and_is_content(capsys: pytest.CaptureFixture[str]) -> None:
    assert gpu_check.main([]) == 0

    *said, last = capsys.readouterr().out.splitlines()
    assert said == ["no GPU: torch.cuda.is_available() is false, so there is nothing to check here"]
    assert json.loads(last) == {"gpu": None}


def test_a_check_that_raises_does_not_end_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: torch.device) -> dict[str, int]:
        raise RuntimeError("no such kernel")

    monkeypatch.setattr(gpu_check, "CHECKS", (fails, lambda _: {"answer": 1}))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "NVIDIA Test")

    found = gpu_check.collect(torch.device("cuda", 0))

    assert (found["gpu"], found["answer"], found["failed"]) == (
        "NVIDIA Test",
        1,
        {"fails": "RuntimeError: no such kernel"},
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_all_checks_of_a_real_gpu() -> None:
    found = gpu_check.collect(torch.device("cuda", 0))

    assert found["failed"] == {}
    assert found["memory_agrees"] is not False
    assert found["mapping_is_right"] is True
    assert 0.9 < found["event_over_synchronised"] < 1.1
    assert found["steps_in_flight"] == gpu_check.IN_FLIGHT
    assert found["steps_timed"] == 30
    assert found["out_of_memory_type"] == "OutOfMemoryError"
    assert found["works_after_out_of_memory"] is True


def test_the_model_that_runs_out_of_memory_gives_one_number_per_sample() -> None:
    samples = torch.randn(6, 256)
    outputs, failures = gpu_check.predicted(torch.device("cpu"), samples, 4)

    assert outputs.shape == (6,)
    assert failures == 0
