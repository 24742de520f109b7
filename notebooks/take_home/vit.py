"""A vision transformer, one unit per block: `torchrun --nproc-per-node 2 vit.py`, on GPUs or, where there are
too few, the CPU. `vit.py FILE` begins with what `torch.save(model.state_dict(), FILE)` saved."""

import os
import sys

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.fsdp import fully_shard

SIZE, PATCH, WIDTH, DEPTH, CLASSES, STEPS, BATCH = 28, 4, 64, 4, 10, 6, 24  # BATCH images, over all ranks


class ViT(nn.Module):  # (B, 1, SIZE, SIZE) -> (B, CLASSES)
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, WIDTH, kernel_size=PATCH, stride=PATCH)
        self.positions = nn.Parameter(0.02 * torch.randn(1, (SIZE // PATCH) ** 2, WIDTH))
        sizes, kind = (WIDTH, 4, 4 * WIDTH, 0.0, "gelu"), {"batch_first": True, "norm_first": True}
        self.blocks = nn.Sequential(*[nn.TransformerEncoderLayer(*sizes, **kind) for _ in range(DEPTH)])
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES))

    def forward(self, images: Tensor) -> Tensor:
        tokens = self.patches(images).flatten(2).transpose(1, 2) + self.positions  # (B, tokens, WIDTH)
        return self.head(self.blocks(tokens).mean(dim=1))


def load_batch(step: int) -> tuple[Tensor, Tensor]:  # of all ranks together; put your own data here
    labels = torch.arange(BATCH) % CLASSES
    noise = torch.randn(BATCH, 1, SIZE, SIZE, generator=torch.Generator().manual_seed(step))
    return noise + labels.view(-1, 1, 1, 1) / CLASSES, labels


def first_values(file: str | None) -> dict[str, Tensor]:  # on rank 0, in host memory
    torch.manual_seed(0)
    return torch.load(file, mmap=True, weights_only=True) if file else ViT().state_dict()


def main(file: str | None = None) -> None:
    on_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])  # one per rank; else the CPU
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpus else "gloo")
    rank, mesh = dist.get_rank(), dist.init_device_mesh(device.type, (dist.get_world_size(),))
    with torch.device("meta"):
        model = ViT()  # shapes without bytes
    for unit in (*model.blocks, model):
        fully_shard(unit, mesh=mesh)  # slices of shapes
    model.to_empty(device=device)  # room for this rank's slices; buffers of your own need their values here
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)  # tensor by tensor
    set_model_state_dict(model, first_values(file) if rank == 0 else {}, options=options)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)  # after sharding: it needs the slices
    for step in range(STEPS):
        images, labels = (part.chunk(mesh.size())[rank].to(device) for part in load_batch(step))
        loss = nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        dist.all_reduce(mean_loss := loss.detach() / mesh.size())
        if rank == 0:
            print(f"step {step}  loss {mean_loss.item():.7f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
    os._exit(0)  # without Python's clean-up and flush, in which a late thread of gloo can abort the process
