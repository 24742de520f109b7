"""Do all strategies train alike on GPUs: as DDP, in bf16, from the host, resumed, compiled, in two dimensions?"""

import importlib.util
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace

from fsdp_helpers.cli.doctor.gpu_workers import train_each, where_shards_live
from fsdp_helpers.cli.doctor.rows import Outcome, Unfit
from fsdp_helpers.config import TrainConfig
from fsdp_helpers.quantities import format_bytes
from fsdp_helpers.ranks.launching.launch import launch
from fsdp_helpers.records import RunRecord, largest_difference
from fsdp_helpers.teaching.lessons import real_model

STEPS = 8
SAME, SAME_AFTER_RESUMING, SAME_COMPILED, SAME_IN_BF16 = 1e-5, 1e-4, 1e-4, 0.05


def settings(**changes: object) -> TrainConfig:
    small = {"global_batch_size": 32, "max_steps": STEPS, "test_images": 64, "dropout": False}
    return TrainConfig(**small | {"strategy": "fsdp-auto-wrap"} | changes)


def ranks_of(num_gpus: int) -> int:
    """Return the largest number of ranks, one per GPU, that divides the batch and makes pairs: 1, 2, 4 or 8."""
    return max(ranks for ranks in (1, 2, 4, 8) if ranks <= num_gpus)


def runs(configs: Sequence[TrainConfig], num_gpus: int) -> list[RunRecord]:
    """Return the records of `configs`, all trained by the same ranks."""
    return launch(train_each, configs, world_size=ranks_of(num_gpus), device="cuda", progress=False)[0]


def against_ddp(strategy: str, api: str, **changes: object) -> Callable[[int], Outcome]:
    """Return a check that trains under DDP, then twice under a strategy."""

    def check(num_gpus: int) -> Outcome:
        config = settings(strategy=strategy, api=api, **changes)
        ranks = num_gpus if config.is_sharded else 1  # "local" is one process
        ddp, *both = (run.step_losses for run in runs([settings(strategy="ddp"), config, config], ranks))
        apart, again = max(largest_difference(run, ddp) for run in both), largest_difference(*both)
        measured = f"at most {apart:.1e} from DDP; a second run {f'{again:.1e} off' if again else 'is the same'}"
        return Outcome(apart <= SAME, measured, {"apart": apart, "again": again})

    return check


def bf16(api: str, num_gpus: int) -> Outcome:
    configs = [settings(api=api, precision=precision) for precision in ("fp32", "bf16")]
    full, half = (run.step_losses for run in runs(configs, num_gpus))
    apart = max(abs(a / b - 1) for a, b in zip(half, full, strict=True))
    return Outcome(0 < apart <= SAME_IN_BF16, f"losses at most {apart:.1%} from fp32's", {"relative": apart})


def offload(api: str, num_gpus: int) -> Outcome:
    """Check that the state lies on the host, in pinned memory, and that the GPU holds that much less."""
    config = settings(strategy="fsdp-offload", api=api)
    kept, moved = (run.ranks[0] for run in runs([settings(api=api), config], num_gpus))
    devices, pinned = launch(where_shards_live, config, world_size=ranks_of(num_gpus), device="cuda", progress=False)[0]
    state = kept.parameter_bytes + kept.gradient_bytes + kept.optimizer_bytes
    less = kept.held_bytes - moved.held_bytes
    where = f"shards on {' and '.join(devices)}, {'pinned' if pinned else 'not pinned'}"
    measured = f"{where}; the GPU holds {format_bytes(less)} less, the state is {format_bytes(state)}"
    values = {"held_bytes": kept.held_bytes, "held_offloaded_bytes": moved.held_bytes, "state_bytes": state}
    return Outcome(devices == ["cpu"] and pinned and 0.9 * state <= less <= 1.25 * state, measured, values)


def resume(api: str, num_gpus: int) -> Outcome:
    """Compare five steps, a save and five more with ten; dropout draws from the GPU's own random numbers."""
    config = settings(api=api, dropout=True, max_steps=10)
    with tempfile.TemporaryDirectory() as folder:
        first = replace(config, max_steps=5, checkpoint_dir=folder)
        second = replace(config, checkpoint_dir=folder, resume=True)
        whole, *parts = runs([config, first, second], num_gpus)
    apart = largest_difference([loss for part in parts for loss in part.step_losses], whole.step_losses)
    measured = f"at most {apart:.1e} apart, going on at step {parts[1].first_step}"
    return Outcome(parts[1].first_step == 5 and apart <= SAME_AFTER_RESUMING, measured, {"apart": apart})


def compiled_block(num_gpus: int) -> Outcome:
    if importlib.util.find_spec("triton") is None:
        raise Unfit("torch.compile needs triton on a GPU, and it is not installed")
    config = settings(model="vit-mnist", max_steps=2)
    where = {"world_size": ranks_of(num_gpus), "device": "cuda", "progress": False}
    plain, compiled = (
        launch(real_model.losses_compiled, config, backend, **where)[0] for backend in (None, "inductor")
    )
    apart = largest_difference(plain, compiled)
    return Outcome(apart <= SAME_COMPILED, f"at most {apart:.1e} apart", {"apart": apart})


def two_dimensions(num_gpus: int) -> Outcome:
    """Compare tensor parallelism within pairs and FSDP across them with one process."""
    config = settings(model="vit-mnist", max_steps=4)
    ranks = launch(real_model.train_in_two_dimensions, config, world_size=4, device="cuda", progress=False)
    alone = launch(real_model.losses_unsharded, config, world_size=1, device="cuda", progress=False)
    apart = largest_difference(ranks[0][0], alone[0])
    return Outcome(apart <= SAME_COMPILED, f"at most {apart:.1e} from one process", {"apart": apart})
