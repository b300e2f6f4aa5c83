"""Language models as a policy and a critic, with one value for each action step, and as a reward model, with one a row.

``inputs`` names the columns that a model reads besides ``response_mask``; ``unit`` says what a minibatch is made of ("row":
sequences are never split). The hidden state at position t - 1 decides about token t, so it gives ``log_probs[t]`` and
``values[t]``.
"""

import math
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from hybridflow.core.batch import Batch, Ragged
from hybridflow.core.errors import ContractError
from hybridflow.models.context import ContextAttention
from hybridflow.models.decoder import Attend, CausalAttention, Decoder
from hybridflow.models.layout import decoder_pieces
from hybridflow.ops.log_probs import log_probs_and_entropy
from hybridflow.parallel.context import Dealt, holders
from hybridflow.parallel.shard import Piece, Shard

__all__ = ["Packed", "TextCritic", "TextPolicy", "TextReward", "fresh_score", "network_pieces", "network_shards"]

Places = NDArray[np.int64]


class Packed(NamedTuple):
    """What a decoder reads: see its ``forward``; with context parallelism, of the tokens of this rank."""

    tokens: Tensor
    positions: Tensor
    attend: Attend
    outputs: Tensor


def run(model: Any, batch: Batch, received: Tensor | None, chunk: int) -> Any:
    """What ``read`` returns; of a pipeline stage before the last one, its activations. A later stage than the first goes on
    from what it has ``received``. ``chunk``: which one of the stages that are here."""
    tokens, *rest = model.pack(batch)
    hidden = model.decoder(tokens if received is None else received, *rest, chunk=chunk)
    return model.read(hidden, batch) if model.decoder.part.ends(chunk) else hidden


class TextPolicy(nn.Module):
    """Log-probability and entropy of every response token, under the distribution that is sampled at ``temperature``."""

    inputs: tuple[str, ...] = ("tokens",)
    unit: Literal["row", "step"] = "row"

    def __init__(self, decoder: Decoder, temperature: float = 1.0) -> None:
        super().__init__()
        self.decoder, self.temperature = decoder, temperature

    def outputs(self, batch: Batch, received: Tensor | None = None, chunk: int = 0) -> Any:
        """``log_probs`` and ``entropy``, [N] over the action steps, fp32."""
        return run(self, batch, received, chunk)

    def pack(self, batch: Batch) -> Packed:
        """What the decoder, or each of its pipeline stages, reads of the batch."""
        return pack_rows(batch.ragged("tokens"), deciding(batch), self.decoder)

    def read(self, hidden: Tensor, batch: Batch) -> dict[str, Tensor]:
        """``outputs`` from what the last stage returns."""
        targets = torch.tensor(batch.ragged("tokens").values[batch.ragged("response_mask").values], device=hidden.device)
        wanted = dealt(batch.ragged("tokens"), deciding(batch), self.decoder)
        weight, shard = self.decoder.head_weight, self.decoder.vocabulary
        log_probs, entropy = log_probs_and_entropy(
            hidden, weight, wanted.take(targets), temperature=self.temperature, shard=shard, entropy=True
        )
        return {"log_probs": wanted.whole(log_probs), "entropy": wanted.whole(entropy)}


class TextCritic(nn.Module):
    """Value of the state before every response token. ``head`` is None on pipeline stages before the last."""

    head: nn.Linear
    inputs: tuple[str, ...] = ("tokens",)
    unit: Literal["row", "step"] = "row"

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder
        weight = decoder.anchor
        head = nn.Linear(decoder.spec.hidden_size, 1, bias=True, device=weight.device, dtype=weight.dtype)
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        self.register_module("head", head if decoder.part.last else None)

    def outputs(self, batch: Batch, received: Tensor | None = None, chunk: int = 0) -> Any:
        """``values`` [N] over the action steps, fp32."""
        return run(self, batch, received, chunk)

    def pack(self, batch: Batch) -> Packed:
        """What the decoder, or each of its pipeline stages, reads of the batch."""
        return pack_rows(batch.ragged("tokens"), deciding(batch), self.decoder)

    def read(self, hidden: Tensor, batch: Batch) -> dict[str, Tensor]:
        """``outputs`` from what the last stage returns."""
        wanted = dealt(batch.ragged("tokens"), deciding(batch), self.decoder)
        # A sum of one number; FSDP warns of outputs that are views.
        return {"values": wanted.whole(self.head(hidden).float().sum(-1))}

    def bootstrap(self, batch: Batch) -> Tensor:
        """[B] zeros: a response always ends its episode, also where the length limit ends it."""
        return torch.zeros(len(batch), device=self.decoder.anchor.device)


