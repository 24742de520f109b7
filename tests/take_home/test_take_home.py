"""The take-home scripts: whole, small, on plain torch, and the same training as the package's."""

import ast
import os
import re
import runpy
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from runs import mostly_long
from take_home_workers import (
    FOLDER,
    MAX_NORM,
    collectives_of,
    load_script,
    run_main,
    shard_each,
    train_as_package,
    train_undisturbed,
    train_vit_alone,
)
from torch.distributed import HashStore, TCPStore
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from fsdp_helpers.config import TrainConfig
from fsdp_helpers.ranks.launch import launch

NAMES = (
    "checkpoint.py",
    "ddp.py",
    "finetune.py",
    "from_ddp.py",
    "fsdp1.py",
    "fsdp2.py",
    "levers.py",
    "offload.py",
    "vit.py",
)
MAX_WIDTH = 110
STEPS = 6
SHARDED = {"strategy": "fsdp-auto-wrap", "min_num_params": 20_000, "global_batch_size": 24}  # units: the four layers
LEVERS = {"precision": "bf16", "activation_checkpointing": "units", "micro_batches": 2}
AS_PACKAGE = {
    "ddp.py": TrainConfig(strategy="ddp"),
    "fsdp1.py": TrainConfig(api="fsdp1", **SHARDED),
    "fsdp2.py": TrainConfig(**SHARDED),
    "offload.py": TrainConfig(**SHARDED | {"strategy": "fsdp-offload"}),
    "levers.py": TrainConfig(**SHARDED, **LEVERS),
}


def logs_below(folder: Path) -> list[str]:
    """Without these, torchrun leaves an empty folder in the temporary folder."""
    return ["--log-dir", str(folder / "logs")]


@pytest.fixture(scope="module")
def run_script():
    """What the `main` of a script prints, run by ranks; each run is made once, however many tests look at it."""
    outputs = {}

    def run(name: str, world_size: int, *arguments) -> str:
        which = (name, world_size, arguments)
        if which not in outputs:
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            found = launch(run_main, name, store.port, arguments, world_size=world_size, device="cpu", timeout_s=240)
            assert found[1:] == [""] * (world_size - 1)  # rank 0 alone prints
            outputs[which] = found[0]
        return outputs[which]

    return run


@pytest.fixture(scope="module")
def run_torchrun(tmp_path_factory):
    """What a script prints under torchrun."""

    def run(torchrun: str, name: str, world_size: int, *arguments, on_gpus: bool = False) -> str:
        # No PYTHONPATH: the script finds torch and itself, as on a machine that has nothing else.
        environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
        if not on_gpus:
            environment["CUDA_VISIBLE_DEVICES"] = ""
        home = tmp_path_factory.mktemp("elsewhere")
        options = ["--standalone", "--nproc-per-node", str(world_size), *logs_below(home)]
        command = [torchrun, *options, FOLDER / name, *map(str, arguments)]
        done = subprocess.run(
            command, cwd=home, env=environment, capture_output=True, text=True, check=False, timeout=300
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def losses(output: str) -> dict[int, float]:
    """Step -> loss, from the lines that rank 0 prints; no other rank prints any."""
    found = re.findall(r"^step (\d+)  loss (\d+\.\d{7})\b", output, re.MULTILINE)
    assert len({step for step, _ in found}) == len(found)
    return {int(step): float(loss) for step, loss in found}


def package_losses(name: str, world_size: int) -> dict[int, float]:
    max_norm = MAX_NORM if name == "levers.py" else None
    settings = AS_PACKAGE[name], STEPS, max_norm
    found = launch(train_as_package, name, *settings, world_size=world_size, device="cpu")[0]
    return dict(enumerate(found))


# ---------------------------------------------------------------- what they are


def test_these_are_all():
    """The one script that needs a library besides torch has tests of its own, test_finetune_hf.py."""
    assert {path.name for path in FOLDER.glob("*.py")} == {*NAMES, "finetune_hf.py"}


@pytest.mark.parametrize("name", NAMES)
def test_on_plain_torch(name):
    text = (FOLDER / name).read_text()
    assert max(map(len, text.splitlines())) <= MAX_WIDTH
    assert "fsdp_helpers" not in text
    assert f"torchrun --nproc-per-node {3 if name == 'checkpoint.py' else 2} {name}" in ast.get_docstring(
        ast.parse(text)
    )


@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("finetune.py", "vit.py")])
def test_the_model_and_the_batches_are_the_same_in_all(name):
    """Whoever lays two scripts side by side sees what the chapter is about, and nothing else."""
    parts = [
        {node.name: ast.unparse(node) for node in ast.parse((FOLDER / file).read_text()).body if hasattr(node, "name")}
        for file in (name, "fsdp2.py")
    ]
    for function in ("build_model", "load_batch"):
        assert parts[0][function] == parts[1][function]


