"""The command `plan`: its table and sentence, nonsense, and how little it needs."""

import argparse
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace

import pytest
from leftovers import PROJECT
from programs import OWN_PEAK_KB

from fsdp_helpers.__main__ import main
from fsdp_helpers.cli.plan_command import add_plan_arguments, plan_lines, read_plan
from fsdp_helpers.models.shapes import LlamaShape
from fsdp_helpers.planning.advice import possible_changes
from fsdp_helpers.planning.models import llama_subject
from fsdp_helpers.planning.plan import Cluster, Plan, Settings, make_plan
from fsdp_helpers.planning.step_time import StepTime
from fsdp_helpers.records import CollectiveCount

WHOLE = ("plan", "--model", "vit-10b", "--world-size", "128", "--device-memory-gb", "80")
WITHOUT_TORCH = f"""
import sys
from fsdp_helpers.__main__ import main
from fsdp_helpers.cli.plan_command import add_plan_arguments, plan_lines, read_plan
status = main(sys.argv[1:])
print(status, 'torch' in sys.modules, {OWN_PEAK_KB}, file=sys.stderr)
"""


def with_changes(**changes: str) -> list[str]:
    arguments = dict(zip(WHOLE[1::2], WHOLE[2::2], strict=True)) | {
        f"--{name.replace('_', '-')}": value for name, value in changes.items()
    }
    return ["plan", *(word for pair in arguments.items() for word in pair)]


