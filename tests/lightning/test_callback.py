"""The callback's arguments, what it leaves behind, and how it behaves beside others."""

from __future__ import annotations

import contextlib
import doctest
import gc
import importlib
import inspect
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import TQDMProgressBar

from lightning_hybrid import ConfigError, HybridBalanceCallback, HybridConfig, ResultsError, SystemState
from lightning_hybrid.epoch import EpochRun
from tests.lightning.scenes import Echo, Logs, balance_of, flat, ids, messages, trainer
from tests.ranks import run_ranks

# --- arguments -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        ("enabled", "yes", "be of type bool"),
        ("enabled", 1, "be of type bool"),
        ("mode", "fast", "be one of 'auto', 'queue', 'lockstep'"),
        ("mode", 1, "be one of 'auto', 'queue', 'lockstep'"),
        ("mode", "Queue", "be one of 'auto', 'queue', 'lockstep'"),
        ("order", "index", "be one of 'loader', 'dataset'"),
        ("gather", True, "be one of 'all', 'rank_zero', 'none'"),
        ("gather", "rank0", "be one of 'all', 'rank_zero', 'none'"),
        ("iterable", "shard", "be one of 'stock', 'claim', 'sharded'"),
        ("policy", "fastest", "be one of 'load_balanced'"),
        ("policy", 3, "be a name, or an object with a name and a method propose"),
        ("target_throughput_per_s", 0, "be positive"),
        ("cost", 3, "be a function of a sample, a name, or one value per dataset index"),
        ("reuse", True, "be a function of a sample, a name, or one value per dataset index"),
        ("max_micro_batch_size", 0, "be at least 1"),
        ("max_micro_batch_size", -3, "be at least 1"),
        ("max_micro_batch_size", 2.5, "be of type None or int"),
        ("max_micro_batch_size", "8", "be of type None or int"),
        ("max_micro_batch_size", True, "be of type None or int"),
        ("micro_batch_size", 0, "be at least 1 and finite"),
        ("micro_batch_size", "many", "be of type None or int or 'auto'"),
        ("on_error", "ignore", "be one of 'raise', 'skip'"),
        ("max_errors", -1, "be at least 0 and finite"),
        ("split_fn", 3, "be a function"),
        ("merge_fn", "sum", "be a function"),
        ("batch_dependent", "no", "be of type None or bool"),
        ("batch_dependent", 0, "be of type None or bool"),
        ("comm_probe", True, "be one of 'quick', 'full', 'off'"),
        ("comm_probe", "slow", "be one of 'quick', 'full', 'off'"),
        ("config", {"mode": "queue"}, "be a HybridConfig"),
        ("config", "lockstep", "be a HybridConfig"),
    ],
)
def test_bad_argument_is_named_with_its_value_and_the_rule(field: str, value: Any, rule: str) -> None:
    with pytest.raises(ConfigError) as caught:
        HybridBalanceCallback(**{field: value})
    assert str(caught.value).startswith(f"{field} must {rule}")
    assert str(caught.value).endswith(f"got {value!r}")
    assert (caught.value.field, caught.value.value) == (field, value)
    assert isinstance(caught.value, ValueError)


def test_every_argument_has_a_bad_case_above() -> None:
    marks = test_bad_argument_is_named_with_its_value_and_the_rule.pytestmark  # type: ignore[attr-defined]
    tested = {case[0] for case in marks[0].args[1]}
    assert tested == set(inspect.signature(HybridBalanceCallback).parameters)


def test_unknown_and_positional_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="modes"):
        HybridBalanceCallback(modes="queue")  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="positional"):
        HybridBalanceCallback(True)  # type: ignore[misc]


