"""`explain` leads from what people wrote in public threads to a right card, and says so where it knows none."""

import io
import re
import sys

import pytest
from runs import main_in_process

from fsdp_helpers.cli import explain
from fsdp_helpers.teaching.failures.gallery import GALLERY
from fsdp_helpers.teaching.failures.sights import SIGHTS

# The words or the message of a thread, the thread, and the cards that would be right. Collected before the index was made.
SYMPTOMS = [
    (
        "job finishes the final training step but freezes when it tries to gather & save the full state dict",
        "pytorch#143536",
        {"hang-gather-on-rank-0", "memory-full-state-dict"},
    ),
    ("works fine with ddp, hangs with FSDP at the end of evaluation", "accelerate#2375", {"hang-uneven-batches"}),
    ("layerdrop would cause model training to hang", "fairscale#796", {"wrong-unused-units"}),
    (
        "RuntimeError: aten.embedding.default: got mixed torch.Tensor and DTensor, need to convert all torch.Tensor to "
        "DTensor before calling distributed operators!",
        "pytorch#156535",
        {"crash-mixed-tensor-dtensor"},
    ),
    (
        "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: exitcode  : 1 (pid: 11377) error_file: <N/A> "
        "traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html",
        "Chinese-Vicuna#113",
        {"crash-no-traceback"},
    ),
    ("failed (exitcode: -9) local_rank: 0 (pid: 27657) of binary:", "FastChat#568", {"memory-every-rank-loads"}),
    (
        "ValueError: Must flatten tensors with uniform dtype but got torch.bfloat16 and torch.float32",
        "trl#1723",
        {"crash-uniform-dtype"},
    ),
    (
        "torch.utils.checkpoint.CheckpointError: torch.utils.checkpoint: A different number of tensors was saved during "
        "the original forward and recomputation.",
        "TinyLlama#152",
        {"crash-checkpoint-branch"},
    ),
    (
        "Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1580, OpType=ALLREDUCE, NumelIn=466119168, "
        "NumelOut=466119168, Timeout(ms)=600000) ran for 600060 milliseconds before timing out.",
        "LlamaFactory#7396",
        {"hang-nccl-watchdog"},
    ),
    (
        "training has finished, then failed (exitcode: -6) local_rank: 0; destroy_process_group() was not called before "
        "program exit",
        "ms-swift#5772",
        {"hang-after-last-step"},
    ),
    (
        "gradient norm at initialization is 4x different between 8 nodes and 1 node",
        "torchtune#2240",
        {"wrong-local-norm-logged"},
    ),
    (
        "every time I resume, it seems to restart from scratch (optimizer.state_dict saved, load_state_dict)",
        "fairscale#601",
        {"save-plain-optimizer-state"},
    ),
    (
        "RuntimeError: No backend type associated with device type cpu (gradient clipping with CPU offload)",
        "torchtune#1977",
        {"crash-offload-device"},
    ),
    (
        "processes of GPUs 1, 2, 3 use almost a GB each on GPU 0",
        "apex#222",
        {"memory-map-location", "crash-duplicate-gpu"},
    ),
    (
        "NCCL error: unhandled system error, ncclSystemError: System call (socket, malloc, munmap, etc) failed.",
        "nccl#697",
        {"crash-nccl-system-error"},
    ),
    (
        "RuntimeError: The server socket has failed to listen on any local network address. port: 29500, useIpv6: 0, "
        "code: -98, name: EADDRINUSE, message: address already in use",
        "mochi-xdit#22",
        {"crash-port-in-use"},
    ),
    ("FSDP2: parameter not updating, loss does not decrease", "pytorch#149205", {"wrong-optimizer-first"}),
    (
        "very bad convergence with bf16; model loaded with torch_dtype=torch.bfloat16 performs worse than without",
        "torchtune#2254",
        {"wrong-bf16-masters"},
    ),
    (
        "load_state_dict(..., strict=False) succeeds without loading anything, model produces garbage; keys begin with "
        "module. or _orig_mod.",
        "sam3#606",
        {"save-not-loaded", "save-module-prefix"},
    ),
    ("NotImplementedError: Cannot copy out of meta tensor; no data!", "transformers#27166", {"crash-meta-tensor"}),
]
# Twenty more, collected by somebody who did not write the index. Before it was extended, three of them were found both ways.
MORE = [
    (
        "Adding `torch.distributed.barrier()`, makes the training process hang indefinitely. Run training in multiple GPUs, run the validation step on just one GPU, and use `torch.distributed.barrier()` to make the other processes wait until validation is done.",
        "pytorch#54059",
        {"hang-gather-on-rank-0"},
    ),
    ("RuntimeError: CUDA error: invalid device ordinal", "mace#435", {"crash-invalid-device"}),
    (
        "RuntimeError: Missing key in checkpoint state_dict: optimizer.state.0.step.",
        "accelerate#3971",
        {"save-missing-key"},
    ),
    (
        "include/shm.h:28 NCCL WARN Call to posix_fallocate failed: No space left on device\ninclude/shm.h:48 NCCL WARN Error while creating shared memory segment nccl-shm-recv-250a7cc850ba9298-0-1-3 (size 9637888)",
        "nccl#342",
        {"crash-nccl-system-error", "crash-shared-memory"},
    ),
    (
        "terminate called after throwing an instance of 'gloo::IoException'\n  what():  [/opt/conda/conda-bld/pytorch_1544084119927/work/third_party/gloo/gloo/transport/tcp/pair.cc:724] connect [127.0.1.1]:3210: Connection refused",
        "pytorch#15592",
        {"hang-wrong-interface"},
    ),
    (
        "When using fsdp1, all is good, while switched to fsdp2, the loss is not decreasing and grad_norm = 0 for all training steps.",
        "VeOmni#118",
        {"save-not-loaded", "save-not-set", "wrong-meta-buffers"},
    ),
    (
        "I was wondering why my dpo training scripts were failing when using big datasets and found out that it is happening always after 30 minutes.",
        "trl#1519",
        {"hang-default-timeout"},
    ),
    (
        "When using the torch.utils.data.distributed.DistributedSampler () function, the data set cannot be shuffled, and each epoch samples the data in the same order.",
        "pytorch#31771",
        {"wrong-set-epoch"},
    ),
    (
        "[E ProcessGroupNCCL.cpp:828] [Rank 2] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=18364, OpType=ALLGATHER, Timeout(ms)=4800000) ran for 4804648 milliseconds b",
        "accelerate#2000",
        {"hang-gather-on-rank-0", "hang-nccl-watchdog"},
    ),
    (
        "I am trying to load llama 2 70B using FSDP onto 8 GPUs on a node. It appears that 8 processes responsible for FSDP all try to load the full model, causing the CPU memory usage pike to over 1T.",
        "litgpt#456",
        {"memory-every-rank-loads"},
    ),
    ("train.py: error: unrecognized arguments: --local-rank=5", "SN-Net#2", {"crash-local-rank-argument"}),
    (
        "RuntimeError: one of the variables needed for gradient computation has been modified by an inplace operation: [torch.cuda.FloatTensor [1, 32]] is at version 3; expected version 2 instead.",
        "pytorch#22095",
        {"crash-buffer-in-place"},
    ),
    (
        "UserWarning: Failed to clone() tensor with name lm_head.weight. This may mean that this state_dict entry could point to invalid memory regions after returning from state_dict() call if this parameter is managed by FSDP. Please check clone implementation of lm_head.weight. Error: CUDA out of memory. Tried to allocate 502.00 MiB",
        "stanford_alpaca#65",
        {"memory-full-state-dict"},
    ),
    (
        'I want to train deep learning model with multiple GPU devices within a single node by pytorch. I do not know the exact reason, but the model "freeze"(stuck) when using 4 or more GPUs. So, while trying various things, I confirmed that the model works by setting the variable NCCL_P2P_DISABLE =1.',
        "nccl#631",
        {"hang-gpu-to-gpu"},
    ),
    ("RuntimeError: Expected to mark a variable ready only once.", "accelerate#389", {"crash-ready-twice"}),
    (
        "We ran into a sneaky bug in our codebase that broke loss evolution parity with xlformers. This gave us much higher loss than xlformer and it also stagnated much earlier. But surprisingly the model was still training and the loss still went down!",
        "torchtitan#166",
        {"wrong-different-seeds"},
    ),
    ("'weight' must be 2-D", "pytorch#100069", {"crash-mixed-tensor-dtensor"}),
    (
        "store = TCPStore(result.hostname, result.port, world_size, start_daemon)\nRuntimeError: Address already in use",
        "OpenNMT-py#1298",
        {"crash-port-in-use"},
    ),
    (
        'File "/usr/lib/python3.11/site-packages/torch/nn/utils/clip_grad.py", line 82, in clip_grad_norm_\n    clip_coef = max_norm / (total_norm + 1e-6)',
        "pytorch#148532",
        {"crash-offload-device"},
    ),
    (
        "this unwrap DDP module so that the training process become unsynchronized, i.e, no gradient communication in multi-gpu training, each node trains independently with part of the data. I ensure this by adding sleep in one of the worker and finding no hang in the main training process.",
        "sd-scripts#924",
        {"wrong-unwrapped-module"},
    ),
]
ALL = SYMPTOMS + MORE
NOT_FIRST = ("VeOmni#118",)  # "the loss is not decreasing" is also that of an optimizer built too early
IDS = [thread for _, thread, _ in ALL]


