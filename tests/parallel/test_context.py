"""Tokens of every sequence cut over ranks: which rank has which, and attention over them equal to one process'."""

from __future__ import annotations

from functools import cache, partial
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from ranks import TIMEOUT, in_processes
from torch import Tensor

from hybridflow.core.batch import Batch, Ragged
from hybridflow.core.placement import Mesh
from hybridflow.core.seeding import torch_generator
from hybridflow.models import context
from hybridflow.models.context import ContextAttention
from hybridflow.models.decoder import CausalAttention, Decoder, Part, init_weights
from hybridflow.models.policy import TextPolicy
from hybridflow.models.spec import DecoderSpec
from hybridflow.parallel.context import Dealt, gathering_sends_less, holders, num_own, parts_of_tokens, positions_of
from hybridflow.parallel.mesh import Line, ProcessMesh
from hybridflow.parallel.shard import cuts, deal_heads
from hybridflow.parallel.tensor import sum_shared
from hybridflow.workers.parts import Cut, Lines

MOST, HEAD_DIM = 4, 8
ROWS = {
    "one": [37],
    "one, even": [32],
    "uneven": [9, 1, 23, 2, 14],
    "short": [1, 3, 2],
    "fewer tokens than ranks": [1],
    "equal": [12, 12, 12],
}
HEADS = {"as many": (4, 4), "groups": (6, 3), "one for all": (4, 1), "fewer than ranks": (4, 2), "more ranks": (2, 1)}
WAYS = ("gather", "exchange")
OPTIONS = ((False, False), (True, False), (False, True))
"""sequence parallelism, activation checkpointing"""
lengths_of_rows = st.lists(st.integers(1, 40), min_size=1, max_size=6).map(np.array)
few_ranks = st.integers(1, 8)


@given(lengths_of_rows, few_ranks)
@settings(max_examples=30, deadline=None)
def test_a_rank_has_two_parts_of_every_sequence(lengths: np.ndarray, ranks: int) -> None:
    start, found = 0, holders(lengths, ranks)
    for length in lengths:
        for number, part in enumerate(cuts(length, 2 * ranks)):
            holder = min(number, 2 * ranks - 1 - number)
            assert (found[start + part.start : start + part.stop] == holder).all()
        start += length
    assert (
        len(found) == start
        and [num_own(lengths, Line(ranks, r)) for r in range(ranks)] == np.bincount(found, minlength=ranks).tolist()
    )


@given(lengths_of_rows, st.integers(1, 9))
@settings(max_examples=30, deadline=None)
def test_positions_and_parts_are_those_within_a_sequence(lengths: np.ndarray, parts: int) -> None:
    assert positions_of(lengths).tolist() == [place for length in lengths for place in range(length)]
    expected = [number for length in lengths for number, part in enumerate(cuts(length, parts)) for _ in part]
    assert parts_of_tokens(lengths, parts).tolist() == expected


@given(st.integers(1, 8))
@settings(max_examples=8, deadline=None)
def test_ranks_have_as_much_of_a_long_sequence_and_of_its_attention(ranks: int) -> None:
    lengths = np.array([4096])
    tokens = np.bincount(holders(lengths, ranks))
    pairs = np.bincount(holders(lengths, ranks), positions_of(lengths) + 1)
    assert tokens.max() - tokens.min() <= 2 and pairs.max() < 1.01 * pairs.min()


