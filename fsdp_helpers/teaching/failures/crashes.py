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
        title="One rank skips a batch, and a process is aborted",
        why="Rank 1 skips a step whose loss is NaN. Its next all-gather is matched with rank 0's gradient reduction, and gloo receives more bytes than it expects, so it aborts the process from C++. NCCL would hang instead, or mix up the data.",
        tell="*Received data size doesn't match expected size*, the last line on standard error: two ranks are in "
        "different collectives. `TORCH_DISTRIBUTED_DEBUG=DETAIL` says which.",
        fix="Decide together: reduce the flag over all ranks, and skip everywhere or nowhere.",
        broken=skip_bad_loss,
        fixed=skip_bad_loss_together,
        right=two_steps,
        says="(?s)SIGABRT.*doesn't match expected size",
    ),
    Failure(
        name="crash-mixed-tensor-dtensor",
        title="got mixed torch.Tensor and DTensor",
        why="The unit's hooks unshard its parameters when the unit itself is called. Calling `model.forward` or a layer inside "
        "the unit bypasses them and finds shards, which are DTensors.",
        tell="The traceback has no line of the unit's `__call__` above the failing layer.",
        fix="Call the unit. If you need an inner part by itself, make it a unit; for a method such as `generate`, use "
        "`register_fsdp_forward_method(model, 'generate')`.",
        broken=call_part_of_a_unit,
        fixed=call_the_unit,
        right=features_alone,
        says="got mixed torch.Tensor and DTensor",
    ),
    Failure(
        name="crash-tied-weights",
        title="Parameter is shared with a parameter already managed by another FSDP group",
        why="The head of a language model often uses the embedding's weight. One tensor can't belong to two units. FSDP1 fails later, with a shape that doesn't fit; FSDP2 of PyTorch 2.11 raises no error.",
        tell="`model.head.weight is model.embedding.weight` is true before sharding.",
        fix="Put both into one unit: `fully_shard([model.embedding, model.head])`, or leave both to the root.",
        broken=tied_in_two_units,
        fixed=tied_in_one_unit,
        right=tied_alone,
        says="shared",
        not_in="2.11",
    ),
    Failure(
        name="crash-frozen-flat",
        title="Must flatten tensors with uniform requires_grad",
        why="FSDP1 flattens all parameters of a unit into one, which either needs gradients or doesn't. A frozen layer and a trained one can't share a flat parameter.",
        tell="The error comes while the model is wrapped, before the first step. FSDP2 has no such limit.",
        fix="Pass `use_orig_params=True`, give frozen layers their own units, or move to FSDP2.",
        broken=freeze_in_a_flat_unit,
        fixed=freeze_with_original_parameters,
        right=outputs_alone,
        says="uniform `requires_grad`",
    ),
    Failure(
        name="crash-encoder-fast-path",
        title="Training works, evaluation fails inside nn.TransformerEncoderLayer",
        why="In evaluation, PyTorch's encoder layer takes a fast path, which reads the weights of its inner layers instead of "
        "calling them. If those are FSDP1 units, their weights are empty or flat at that moment.",
        tell="Only `eval()` with `no_grad` fails, and the traceback ends in the encoder layer, not in a Linear.",
        fix="Make the whole encoder layer the unit.",
        broken=units_inside_the_encoder_layer,
        fixed=the_encoder_layer_as_unit,
        right=encoder_alone,
        says="setStorage|2d|shape|size",
        tolerance=1e-4,  # the fast path adds up in a different order
    ),
)
