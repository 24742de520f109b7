"""The planner's model zoo: architectures that it wasn't made for, each small, with its units, a batch and a loss."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fsdp_helpers.models.llama import Llama, summed_loss
from fsdp_helpers.models.shapes import LlamaShape


def chunked_loss(hidden: Tensor, head: nn.Module, targets: Tensor) -> Tensor:
    """`summed_loss` as in 13, with the logits of one chunk at a time."""
    total = torch.zeros((), device=hidden.device)
    chunks = zip(hidden.flatten(0, 1).chunk(8), targets.flatten().chunk(8), strict=True)
    for part, wanted in chunks:
        total = total + checkpoint(summed_loss, part, head, wanted, use_reentrant=False)
    return total


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


WIDTH, LENGTH = 128, 48


def attend(queries: Tensor, keys: Tensor, values: Tensor, *, heads: int = 4, causal: bool = False) -> Tensor:
    split = [one.unflatten(-1, (heads, -1)).transpose(1, 2) for one in (queries, keys, values)]
    return F.scaled_dot_product_attention(*split, is_causal=causal).transpose(1, 2).flatten(2)


class Block(nn.Module):
    """Attention to itself or, if it gets a second sequence, also to that; then a hidden layer."""

    def __init__(self, width: int = WIDTH, *, crosses: bool = False, causal: bool = False) -> None:
        super().__init__()
        self.norm, self.qkv, self.out = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.cross_norm = nn.LayerNorm(width) if crosses else None
        self.q, self.kv = (nn.Linear(width, width), nn.Linear(width, 2 * width)) if crosses else (None, None)
        self.mlp_norm, self.mlp, self.causal = nn.LayerNorm(width), Expert(width), causal

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        x = x + self.out(attend(*self.qkv(self.norm(x)).chunk(3, dim=-1), causal=self.causal))
        if self.q is not None:
            x = x + attend(self.q(self.cross_norm(x)), *self.kv(other).chunk(2, dim=-1))
        return x + self.mlp(self.mlp_norm(x))


class Routed(nn.Module):
    """Each token goes to the two experts that a router chooses for it; the router computes in fp32, as most do."""

    def __init__(self, num_experts: int = 4) -> None:
        super().__init__()
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, num_experts, bias=False)
        self.experts = nn.ModuleList(Expert(WIDTH) for _ in range(num_experts))

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x).flatten(0, -2)
        weights, chosen = self.router(tokens).float().softmax(dim=-1).topk(2, dim=-1)
        out = torch.zeros_like(tokens)
        for number, expert in enumerate(self.experts):
            rows, places = torch.where(chosen == number)
            weighed = expert(tokens[rows]) * weights[rows, places, None].to(tokens.dtype)
            out = out.index_add(0, rows, weighed)
        return x + out.view_as(x)


class RoutedModel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(layer for _ in range(2) for layer in (Block(), Routed()))
        self.head = nn.Linear(WIDTH, 16)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Encoder(nn.Module):
    """Rows, or a sequence, through three blocks."""

    def __init__(self, depth: int = 3) -> None:
        super().__init__()
        self.enter = nn.Linear(64, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(depth))
        self.head = nn.Linear(WIDTH, 32)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(dim=1))


def views_loss(model: nn.Module, batch: Tensor) -> Tensor:
    """Two views of the same samples, through the root one after the other, should look alike."""
    one, two = F.normalize(model(batch), dim=-1), F.normalize(model(batch.flip(1)), dim=-1)
    return F.cross_entropy(one.float() @ two.float().T / 0.1, torch.arange(len(batch)))


class Towers(nn.Module):
    """A frozen tower, computed without gradients, and blocks that are trained on what it says."""

    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.ModuleList(Block() for _ in range(2)).requires_grad_(False)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 16)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            for block in self.tower:
                x = block(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Translator(nn.Module):
    """An encoder, and a decoder whose blocks all look at what the encoder says."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(400, WIDTH)
        self.encoder = nn.ModuleList(Block() for _ in range(2))
        self.decoder = nn.ModuleList(Block(crosses=True, causal=True) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 400)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        said, x = self.table(source), self.table(target)
        for block in self.encoder:
            said = block(said)
        for block in self.decoder:
            x = block(x, said)
        return self.head(self.norm(x))


