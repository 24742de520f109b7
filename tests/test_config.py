import pickle
from dataclasses import FrozenInstanceError

import pytest

from fsdp_helpers.config import LOSS_SETTINGS, TrainConfig


def test_defaults_are_valid_and_frozen():
    config = TrainConfig()
    with pytest.raises(FrozenInstanceError):
        config.epochs = 2
    assert pickle.loads(pickle.dumps(config)) == config  # it crosses a process boundary


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"model": "huge"}, "unknown model 'huge'; choose one of shallow"),
        ({"strategy": "zero9"}, "unknown strategy 'zero9'; choose one of local, ddp"),
        ({"epochs": 0}, "epochs is 0; it must be a whole number, 1 or more"),
        ({"epochs": True}, "epochs is True"),
        ({"epochs": None}, "epochs is None"),
        ({"max_steps": 0}, "max_steps is 0"),
        ({"global_batch_size": -1}, "global_batch_size is -1"),
        ({"train_images": 0}, "train_images is 0"),
        ({"test_images": -5}, "test_images is -5"),
        ({"learning_rate": float("inf")}, "learning_rate is inf"),
        ({"seed": -1}, "seed is -1"),
        ({"seed": 2**63}, "seed is 9223372036854775808"),
        ({"api": "fsdp3"}, "unknown api 'fsdp3'; choose one of fsdp1, fsdp2"),
        ({"strategy": "fsdp", "sharding": "some"}, "unknown sharding 'some'"),
        ({"strategy": "fsdp", "backward_prefetch": "later"}, "unknown backward_prefetch 'later'"),
        ({"min_num_params": -1}, "min_num_params is -1; it must be 0 or more"),
        ({"strategy": "ddp", "sharding": "grad-op"}, "are FSDP settings, but strategy is 'ddp'"),
        (
            {"strategy": "fsdp", "bucket_view": True},
            "is a DDP setting, but strategy is 'fsdp'; use 'ddp', or leave it out",
        ),
        (
            {"strategy": "ddp", "reshard_after_forward": False},
            "reshard_after_forward is an FSDP2 setting, but strategy is 'ddp'; leave it out",
        ),
        (
            {"strategy": "fsdp", "api": "fsdp1", "reshard_after_forward": False},
            "reshard_after_forward is an FSDP2 setting; in FSDP1, sharding 'grad-op' keeps parameters",
        ),
        ({"strategy": "fsdp", "sharding": "none"}, "sharding 'none' exists only in FSDP1"),
        ({"strategy": "fsdp", "backward_prefetch": "post"}, "'post' is an FSDP1 option; use api 'fsdp1'"),
        ({"checkpoint_dir": "runs", "checkpoint_every": 0}, "checkpoint_every is 0; it must be a whole number, 1 or"),
        ({"checkpoint_dir": "runs", "keep_last": 0}, "keep_last is 0"),
        ({"checkpoint_dir": ""}, "checkpoint_dir is empty, perhaps because a shell variable isn't set"),
        ({"resume": True}, "resume needs checkpoint_dir, the folder of the run's checkpoints"),
        ({"checkpoint_every": 5}, "checkpoint_every needs checkpoint_dir"),
        ({"keep_last": 2}, "keep_last needs checkpoint_dir"),
        ({"strategy": "fsdp", "precision": "fp8"}, "unknown precision 'fp8'; choose one of fp32, bf16"),
        ({"strategy": "ddp", "precision": "bf16"}, "strategy is 'ddp'; use strategy 'fsdp' or 'fsdp-auto-wrap'"),
        ({"activation_checkpointing": "some"}, "'some'; choose one of none, units, selective"),
        ({"micro_batches": 0}, "micro_batches is 0; it must be a whole number, 1 or more"),
        ({"sync_micro_batches": True}, "micro_batches is 1; use 2 or more"),
        (
            {"strategy": "fsdp-offload", "api": "fsdp1", "micro_batches": 2, "sync_micro_batches": True},
            "leave out sync_micro_batches, or use api 'fsdp2'",
        ),
    ],
)
def test_refused_with_the_number_in_the_message(settings, message):
    with pytest.raises(ValueError, match=message):
        TrainConfig(**settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"strategy": "fsdp-offload", "micro_batches": 2, "sync_micro_batches": True},
        {"strategy": "fsdp-auto-wrap", "api": "fsdp1", "micro_batches": 2, "sync_micro_batches": True},
        {"strategy": "fsdp-offload", "precision": "bf16"},
        {"strategy": "fsdp", "api": "fsdp1", "sharding": "none", "backward_prefetch": "post"},
        {"strategy": "fsdp", "sharding": "grad-op", "reshard_after_forward": False, "micro_batches": 2},
        {"strategy": "ddp", "bucket_view": True, "activation_checkpointing": "selective"},
        {"strategy": "fsdp-auto-wrap", "min_num_params": 0, "seed": 2**63 - 1, "learning_rate": 1e-9},
    ],
    ids=str,
)
def test_what_can_be_combined_is_not_refused(settings):
    TrainConfig(**settings)


