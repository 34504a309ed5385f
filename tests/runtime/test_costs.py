from __future__ import annotations

import math
from collections import UserDict, UserList, namedtuple
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ConcatDataset, Dataset, Subset, TensorDataset, random_split

from lightning_hybrid.core.errors import ConfigError, CostError
from lightning_hybrid.runtime.costs import batch_elements, sample_costs

try:
    import datasets as hugging_face
except ImportError:
    hugging_face = None

needs_hugging_face = pytest.mark.skipif(hugging_face is None, reason="datasets is not installed")


class Texts(Dataset[Any]):
    """Samples are dictionaries; the dataset knows the lengths of its texts."""

    def __init__(self, *texts: str, lengths: Any = None) -> None:
        self.texts = list(texts)
        self.lengths = [len(text) for text in texts] if lengths is None else lengths
        self.num_read = 0

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.num_read += 1
        return {"text": self.texts[index], "ids": torch.zeros(len(self.texts[index])), "weight": index + 0.5}


class OneByOne(Sequence[int]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, int):
            raise TypeError("no slices")
        return range(4)[index]


class FrameColumn:
    """A column of a data frame, which is no sequence: it is indexed by the frame's own labels."""

    def __init__(self, values: list[float]) -> None:
        self._values = values

    def __len__(self) -> int:
        return len(self._values)

    def __getitem__(self, label: Any) -> Any:
        raise KeyError(label)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.array(self._values, dtype=dtype)


class Columns:
    """The part of a Hugging Face dataset that costs need."""

    column_names = ["length", "ids"]  # noqa: RUF012  # as there

    def __len__(self) -> int:
        return 3

    def __getitem__(self, key: int | str) -> Any:
        columns = {"length": [7, 8, 9], "ids": [[1], [1, 2], [1, 2, 3]]}
        return columns[key] if isinstance(key, str) else {name: column[key] for name, column in columns.items()}


TEXTS = Texts("a", "four", "to", "three")


def compute(cost: Any, dataset: Any = TEXTS, indices: Any = range(4)) -> list[float]:
    costs = sample_costs(cost, dataset, indices)
    assert costs.memory is None
    assert costs.io is None
    assert costs.compute.dtype == np.float64
    return costs.compute.tolist()


# --- sequences ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cost",
    [
        [4, 3, 2, 1],
        (4.0, 3.0, 2.0, 1.0),
        np.array([4, 3, 2, 1], dtype=np.int32),
        torch.tensor([4, 3, 2, 1]),
        torch.tensor([4, 3, 2, 1], dtype=torch.bfloat16),
        range(4, 0, -1),
        [torch.tensor(4), torch.tensor(3), torch.tensor(2), torch.tensor(1)],
        FrameColumn([4, 3, 2, 1]),
    ],
)
def test_a_sequence_is_indexed_by_the_dataset_index(cost: Any) -> None:
    assert compute(cost) == [4.0, 3.0, 2.0, 1.0]
    assert compute(cost, indices=[3, 0, 3]) == [1.0, 4.0, 1.0]
    assert compute(cost, indices=np.array([2], dtype=np.int64)) == [2.0]
    assert compute(cost, indices=range(0)) == []


def test_a_sequence_reads_no_data() -> None:
    dataset = Texts("a", "b")
    compute([1, 2], dataset, range(2))

    assert dataset.num_read == 0


@pytest.mark.parametrize("cost", [[1, 2, 3], [1, 2, 3, 4, 5], torch.ones(3), np.ones(5)])
def test_a_sequence_of_the_wrong_length_names_both_lengths(cost: Any) -> None:
    with pytest.raises(CostError, match=f"cost must have one entry per sample, 4, got {len(cost)}"):
        compute(cost, indices=range(2))


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_a_bad_number_in_a_sequence_is_named_by_its_index(bad: float, kind: Any) -> None:
    with pytest.raises(CostError, match=f"cost of sample 2 must be at least 0 and finite, got {bad!r}"):
        compute(kind([1.0, 2.0, bad, bad]))


def test_costs_of_two_dimensions_are_refused() -> None:
    with pytest.raises(CostError, match="cost of sample 0 must be a number"):
        compute(torch.ones(4, 2))


@pytest.mark.parametrize("index", ["key", (0, 1), 4, -5, 1.0])
def test_an_index_that_the_sequence_does_not_have_is_named(index: Any) -> None:
    with pytest.raises(CostError, match="cost has 4 entries, none for sample"):
        compute([1, 2, 3, 4], indices=[0, index])


def test_costs_that_are_all_zero_count_as_equal() -> None:
    assert compute([0, 0, 0, 0]) == [1.0, 1.0, 1.0, 1.0]
    assert compute([0, 0, 0, 1]) == [0.0, 0.0, 0.0, 1.0]


