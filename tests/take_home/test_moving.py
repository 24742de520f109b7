"""from_ddp.py and checkpoint.py with what makes a move hard: the losses stay those of the job that was moved."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from take_home_workers import load_script
from torch import Tensor, nn
from torch.distributed import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim import AdamW
from torch.optim.lr_scheduler import LambdaLR

MOVED_AT, SAVED_AT, LATE, LAST_STEP = 2, 3, 4, 7  # steps; when it's saved, `late` has no moments yet


class AwkwardModel(nn.Module):
    """A frozen layer, tied ends, a scalar (of shape (1,) under FSDP2), and a layer that no loss reaches at first."""

    def __init__(self, scale_shape: tuple[int, ...] = (1,)) -> None:
        super().__init__()
        self.embed, self.frozen = nn.Embedding(20, 12), nn.Linear(12, 12).requires_grad_(False)
        self.scale, self.late = nn.Parameter(torch.ones(scale_shape)), nn.Linear(12, 20)
        self.decode = nn.Linear(12, 20, bias=False)
        self.decode.weight = self.embed.weight

    def forward(self, words: Tensor, step: int) -> Tensor:
        hidden = torch.tanh(self.frozen(self.embed(words))) * self.scale
        loss = F.cross_entropy(self.decode(hidden), (7 * words + 1) % 20)
        return loss + F.cross_entropy(self.late(hidden), words) if step >= LATE else loss


def make_optimizer(model: nn.Module) -> AdamW:
    groups = [{"params": [], "weight_decay": 0.1}, {"params": [], "weight_decay": 0.0}]
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups[name.endswith(("bias", "scale"))]["params"].append(parameter)
    return AdamW(groups, lr=1e-2)


def make_schedule(optimizer: AdamW) -> LambdaLR:
    return LambdaLR(optimizer, lambda step: 0.9**step)


def take_steps(model: nn.Module, optimizer: AdamW, schedule: LambdaLR, first: int, end: int) -> list[float]:
    losses = []
    for step in range(first, end):
        optimizer.zero_grad()
        loss = model(torch.randint(20, (24,), generator=torch.Generator().manual_seed(step)), step)
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return losses


def sharded(seed: int) -> tuple[nn.Module, AdamW, LambdaLR]:
    torch.manual_seed(seed)
    model, mesh = AwkwardModel(), init_device_mesh("cpu", (1,))
    for unit in (model.frozen, model.late, model):
        fully_shard(unit, mesh=mesh)
    optimizer = make_optimizer(model)
    return model, optimizer, make_schedule(optimizer)


def test_a_job_moves_is_saved_and_goes_on_as_it_was(tmp_path):
    """On one rank; on several, test_take_home.py has an ordinary model, and 14's tests its own."""
    torch.manual_seed(0)
    stayed = AwkwardModel(scale_shape=())
    optimizer = make_optimizer(stayed)
    schedule = make_schedule(optimizer)
    take_steps(stayed, optimizer, schedule, 0, MOVED_AT)
    state = {"model": {f"module.{name}": tensor for name, tensor in stayed.state_dict().items()}, "step": MOVED_AT}
    torch.save(state | {"optimizer": optimizer.state_dict(), "schedule": schedule.state_dict()}, tmp_path / "ddp.pt")
    right = take_steps(stayed, optimizer, schedule, MOVED_AT, LAST_STEP)

    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    moving, saving, moved, again = load_script("from_ddp.py"), load_script("checkpoint.py"), sharded(1), sharded(2)
    moving.build_model, moving.make_optimizer = AwkwardModel, make_optimizer
    assert moving.load_ddp_checkpoint(str(tmp_path / "ddp.pt"), *moved) == MOVED_AT
    found = take_steps(*moved, MOVED_AT, SAVED_AT)
    saving.save_checkpoint(tmp_path, saving.state_to_keep(*moved, SAVED_AT))
    assert saving.load_newest(tmp_path, *again) == SAVED_AT
    for run in (moved, again):
        assert found + take_steps(*run, SAVED_AT, LAST_STEP) == pytest.approx(right, abs=1e-6)
