"""Models that the planner was not made for, each small, with its units, a batch and a loss; and what ranks run of them."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp_helpers.config import TrainConfig
from fsdp_helpers.measuring.rank_of_n import RankOfN, distribute_model, trace_steps
from fsdp_helpers.models.llama import Llama
from fsdp_helpers.models.shapes import LlamaShape
from fsdp_helpers.teaching.lessons.language import chunked_loss


class Stage(nn.Module):
    """Two convolutions."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(before, after, 3, padding=1), nn.Conv2d(after, after, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.second(F.relu(self.first(x))))


class UNet(nn.Module):
    """Down and up again, with a way across at each size."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([Stage(3, 32), Stage(32, 64)])
        self.bottom = Stage(64, 128)
        self.up = nn.ModuleList([Stage(128 + 64, 64), Stage(64 + 32, 32)])
        self.head = nn.Conv2d(32, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        across = []
        for stage in self.down:
            across.append(stage(x))
            x = F.max_pool2d(across[-1], 2)
        x = self.bottom(x)
        for stage in self.up:
            x = stage(torch.cat([F.interpolate(x, scale_factor=2), across.pop()], dim=1))
        return self.head(x)


class Residual(nn.Module):
    """Two convolutions with batch norms, and a way around them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.one, self.two = nn.BatchNorm2d(channels), nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(x + self.two(self.second(F.relu(self.one(self.first(x))))))


def resnet() -> nn.Module:
    body = [Residual(64) for _ in range(4)]
    return nn.Sequential(nn.Conv2d(3, 64, 3, padding=1), *body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 9))


class Reader(nn.Module):
    """Two LSTMs, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(500, 128)
        self.first, self.second = (nn.LSTM(128, 128, batch_first=True) for _ in range(2))
        self.head = nn.Linear(128, 500)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.second(self.first(self.words(tokens))[0])[0])


class Expert(nn.Sequential):
    def __init__(self, width: int) -> None:
        super().__init__(nn.Linear(width, 3 * width), nn.GELU(), nn.Linear(3 * width, width))


class Mixture(nn.Module):
    """Experts that look at the same input; a gate weighs what they say."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(width, 4), nn.ModuleList(Expert(width) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.gate(x).softmax(dim=-1)
        return x + sum(weights[:, i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


class Again(nn.Module):
    """One block, used four times."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.block, self.head = Expert(width), nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(4):
            x = x + self.block(x)
        return self.head(x)


class Table(nn.Module):
    """Nearly all parameters are a table of words, which is trained."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(20_000, 64)
        self.layers = nn.Sequential(*[Expert(64) for _ in range(3)])
        self.head = nn.Linear(64, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.layers(self.words(tokens)))


class LoRALinear(nn.Module):
    """A frozen layer, and two small ones that are trained beside it."""

    def __init__(self, base: nn.Linear, rank: int = 8) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


SHAPE = LlamaShape(
    width=128, depth=4, num_heads=8, num_kv_heads=2, mlp_width=384, vocabulary=2_000, context=64, tied=True
)


def lora() -> nn.Module:
    model = Llama(SHAPE).requires_grad_(False)
    for layer in model.model.layers:
        layer.self_attn.q_proj = LoRALinear(layer.self_attn.q_proj)
        layer.mlp.up_proj = LoRALinear(layer.mlp.up_proj)
    return model


def mean(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch).float().square().mean()


def summed(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch, batch)


def in_chunks(model: nn.Module, batch: Tensor) -> Tensor:
    return model(batch, batch, loss=chunked_loss)


@dataclass(frozen=True, kw_only=True)
class Animal:
    """A model of the zoo."""

    build: Callable[[], nn.Module]
    units: tuple[str, ...]
    batch: Callable[[], Tensor]
    loss: Callable[[nn.Module, Tensor], Tensor] = mean


def images() -> Tensor:
    return torch.randn(4, 3, 32, 32)


def rows() -> Tensor:
    return torch.randn(64, 128)


def tokens() -> Tensor:
    return torch.zeros(4, 64, dtype=torch.long)


LAYERS = tuple(f"model.layers.{number}" for number in range(4))
ZOO = {
    "U-Net": Animal(build=UNet, units=("down.0", "down.1", "bottom", "up.0", "up.1"), batch=images),
    "ResNet": Animal(build=resnet, units=("1", "2", "3", "4"), batch=images),
    "LSTM": Animal(build=Reader, units=("first", "second"), batch=tokens),
    "experts": Animal(
        build=lambda: nn.Sequential(Mixture(128), Mixture(128)),
        units=tuple(f"{layer}.experts.{number}" for layer in range(2) for number in range(4)),
        batch=rows,
    ),
    "nested": Animal(
        build=lambda: nn.Sequential(*[nn.Sequential(Expert(128), Expert(128)) for _ in range(3)]),
        units=("0", "0.0", "0.1", "1", "1.0", "1.1", "2", "2.0", "2.1"),
        batch=rows,
    ),
    "used again": Animal(build=lambda: Again(128), units=("block",), batch=rows),
    "table": Animal(build=Table, units=("words", "layers.0", "layers.1", "layers.2"), batch=tokens),
    "Llama": Animal(build=lambda: Llama(SHAPE), units=LAYERS, batch=tokens, loss=summed),
    "Llama, loss in chunks": Animal(build=lambda: Llama(SHAPE), units=LAYERS, batch=tokens, loss=in_chunks),
    "LoRA": Animal(build=lora, units=LAYERS, batch=tokens, loss=summed),
    "LoRA, loss in chunks": Animal(build=lora, units=LAYERS, batch=tokens, loss=in_chunks),
}


def measure_zoo(rank: int, world_size: int, cases: list[tuple[str, dict]]) -> list[RankOfN]:
    """Measure each case, one after the other, in whatever group this rank is."""
    found = []
    for name, changes in cases:
        animal, config = ZOO[name], TrainConfig(**changes)
        batch = animal.batch()
        found.append(
            trace_steps(
                lambda animal=animal, config=config: distribute_model(animal.build(), config, animal.units),
                lambda model, animal=animal, batch=batch: animal.loss(model, batch),
            )
        )
    return found