def test_a_sequence_that_cannot_be_sliced_is_read_one_by_one() -> None:
    assert compute(UserList([4, 3, 2, 1])) == [4.0, 3.0, 2.0, 1.0]
    assert compute(OneByOne()) == [0.0, 1.0, 2.0, 3.0]


def test_a_dataset_without_a_length_takes_a_sequence_of_any_length() -> None:
    class Endless:
        def __getitem__(self, index: int) -> int:
            return index

    assert compute([1, 2, 3], Endless(), [2, 0]) == [3.0, 1.0]


# --- callables ------------------------------------------------------------------------------------------------------


def test_a_callable_is_given_each_sample_once() -> None:
    dataset = Texts("a", "four", "to", "three")

    assert compute(lambda sample: len(sample["text"]), dataset, [3, 1]) == [5.0, 4.0]
    assert dataset.num_read == 2


@pytest.mark.parametrize("number", [2, 2.0, np.float32(2), np.array(2), torch.tensor(2.0), True])
def test_a_callable_may_return_any_kind_of_number(number: Any) -> None:
    assert compute(lambda _: number, indices=[0]) == [float(number)]


def test_a_callable_works_with_indices_of_any_type() -> None:
    assert compute(len, {"b": "four", "a": "x"}, ["a", "b"]) == [1.0, 4.0]


def test_indices_in_an_array_reach_the_dataset_as_plain_integers() -> None:
    class Strict:
        def __getitem__(self, index: object) -> str:
            assert type(index) is int
            return "abc"

    assert compute(len, Strict(), np.array([1, 2], dtype=np.int64)) == [3.0, 3.0]


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf])
def test_a_bad_number_of_a_callable_is_named_by_the_dataset_index(bad: float) -> None:
    with pytest.raises(CostError, match=f"cost of sample 3 must be at least 0 and finite, got {bad!r}"):
        compute(lambda sample: bad if sample["text"] == "three" else 1.0, indices=[1, 3, 0])


@pytest.mark.parametrize("bad", [None, "5", [1], torch.zeros(3)])
def test_a_callable_must_return_a_number(bad: Any) -> None:
    with pytest.raises(CostError, match="cost of sample 2 must be a number, got"):
        compute(lambda _: bad, indices=[2])


def test_a_callable_that_raises_is_named_with_its_index_and_cause() -> None:
    with pytest.raises(CostError, match="cost of sample 2: the callable raised ZeroDivisionError") as caught:
        compute(lambda sample: 1 / (2.5 - sample["weight"]))

    assert isinstance(caught.value.__cause__, ZeroDivisionError)


def test_a_sample_that_cannot_be_read_is_named_with_its_index_and_cause() -> None:
    with pytest.raises(CostError, match="cost of sample 9: to read it raised IndexError") as caught:
        compute(lambda _: 1.0, indices=[0, 9])

    assert isinstance(caught.value.__cause__, IndexError)


def test_an_interrupt_goes_through() -> None:
    def interrupted(_: Any) -> float:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compute(interrupted)


# --- names ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor, lambda values: FrameColumn(values)])
def test_a_name_can_be_an_attribute_of_the_dataset(kind: Any) -> None:
    dataset = Texts("a", "four", lengths=kind([1, 4]))

    assert compute("lengths", dataset, [1, 0]) == [4.0, 1.0]
    assert dataset.num_read == 0


def test_entries_that_are_no_numbers_count_by_their_size() -> None:
    assert compute("texts") == [1.0, 4.0, 2.0, 5.0]


def test_a_name_can_be_a_key_of_each_sample() -> None:
    assert compute("weight") == [0.5, 1.5, 2.5, 3.5]
    assert compute("text", indices=[3]) == [5.0]
    assert compute("ids", indices=[1, 0]) == [4.0, 1.0]


def test_a_name_can_be_an_attribute_of_each_sample() -> None:
    pair = namedtuple("pair", ("image", "size"))

    assert compute("size", [pair(None, 3), pair(None, 4)], range(2)) == [3.0, 4.0]
    assert compute("image", [pair(torch.zeros(3, 2), 3)], range(1)) == [6.0]


def test_a_name_can_be_a_key_of_a_mapping_that_is_no_dict() -> None:
    assert compute("ids", [UserDict(ids=[1, 2])], range(1)) == [2.0]


def test_a_name_can_be_a_key_of_a_columnar_dataset() -> None:
    class Columnar:
        def __init__(self) -> None:
            self._columns = {"n": np.array([5, 6]), "x": torch.zeros(2, 3)}

        def __len__(self) -> int:
            return 2

        def keys(self) -> Any:
            return self._columns.keys()

        def __getitem__(self, key: str) -> Any:
            return self._columns[key]

    assert compute("n", Columnar(), [1, 0]) == [6.0, 5.0]
    assert compute("x", Columnar(), [1]) == [3.0]