def packed(text: str) -> list[ast.AST]:
    """Ways to write two things at once that a reader has to take apart."""
    nodes = list(ast.walk(ast.parse(text)))
    several = [node for node in nodes if isinstance(node, ast.Assign) and isinstance(node.value, ast.Tuple)]
    return several + [node for node in nodes if isinstance(node, ast.NamedExpr)]


@pytest.mark.parametrize("name", NAMES)
def test_one_thing_per_line(name):
    assert packed("rank, size = 0, 1") and packed("print(size := 1)")
    assert not packed((FOLDER / name).read_text())


@pytest.mark.parametrize("name", NAMES)
def test_the_optimizer_that_trains_is_fused(name):
    calls = [node for node in ast.walk(ast.parse((FOLDER / name).read_text())) if isinstance(node, ast.Call)]
    adams = [ast.unparse(call) for call in calls if ast.unparse(call.func).rpartition(".")[2] in ("Adam", "AdamW")]
    trains = [adam for adam in adams if "lr=" in adam]  # from_ddp.py has a second one, which only reads the file
    assert len(trains) == 1 and "fused=True" in trains[0]


@pytest.mark.parametrize("name", NAMES)
def test_clean_up_is_skipped_on_the_cpu_alone(name):
    """`os._exit` runs nothing of `atexit`, which whoever uses a GPU may need."""
    text = (FOLDER / name).read_text()
    assert text.count("os._exit(") == 1
    assert ast.unparse(ast.parse(text).body[-1].body[-1]) == "if chosen.type == 'cpu':\n    os._exit(0)"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_gpus, chosen", [(0, "cpu"), (1, "cpu"), (2, "cuda:1")])
def test_a_gpu_for_every_rank_of_the_machine_or_for_none(name, num_gpus, chosen, monkeypatch):
    """Where they stay without, they hide what there is: Adam's first step would open it, for tensors on the CPU too."""
    current = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    monkeypatch.setattr(torch.cuda, "set_device", current.append)
    for variable, value in {"LOCAL_WORLD_SIZE": "2", "LOCAL_RANK": "1", "CUDA_VISIBLE_DEVICES": "0,1"}.items():
        monkeypatch.setenv(variable, value)
    assert load_script(name).choose_device() == torch.device(chosen)
    assert current == ([torch.device(chosen)] if num_gpus == 2 else [])
    assert os.environ["CUDA_VISIBLE_DEVICES"] == ("0,1" if num_gpus == 2 else "")


# ---------------------------------------------------------------- what they compute


@pytest.mark.parametrize("world_size", mostly_long([2, 3]))
@pytest.mark.parametrize("name", AS_PACKAGE)
def test_ranks_learn_what_the_package_learns(name, world_size, run_script):
    found = losses(run_script(name, world_size))
    # levers.py computes in bf16: on a processor without bf16 instructions, the two were 1.2e-4 apart after six steps.
    assert found == pytest.approx(package_losses(name, world_size), abs=1e-3 if name == "levers.py" else 1e-5)
    assert found[STEPS - 1] < found[0]  # and they do learn


@pytest.mark.long  # the notebooks start each of them with torchrun too
@pytest.mark.parametrize("name", [*AS_PACKAGE, "vit.py"])
def test_torchrun_starts_the_file_and_it_says_the_same(name, run_script, run_torchrun, torchrun):
    assert run_torchrun(torchrun, name, 2) == run_script(name, 2)


IN_BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
SETTINGS = {  # of every unit; a layer of levers.py is recomputed as well, the root is not
    "checkpoint.py": {},
    "from_ddp.py": {},
    "fsdp2.py": {},
    "levers.py": {"mp_policy": IN_BF16},
    "offload.py": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "vit.py": {},
}


