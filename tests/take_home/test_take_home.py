"""The take-home scripts: whole, small, on plain torch, and the same training as the package's."""

import ast
import os
import re
import runpy
import subprocess
import sys
from collections import OrderedDict
from pathlib import Path
from unittest.mock import MagicMock

import nbformat
import pytest
import torch
import torch.distributed as dist
from runs import mostly_long
from take_home_workers import (
    FOLDER,
    ddp_job_that_saves,
    levers_of_a_step,
    load_script,
    run_each,
    run_main,
    shard_each,
    train_alone,
)
from torch.distributed import HashStore, TCPStore
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

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
SHORT = [name for name in NAMES if name != "finetune.py"]
DIVIDE_24 = [1, 2, 3, 4, 6, 8, 12, 24]
ARGUMENTS = {"checkpoint.py": ["FOLDER", "STEPS"], "from_ddp.py": ["FILE"], "vit.py": ["[FILE]"]}
CHAPTERS = {"ddp.py": "02", "fsdp2.py": "03", "fsdp1.py": "14", "offload.py": "05", "checkpoint.py": "06"} | {
    "levers.py": "07",
    "vit.py": "08",
    "from_ddp.py": "14",
}
STARTED_TWICE = ("checkpoint.py", "from_ddp.py")
MAX_WIDTH = 110
STEPS = 6


def logs_below(folder: Path) -> list[str]:
    """Without these, torchrun leaves an empty folder in the temporary folder."""
    return ["--log-dir", str(folder / "logs")]


