"""The error tree of the package.

::

    HybridError
    ├── ConfigError             (ValueError)    a constructor argument or configuration field is wrong
    ├── CostError               (ValueError)    the costs that the user gave are not what costs can be
    ├── PlanError               (ValueError)    a grid or plan does not hold what it must, or ranks disagree about it
    ├── CoordinationTimeout     (TimeoutError)  a wait on the store passed its deadline
    ├── CollectiveInQueueMode   (RuntimeError)  the user's step issued a collective while step counts may differ
    ├── PeerFailed              (RuntimeError)  another rank failed, so this one cannot go on
    ├── ResultsError            (ValueError)    results were asked for in a form that the outputs do not have
    ├── BatchError              (ValueError)    it is not sure what the samples of a batch, or of an output, are
    ├── SampleTooLarge          (RuntimeError)  a step of a single sample ran out of memory
    └── TooManyErrors           (RuntimeError)  more samples than ``max_errors`` could not be run
"""

from __future__ import annotations


class HybridError(Exception):
    """Base of every error that this package raises on purpose."""


class ConfigError(HybridError, ValueError):
    """An argument has a wrong type or value.

    Args:
        field: Name of the argument or configuration field.
        value: What was given.
        rule: What would have been right, as the end of the sentence "<field> must ...".
    """

    def __init__(self, field: str, value: object, rule: str) -> None:
        super().__init__(f"{field} must {rule}, got {value!r}")
        self.field = field
        self.value = value
        self.rule = rule

    def __reduce__(self) -> tuple[type[ConfigError], tuple[str, object, str]]:
        return type(self), (self.field, self.value, self.rule)


class CostError(HybridError, ValueError):
    """Costs of samples are negative, not finite, too few or too many, or cannot be found; names the index."""


class PlanError(HybridError, ValueError):
    """A plan drops or repeats samples, or two ranks hold different plans of the same epoch."""


class CoordinationTimeout(HybridError, TimeoutError):
    """Another rank, or the store that the ranks coordinate through, did not answer within the deadline."""


class CollectiveInQueueMode(HybridError, RuntimeError):
    """A collective was issued by the user's step while replicas take different numbers of steps."""


class PeerFailed(HybridError, RuntimeError):
    """Another rank raised an error; its own message is the one to read."""


class ResultsError(HybridError, ValueError):
    """The recorded outputs cannot be given in the form that was asked for."""


class BatchError(HybridError, ValueError):
    """A batch, or an output, of which it is not sure what its samples are, so that it is not cut or put together."""


class SampleTooLarge(HybridError, RuntimeError):
    """A step of one sample does not fit into the memory of its device; names the rank, the sample and its shapes."""


class TooManyErrors(HybridError, RuntimeError):
    """More samples could not be run than ``max_errors`` allows; names the first of them."""