def test_a_name_can_be_a_column() -> None:
    assert compute("length", Columns(), [2, 0]) == [9.0, 7.0]
    assert compute("ids", Columns(), [2, 0]) == [3.0, 1.0]


def test_a_method_of_the_dataset_is_no_column() -> None:
    with pytest.raises(CostError, match="cost names '__len__'"):
        compute("__len__")


def test_an_attribute_of_another_length_names_both_lengths() -> None:
    with pytest.raises(CostError, match="cost 'lengths' must have one entry per sample, 2, got 3"):
        compute("lengths", Texts("a", "b", lengths=[1, 2, 3]), range(2))


def test_a_bad_number_in_an_attribute_is_named_by_its_index() -> None:
    with pytest.raises(CostError, match="cost 'lengths' of sample 1 must be at least 0"):
        compute("lengths", Texts("a", "b", lengths=[1, -2]), range(2))
    with pytest.raises(CostError, match="cost 'lengths' of sample 1 must be a number, got None"):
        compute("lengths", Texts("a", "b", lengths=[1, None]), range(2))


def test_an_unknown_name_tells_what_there_is() -> None:
    with pytest.raises(CostError) as caught:
        compute("tokens")

    assert str(caught.value) == (
        "cost names 'tokens', which Texts does not have; there are attributes ['lengths', 'texts'], keys of a sample"
        " ['ids', 'text', 'weight']"
    )


def test_an_unknown_column_tells_the_columns() -> None:
    with pytest.raises(CostError, match=r"there are columns \['ids', 'length'\], keys of a sample"):
        compute("tokens", Columns(), range(3))


def test_a_name_in_samples_without_names_tells_their_type() -> None:
    with pytest.raises(CostError, match="TensorDataset does not have; there are attributes"):
        compute("tokens", TensorDataset(torch.zeros(3, 2)), range(3))
    with pytest.raises(CostError, match="list does not have; its samples are of type int"):
        compute("tokens", [1, 2], range(2))


# --- datasets of datasets -------------------------------------------------------------------------------------------


def test_a_subset_has_the_columns_of_its_whole() -> None:
    dataset = Texts("a", "four", "to", "three")
    subset = Subset(Subset(dataset, [3, 2, 1]), [2, 0])

    assert compute("lengths", subset, range(2)) == [4.0, 5.0]
    assert compute("texts", subset, [1]) == [5.0]
    assert dataset.num_read == 0
    assert compute("text", subset, [1]) == [5.0]


def test_a_subset_may_hold_its_indices_in_a_tensor() -> None:
    subset = Subset(TEXTS, torch.tensor([3, 2]))  # type: ignore[arg-type]  # as torch.randperm makes them

    assert compute("lengths", subset, [1, torch.tensor(0)]) == [2.0, 5.0]


def test_a_part_of_a_concatenation_with_costs_of_the_wrong_length_is_named() -> None:
    parts = [Texts("a", lengths=[1, 2]), Texts("b", "c", lengths=[1])]

    with pytest.raises(CostError, match="cost 'lengths' of part 0 must have one entry per sample, 1, got 2"):
        compute("lengths", ConcatDataset(parts), range(3))


def test_a_random_split_has_the_columns_of_its_whole() -> None:
    parts = random_split(TEXTS, [1, 3], generator=torch.Generator().manual_seed(0))

    for part in parts:
        assert compute("lengths", part, range(len(part))) == [len(part[i]["text"]) for i in range(len(part))]


def test_an_attribute_of_a_subset_itself_comes_first() -> None:
    subset = Subset(TEXTS, [3, 2])
    subset.lengths = [70, 80]  # type: ignore[attr-defined]  # the user's own

    assert compute("lengths", subset, range(2)) == [70.0, 80.0]


def test_a_sequence_for_a_subset_is_indexed_by_the_subset() -> None:
    assert compute([5, 6], Subset(TEXTS, [3, 2]), [1, 0]) == [6.0, 5.0]
    with pytest.raises(CostError, match="one entry per sample, 2, got 4"):
        compute([1, 2, 3, 4], Subset(TEXTS, [3, 2]), [1, 0])


def test_a_concatenation_has_the_columns_that_all_of_its_parts_have() -> None:
    first, second = Texts("a", "four"), Texts("to", lengths=torch.tensor([2.5]))
    both = ConcatDataset([first, Subset(second, [0]), Columns()])  # type: ignore[list-item]  # it only needs a length

    assert compute("lengths", ConcatDataset([first, second]), [2, 0]) == [2.5, 1.0]
    assert first.num_read + second.num_read == 0
    assert compute("ids", both, [5, 1]) == [3.0, 4.0]  # the texts have it in their samples alone
    with pytest.raises(CostError, match="names 'lengths'"):
        compute("lengths", both, range(6))


# --- hugging face ---------------------------------------------------------------------------------------------------


