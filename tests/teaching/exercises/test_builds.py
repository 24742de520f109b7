"""The build exercises: what is folded in the notebooks as their solution is what is run here."""

import re
import sys
import time
from inspect import signature

import nbformat
import pytest
from leftovers import PROJECT

from fsdp_helpers.teaching.exercises import (
    auto_wrap,
    checkpointing,
    ddp,
    fsdp,
    language,
    levers,
    moving,
    offload,
    on_ranks,
    planning,
    real_model,
)
from fsdp_helpers.teaching.exercises.answers import NotYet

CHAPTERS = (auto_wrap, checkpointing, ddp, fsdp, language, levers, moving, offload, planning, real_model)
NOTEBOOKS = PROJECT / "notebooks"
SOLUTION = re.compile(r"<summary>Solution</summary>.*?```python\n(.*?)```", re.DOTALL)
CHECKERS = {
    "my_ddp": ddp.check_average_gradients,
    "my_unit": fsdp.check_unit,
    "my_cut": auto_wrap.check_cut,
    "my_hooks": auto_wrap.check_hooks,
    "my_plan": offload.check_plan,
    "my_loop": checkpointing.check_loop,
    "my_accumulation": levers.check_accumulation,
    "my_start": real_model.check_start,
    "my_batch": planning.check_batch,
    "my_move": moving.check_move,
    "my_tokens": language.check_token_loss,
    "my_chunks": language.check_chunks,
    "my_adapters": language.check_adapters,
}
WITHOUT_RANKS = ("my_plan", "my_batch")
ON_RANKS = [name for name in CHECKERS if name not in WITHOUT_RANKS]


def exercises() -> dict[str, tuple[str, str, str]]:
    """By module: the starter, the folded solution and the call of the checker, as the notebooks have them."""
    found = {}
    for path in sorted(NOTEBOOKS.glob("*.ipynb")):
        cells = nbformat.read(path, as_version=4).cells
        for text, starter, check in zip(cells, cells[1:], cells[2:], strict=False):
            magic, _, code = starter.source.partition("\n")
            if starter.cell_type == "code" and magic.startswith("%%writefile my_"):
                (solution,) = SOLUTION.findall(text.source)
                found[magic.split()[1].removesuffix(".py")] = code, solution, check.source
    return found


EXERCISES = exercises()


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes a module of the reader; ranks and this process find it in the current folder's stead."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(name: str, code: str) -> str:
        (tmp_path / f"{name}.py").write_text(code)
        return name

    yield write
    for name in CHECKERS:
        sys.modules.pop(name, None)


def check(name: str, **settings) -> str:
    return CHECKERS[name](name, **settings)


def fewer(name: str) -> dict:
    """Half of the evidence: one launch on 2 ranks; of the loop, which needs two numbers of ranks, all of it."""
    return {} if name in (*WITHOUT_RANKS, "my_loop") else {"ranks": (2,)}


def changed(name: str, *changes: tuple[str, str]) -> str:
    """The folded solution with something in it changed."""
    code = EXERCISES[name][1]
    for old, new in changes:
        assert old in code, f"{old!r} is not in the solution of {name}"
        code = code.replace(old, new)
    return code


# ---------------------------------------------------------------- accepted


@pytest.mark.parametrize("name", CHECKERS)
def test_the_folded_solution_is_accepted(write, name):
    assert check(write(name, EXERCISES[name][1]), **fewer(name)).startswith("Right")


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in ON_RANKS if name != "my_loop"])
def test_the_folded_solution_is_accepted_on_three_ranks_too(write, name):
    assert check(write(name, EXERCISES[name][1]), ranks=(3,)).startswith("Right")


