"""The models of bench/step.py: on the CPU a bandwidth-bound MLP, a transformer, a deep conv net
with many small tensors, and GPT-2 small; on a GPU ResNet-50, BERT-base and GPT-2 small. Each entry
makes a model and a loss of it on one fixed batch, so that a step is `loss().backward()`.
bench/backend.py measures the models of the CPU as well, and bench/flatten.py takes its lists of
parameters from here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Steps before any is measured: DDP plans its buckets anew after its first one, and the allocator
# settles.
WARM_UP_STEPS = 3


class Case(NamedTuple):
    """A model with the batch it is measured on."""

    description: str
    make_model: Callable[[], nn.Module]
    make_batch: Callable[[], Tensor]
    loss: Callable[[nn.Module, Tensor], Tensor]

    def make(self, rank: int) -> tuple[nn.Module, Tensor]:
        """The same model on every rank, and a batch of this rank's own."""
        torch.manual_seed(0)
        model = self.make_model()
        torch.manual_seed(1 + rank)
        return model, self.make_batch()

    def training_step(
        self, model: nn.Module, batch: Tensor, optimizer: torch.optim.Optimizer | None = None
    ) -> Callable[[], None]:
        """A function that makes one step, with an optimizer of the model's own (SGD)."""
        optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=1e-4)

        def step() -> None:
            optimizer.zero_grad()
            self.loss(model, batch).backward()
            optimizer.step()

        return step


class TinyParameters(nn.Module):
    """Many parameters and hardly any work."""

    def __init__(self, n: int, numel: int = 8) -> None:
        super().__init__()
        self.all = nn.ParameterList(nn.Parameter(torch.ones(numel)) for _ in range(n))

    def forward(self) -> Tensor:
        return torch.stack(list(self.all)).sum()


def mlp() -> nn.Module:
    widths = [1024, 2048, 2048, 1024, 10]
    layers: list[nn.Module] = []
    for before, after in zip(widths, widths[1:], strict=False):
        layers += [nn.Linear(before, after), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def transformer(n_layers: int = 6) -> nn.Module:
    layer = nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, n_layers, enable_nested_tensor=False)


def conv_net() -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 32, 3, padding=1)]
    for _ in range(40):
        layers += [nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU()]
    return nn.Sequential(*layers)


def pyramid(widths: Sequence[int], n_classes: int = 1000) -> nn.Module:
    """Convolutions of these widths, each but the first over half as many pixels."""
    layers: list[nn.Module] = []
    for before, after in zip((3, *widths), widths, strict=False):
        layers += [conv(before, after, 3, 2 if layers else 1), nn.ReLU()]
    head = nn.Linear(widths[-1], n_classes)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)


