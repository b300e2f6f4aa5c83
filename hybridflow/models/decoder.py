"""One decoder for the Llama, Mistral, Qwen2 and Qwen3 families.

    tokens [N] ──embed──> x [N, D]
      every layer:  x += out(attend(rope(norm?(q)), rope(norm?(k)), v))       q, k, v = split(qkv(norm(x)))
                    x += down(silu(gate) * up)                                gate, up = split(gate_up(norm(x)))
    ──norm──> hidden [N, D]

All sequences of a call are packed into one axis of N tokens; padding exists only inside ``attend``, the function that
says which tokens see which. Training, prefill and decoding differ in ``attend`` alone, so they can't disagree on anything
else. q, k and v are one weight, gate and up another: the rollout engine needs them fused, and reads them in place.

A process may hold a ``Part``: some layers (a pipeline stage), or a slice of every weight (tensor parallelism). Parameters
keep the names that they have in the whole decoder.

Shapes: N packed tokens, D hidden size, H heads, K key-value heads, E size of a head, V vocabulary; H, K and V count what
this process holds. n = N tokens, or those of this rank with sequence parallelism.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from hybridflow.models.layout import Fused, decoder_shards, fused_rows, local_spec
from hybridflow.models.spec import DecoderSpec, RopeScaling
from hybridflow.ops.linear import linear
from hybridflow.parallel.mesh import ALONE, Line
from hybridflow.parallel.shard import Shard, lengths
from hybridflow.parallel.tensor import Region, VocabShard, take

__all__ = [
    "Attend",
    "CausalAttention",
    "Decoder",
    "Part",
    "computed_in",
    "init_weights",
    "rope_frequencies",
    "sum_tied",
]

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q [N, H, E], k [N, K, E], v [N, K, E]) -> [N, H, E]"""


SLOW_WIDTH = 256
"""Up to this length torch attends 1.7 times slower in bf16 on a CPU than in fp32, which is therefore taken."""


@dataclass(frozen=True)
class Part:
    """What of a decoder a process holds: ``layers``, all by default, and of each weight the slice of its place in ``tp``.

    The ``first`` pipeline stage has the embedding, the ``last`` the final norm and, if ``head``, the head's matrix. A head
    that is tied to an embedding on another stage is a copy of it, see ``sum_tied``. With ``sequence_parallel`` the ranks
    of ``tp`` cut the tokens among them where they would all do the same with them. ``pp``: its stages. ``cp``: the
    ranks that have the other tokens of its sequences; the decoder itself knows its own tokens alone.

    Several runs of ``layers`` are chunks, stages of an interleaved pipeline: the embedding goes with the first chunk of the
    ``first`` rank, the final norm with the last chunk of the ``last`` one.

    With ``pieces`` k each slice is stored as k smaller ones, those of ranks index k to (index + 1) k - 1 of a line of
    tp.size k: what they hold while training, see ``models.layout``.
    """

    layers: range | tuple[range, ...] | None = None
    first: bool = True
    last: bool = True
    head: bool = True
    tp: Line = ALONE
    sequence_parallel: bool = False
    pp: Line = ALONE
    pieces: int = 1
    cp: Line = ALONE

    def chunks(self, num_layers: int) -> tuple[range, ...]:
        """The layers of each, of a model that has ``num_layers``."""
        layers = range(num_layers) if self.layers is None else self.layers
        return layers if isinstance(layers, tuple) else (layers,)

    @property
    def num_chunks(self) -> int:
        return len(self.layers) if isinstance(self.layers, tuple) else 1

    def ends(self, chunk: int) -> bool:
        """Whether a chunk is the last stage of the pipeline."""
        return self.last and chunk == self.num_chunks - 1


