"""What decides the size of a vision transformer, as numbers. Models are built of it, and plans are made of it."""

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