class TextReward(nn.Module):
    """One score for each row, read off the hidden state of its last token, as Hugging Face's ForSequenceClassification with
    one label does. The decoder has no head of its own; ``score`` is None on pipeline stages before the last."""

    score: nn.Parameter
    inputs: tuple[str, ...] = ("tokens",)
    unit: Literal["row", "step"] = "row"

    def __init__(self, decoder: Decoder, score: Tensor) -> None:
        """``score`` [1, D]: the head's weight; see ``fresh_score``."""
        super().__init__()
        self.decoder = decoder
        self.register_parameter("score", nn.Parameter(score.to(decoder.anchor, copy=True)) if decoder.part.last else None)

    def outputs(self, batch: Batch, received: Tensor | None = None, chunk: int = 0) -> Any:
        """``scores`` [B], fp32."""
        return run(self, batch, received, chunk)

    def pack(self, batch: Batch) -> Packed:
        """What the decoder, or each of its pipeline stages, reads of the batch."""
        tokens = batch.ragged("tokens")
        return pack_rows(tokens, tokens.offsets[1:] - 1, self.decoder)

    def read(self, hidden: Tensor, batch: Batch) -> dict[str, Tensor]:
        """``outputs`` from what the last stage returns."""
        # In fp32 whatever the dtype of the weights: bf16 has 256 numbers between 2 and 4, so scores would often tie.
        tokens = batch.ragged("tokens")
        wanted = dealt(tokens, tokens.offsets[1:] - 1, self.decoder)
        return {"scores": wanted.whole(hidden.float() @ self.score[0].float())}


def fresh_score(decoder: Decoder, generator: torch.Generator) -> Tensor:
    """[1, D] weight of a new head, std 1 / sqrt(D + 1): scores start at a size of 1 (Stiennon et al. 2020, appendix B)."""
    size = decoder.spec.hidden_size
    return torch.randn(1, size, generator=generator) / math.sqrt(size + 1)


def network_shards(network: nn.Module) -> dict[str, Shard]:
    """What each parameter of a network is of the full one: the decoder's slices; all else is whole on every rank of the
    decoder's tensor-parallel line, and the first one owns it."""
    decoders = {path: module for path, module in network.named_modules() if isinstance(module, Decoder)}
    owned = all(decoder.part.tp.index == 0 for decoder in decoders.values())
    shards = {f"{path}.{name}": shard for path, decoder in decoders.items() for name, shard in decoder.shards.items()}
    for name, parameter in network.named_parameters():
        if name not in shards:
            shards[name] = Shard(tuple(parameter.shape), 0, (range(len(parameter)),), (owned,))
    return shards


def network_pieces(network: nn.Module) -> list[Piece]:
    """What is held of each tensor of a network, parameters and buffers, as checkpoints name them; tied ones once."""
    decoders = {f"{path}.": module for path, module in network.named_modules() if isinstance(module, Decoder)}
    owned = all(decoder.part.tp.index == 0 for decoder in decoders.values())
    named = (*network.named_parameters(), *network.named_buffers())
    others = [(name, x) for name, x in named if not name.startswith(tuple(decoders))]
    return [
        *(
            replace(piece, name=path + piece.name, parameter=path + piece.parameter)
            for path, decoder in decoders.items()
            for piece in decoder_pieces(decoder.spec, decoder.shards)
        ),
        *(Piece.whole(name, tuple(x.shape), owned) for name, x in others),
    ]


def pack_rows(tokens: Ragged, places: Places, decoder: Decoder) -> Packed:
    """Each row is a sequence of its own; the tokens at ``places`` [M] of the packed axis are wanted."""
    values, device, cp = torch.tensor(tokens.values), decoder.anchor.device, decoder.part.cp
    if cp.size == 1:
        causal = CausalAttention(torch.tensor(tokens.lengths, device=device))
        return Packed(values.to(device), causal.positions, causal, torch.from_numpy(places).to(device))
    attention = ContextAttention(tokens.lengths, cp, device)
    own = attention.dealt.own
    wanted = np.searchsorted(own, places[np.isin(places, own)])
    return Packed(values[own].to(device), attention.positions, attention, torch.from_numpy(wanted).to(device))


def dealt(tokens: Ragged, places: Places, decoder: Decoder) -> Dealt:
    """Which rank of the decoder's context-parallel line has which of the tokens at ``places``."""
    cp = decoder.part.cp
    return Dealt(holders(tokens.lengths, cp.size)[places] if cp.size > 1 else np.zeros(len(places), np.int64), cp)


def deciding(batch: Batch) -> Places:
    """[N]: the places of the tokens that decide about the action steps."""
    tokens, mask = batch.ragged("tokens"), batch.ragged("response_mask").values
    places = mask.nonzero()[0]
    if (tokens.offsets[:-1][tokens.row_index[mask]] == places).any():
        raise ContractError("response_mask is True on a first token; a prompt has at least one token")
    return places - 1