OTHER_WAYS = {
    # all gradients as one tensor, cut wherever a bucket is full
    "my_ddp": """
import torch
import torch.distributed as dist

def average_gradients(model, bucket_bytes):
    gradients = [parameter.grad for parameter in model.parameters()]
    flat = torch.cat([gradient.flatten() for gradient in gradients]) / dist.get_world_size()
    for part in flat.split(bucket_bytes // 4):
        dist.all_reduce(part)
    start = 0
    for parameter in model.parameters():
        parameter.grad = flat[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()
""",
    # four units that take embed and head along, and a root with nothing of its own
    "my_cut": """
from torch.distributed.fsdp import fully_shard

def shard_model(model, mesh):
    modules = [model.embed, *model.blocks, model.head]
    for first, end in ((0, 3), (3, 5), (5, 7), (7, 10)):
        fully_shard(modules[first:end], mesh=mesh)
    return fully_shard(model, mesh=mesh)
""",
    "my_plan": """
import math

def blocks_to_offload(num_blocks, block_params, world_size, activation_bytes, device_bytes, host_bytes):
    left = device_bytes - activation_bytes - 8 * block_params
    if left < 0:
        return None
    staying = min(num_blocks, math.floor(left * world_size / (16 * block_params)))
    leaving = num_blocks - staying
    return leaving if 16 * block_params * leaving <= host_bytes else None
""",
    # a straight line through two plans tells nearly where to look, and steps of one tell exactly
    "my_batch": """
from fsdp_helpers.planning.models import named_subject
from fsdp_helpers.planning.plan import Cluster, Settings, make_plan

def largest_batch(model, world_size, device_gb, allowance_gb):
    memory = {"device_memory_bytes": device_gb * 1e9, "allowance_bytes": allowance_gb * 1e9}
    cluster, subject = Cluster(world_size=world_size, **memory), named_subject(model)

    def spare(images):
        return make_plan(subject, Settings(batch=images, activation_checkpointing="units"), cluster).spare_bytes

    step = (spare(10_000) - spare(20_000)) / 10_000
    images = max(1, 10_000 + int(spare(10_000) / step))
    while images > 1 and spare(images) < 0:
        images -= 1
    while spare(images + 1) >= 0:
        images += 1
    return images if spare(images) >= 0 else None
""",
    # one file in rank 0's name, which is there at once or not at all
    "my_loop": """
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)

def train_loop(model, optimizer, schedule, loss_of, folder, num_steps):
    path, first_step = Path(folder, "newest.pt"), 0
    if path.exists():
        first_step, of_model, of_adam, of_schedule = torch.load(path, weights_only=True)
        settings = StateDictOptions(full_state_dict=True)
        set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_adam, options=settings)
        schedule.load_state_dict(of_schedule)
    for step in range(first_step, num_steps):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        schedule.step()
        if step % 2:
            states = get_state_dict(model, optimizer, options=WHOLE)
            if dist.get_rank() == 0:
                torch.save((step + 1, *states, schedule.state_dict()), f"{path}.tmp")
                os.replace(f"{path}.tmp", path)
""",
    "my_accumulation": """
import torch

def add_up_gradients(model, parts, loss_of):
    model.set_requires_gradient_sync(False)
    for part in parts[:-1]:
        (loss_of(model, *part) / len(parts)).backward()
    model.set_requires_gradient_sync(True)
    (loss_of(model, *parts[-1]) / len(parts)).backward()

def gradient_norm(model):
    return torch.nn.utils.clip_grad_norm_(model.parameters(), float("inf")).full_tensor().item()
""",
    # straight from meta to values: rank 0's take the place of the shapes, and only the buffer needs room
    "my_start": """
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

def start_sharded(build, weights, mesh):
    with torch.device("meta"):
        model = build()
    for unit in (*model.blocks, model):
        fully_shard(unit, mesh=mesh)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for name, own in model.named_parameters():  # a tied one once; rank 0 fails if one is missing
            whole = weights[name] if weights else torch.empty(own.shape)
            own.copy_(distribute_tensor(whole, mesh, own.placements))
    model.fill_buffers()
    return model
""",
}


@pytest.mark.parametrize("name", OTHER_WAYS)
def test_another_way_is_accepted(write, name):
    assert check(write(name, OTHER_WAYS[name]), **fewer(name)).startswith("Right")


# ---------------------------------------------------------------- refused


