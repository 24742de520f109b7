"""The series' models, by name: images (N, 1, 28, 28) -> (N, 10), or bytes (N, length) -> (N, length, 256)."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp_helpers.models.shapes import VIT_SHAPES
from fsdp_helpers.models.vit import ViT


class ConvFeatures(nn.Sequential):
    """The layers that ShallowNet and DeepNet share: two convolutions, pooled and flattened to 9,216 features."""

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 32, kernel_size=3),  # (N, 32, 26, 26)
            nn.ReLU(inplace=True),
            nn.Conv2d(32, 64, kernel_size=3),  # (N, 64, 24, 24)
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),  # (N, 64, 12, 12)
            nn.Dropout(0.25),
            nn.Flatten(),  # (N, 9216)
        )


class ShallowNet(nn.Module):
    """Two convolutions and two fully connected layers, 1,199,882 parameters; log-probabilities (N, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.features = ConvFeatures()
        self.fc1 = nn.Linear(9216, 128)
        self.dropout = nn.Dropout(0.5)
        self.fc2 = nn.Linear(128, 10)

    def forward(self, images: Tensor) -> Tensor:
        hidden = F.relu(self.fc1(self.features(images)))  # (N, 128)
        return F.log_softmax(self.fc2(self.dropout(hidden)), dim=1)


class DeepNet(nn.Module):
    """ShallowNet's convolutions and six fully connected layers: 94,104,234 parameters; log-probabilities (N, 10).

    88% of the parameters are in `fc1`. As in the material this network comes from, there's no activation function
    between the later layers. It exists to be big; don't copy it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.features = ConvFeatures()
        self.fc1 = nn.Linear(9216, 9000)
        self.dropout = nn.Dropout(0.5)
        self.fc2 = nn.Linear(9000, 1000)
        self.fc3 = nn.Linear(1000, 1000)
        self.fc4 = nn.Linear(1000, 1000)
        self.fc5 = nn.Linear(1000, 128)
        self.fc6 = nn.Linear(128, 10)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.dropout(F.relu(self.fc1(self.features(images))))  # (N, 9000)
        hidden = self.fc5(self.fc4(self.fc3(self.fc2(hidden))))  # (N, 128)
        return F.log_softmax(self.fc6(hidden), dim=1)


class SimpleCNN(nn.Module):
    """Two padded convolutions and one fully connected layer: 50,186 parameters. Returns logits (N, 10)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 32, kernel_size=3, padding=1),  # (N, 32, 28, 28)
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),  # (N, 32, 14, 14)
            nn.Conv2d(32, 64, kernel_size=3, padding=1),  # (N, 64, 14, 14)
            nn.ReLU(inplace=True),
            nn.MaxPool2d(2),  # (N, 64, 7, 7)
            nn.Flatten(),  # (N, 3136)
            nn.Linear(3136, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.layers(images)


class VisionTransformer(nn.Module):
    """A small vision transformer on 7 x 7 patches: 16 patches per digit, mean-pooled. Returns logits (N, 10)."""

    def __init__(self, width: int = 64, depth: int = 4, num_heads: int = 4) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, kernel_size=7, stride=7)  # (N, width, 4, 4)
        self.positions = nn.Parameter(torch.randn(1, 16, width) * 0.02)
        self.blocks = nn.Sequential(*[_transformer_block(width, num_heads) for _ in range(depth)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.positions  # (N, 16, width)
        return self.head(self.norm(self.blocks(tokens)).mean(dim=1))


class DeepVisionTransformer(VisionTransformer):
    """Eight blocks of width 256: 6,338,058 parameters, 789,760 per block. It's deep enough that activations matter."""

    def __init__(self) -> None:
        super().__init__(width=256, depth=8, num_heads=8)


def _transformer_block(width: int, num_heads: int) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(
        width, num_heads, dim_feedforward=4 * width, dropout=0.1, batch_first=True, norm_first=True
    )


MODEL_CLASSES: dict[str, Callable[[], nn.Module]] = {
    "shallow": ShallowNet,
    "deep": DeepNet,
    "simple": SimpleCNN,
    "vit": VisionTransformer,
    "vit-deep": DeepVisionTransformer,
    "vit-mnist": partial(ViT, VIT_SHAPES["vit-mnist"]),
}


def build_model(name: str, *, dropout: bool = True) -> nn.Module:
    """Build the named model, freshly initialized.

    `dropout=False` sets every dropout probability to zero, for comparing one process with many. Each rank draws
    its own dropout masks, so with dropout, the two runs' losses would differ. Raises ValueError for an unknown name.
    """
    if name not in MODEL_CLASSES:
        raise ValueError(f"unknown model {name!r}; choose one of {', '.join(MODEL_CLASSES)}")
    model = MODEL_CLASSES[name]()
    if not dropout:
        for module in model.modules():
            if isinstance(module, nn.Dropout):
                module.p = 0.0
            elif isinstance(module, nn.MultiheadAttention):
                module.dropout = 0.0
    return model


def count_params(model: nn.Module) -> int:
    """Count the parameters of `model`, before any sharding."""
    return sum(parameter.numel() for parameter in model.parameters())
