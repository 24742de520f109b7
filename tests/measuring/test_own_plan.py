"""A plan for any model: three that nobody prepared for, against one real rank of many; and what cannot be planned."""

import pytest
import torch
import torch.nn.functional as F
from faked_ranks import fakes_ddp
from torch import nn

from fsdp_helpers.config import TrainConfig
from fsdp_helpers.measuring.own_plan import first_samples, mean_of_outputs, num_samples, plan_model
from fsdp_helpers.measuring.rank_of_n import measure_own_rank_of_n


class ResidualStage(nn.Module):
    """Two convolutions with batch norms, and a way around them."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first, self.second = (nn.Conv2d(channels, channels, 3, padding=1, bias=False) for _ in range(2))
        self.norms = nn.ModuleList(nn.BatchNorm2d(channels) for _ in range(2))

    def forward(self, x):
        return F.relu(x + self.norms[1](self.second(F.relu(self.norms[0](self.first(x))))))


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 48, 3, padding=1)
        self.stages = nn.Sequential(*[ResidualStage(48) for _ in range(4)])
        self.head = nn.Linear(48, 20)

    def forward(self, images):
        return self.head(self.stages(self.stem(images)).mean(dim=(2, 3)))


class Halves(nn.Module):
    """An encoder and a decoder of gated recurrent units: the decoder starts where the encoder ended."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(300, 96)
        self.encoder = nn.GRU(96, 160, batch_first=True)
        self.decoder = nn.GRU(96, 160, batch_first=True)
        self.head = nn.Linear(160, 300)

    def forward(self, source, target):
        _, state = self.encoder(self.words(source))
        return self.head(self.decoder(self.words(target), state)[0])


class MLPBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 3 * width), nn.Linear(3 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class TiedNet(nn.Module):
    """A bag of words whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(700, 80)
        self.blocks = nn.ModuleList(MLPBlock(80) for _ in range(3))
        self.head = nn.Linear(80, 700, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens):
        hidden = self.words(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(hidden)


STRANGERS = {
    "a convolutional net": (ConvNet, lambda: torch.randn(6, 3, 16, 16), ResidualStage),
    "an encoder and a decoder": (Halves, lambda: [torch.randint(0, 300, (12, 8)) for _ in range(2)], nn.GRU),
    "tied weights": (TiedNet, lambda: torch.randint(0, 700, (8, 24)), MLPBlock),
}
UNITS = {"strategy": "fsdp-auto-wrap"}


@pytest.mark.parametrize(
    "name, run",
    [  # a telling case of each; the zoo has more models and settings, on real ranks
        pytest.param("a convolutional net", {"strategy": "ddp"}, marks=fakes_ddp),
        ("an encoder and a decoder", UNITS),
        ("tied weights", UNITS),
        ("a convolutional net", UNITS | {"activation_checkpointing": "units"}),
    ],
)
def test_models_that_nobody_prepared_for(name, run):
    factory, make_batch, unit_class = STRANGERS[name]
    batch = make_batch()
    units = [name for name, module in factory().named_modules() if isinstance(module, unit_class)]
    plan, said = plan_model(factory, batch, world_size=16, device_memory_gb=8, unit_class=unit_class, **run)
    measured = measure_own_rank_of_n(
        factory,
        lambda model: mean_of_outputs(model, batch),
        TrainConfig(**run),
        16,
        units if "fsdp" in str(run) else (),
    )
    assert plan.peak.bytes / measured.peak_bytes == pytest.approx(1, abs=0.1)
    assert plan.state == measured.state
    assert plan.sent_bytes == sum(seen.sent_bytes for seen in measured.collectives if seen.op != "broadcast")
    assert said.startswith("It fits")  # advice would measure a step for each change that it tries


def test_a_plan_of_ones_own():
    layer = lambda: nn.Sequential(nn.Linear(100, 50), nn.ReLU(), nn.Linear(50, 10))  # noqa: E731
    seen = []

    def loss_of(model, batch):
        seen.append(len(batch["x"]))
        return F.cross_entropy(model(batch["x"]), batch["y"])

    batch = {"x": torch.randn(8, 100), "y": torch.zeros(8, dtype=torch.long)}
    plan, said = plan_model(layer, batch, world_size=2, device_memory_gb=8, loss_of=loss_of, tflops=1e-6)
    assert (plan.model, plan.item, plan.num_params, plan.settings.batch) == ("Sequential", "sample", 5_560, 8)
    # forward: 2 x 8 x (100 x 50 + 50 x 10) = 88,000; three passes at a million a second
    assert plan.arithmetic_s == pytest.approx(0.264)
    assert said.startswith("It fits") and set(seen) == {8}


def test_what_a_batch_may_be():
    assert num_samples({"a": torch.zeros(3, 2), "b": [torch.zeros(3), "text"]}) == 3
    assert num_samples({"positions": torch.zeros(64), "tokens": torch.zeros(4, 64), "mask": torch.zeros(1, 64)}) == 4
    for bad in (torch.tensor(1.0), [torch.zeros(2), torch.zeros(3)], "none"):
        with pytest.raises(ValueError, match="all must have the same number, at least one"):
            num_samples(bad)
    images, labels, name = first_samples((torch.zeros(4, 2), torch.zeros(4, dtype=torch.long), "x"), 2, torch.bfloat16)
    assert (images.shape, images.dtype, labels.dtype, name) == ((2, 2), torch.bfloat16, torch.long, "x")
    tokens, positions = first_samples((torch.zeros(4, 64), torch.zeros(64)), 2, torch.float32)
    assert (tokens.shape, positions.shape) == ((2, 64), (64,))


class Router(nn.Module):
    """Each row goes to one of two experts."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(8, 2), nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x):
        chosen = self.gate(x).argmax(dim=-1)
        return sum(expert(x[chosen == number]).sum() for number, expert in enumerate(self.experts))[None]


def test_a_router_on_the_meta_device_ends_in_a_sentence():
    with pytest.raises(ValueError, match="sizes of Router.s tensors depend on values .* no values on the meta device"):
        plan_model(lambda: on_meta(Router), torch.zeros(4, 8), world_size=2, device_memory_gb=8)


# ---------------------------------------------------------------- frozen, tied, on the meta device


class Adapted(nn.Module):
    """A frozen layer and two small ones that are trained beside it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, 4, bias=False), nn.Linear(4, width, bias=False)

    def forward(self, x):
        return F.gelu(self.base(x) + self.up(self.down(x)))


def adapted(width: int = 64) -> nn.Module:
    return nn.Sequential(*[Adapted(width) for _ in range(3)])


def on_meta(factory):
    with torch.device("meta"):
        return factory()


def plan_adapted(factory=adapted, batch=torch.zeros(8, 64), **settings):
    return plan_model(factory, batch, world_size=4, device_memory_gb=8, unit_class=Adapted, **settings)[0]


def test_frozen_values_have_no_gradient_and_no_moments():
    # 3 x (64 x 64 + 64) frozen and 3 x 512 trained values
    plan = plan_adapted(strategy="ddp")
    assert plan.state.parameter_bytes == 4 * (3 * 4_160 + 3 * 512)
    assert plan.state.gradient_bytes == 4 * 3 * 512 and plan.state.optimizer_bytes == 8 * 3 * 512
    assert [seen.bytes for seen in plan.collectives] == [4 * 3 * 512]
    reduced = {seen.op: seen.bytes for seen in plan_adapted().collectives}
    assert reduced["reduce_scatter"] == 4 * 3 * 512


@pytest.mark.parametrize("activation_checkpointing", ["none", "units"])
def test_a_model_on_meta_has_the_plan_of_one_with_values(activation_checkpointing):
    # Large enough that the random state which recomputing keeps on a CPU, 5 kB for each unit, does not count
    settings = {"activation_checkpointing": activation_checkpointing, "tflops": 1, "batch": torch.zeros(512, 256)}
    real, fake = (
        plan_adapted(factory, **settings) for factory in (lambda: adapted(256), lambda: on_meta(lambda: adapted(256)))
    )
    assert fake.peak.bytes == pytest.approx(real.peak.bytes, rel=0.01)
    assert (fake.collectives, fake.state, fake.step_flops) == (real.collectives, real.state, real.step_flops)


class Scaled(nn.Module):
    """A zero-dimensional (scalar) parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.layer = nn.Parameter(torch.tensor(1.0)), nn.Linear(8, 8)

    def forward(self, x):
        return self.scale * self.layer(x)


class Tied(nn.Module):
    """A head whose weight is the table's."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(9, 8), nn.Linear(8, 9, bias=False)
        self.head.weight = self.words.weight

    def forward(self, tokens):
        return self.head(self.words(tokens))


@pytest.mark.parametrize(
    "factory, batch, settings, message",
    [
        (Scaled, torch.randn(4, 8), {}, "'scale' is a zero-dimensional"),
        (
            Tied,
            torch.zeros(4, 2, dtype=torch.long),
            {"unit_names": ["head"]},
            "'head.weight' is tied to 'words.weight'",
        ),
        (adapted, torch.randn(4, 64), {"unit_names": ["3"]}, "Sequential has no module '3'"),
        (adapted, torch.randn(4, 64), {"activation_checkpointing": "units"}, "Sequential has no units"),
        (lambda: nn.Linear(64, 64).requires_grad_(False), torch.randn(4, 64), {}, "has no trainable parameters"),
        (ConvNet, torch.randn(4, 3, 8, 8), {"precision": "bf16"}, "is a BatchNorm, whose statistics stay in fp32"),
    ],
)
def test_what_cannot_be_planned_is_refused_with_a_reason(factory, batch, settings, message):
    with pytest.raises(ValueError, match=message):
        plan_model(factory, batch, world_size=2, device_memory_gb=1, **settings)


def test_without_units_a_plan_that_does_not_fit_gets_advice():
    normed = lambda: nn.Sequential(nn.Conv1d(16, 32, 3), nn.BatchNorm1d(32), nn.Conv1d(32, 8, 1))  # noqa: E731
    _, said = plan_model(normed, torch.randn(4, 16, 8), world_size=2, device_memory_gb=1e-6, allowance_gb=0)
    assert said.startswith("It doesn't fit")
    assert "recompute" not in said and "bf16" not in said  # there are no units, and batch norms refuse bf16
