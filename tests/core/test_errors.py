from __future__ import annotations

import pickle

import pytest

from lightning_hybrid.core import errors
from lightning_hybrid.core.errors import ConfigError, HybridError


def test_a_config_error_names_field_value_and_rule() -> None:
    error = ConfigError("claim_frac", -1, "be positive")

    assert str(error) == "claim_frac must be positive, got -1"
    assert (error.field, error.value, error.rule) == ("claim_frac", -1, "be positive")


def test_a_config_error_survives_the_way_to_another_process() -> None:
    error = pickle.loads(pickle.dumps(ConfigError("mode", "turbo", "be one of 'queue'")))

    assert type(error) is ConfigError
    assert str(error) == "mode must be one of 'queue', got 'turbo'"
    assert (error.field, error.value, error.rule) == ("mode", "turbo", "be one of 'queue'")


@pytest.mark.parametrize(
    ("name", "builtin"),
    [
        ("ConfigError", ValueError),
        ("CostError", ValueError),
        ("PlanError", ValueError),
        ("CoordinationTimeout", TimeoutError),
        ("CollectiveInQueueMode", RuntimeError),
        ("PeerFailed", RuntimeError),
        ("ResultsError", ValueError),
    ],
)
def test_every_error_is_caught_by_the_tree_and_by_its_builtin(name: str, builtin: type[Exception]) -> None:
    error = getattr(errors, name)

    assert issubclass(error, HybridError)
    assert issubclass(error, builtin)


def test_the_tree_at_the_top_of_the_file_names_every_error() -> None:
    defined = {name for name, value in vars(errors).items() if isinstance(value, type)}

    assert errors.__doc__ is not None
    assert {name for name in defined if name not in errors.__doc__} == set()
