"""Models that were written after the planner, to check it: none of its rules was made with one of them in view."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from zoo import LENGTH, WIDTH, Animal, Block, Expert, blocks, features, images, mean, sequences, tokens


class Cell(nn.Module):
    """One step of a gated recurrent network."""

    def __init__(self) -> None:
        super().__init__()
        self.gates, self.candidate = nn.Linear(2 * WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, state: Tensor, x: Tensor) -> Tensor:
        forget, update = self.gates(torch.cat([state, x], dim=-1)).sigmoid().chunk(2, dim=-1)
        candidate = self.candidate(torch.cat([forget * state, x], dim=-1)).tanh()
        return update * state + (1 - update) * candidate


class Recurrent(nn.Module):
    """One cell, used once for each of six tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.cell, self.head = nn.Linear(64, WIDTH), Cell(), Expert(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        state = x.new_zeros(len(x), WIDTH, dtype=self.enter.weight.dtype)
        for token in x[:, :6].unbind(1):
            state = self.cell(state, self.enter(token))
        return self.head(state)


class Listener(nn.Module):
    """Convolutions shorten a spectrogram, and a transformer reads what is left."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 32, 3, stride=2, padding=1), nn.GELU(), nn.Conv2d(32, 64, 3, stride=2, padding=1), nn.GELU()
        )
        self.enter = nn.Linear(64 * 8, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.mixers = nn.ModuleList(nn.Conv1d(WIDTH, WIDTH, 7, padding=3, groups=8) for _ in range(3))
        self.head = nn.Linear(WIDTH, 40)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(self.stem(x).permute(0, 3, 1, 2).flatten(2))
        for block, mixer in zip(self.blocks, self.mixers, strict=True):
            x = block(x)
            x = x + mixer(x.transpose(1, 2)).transpose(1, 2)
        return self.head(x)


class Depths(nn.Module):
    """Every other block sees only the half of the tokens that a router picks (arXiv:2404.02258)."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(4))
        self.routers = nn.ModuleList(nn.Linear(WIDTH, 1) for _ in range(2))
        self.head = nn.Linear(WIDTH, 16)

    def forward(self, x: Tensor) -> Tensor:
        for i, block in enumerate(self.blocks):
            if i % 2 == 0:
                x = block(x)
                continue
            weights = self.routers[i // 2](x)
            chosen = weights.topk(x.shape[1] // 2, dim=1).indices.sort(dim=1).values
            places = chosen.expand(-1, -1, WIDTH)
            said = block(x.gather(1, places)) * weights.gather(1, chosen).sigmoid()
            x = x.scatter_add(1, places, said.to(x.dtype))
        return self.head(x)


class Siamese(nn.Module):
    """The same trunk for three inputs, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(64, WIDTH)
        self.trunk = nn.ModuleList(Block() for _ in range(2))
        self.out = nn.Linear(WIDTH, 32)

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        return [self._one(x) for x in inputs]

    def _one(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for block in self.trunk:
            x = block(x)
        return F.normalize(self.out(x.mean(dim=1)), dim=-1)


def triplets(model: nn.Module, batch: Tensor) -> Tensor:
    anchor, near, far = (one.float() for one in model(batch, batch.flip(0), batch.flip(1)))
    return F.triplet_margin_loss(anchor, near, far)


class Hyper(nn.Module):
    """A network whose outputs are the weights of another one."""

    def __init__(self) -> None:
        super().__init__()
        self.codes = nn.Parameter(torch.randn(3, 32))
        self.makers = nn.ModuleList(nn.Linear(32, WIDTH * WIDTH) for _ in range(3))
        self.enter, self.head = nn.Linear(64, WIDTH), nn.Linear(WIDTH, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for code, maker in zip(self.codes, self.makers, strict=True):
            x = x + F.gelu(F.linear(x, maker(code.to(x.dtype)).view(WIDTH, WIDTH)))
        return self.head(x)


class Spectral(nn.Module):
    """A state space as one long convolution, computed by FFT in fp32 (arXiv:2111.00396)."""

    def __init__(self, states: int = 16) -> None:
        super().__init__()
        self.norm, self.mlp = nn.LayerNorm(WIDTH), Expert(WIDTH)
        self.decay, self.gain = nn.Parameter(torch.rand(WIDTH, states)), nn.Parameter(torch.randn(WIDTH, states))

    def forward(self, x: Tensor) -> Tensor:
        times = torch.arange(x.shape[1], dtype=torch.float32)
        powers = torch.exp(-self.decay.float()[:, :, None] * times)
        kernel = torch.fft.rfft((self.gain.float()[:, :, None] * powers).sum(dim=1), n=2 * x.shape[1])
        signal = torch.fft.rfft(self.norm(x).float().transpose(1, 2), n=2 * x.shape[1])
        out = torch.fft.irfft(signal * kernel)[..., : x.shape[1]].transpose(1, 2)
        x = x + out.to(x.dtype)
        return x + self.mlp(x)


class StateSpace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(300, WIDTH)
        self.layers = nn.ModuleList(Spectral() for _ in range(3))
        self.head = nn.Linear(WIDTH, 300)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Retrieval(nn.Module):
    """Users and items, each with a table and a tower; those that belong together should be near."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.EmbeddingBag(5_000, 64), nn.EmbeddingBag(9_000, 64)
        self.user_tower, self.item_tower = (nn.Sequential(Expert(64), nn.Linear(64, 32)) for _ in range(2))

    def forward(self, users: Tensor, items: Tensor) -> tuple[Tensor, Tensor]:
        return self.user_tower(self.users(users)), self.item_tower(self.items(items))


def in_batch(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    users, items = (F.normalize(one.float(), dim=-1) for one in model(*batch))
    return F.cross_entropy(users @ items.T / 0.05, torch.arange(len(users)))


class Exits(nn.Module):
    """A head after every block, each with a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(64, WIDTH)
        self.blocks = nn.ModuleList(Block(causal=True) for _ in range(3))
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 50) for _ in range(3))

    def forward(self, x: Tensor) -> list[Tensor]:
        x, out = self.enter(x), []
        for block, head in zip(self.blocks, self.heads, strict=True):
            x = block(x)
            out.append(head(x))
        return out


def every_exit(model: nn.Module, batch: Tensor) -> Tensor:
    return sum(said.float().logsumexp(dim=-1).mean() for said in model(batch))


class Autoencoder(nn.Module):
    """Pictures to a drawn code and back, with transposed convolutions and group norms."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(self._down(*sizes) for sizes in ((3, 32), (32, 64)))
        self.center, self.spread = nn.Conv2d(64, 16, 1), nn.Conv2d(64, 16, 1)
        self.back = nn.Conv2d(16, 64, 1)
        self.up = nn.ModuleList(self._up(*sizes) for sizes in ((64, 32), (32, 3)))

    @staticmethod
    def _down(before: int, after: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(before, after, 4, stride=2, padding=1), nn.GroupNorm(4, after), nn.SiLU())

    @staticmethod
    def _up(before: int, after: int) -> nn.Module:
        return nn.Sequential(
            nn.GroupNorm(4, before), nn.SiLU(), nn.ConvTranspose2d(before, after, 4, stride=2, padding=1)
        )

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        for layer in self.down:
            x = layer(x)
        center, spread = self.center(x), self.spread(x)
        x = self.back(center + torch.randn_like(center) * (spread / 2).exp())
        for layer in self.up:
            x = layer(x)
        return x, center, spread


def rebuilt(model: nn.Module, batch: Tensor) -> Tensor:
    said, center, spread = (one.float() for one in model(batch))
    return F.mse_loss(said, batch) + (center.square() + spread.exp() - spread - 1).mean()


class Mixer(nn.Module):
    """Hidden layers over tokens and over channels in turn (arXiv:2105.01601)."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(2))
        self.over_tokens, self.over_channels = Expert(LENGTH), Expert(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.over_tokens(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        return x + self.over_channels(self.norms[1](x))


def mixers() -> nn.Module:
    return nn.Sequential(*[Mixer() for _ in range(4)], nn.Linear(WIDTH, 20))


def bags() -> tuple[Tensor, Tensor]:
    return torch.randint(5_000, (32, 6)), torch.randint(9_000, (32, 4))


def animal(build: Callable[[], nn.Module], batch: Callable, units: tuple[str, ...], loss: Callable = mean) -> Animal:
    return Animal(build=build, units=units, batch=batch, loss=loss)


UNSEEN = {
    "recurrent cell": animal(Recurrent, features, ("cell", "head")),
    "convolutions and transformer": animal(Listener, images, ("stem", *blocks(("blocks", 3), ("mixers", 3)))),
    "mixture of depths": animal(Depths, sequences, blocks(("blocks", 4))),
    "siamese": animal(Siamese, features, blocks(("trunk", 2)), triplets),
    "hypernetwork": animal(Hyper, features, blocks(("makers", 3))),
    "state space": animal(StateSpace, tokens, ("words", *blocks(("layers", 3)))),
    "retrieval": animal(Retrieval, bags, ("users", "items", "user_tower", "item_tower"), in_batch),
    "early exits": animal(Exits, features, blocks(("blocks", 3), ("heads", 3)), every_exit),
    "autoencoder": animal(Autoencoder, images, blocks(("down", 2), ("up", 2)), rebuilt),
    "mixer": animal(mixers, sequences, ("0", "1", "2", "3")),
}