def translated(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["source"], batch["target"]).float()
    return F.cross_entropy(logits.flatten(0, 1), batch["target"].flatten())


class DiffusionBlock(nn.Module):
    """A block whose norms are scaled and shifted by what the time says (Peebles and Xie 2023, arXiv:2212.09748)."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH, elementwise_affine=False) for _ in range(2))
        self.qkv, self.out, self.mlp = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), Expert(WIDTH)
        self.modulation = nn.Linear(WIDTH, 6 * WIDTH)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        shifts = self.modulation(F.silu(time))[:, None].chunk(6, dim=-1)
        inside = self.norms[0](x) * (1 + shifts[1]) + shifts[0]
        x = x + shifts[2] * self.out(attend(*self.qkv(inside).chunk(3, dim=-1)))
        return x + shifts[5] * self.mlp(self.norms[1](x) * (1 + shifts[4]) + shifts[3])


class Diffusion(nn.Module):
    """Predicts the noise in a picture. The frequencies of the time and the positions are buffers, in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.time = nn.Conv2d(4, WIDTH, 2, stride=2), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU())
        self.register_buffer("frequencies", torch.exp(-torch.arange(WIDTH // 2) * math.log(1e4) / (WIDTH // 2)))
        self.register_buffer("positions", torch.randn(1, 64, WIDTH))
        self.blocks = nn.ModuleList(DiffusionBlock() for _ in range(3))
        self.head = nn.Linear(WIDTH, 16)

    def forward(self, pictures: Tensor, times: Tensor) -> Tensor:
        angles = times[:, None] * self.frequencies
        time = self.time(torch.cat([angles.cos(), angles.sin()], dim=-1).to(self.time[0].weight.dtype))
        x = self.patches(pictures).flatten(2).transpose(1, 2) + self.positions
        for block in self.blocks:
            x = block(x, time)
        return self.head(x)


def denoised(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    noise = torch.randn_like(batch["pictures"])
    said = model(batch["pictures"] + noise, batch["times"])
    return F.mse_loss(said, F.pixel_unshuffle(noise, 2).flatten(2).transpose(1, 2))


class Scan(nn.Module):
    """A state that is updated token by token, in fp32; how fast it forgets is a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.enter, self.out = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.decay = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        values, gate = self.enter(self.norm(x)).chunk(2, dim=-1)
        keeps, state, states = torch.sigmoid(self.decay), torch.zeros(len(x), WIDTH), []
        for token in values.unbind(1):
            state = keeps * state + (1 - keeps) * token
            states.append(state)
        return x + self.out((torch.stack(states, dim=1) * F.silu(gate)).to(x.dtype))


class Scanner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(300, WIDTH)
        self.blocks = nn.ModuleList(Scan() for _ in range(3))
        self.head = nn.Linear(WIDTH, 300)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.table(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Graph(nn.Module):
    """Nodes that hear from their neighbors, through an adjacency matrix that comes with the batch, in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(32, WIDTH)
        self.layers = nn.ModuleList(nn.Bilinear(WIDTH, 8, WIDTH) for _ in range(2))
        self.mixers = nn.ModuleList(Expert(WIDTH) for _ in range(2))
        self.edges, self.head = nn.Linear(WIDTH, 8), nn.Linear(WIDTH, 7)

    def forward(self, nodes: Tensor, adjacency: Tensor) -> Tensor:
        x = self.enter(nodes)
        for layer, mixer in zip(self.layers, self.mixers, strict=True):
            heard = adjacency.to(x.dtype) @ x
            x = x + F.relu(layer(heard, self.edges(x)))
            x = x + mixer(x)
        return self.head(x)


def graph_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return model(*batch).float().logsumexp(dim=-1).mean()


class Latents(nn.Module):
    """A few latents look at a long input, again and again with the same block (Jaegle 2021, arXiv:2103.03206)."""

    def __init__(self) -> None:
        super().__init__()
        self.latents = nn.Parameter(torch.randn(1, 16, WIDTH))
        self.enter, self.look = nn.Linear(64, WIDTH), Block(crosses=True)
        self.think = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        x, latents = self.enter(x), self.latents.expand(len(x), -1, -1)
        for block in self.think:
            latents = block(self.look(latents, x))
        return self.head(latents.mean(dim=1))


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
class ZooModel:
    """A model of the zoo, with the names of its units, a batch, and its loss, a scalar."""

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


def sequences() -> Tensor:
    return torch.randn(4, LENGTH, WIDTH)


def features() -> Tensor:
    return torch.randn(8, LENGTH, 64)


def pictures() -> dict[str, Tensor]:
    return {"pictures": torch.randn(4, 4, 16, 16), "times": torch.rand(4)}


def sentences() -> dict[str, Tensor]:
    return {"source": torch.zeros(4, LENGTH, dtype=torch.long), "target": torch.zeros(4, 32, dtype=torch.long)}


def blocks(*stacks: tuple[str, int]) -> tuple[str, ...]:
    return tuple(f"{name}.{number}" for name, depth in stacks for number in range(depth))


LAYERS = tuple(f"model.layers.{number}" for number in range(4))
ZOO = {
    "U-Net": ZooModel(build=UNet, units=("down.0", "down.1", "bottom", "up.0", "up.1"), batch=images),
    "ResNet": ZooModel(build=resnet, units=("1", "2", "3", "4"), batch=images),
    "LSTM": ZooModel(build=Reader, units=("first", "second"), batch=tokens),
    "experts": ZooModel(
        build=lambda: nn.Sequential(Mixture(128), Mixture(128)),
        units=tuple(f"{layer}.experts.{number}" for layer in range(2) for number in range(4)),
        batch=rows,
    ),
    "nested": ZooModel(
        build=lambda: nn.Sequential(*[nn.Sequential(Expert(128), Expert(128)) for _ in range(3)]),
        units=("0", "0.0", "0.1", "1", "1.0", "1.1", "2", "2.0", "2.1"),
        batch=rows,
    ),
    "used again": ZooModel(build=lambda: Again(128), units=("block",), batch=rows),
    "table": ZooModel(build=Table, units=("words", "layers.0", "layers.1", "layers.2"), batch=tokens),
    "Llama": ZooModel(build=lambda: Llama(SHAPE), units=LAYERS, batch=tokens, loss=summed),
    "Llama, loss in chunks": ZooModel(build=lambda: Llama(SHAPE), units=LAYERS, batch=tokens, loss=in_chunks),
    "LoRA": ZooModel(build=lora, units=LAYERS, batch=tokens, loss=summed),
    "LoRA, loss in chunks": ZooModel(build=lora, units=LAYERS, batch=tokens, loss=in_chunks),
    "mixture of experts": ZooModel(
        build=RoutedModel,
        units=(*blocks(("blocks", 4)), *(f"blocks.{layer}.experts.{n}" for layer in (1, 3) for n in range(4))),
        batch=sequences,
        loss=mean,
    ),
    "two views": ZooModel(build=Encoder, units=blocks(("blocks", 3)), batch=features, loss=views_loss),
    "frozen tower": ZooModel(build=Towers, units=blocks(("tower", 2), ("blocks", 2)), batch=sequences, loss=mean),
    "translator": ZooModel(
        build=Translator, units=blocks(("encoder", 2), ("decoder", 2)), batch=sentences, loss=translated
    ),
    "diffusion": ZooModel(build=Diffusion, units=blocks(("blocks", 3)), batch=pictures, loss=denoised),
    "scan": ZooModel(
        build=Scanner, units=blocks(("blocks", 3)), batch=lambda: torch.zeros(4, LENGTH, dtype=torch.long), loss=mean
    ),
    "graph": ZooModel(
        build=Graph,
        units=blocks(("layers", 2), ("mixers", 2)),
        batch=lambda: (torch.randn(64, 32), torch.rand(64, 64)),
        loss=graph_loss,
    ),
    "latents": ZooModel(build=Latents, units=("look", *blocks(("think", 2))), batch=features, loss=mean),
}