def run_script(name: str | Path, world_size: int, *arguments) -> str:
    """What the `main` of a script prints, run by ranks."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    found = launch(run_main, name, store.port, arguments, world_size=world_size, device="cpu", timeout_s=240)
    assert found[1:] == [""] * (world_size - 1)  # rank 0 alone prints
    return found[0]


def losses(output: str) -> dict[int, float]:
    """Steps taken before -> loss, from the lines that rank 0 prints, which count from 1; no other rank prints any."""
    found = re.findall(r"^step (\d+)  loss (\d+\.\d{7})\b", output, re.MULTILINE)
    assert len({step for step, _ in found}) == len(found)
    return {int(step) - 1: float(loss) for step, loss in found}


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


@pytest.mark.parametrize("name", NAMES)
def test_the_optimizer_that_trains_is_fused(name):
    calls = [node for node in ast.walk(ast.parse((FOLDER / name).read_text())) if isinstance(node, ast.Call)]
    adams = [ast.unparse(call) for call in calls if ast.unparse(call.func).rpartition(".")[2] in ("Adam", "AdamW")]
    trains = [adam for adam in adams if "lr=" in adam]  # from_ddp.py has a second one, which only reads the file
    assert len(trains) == 1 and "fused=True" in trains[0]


@pytest.mark.parametrize("name", NAMES)
def test_clean_up_is_skipped_on_the_cpu_alone(name):
    """`os._exit` runs nothing of `atexit`, which whoever uses a GPU may need, unless all ranks end the run for a reason."""
    text = (FOLDER / name).read_text()
    assert text.count("os._exit(") == 1 + text.count("os._exit(status)")
    assert ast.unparse(ast.parse(text).body[-1].body[-1]) == "if chosen.type == 'cpu':\n    os._exit(0)"


# ---------------------------------------------------------------- what they refuse


@pytest.fixture
def started(monkeypatch, capsys):
    """What a rank prints, to both streams, as the file is run as a script, and its status; it gets no further than init."""

    def start(name: str, *words: str, num_gpus: int = 0, **variables: object) -> tuple[str, str, object]:
        current = []
        monkeypatch.setattr(sys, "argv", [name, *words])
        monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
        monkeypatch.setattr(torch.cuda, "set_device", current.append)
        monkeypatch.setattr(
            "ctypes.CDLL", MagicMock()
        )  # checkpoint.py would have Linux end this process with its parent
        monkeypatch.setattr(dist, "init_process_group", lambda backend: sys.exit(f"init {backend}"))
        for variable in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            monkeypatch.delenv(variable, raising=False)
        for variable, value in variables.items():
            monkeypatch.setenv(variable, str(value))
        with pytest.raises(SystemExit) as end:
            runpy.run_path(str(FOLDER / name), run_name="__main__")
        return *capsys.readouterr(), end.value.code if num_gpus == 0 else (end.value.code, *current)

    return start


def ranks_of(world_size: int, local_rank: int = 0, local_world_size: int | None = None) -> dict[str, int]:
    """What torchrun tells a rank of its first machine."""
    return {
        "RANK": local_rank,
        "LOCAL_RANK": local_rank,
        "WORLD_SIZE": world_size,
        "LOCAL_WORLD_SIZE": local_world_size or world_size,
    }


def words_for(name: str, folder: Path) -> list[str]:
    """Arguments that are in order."""
    return {"checkpoint.py": [str(folder / "run"), "6"], "from_ddp.py": ["ddp.pt"]}.get(name, [])


@pytest.mark.parametrize("name", SHORT)
def test_without_torchrun_it_says_the_command(name, started, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = " ".join(["torchrun --nproc-per-node 2", str(FOLDER / name), *ARGUMENTS.get(name, [])])
    assert started(name, *words_for(name, tmp_path)) == ("", f"run it with {command}\n", 2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "name, words",
    [
        ("checkpoint.py", []),
        ("checkpoint.py", ["run"]),
        ("checkpoint.py", ["run", "many"]),
        ("checkpoint.py", ["run", "3", "4"]),
        ("from_ddp.py", []),
        ("from_ddp.py", ["ddp.pt", "3"]),
        ("vit.py", ["weights.pt", "3"]),
    ],
)
def test_with_other_arguments_it_says_the_command(name, words, started, tmp_path, monkeypatch):
    """The first rank says it, once; the others do nothing that could fail before torchrun ends them."""
    monkeypatch.chdir(tmp_path)
    printed, said, status = started(name, *words, **ranks_of(2))
    assert (printed, status) == ("", 2)
    assert said == f"run it with torchrun --nproc-per-node 2 {FOLDER / name} {' '.join(ARGUMENTS[name])}\n"
    monkeypatch.setattr("signal.pause", lambda: sys.exit("waits"))
    assert started(name, *words, **ranks_of(2, local_rank=1))[2] == (
        "waits" if name == "checkpoint.py" else "init gloo"
    )
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", SHORT)
def test_ranks_that_do_not_divide_the_batch_are_refused_by_the_first(name, started, tmp_path):
    fit, what = DIVIDE_24, "ranks don't divide BATCH=24"
    if name == "levers.py":  # each rank has two parts
        fit, what = [1, 2, 3, 4, 6, 12], "ranks x PARTS don't divide BATCH"
    for world_size in range(1, 26):
        words = words_for(name, tmp_path / str(world_size))  # each start of checkpoint.py keeps its folder's lock
        refused = ("", f"{world_size} {what}; {fit} do\n", 2)
        goes_on = ("no GPU visible: running on the CPU\n", "", "init gloo")
        assert started(name, *words, **ranks_of(world_size)) == (goes_on if world_size in fit else refused)
        two_machines = ranks_of(world_size, local_rank=1, local_world_size=2)
        assert started(name, *words, **two_machines) == ("", "", "init gloo")


@pytest.mark.parametrize("name", SHORT)
def test_a_gpu_for_every_rank_of_the_machine_or_for_none(name, started, tmp_path):
    """Without any, the first rank of a machine says so; with too few, it says that, and the others wait in the group."""
    words, ranks = words_for(name, tmp_path / "cpu"), ranks_of(4, local_rank=0, local_world_size=2)
    nccl = "init cpu:gloo,cuda:nccl"
    assert started(name, *words, num_gpus=0, **ranks) == ("no GPU visible: running on the CPU\n", "", "init gloo")
    words = words_for(name, tmp_path / "gpus")  # each start of checkpoint.py keeps its folder's lock
    assert started(name, *words, num_gpus=2, **ranks) == ("", "", (nccl, torch.device("cuda:0")))
    too_few = f"GPUs on {os.uname().nodename}: only 1; start one rank per GPU\n"
    assert started(name, *words, num_gpus=1, **ranks) == ("", too_few, (2,))
    ranks = ranks_of(4, local_rank=1, local_world_size=2) | {"RANK": 3}  # of the second machine
    assert started(name, *words, num_gpus=0, **ranks) == ("", "", "init gloo")
    assert started(name, *words, num_gpus=3, **ranks) == ("", "", (nccl, torch.device("cuda:1")))
    assert started(name, *words, num_gpus=2, **ranks) == ("", "", (nccl, torch.device("cuda:1")))
    assert started(name, *words, num_gpus=1, **ranks) == ("", "", (nccl, torch.device("cuda:0")))


def test_a_refusal_is_one_line_under_torchrun(torchrun, tmp_path):
    options = ["--standalone", "--nproc-per-node", "2", *logs_below(tmp_path)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    command = [torchrun, *options, FOLDER / "checkpoint.py"]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 1 and "exitcode  : 2 (" in done.stderr, done.stderr  # torchrun's own, and the script's
    said = [line for line in done.stderr.splitlines() if line.startswith("run it with ")]
    assert said == [f"run it with torchrun --nproc-per-node 2 {FOLDER / 'checkpoint.py'} FOLDER STEPS"]
    assert done.stdout == "" and done.stderr.count("Traceback") == 1  # torchrun's
    assert [path.name for path in tmp_path.iterdir()] == ["logs"]


# ---------------------------------------------------------------- what they compute


@pytest.mark.parametrize("world_size", [1, 2, 3, *mostly_long([4, 6, 8, 12])[1:]])
def test_any_number_of_ranks_learns_what_one_process_learns(world_size, tmp_path):
    """To 1e-6, from the same first weights whatever each rank's random numbers were, and six steps of Adam later."""
    job, file = ddp_job_that_saves(tmp_path, 3)
    runs = dict.fromkeys(SHORT, ()) | {"from_ddp.py": (str(file),), "checkpoint.py": (tmp_path / "run", STEPS)}
    runs = {str(job): ()} | runs
    if world_size == 8:
        del runs["levers.py"]  # it refuses them: a rank's three images aren't two equal parts
    found = launch(run_each, runs, world_size=world_size, device="cpu", timeout_s=240)
    assert all(set(printed.values()) == {""} for printed in found[1:])  # rank 0 alone prints
    first = losses(found[0].pop(str(job)))
    for name, printed in found[0].items():
        steps = first | losses(printed) if name == "from_ddp.py" else losses(printed)
        norms = [] if name == "levers.py" else None
        assert list(steps) == list(range(STEPS)), name
        assert list(steps.values()) == pytest.approx(train_alone(name, norms=norms), rel=0, abs=1e-6), name
        if name == "levers.py":
            assert [float(norm) for norm in re.findall(r"  norm (\S+)$", printed, re.M)] == pytest.approx(
                norms, abs=1e-5
            )