def test_a_table_and_a_sentence(capsys, tmp_path):
    path = tmp_path / "plan.json"
    assert main([*WHOLE, "--tflops", "400", "--storage-gb-s", "2", "--json", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "vit-10b, 10,077,917,160 parameters, in fp32, on 128 ranks, 8 images each"
    assert lines[2] == "A step has 128 ranks x 8 images = 1,024 images."
    assert [line.split("  ")[1] for line in lines[4:10]] == [
        "parameters",
        "gradients",
        "optimizer state",
        "unsharded units",
        "activations",
        "communication buffers",
    ]
    written = json.loads(path.read_text())
    assert written["verdict"] in lines and written["verdict"].startswith("It fits: the peak of ")
    assert any(line.startswith("Fastest of the plans we tried: ") for line in lines) and written["fastest"]["fits"]
    # P = 10.08e9: shards 4 P / 128 = 315 MB without padding, and twice that
    assert written["state"]["parameter_bytes"] == pytest.approx(4 * 10_077_917_160 / 128, rel=0.02)
    assert written["peak"]["optimizer"] == 2 * written["peak"]["parameters"]
    # 121 GB at 50 GB/s are 2.43 s; each of 98 collectives takes 127 steps of 9.6 µs besides
    assert written["communication_s"] == pytest.approx(written["sent_bytes"] / 50e9 + 98 * 127 * 9.6e-6, rel=1e-3)
    # a checkpoint has parameters and two moments, 12 P, and 128 nodes write it at 2 GB/s each
    assert written["saving"]["checkpoint_bytes"] == written["checkpoint_bytes"] == 12 * 10_077_917_160
    assert written["saving"]["save_s"] == pytest.approx(12 * 10_077_917_160 / (128 * 2e9))


LLAMA_70B = ["plan", *"--model llama-70b --world-size 256 --device h100 --precision bf16".split()]
RECOMPUTED = ["--activation-checkpointing", "units"]


def said(capsys, *arguments: str) -> str:
    assert main([*arguments]) == 0
    return capsys.readouterr().out


def test_micro_batches_do_not_need_full_gradients(capsys):
    one, four = (said(capsys, *LLAMA_70B, *RECOMPUTED, "--micro-batches", parts) for parts in ("1", "4"))
    assert "It fits: the peak of 26.9 GB" in one and "It fits: the peak of 28.0 GB" in four
    # 4 bytes for each of 70.6 billion parameters wait otherwise
    assert (
        "If they're reduced only after the last one (--no-sync-micro-batches), a rank sends 843 GB less and peaks at 309 GB"
        in four
    )
    held = said(capsys, *LLAMA_70B, *RECOMPUTED, "--micro-batches", "4", "--no-sync-micro-batches")
    assert "first reduce gradients after every micro-batch (without --no-sync-micro-batches) (peak 28.0 GB)" in held


def test_advice_ends_with_a_command_that_fits(capsys):
    small = "--model llama-8b --world-size 64 --device-memory-gb 16 --precision bf16 --activation-checkpointing units"
    lines = said(capsys, "plan", *small.split()).splitlines()
    assert "compute the loss in 8 chunks (--loss-chunks 8) (peak 8.62 GB); then it fits." in lines[-3]
    assert lines[-1].strip() == f"python -m fsdp_helpers plan {small} --loss-chunks 8"
    assert "It fits: the peak of 8.62 GB" in said(capsys, *lines[-1].split()[3:])


def test_the_size_of_a_step_is_said_and_judged(capsys):
    large = said(capsys, *LLAMA_70B, *RECOMPUTED, "--micro-batches", "16")
    assert "256 ranks x 8,192 tokens x 16 parts = 33,554,432 tokens in 4,096 sequences." in large
    assert "more than 16 million" in large and "15_more_dimensions.ipynb" in large
    asked = said(capsys, *LLAMA_70B, *RECOMPUTED, "--global-batch", "8388608")
    assert "256 ranks x 8,192 tokens x 4 parts = 8,388,608 tokens" in asked and "million" not in asked


def test_where_units_take_less_than_a_millisecond_there_is_no_range(capsys, tmp_path):
    path = tmp_path / "plan.json"
    small = said(capsys, "plan", *f"--model vit-mnist --world-size 8 --device h100 --json {path}".split())
    assert "waits for kernels to be launched" in small and "Between" not in small and "a day" not in small
    written = json.loads(path.read_text())
    assert written["step_s"] is None and written["items_per_s"] is None and written["step_estimate_s"] > 0


def test_hours_say_what_they_leave_out(capsys):
    plain = said(capsys, *LLAMA_70B, *RECOMPUTED, "--total", "1e12")
    assert "without saving, restarts, evaluation" in plain and "give --storage-gb-s, a node's write rate" in plain
    job = float(plain.split(" GPU-hours, ")[1].split(" days")[0])
    assert job == pytest.approx(float(plain.split(" GPU-hours")[0].split()[-1].replace(",", "")) / 256 / 24, abs=0.05)
    honest = said(capsys, *LLAMA_70B, *RECOMPUTED, *"--total 1e12 --goodput 0.5 --storage-gb-s 2".split())
    hours = [float(text.split(" GPU-hours")[0].split()[-1].replace(",", "")) for text in (plain, honest)]
    assert hours[1] == pytest.approx(2 * hours[0], rel=1e-4) and "of which 50% is training" in honest
    assert "10 minutes until all ranks are training again" in honest


def test_adapters_train_little_and_skip_the_gradients_of_frozen_weights(tmp_path, capsys):
    arguments = "--model llama-8b --world-size 8 --device h100 --precision bf16".split()
    full, adapted = planned(*arguments), planned(*arguments, "--lora-rank", "16")
    # 32 blocks, each (in + out) x 16 for q, out (4096, 4096), k, v (4096, 1024), gate, up, down (4096, 14336)
    trained = 32 * 16 * (2 * 8_192 + 2 * 5_120 + 3 * 18_432)
    assert adapted.num_params - full.num_params == trained
    assert adapted.state.gradient_bytes == pytest.approx(4 * trained / 8, rel=0.01)
    assert adapted.checkpoint_bytes == 4 * adapted.num_params + 8 * trained
    assert 2.0 < adapted.step_flops / (full.step_flops / 3) < 2.3
    assert adapted.time.optimizer_s < full.time.optimizer_s / 50


def test_a_loss_in_chunks_costs_the_heads_forward_once_more():
    one, eight = (planned(*LLAMA_70B[1:], "--loss-chunks", chunks) for chunks in ("1", "8"))
    head = 2 * 8192 * 8192 * 128_256  # 2 operations for each of 8,192 tokens and 8,192 x 128,256 weights
    assert eight.step_flops - one.step_flops == head
    assert (eight.time.arithmetic_s - one.time.arithmetic_s) * one.cluster.flops_per_s == pytest.approx(head, rel=1e-3)


def test_the_sweep_finds_the_fewest(capsys):
    arguments = "--model llama-8b --world-size 32 --device h100 --precision bf16 --context 8192 --sweep".split()
    lines = said(capsys, "plan", *arguments, "--total", "1e11", "--days", "30").splitlines()
    assert said(capsys, "plan", *arguments, "--total", "1e11", "--days", "1").endswith(
        "32 GPUs don't finish within 1 day.\n"
    )
    assert lines[1].split() == [*"GPUs sequence batch recompute chunks sharding peak tokens/s GPU-hours days".split()]
    assert [line.split()[0] for line in lines[2:5]] == ["8", "16", "32"]
    hours, days = ([float(line.split()[place].replace(",", "")) for line in lines[2:5]] for place in (-2, -1))
    assert days == pytest.approx([time / 24 / ranks for time, ranks in zip(hours, (8, 16, 32), strict=True)], abs=0.1)
    assert days[0] > days[1] > days[2]
    fewest = int(lines[5].split(": ")[1].split()[0])
    assert "are the fewest that finish within 30 days" in lines[5] and 8 <= fewest <= 32


def planned(*arguments: str) -> Plan:
    parser = argparse.ArgumentParser()
    add_plan_arguments(parser)
    return read_plan(parser.parse_args(arguments))[1]


def test_every_argument_counts():
    plan = planned(
        *["--model", "vit-b16", "--world-size", "8", "--device-memory-gb", "24", "--images", "3"],
        *["--strategy", "fsdp", "--sharding", "hybrid", "--replicas", "4", "--precision", "bf16"],
        *["--activation-checkpointing", "units"],
        *["--bandwidth-gb-s", "10", "--tflops", "2", "--allowance-gb", "1"],
    )
    assert plan.settings == Settings(
        batch=3,
        strategy="fsdp",
        sharding="hybrid",
        replicas=4,
        precision="bf16",
        activation_checkpointing="units",
    )
    assert plan.cluster == Cluster(
        world_size=8, device_memory_bytes=24e9, bandwidth_bytes_per_s=10e9, flops_per_s=2e12, allowance_bytes=1e9
    )


def squeezed(lines: Iterable[str]) -> str:
    """Return the lines as one, without the room between columns."""
    return " ".join(" ".join(lines).split())


def test_host_memory_is_that_of_a_node():
    # 16 bytes for each of 70,553,706,496 parameters, over 8 ranks: 141 GB a rank, 1,129 GB a node of eight
    offload = ["--model", "llama-70b", "--world-size", "8", "--device-memory-gb", "80", "--strategy", "fsdp-offload"]
    alone = squeezed(plan_lines(planned(*offload)))
    assert "for each node of 1 141 GB" in alone and "give their number with --ranks-per-node" in alone
    together = planned(*offload, "--ranks-per-node", "8", "--host-memory-gb", "1000")
    lines = squeezed(plan_lines(together))
    assert "for each rank 141 GB" in lines and "for each node of 8 1,129 GB" in lines
    assert "--ranks-per-node" not in lines and not together.fits_host


def test_readmes_own_line_plans_in_bf16_which_fits_and_says_so_first(capsys):
    (line,) = re.findall(r"^python -m fsdp_helpers (plan .*?) +#", (PROJECT / "README.md").read_text(), re.MULTILINE)
    text = said(capsys, *line.split())
    assert "parameters, in bf16, on 64 ranks, 8,192 tokens each" in text.splitlines()[0] and "It fits: " in text
    # llama-8b reaches 989 x 0.42 = 415 TFLOP/s instead of 67 x 0.42 = 28
    assert planned(*line.split()[1:]).cluster.flops_per_s == pytest.approx(0.42 * 989e12)


@pytest.mark.parametrize(
    "arguments, precision",
    [
        ("--model llama-8b --device t4", "fp32"),
        ("--model llama-8b --device a100", "bf16"),
        ("--model llama-8b --device a100 --precision fp32", "fp32"),
        ("--model llama-8b --device-memory-gb 80", "fp32"),
    ],
)
def test_a_plan_is_in_bf16_if_the_device_has_it(arguments, precision, capsys):
    plan = planned(*arguments.split(), "--world-size", "64")
    assert plan.settings.precision == precision
    assert f"parameters, in {precision}, on 64 ranks" in next(plan_lines(plan))
    assert said(capsys, "plan", *arguments.split(), *"--world-size 8 --tflops 9 --sweep".split()).startswith(
        f"llama-8b, {precision}, "
    )


def test_a_command_to_paste_has_the_precision_of_its_plan(capsys):
    lines = said(
        capsys, "plan", *"--model llama-8b --world-size 64 --device h100 --precision fp32".split()
    ).splitlines()
    assert "--precision bf16" in lines[-1] and "To plan that:" in lines[-2]
    tried = said(
        capsys, "plan", *"--model llama-8b --world-size 8 --device a100 --precision fp32 --lora-rank 8".split()
    )
    pasted = tried.splitlines()[-1].split()[3:]
    assert f", in {planned(*pasted[1:]).settings.precision}, on" in said(capsys, *pasted).splitlines()[0]


@pytest.mark.parametrize("model, batch", [("vit-b16", 8), ("llama-8b", 8192)])
def test_what_is_not_said(model, batch):
    plan = planned("--model", model, "--world-size", "4", "--device-memory-gb", "80")
    assert plan.settings == Settings(batch=batch)
    assert plan.cluster == Cluster(world_size=4, device_memory_bytes=80e9)


def test_the_sentence_on_speed_goes_from_the_shortest_step_to_the_longest():
    plan = planned("--model", "vit-b16", "--world-size", "2", "--device-memory-gb", "80", "--images", "6")
    # 3 s of arithmetic and 1 s of communication, half of which hides: 12 images in 3.5 s, or in 3 to 4 s
    gather = CollectiveCount(op="all_gather", count=1, bytes=2_000, sent_bytes=1_000)
    slow = replace(plan.cluster, flops_per_s=1e3, bandwidth_bytes_per_s=1e3)
    seconds = {"arithmetic_s": 3.0, "communication_s": 1.0, "optimizer_s": 0.0, "estimate_s": 3.5}
    time = StepTime(**seconds, shortest_s=3.0, longest_s=4.0, spans=())
    plan = replace(plan, step_flops=3_000, collectives=(gather,), cluster=slow, time=time)
    assert list(plan_lines(plan))[-5:] == [
        "A rank sends 1.00 kB in a step: 1.00 s at 1.00 kB/s.",
        "A step takes 3.50 s: arithmetic 3.00 s, waiting 500 ms, the optimizer not counted.",
        "The optimizer's update is limited by memory bandwidth; name a --device to include it.",
        "Between 3.00 s and 4.00 s: the first with all communication hidden behind arithmetic; the second with none, "
        "and rates 25% lower.",
        "3 images/s over all ranks (3 to 4), 2 per rank, 2.96e+05 a day.",
    ]


@pytest.mark.parametrize("model", ["vit-10b", "llama-70b"])
def test_large_models_without_torch_or_memory(model):
    arguments = ["plan", "--model", model, "--world-size", "1024", "--device-memory-gb", "24"]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH, *arguments], capture_output=True, text=True, check=True, timeout=240
    )
    status, torch_is_there, kilobytes = done.stderr.split()
    assert (status, torch_is_there) == ("0", "False")
    assert 1024 * int(kilobytes) < 2e9


