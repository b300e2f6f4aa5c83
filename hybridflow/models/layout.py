"""Which slice of every parameter of a decoder a rank of a tensor-parallel line holds. Plain data: nothing is sent here.

    embed, lm_head            rows of the vocabulary
    qkv   [q | k | v]         rows of whole heads, key-value heads with the query heads that read them
    gate_up  [gate | up]      the same rows of both
    out, down                 the columns that match; their biases are whole
    norms                     whole

Everything is cut at i n // size, so nothing has to divide. With fewer key-value heads than ranks, some ranks keep copies of
one (see ``deal_heads``).

While generating, a rank of a line may hold what ``pieces`` neighbours hold while training, one behind the other, so that
its own training slice is a part of what it reads:

    qkv   [q0 k0 v0 | q1 k1 v1]       gate_up  [gate0 up0 | gate1 up1]       all others lie as in one slice
"""

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from math import gcd

from hybridflow.core.errors import UserError
from hybridflow.models.spec import DecoderSpec
from hybridflow.parallel.shard import Piece, Shard, cuts, deal_heads, lengths

__all__ = ["Fused", "decoder_pieces", "decoder_shards", "fused_rows", "head_cut", "local_spec"]


def head_cut(spec: DecoderSpec, index: int, size: int) -> tuple[range, range, bool]:
    """(query heads, key-value heads, whether it owns the latter) of rank ``index`` of ``size``.

    Raises UserError: fewer query heads, intermediate neurons or tokens than ranks.
    """
    for number, what in (
        (spec.num_heads, "attention heads"),
        (spec.intermediate_size, "neurons in an MLP"),
        (spec.vocab_size, "tokens in its vocabulary"),
    ):
        if size > number:
            raise UserError(f"mesh: tp = {size}, but the model has {number} {what}: a rank needs one; lower tp to {number}")
    return deal_heads(spec.num_heads, spec.num_kv_heads, size)[index]


def local_spec(spec: DecoderSpec, index: int, size: int, pieces: int = 1) -> DecoderSpec:
    """The sizes of a rank's slices, as they are computed with; those of the full model where nothing is cut."""
    neurons, tokens = cuts(spec.intermediate_size, size)[index], cuts(spec.vocab_size, size)[index]
    return replace(
        spec,
        num_heads=sum(len(heads) for heads, _, _ in _pieces(spec, index, size, pieces)),
        num_kv_heads=len(_read_kv_heads(spec, index, size, pieces)),
        intermediate_size=len(neurons),
        vocab_size=len(tokens),
    )


def _pieces(spec: DecoderSpec, index: int, size: int, pieces: int) -> list[tuple[range, range, bool]]:
    """The ``head_cut`` of each."""
    return [head_cut(spec, number, size * pieces) for number in range(index * pieces, (index + 1) * pieces)]