class Decoder(nn.Module):
    """The transformer without its head. ``lm_head`` is None when the head is tied to the embedding.

    ``embed`` and ``norm`` are None on pipeline stages without them. ``shards``: what each parameter is of the full one;
    ``local``: the sizes of the slices, as they are computed with.
    Raises UserError: ``part.tp`` has more ranks than the model has heads.
    """

    embed: nn.Embedding
    norm: "RMSNorm"

    def __init__(self, spec: DecoderSpec, part: Part | None = None) -> None:
        super().__init__()
        self.spec, self.part = spec, part or Part()
        tp, pieces = self.part.tp, self.part.pieces
        self.local, self.region = local_spec(spec, tp.index, tp.size, pieces), Region(tp, self.part.sequence_parallel)
        fused = fused_rows(spec, tp.index, tp.size, pieces)
        self.shards = part_shards(spec, self.part)
        vocabulary, size = self.local.vocab_size, spec.hidden_size
        self.register_module("embed", Embedding(vocabulary, size) if "embed.weight" in self.shards else None)
        self.layers = nn.ModuleList()
        for index in chain(*self.part.chunks(spec.num_layers)):
            self.layers.add_module(str(index), Layer(self.local, index, self.region, fused))
        self.register_module("norm", RMSNorm(size, spec.norm_eps) if self.part.last else None)
        self.lm_head = Linear(size, vocabulary, bias=False) if "lm_head.weight" in self.shards else None
        self.activation_checkpointing = False
        self.gathered: torch.dtype | None = None
        """Where weights are gathered for each forward (FSDP), the dtype that they then have."""
        # Plain attributes, not buffers: they stay fp32 whatever the dtype of the weights.
        self._cos, self._sin = rope_tables(spec, 0, torch.device("cpu"))

    def forward(
        self, inputs: Tensor, positions: Tensor, attend: Attend, outputs: Tensor | None = None, chunk: int = 0
    ) -> Tensor:
        """tokens [N], positions [N] (place of each token in its sequence) -> hidden [M, D], normalised.

        outputs [M]: the tokens whose hidden state is wanted, all by default; the others are spared most of the last layer.
        A later pipeline stage takes, instead of tokens, what the stage before returns: [n, D] before the last layer, see
        ``num_states``. ``chunk``: which of the stages that are here. The ranks of ``part.tp`` all take the same and return
        the same, and expect the same gradient.
        """
        x = self.embedded(inputs) if self.part.first and chunk == 0 else inputs
        cos, sin = self.rope(positions, x.dtype)
        for index in self.part.chunks(self.spec.num_layers)[chunk]:
            layer: Any = self.layers.get_submodule(str(index))
            wanted = outputs if index == self.spec.num_layers - 1 else None
            if self.activation_checkpointing and torch.is_grad_enabled():
                x = checkpoint(layer, x, cos, sin, attend, wanted, use_reentrant=False)
            else:
                x = layer(x, cos, sin, attend, wanted)
        if not self.part.ends(chunk):
            return x
        return self.region.whole(self.norm(x), len(positions if outputs is None else outputs))

    def embedded(self, tokens: Tensor) -> Tensor:
        """tokens [N] -> [n, D]"""
        vocabulary = self.vocabulary
        if vocabulary is None:
            return self.embed(tokens)  # type: ignore[no-any-return]
        return self.region.leave(vocabulary.embed(tokens, self.embed.weight))

    @property
    def vocabulary(self) -> VocabShard | None:
        """Which rows of the head and the embedding are here, None for all."""
        tp = self.part.tp
        return VocabShard(tp, self.spec.vocab_size) if tp.size > 1 else None

    def num_states(self, tokens: int) -> int:
        """n, how many states a pipeline stage hands on, of N = ``tokens``."""
        tp = self.part.tp
        return lengths(tokens, tp.size)[tp.index] if self.part.sequence_parallel else tokens

    @property
    def anchor(self) -> Tensor:
        """A weight that tells device and dtype."""
        return self.embed.weight if self.part.first else next(self.parameters())

    @property
    def dtype(self) -> torch.dtype:
        """Of activations."""
        return self.gathered or self.anchor.dtype

    @property
    def head_weight(self) -> Tensor:
        """[V, D]: logits are ``hidden @ head_weight.T``; on the last pipeline stage."""
        return self.embed.weight if self.lm_head is None else self.lm_head.weight

    def rope(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos, sin [N, 1, E] of the positions; tables grow as needed."""
        longest = int(positions.max()) + 1 if len(positions) else 0
        if longest > len(self._cos) or self._cos.device != positions.device:
            self._cos, self._sin = rope_tables(self.spec, max(longest, 2 * len(self._cos)), positions.device)
        return self._cos[positions, None].to(dtype), self._sin[positions, None].to(dtype)


class Layer(nn.Module):
    """Attention and gated MLP, each behind a norm and a residual; ``spec`` says the sizes of the slices that are here."""

    def __init__(self, spec: DecoderSpec, index: int, region: Region, fused: tuple[Fused, Fused]) -> None:
        super().__init__()
        self.index, self.spec, self.region = index, spec, region
        q = spec.num_heads * spec.head_dim
        self.attention_norm = RMSNorm(spec.hidden_size, spec.norm_eps)
        self.qkv = FusedLinear(spec.hidden_size, fused[0], bias=spec.qkv_bias)
        self.q_norm = RMSNorm(spec.head_dim, spec.norm_eps) if spec.qk_norm else None
        self.k_norm = RMSNorm(spec.head_dim, spec.norm_eps) if spec.qk_norm else None
        self.out = _summed_linear(q, spec.hidden_size, spec.output_bias, region)
        self.mlp_norm = RMSNorm(spec.hidden_size, spec.norm_eps)
        self.gate_up = FusedLinear(spec.hidden_size, fused[1], bias=spec.mlp_bias)
        self.down = _summed_linear(spec.intermediate_size, spec.hidden_size, spec.mlp_bias, region)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, attend: Attend, outputs: Tensor | None) -> Tensor:
        """x [n, D] -> [n, D]; with ``outputs`` [M], what there is of their [M, D]."""
        heads, kv_heads, region = self.spec.num_heads, self.spec.num_kv_heads, self.region
        if outputs is not None and region.sequence:  # their rows lie anywhere, so x is needed whole, too
            x = region.enter(x, len(cos))
            normed = self.attention_norm(x)
        else:
            normed = region.enter(self.attention_norm(x), len(cos))
        qkv = self.qkv(normed).unflatten(-1, (heads + 2 * kv_heads, self.spec.head_dim))
        qk, v = qkv.split_with_sizes([heads + kv_heads, kv_heads], dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            qk = torch.cat([self.q_norm(qk[:, :heads]), self.k_norm(qk[:, heads:])], dim=1)
        q, k = rotate(qk, cos, sin).split_with_sizes([heads, kv_heads], dim=1)
        attended = attend(self.index, q, k, v).flatten(1)
        if outputs is not None:
            x, attended = x[region.own(outputs)], attended[outputs]
        x = x + self.out(attended)
        gate, up = self.gate_up(region.enter(self.mlp_norm(x), len(attended))).chunk(2, dim=-1)
        return x + self.down(F.silu(gate) * up)  # type: ignore[no-any-return]


class Embedding(nn.Embedding):
    """``nn.Embedding`` that isn't filled on "meta": torch would import its compiler for that."""

    def reset_parameters(self) -> None:
        if not self.weight.is_meta:
            super().reset_parameters()


class Linear(nn.Linear):
    """``nn.Linear`` through ``linear``."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


class FusedLinear(Linear):
    """A linear layer whose outputs are stored in another order than they are used in."""

    def __init__(self, inputs: int, fused: Fused, bias: bool) -> None:
        super().__init__(inputs, fused.rows, bias)
        self.order = fused.order

    def forward(self, input: Tensor) -> Tensor:
        out = super().forward(input)
        return self.ordered(out, -1) if self.order else out

    def ordered(self, x: Tensor, dim: int = 0) -> Tensor:
        """Stored rows, or outputs, of which there is one each along ``dim``, in the order in which they are used."""
        if not self.order:
            return x
        return torch.cat([x.narrow(dim, run.start, len(run)) for run in self.order], dim)


class SummedLinear(Linear):
    """A linear layer whose inputs are cut over the ranks of a region, which it leaves; [N, I] -> [n, O]."""

    def __init__(self, inputs: int, outputs: int, bias: bool, region: Region) -> None:
        super().__init__(inputs, outputs, bias)
        self.region = region

    def forward(self, input: Tensor) -> Tensor:
        out = self.region.leave(linear(input, self.weight))
        return out if self.bias is None else out + self.bias


def _summed_linear(inputs: int, outputs: int, bias: bool, region: Region) -> Linear:
    cut = region.line.size > 1
    return SummedLinear(inputs, outputs, bias, region) if cut else Linear(inputs, outputs, bias)


class RMSNorm(nn.Module):
    """Root-mean-square normalisation (Zhang and Sennrich 2019)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class CausalAttention:
    """``attend`` for whole sequences packed side by side: every token sees itself and what precedes it in its sequence."""

    def __init__(self, lengths: Tensor) -> None:
        """lengths [B] (int64): tokens of each sequence, in order."""
        self.lengths, self.width = lengths, int(lengths.max()) if len(lengths) else 0
        columns = torch.arange(self.width, device=lengths.device)
        self.valid = columns < lengths[:, None]
        self.rectangular = bool(self.valid.all())

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        dtype, exact = q.dtype, computed_in(q, self.width)
        q, k, v = (self.pad(x.to(exact)).transpose(1, 2) for x in (q, k, v))  # [B, heads, T, E]
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
        out = out.transpose(1, 2).to(dtype)
        return out.flatten(0, 1) if self.rectangular else out[self.valid]

    def pad(self, x: Tensor) -> Tensor:
        """[N, ...] -> [B, T, ...]; zeros behind the ends, which a causal mask never lets a real token see."""
        if self.rectangular:
            return x.view(len(self.lengths), self.width, *x.shape[1:])
        out = x.new_zeros(*self.valid.shape, *x.shape[1:])
        out[self.valid] = x
        return out

    @property
    def positions(self) -> Tensor:
        """[N]: place of every packed token in its sequence."""
        return torch.arange(self.width, device=self.lengths.device).expand_as(self.valid)[self.valid]


def computed_in(q: Tensor, width: int) -> torch.dtype:
    """The type to attend in, over sequences of up to ``width`` tokens."""
    slow = q.dtype == torch.bfloat16 and q.device.type == "cpu" and width <= SLOW_WIDTH
    return torch.float32 if slow else q.dtype


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding (Su et al. 2021), halves convention of Hugging Face; cos, sin of ``rope``."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, dims=-1), sin)


def rope_frequencies(spec: DecoderSpec) -> Tensor:
    """[E / 2] angular frequencies, scaled as the spec says."""
    exponents = torch.arange(0, spec.head_dim, 2, device="cpu").float() / spec.head_dim
    frequencies = 1.0 / spec.rope_theta**exponents
    scaling = spec.rope_scaling
    if scaling is None:
        return frequencies
    return frequencies / scaling.factor if scaling.kind == "linear" else _llama3(frequencies, scaling)


def _llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    wavelengths = 2 * math.pi / frequencies
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    blend = ((scaling.original_max_positions / wavelengths - low) / (high - low)).clamp(0, 1)
    return (1 - blend) * frequencies / scaling.factor + blend * frequencies


def rope_tables(spec: DecoderSpec, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """cos, sin [length, E], fp32; sin is negated in its first half, so that rotating is x * cos + swap_halves(x) * sin."""
    # On the CPU whatever the default device: the same tables everywhere, and real ones in a model built on "meta".
    angles = torch.outer(torch.arange(length, device="cpu").float(), rope_frequencies(spec))
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([cos, cos], dim=-1).to(device), torch.cat([-sin, sin], dim=-1).to(device)


def part_shards(spec: DecoderSpec, part: Part) -> dict[str, Shard]:
    """The slices that ``Decoder(spec, part)`` holds, by parameter."""
    layers = set(chain(*part.chunks(spec.num_layers)))
    copied = part.last and part.head and spec.tied and not part.first
    there = {"embed": part.first or copied, "norm": part.last, "lm_head": part.last and part.head}
    size, first = part.tp.size * part.pieces, part.tp.index * part.pieces
    tables = [decoder_shards(spec, first + piece, size, part.sequence_parallel) for piece in range(part.pieces)]
    shards = {
        name: _behind([table[name] for table in tables])
        for name in tables[0]
        if (int(name.split(".")[1]) in layers if name.startswith("layers.") else there[name.split(".")[0]])
    }
    if copied:
        shards["embed.weight"] = replace(shards["embed.weight"], owned=(False,) * len(shards["embed.weight"].ranges))
    return shards


def _behind(pieces: Sequence[Shard]) -> Shard:
    """Slices of one parameter as one, the pieces one behind the other; a whole parameter is there once."""
    first = pieces[0]
    if first.whole:
        return first
    ranges = tuple(cut for piece in pieces for cut in piece.ranges)
    return replace(first, ranges=ranges, owned=tuple(own for piece in pieces for own in piece.owned))


def sum_tied(decoder: Decoder, gradients: Mapping[str, Tensor], pp: Line) -> None:
    """Add up the gradients of an embedding on the first stage of ``pp`` and of the tied head on the last one, in place.

    Every stage calls this once after the last backward. ``gradients``: by the decoder's names; none if it isn't trained.
    """
    spec, part = decoder.spec, decoder.part
    if pp.size > 1 and spec.tied and part.head and part.first != part.last and "embed.weight" in gradients:
        pp.add(gradients["embed.weight"], pp.size - 1 if part.first else 0)


def init_weights(decoder: Decoder, generator: torch.Generator) -> None:
    """Fresh weights: normal, std sqrt(2 / 5D) ("small init", Nguyen and Salazar 2019), so that narrow models start as alive
    as wide ones; projections back into the residual are scaled by 1 / sqrt(2 layers) (Radford et al. 2019).

    The same numbers however the decoder is cut: every process draws all of them and keeps its own.
    """
    std = math.sqrt(2 / (5 * decoder.spec.hidden_size))
    own, like = dict(decoder.named_parameters()), decoder.anchor
    with torch.no_grad():
        for name, full_shard in decoder_shards(decoder.spec).items():
            parameter, shard = own.get(name), decoder.shards.get(name, full_shard)
            if name.endswith(("norm.weight", "bias")):
                if parameter is not None:
                    parameter.fill_(0.0 if name.endswith("bias") else 1.0)
                continue
            residual = name.endswith(("out.weight", "down.weight"))
            scale = 1 / math.sqrt(2 * decoder.spec.num_layers) if residual else 1.0
            full = parameter if parameter is not None and shard.whole else like.new_empty(shard.shape)
            full.normal_(0.0, std * scale, generator=generator)
            if parameter is not None and full is not parameter:
                parameter.copy_(take(full, shard))
