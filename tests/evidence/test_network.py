"""Two machines with a cable between them: the same losses, and steps as long as the planner's bytes need."""

import network
import pytest
from needs import need
from network import SLOW, SLOW_LINK, measure_rate, measure_sharding
from torchrun_jobs import SMALL

from fsdp_helpers.config import TrainConfig
from fsdp_helpers.training.run import train

NETWORK_DOMINATES = 4  # times as long as a step on an unlimited cable: all the rest then adds less than TOLERANCE
TOLERANCE = 0.25


@pytest.fixture(scope="module")
def machines(tmp_path_factory):
    need(network.missing())
    with network.two_machines(tmp_path_factory.mktemp("network")) as joined:
        yield joined


def test_two_machines_learn_what_two_ranks_of_launch_learn(machines, digits_dir):
    """Twenty steps, to the last bit: two hosts by name, with a core each."""
    machines.shape(None)
    record = machines.train([*SMALL, "--strategy", "fsdp-auto-wrap", "--max-steps", 20])
    settings = {"model": "simple", "train_images": 1_200, "test_images": 101, "global_batch_size": 24}
    config = TrainConfig(**settings, strategy="fsdp-auto-wrap", max_steps=20, data_dir=str(digits_dir))
    assert record["step_losses"] == list(train(config, world_size=2, device="cpu").step_losses)


def test_a_step_takes_as_long_as_its_bytes_need(machines):
    """Sent bytes over bandwidth, wherever that is most of a step."""
    unlimited, *limited = [measure_rate(machines, rate) for rate in (None, *SLOW)]
    dominated = [row for row in limited if row["predicted_s"] > NETWORK_DOMINATES * unlimited["shortest_s"]]
    assert dominated, f"the network dominates nowhere: {[unlimited, *limited]}"
    for row in dominated:
        assert abs(row["shortest_s"] / row["predicted_s"] - 1) < TOLERANCE, row


def test_hybrid_sharding_is_faster_across_a_slow_link(machines):
    full, hybrid = (measure_sharding(machines, sharding, SLOW_LINK) for sharding in ("full", "hybrid"))
    assert hybrid["step_s"] < full["step_s"]
    assert hybrid["cable_bytes_per_step"] < full["cable_bytes_per_step"]
