"""Language models as a policy and a critic, with one value for each action step, and as a reward model, with one a row.

``inputs`` names the columns that a model reads besides ``response_mask``; ``unit`` says what a minibatch is made of ("row":
sequences are never split). The hidden state at position t - 1 decides about token t, so it gives ``log_probs[t]`` and
``values[t]``.
"""

import math
from typing import Literal

import torch
from torch import Tensor, nn

from hybridflow.core.batch import Batch, Ragged
from hybridflow.core.errors import ContractError
from hybridflow.models.decoder import CausalAttention, Decoder
from hybridflow.ops.log_probs import log_probs_and_entropy

__all__ = ["TextCritic", "TextPolicy", "TextReward", "fresh_score"]


class TextPolicy(nn.Module):
    """Log-probability and entropy of every response token, under the distribution that is sampled at ``temperature``."""

    inputs: tuple[str, ...] = ("tokens",)
    unit: Literal["row", "step"] = "row"

    def __init__(self, decoder: Decoder, temperature: float = 1.0) -> None:
        super().__init__()
        self.decoder, self.temperature = decoder, temperature

    def outputs(self, batch: Batch) -> dict[str, Tensor]:
        """``log_probs`` and ``entropy``, [N] over the action steps, fp32."""
        hidden, targets = action_states(self.decoder, batch)
        log_probs, entropy = log_probs_and_entropy(
            hidden, self.decoder.head_weight, targets, temperature=self.temperature, entropy=True
        )
        return {"log_probs": log_probs, "entropy": entropy}


class TextCritic(nn.Module):
    """Value of the state before every response token."""

    inputs: tuple[str, ...] = ("tokens",)
    unit: Literal["row", "step"] = "row"

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder
        weight = decoder.embed.weight
        self.head = nn.Linear(decoder.spec.hidden_size, 1, bias=True, device=weight.device, dtype=weight.dtype)
        nn.init.zeros_(self.head.weight)
        nn.init.zeros_(self.head.bias)

    def outputs(self, batch: Batch) -> dict[str, Tensor]:
        """``values`` [N] over the action steps, fp32."""
        hidden, _ = action_states(self.decoder, batch)
        return {"values": self.head(hidden).squeeze(-1).float()}

    def bootstrap(self, batch: Batch) -> Tensor:
        """[B] zeros: a response always ends its episode, also where the length limit ends it."""
        return torch.zeros(len(batch), device=self.head.weight.device)


class TextReward(nn.Module):
    """One score for each row, read off the hidden state of its last token, as Hugging Face's ForSequenceClassification with
    one label does. The decoder has no head of its own."""

    inputs: tuple[str, ...] = ("tokens",)
    unit: Literal["row", "step"] = "row"

    def __init__(self, decoder: Decoder, score: Tensor) -> None:
        """``score`` [1, D]: the head's weight; see ``fresh_score``."""
        super().__init__()
        self.decoder, self.score = decoder, nn.Parameter(score.to(decoder.embed.weight))

    def outputs(self, batch: Batch) -> dict[str, Tensor]:
        """``scores`` [B], fp32."""
        tokens = batch.ragged("tokens")
        last = torch.tensor(tokens.offsets[1:] - 1, device=self.score.device)
        # In fp32 whatever the dtype of the weights: bf16 has 256 numbers between 2 and 4, so scores would often tie.
        return {"scores": hidden_states(self.decoder, tokens, last).float() @ self.score[0].float()}


def fresh_score(decoder: Decoder, generator: torch.Generator) -> Tensor:
    """[1, D] weight of a new head, std 1 / sqrt(D + 1): scores start at a size of 1 (Stiennon et al. 2020, appendix B)."""
    size = decoder.spec.hidden_size
    return torch.randn(1, size, generator=generator) / math.sqrt(size + 1)


def hidden_states(decoder: Decoder, tokens: Ragged, places: Tensor) -> Tensor:
    """[M, D] of the tokens at ``places`` [M] of the packed axis, each row a sequence of its own."""
    device = decoder.embed.weight.device
    attention = CausalAttention(torch.tensor(tokens.lengths, device=device))
    ids = torch.tensor(tokens.values, device=device)
    hidden: Tensor = decoder(ids, attention.positions, attention, places.to(device))
    return hidden


def action_states(decoder: Decoder, batch: Batch) -> tuple[Tensor, Tensor]:
    """(hidden [N, D] that decided about each action step, its token [N])."""
    tokens, mask = batch.ragged("tokens"), batch.ragged("response_mask").values
    places = torch.from_numpy(mask.nonzero()[0])
    if (tokens.offsets[:-1][tokens.row_index[mask]] == places.numpy()).any():
        raise ContractError("response_mask is True on a first token; a prompt has at least one token")
    hidden = hidden_states(decoder, tokens, places - 1)
    return hidden, torch.tensor(tokens.values[mask], device=hidden.device)
