"""The same worker under torchrun, with one agent and with two; and what happens when something in it dies."""

import os
import re
import signal
import socket

import pytest
import torch.distributed as dist
from faked_hosts import CHOICES
from runs import main_in_process
from torch.distributed import HashStore
from torchrun_jobs import (
    FRESH_STORE,
    SMALL,
    agents,
    one_agent,
    read_losses,
    torchrun_job,
    wait_for_new_ranks,
    wait_for_output,
    wait_for_step,
)

from fsdp_helpers.checkpointing.folder import find_steps
from fsdp_helpers.config import TrainConfig
from fsdp_helpers.gpus import Gpus
from fsdp_helpers.teaching.lessons.torchruns import free_port
from fsdp_helpers.training import run as rank_run
from fsdp_helpers.training import torchrun as torchrun_environment
from fsdp_helpers.training.run import train

SETTINGS = {
    "model": "simple",
    "strategy": "fsdp-auto-wrap",
    "train_images": 1_200,
    "test_images": 101,
    "global_batch_size": 24,
}
SHARDED = [*SMALL, "--strategy", "fsdp-auto-wrap"]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """Losses of `num_steps` steps on two ranks that nothing happens to."""
    config = TrainConfig(**SETTINGS, epochs=100, data_dir=str(tmp_path_factory.mktemp("no-mnist")))
    losses = []

    def run(num_steps: int) -> list[float]:
        if len(losses) < num_steps:
            losses[:] = train(config, world_size=2, device="cpu", max_steps=max(num_steps, 60)).step_losses
        return losses[:num_steps]

    return run


# ---------------------------------------------------------------- asked to end, killed, stopped


def test_after_a_kill_all_ranks_restart_and_sigterm_ends_in_a_checkpoint(undisturbed, tmp_path):
    """The restart goes on from the newest checkpoint, and so does the next job."""
    run = tmp_path / "run"
    arguments = [*SHARDED, "--epochs", 100, "--checkpoint-dir", run, "--checkpoint-every", 2, "--resume"]
    with torchrun_job(one_agent(2, "--max-restarts", "1"), arguments, tmp_path, **FRESH_STORE) as job:
        wait_for_step(run, 4, job)
        first_saved_ns = (run / "step-00000002").stat().st_mtime_ns
        killed = job.workers()
        os.kill(killed[1], signal.SIGKILL)
        wait_for_new_ranks(set(killed.values()), job)
        wait_for_step(run, find_steps(run)[-1] + 2, job)
        job.process.send_signal(signal.SIGTERM)
        job.wait()
        step = find_steps(run)[-1]
        assert job.output.count(f"ended early by SIGTERM: saved after step {step} of 5000 in ") == 1
    assert (run / "step-00000002").stat().st_mtime_ns == first_saved_ns  # the restart did not begin anew
    resumed = [*arguments, "--max-steps", step + 3, "--world-size", 2, "--json", tmp_path / "next.json"]
    assert main_in_process("train", "--device", "cpu", "--data-dir", tmp_path / "no-mnist", *resumed) == 0
    assert read_losses(tmp_path / "next.json") == (step, undisturbed(step + 3)[step:])


# ---------------------------------------------------------------- a machine is lost

SOON = "keep_alive_interval=1,keep_alive_max_attempt=5,last_call_timeout=2,is_host="
# Steps of a larger model, which learns slowly: it is not done, and has not converged, before a machine comes back.
SLOWLY = ["--model", "shallow", "--no-dropout", "--strategy", "fsdp-auto-wrap", "--learning-rate", "1e-5"]
SLOWLY += ["--train-images", "1200", "--test-images", "101", "--global-batch-size", "24", "--epochs", "100"]
AT_ONCE = {**FRESH_STORE, "PYTHONUNBUFFERED": "1"}  # what is printed is there to be read


@pytest.mark.long
def test_a_machine_that_comes_back_joins(tmp_path):
    """Two ranks, one, and two again; the losses are those of two ranks all along, up to the order of additions."""
    saving = ["--checkpoint-dir", tmp_path / "run", "--checkpoint-every", 5, "--keep-last", 3, "--resume"]
    arguments = [*SLOWLY, *saving]
    options = agents("1:2", free_port(), "--max-restarts", "3", "--rdzv-conf")
    first, other = [*options, SOON + "1"], [*options, SOON + "0"]
    with torchrun_job(first, arguments, tmp_path, name="stays", **AT_ONCE) as stays:
        with torchrun_job(other, arguments, tmp_path, name="lost", **AT_ONCE) as lost:
            wait_for_step(tmp_path / "run", 5, stays)
            lost.end_machine()
        (alone,) = wait_for_output(r" 1 rank on cpu: (\d+) of 5000", stays)
        with torchrun_job(other, arguments, tmp_path, name="back", **AT_ONCE) as back:
            joined = r"(?s)saved after step (\d+) .* 2 ranks on cpu: (\d+) of 5000"  # said by rank 0, on either machine
            saved_at, together = wait_for_output(joined, stays, back)
            stays.process.send_signal(signal.SIGTERM)
            stays.wait(), back.wait()
            saved = (stays.output + back.output).count("ended early by SIGTERM: saved after step")
            assert saved == 2  # by the one rank for the machine that came back, and by two at the end
    assert 5 <= int(alone) <= int(saved_at) < int(together) < 5000
    last = find_steps(tmp_path / "run")[-1]
    followed = [*SLOWLY, "--max-steps", last + 5, "--world-size", 2, "--device", "cpu", "--data-dir", tmp_path / "none"]
    for name, more in (("resumed", saving), ("undisturbed", [])):
        assert main_in_process("train", *followed, *more, "--json", tmp_path / f"{name}.json") == 0
    first_step, losses = read_losses(tmp_path / "resumed.json")
    assert first_step == last and len(losses) == 5
    assert losses == pytest.approx(read_losses(tmp_path / "undisturbed.json")[1][last:], abs=1e-3)