def test_a_reader_that_has_seen_enough_ends_it_quietly():
    """As `plan ... | head -1` does, whose pipe is closed before all is written."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "fsdp_helpers", *WHOLE]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, check=False, timeout=240)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"world_size": "0"}, "world_size is 0; it must be a whole number"),
        ({"world_size": "many"}, "--world-size: invalid int value"),
        ({"bandwidth_gb_s": "-1"}, "bandwidth_bytes_per_s is -1000000000.0; it must be a number above zero"),
        ({"model": "vit-11b"}, "--model: invalid choice: 'vit-11b'"),
        ({"device_memory_gb": "0"}, "device_memory_bytes is 0.0"),
        ({"allowance_gb": "-4"}, "allowance_bytes is -4000000000.0; it must be a number, zero or more"),
        ({"tokens": "8"}, "--tokens: a batch of vit-10b is counted in images; use --images"),
        ({"strategy": "local"}, "strategy 'local' trains in one process"),
        ({"device": "t4", "precision": "bf16"}, "T4 doesn't support bf16"),
        ({"world_size": "10000000000"}, "the planner supports at most 1,048,576 ranks"),
        ({"context": "8"}, "--context is only for language models"),
        ({"latency_us": "-1"}, "between_latency_s is "),
        ({"total": "-1"}, "--total is -1.0"),
        ({"hours_between_failures": "0"}, "--hours-between-failures is 0.0"),
        ({"goodput": "0.5"}, "give --total as well"),
        ({"goodput": "1.5", "total": "10"}, "--goodput is 1.5; it's a share"),
        ({"days": "30"}, "--days needs a sweep to find the fewest GPUs"),
        ({"global_batch": "1500"}, "use a multiple of that"),
        ({"global_batch": "1024", "micro_batches": "2"}, "leave out --micro-batches"),
        ({"api": "fsdp1"}, "the planner covers FSDP2 (fully_shard), and api is 'fsdp1'"),
        ({"lora_rank": "0", "model": "llama-8b"}, "lora_rank is 0"),
        ({"device": "v100", "precision": "pure-bf16"}, "doesn't support bf16; use --precision fp16"),
        ({"loss_chunks": "4"}, "--loss-chunks is only for language models"),
        ({"strategy": "ddp", "sharding": "grad-op"}, "sharding and backward_prefetch are FSDP settings"),
        ({"tokens": "100", "model": "llama-8b"}, "isn't a multiple of the sequence length"),
        ({"context": "0", "model": "llama-8b"}, "context is 0"),
        ({"total": "10"}, "GPU-hours need a rate; name a --device, or give --tflops"),
        ({"sharding": "hybrid", "replicas": "3"}, "use a multiple of 3"),
        ({"json": "no-such-folder/plan.json"}, "the folder no-such-folder doesn't exist"),
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


# ---------------------------------------------------------------- models by file

THREE_B = {
    "model_type": "llama", "hidden_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 24,
    "num_key_value_heads": 8, "intermediate_size": 8192, "vocab_size": 128256, "max_position_embeddings": 131072,
    "tie_word_embeddings": True, "head_dim": 128,
}  # fmt: skip


@pytest.fixture
def three_b(tmp_path) -> list[str]:
    """The arguments that name Llama 3.2 3B, which has 3,212,749,824 parameters, by its file."""
    (tmp_path / "config.json").write_text(json.dumps(THREE_B))
    return ["--config", str(tmp_path)]


def test_a_file_gives_the_plan_of_its_shape(three_b):
    plan = planned(*three_b, "--world-size", "8", "--device", "h100", "--precision", "bf16")
    shape = llama_subject("", LlamaShape(**LLAMA_3B))
    by_shape = make_plan(shape, plan.settings, plan.cluster)
    assert plan.num_params == by_shape.num_params == 3_212_749_824
    assert (plan.peak, plan.time) == (by_shape.peak, by_shape.time)


@pytest.mark.parametrize(
    "text, message",
    [
        (None, "No such file or directory; give a model's config.json"),
        ("nonsense", "isn't JSON"),
        ("{}", "has no model_type"),
    ],
)
def test_files_that_are_no_such_model(text, message, tmp_path, capsys):
    path = tmp_path / "config.json"
    if text is not None:
        path.write_text(text)
    assert main(["plan", "--config", str(path), "--world-size", "8", "--device-memory-gb", "80"]) == 2
    said = capsys.readouterr()
    assert message in said.err and len(said.err.splitlines()) == 1


def test_half_a_batch_is_never_half_a_sequence(three_b):
    plan = planned(*three_b, *"--world-size 8 --device-memory-gb 9 --precision bf16 --tokens 24576".split())
    halves = [text for text, _ in possible_changes(plan, llama_subject("", LlamaShape(**LLAMA_3B))) if "halve" in text]
    assert halves == ["halve a rank's batch to 8,192 tokens (--tokens 8192)"]


LLAMA_3B = {
    "width": 3072, "depth": 28, "num_heads": 24, "num_kv_heads": 8, "mlp_width": 8192, "vocabulary": 128256,
    "tied": True,
}  # fmt: skip