STARTERS = {
    "my_ddp": "on 2 ranks.*no collective was seen",
    "my_unit": "on 2 ranks, my_unit.py fails: TypeError: a Unit needs `shard`",
    "my_cut": "on 2 ranks, rank 0: 100 parameters are in no unit",
    "my_hooks": "on 2 ranks, rank 0: after hook_block, blocks still have 44,992 bytes",
    "my_plan": "replace the ... with your answer",
    "my_loop": "killed in step 16 on 3 ranks and started again on 2, your loop begins with step 1: nothing was loaded",
    "my_accumulation": "on 2 ranks, with 4 parts, rank 0: nothing was reduced",
    "my_start": "on 2 ranks, rank 0: 97 tensors are in no unit",
    "my_batch": "replace the ... with your answer",
    "my_move": "on 2 ranks, rank 0: 10 parameters are whole, module.embed.weight among them",
    "my_tokens": "on 2 ranks, rank 0: nothing was reduced",
    "my_chunks": "my_chunks.py fails: TypeError: chunked_loss returns a NoneType; a tensor is asked for",
    "my_adapters": "adapters-2.safetensors cannot be read: FileNotFoundError",
}


@pytest.mark.parametrize("name", STARTERS)
def test_the_starter_fails_loudly(write, name):
    with pytest.raises(NotYet, match=STARTERS[name]) as refused:
        check(write(name, EXERCISES[name][0]))
    assert len(str(refused.value).splitlines()) == 1


