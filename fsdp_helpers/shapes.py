"""The shape of a vision transformer in numbers, from which models are built and plans are made."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class ViTShape:
    """A vision transformer: patches, a class token where asked for, equal blocks, a norm and a head."""

    image_size: int  # images are square
    channels: int
    patch_size: int
    width: int  # of a token
    depth: int  # blocks
    num_heads: int
    mlp_width: int  # of a block's hidden layer
    num_classes: int
    class_token: bool = False  # else the mean over all tokens is classified

    @property
    def num_tokens(self) -> int:
        return (self.image_size // self.patch_size) ** 2 + self.class_token


VIT_SHAPES = {
    "vit-mnist": ViTShape(
        image_size=28, channels=1, patch_size=4, width=64, depth=4, num_heads=4, mlp_width=256, num_classes=10
    ),
    # Dosovitskiy et al. 2020, arXiv:2010.11929, table 1. With ImageNet's 1,000 classes: 86,567,656 parameters ...
    "vit-b16": ViTShape(
        image_size=224, channels=3, patch_size=16, width=768, depth=12, num_heads=12, mlp_width=3072,
        num_classes=1000, class_token=True,
    ),
    # ... and 304,326,632
    "vit-l16": ViTShape(
        image_size=224, channels=3, patch_size=16, width=1024, depth=24, num_heads=16, mlp_width=4096,
        num_classes=1000, class_token=True,
    ),
    # the 10-billion-parameter example of PyTorch/XLA's FSDP, which averages the tokens: 10,077,917,160 parameters
    "vit-10b": ViTShape(
        image_size=224, channels=3, patch_size=14, width=5120, depth=32, num_heads=32, mlp_width=20480,
        num_classes=1000,
    ),
}  # fmt: skip