class Gpt2(nn.Module):
    """GPT-2 small (Radford et al., 2019): 12 blocks of width 768, 12 heads, 50257 tokens, the
    output tied to the embedding.
    """

    def __init__(
        self,
        width: int = 768,
        n_layers: int = 12,
        n_heads: int = 12,
        n_tokens: int = 50257,
        length: int = 1024,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(n_tokens, width)
        self.positions = nn.Embedding(length, width)
        layer = nn.TransformerEncoderLayer(
            width, n_heads, 4 * width, 0.0, F.gelu, batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(
            layer, n_layers, nn.LayerNorm(width), enable_nested_tensor=False
        )

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        x: Tensor = self.tokens(tokens) + self.positions.weight[:length]
        x = self.blocks(
            x,
            nn.Transformer.generate_square_subsequent_mask(length, device=x.device),
            is_causal=True,
        )
        return x @ self.tokens.weight.T


class Bottleneck(nn.Module):
    """A residual block of ResNet-50: 1x1, 3x3 with the stride, 1x1 to four times the width."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        sizes = ((channels, width, 1, 1), (width, width, 3, stride), (width, 4 * width, 1, 1))
        self.convs = nn.ModuleList(conv(*size) for size in sizes)
        is_same = channels == 4 * width and stride == 1
        self.shortcut = nn.Identity() if is_same else conv(channels, 4 * width, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.convs[0](x))
        y = F.relu(self.convs[1](y))
        return F.relu(self.convs[2](y) + self.shortcut(x))


def conv(channels: int, out: int, kernel: int, stride: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(channels, out, kernel, stride, padding=kernel // 2, bias=False),
        nn.BatchNorm2d(out),
    )


def resnet50(width: int = 64, n_classes: int = 1000) -> nn.Module:
    """ResNet-50 (He et al., 2015): 25.6 M parameters in 161 tensors."""
    layers: list[nn.Module] = [conv(3, width, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    channels = width
    for stage, n_blocks in enumerate((3, 4, 6, 3)):
        for block in range(n_blocks):
            stride = 2 if stage and not block else 1
            layers.append(Bottleneck(channels, width << stage, stride))
            channels = 4 * (width << stage)
    head = nn.Linear(channels, n_classes)
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)


class BertLayer(nn.Module):
    def __init__(self, width: int, n_heads: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        heads = (
            linear(x).unflatten(2, (self.n_heads, -1)).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        attended = F.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        x = self.norms[0](x + self.out(attended))
        x = self.norms[1](x + self.down(F.gelu(self.up(x))))
        return x


class Bert(nn.Module):
    """BERT (Devlin et al., 2018) as one fine-tunes it, without dropout: gives the pooled output.
    Base: 109.5 M parameters in 199 tensors; large, of width 1024 with 24 layers and 16 heads: 335.1
    M in 391.
    """

    def __init__(
        self,
        width: int = 768,
        n_layers: int = 12,
        n_heads: int = 12,
        n_tokens: int = 30522,
        length: int = 512,
    ) -> None:
        super().__init__()
        self.tokens, self.positions, self.kinds = (
            nn.Embedding(n, width) for n in (n_tokens, length, 2)
        )
        self.norm = nn.LayerNorm(width)
        self.layers = nn.Sequential(*(BertLayer(width, n_heads) for _ in range(n_layers)))
        self.pooler = nn.Linear(width, width)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]] + self.kinds.weight[0]
        pooled: Tensor = self.pooler(self.layers(self.norm(x))[:, 0])
        return pooled.tanh()


def large_transformer() -> nn.Module:
    """906 M parameters."""
    torch.backends.cuda.matmul.allow_tf32 = True
    layer = nn.TransformerEncoderLayer(2048, 16, 8192, 0.0, F.gelu, batch_first=True)
    return nn.TransformerEncoder(layer, 18, enable_nested_tensor=False)


def mean_square(model: nn.Module, batch: Tensor) -> Tensor:
    output: Tensor = model(batch)
    return output.square().mean()


def next_token_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def in_bfloat16(
    loss: Callable[[nn.Module, Tensor], Tensor],
) -> Callable[[nn.Module, Tensor], Tensor]:
    """The same under autocast: parameters and gradients stay float32, the products are bfloat16."""

    def autocast_loss(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.autocast(batch.device.type, torch.bfloat16):
            return loss(model, batch)

    return autocast_loss


CASES = {
    "mlp": Case(
        "MLP 1024-2048-2048-1024-10, batch 16", mlp, lambda: torch.randn(16, 1024), mean_square
    ),
    "transformer": Case(
        "TransformerEncoder 512 x 6, 2 x 64 tokens",
        transformer,
        lambda: torch.randn(2, 64, 512),
        mean_square,
    ),
    "conv": Case(
        "40 x conv3x3(32) + BatchNorm, batch 4",
        conv_net,
        lambda: torch.randn(4, 3, 32, 32),
        mean_square,
    ),
    "gpt2": Case(
        "GPT-2 small, 1 x 32 tokens", Gpt2, lambda: torch.randint(50257, (1, 33)), next_token_loss
    ),
}

# A large table of which a step uses few rows; gradients are sparse, or as large as the table.
# Measured only where they are named.
EMBEDDINGS = {
    name: Case(
        f"EmbeddingBag 500,000 x 32, {kind} gradients, 256 x 16 words",
        functools.partial(nn.EmbeddingBag, 500_000, 32, mode="sum", sparse=kind == "sparse"),
        lambda: torch.randint(500_000, (256, 16)),
        mean_square,
    )
    for name, kind in (("embedding", "sparse"), ("embedding-dense", "dense"))
}

# Batches of a size that keeps a large GPU busier than the host.
CUDA_CASES = {
    "resnet50": Case(
        "ResNet-50, 64 images, float32", resnet50, lambda: torch.randn(64, 3, 224, 224), mean_square
    ),
    "bert": Case(
        "BERT-base, 32 x 128 tokens, bf16 autocast",
        Bert,
        lambda: torch.randint(30522, (32, 128)),
        in_bfloat16(mean_square),
    ),
    "gpt2": Case(
        "GPT-2 small, 8 x 512 tokens, bf16 autocast",
        Gpt2,
        lambda: torch.randint(50257, (8, 513)),
        in_bfloat16(next_token_loss),
    ),
    "large": Case(
        "TransformerEncoder 2048 x 18, 4 x 1024 tokens, bfloat16",
        lambda: large_transformer().bfloat16(),
        lambda: torch.randn(4, 1024, 2048).bfloat16(),
        mean_square,
    ),
    "large-float32": Case(
        "TransformerEncoder 2048 x 18, 4 x 1024 tokens, TF32",
        large_transformer,
        lambda: torch.randn(4, 1024, 2048),
        mean_square,
    ),
}
