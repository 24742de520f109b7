"""It crashes, with a message that's clear once you've seen it."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

from fsdp_helpers.teaching.failures.entry import Failure, Numbers
from fsdp_helpers.teaching.failures.small_job import WIDTH, cpu_mesh, images, in_units, small_model

CPU = torch.device("cpu")

# ---------------------------------------------------------------- one rank skips a step


def skip_bad_loss(rank: int, world_size: int) -> Numbers:
    model, num_steps = in_units(small_model()), 0
    for step in range(3):
        broken_image = rank == 1 and step == 1
        loss = model(images() * (float("nan") if broken_image else 1.0)).sum()
        if not loss.isfinite():
            continue  # this rank alone
        loss.backward()
        num_steps += 1
    return {"steps": num_steps}


def skip_bad_loss_together(rank: int, world_size: int) -> Numbers:
    model, num_steps = in_units(small_model()), 0
    for step in range(3):
        broken_image = rank == 1 and step == 1
        loss = model(images() * (float("nan") if broken_image else 1.0)).sum()
        is_good = loss.detach().isfinite().float()
        dist.all_reduce(is_good, op=dist.ReduceOp.MIN)
        if not is_good:
            continue  # all ranks
        loss.backward()
        num_steps += 1
    return {"steps": num_steps}


def two_steps() -> Numbers:
    return {"steps": 2}


# ---------------------------------------------------------------- a unit that is never called


class TwoBlocks(nn.Module):
    """A model that calls the blocks in its list one by one, never the list."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([small_model(), nn.Linear(2, 2)])

    def forward(self, samples: Tensor) -> Tensor:
        for block in self.blocks:
            samples = block(samples)
        return samples


def shard_the_list(rank: int, world_size: int) -> Numbers:
    model = TwoBlocks()
    fully_shard(model.blocks, mesh=cpu_mesh())
    fully_shard(model, mesh=cpu_mesh())
    return {"sum of outputs": model(images()).sum().item()}


def shard_the_blocks(rank: int, world_size: int) -> Numbers:
    model = TwoBlocks()
    for block in model.blocks:
        fully_shard(block, mesh=cpu_mesh())
    fully_shard(model, mesh=cpu_mesh())
    return {"sum of outputs": model(images()).sum().item()}


def blocks_alone() -> Numbers:
    return {"sum of outputs": TwoBlocks()(images()).sum().item()}


# ---------------------------------------------------------------- past the hooks


def call_part_of_a_unit(rank: int, world_size: int) -> Numbers:
    model = fully_shard(small_model(), mesh=cpu_mesh())
    return {"sum of features": model[0](images()).sum().item()}


def call_the_unit(rank: int, world_size: int) -> Numbers:
    model = small_model()
    fully_shard(model[0], mesh=cpu_mesh())
    fully_shard(model, mesh=cpu_mesh())
    return {"sum of features": model[0](images()).sum().item()}


def features_alone() -> Numbers:
    return {"sum of features": small_model()[0](images()).sum().item()}


# ---------------------------------------------------------------- tied weights


class TinyLanguageModel(nn.Module):
    """An embedding and a head that share one weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(10, WIDTH)
        self.head = nn.Linear(WIDTH, 10, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens))


TOKENS = torch.arange(4)


def tied_in_two_units(rank: int, world_size: int) -> Numbers:
    model = TinyLanguageModel()
    fully_shard(model.embedding, mesh=cpu_mesh())
    fully_shard(model.head, mesh=cpu_mesh())
    fully_shard(model, mesh=cpu_mesh())
    return {"sum of logits": model(TOKENS).sum().item()}


def tied_in_one_unit(rank: int, world_size: int) -> Numbers:
    model = TinyLanguageModel()
    fully_shard([model.embedding, model.head], mesh=cpu_mesh())
    fully_shard(model, mesh=cpu_mesh())
    return {"sum of logits": model(TOKENS).sum().item()}


def tied_alone() -> Numbers:
    return {"sum of logits": TinyLanguageModel()(TOKENS).sum().item()}


# ---------------------------------------------------------------- frozen parameters, FSDP1


def freeze_in_a_flat_unit(rank: int, world_size: int) -> Numbers:
    model = small_model()
    model[0].requires_grad_(False)
    sharded = FullyShardedDataParallel(model, device_id=CPU)
    return {"sum of outputs": sharded(images()).sum().item()}


def freeze_with_original_parameters(rank: int, world_size: int) -> Numbers:
    model = small_model()
    model[0].requires_grad_(False)
    sharded = FullyShardedDataParallel(model, device_id=CPU, use_orig_params=True)
    return {"sum of outputs": sharded(images()).sum().item()}


def outputs_alone() -> Numbers:
    return {"sum of outputs": small_model()(images()).sum().item()}


# ---------------------------------------------------------------- the encoder's fast path, FSDP1


def encoder_layer() -> nn.TransformerEncoderLayer:
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(WIDTH, 2, 2 * WIDTH, batch_first=True)


@torch.no_grad()
def units_inside_the_encoder_layer(rank: int, world_size: int) -> Numbers:
    linear_layers = ModuleWrapPolicy({nn.Linear})
    model = FullyShardedDataParallel(encoder_layer(), auto_wrap_policy=linear_layers, device_id=CPU).eval()
    return {"sum of outputs": model(images()[None]).abs().sum().item()}


@torch.no_grad()
def the_encoder_layer_as_unit(rank: int, world_size: int) -> Numbers:
    whole_layers = ModuleWrapPolicy({nn.TransformerEncoderLayer})
    model = FullyShardedDataParallel(encoder_layer(), auto_wrap_policy=whole_layers, device_id=CPU).eval()
    return {"sum of outputs": model(images()[None]).abs().sum().item()}


def encoder_alone() -> Numbers:
    with torch.no_grad():
        return {"sum of outputs": encoder_layer().eval()(images()[None]).abs().sum().item()}


CRASHES = (
    Failure(
        name="crash-skipped-step",
        broken=skip_bad_loss,
        fixed=skip_bad_loss_together,
        right=two_steps,
        says="(?s)SIGABRT.*doesn't match expected size",
    ),
    Failure(
        name="crash-mixed-tensor-dtensor",
        broken=call_part_of_a_unit,
        fixed=call_the_unit,
        right=features_alone,
        says="got mixed torch.Tensor and DTensor",
    ),
    Failure(
        name="crash-tied-weights",
        broken=tied_in_two_units,
        fixed=tied_in_one_unit,
        right=tied_alone,
        says="shared",
        not_in="2.11",
    ),
    Failure(
        name="crash-container",
        broken=shard_the_list,
        fixed=shard_the_blocks,
        right=blocks_alone,
        says="containers that do not implement forward",
    ),
    Failure(
        name="crash-frozen-flat",
        broken=freeze_in_a_flat_unit,
        fixed=freeze_with_original_parameters,
        right=outputs_alone,
        says="uniform `requires_grad`",
    ),
    Failure(
        name="crash-encoder-fast-path",
        broken=units_inside_the_encoder_layer,
        fixed=the_encoder_layer_as_unit,
        right=encoder_alone,
        says="setStorage|2d|shape|size",
        tolerance=1e-4,  # the fast path adds up in a different order
    ),
)