def _read_kv_heads(spec: DecoderSpec, index: int, size: int, pieces: int) -> list[int]:
    """The key-value heads that attention reads, each once: equally many query heads, in their order, belong to each.

    Where the query heads of a key-value head are spread over ranks, a rank can have more of one than of another; then
    the former is read, and cached, several times.
    """
    queries = Counter[int]()
    for heads, kv_heads, _ in _pieces(spec, index, size, pieces):
        queries.update({head: len(heads) // len(kv_heads) for head in kv_heads})
    group = gcd(*queries.values())
    return [head for head, count in queries.items() for _ in range(count // group)]


@dataclass(frozen=True)
class Fused:
    """A fused weight of a rank: how many ``rows`` are stored, and in which ``order`` they are read, () for as they lie.

    Stored copies of a key-value head are read once, see ``_read_kv_heads``.
    """

    rows: int
    order: tuple[range, ...] = ()


def fused_rows(spec: DecoderSpec, index: int, size: int, pieces: int = 1) -> tuple[Fused, Fused]:
    """Of qkv and gate_up."""
    found, end = list[tuple[range, range, range]](), 0  # q, k, v of each piece
    places = dict[int, tuple[range, range]]()  # k, v of each key-value head
    for heads, kv_heads, _ in _pieces(spec, index, size, pieces):
        sizes = [len(heads), len(kv_heads), len(kv_heads)]
        starts = [end + offset for offset in accumulate([0, *sizes])]
        q, k, v = (range(start, start + count) for start, count in zip(starts, sizes, strict=False))
        found.append((q, k, v))
        for head, key, value in zip(kv_heads, k, v, strict=True):
            places.setdefault(head, (range(key, key + 1), range(value, value + 1)))
        end = starts[-1]
    read = [places[head] for head in _read_kv_heads(spec, index, size, pieces)]
    order = [*(q for q, _, _ in found), *(key for key, _ in read), *(value for _, value in read)]
    qkv = _fused(end * spec.head_dim, (_scaled(place, spec.head_dim) for place in order))
    widths = lengths(spec.intermediate_size, size * pieces)[index * pieces : (index + 1) * pieces]
    begins = [2 * start for start in accumulate([0, *widths])]
    gates = [range(start, start + width) for start, width in zip(begins, widths, strict=False)]
    ups = [range(gate.stop, gate.stop + len(gate)) for gate in gates]
    return qkv, _fused(begins[-1], [*gates, *ups])


def _fused(rows: int, order: Iterable[range]) -> Fused:
    """With neighbours as one range."""
    runs = list[range]()
    for place in order:
        if runs and runs[-1].stop == place.start:
            runs[-1] = range(runs[-1].start, place.stop)
        else:
            runs.append(place)
    return Fused(rows, () if runs == [range(rows)] else tuple(runs))


def decoder_shards(spec: DecoderSpec, index: int = 0, size: int = 1, sequence_parallel: bool = False) -> dict[str, Shard]:
    """The slice of every parameter of ``Decoder(spec)``, in their order, that rank ``index`` of ``size`` holds.

    With ``sequence_parallel`` a rank passes only its tokens through norms and output biases, so that their gradients are
    sums over the line.
    """
    layer = dict(_layer_shards(spec, index, size, sequence_parallel))
    vocabulary = Shard((spec.vocab_size, spec.hidden_size), 0, (cuts(spec.vocab_size, size)[index],), (True,))
    table = {"embed.weight": vocabulary}
    table |= {f"layers.{number}.{name}": shard for number in range(spec.num_layers) for name, shard in layer.items()}
    table["norm.weight"] = _copied(spec.hidden_size, index, sequence_parallel and size > 1)
    return table if spec.tied else table | {"lm_head.weight": vocabulary}


def decoder_pieces(spec: DecoderSpec, shards: Mapping[str, Shard]) -> Iterator[Piece]:
    """What is held of each tensor with q, k, v and gate, up apart: "layers.0.q.weight", from "layers.0.qkv.weight"."""
    q, kv, width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim, spec.intermediate_size
    fused = {"qkv": {"q": q, "k": kv, "v": kv}, "gate_up": {"gate": width, "up": width}}
    for parameter, shard in shards.items():
        path, module, kind = ("." + parameter).rsplit(".", 2)
        parts = fused.get(module, {module: shard.shape[0]})
        names, starts = list(parts), [0, *accumulate(parts.values())]
        for cut, place, owned in shard.places:
            which = bisect_right(starts[1:-1], cut.start)
            name, start = names[which], starts[which]
            rows = range(cut.start - start, cut.stop - start)
            shape = (parts[name], *shard.shape[1:])
            yield Piece(f"{path}.{name}.{kind}"[1:], parameter, shape, shard.dim, rows, place, owned)


def _layer_shards(spec: DecoderSpec, index: int, size: int, sequence_parallel: bool) -> Iterator[tuple[str, Shard]]:
    hidden, head_dim, width = spec.hidden_size, spec.head_dim, spec.intermediate_size
    heads, kv_heads, owner = head_cut(spec, index, size)
    neurons = cuts(width, size)[index]
    rows = spec.num_heads * head_dim, spec.num_kv_heads * head_dim
    q, k, v = _scaled(heads, head_dim), _scaled(kv_heads, head_dim, rows[0]), _scaled(kv_heads, head_dim, sum(rows))
    shared = range(rows[0], rows[0] + 2 * rows[1]) if size > spec.num_kv_heads else range(0)
    parts = size > 1
    norm = _copied(hidden, index, sequence_parallel and parts)

    yield "attention_norm.weight", norm
    for kind, columns in _kinds(hidden, spec.qkv_bias):
        yield f"qkv.{kind}", Shard((rows[0] + 2 * rows[1], *columns), 0, (q, k, v), (True, owner, owner), shared)
    if spec.qk_norm:
        yield "q_norm.weight", _copied(head_dim, index, parts)
        yield "k_norm.weight", _copied(head_dim, index, parts)
    yield "out.weight", Shard((hidden, rows[0]), 1, (q,), (True,))
    if spec.output_bias:
        yield "out.bias", norm
    yield "mlp_norm.weight", norm
    for kind, columns in _kinds(hidden, spec.mlp_bias):
        yield f"gate_up.{kind}", Shard((2 * width, *columns), 0, (neurons, _scaled(neurons, 1, width)), (True, True))
    yield "down.weight", Shard((hidden, width), 1, (neurons,), (True,))
    if spec.mlp_bias:
        yield "down.bias", norm


def _kinds(columns: int, bias: bool) -> list[tuple[str, tuple[int, ...]]]:
    return [("weight", (columns,)), *([("bias", ())] if bias else [])]


def _scaled(cut: range, size: int, start: int = 0) -> range:
    """The rows of things of ``size`` rows each, behind ``start`` others."""
    return range(start + cut.start * size, start + cut.stop * size)


def _copied(length: int, index: int, summed: bool) -> Shard:
    """A vector that every rank holds; the first one owns it."""
    return Shard((length,), 0, (range(length),), (index == 0,), range(length if summed else 0))