@needs_hugging_face
@pytest.mark.parametrize("form", [None, "torch", "numpy", "arrow"])
def test_a_hugging_face_column_counts_numbers_and_sizes_in_every_format(form: str | None) -> None:
    dataset = hugging_face.Dataset.from_dict({"text": ["a", "bcd"], "ids": [[1, 2], [3]], "length": [4, 5]})
    dataset = dataset.with_format(form)

    assert compute("length", dataset, [1, 0]) == [5.0, 4.0]
    assert compute("ids", dataset, [1, 0]) == [1.0, 2.0]
    assert compute("text", dataset, range(2)) == [1.0, 3.0]
    assert compute("length", dataset.select([1]), range(1)) == [5.0]
    assert compute("length", Subset(dataset, [1]), range(1)) == [5.0]
    assert compute(dataset.with_format(None)["length"], dataset, [1]) == [5.0]


@needs_hugging_face
def test_a_hugging_face_column_outside_the_format_counts_too() -> None:
    dataset = hugging_face.Dataset.from_dict({"ids": [[1, 2], [3]], "length": [4, 5]})
    dataset.set_format("torch", columns=["ids"])

    assert compute("length", dataset, [1]) == [5.0]


@needs_hugging_face
def test_an_unknown_hugging_face_column_tells_the_columns() -> None:
    dataset = hugging_face.Dataset.from_dict({"ids": [[1, 2], [3]], "length": [4, 5]})

    with pytest.raises(CostError, match=r"there are columns \['ids', 'length'\]"):
        compute("tokens", dataset, range(2))


# --- vectors and wrong types ----------------------------------------------------------------------------------------


def test_a_mapping_gives_each_kind_of_cost() -> None:
    cost = {"compute": "lengths", "memory": [1, 2, 3, 4], "io": lambda sample: sample["weight"]}
    costs = sample_costs(cost, TEXTS, [3, 0])

    assert costs.memory is not None
    assert costs.io is not None
    assert (costs.compute.tolist(), costs.memory.tolist(), costs.io.tolist()) == ([5.0, 1.0], [4.0, 1.0], [3.5, 0.5])


def test_a_bad_number_in_a_mapping_names_its_kind() -> None:
    with pytest.raises(CostError, match="memory cost of sample 1 must be at least 0"):
        sample_costs({"compute": "lengths", "memory": [1, -1, 1, 1]}, TEXTS, range(4))


@pytest.mark.parametrize("keys", [(), ("memory",), ("compute", "network"), (0, 1)])
def test_a_mapping_must_name_compute_and_known_kinds(keys: tuple[Any, ...]) -> None:
    with pytest.raises(ConfigError, match="cost must have the key 'compute' and no others than"):
        sample_costs(dict.fromkeys(keys, len), TEXTS, range(4))


@pytest.mark.parametrize("cost", [5, 1.5, {1.0, 2.0}, object(), {"compute": {"compute": len}}])
def test_what_is_no_cost_is_refused(cost: Any) -> None:
    with pytest.raises(ConfigError, match="cost must be a callable, a sequence, an array, a name, or a mapping"):
        sample_costs(cost, TEXTS, range(4))


# --- batch_elements -------------------------------------------------------------------------------------------------

X = torch.zeros(4, 8)


@dataclass
class Batch:
    x: torch.Tensor
    names: list[str]


@pytest.mark.parametrize(
    ("batch", "elements"),
    [
        (X, 32),
        (torch.tensor(1.0), 1),
        (torch.zeros(0, 8), 0),
        ({"ids": X, "mask": X, "label": torch.zeros(4)}, 68),
        (UserDict(ids=X, mask=X), 64),
        ([X, X], 64),
        ((X, ["a", "b"], None, 5), 32),
        ({"x": {"y": [X, (X,)]}}, 64),
        (Batch(X, ["a"]), 32),
        ([Batch(X, []), {"x": X}], 64),
        (namedtuple("pair", "x y")(X, 1), 32),
        ([X] * 100, 3200),
        (torch.nn.utils.rnn.pack_sequence([torch.zeros(3), torch.zeros(2)]), 8),
        (torch.nested.nested_tensor([torch.zeros(3), torch.zeros(2)], layout=torch.jagged), 5),
        (Batch, None),
        (["a"] * 1000, None),
        (list(range(1000)), None),
        ({}, None),
        ([], None),
        (None, None),
        ("text", None),
        (np.zeros(3), None),
        (5, None),
    ],
)
def test_elements_of_all_tensors_are_counted(batch: Any, elements: int | None) -> None:
    assert batch_elements(batch) == elements


def test_elements_of_what_a_tokenizer_gives_are_counted() -> None:
    encoding = pytest.importorskip("transformers").BatchEncoding({"input_ids": X, "attention_mask": X})

    assert batch_elements(encoding) == 64