def test_keywords_come_before_config_and_config_before_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_HYBRID_MODE", "lockstep")
    monkeypatch.setenv("LIGHTNING_HYBRID_GATHER", "none")
    assert HybridBalanceCallback().config == HybridConfig(mode="lockstep", gather="none")
    assert HybridBalanceCallback(mode="queue").config == HybridConfig(mode="queue", gather="none")
    config = HybridConfig(order="dataset", claim_frac=0.25)
    assert HybridBalanceCallback(config=config).config == config
    assert HybridBalanceCallback(config=config, mode="queue").config == config.but(mode="queue")
    assert HybridBalanceCallback(config=config, order="loader").config == HybridConfig(claim_frac=0.25)
    assert HybridBalanceCallback(config=HybridConfig(enabled=False), enabled=True).config.enabled is True


def test_defaults_are_those_of_the_config() -> None:
    assert HybridBalanceCallback().config == HybridConfig()


def test_environment_sets_fields_that_are_no_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_HYBRID_PUBLISH_PERIOD_S", "0.05")
    monkeypatch.setenv("LIGHTNING_HYBRID_MAX_MICRO_BATCH_SIZE", "none")
    config = HybridBalanceCallback().config
    assert config.publish_period_s == 0.05
    assert config.max_micro_batch_size is None


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("LIGHTNING_HYBRID_MODE", "fast"),
        ("LIGHTNING_HYBRID_MAX_MICRO_BATCH_SIZE", "many"),
        ("LIGHTNING_HYBRID_BATCH_DEPENDENT", "perhaps"),
        ("LIGHTNING_HYBRID_SPEED", "9"),
    ],
)
def test_bad_environment_is_named(name: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, text)
    with pytest.raises(ConfigError, match=repr(text)) as caught:
        HybridBalanceCallback()
    assert name.removeprefix("LIGHTNING_HYBRID_").lower() in str(caught.value).lower()