@pytest.mark.parametrize("name, chapter", CHAPTERS.items())
def test_the_saved_output_of_the_chapter_is_what_one_process_learns(name, chapter):
    """So it's these data, a new batch for each step, and this model: numbers that the script's own code can't produce."""
    (path,) = FOLDER.parent.glob(f"{chapter}_*.ipynb")
    begins = "fsdp1-script" if name == "fsdp1.py" else "take-home"
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.id.startswith(begins)]
    outputs = [output.text for cell in cells for output in cell.get("outputs", []) if output.output_type == "stream"]
    starts = "".join(outputs).count("no GPU visible: running on the CPU\n")
    assert starts == (2 if name in STARTED_TWICE else 1)
    saved = losses("".join(outputs))
    assert list(saved) == list(range(STEPS))
    assert list(saved.values()) == pytest.approx(train_alone(name), abs=0.01 if name == "levers.py" else 1e-5)


def test_a_script_uses_its_arguments(tmp_path, monkeypatch, capsys):
    """Each as its own only rank."""
    script, file, run = load_script("vit.py"), tmp_path / "weights.pt", tmp_path / "run"
    torch.manual_seed(7)
    torch.save(script.ViT().state_dict(), file)
    model = load_script("from_ddp.py").build_model()
    adam = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 2, 64)).sum().backward()
    adam.step()
    torch.save({"model": model.state_dict(), "optimizer": adam.state_dict(), "step": 4}, tmp_path / "ddp.pt")
    for variable, value in ranks_of(1).items():
        monkeypatch.setenv(variable, str(value))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setattr("ctypes.CDLL", MagicMock())  # checkpoint.py would have Linux end this process with its parent
    monkeypatch.setattr(os, "_exit", lambda status: None)
    init = dist.init_process_group
    monkeypatch.setattr(dist, "init_process_group", lambda _: init("gloo", store=HashStore(), rank=0, world_size=1))
    found = []
    for words in (["vit.py", str(file)], ["from_ddp.py", str(tmp_path / "ddp.pt")], ["checkpoint.py", str(run), "2"]):
        monkeypatch.setattr(sys, "argv", words)
        runpy.run_path(str(FOLDER / words[0]), run_name="__main__")
        found.append(losses(capsys.readouterr().out))
    assert list(found[0].values()) == pytest.approx(train_alone("vit.py", seed=7), abs=1e-5)
    assert [list(steps) for steps in found[1:]] == [[4, 5], [0, 1]]
    assert sorted(path.name for path in run.iterdir()) == [".lock", "000002"]


