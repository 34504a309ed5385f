from __future__ import annotations

import dataclasses
import pickle
import types
from collections import OrderedDict, UserDict, defaultdict
from typing import Any

import pytest
import torch
import torch.distributed as dist

from lightning_hybrid.runtime.results import (
    Piece,
    _pickled,
    gather_pieces,
    has_rows,
    independent,
    join_rows,
    map_tensors,
    num_rows,
    pick_rows,
    plain,
    row_form,
    row_of,
    take_rows,
)
from tests.ranks import run_ranks
from tests.runtime.outputs import Scores, output_of, same

pytestmark = pytest.mark.timeout(60)


# --- plain ----------------------------------------------------------------------------------------------------------


def test_inference_tensors_become_ordinary_ones() -> None:
    with torch.inference_mode():
        output = {"y": torch.ones(3), "pair": (torch.zeros(2), [torch.ones(1)])}
    made = plain(output)

    tensors = [made["y"], made["pair"][0], made["pair"][1][0]]
    assert not any(tensor.is_inference() for tensor in tensors)
    assert output["y"].is_inference()
    made["y"].add_(torch.ones(3, requires_grad=True).detach())
    assert made["y"].tolist() == [2.0, 2.0, 2.0]


def test_inference_tensors_become_ordinary_inside_of_inference_mode_as_well() -> None:
    with torch.inference_mode():
        assert not plain(torch.ones(3)).is_inference()


@pytest.mark.parametrize("view", [lambda t: t[:2], lambda t: t[5], lambda t: t[:, 0], lambda t: t[::400]])
def test_a_view_does_not_drag_the_whole_tensor_along(view: Any) -> None:
    whole = torch.arange(4000.0).reshape(1000, 4)
    made = plain({"y": view(whole)})["y"]

    assert torch.equal(made, view(whole))
    assert made.untyped_storage().nbytes() == made.nbytes
    assert len(pickle.dumps(made)) < made.nbytes + 1000


def test_a_view_made_in_inference_mode_is_cut_loose_too() -> None:
    with torch.inference_mode():
        view = torch.arange(4000.0)[:3]
    made = plain(view)

    assert not made.is_inference()
    assert made.untyped_storage().nbytes() == 12


def test_an_ordinary_tensor_is_not_copied() -> None:
    tensor = torch.ones(5)

    assert plain([tensor])[0].data_ptr() == tensor.data_ptr()


def test_a_tensor_is_taken_out_of_its_graph() -> None:
    weight = torch.ones(3, requires_grad=True)
    made = plain({"y": weight * 2, "w": weight})

    assert not made["y"].requires_grad
    assert not made["w"].requires_grad
    assert weight.requires_grad


@pytest.mark.parametrize(
    "tensor",
    [torch.eye(3).to_sparse(), torch.ones(0, 4), torch.tensor(3), torch.ones(2).bool()],
    ids=["sparse", "empty", "scalar", "bool"],
)
def test_any_tensor_stays_equal(tensor: torch.Tensor) -> None:
    made = plain(tensor)

    assert made.layout == tensor.layout
    assert torch.equal(made.to_dense(), tensor.to_dense())


def test_every_structure_keeps_its_type() -> None:
    with torch.inference_mode():
        y = torch.ones(2)
    made = plain([OrderedDict(a=y), UserDict(b=y), Scores(y, ["n"]), (y, None), "text", 3, {"set": {1, 2}}])

    assert [type(part) for part in made] == [OrderedDict, UserDict, Scores, tuple, str, int, dict]
    assert made[2].names == ["n"]
    assert made[3][1] is None
    assert made[6] == {"set": {1, 2}}


def test_a_mapping_that_is_not_made_from_a_dict_becomes_one() -> None:
    assert map_tensors(defaultdict(list, a=torch.ones(1)), lambda t: t + 1) == {"a": torch.tensor([2.0])}
    assert map_tensors(types.MappingProxyType({"a": 1}), lambda t: t) == {"a": 1}


def test_a_function_reaches_every_tensor() -> None:
    seen: list[float] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        seen.append(tensor.item())
        return tensor

    one, two, three, four = (torch.tensor(float(i)) for i in range(1, 5))
    map_tensors({"a": one, "b": [two, {"c": (three,)}], "d": Scores(four, "x")}, note)

    assert seen == [1.0, 2.0, 3.0, 4.0]