WITH_TORCH = ("import torch.distributed as dist", "import torch\nimport torch.distributed as dist")
AS_ONE = "    parts = [tuple(torch.cat(column) for column in zip(*parts, strict=True))]\n"
ONE_BY_ONE = """    for index, (inputs, labels) in enumerate(parts):
        model.set_requires_gradient_sync(index == len(parts) - 1)  # the last backward reduces the sum
        loss = loss_of(model, inputs, labels) / len(parts)
        loss.backward()
"""
TOGETHER = """    losses = [loss_of(model, *part) / len(parts) for part in parts]
    model.set_requires_gradient_sync(False)
    for loss in losses[:-1]:
        loss.backward()
    model.set_requires_gradient_sync(True)
    losses[-1].backward()
"""
BY_SQUARES = """    squares = sum(parameter.grad.to_local().square().sum() for parameter in model.parameters())
    dist.all_reduce(squares)  # slices are parts of one gradient: their squares add up
    return squares.sqrt()
"""
CLIPPED = "    return torch.nn.utils.clip_grad_norm_(model.parameters(), {})\n"
ADD_KEY = """    if weights:  # rank 0's
        weights = {**weights, "head.weight": weights["embed.weight"]}
"""
KEPT = "loss_of_chunk(part, head, wanted)"
BY_TOKENS_ALONE = (  # a mean over each part's own tokens
    "loss = model(numbers, targets) / num_tokens",
    "loss = model(numbers, targets) / (targets != -100).sum() / len(parts) / dist.get_world_size()",
)
UNTIED = "    model.head.weight = torch.nn.Parameter(model.head.weight.detach().clone())\n"
AS_ONE_UNIT = ("fully_shard(list(pair), mesh=mesh)", "pass")
WRONG = [
    (
        "my_move",  # 1: the optimiser has the parameters that sharding replaced
        [
            ("    for block", "    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)\n    for block"),
            ("    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)  # 1: after sharding\n", ""),
        ],
        "my_move.py fails in line .*: KeyError",
    ),
    (
        "my_move",
        [('name.removeprefix("module.")', "name")],
        "my_move.py fails in line .*Missing key.*save-module-prefix",
    ),  # 2
    (
        "my_move",  # 3
        [
            (
                "set_optimizer_state_dict(model, optimizer, adam, options=options)",
                'optimizer.load_state_dict(saved["optimizer"])',
            )
        ],
        "my_move.py fails in line .* got mixed torch.Tensor and DTensor.*crash-mixed-tensor-dtensor",
    ),
    (
        "my_move",
        [("    set_optimizer_state_dict(model, optimizer, adam, options=options)\n", "")],
        "the losses leave those of the run that stayed.* in step 2 .*save-plain-optimizer-state",
    ),
    (
        "my_move",
        [("    set_model_state_dict(model, weights, options=options)\n", "")],
        "not that of the file's weights",
    ),
    (
        "my_move",  # 4
        [("        model.set_requires_gradient_sync(False)  # 4: instead of no_sync\n", "        model.no_sync()\n")],
        "has no attribute 'no_sync'",
    ),
    (
        "my_move",
        [("        model.set_requires_gradient_sync(True)\n", "")],
        "the losses leave those of the run that stayed",
    ),
    (
        "my_move",  # 5
        [("            loss_of(model, held_out)", "            mesh.get_rank() or loss_of(model, held_out)")],
        "the ranks' collectives do not match.*crash-skipped-step|does not end.*hang-order",
    ),
    (
        "my_move",
        [("get_model_state_dict(model, options=options)", "model.state_dict()")],
        "in the file is a slice",
    ),  # 6
    ("my_move", [("        fully_shard(block, mesh=mesh)\n", "        pass\n")], "the units are root; one per block"),
    ("my_ddp", [("    flat /= dist.get_world_size()\n", "")], "the losses are not those of DDP.*wrong-summed-loss"),
    ("my_ddp", [("size + parameter.grad.nbytes > bucket_bytes", "bucket")], "6 collectives were seen"),
    (
        "my_ddp",  # one all-reduce per gradient and a sum: the losses come first, as the first hint does
        [("size + parameter.grad.nbytes > bucket_bytes", "bucket"), ("    flat /= dist.get_world_size()\n", "")],
        "the losses are not those of DDP: .* in step 2",
    ),
    ("my_ddp", [("size + parameter.grad.nbytes > bucket_bytes", "False")], "47.7 kB were sent in one collective"),
    ("my_ddp", [("    average(bucket)  # the last one, full or not\n", "")], "the losses are not those of DDP"),
    ("my_ddp", [("dist.all_reduce(flat)", "dist.all_sum(flat)")], r"my_ddp.py fails in line 18: AttributeError"),
    ("my_unit", [("        self.shard.grad /= self.world_size\n", "")], "one process.*wrong-summed-loss"),
    (
        "my_unit",  # divided as if there were always two ranks
        [("        self.shard.grad /= self.world_size\n", "        self.shard.grad /= 2\n")],
        "on 3 ranks.*instead of .* in step 2",  # the first loss comes before any gradient
    ),
    ("my_unit", [("parameter.data = torch.empty(0)", "pass")], "bytes are held after __init__"),
    ("my_unit", [("        self.free()\n\n", "\n")], "bytes are held after __init__, more than a slice needs"),
    (
        "my_unit",
        [("            parameter.grad = None\n", "            pass\n")],
        "bytes are held between steps, more than four slices need",
    ),
    (
        "my_unit",  # only rank 0 frees
        [
            ("        self.world_size = world_size\n", "        self.world_size, self.rank = world_size, rank\n"),
            ("parameter.data = torch.empty(0)", "parameter.data = parameter.data if self.rank else torch.empty(0)"),
        ],
        "on 2 ranks, rank 1: .* bytes are held after __init__",
    ),
    (
        "my_unit",
        [
            ("dist.reduce_scatter_tensor(self.shard.grad, whole)", "dist.all_reduce(whole)"),
            ("torch.empty_like(self.shard)", "whole.chunk(self.world_size)[dist.get_rank()].clone()"),
        ],
        "'all_reduce': 1",
    ),
    ("my_unit", [("(0, -len(flat) % self.world_size)", "(0, 0)")], "my_unit.py fails|are all equally long"),
    (
        "my_hooks",  # zeros take as many bytes
        [("        storage.resize_(0)\n", "        whole.zero_()\n")],
        "after hook_block, blocks still have 4.,... bytes",
    ),
    (
        "my_hooks",
        [("    block.register_forward_hook(reshard)\n", "")],
        "between forward and backward, blocks still have .* bytes",
    ),
    (
        "my_hooks",
        [("    block.register_full_backward_pre_hook(unshard)\n", "")],
        "RuntimeError: in backward, a layer computes while the storage of its block is empty",
    ),
    (
        "my_hooks",  # the first gradient to arrive frees the block
        [
            ("            reshard()\n", "            pass\n"),
            ("        arrived.append(parameter)\n", "        reshard()\n"),
        ],
        "in backward, a layer computes while the storage of its block is empty",
    ),
    ("my_hooks", [("            reshard()\n", "            pass\n")], "after backward, blocks still have"),
    ("my_hooks", [("        gather(whole)\n", "        pass\n")], "0 gathers in a step, not 8"),
    (
        "my_hooks",  # gathered before there is room for it
        [("        storage.resize_(num_bytes)\n        gather(whole)\n", "        gather(whole)\n")],
        "gather fills a tensor whose storage is still empty",
    ),
    ("my_cut", [AS_ONE_UNIT], "the peak is .* the target below"),
    (
        "my_cut",
        [("fully_shard(list(pair), mesh=mesh)", "[fully_shard(one, mesh=mesh) for one in pair]")],
        "26 collectives",
    ),
    (
        "my_cut",  # four single blocks, and four are the root's: few collectives, and a low peak
        [("for pair in zip(blocks[::2], blocks[1::2], strict=True):", "for pair in zip(blocks[4:]):")],
        "blocks.0, blocks.1, blocks.2, blocks.3 belong to no unit but the root",
    ),
    (
        "my_cut",
        [
            ("    blocks = list", "    fully_shard(model, mesh=mesh)\n    blocks = list"),
            ("    fully_shard(model, mesh=mesh)  # the root, last: embed and head\n", ""),
        ],
        "my_cut.py fails in line 8: a part of a unit was made a unit after it; inner ones first, the root last",
    ),
    (
        "my_cut",
        [("fully_shard(model, mesh=mesh)  # the root", "pass  # the root")],
        "my_cut.py fails: RuntimeError: FSDP requires a single root module",
    ),
    ("my_plan", [("range(num_blocks + 1)", "range(1, num_blocks + 1)")], "fits with fewer blocks|does fit both"),
    ("my_plan", [("<= device_bytes", "< device_bytes")], "does fit both memories|fits with fewer"),
    ("my_plan", [("range(num_blocks + 1)", "range(num_blocks)")], "does fit both memories"),
    (
        "my_plan",
        [("on_host = offloaded * state_bytes", "on_host = offloaded * state_bytes / world_size")],
        "the host would be",
    ),
    ("my_plan", [("    return None\n", "    return 0\n")], "would be too small"),
    ("my_plan", [("            return offloaded\n", "            return str(offloaded)\n")], "a number is asked for"),
    ("my_plan", [("at_work = 8", "at_work = none")], "fails: NameError"),
    (
        "my_batch",
        [(', "allowance_bytes": allowance_gb * 1e9', "")],
        "too much, with what lies outside the count|one image",
    ),
    ("my_batch", [("return fitting\n", "return too_many\n")], "that is .* too much"),
    ("my_batch", [("while too_many - fitting > 1", "while False")], "one image more fits, too"),
    ("my_batch", [("activation_checkpointing=", 'precision="bf16", activation_checkpointing=')], "too much|fits, too"),
    ("my_batch", [("        return None\n", "        return 0\n")], "not even one image fits the answer is None"),
    ("my_batch", [("    return fitting\n", "    return 64\n")], "that is .* too much|one image more fits|does fit"),
    (
        "my_loop",
        [('        schedule.load_state_dict(state["schedule"])\n', "")],
        "an undisturbed run a different one.*save-schedule-lost",
    ),
    (
        "my_loop",
        [("set_state_dict(model, optimizer,", "print(model, optimizer,")],
        "undisturbed run a different one|fails",
    ),
    ("my_loop", [('first_step = state["step"]', 'first_step = state["step"] + 1')], "goes on with step 14; it saves"),
    ("my_loop", [("% 2 == 0", "% 3 == 0")], "killed in step 16 .* goes on with step 16; it saves after every second"),
    # one folder, overwritten; a part of it is new when the save is cut short
    ("my_loop", [('f"{step + 1:06}"', '"newest"')], "killed in the save after step 14 .* written by the same save"),
    ("my_loop", [("{step + 1:06}", "{step + 1}")], "goes on with step 9; .* of what was saved whole the newest counts"),
    (
        "my_loop",
        [('glob("*/.metadata")', 'glob("*")'), ("whole[-1].parent", "whole[-1]")],
        "fails; is all that it finds whole",
    ),
    ("my_accumulation", [("index == len(parts) - 1", "True")], "12 reduce-scatters were seen.*memory-accumulation"),
    ("my_accumulation", [("index == len(parts) - 1", "False")], "nothing was reduced"),
    ("my_accumulation", [(" / len(parts)", "")], "4.00 times as long as in one process .*wrong-summed-loss"),
    (
        "my_accumulation",
        [("    dist.all_reduce(squares)", "    pass")],
        "not the norm of the whole gradient.*wrong-local-norm-logged",
    ),
    (
        "my_accumulation",
        [("    dist.all_reduce(squares)", "    dist.reduce(squares, 0)")],
        "rank 1: gradient_norm says",
    ),
    (
        "my_accumulation",
        [WITH_TORCH, ("    for index", AS_ONE + "    for index")],
        "rank 0: a forward takes 12 images at once; a part has 3",
    ),
    ("my_accumulation", [(ONE_BY_ONE, TOGETHER)], "the second forward comes before the first backward"),
    ("my_accumulation", [WITH_TORCH, (BY_SQUARES, CLIPPED.format(1e9))], "gradient_norm returns a DTensor; a number"),
    (
        "my_accumulation",
        [WITH_TORCH, (BY_SQUARES, CLIPPED.format(0.1).rstrip() + ".full_tensor()\n")],
        "gradient_norm changes the gradient it looks at",
    ),
    ("my_start", [('with torch.device("meta")', "if True")], "besides what stays, .* whole for a moment"),
    ("my_start", [("    model.fill_buffers()\n", "")], "the buffer does not have its values.*wrong-meta-buffers"),
    ("my_start", [("        fully_shard(block, mesh=mesh)", "        pass")], "the units are root; one per block"),
    (
        "my_start",
        [("model.to_empty(device=mesh.device_type)", "pass")],
        "1 tensors are still on meta, waves .*wrong-meta-buffers",
    ),
    (
        "my_start",
        [("set_model_state_dict(model, weights, options=options)", "torch.nn.init.normal_(model.head.weight)")],
        "the losses are not those of rank 0's weights",
    ),
    ("my_start", [(ADD_KEY, "")], 'my_start.py fails in line .*: RuntimeError: .*Missing key.* "head.weight"'),
    (
        "my_start",
        [(ADD_KEY, ""), ("broadcast_from_rank0=True)", "broadcast_from_rank0=True, strict=False)")],
        "from weights without blocks.3.linear1.weight your model starts, too",
    ),
    (
        "my_start",
        [("    model.fill_buffers()\n", UNTIED + "    model.fill_buffers()\n")],
        "rank 0: head.weight and embed.weight are two parameters.*crash-tied-weights",
    ),
    ("my_start", [("    return model", "    return None")], "returns a NoneType; the model is asked for"),
    ("my_tokens", [("    dist.all_reduce(num_tokens)", "    pass")], "the gradient is .* times as long as in one"),
    (
        "my_tokens",
        [(" * dist.get_world_size()", "")],
        "the gradient is 0.500 times as long as in one process .*wrong-summed-loss",
    ),
    ("my_tokens", [("index == len(parts) - 1", "True")], "6 reduce-scatters were seen; the model has 3 units"),
    ("my_tokens", [("    dist.all_reduce(total)\n", "")], "the loss returned is"),
    ("my_tokens", [BY_TOKENS_ALONE], "the gradient is .* one process"),
    (
        "my_chunks",
        [("checkpoint(loss_of_chunk, part, head, wanted, use_reentrant=False)", KEPT)],
        "6.14 MB, the target is below 4.84 MB; which",
    ),
    ("my_chunks", [(".chunk(4)", ".chunk(1)")], "the target is below 4.84 MB; which logits does backward still have"),
    ("my_chunks", [('reduction="sum"', 'reduction="mean"')], "the sum of the losses is"),
    ("my_adapters", [(" if parameter.requires_grad", "")], "tensors that are not trained, .* among them"),
    ("my_adapters", [("detach().full_tensor()", "detach().to_local().clone()")], "are not whole; a rank has its rows"),
    ("my_adapters", [("        parameter.copy_(own)\n", "        pass\n")], "after loading, logits are .* off those"),
]