def test_each_layer_is_a_unit_with_the_settings_of_its_script(run_script, tmp_path):
    """Losses do not tell: they are the same in one unit, without offload, and with nothing recomputed."""
    run_script("ddp.py", 2, str(tmp_path / "ddp.pt"), 1)
    arguments = {"from_ddp.py": (str(tmp_path / "ddp.pt"),), "checkpoint.py": (tmp_path / "run", 1)}
    runs = {name: arguments.get(name, ()) for name in ("fsdp1.py", *SETTINGS)}
    found = launch(shard_each, runs, world_size=2, device="cpu", timeout_s=240)[0]
    layers = ["root", "0", "1", "2", "3"]
    assert found.pop("fsdp1.py")[0] == layers  # whose policy has taken them
    for name, (units, settings) in found.items():
        assert units == (["root", *(f"blocks.{layer}" for layer in layers[1:])] if name == "vit.py" else layers), name
        recomputed = {"recomputed": True} if name == "levers.py" else {}
        assert settings == [SETTINGS[name] | recomputed] * 4 + [SETTINGS[name]], name


def test_micro_batches_share_one_reduction():
    """Four layers and the root, in one step of two micro-batches: five reductions, where all would be reduced, ten."""
    for found in launch(collectives_of, "levers.py", world_size=2, device="cpu", timeout_s=240):
        assert found["reduce_scatter"] == 5
        # Layers for two forwards and two backwards, the root for two forwards: it stays whole until backward.
        assert found["all_gather"] == 2 * (2 * 4 + 1)


def check_resumed(first: dict[int, float], second: dict[int, float], folder: Path) -> None:
    assert (list(first), list(second)) == ([0, 1, 2], [3, 4, 5])
    undisturbed = train_undisturbed("checkpoint.py", 6)
    assert [*first.values(), *second.values()] == pytest.approx(undisturbed, abs=1e-5)
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "000006"]  # the newest alone


def test_saved_on_three_ranks_resumed_on_two(run_script, tmp_path):
    first, second = (losses(run_script("checkpoint.py", *run)) for run in ((3, tmp_path, 3), (2, tmp_path, 6)))
    check_resumed(first, second, tmp_path)


@pytest.mark.long
def test_saved_on_three_ranks_resumed_on_two_by_torchrun(run_torchrun, torchrun, tmp_path):
    runs = ((3, tmp_path, 3), (2, tmp_path, 6))
    first, second = (losses(run_torchrun(torchrun, "checkpoint.py", *run)) for run in runs)
    check_resumed(first, second, tmp_path)


@pytest.mark.parametrize("world_size", mostly_long([3, 2]))
def test_a_ddp_run_goes_on_under_fsdp2(world_size, run_script, tmp_path):
    file = tmp_path / "ddp.pt"
    first = losses(run_script("ddp.py", 2, str(file), 3))
    second = losses(run_script("from_ddp.py", world_size, str(file)))
    assert (list(first), list(second)) == ([0, 1, 2], [3, 4, 5])
    assert first | second == pytest.approx(losses(run_script("ddp.py", 2)), abs=1e-5)  # with Adam's state, or not


@pytest.mark.parametrize("words, step", [(["ddp.pt"], STEPS), (["ddp.pt", "1"], 1), ([], None)])
def test_ddp_saves_in_the_file_that_it_is_given(words, step, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["ddp.py", *words])
    for variable, value in {"LOCAL_WORLD_SIZE": "1", "CUDA_VISIBLE_DEVICES": ""}.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setattr(os, "_exit", lambda status: None)
    alone = partial(dist.init_process_group, store=HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(dist, "init_process_group", alone)
    runpy.run_path(FOLDER / "ddp.py", run_name="__main__")
    assert [torch.load(path)["step"] for path in tmp_path.iterdir()] == ([step] if step else [])


@pytest.mark.parametrize("prefix", ["", "module.", "module._orig_mod.", "_orig_mod.module."])
def test_names_of_ddp_and_of_a_compiled_model_are_read(prefix, tmp_path):
    script = load_script("from_ddp.py")
    model = script.build_model()
    adam = script.make_optimizer(model)
    model(script.load_batch(0)[0]).sum().backward()
    adam.step()
    weights = {f"{prefix}{name}": value for name, value in model.state_dict().items()}
    torch.save({"model": weights, "optimizer": adam.state_dict(), "step": 1}, tmp_path / "ddp.pt")
    found, moments, rest = script.read_ddp_checkpoint(str(tmp_path / "ddp.pt"))
    assert found.keys() == moments["state"].keys() == model.state_dict().keys()
    assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())
    assert rest == {"step": 1, "schedule": None, "without_moments": []}