@pytest.mark.parametrize("value", ["0", "1"])
def test_switch_in_the_environment_is_no_field(value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_HYBRID", value)
    HybridBalanceCallback()


def test_switch_is_read_when_a_run_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    the_trainer = trainer(1)
    monkeypatch.setenv("LIGHTNING_HYBRID", "0")
    the_trainer.predict(Echo(), ids(3))
    assert balance_of(the_trainer).statistics is None
    monkeypatch.delenv("LIGHTNING_HYBRID")
    the_trainer.predict(Echo(), ids(3))
    assert balance_of(the_trainer).statistics is not None


@pytest.mark.parametrize("name", ["lightning.callback", "core.config", "core.recommend", "reports.scalars"])
def test_examples_in_the_documentation(name: str) -> None:
    results = doctest.testmod(importlib.import_module(f"lightning_hybrid.{name}"))
    assert results.failed == 0
    assert results.attempted > 0 or name == "core.config"


def test_documentation_names_every_argument_and_every_logged_key() -> None:
    from lightning_hybrid.reports.scalars import scalars

    text = inspect.getdoc(HybridBalanceCallback) or ""
    for name in inspect.signature(HybridBalanceCallback).parameters:
        assert f"{name}: " in text
    for line in (inspect.getdoc(scalars) or "").splitlines():
        if line.startswith("``balance/"):
            assert line.split("``")[1].replace("<stage>", "<s>") in text


# --- before and after a run ------------------------------------------------------------------------------------------


def test_nothing_is_known_before_the_first_run() -> None:
    callback = HybridBalanceCallback()
    assert callback.statistics is None
    assert callback.plan is None
    assert callback.plans == ()
    assert callback.recommendations == ()
    assert callback.system_state is None
    with pytest.raises(ResultsError, match="loader 0"):
        callback.rows()


def test_what_a_run_leaves() -> None:
    def rank(_: int) -> tuple[Any, ...]:
        the_trainer = trainer(2)
        the_trainer.predict(Echo(), [ids(7), ids(3)])
        callback = balance_of(the_trainer)
        assert callback.statistics is not None
        assert callback.statistics.stage == "predict"
        assert callback.statistics.loader_idx == 1
        state = callback.system_state
        assert state is not None
        assert [device.kind for device in state.devices] == ["cpu", "cpu"]
        assert state.performance is not None
        assert state.performance.num_steps == 2
        assert state.performance.samples_per_s is not None
        assert state.model is not None
        assert (state.model.name, state.model.num_parameters) == ("Echo", 0)
        assert state.parallel is not None
        assert (state.parallel.world_size, state.parallel.backend, state.parallel.mode) == (2, "gloo", "queue")
        assert SystemState.from_json(state.to_json()) == state
        assert [sum(stop - start for _, start, stop in plan.cells) for plan in callback.plans] == [7, 3]
        assert callback.plans[-1] == callback.plan
        with pytest.raises(ResultsError, match="loader 2"):
            callback.rows(2)
        return [float(x) for x in callback.rows()], [float(x) for x in callback.rows(1)], callback.plans

    zero, one = run_ranks(rank, 2, deadline_s=20)
    assert zero == one
    assert zero[:2] == ([0, 1, 2, 3, 4, 5, 6], [0, 1, 2])


def test_rows_without_a_row_per_sample_say_so() -> None:
    class PerBatch(Echo):
        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            return batch.sum()

    the_trainer = trainer(1)
    the_trainer.predict(PerBatch(), ids(4))
    with pytest.raises(ResultsError, match="without one row per sample"):
        balance_of(the_trainer).rows()


# --- attach and detach -----------------------------------------------------------------------------------------------


def _owners(a_trainer: Any) -> dict[str, Any]:
    """Everything in a Trainer that is hooked."""
    loops = {
        "validate": a_trainer.validate_loop,
        "test": a_trainer.test_loop,
        "predict": a_trainer.predict_loop,
        "fit": a_trainer.fit_loop.epoch_loop.val_loop,
    }
    return {
        "data connector": a_trainer._data_connector,
        "strategy": a_trainer.strategy,
        "logger connector": a_trainer._logger_connector,
        "progress bar": a_trainer.progress_bar_callback,
        **{f"data source of {name}": loop._data_source for name, loop in loops.items()},
    }


class Hooked(Logs, Echo):
    """Notes what is hooked while a step runs, and may raise there."""

    def __init__(self, error: BaseException | None = None) -> None:
        super().__init__()
        self.error = error
        self.hooked: set[str] = set()

    def _note(self) -> None:
        self.hooked = {
            name
            for name, owner in _owners(self.trainer).items()
            if any(callable(value) and name_ in dir(type(owner)) for name_, value in vars(owner).items())
        }
        if self.error is not None:
            raise self.error

    def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
        self._note()
        return batch

    def validation_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._note()
        super().validation_step(batch, batch_idx)

    def test_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> None:
        self._note()


STAGES = ("predict", "validate", "test")


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize(
    "error", [None, RuntimeError("boom"), KeyboardInterrupt(), SystemExit(3)], ids=lambda e: type(e).__name__
)
def test_everything_is_as_it_was_after_a_run_and_after_an_error(stage: str, error: BaseException | None) -> None:
    the_trainer = trainer(1, TQDMProgressBar(), HybridBalanceCallback(), enable_progress_bar=True)
    names = {name: set(vars(owner)) for name, owner in _owners(the_trainer).items()}
    bound = {name: {k for k, v in vars(o).items() if callable(v)} for name, o in _owners(the_trainer).items()}
    model = Hooked(error)
    expected: Any = contextlib.nullcontext() if error is None else pytest.raises((type(error), SystemExit))
    with expected:
        getattr(the_trainer, stage)(model, ids(4))
    assert model.hooked == set(_owners(the_trainer))
    for name, owner in _owners(the_trainer).items():
        hooks = {k for k, v in vars(owner).items() if callable(v) and hasattr(type(owner), k)}
        assert hooks - bound[name] == set(), name
        assert names[name] <= set(vars(owner)), name
    # and the same Trainer runs again
    the_trainer = the_trainer if error is None or isinstance(error, RuntimeError) else trainer(1)
    assert flat(the_trainer.predict(Echo(), ids(5))) == [0, 1, 2, 3, 4]


def test_functions_of_torch_distributed_are_put_back() -> None:
    def rank(_: int) -> list[str]:
        import torch.distributed as dist

        names = [name for name in dir(dist) if callable(getattr(dist, name)) and not name.startswith("_")]
        before = {name: getattr(dist, name) for name in names}
        the_trainer = trainer(2, HybridBalanceCallback(mode="lockstep"))
        the_trainer.predict(Echo(), ids(4))
        the_trainer.validate(Logs(), ids(4), verbose=False)
        return [name for name in names if getattr(dist, name) is not before[name]]

    assert run_ranks(rank, 2, deadline_s=20) == [[], []]


def test_background_threads_end_with_the_run_and_with_an_error() -> None:
    class Boom(Echo):
        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            raise RuntimeError("boom")

    def rank(_: int) -> list[str]:
        before = set(threading.enumerate())
        the_trainer = trainer(2)
        the_trainer.predict(Echo(), ids(8))
        with pytest.raises(RuntimeError):
            the_trainer.predict(Boom(), ids(8))
        return [thread.name for thread in set(threading.enumerate()) - before if "lightning_hybrid" in thread.name]

    assert run_ranks(rank, 2, deadline_s=20) == [[], []]


def test_run_on_both_ranks_works_after_an_error_on_both() -> None:
    class Boom(Echo):
        def predict_step(self, batch: Any, batch_idx: int, dataloader_idx: int = 0) -> Any:
            raise RuntimeError("boom")

    def rank(_: int) -> list[float]:
        the_trainer = trainer(2)
        with pytest.raises(RuntimeError):
            the_trainer.predict(Boom(), ids(8))
        return flat(the_trainer.predict(Echo(), ids(8)))

    assert run_ranks(rank, 2, deadline_s=20) == [list(map(float, range(8)))] * 2


def test_error_in_the_loader_and_in_a_hook_detaches_too() -> None:
    class BadHook(Echo):
        def on_predict_epoch_start(self) -> None:
            raise RuntimeError("hook")

    class BadData(torch.utils.data.Dataset[float]):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, i: int) -> float:
            raise OSError("disk")

    the_trainer = trainer(1)
    with pytest.raises(RuntimeError, match="hook"):
        the_trainer.predict(BadHook(), ids(4))
    with pytest.raises(OSError, match="disk"):
        the_trainer.predict(Echo(), torch.utils.data.DataLoader(BadData()))
    with pytest.raises(Exception, match="nothing"):
        the_trainer.predict(Echo(), ckpt_path="nothing", dataloaders=ids(4))
    assert "predict_step" not in vars(the_trainer.strategy)
    assert flat(the_trainer.predict(Echo(), ids(4))) == [0, 1, 2, 3]


