"""The command `plan`: its table and sentence, nonsense, and how little it needs."""

import argparse
import json
import subprocess
import sys
from dataclasses import replace

import pytest

from fsdp_helpers.__main__ import main
from fsdp_helpers.planning.command import add_plan_arguments, plan_lines, read_plan
from fsdp_helpers.planning.plan import Cluster, Plan, Settings
from fsdp_helpers.records import CollectiveCount

WHOLE = ("plan", "--model", "vit-10b", "--world-size", "128", "--device-memory-gb", "80")
WITHOUT_TORCH = """
import resource, sys
from fsdp_helpers.__main__ import main
status = main(sys.argv[1:])
print(status, 'torch' in sys.modules, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, file=sys.stderr)
"""


def with_changes(**changes: str) -> list[str]:
    arguments = dict(zip(WHOLE[1::2], WHOLE[2::2], strict=True)) | {
        f"--{name.replace('_', '-')}": value for name, value in changes.items()
    }
    return ["plan", *(word for pair in arguments.items() for word in pair)]


def test_a_table_and_a_sentence(capsys, tmp_path):
    path = tmp_path / "plan.json"
    assert main([*WHOLE, "--tflops", "400", "--json", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "vit-10b, 10,077,917,160 parameters, on 128 rank(s), 8 image(s) each"
    assert [line.split("  ")[1] for line in lines[3:9]] == [
        "parameters",
        "gradients",
        "optimiser state",
        "gathered units",
        "activations",
        "communication buffers",
    ]
    written = json.loads(path.read_text())
    assert written["verdict"] == lines[-1] and lines[-1].startswith("It fits: the peak of ")
    # P = 10.08e9: slices 4 P / 128 = 315 MB without padding, and twice that
    assert written["state"]["parameter_bytes"] == pytest.approx(4 * 10_077_917_160 / 128, rel=0.02)
    assert written["peak"]["optimizer"] == 2 * written["peak"]["parameters"]
    assert "A rank sends 121 GB in a step: 2.43 s at 50.0 GB/s." in lines


def planned(*arguments: str) -> Plan:
    parser = argparse.ArgumentParser()
    add_plan_arguments(parser)
    return read_plan(parser.parse_args(arguments))[1]


def test_every_argument_counts():
    plan = planned(
        *["--model", "vit-b16", "--world-size", "8", "--device-memory-gb", "24", "--images", "3"],
        *["--strategy", "fsdp", "--api", "fsdp1", "--sharding", "hybrid", "--replicas", "4", "--precision", "bf16"],
        *["--activation-checkpointing", "units"],
        *["--bandwidth-gb-s", "10", "--tflops", "2", "--allowance-gb", "1"],
    )
    assert plan.settings == Settings(
        batch=3,
        strategy="fsdp",
        api="fsdp1",
        sharding="hybrid",
        replicas=4,
        precision="bf16",
        activation_checkpointing="units",
    )
    assert plan.cluster == Cluster(
        world_size=8, device_memory_bytes=24e9, bandwidth_bytes_per_s=10e9, flops_per_s=2e12, allowance_bytes=1e9
    )


@pytest.mark.parametrize("model, batch", [("vit-b16", 8), ("llama-8b", 8192)])
def test_what_is_not_said(model, batch):
    plan = planned("--model", model, "--world-size", "4", "--device-memory-gb", "80")
    assert plan.settings == Settings(batch=batch)
    assert plan.cluster == Cluster(world_size=4, device_memory_bytes=80e9)


def test_the_sentence_on_speed_goes_from_the_shortest_step_to_the_longest():
    plan = planned("--model", "vit-b16", "--world-size", "2", "--device-memory-gb", "80", "--images", "6")
    # 3,000 operations at 1,000 a second are 3 s, 1,000 bytes at 1,000 a second are 1 s; 12 images in 3 to 4 s
    gather = CollectiveCount(op="all_gather", count=1, bytes=2_000, sent_bytes=1_000)
    slow = replace(plan.cluster, flops_per_s=1e3, bandwidth_bytes_per_s=1e3)
    plan = replace(plan, step_flops=3_000, collectives=(gather,), cluster=slow)
    assert list(plan_lines(plan))[-2:] == [
        "A rank sends 1.00 kB in a step: 1.00 s at 1.00 kB/s.",
        "Its arithmetic takes 3.00 s; a step takes 3.00 s if all communication hides behind it, 4.00 s if none does: "
        "4 to 3 images/s over all ranks.",
    ]


@pytest.mark.parametrize("model", ["vit-10b", "llama-70b"])
def test_large_models_without_torch_or_memory(model):
    arguments = ["plan", "--model", model, "--world-size", "1024", "--device-memory-gb", "24"]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *arguments], capture_output=True, text=True, check=True, timeout=60
    )
    status, torch_is_there, kilobytes = done.stderr.split()
    assert (status, torch_is_there) == ("0", "False")
    assert int(kilobytes) * 1024 < 2e9


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"world_size": "0"}, "world_size is 0; it must be a whole number"),
        ({"world_size": "3.5"}, "--world-size: invalid int value: '3.5'"),
        ({"world_size": "many"}, "--world-size: invalid int value"),
        ({"bandwidth_gb_s": "-1"}, "bandwidth_bytes_per_s is -1000000000.0; it must be a number above zero"),
        ({"bandwidth_gb_s": "inf"}, "bandwidth_bytes_per_s is inf"),
        ({"model": "vit-11b"}, "--model: invalid choice: 'vit-11b'"),
        ({"device_memory_gb": "nan"}, "device_memory_bytes is nan"),
        ({"device_memory_gb": "inf"}, "device_memory_bytes is inf"),
        ({"device_memory_gb": "0"}, "device_memory_bytes is 0.0"),
        ({"tflops": "0"}, "flops_per_s is 0.0"),
        ({"allowance_gb": "-4"}, "allowance_bytes is -4000000000.0; it must be a number zero or more"),
        ({"images": "0"}, "batch is 0"),
        ({"tokens": "8"}, "--tokens: a batch of vit-10b is counted in images; use --images"),
        ({"strategy": "local"}, "strategy 'local' trains in one process"),
        ({"strategy": "ddp", "precision": "bf16"}, "precision 'bf16' is FSDP's mixed precision"),
        ({"sharding": "hybrid", "replicas": "3"}, "use a multiple of 3"),
        ({"sharding": "none"}, "sharding 'none' exists in FSDP1 only"),
        ({"json": "no-such-folder/plan.json"}, "the folder no-such-folder does not exist"),
    ],
)
def test_nonsense_gets_one_line_and_status_2(changes, message, capsys):
    try:
        status = main(with_changes(**changes))
    except SystemExit as left:  # argparse leaves by itself
        status = left.code
    said = capsys.readouterr()
    assert status == 2
    assert message in said.err and len(said.err.splitlines()) == 1
    assert said.out == ""


def test_a_missing_argument():
    with pytest.raises(SystemExit) as left:
        main(["plan", "--model", "vit-10b"])
    assert left.value.code == 2