@given(st.integers(1, 4), st.integers(1, 6), st.data())
@settings(max_examples=30, deadline=None)
def test_every_query_head_is_dealt_once_with_the_key_value_head_that_it_reads(
    kv_heads: int, group: int, data: st.DataObject
) -> None:
    heads = kv_heads * group
    dealt = deal_heads(heads, kv_heads, data.draw(st.integers(1, heads)))
    assert [head for queries, *_ in dealt for head in queries] == list(range(heads))
    assert [head for _, kv, owner in dealt if owner for head in kv] == list(range(kv_heads))
    for queries, kv, _ in dealt:
        assert len(queries) and {head // group for head in queries} == set(kv)
        assert len(queries) % len(kv) == 0  # as attention of groups wants it


@pytest.mark.parametrize(("heads", "kv_heads", "ranks"), [(8, 8, 2), (8, 8, 4), (9, 3, 2), (9, 3, 4), (8, 2, 4), (8, 2, 8)])
def test_the_way_that_sends_less_is_taken(heads: int, kv_heads: int, ranks: int) -> None:
    """Counted number by number, of ranks with one token each."""
    copies = sum(len(kv) for _, kv, _ in deal_heads(heads, kv_heads, ranks))
    gathered = ranks * (ranks - 1) * 2 * kv_heads
    exchanged = (ranks - 1) * (heads + 2 * copies) + (ranks - 1) * heads
    assert gathering_sends_less(heads, kv_heads, ranks) == (gathered < exchanged)


def test_more_ranks_than_heads_can_only_gather() -> None:
    assert gathering_sends_less(2, 2, 3)


def test_without_a_line_nothing_is_cut() -> None:
    dealt, x = Dealt(np.zeros(3, np.int64), Line()), torch.arange(3)
    assert dealt.take(x) is x and dealt.whole(x) is x


# ------------------------------------------------------------------------------------------------------- real processes


class Attended(NamedTuple):
    """What came out, and the gradients of q, k and v, whole."""

    out: Tensor
    gradients: tuple[Tensor, ...]


def numbers(name: str, heads: str) -> tuple[Tensor, ...]:
    """q, k, v and the gradient of the result, [N, heads, E]."""
    total, (queries, keys) = sum(ROWS[name]), HEADS[heads]
    sizes = (queries, keys, keys, queries)
    return tuple(
        torch.randn(total, size, HEAD_DIM, generator=torch_generator(seed, "test", name)) for seed, size in enumerate(sizes)
    )


@cache
def alone(name: str, heads: str) -> Attended:
    """Row by row, by the definition."""
    q, k, v, gradient = (x.requires_grad_() for x in numbers(name, heads))
    outs = []
    for rows in zip(*(x.split(ROWS[name]) for x in (q, k, v)), strict=True):
        one, keys, values = (x.transpose(0, 1) for x in rows)
        keys, values = (x.repeat_interleave(len(one) // len(x), dim=0) for x in (keys, values))
        scores = one @ keys.transpose(1, 2) / HEAD_DIM**0.5
        future = torch.ones(scores.shape[1:]).triu(1).bool()
        outs.append((F.softmax(scores.masked_fill(future, -torch.inf), -1) @ values).transpose(0, 1))
    out = torch.cat(outs)
    return Attended(out.detach(), torch.autograd.grad(out, (q, k, v), gradient.detach()))


def attended(line: Line, name: str, heads: str, way: str, dtype: torch.dtype = torch.float32) -> Attended:
    attention = ContextAttention(np.array(ROWS[name]), line, torch.device("cpu"))
    dealt = attention.dealt
    assert torch.equal(attention.positions, torch.from_numpy(positions_of(attention.lengths)[dealt.own]))
    q, k, v, gradient = (dealt.take(x.to(dtype)).detach().requires_grad_() for x in numbers(name, heads))
    out = attention.gather(q, k, v) if way == "gather" else attention.exchange(0, q, k, v)
    gradients = torch.autograd.grad(out, (q, k, v), gradient)
    return Attended(dealt.whole(out).detach(), tuple(dealt.whole(x) for x in gradients))


def traffic(line: Line, heads: str, way: str) -> int:
    """Bytes that this rank sends for both ways, of a sequence of 32 tokens."""
    attention = ContextAttention(np.array([32]), line, torch.device("cpu"))
    q, k, v, gradient = (attention.dealt.take(x).requires_grad_() for x in numbers("one, even", heads))
    line.traffic.clear()
    out = attention.gather(q, k, v) if way == "gather" else attention.exchange(0, q, k, v)
    out.backward(gradient)
    return line.traffic.total()


def ways(heads: str, ranks: int) -> tuple[str, ...]:
    return WAYS if HEADS[heads][0] >= ranks else WAYS[:1]


def whole_losses(line: Line) -> tuple[Tensor, Tensor]:
    """Numbers of all ranks as one loss sees them, and the gradient of this rank's."""
    dealt = Dealt(np.arange(7) % 3 % line.size, line)
    x = dealt.take(torch.arange(7.0)).requires_grad_()
    whole = dealt.whole(x)
    (whole**2).sum().backward()
    assert x.grad is not None
    return whole.detach(), dealt.whole(x.grad)


def policy(part: Part, checkpointing: bool = False) -> TextPolicy:
    body = Decoder(DecoderSpec("qwen3", 30, 18, 23, 2, 6, 3, 4, 64, qk_norm=True), part)
    init_weights(body, torch_generator(0, "test"))
    body.activation_checkpointing = checkpointing
    return TextPolicy(body, temperature=0.7)


def trained(network: TextPolicy) -> tuple[float, dict[str, Tensor]]:
    """A loss of all outputs, and its gradients."""
    lengths = np.array([9, 2, 23, 3])
    mask = np.concatenate([np.arange(length) >= 1 + length // 3 for length in lengths])
    tokens = np.random.default_rng(7).integers(0, 30, lengths.sum())
    outputs = network.outputs(Batch({"tokens": Ragged(tokens, lengths), "response_mask": Ragged(mask, lengths)}))
    weights = torch.arange(mask.sum()).cos()
    loss = (outputs["log_probs"] * weights).sum() + (outputs["entropy"] * weights.flip(0)).sum()
    loss.backward()
    return float(loss.detach()), {name: x.grad for name, x in network.named_parameters() if x.grad is not None}


def whole_model(mesh: ProcessMesh, sequence: bool, checkpointing: bool) -> tuple[float, dict[str, Tensor]]:
    """Of a model that is cut over tensor parallelism, too."""
    network = policy(Part(tp=mesh.tp, cp=mesh.cp, sequence_parallel=sequence), checkpointing)
    loss, gradients = trained(network)
    cut = Cut(network, Lines(tp=mesh.tp))
    for gradient in gradients.values():
        mesh.cp.all_reduce(gradient)
    sum_shared(mesh.tp, gradients, cut.shards)
    return loss, cut.full(gradients)


def everything(rank: int) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    groups: dict[tuple[int, ...], Any] = {}
    for ranks in (2, 3, 4):
        mesh = ProcessMesh(Mesh(cp=ranks), rank, TIMEOUT, groups)
        if rank >= ranks:
            continue
        for heads in HEADS:
            for way in ways(heads, ranks):
                for name in ROWS:
                    found[ranks, name, heads, way] = attended(mesh.cp, name, heads, way)
                found[ranks, "sent", heads, way] = traffic(mesh.cp, heads, way)
        with mock.patch.object(context, "QUERIES", 2):
            found[ranks, "pieces"] = {name: attended(mesh.cp, name, "groups", "gather") for name in ROWS}
        found[ranks, "bfloat16"] = [attended(mesh.cp, "uneven", "groups", way, torch.bfloat16) for way in WAYS]
        found[ranks, "whole"] = whole_losses(mesh.cp)
    mesh = ProcessMesh(Mesh(tp=2, cp=2), rank, TIMEOUT, groups)
    for options in OPTIONS:
        found[options] = whole_model(mesh, *options)
    mesh = ProcessMesh(Mesh(dp=2, cp=2), rank, TIMEOUT, groups)
    found["lines"] = [(line.size, line.index) for line in (mesh.dp, mesh.cp, mesh.dp_cp, mesh.tp, mesh.pp)]
    return found


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    return in_processes(partial(everything), MOST, tmp_path_factory.mktemp("ranks"))


CASES = [(ranks, name, heads, way) for ranks in (2, 3, 4) for name in ROWS for heads in HEADS for way in ways(heads, ranks)]


@pytest.mark.parametrize(("ranks", "name", "heads", "way"), CASES)
def test_attention_is_that_of_one_process(
    results: list[dict[Any, Any]], ranks: int, name: str, heads: str, way: str
) -> None:
    expected = alone(name, heads)
    for found in results[:ranks]:
        here: Attended = found[ranks, name, heads, way]
        torch.testing.assert_close(here.out, expected.out, rtol=1e-5, atol=2e-6)
        for mine, theirs in zip(here.gradients, expected.gradients, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("name", ROWS)
def test_attention_piece_by_piece_is_that_of_whole_parts(results: list[dict[Any, Any]], ranks: int, name: str) -> None:
    for found in results[:ranks]:
        here, expected = found[ranks, "pieces"][name], alone(name, "groups")
        for mine, theirs in zip((here.out, *here.gradients), (expected.out, *expected.gradients), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=5e-6)


@pytest.mark.parametrize("name", ROWS)
def test_the_attention_of_one_process_is_that_of_the_decoder(name: str) -> None:
    q, k, v, _ = numbers(name, "groups")
    out = CausalAttention(torch.tensor(ROWS[name]))(0, q, k, v)
    torch.testing.assert_close(out, alone(name, "groups").out, rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_bfloat16_differs_by_its_rounding(results: list[dict[Any, Any]], ranks: int) -> None:
    expected = alone("uneven", "groups")
    for here in results[0][ranks, "bfloat16"]:
        assert here.out.dtype == torch.bfloat16
        assert 0 < float((here.out.float() - expected.out).abs().max()) < 0.05


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("heads", HEADS)
def test_what_is_sent_is_what_the_formula_says(results: list[dict[Any, Any]], ranks: int, heads: str) -> None:
    """Summed over ranks; N tokens, forward and back. Gathered: 2 K numbers of each to all others. Exchanged: to all others
    what they need of their heads, and back attended tokens."""
    (queries, keys), number = HEADS[heads], 32 * HEAD_DIM * 4
    dealt = deal_heads(queries, keys, ranks) if queries >= ranks else []
    own = np.bincount(holders(np.array([32]), ranks))
    sent = {way: sum(found[ranks, "sent", heads, way] for found in results[:ranks]) for way in ways(heads, ranks)}
    assert sent["gather"] == 2 * (ranks - 1) * 2 * keys * number
    if dealt:
        needed = np.array([2 * len(q) + 2 * len(kv) for q, kv, _ in dealt])
        assert sent["exchange"] == 2 * HEAD_DIM * 4 * int(((32 - own) * needed).sum())


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_loss_sees_the_numbers_of_all_ranks_and_each_gets_its_own_gradient(
    results: list[dict[Any, Any]], ranks: int
) -> None:
    for found in results[:ranks]:
        whole, gradient = found[ranks, "whole"]
        assert whole.tolist() == list(range(7)) and gradient.tolist() == [2.0 * i for i in range(7)]


@pytest.mark.parametrize("options", OPTIONS)
def test_it_goes_with_tensor_parallelism_and_checkpointing(
    results: list[dict[Any, Any]], options: tuple[bool, bool]
) -> None:
    loss, gradients = trained(policy(Part()))
    for found in results:
        assert found[options][0] == pytest.approx(loss, rel=1e-5)
        assert found[options][1].keys() == gradients.keys()
        for name, gradient in gradients.items():
            torch.testing.assert_close(found[options][1][name], gradient, rtol=1e-4, atol=1e-5, msg=name)


def test_the_lines_of_data_and_context_parallelism(results: list[dict[Any, Any]]) -> None:
    assert [found["lines"] for found in results] == [
        [(2, d), (2, c), (4, 2 * d + c), (1, 0), (1, 0)] for d in (0, 1) for c in (0, 1)
    ]
