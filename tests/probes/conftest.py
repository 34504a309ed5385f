from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.probes.nvml_library import compiled, played


@pytest.fixture(scope="session")
def nvml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The scripted NVML of a driver that has every function."""
    return compiled(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def script(tmp_path: Path) -> Path:
    """Where the scripted GPUs are described."""
    return tmp_path / "gpus.txt"


@pytest.fixture
def play(nvml: Path, script: Path) -> Callable[..., Any]:
    """Runs a scene in a process of its own: ``play(scene, *arguments, environment=...)``."""

    def run(scene: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        return partial(played, library=options.pop("library", nvml))(scene, script, *arguments, **options)

    return run