def test_passes_over_a_loader_do_not_pile_up() -> None:
    def rank(_: int) -> list[tuple[int, int, int]]:
        class Looks(Logs):
            def __init__(self) -> None:
                super().__init__()
                self.layer = torch.nn.Linear(1, 1)
                self.found: list[tuple[int, int, int]] = []

            def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
                return self.layer(batch.float().unsqueeze(1)).sum()

            def configure_optimizers(self) -> Any:
                return torch.optim.SGD(self.parameters(), lr=1e-4)

            def on_validation_end(self) -> None:
                if self.current_epoch in (1, 7):
                    gc.collect()
                    runs = sum(type(found) is EpochRun for found in gc.get_objects())
                    self.found.append((runs, len(os.listdir("/proc/self/fd")), threading.active_count()))

        model = Looks()
        trainer(2, max_epochs=8, num_sanity_val_steps=0).fit(model, ids(4), [ids(3), ids(2)])
        return model.found

    for found in run_ranks(rank, 2, deadline_s=45):
        (runs_early, files_early, threads_early), (runs, files, threads) = found
        assert runs <= runs_early
        assert files <= files_early + 3  # a pass opens several connections to the store
        assert threads <= threads_early


# --- beside others ---------------------------------------------------------------------------------------------------


def test_second_callback_stands_aside_with_one_warning() -> None:
    def rank(_: int) -> tuple[list[float], list[str], bool, bool]:
        first, second = HybridBalanceCallback(), HybridBalanceCallback(mode="lockstep")
        with messages() as said:
            out = flat(trainer(2, first, second).predict(Echo(), ids(7)))
        return out, said, first.statistics is not None, second.statistics is None

    (zero, said, *states), (one, silent, *other_states) = run_ranks(rank, 2, deadline_s=20)
    assert zero == one == [0, 1, 2, 3, 4, 5, 6]
    assert states == other_states == [True, True]
    assert len([text for text in said if "second HybridBalanceCallback" in text]) == 1
    assert silent == []


