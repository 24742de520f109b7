"""The rank function `train_worker` and the command line, from end to end."""

import json
import os
import re
import socket
from pathlib import Path

import launch_workers as workers
import pytest
from runs import Runs, check_json, main_in_process

from fsdp_helpers.__main__ import build_parser, train_flags
from fsdp_helpers.cli.flags import flags
from fsdp_helpers.config import MODELS, STRATEGIES, TrainConfig, is_sharded
from fsdp_helpers.models.series import MODEL_CLASSES
from fsdp_helpers.ranks.launch import launch
from fsdp_helpers.sharding import strategies
from fsdp_helpers.teaching.figures.plots import STRATEGY_COLORS

SMALL = ["--train-images", 1300, "--test-images", 101, "--global-batch-size", 60, "--no-dropout"]


# ---------------------------------------------------------------- the record of a run

FEW = {"model": "shallow", "dropout": True, "max_steps": 3, "global_batch_size": 8, "test_images": 9}
# 100 images in batches of 32: 3 steps an epoch, 4 images left out.
EPOCHS = {"model": "simple", "train_images": 100, "global_batch_size": 32, "test_images": 50}
ODD = {"model": "simple", "max_steps": 1, "global_batch_size": 6}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Runs on the digits; every rank returns the same record, or this fails."""
    runs = Runs(data_dir=str(tmp_path_factory.mktemp("no-mnist")))
    return lambda strategy, world_size, **settings: runs(strategy, world_size=world_size, **settings)


def test_ddp_and_one_process_agree_step_by_step(run):
    local, ddp = run("local", 1, **FEW | {"dropout": False}), run("ddp", 2, **FEW | {"dropout": False})
    assert len(local.step_losses) == 3
    assert ddp.step_losses == pytest.approx(local.step_losses, abs=1e-5)
    assert ddp.epochs[0].test_loss == pytest.approx(local.epochs[0].test_loss, abs=1e-5)
    assert [rank.rank for rank in ddp.ranks] == [0, 1]
    assert ddp.step_losses != run("ddp", 2, **FEW).step_losses  # whose masks are drawn


@pytest.mark.parametrize("strategy, world_size", [("local", 1), ("ddp", 2)])
def test_the_state_of_a_rank(strategy, world_size, run):
    for rank in run(strategy, world_size, **FEW).ranks:
        # 1,199,882 x 4 = 4,799,528; twice that for Adam's two moments. DDP divides nothing.
        state = (rank.parameter_bytes, rank.gradient_bytes, rank.optimizer_bytes)
        assert state == (4_799_528, 4_799_528, 9_599_056)
        assert rank.num_units == 0


def test_seed_decides_and_the_first_step_is_not_a_steady_one(run):
    other = run("local", 1, **FEW | {"seed": 1, "max_steps": 1})
    assert other.step_losses[0] != run("local", 1, **FEW).step_losses[0]
    assert (other.ranks[0].held_bytes, other.ranks[0].peak_bytes, other.ranks[0].collectives) == (None, None, ())
    assert other.traces == ()


def test_epochs_and_an_early_end(run):
    """7 steps: two epochs and 1 step more."""
    record = run("local", 1, **EPOCHS | {"epochs": 5, "max_steps": 7})
    assert [epoch.train_images for epoch in record.epochs] == [96, 96, 32]
    assert [epoch.test_images for epoch in record.epochs] == [50, 50, 50]
    assert len(record.step_losses) == len(record.step_seconds) == 7
    # The mean loss of an epoch is the mean of its steps; the last epoch has one.
    assert record.epochs[0].train_loss == pytest.approx(sum(record.step_losses[:3]) / 3)
    assert record.epochs[2].train_loss == pytest.approx(record.step_losses[6])
    assert all(epoch.test_accuracy == epoch.test_correct / 50 for epoch in record.epochs)
    longer = run("local", 1, **EPOCHS | {"epochs": 2})
    assert longer.step_losses == record.step_losses[:6]  # the same seed, the same run


def test_odd_numbers_of_test_images(run):
    assert run("ddp", 3, **ODD | {"test_images": 7}).epochs[0].test_images == 7


def read_json(path: Path) -> dict:
    content = json.loads(path.read_text())
    check_json(content)
    return content


# ---------------------------------------------------------------- the command line


def test_the_command_line_in_full(run_cli, mnist_dir, tmp_path):
    done = run_cli("train", "--max-steps", 3, *SMALL, "--data-dir", mnist_dir, "--json", tmp_path / "run.json")
    assert done.returncode == 0, done.stderr
    content = read_json(tmp_path / "run.json")
    assert (content["data_source"], content["world_size"]) == ("mnist", 1)
    assert len(content["step_losses"]) == 3
    assert "Data: MNIST, 60,000 training and 10,000 test images." in done.stdout + done.stderr
    assert "101" in done.stdout and "\r" not in done.stdout + done.stderr
    assert os.listdir(tmp_path / "cwd") == []  # it wrote where it was told to, nowhere else
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cwd", "run.json"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "command"),
        (["tarin"], "choose from"),
        (["train", "--no-such-flag"], "--no-such-flag"),
        (["train", "--model", "huge"], "huge"),
        (["train", "--epochs", "0"], "epochs is 0; it must be a whole number, 1 or more"),
        (["train", "--epochs", "1.5"], "1.5"),
        (["train", "--train-images", "100"], "100 training images don't fill one global batch of 256"),
        (["train", "--train-images", "70000"], "train_images is 70000, but mnist has 60000"),
        (["train", "--test-images", "10001"], "test_images is 10001, but mnist has 10000"),
        (["train", "--strategy", "ddp", "--world-size", "0"], "world_size is 0"),
        (["train", "--strategy", "ddp", "--world-size", "3"], "256 isn't divisible by world_size 3"),
        (["train", "--strategy", "local", "--world-size", "2"], "one process, but world_size is 2"),
        (["train", "--strategy", "ddp", "--world-size", "64", "--device", "cuda"], "64 CUDA devices"),
        (["train", "--strategy", "fsdp-offload", "--api", "fsdp1", "--device", "cpu"], "Use api 'fsdp2'"),
        (["train", "--strategy", "fsdp", "--sharding", "hybrid"], "at least two ranks, but world_size is 2"),
        (["train", "--micro-batches", "3"], "a rank's 256 images"),
        (["train", "--strategy", "ddp", "--micro-batches", "256"], "use a divisor of 128"),
        (["train", "--json", "no-such-folder/run.json"], "no-such-folder doesn't exist"),
        (["train", "--json", "."], "is a folder; give a file"),
        (["train", "--json", "/proc/run.json"], "/proc"),
    ],
)
def test_bad_input(arguments, message, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        "fsdp_helpers.ranks.launch.Processes", lambda *args, **settings: pytest.fail("a rank was started")
    )
    if arguments[:1] == ["train"]:
        arguments = [*arguments, "--data-dir", "data"]
    status = main_in_process(*arguments)
    output = capfd.readouterr()
    assert status == 2
    assert len(output.err.splitlines()) == 1, output.err
    assert message in output.err
    assert output.out == ""
    assert os.listdir(tmp_path) == []  # the data folder included: nothing is fetched for a run that cannot be


def test_a_damaged_file_is_bad_input(tmp_path, capfd):
    raw = tmp_path / "MNIST" / "raw"
    raw.mkdir(parents=True)
    (raw / "t10k-labels-idx1-ubyte").write_bytes(b"short")
    assert main_in_process("train", "--data-dir", tmp_path) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert "t10k-labels-idx1-ubyte is damaged: 5 bytes instead of 10008. Delete it and run again." in line


def test_a_failing_rank_is_exit_status_one(digits_dir, monkeypatch, capfd):
    def launch_a_worker_that_fails(worker, config, **settings):
        return launch(workers.raise_on, 1, **settings)

    monkeypatch.setattr("fsdp_helpers.training.run.launch", launch_a_worker_that_fails)
    arguments = ["train", "--strategy", "ddp", "--device", "cpu", "--data-dir", digits_dir]
    assert main_in_process(*arguments) == 1
    errors = capfd.readouterr().err
    assert "rank 1 of 2 failed: ZeroDivisionError: on purpose, on rank 1" in errors
    assert "in raise_on" in errors  # the original traceback


def test_under_torchrun_a_failing_rank_is_no_bad_input(digits_dir, monkeypatch, capfd):
    def fail(rank, world_size, config):
        raise ValueError("on purpose")

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "LOCAL_WORLD_SIZE": 1}
    for name, value in {**ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "TORCHELASTIC_RUN_ID": 1}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr("fsdp_helpers.training.run.train_worker", fail)
    assert main_in_process("train", "--device", "cpu", "--data-dir", digits_dir) == 1
    errors = capfd.readouterr().err
    assert "rank 0 of 1 failed: ValueError: on purpose" in errors
    assert "Traceback" in errors and "in fail" in errors


def test_the_digits_and_their_end_are_said(digits_dir, tmp_path, monkeypatch, capfd):
    """1,437 digits are 5 batches of 256. The output here is a log, and its lines may be as close as the steps."""
    monkeypatch.setattr("fsdp_helpers.progress.SECONDS_BETWEEN_LINES", 0.0)
    arguments = ["train", "--model", "simple", "--max-steps", 7, "--test-images", 9, "--data-dir", digits_dir]
    assert main_in_process(*arguments, "--json", tmp_path / "run.json") == 0
    output = capfd.readouterr()
    assert "1,797 bundled digits" in output.out + output.err
    assert "ended after 5 of 7 steps: the images of 1 epoch are used up; raise --epochs" in output.out
    assert re.search(r"^simple, local, 1 rank on cpu: 5 of 5, [\d,]+ images/s, loss ", output.err, re.MULTILINE)
    assert read_json(tmp_path / "run.json")["data_source"] == "digits"


def test_an_old_record_is_replaced_whole_or_not_at_all(digits_dir, tmp_path, monkeypatch):
    target = tmp_path / "run.json"
    target.write_text("old")
    monkeypatch.setattr("fsdp_helpers.ranks.launch.Processes", lambda *args, **settings: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main_in_process("train", "--data-dir", digits_dir, "--json", target)
    assert target.read_text() == "old"


@pytest.fixture
def help_of(monkeypatch, capsys):
    """What `--help` says of a command, on lines so wide that no word is cut in two."""
    monkeypatch.setenv("COLUMNS", "1000")

    def read(command: str) -> str:
        assert main_in_process(command, "--help") == 0
        return " ".join(capsys.readouterr().out.split())

    return read


def test_help_explains_every_flag(help_of):
    text = help_of("train")
    for flag in train_flags():
        assert f"{flag.name} {flag.value}".strip() in text
        assert flag.meaning in text
    assert set(TrainConfig().__dict__) <= {flag.setting for flag in train_flags()}


def test_every_flag_reaches_its_setting():
    """Another value than the default, for each: a switch is switched, a choice is the last one, a number is 7."""
    for flag in flags():
        value = {bool: not flag.default, int: 7, float: 7.0, str: "some"}[flag.kind]
        value = flag.choices[-1] if flag.choices else value
        words = [flag.name] if flag.kind is bool else [flag.name, str(value)]
        options = vars(build_parser().parse_args(["train", *words]))
        expected = TrainConfig().__dict__ | {flag.setting: value}
        assert {name: options[name] for name in expected} == expected


def test_help_of_the_comparison_knows_every_model(help_of):
    assert "{" + ",".join(MODELS) + "}" in help_of("compare")


# ---------------------------------------------------------------- a strategy or a model is known everywhere, or nowhere


def test_every_strategy_is_whole():
    """Its name, its function and its color."""
    assert tuple(strategies.APPLY_STRATEGY) == STRATEGIES
    assert tuple(STRATEGY_COLORS) == STRATEGIES
    assert len(set(STRATEGY_COLORS.values())) == len(STRATEGIES)
    for name, apply in strategies.APPLY_STRATEGY.items():
        assert apply.__name__ == "apply_" + name.replace("-", "_")
    for name in ("zero9", "fsdp2", "FSDP", ""):
        with pytest.raises(ValueError, match=f"unknown strategy '{name}'; choose one of local"):
            is_sharded(name)


def test_every_model_can_be_built():
    assert tuple(MODEL_CLASSES) == MODELS