# --- rows -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("output", "rows"),
    [
        (torch.ones(3), True),
        (torch.ones(3, 7), True),
        (torch.ones(4, 3), False),
        (torch.tensor(3.0), False),
        ({"y": torch.ones(3), "n": ["a", "b", "c"]}, True),
        ({"y": torch.ones(3), "n": ["a", "b"]}, False),
        ({"y": torch.ones(3), "loss": torch.tensor(0.5)}, False),
        ({}, False),
        ((torch.ones(3), torch.ones(3, 2)), True),
        ((torch.ones(3), torch.ones(2)), False),
        ((), False),
        (Scores(torch.ones(3), ["a", "b", "c"]), True),
        (Scores(torch.ones(3), None), False),
        (["a", "b", "c"], True),
        ([{"box": 1}, {"box": 2}, {"box": 3}], True),
        ([None, None, None], True),
        (["a", "b"], False),
        # not samples but parts of the batch
        ([torch.ones(3), torch.ones(3), torch.ones(3)], False),
        ([["a"], ["b"], ["c"]], False),
        ([(1, 2), (3, 4), (5, 6)], False),
        (None, False),
        ("abc", False),
        (3, False),
    ],
)
def test_rows_are_the_first_dimension_of_every_part(output: Any, rows: bool) -> None:
    assert has_rows(output, 3) is rows


@pytest.mark.parametrize(
    "output",
    [
        torch.arange(6),
        torch.arange(12.0).reshape(6, 2),
        [f"n{i}" for i in range(6)],
        (torch.arange(6), ["a", "b", "c", "d", "e", "f"]),
        Scores(torch.arange(6), list("abcdef")),
        {"y": torch.arange(6), "deep": {"pair": (torch.ones(6, 2), list("abcdef"))}},
        OrderedDict(y=torch.arange(6), n=list("abcdef")),
    ],
    ids=lambda output: type(output).__name__,
)
@pytest.mark.parametrize("cuts", [[6], [1, 6], [2, 4, 6], [1, 2, 3, 4, 5, 6]])
def test_rows_that_were_taken_apart_are_joined_to_the_same(output: Any, cuts: list[int]) -> None:
    parts = [take_rows(output, start, stop) for start, stop in zip([0, *cuts], cuts, strict=False)]

    assert all(has_rows(part, stop - start) for part, start, stop in zip(parts, [0, *cuts], cuts, strict=False))
    assert same(join_rows(parts), output)


# --- forms and rows -------------------------------------------------------------------------------------------------


def test_a_row_of_every_part() -> None:
    row = row_of(output_of(4, 7), 1)

    assert (row["ids"].item(), row["names"], row["pair"].logits.item()) == (5, "sample 5", 10)
    assert row["features"].tolist() == [5.0, 5.0, 5.0]


@pytest.mark.parametrize("output", [output_of(0, 6), torch.ones(6, 2), (torch.ones(6), ["a"] * 6), ["x"] * 6])
def test_the_number_of_rows(output: Any) -> None:
    assert num_rows(output) == 6


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        (torch.ones(2, 3), torch.ones(5, 3), True),
        (torch.ones(2, 3), torch.ones(2, 4), False),
        (torch.ones(2), torch.ones(2).double(), False),
        ({"a": torch.ones(2), "b": ["x"]}, {"b": ["y", "z"], "a": torch.ones(3)}, True),
        ({"a": torch.ones(2)}, {"b": torch.ones(2)}, False),
        ((torch.ones(2),), Scores(torch.ones(2), ["a", "b"]), False),
        (["a"], None, False),
    ],
)
def test_rows_of_equal_forms_fit_together(one: Any, other: Any, alike: bool) -> None:
    assert (row_form(one) == row_form(other)) is alike


def test_rows_are_picked_from_several_outputs() -> None:
    one, other = output_of(0, 3), output_of(3, 7)

    assert same(
        pick_rows([other, one, one, other], [3, 0, 1, 0]), join_rows([output_of(i, i + 1) for i in (6, 0, 1, 3)])
    )


def test_a_copy_shares_nothing() -> None:
    output = {"y": torch.zeros(2), "boxes": [{"x": torch.zeros(1)}], "name": "a"}
    copy = independent(output)
    copy["y"] += 1
    copy["boxes"][0]["x"] += 1
    copy["boxes"].append(None)

    assert same(output, {"y": torch.zeros(2), "boxes": [{"x": torch.zeros(1)}], "name": "a"})


# --- gather_pieces --------------------------------------------------------------------------------------------------