@pytest.mark.parametrize("said, thread, right", ALL, ids=IDS)
def test_a_symptom_leads_to_a_right_card(said, thread, right):
    """It is the first of the three that are printed or, of a few descriptions, one of the three."""
    found = [match.name for match in explain.find_cards(said)[: explain.MOST_CARDS]]
    assert right & set(found) and (found[0] in right or thread in NOT_FIRST)


@pytest.mark.parametrize("said, thread, right", ALL, ids=IDS)
def test_a_piece_of_it_is_on_the_page(said, thread, right):
    """Two to six neighboring words as they were written, or a long one: the browser finds them at three cards at most."""
    words = said.lower().split()
    pieces = {" ".join(words[at : at + size]) for size in range(2, 7) for at in range(len(words) - size + 1)}
    pieces |= {word for word in words if len(word) >= 9}
    rows = {
        name: "\n".join([GALLERY[name].title, *(sight.text for sight in sights)]).lower()
        for name, sights in SIGHTS.items()
    }
    found = {piece: {name for name, row in rows.items() if piece in row} for piece in pieces}
    assert [piece for piece, names in found.items() if names & right and len(names) <= 3], thread


def test_all_of_an_output_names_the_cause_first():
    """torchrun's report is in every output; the message above it tells more."""
    said = SYMPTOMS[3][0] + "\n" + SYMPTOMS[4][0]
    assert explain.find_cards(said)[0].name == "crash-mixed-tensor-dtensor"


