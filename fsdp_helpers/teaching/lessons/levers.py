"""The peak of a step of 07's transformer with each lever, predicted from what one block keeps for backward."""

import torch

from fsdp_helpers.config import TrainConfig
from fsdp_helpers.measuring.activations import count_block
from fsdp_helpers.models.series import DeepVisionTransformer
from fsdp_helpers.planning.peak import peak_of_step
from fsdp_helpers.planning.transformer import stack_profile
from fsdp_helpers.planning.walk.ledger import Peak

TOKENS, WIDTH = 16, 256  # an image becomes 16 vectors of 256 numbers


def predict(config: TrainConfig, num_ranks: int, device: str) -> Peak:
    """Return the peak on one of `num_ranks` ranks: a walk through the step, unit by unit, that adds up what's allocated.

    The bytes that a block keeps for backward are counted here, on `device`, for a micro-batch of
    (global_batch_size / num_ranks / micro_batches, TOKENS, WIDTH).
    """
    model = DeepVisionTransformer().train().to(device)
    blocks = [f"blocks.{number}" for number in range(len(model.blocks))]
    block_shapes = {name: tuple(value.shape) for name, value in model.blocks[0].named_parameters()}
    root_shapes = {name: tuple(p.shape) for name, p in model.named_parameters() if not name.startswith("blocks.")}
    dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
    images = config.global_batch_size // num_ranks // config.micro_batches
    part = torch.randn(images, TOKENS, WIDTH, dtype=dtype, device=device, requires_grad=True)
    counted = count_block(model.blocks[0].to(dtype), part)
    step = stack_profile(blocks, block_shapes, root_shapes, counted, config.activation_checkpointing)
    return peak_of_step(step, config, num_ranks, blocks, backend="gloo" if device == "cpu" else "nccl")