# ---------------------------------------------------------------- hosts and their GPUs


@pytest.mark.parametrize("wanted, hosts, found", [choice for choice in CHOICES if choice[0] != "cpu"])
def test_several_hosts_agree_on_a_device(wanted, hosts, found, monkeypatch):
    """test_devices_of_hosts.py has two hosts that do so."""
    place = torchrun_environment.TorchrunRank(rank=0, world_size=1, local_rank=0, local_world_size=2)
    monkeypatch.setattr(rank_run, "find_gpus", lambda wanted: Gpus(2))
    monkeypatch.setattr(rank_run, "gather_over_ranks", lambda own: hosts)
    if found in ("cpu", "cuda:1"):
        assert rank_run._agree_on_device(wanted, place, HashStore()) == found.removesuffix(":1")
    else:
        with pytest.raises(ValueError, match=re.escape(found.replace("GPUs:", "usable GPUs:"))):
            rank_run._agree_on_device(wanted, place, HashStore())
    assert not dist.is_initialized()


def test_a_host_counts_only_gpus_that_torch_can_use(monkeypatch):
    place, told = torchrun_environment.TorchrunRank(rank=0, world_size=1, local_rank=0, local_world_size=2), []
    monkeypatch.setattr(rank_run, "find_gpus", lambda wanted: Gpus(wanted, "the driver is too old"))
    monkeypatch.setattr(rank_run, "gather_over_ranks", lambda own: told.append(own) or [own])
    assert rank_run._agree_on_device("auto", place, HashStore()) == "cpu"
    assert told == [(socket.gethostname(), 0, 2)]


# ---------------------------------------------------------------- an environment that cannot be

WHOLE = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"} | {
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "1",
}
DDP = ["--strategy", "ddp"]


@pytest.mark.parametrize(
    "variables, arguments, message",
    [
        ({"RANK": "0"}, DDP, "the environment has RANK without WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR"),
        ({"WORLD_SIZE": "2"}, DDP, "the environment has WORLD_SIZE without RANK, .* or unset WORLD_SIZE"),
        (WHOLE | {"RANK": "one"}, DDP, "RANK='one'; it must be a whole number"),
        (WHOLE | {"WORLD_SIZE": "0"}, DDP, "RANK is 0 and WORLD_SIZE is 0; ranks start at 0"),
        (WHOLE | {"LOCAL_RANK": "2"}, DDP, "LOCAL_RANK is 2 and LOCAL_WORLD_SIZE is 2"),
        (WHOLE | {"LOCAL_WORLD_SIZE": "3"}, DDP, "LOCAL_WORLD_SIZE is 3, above the WORLD_SIZE of 2"),
        (WHOLE | {"WORLD_SIZE": "3"}, DDP, "global_batch_size 256 isn't divisible by world_size 3"),
        (WHOLE, [*DDP, "--world-size", 4], "--world-size is 4, but torchrun started 2 ranks; leave it out"),
        (WHOLE, [], "strategy 'local' trains in one process, but world_size is 2"),
        (WHOLE, [*DDP, "--timeout", "0"], "timeout is 0.0; it must be a number of seconds above 0"),
        (
            WHOLE | {"TORCHELASTIC_MAX_RESTARTS": "3", "TORCHELASTIC_USE_AGENT_STORE": "True"},
            DDP,
            "--max-restarts 3 needs a fresh store .* TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1",
        ),
    ],
)
def test_a_bad_environment_is_one_line_on_one_rank(variables, arguments, message, digits_dir, monkeypatch, capfd):
    monkeypatch.setattr(torchrun_environment, "LEAVE_S", 0.0)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    command = ["train", "--device", "cpu", "--data-dir", digits_dir, *arguments]
    assert main_in_process(*command) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert re.search(message, line), line
    if variables.get("RANK") == variables.get("LOCAL_RANK") == "0":
        monkeypatch.setenv("RANK", "1")
        assert main_in_process(*command) == 2
        assert len(capfd.readouterr().err.splitlines()) == 1, "one line from the other machine's first rank"
        monkeypatch.setenv("LOCAL_RANK", "1")
        assert main_in_process(*command) == 2
        assert capfd.readouterr().err == ""