UNKNOWN = (
    "ModuleNotFoundError: No module named 'pandas'",
    "SyntaxError: invalid syntax",
    "FileNotFoundError: [Errno 2] No such file or directory: 'data.csv'",
    "TypeError: unsupported operand type(s) for +: 'int' and 'str'",
    "ImportError: cannot import name 'foo' from 'bar'",
    "how do I change the font of my plot?",
    "my dog ate the homework",
    "42",
)


@pytest.mark.parametrize("said", UNKNOWN)
def test_what_it_does_not_know_it_says(said):
    assert explain.explain_text(said).startswith("No card matches this message.")


def test_the_command_prints_the_remedy(capsys):
    assert main_in_process("explain", "got mixed torch.Tensor and DTensor") == 0
    out = capsys.readouterr().out
    assert out.startswith("crash-mixed-tensor-dtensor: ") and "fix:      Call the unit." in out
    assert "11_when_it_breaks.ipynb#crash-mixed-tensor-dtensor" in out


def test_it_reads_from_a_pipe(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("step 1\nstep 2\nPytorchStreamReader failed reading zip archive\n"))
    assert main_in_process("explain") == 0
    assert capsys.readouterr().out.startswith("save-half-written: ")


def test_nothing_to_explain_is_bad_input(monkeypatch, capsys):
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n"))
    assert main_in_process("explain") == 2
    assert re.fullmatch(r"fsdp_helpers: explain: give a message.*\n", capsys.readouterr().err)


def test_rare_words_count_more():
    assert explain.weight({"watchdog"}) > explain.weight({"fail"})
    assert explain.words_of("Hangs in the 3 evaluations of a model") == {"hang", "evaluation", "model"}
    assert explain.words_of("decreasing") == explain.words_of("decreases") == explain.words_of("decrease")
