"""The models of bench/step.py: a bandwidth-bound MLP, a transformer, a deep conv net with many small tensors, and GPT-2 small. Each entry
makes a model and a loss of it on one fixed batch, so that a step is `loss().backward()`."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Case(NamedTuple):
    """A model with the batch it is measured on."""

    description: str
    make_model: Callable[[], nn.Module]
    make_batch: Callable[[], Tensor]
    loss: Callable[[nn.Module, Tensor], Tensor]


def mlp() -> nn.Module:
    widths = [1024, 2048, 2048, 1024, 10]
    layers: list[nn.Module] = []
    for before, after in zip(widths, widths[1:], strict=False):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def transformer() -> nn.Module:
    layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)


def conv_net() -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, padding=1)]
    for _ in range(40):
        layers += [nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()]
    return nn.Sequential(*layers)


class Gpt2(nn.Module):
    """GPT-2 small (Radford et al., 2019): 12 blocks of width 768, 12 heads, 50257 tokens, the output tied to the embedding."""

    def __init__(self, width: int = 768, n_layers: int = 12, n_heads: int = 12, n_tokens: int = 50257, length: int = 1024) -> None:
        super().__init__()
        self.tokens = nn.Embedding(n_tokens, width)
        self.positions = nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(width, n_heads, 4 * width, 0.0, F.gelu, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, n_layers, nn.LayerNorm(width), enable_nested_tensor=False)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        x = self.tokens(tokens) + self.positions.weight[:length]
        x = self.blocks(x, nn.Transformer.generate_square_subsequent_mask(length), is_causal=True)
        return x @ self.tokens.weight.T


def mean_square(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def next_token_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


CASES = {
    "mlp": Case("MLP 1024-2048-2048-1024-10, batch 16", mlp, lambda: torch.randn(16, 1024), mean_square),
    "transformer": Case("TransformerEncoder 512 x 6, 2 x 64 tokens", transformer, lambda: torch.randn(2, 64, 512), mean_square),
    "conv": Case("40 x conv3x3(32) + BatchNorm, batch 4", conv_net, lambda: torch.randn(4, 3, 32, 32), mean_square),
    "gpt2": Case("GPT-2 small, 1 x 32 tokens", Gpt2, lambda: torch.randint(50257, (1, 33)), next_token_loss),
}
