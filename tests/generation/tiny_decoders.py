import dataclasses

import torch

from hybridflow.models.decoder import Decoder, init_weights
from hybridflow.models.spec import DecoderSpec


def tiny_decoder(**changes: object) -> Decoder:
    spec = DecoderSpec("qwen2", 150, 32, 48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, max_positions=200)
    decoder = Decoder(dataclasses.replace(spec, qkv_bias=True, **changes))
    init_weights(decoder, torch.Generator().manual_seed(0))
    with torch.no_grad():  # sharper distributions than a fresh model has: mistakes show
        for parameter in decoder.parameters():
            parameter.mul_(4 if parameter.ndim == 2 else 1)
    return decoder