def gather(rank: int, world: int, to_all: bool, chunk_bytes: int) -> tuple[list[Any] | None, int]:
    """Rank r has r pieces of growing shapes; returns what it got, and in how many rounds."""
    dist.init_process_group("gloo", rank=rank, world_size=world)
    rounds = [0]
    original = dist.all_gather_object if to_all else dist.gather_object

    def counted(*args: Any, **kwargs: Any) -> None:
        rounds[0] += 1
        original(*args, **kwargs)

    setattr(dist, original.__name__, counted)
    first = 10 * rank
    pieces = [Piece(first + k, first + k + 1, mixed_output(rank, k)) for k in range(rank)]
    gathered = gather_pieces(pieces, to_all=to_all, chunk_bytes=chunk_bytes)
    dist.barrier()
    if gathered is None:
        return None, rounds[0]
    return [(piece.start, piece.stop, piece.output) for piece in gathered], rounds[0]


def mixed_output(rank: int, k: int) -> Any:
    """Outputs whose shapes, types and structures differ."""
    return [
        torch.full((rank, k + 1), float(rank)),
        {"names": [f"rank {rank}"] * k, "y": torch.arange(rank, dtype=torch.int16)},
        None,
        Scores(torch.zeros(0, 3), ["a"]),
    ][k % 4]


@pytest.mark.parametrize("to_all", [True, False], ids=["to all", "to rank zero"])
@pytest.mark.parametrize("world", [2, 3])
def test_every_rank_that_asked_gets_the_pieces_of_all(world: int, to_all: bool) -> None:
    expected = [(10 * r + k, 10 * r + k + 1, mixed_output(r, k)) for r in range(world) for k in range(r)]

    for rank, (gathered, rounds) in enumerate(run_ranks(gather, world, world, to_all, 2**20, deadline_s=40)):
        if not to_all and rank > 0:
            assert gathered is None
            continue
        assert gathered is not None
        assert same(sorted(gathered, key=lambda piece: piece[0]), expected)
        assert rounds == 1


@pytest.mark.parametrize("to_all", [True, False], ids=["to all", "to rank zero"])
def test_small_chunks_take_as_many_rounds_as_the_longest_rank_needs(to_all: bool) -> None:
    outcomes = run_ranks(gather, 3, 3, to_all, 1, deadline_s=40)

    assert [rounds for _, rounds in outcomes] == [2, 2, 2]
    gathered = outcomes[0][0]
    assert sorted(start for start, _, _ in gathered) == [10, 20, 21]


def gather_nothing(rank: int, world: int) -> list[Any]:
    dist.init_process_group("gloo", rank=rank, world_size=world)
    to_all = gather_pieces([], to_all=True, chunk_bytes=100)
    to_zero = gather_pieces([], to_all=False, chunk_bytes=100)
    return [to_all, to_zero]


@pytest.mark.parametrize(
    "dtype", [torch.bool, torch.uint8, torch.int64, torch.float16, torch.bfloat16, torch.float64, torch.complex64]
)
@pytest.mark.parametrize("shape", [(), (0,), (2, 3)])
def test_tensors_of_every_type_arrive_as_they_were(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.ones(shape).to(dtype)
    (arrived,) = pickle.loads(_pickled([tensor]))

    assert arrived.dtype == dtype
    assert torch.equal(arrived, tensor)
    arrived.zero_()
    assert torch.equal(tensor, torch.ones(shape).to(dtype))


def test_ranks_without_pieces_gather_none() -> None:
    assert run_ranks(gather_nothing, 2, 2, deadline_s=40) == [[[], []], [[], None]]


def gather_bytes(rank: int, world: int) -> list[int]:
    """The sizes of what this rank sent in each round."""
    dist.init_process_group("gloo", rank=rank, world_size=world)
    sent: list[int] = []
    original = dist.all_gather_object

    def noted(objects: list[Any], mine: Any, *args: Any) -> None:
        sent.append(len(pickle.dumps(mine)))
        original(objects, mine, *args)

    dist.all_gather_object = noted
    pieces = [Piece(i, i + 1, torch.zeros(1000, dtype=torch.uint8)) for i in range(40 * (rank + 1))]
    gathered = gather_pieces(pieces, to_all=True, chunk_bytes=10_000)
    assert gathered is not None
    assert len(gathered) == 120
    return sent


def test_no_rank_sends_much_more_than_a_chunk_at_once() -> None:
    first, second = run_ranks(gather_bytes, 2, 2, deadline_s=40)

    assert max(first + second) < 11_000
    assert len(first) == len(second) >= 8


@dataclasses.dataclass(frozen=True)
class Scored:
    score: torch.Tensor
    name: str


def test_a_dataclass_of_inference_tensors_becomes_ordinary() -> None:
    with torch.inference_mode():
        output = Scored(torch.ones(2), "a")

    assert not plain(output).score.is_inference()
    assert plain(output).name == "a"