@pytest.mark.parametrize("name, changes, message", WRONG)
def test_wrong_builds_are_refused_in_one_line(write, name, changes, message):
    with pytest.raises(NotYet, match=message) as refused:
        check(write(name, changed(name, *changes)))
    assert len(str(refused.value).splitlines()) == 1


STUCK = """
import torch.distributed as dist

def average_gradients(model, bucket_bytes):
    if dist.get_rank() == 0:
        dist.barrier()
"""


def test_ranks_that_wait_for_one_another_are_refused_with_the_place(write, monkeypatch):
    monkeypatch.setattr(on_ranks, "STALL_S", 2.0)
    start_s = time.monotonic()
    with pytest.raises(NotYet) as caught:
        ddp.check_average_gradients(write("my_ddp", STUCK))
    assert time.monotonic() - start_s < 40 < on_ranks.TIMEOUT_S
    assert "rank 0 was waiting in barrier(), called from my_ddp.py line 6, in average_gradients;" in str(caught.value)
    assert "rank 1 was waiting in all_reduce(), called from exchange.py" in str(caught.value)
    assert str(caught.value).endswith("(in notebook 11: hang-order, hang-gather-on-rank-0)")
    assert "\n" not in str(caught.value)


def test_the_package_s_own_answer_is_refused(write):
    code = "from fsdp_helpers.teaching.lessons.by_hand import FlatUnit as Unit\n"
    with pytest.raises(NotYet, match="my_unit.py imports fsdp_helpers; write it with torch alone"):
        check(write("my_unit", code))


