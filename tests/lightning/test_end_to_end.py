"""The launchers that people use, from a script of their own, in real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import lightning_hybrid

SCRIPT = """
import json, sys, warnings
import lightning.pytorch as pl
import torch
from torch.utils.data import DataLoader, Dataset
from lightning_hybrid import HybridBalanceCallback

warnings.simplefilter("ignore")


class Ids(Dataset):
    def __len__(self):
        return 23

    def __getitem__(self, i):
        return float(i)


class Model(pl.LightningModule):
    def predict_step(self, batch, batch_idx):
        return batch

    def validation_step(self, batch, batch_idx):
        self.log("mean", batch.mean(), sync_dist=True)
        self.log("count", float(len(batch)), reduce_fx="sum", sync_dist=True)


if __name__ == "__main__":
    strategy, return_predictions = sys.argv[1], sys.argv[2] == "True"
    callback = HybridBalanceCallback()
    trainer = pl.Trainer(
        accelerator="cpu", devices=2, strategy=strategy, logger=False, enable_progress_bar=False,
        enable_checkpointing=False, enable_model_summary=False, callbacks=[callback],
    )
    loader = DataLoader(Ids(), batch_size=2, num_workers=int(sys.argv[3]))
    out = trainer.predict(Model(), loader, return_predictions=return_predictions)
    values = trainer.validate(Model(), loader, verbose=False)
    found = {
        "rank": trainer.global_rank,
        "out": torch.cat(out).tolist() if out else None,
        "values": values,
        "shares": [record.samples for record in callback.statistics.replicas] if callback.statistics else None,
    }
    print("FOUND " + json.dumps(found), flush=True)
"""

IN_ORDER = [float(i) for i in range(23)]
VALUES = [{"mean": 11.0, "count": 23.0}]


def _run(
    tmp_path: Path, launcher: list[str], *arguments: str, env: dict[str, str] | None = None
) -> list[dict[str, Any]]:
    """What each rank that printed it found, by rank."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    for_children = os.environ | {
        "PYTHONPATH": str(Path(lightning_hybrid.__file__).parents[1]),
        "OMP_NUM_THREADS": "1",
        **(env or {}),
    }
    done = subprocess.run(
        [sys.executable, *launcher, str(script), *arguments],
        cwd=tmp_path,
        env=for_children,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    lines = [line[line.index("FOUND ") + 6 :] for line in done.stdout.splitlines() if "FOUND " in line]
    assert done.stdout.count("lightning_hybrid, predict, queue mode: 23 of 23 samples") == 1
    assert done.stdout.count("lightning_hybrid, validate, queue mode: 23 of 23 samples") == 1
    return sorted((json.loads(line) for line in lines), key=lambda found: found["rank"])


def _assert_whole(found: list[dict[str, Any]]) -> None:
    assert [of["rank"] for of in found] == [0, 1]
    for of in found:
        assert of["out"] == IN_ORDER
        assert of["values"] == VALUES
        assert sum(of["shares"]) == 23


def test_lightnings_own_launcher_of_subprocesses(tmp_path: Path) -> None:
    _assert_whole(_run(tmp_path, [], "ddp", "True", "1"))


def test_torchrun(tmp_path: Path) -> None:
    launcher = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    _assert_whole(_run(tmp_path, launcher, "hybrid_ddp", "True", "0", env={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}))


def test_forked_ranks_of_a_script(tmp_path: Path) -> None:
    (parent,) = _run(tmp_path, [], "ddp_fork", "False", "0")
    assert parent["out"] is None
    assert parent["values"] == VALUES