def test_second_callback_after_a_disabled_one_works() -> None:
    first, second = HybridBalanceCallback(enabled=False), HybridBalanceCallback()
    with messages() as said:
        trainer(1, first, second).predict(Echo(), ids(3))
    assert said == []
    assert first.statistics is None
    assert second.statistics is not None


def test_one_callback_in_two_trainers_in_turn() -> None:
    def rank(_: int) -> list[list[float]]:
        callback = HybridBalanceCallback()
        first, second = trainer(2, callback), trainer(2, callback)
        return [flat(t.predict(Echo(), ids(n))) for t, n in ((first, 5), (second, 6), (first, 7))]

    want = [list(map(float, range(n))) for n in (5, 6, 7)]
    assert run_ranks(rank, 2, deadline_s=20) == [want] * 2


def test_training_is_left_alone() -> None:
    class Fits(Logs):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)
            self.trained: list[float] = []

        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            self.trained += batch.tolist()
            return self.layer(batch.float().unsqueeze(1)).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=1e-4)

    def rank(_: int, enabled: bool) -> list[float]:
        torch.manual_seed(0)
        model = Fits()
        trainer(2, HybridBalanceCallback(enabled=enabled), max_epochs=2).fit(model, ids(7), ids(5))
        return model.trained

    assert run_ranks(rank, 2, True, deadline_s=20) == run_ranks(rank, 2, False, deadline_s=20)


@pytest.mark.parametrize("how", ["state_dict", "pickle", "deepcopy"])
def test_callback_travels_with_the_trainers_state(how: str) -> None:
    import copy
    import pickle

    callback = HybridBalanceCallback(mode="lockstep", order="dataset")
    ways: dict[str, Callable[[], Any]] = {
        "state_dict": lambda: (callback.state_dict(), callback)[1],
        "pickle": lambda: pickle.loads(pickle.dumps(callback)),
        "deepcopy": lambda: copy.deepcopy(callback),
    }
    assert ways[how]().config == callback.config


def test_other_callbacks_see_a_plain_run() -> None:
    from lightning.pytorch.callbacks import Callback

    class Sees(Callback):
        def __init__(self) -> None:
            self.batches: list[tuple[int, list[float]]] = []

        def on_predict_batch_end(
            self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int, dataloader_idx: int = 0
        ) -> None:
            assert outputs.tolist() == batch.tolist()
            self.batches.append((batch_idx, batch.tolist()))

    def rank(_: int) -> list[tuple[int, list[float]]]:
        sees = Sees()
        trainer(2, sees).predict(Echo(), ids(21, num_workers=1))
        return sees.batches

    zero, one = run_ranks(rank, 2, deadline_s=20)
    for batches in (zero, one):
        assert [idx for idx, _ in batches] == list(range(len(batches)))
    assert sorted(x for batches in (zero, one) for _, batch in batches for x in batch) == list(map(float, range(21)))