@pytest.mark.parametrize(
    "settings, every_part",
    [
        ({"strategy": "local"}, False),
        ({"strategy": "ddp"}, False),
        ({"strategy": "ddp", "sync_micro_batches": True}, True),
        ({"strategy": "fsdp"}, True),
        ({"strategy": "fsdp-auto-wrap", "api": "fsdp1", "sharding": "grad-op"}, True),
        ({"strategy": "fsdp-auto-wrap", "sync_micro_batches": False}, False),
        ({"strategy": "fsdp", "api": "fsdp1", "sharding": "none"}, False),
        ({"strategy": "fsdp-offload", "api": "fsdp1"}, False),
        ({"strategy": "fsdp-offload"}, True),
    ],
    ids=str,
)
def test_only_full_gradients_that_would_have_to_wait_are_reduced_after_every_part(settings, every_part):
    assert TrainConfig(micro_batches=2, **settings).reduces_every_part is every_part


def test_a_run_with_checkpoints():
    config = TrainConfig(checkpoint_dir="runs", checkpoint_every=5, keep_last=1, resume=True)
    assert pickle.loads(pickle.dumps(config)) == config
    TrainConfig(checkpoint_dir="runs")  # after the last step only, and all of them kept
    assert (TrainConfig().checkpoint_dir, TrainConfig().resume) == (None, False)  # nobody saves unasked


def test_micro_batches_must_divide_a_ranks_images():
    config = TrainConfig(strategy="ddp", global_batch_size=24, micro_batches=4)
    config.check_world_size(2)
    # 24 / 4 = 6 images a rank; in 4 parts 2 are left over
    with pytest.raises(
        ValueError, match="a rank's 6 images .* micro_batches 4: 2 would be left over; use a divisor of 6"
    ):
        config.check_world_size(4)


@pytest.mark.parametrize(
    "settings, world_size, advice",
    [
        ({"global_batch_size": 256}, 3, ["258", "255"]),
        ({"global_batch_size": 256}, 300, ["300"]),  # no multiple above zero is smaller
        ({"global_batch_size": 256, "micro_batches": 4}, 3, ["264", "252"]),  # 12 x 22 and 12 x 21
        ({"global_batch_size": 256, "train_images": 256}, 3, ["255"]),
        ({"global_batch_size": 256, "train_images": 258}, 3, ["258", "255"]),
        ({"global_batch_size": 1_000, "train_images": 500}, 3, ["498"]),
        ({"global_batch_size": 1_436}, 3, ["1437", "1434"]),
        ({"global_batch_size": 1_437}, 2, ["1436"]),  # the bundled digits are 1,437
        ({"global_batch_size": 2, "train_images": 2}, 3, []),
    ],
)
def test_what_is_advised_is_not_refused_next(settings, world_size, advice):
    with pytest.raises(ValueError) as refused:
        TrainConfig(strategy="ddp", **settings).check_world_size(world_size)
    end = str(refused.value).partition("; use ")[2]
    assert end == (" or ".join(advice) or "fewer ranks")
    for size in advice:
        config = TrainConfig(strategy="ddp", **settings | {"global_batch_size": int(size)})
        config.check_world_size(world_size)
        config.check_data_size("digits", 1_437, 360)


def test_data_must_fill_one_batch():
    config = TrainConfig(global_batch_size=256, train_images=300)
    config.check_data_size("mnist", 60_000, 10_000)  # 300 of them
    with pytest.raises(ValueError, match="255 training images don't fill one global batch of 256"):
        config = TrainConfig(global_batch_size=256)
        config.check_data_size("mine", 255, 10)
    with pytest.raises(ValueError, match="100 training images"):
        TrainConfig(global_batch_size=256, train_images=100).check_data_size("mnist", 60_000, 10_000)


def test_what_changes_the_losses():
    """A resumed run must agree on these, and not on how or how long it trains."""
    optimization = {"global_batch_size", "learning_rate", "micro_batches", "precision"}
    assert set(LOSS_SETTINGS) >= {"model", "seed", "train_images", "dropout"} | optimization
    assert not set(LOSS_SETTINGS) & {
        "strategy",
        "api",
        "sharding",
        "epochs",
        "max_steps",
        "checkpoint_dir",
        "keep_last",
    }
    assert TrainConfig(**LOSS_SETTINGS) == TrainConfig()  # each with its default
