"""Numbers, FLOPs and bytes of a role's model, by how it is cut: worked out once for a role, as plain floats."""

from __future__ import annotations

from dataclasses import replace
from math import ceil
from typing import NamedTuple

from hybridflow.models.layout import local_spec
from hybridflow.planner.flops import forward_flops
from hybridflow.planner.graph import ModelRole
from hybridflow.planner.memory import Microbatch, Stage, WayBack, forward_bytes, way_back

__all__ = ["Cut", "Profile"]


class Cut(NamedTuple):
    """Of the rank of a tensor-parallel line that has most. ``layer``: numbers of a layer, of which ``dense`` are read for
    any token and ``expert`` are one expert; ``share``: of a layer's FLOPs; ``position``: bytes of a token's keys and values
    in a layer."""

    layer: float
    dense: float
    expert: float
    share: float
    head: float
    position: float


class Profile:
    """Of a role. ``active``: the decoder that each token goes through, with the experts that work on it as one MLP.
    ``trained``: the share of numbers that are."""

    def __init__(self, role: ModelRole, device: str) -> None:
        self.role, self.device, self.spec, size = role, device, role.size.spec, role.size
        self.layers, self.hidden = self.spec.num_layers, self.spec.hidden_size
        self.active = replace(self.spec, intermediate_size=self.spec.intermediate_size * size.active_experts)
        self.is_policy = role.head == "policy"
        self.trained = role.trained_parameters / role.parameters
        self.max_tp = min(self.spec.num_heads, self.spec.intermediate_size, self.spec.vocab_size)
        self._cuts: dict[int, Cut] = {}
        self._flops: dict[tuple[float, float], tuple[float, float, float]] = {}
        self._numbers: dict[tuple[int, int], float] = {}
        self._ends: dict[tuple[int, int, bool, Microbatch], list[tuple[WayBack, int]]] = {}

    def cut(self, tp: int) -> Cut:
        if tp not in self._cuts:
            self._cuts[tp] = self._cut(tp)
        return self._cuts[tp]

    def _cut(self, tp: int) -> Cut:
        s, size, ranks = self.spec, self.role.size, [local_spec(self.spec, rank, tp) for rank in range(tp)]
        heads, kv = max(r.num_heads for r in ranks), max(r.num_kv_heads for r in ranks)
        width = max(r.intermediate_size for r in ranks)
        attention = s.hidden_size * s.head_dim * (2 * heads + 2 * kv)
        expert, router = 3 * s.hidden_size * width, s.hidden_size * size.experts * (size.experts > 1)
        dense = attention + router + 2 * s.hidden_size + 2 * s.head_dim * s.qk_norm
        whole = s.hidden_size * s.head_dim * 2 * (s.num_heads + s.num_kv_heads)
        whole += 3 * s.hidden_size * s.intermediate_size * size.active_experts
        return Cut(
            layer=dense + size.experts * expert,
            dense=dense,
            expert=expert,
            share=(attention + size.active_experts * expert) / whole,
            head=s.hidden_size * max(r.vocab_size for r in ranks),
            position=2 * kv * s.head_dim * self.role.itemsize,
        )

    def numbers(self, pp: int, tp: int) -> float:
        """Of the rank that has most. The last stage has as many layers as any, and the head."""
        if (pp, tp) not in self._numbers:
            self._numbers[pp, tp] = self._count(pp, tp)
        return self._numbers[pp, tp]

    def _count(self, pp: int, tp: int) -> float:
        cut, table = self.cut(tp), self.cut(tp).head
        head = table if self.is_policy else self.hidden
        if pp == 1:
            return self.layers * cut.layer + table + (head if not self.is_policy or not self.spec.tied else 0) + self.hidden
        last = ceil(self.layers / pp) * cut.layer + head + self.hidden
        return max(last, self.layers // pp * cut.layer + table)

    def touched(self, tp: int, tokens: float) -> float:
        """Numbers of a layer that a pass over so many tokens reads: of experts those that any token goes to."""
        cut, size = self.cut(tp), self.role.size
        idle: float = (1 - size.active_experts / size.experts) ** tokens
        return cut.dense + size.experts * cut.expert * (1 - idle)

    def flops(self, length: float, actions: float) -> tuple[float, float, float]:
        """Of a row's way forward: (in a layer, in the last one, in the head)."""
        key = length, actions
        if key not in self._flops:
            one = replace(self.active, num_layers=1)
            layer, last = (forward_flops(one, length, n, length, False) for n in (length, actions))
            self._flops[key] = layer, last, 2.0 * self.hidden * self.spec.vocab_size * actions * self.is_policy
        return self._flops[key]

    def ends(self, pp: int, tp: int, recompute: bool, batch: Microbatch) -> list[tuple[WayBack, int]]:
        """(bytes of a microbatch on its way back, of one without gradients), of the last stage, which has the head, and of
        the first one, which has most microbatches in flight."""
        key = pp, tp, recompute, batch
        if key not in self._ends:
            stages = [self._stage(pp, tp, recompute, first=pp == 1, last=True)]
            if pp > 1:
                stages.append(self._stage(pp, tp, recompute, first=True, last=False))
            self._ends[key] = [(way_back(stage, batch), forward_bytes(stage, batch)) for stage in stages]
        return self._ends[key]

    def _stage(self, pp: int, tp: int, recompute: bool, first: bool, last: bool) -> Stage:
        layers = ceil(self.layers / pp) if last else max(1, self.layers // pp)
        return Stage(
            self.active,
            layers,
            self.role.head,
            first=first,
            last=last,
            tp=tp,
            rank=tp - 1,
            sequence_parallel=tp > 1,
            itemsize=self.role.itemsize,
            device=self.device,
            checkpointing=recompute,
            frozen=min(layers, self.role.frozen) if first else 0,
            trains_head=self.role.trains_head and last and self.is_policy,
        )