def test_a_file_that_is_there_before_it_is_whole_is_refused(write):
    """As the other way, but written in its place."""
    code = OTHER_WAYS["my_loop"]
    at_once = code.replace('f"{path}.tmp")\n', "path)\n").replace(
        '                os.replace(f"{path}.tmp", path)\n', ""
    )
    assert code.count("\n") == at_once.count("\n") + 1
    with pytest.raises(
        NotYet, match="in the save after step 14 .* your loop fails; is all that it finds whole.*save-half-written"
    ):
        check(write("my_loop", at_once))


@pytest.mark.parametrize("name", CHECKERS)
def test_modules_that_cannot_be_read(write, name):
    """Before anything is launched."""
    with pytest.raises(NotYet, match=f"there is no {name}.py here; run the cell that writes it"):
        check(name)
    with pytest.raises(NotYet, match=rf"{name}.py cannot be imported: SyntaxError: .*line 1"):
        check(write(name, "def broken(:\n"))
    with pytest.raises(NotYet, match=f"{name}.py has no "):
        check(write(name, "# nothing yet\n"))
    with pytest.raises(NotYet, match="the name of your module is asked for"):
        CHECKERS[name](sys)


def test_lookup_tables_of_sizes_are_refused(write):
    with pytest.raises(NotYet):
        check(write("my_plan", "def blocks_to_offload(*sizes):\n    return {(8, 1000, 2, 0, 0, 0): 3}.get(sizes)\n"))


# ---------------------------------------------------------------- the notebooks


def test_every_build_has_its_exercise_and_its_checker():
    assert EXERCISES.keys() == CHECKERS.keys()
    found = [pair for chapter in CHAPTERS for pair in vars(chapter).items() if pair[0].startswith("check_")]
    builds = {name for name, checker in found if "module" in signature(checker).parameters}
    assert {checker.__name__ for checker in CHECKERS.values()} == builds
    for name, (starter, solution, check_cell) in EXERCISES.items():
        compile(starter, name, "exec"), compile(solution, name, "exec")
        assert "..." in starter and "..." not in solution
        assert f'exercises.{CHECKERS[name].__name__}("{name}")' in check_cell