IN_BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
SETTINGS = {  # of every unit; a layer of levers.py is recomputed as well, the root is not
    "checkpoint.py": {},
    "from_ddp.py": {},
    "fsdp2.py": {},
    "levers.py": {"mp_policy": IN_BF16},
    "offload.py": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "vit.py": {},
}


def test_each_layer_is_a_unit_with_the_settings_of_its_script(tmp_path):
    """Losses do not tell: they are the same in one unit, without offload, and with nothing recomputed."""
    job, file = ddp_job_that_saves(tmp_path, 1)
    run_script(job, 2)
    arguments = {"from_ddp.py": (str(file),), "checkpoint.py": (tmp_path / "run", 1)}
    runs = {name: arguments.get(name, ()) for name in ("fsdp1.py", *SETTINGS)}
    found = launch(shard_each, runs, world_size=2, device="cpu", timeout_s=240)[0]
    layers = ["root", "0", "1", "2", "3"]
    assert found.pop("fsdp1.py")[0] == layers  # whose policy has taken them
    for name, (units, settings) in found.items():
        assert units == (["root", *(f"blocks.{layer}" for layer in layers[1:])] if name == "vit.py" else layers), name
        recomputed = {"recomputed": True} if name == "levers.py" else {}
        assert settings == [SETTINGS[name] | recomputed] * 4 + [SETTINGS[name]], name


def test_micro_batches_share_one_reduction_and_have_their_losses_in_fp32():
    """Four layers and the root, in one step of two micro-batches: five reductions, where all would be reduced, ten."""
    for found, dtypes in launch(levers_of_a_step, world_size=2, device="cpu", timeout_s=240):
        assert dtypes == {torch.float32}
        assert found["reduce_scatter"] == 5
        # Layers for two forwards and two backwards, the root for two forwards: it stays whole until backward.
        assert found["all_gather"] == 2 * (2 * 4 + 1)


def test_saved_on_three_ranks_resumed_on_two(tmp_path):
    first, second = (losses(run_script("checkpoint.py", *run)) for run in ((3, tmp_path, 3), (2, tmp_path, 6)))
    assert (list(first), list(second)) == ([0, 1, 2], [3, 4, 5])
    undisturbed = train_alone("checkpoint.py", 6)
    assert [*first.values(), *second.values()] == pytest.approx(undisturbed, abs=1e-5)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "000006"]  # the newest alone


@pytest.mark.parametrize("prefix", ["", "module.", "module._orig_mod.", "_orig_mod.module."])
def test_names_of_ddp_and_of_a_compiled_model_are_read(prefix, tmp_path):
    script = load_script("from_ddp.py")
    plain = script.build_model
    script.build_model = lambda: torch.nn.Sequential(OrderedDict(net=torch.nn.Sequential(OrderedDict(module=plain()))))
    model = script.build_model()  # a module of its own that is called "module"
    adam = script.make_optimizer(model)
    model(script.load_batch(0)[0]).sum().backward()
    adam.step()
    weights = {f"{prefix}{name}": value for name, value in model.state_dict().items()}
    torch.save({"model": weights, "optimizer": adam.state_dict(), "step": 1}, tmp_path / "ddp.pt")
    found, moments, rest = script.read_ddp_checkpoint(str(tmp_path / "ddp.pt"))
    assert found.keys() == moments["state"].keys() == model.state_dict().keys()
    assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())
    assert rest == {"step": 1, "schedule": None, "without_moments": []}


def test_weights_saved_on_a_gpu_are_read_without_one(tmp_path, monkeypatch):
    vit = load_script("vit.py")
    weights = vit.ViT().state_dict()
    with monkeypatch.context() as patch:
        patch.setattr("torch.serialization.location_tag", lambda storage: "cuda:0")
        torch.save(weights, tmp_path / "weights.pt")
    found = vit.first_values(str(tmp_path / "weights.pt"))
    assert {value.device.type for value in found.values()} == {"cpu"}
    assert all(torch.equal(found[name], weights[name]) for name in weights)


def test_offload_says_where_the_bytes_are():
    # Four layers of 33,472 parameters and 650 in the last: 134,538. Two ranks keep 16 bytes of each between them.
    assert "rank 0 keeps 1076304 bytes, 1076304 of them on the host" in run_script("offload.py", 2)


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
