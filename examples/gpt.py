"""A small GPT over bytes: the model of train_gpt.py. It knows nothing of ranks."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

N_BYTES = 256


class Block(nn.Module):
    """Attention, then a multilayer perceptron, each added to the stream it reads from."""

    def __init__(self, width: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.attention_norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.attention_out = nn.Linear(width, width, bias=False)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp_in = nn.Linear(width, 4 * width, bias=False)
        self.mlp_out = nn.Linear(4 * width, width, bias=False)
        # A block begins as the identity, so that the first steps learn which byte follows which.
        nn.init.zeros_(self.attention_out.weight)
        nn.init.zeros_(self.mlp_out.weight)

    def forward(self, x: Tensor, position_bias: Tensor) -> Tensor:
        queries, keys, values = (
            self.qkv(self.attention_norm(x))
            .unflatten(-1, (3, self.n_heads, -1))
            .permute(2, 0, 3, 1, 4)
        )
        attended = F.scaled_dot_product_attention(queries, keys, values, attn_mask=position_bias)
        x = x + self.attention_out(attended.transpose(1, 2).flatten(2))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x))))


class GPT(nn.Module):
    """Maps bytes [batch, length] to the logits of the byte that follows each, [batch, length, 256].
    Heads are 64 wide.
    """

    def __init__(self, n_layers: int, width: int) -> None:
        super().__init__()
        if width < 64 or width % 64:
            raise ValueError(f"width must be a multiple of 64, the width of a head; got {width}")
        self.n_heads = width // 64
        self.embedding = nn.Embedding(N_BYTES, width)
        self.blocks = nn.ModuleList(Block(width, self.n_heads) for _ in range(n_layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, N_BYTES, bias=False)
        nn.init.zeros_(self.head.weight)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        position_bias = self.position_bias(tokens.shape[1], tokens.device)
        for block in self.blocks:
            x = block(x, position_bias)
        return self.head(self.norm(x))

    def position_bias(self, length: int, device: torch.device) -> Tensor:
        """ALiBi (Press et al., 2022): every head prefers what is near, each one less strictly than
        the one before. No look ahead.
        """
        positions = torch.arange(length, device=device)
        ahead = positions - positions[:, None]
        slopes = 2.0 ** -torch.arange(self.n_heads, device=device)
        return (slopes[:, None, None] * ahead).masked_fill(ahead > 0, -torch.inf)

    @torch.no_grad()
    def generate(
        self, tokens: Tensor, n_new: int, *, window: int = 64, temperature: float = 0.8
    ) -> Tensor:
        """Continues `tokens` [1, length] by `n_new` bytes, each drawn in view of the last `window`
        ones.
        """
        for _ in range(n_new):
            logits = self(tokens[:, -window:])[:, -1]
            tokens = torch.cat(
                (tokens, torch.multinomial(F.softmax(logits / temperature, dim=-1), 1)), dim=1
            )
        return tokens


def next_byte_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean cross-entropy, in nats, of every byte of `tokens` [batch, length + 1] given those before
    it in its row.
    """
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
