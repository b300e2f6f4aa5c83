"""Every rank's slices: what a decoder of its part holds, together all of the model."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hybridflow.core.errors import UserError
from hybridflow.models.decoder import Decoder, Part, part_shards
from hybridflow.models.layout import decoder_shards, fused_rows, head_cut, local_spec
from hybridflow.models.spec import DecoderSpec
from hybridflow.parallel.mesh import Line
from hybridflow.parallel.shard import cuts
from hybridflow.parallel.tensor import take

SIZES = DecoderSpec("llama", 49152, 576, 1536, 30, 9, 3, 64, 8192)


@st.composite
def specs(draw: st.DrawFn) -> tuple[DecoderSpec, int]:
    kv_heads, group = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    flags = {name: draw(st.booleans()) for name in ("tied", "qkv_bias", "output_bias", "mlp_bias", "qk_norm")}
    size = draw(st.integers(1, min(8, kv_heads * group)))
    return DecoderSpec(
        "llama", draw(st.integers(8, 20)), 6, draw(st.integers(8, 12)), 2, kv_heads * group, kv_heads, 2, 64, **flags
    ), size


@given(specs())
@settings(max_examples=30, deadline=None)
def test_the_slices_of_all_ranks_are_the_model(case: tuple[DecoderSpec, int]) -> None:
    spec, size = case
    full = {name: torch.randn(p.shape) for name, p in Decoder(spec).named_parameters()}
    tables = [decoder_shards(spec, index, size) for index in range(size)]
    assert [list(table) for table in tables] == [list(full)] * size
    for name, tensor in full.items():
        back, owners = torch.full_like(tensor, torch.nan), Counter[int]()
        for shard in (table[name] for table in tables):
            assert shard.shape == tensor.shape
            part = take(tensor, shard)
            for cut, place, owned in shard.places:
                back.narrow(shard.dim, cut.start, len(cut)).copy_(part.narrow(shard.dim, place.start, len(place)))
                owners.update([*cut] * owned)
        assert torch.equal(back, tensor)
        assert owners == Counter(range(tensor.shape[tables[0][name].dim]))


@given(specs())
@settings(max_examples=30, deadline=None)
def test_a_decoder_holds_its_slices(case: tuple[DecoderSpec, int]) -> None:
    spec, size = case
    for index in range(size):
        with torch.device("meta"):
            decoder = Decoder(spec, Part(tp=Line(size, index)))
        expected = {
            name: take(torch.empty(shard.shape, device="meta"), shard).shape
            for name, shard in decoder_shards(spec, index, size).items()
        }
        assert {name: parameter.shape for name, parameter in decoder.named_parameters()} == expected


@given(specs())
@settings(max_examples=30, deadline=None)
def test_every_query_head_has_its_key_value_head(case: tuple[DecoderSpec, int]) -> None:
    spec, size = case
    seen = []
    for index in range(size):
        heads, kv_heads, _ = head_cut(spec, index, size)
        group = len(heads) // len(kv_heads)
        assert group * len(kv_heads) == len(heads) == local_spec(spec, index, size).num_heads
        for place, head in enumerate(heads):  # as grouped attention reads them
            assert kv_heads[place // group] == head // (spec.num_heads // spec.num_kv_heads)
        seen += heads
    assert seen == [*range(spec.num_heads)]


def parts(size: int) -> list[Part]:
    """All that generate on a line of ``size`` ranks, each in pieces of one of them."""
    widths = [width for width in range(1, size + 1) if size % width == 0]
    return [Part(tp=Line(width, index), pieces=size // width) for width in widths for index in range(width)]


@given(specs())
@settings(max_examples=30, deadline=None)
def test_a_part_in_pieces_is_the_slices_of_its_ranks(case: tuple[DecoderSpec, int]) -> None:
    spec, size = case
    for part in parts(size):
        with torch.device("meta"):
            stored = {name: tuple(p.shape) for name, p in Decoder(spec, part).named_parameters()}
        tables = [decoder_shards(spec, part.tp.index * part.pieces + piece, size) for piece in range(part.pieces)]
        for name, shard in part_shards(spec, part).items():
            full = torch.randn(shard.shape)
            slices = [take(full, table[name]) for table in tables]
            expected = full if tables[0][name].whole else torch.cat(slices, shard.dim)
            assert torch.equal(take(full, shard), expected) and stored[name] == expected.shape


@given(specs())
@settings(max_examples=30, deadline=None)
def test_rows_of_pieces_are_read_in_order(case: tuple[DecoderSpec, int]) -> None:
    spec, size = case
    group, seen = spec.num_heads // spec.num_kv_heads, list[int]()
    for part in parts(size):
        local, place = local_spec(spec, part.tp.index, part.tp.size, part.pieces), (part.tp.index, part.tp.size)
        shards, fused = part_shards(spec, part), fused_rows(spec, *place, part.pieces)
        ids = []
        for name, (rows, order) in zip(("qkv", "gate_up"), ((f.rows, f.order) for f in fused), strict=True):
            shard = shards[f"layers.0.{name}.weight"]
            stored = take(torch.arange(shard.shape[0])[:, None], replace(shard, shape=(shard.shape[0], 1)))[:, 0]
            assert len(stored) == rows
            ids.append(stored[torch.tensor([row for run in order or [range(rows)] for row in run])])
        heads, kv = local.num_heads, local.num_kv_heads
        read = ids[0].view(-1, spec.head_dim)[:, 0] // spec.head_dim
        q, k, v = read.split([heads, kv, kv])
        assert q.tolist() == [*range(q[0], q[0] + heads)]
        assert torch.equal(k - spec.num_heads, v - spec.num_heads - spec.num_kv_heads)
        assert (k - spec.num_heads).repeat_interleave(heads // kv).tolist() == (q // group).tolist()
        gate, up = ids[1].split(local.intermediate_size)
        assert torch.equal(up, gate + spec.intermediate_size) and torch.equal(gate, gate[0] + torch.arange(len(gate)))
        seen += q.tolist()
    assert Counter(seen) == dict.fromkeys(range(spec.num_heads), len({part.pieces for part in parts(size)}))


def test_copies_of_a_key_value_head_are_read_once_where_query_heads_allow_it() -> None:
    one_head = replace(SIZES, num_heads=4, num_kv_heads=1, head_dim=2, intermediate_size=6)
    qkv, gate_up = fused_rows(one_head, 0, 1, 2)  # [q0 q1 k v | q2 q3 k v], [gate0 up0 | gate1 up1]
    assert (qkv.rows, qkv.order) == (16, (range(4), range(8, 12), range(4, 8)))
    assert (gate_up.rows, gate_up.order) == (12, (range(3), range(6, 9), range(3, 6), range(9, 12)))
    assert local_spec(one_head, 0, 1, 2) == one_head
    # Of 9/3 heads on 6 ranks, the first half has 3 query heads of one key-value head and 1 of the next.
    assert local_spec(SIZES, 0, 2, 3).num_kv_heads == local_spec(SIZES, 0, 2, 3).num_heads == 4
    assert fused_rows(SIZES, 1, 2)[0].order == ()


def test_heads_are_cut_in_whole_groups() -> None:
    assert [head_cut(SIZES, index, 2)[:2] for index in range(2)] == [(range(3), range(1)), (range(3, 9), range(1, 3))]
    assert [head_cut(SIZES, index, 4) for index in range(4)] == [
        (range(3), range(1), True),
        (range(3, 6), range(1, 2), True),
        (range(6, 7), range(2, 3), True),
        (range(7, 9), range(2, 3), False),
    ]
    assert cuts(7, 3) == [range(2), range(2, 4), range(4, 7)]


@pytest.mark.parametrize(
    ("size", "changes", "message"),
    [
        (10, {}, "tp = 10, but the model has 9 attention heads"),
        (8, {"intermediate_size": 7}, "8, but the model has 7 neurons in an MLP: a rank needs one; lower tp to 7"),
        (8, {"vocab_size": 5}, "8, but the model has 5 tokens in its vocabulary"),
    ],
)
def test_what_cannot_be_cut_is_refused(size: int, changes: dict[str, int], message: str) -> None:
    spec = DecoderSpec(**{**vars(SIZES), **changes})
    with pytest.raises(UserError, match=message):
        decoder_shards(spec, 0, size)
    with pytest.raises(UserError, match=message):
        Decoder(spec, Part(tp=Line(size, 0)))


@pytest.mark.parametrize("tied", [True, False])
def test_pipeline_stages_hold_the_model_once_but_for_a_tied_head(tied: bool) -> None:
    spec = DecoderSpec("llama", 31, 8, 8, 3, 2, 1, 4, 64, tied=tied)
    stages = [
        Decoder(spec, Part(range(0, 1), last=False)),
        Decoder(spec, Part(range(1, 3), first=False, last=False)),
        Decoder(spec, Part(range(3, 3), first=False)),
    ]
    names = Counter(name for stage in stages for name, _ in stage.named_parameters())
    whole = dict.fromkeys(decoder_shards(spec), 1)
    assert names == whole | ({"embed.weight": 2} if tied else {})
    owned = Counter(name for stage in stages for name, shard in stage.shards.items() if all(shard.owned))
    assert owned == whole
    bodies = [Decoder(spec, Part(range(3), first=False, head=False)), Decoder(spec, Part(head=False))]
    assert ["embed.weight" in body.shards for body in bodies] == [False, True]
    assert not any("lm_head.weight" in body.shards for body in bodies)