@pytest.mark.long
def test_a_ddp_run_goes_on_under_fsdp2_by_torchrun(run_torchrun, torchrun, tmp_path):
    file = tmp_path / "ddp.pt"
    first, second = (losses(run_torchrun(torchrun, *run)) for run in (("ddp.py", 2, file, 3), ("from_ddp.py", 2, file)))
    assert first | second == pytest.approx(package_losses("ddp.py", 2), abs=1e-5)


@pytest.mark.parametrize("world_size", mostly_long([2, 3]))
def test_the_vit_learns_what_one_process_learns(world_size, run_script):
    found = losses(run_script("vit.py", world_size))
    assert list(found.values()) == pytest.approx(train_vit_alone(STEPS), abs=1e-5)
    assert found[STEPS - 1] < found[0]


def test_the_vit_begins_with_a_file(run_script, tmp_path):
    torch.manual_seed(7)
    torch.save(load_script("vit.py").ViT().state_dict(), tmp_path / "weights.pt")
    found = losses(run_script("vit.py", 1, str(tmp_path / "weights.pt")))
    assert list(found.values()) == pytest.approx(train_vit_alone(STEPS, seed=7), abs=1e-5)


def test_weights_saved_on_a_gpu_are_read_without_one(tmp_path, monkeypatch):
    vit = load_script("vit.py")
    weights = vit.ViT().state_dict()
    with monkeypatch.context() as patch:
        patch.setattr("torch.serialization.location_tag", lambda storage: "cuda:0")
        torch.save(weights, tmp_path / "weights.pt")
    found = vit.first_values(str(tmp_path / "weights.pt"))
    assert {value.device.type for value in found.values()} == {"cpu"}
    assert all(torch.equal(found[name], weights[name]) for name in weights)


@pytest.mark.gpu
def test_the_vit_on_a_gpu(run_torchrun, torchrun):
    found = losses(run_torchrun(torchrun, "vit.py", 1, on_gpus=True))
    assert list(found.values()) == pytest.approx(train_vit_alone(STEPS), abs=1e-3)


def test_offload_says_where_the_bytes_are(run_script):
    # Four layers of 33,472 parameters and 650 in the last: 134,538. Two ranks keep 16 bytes of each between them.
    assert "rank 0 keeps 1076304 bytes, 1076304 of them on the host" in run_script("offload.py", 2)


def test_clipping_reports_one_norm_a_step(run_script):
    assert len(re.findall(r"  norm \d+\.\d{5}$", run_script("levers.py", 2), re.MULTILINE)) == STEPS


@pytest.mark.long
@pytest.mark.parametrize("name", ["ddp.py", "fsdp2.py"])
def test_every_rank_leaves_in_good_order(name, torchrun, tmp_path):
    """Ten times over: a thread of gloo that lives on must not abort a rank at its end."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [torchrun, "--standalone", "--nproc-per-node", "2", *logs_below(tmp_path), FOLDER / name]
    ends = [
        subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, check=False, timeout=300).returncode
        for _ in range(10)
    ]
    assert ends == [0] * 10


@pytest.mark.gpu
@pytest.mark.parametrize("name", AS_PACKAGE)
def test_the_same_file_on_a_gpu(name, run_torchrun, torchrun):
    found = losses(run_torchrun(torchrun, name, 1, on_gpus=True))
    # Another device rounds otherwise; bf16 has three digits.
    assert found == pytest.approx(package_losses(name, 1), abs=0.05 if name == "levers.py" else 1e-3)


@pytest.mark.gpu
def test_resumed_on_a_gpu(run_torchrun, torchrun, tmp_path):
    runs = [run_torchrun(torchrun, "checkpoint.py", 1, tmp_path, last, on_gpus=True) for last in (3, 6)]
    found = [loss for run in runs for loss in losses(run).values()]
    assert found == pytest.approx(train_undisturbed("checkpoint.py", 6), abs=1e-3)
