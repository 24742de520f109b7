"""The index by what you see: each card's messages, numbers and behavior.

`message` quotes a piece of what a CPU rank shows, under torchrun or under `launch`; a test compares it with real runs.
`quote` is a piece of a message that a CPU can't show, with its source.
"""

from dataclasses import dataclass

MESSAGE, NUMBER, BEHAVIOR = "message", "number", "behavior"


@dataclass(frozen=True)
class Sight:
    """One row of the index: what you see, and the source of a message that wasn't seen here."""

    kind: str
    text: str
    source: str = ""


def message(text: str) -> Sight:
    return Sight(MESSAGE, text)


def quote(text: str, source: str) -> Sight:
    return Sight(MESSAGE, text, source)


def number(text: str) -> Sight:
    return Sight(NUMBER, text)


def behavior(text: str) -> Sight:
    return Sight(BEHAVIOR, text)


NCCL, GLOO, TORCHRUN = "torch's ProcessGroupNCCL.cpp", "gloo", "torchrun"
SIGHTS: dict[str, tuple[Sight, ...]] = {
    # ---------------------------------------------------------------- it hangs
    "hang-uneven-batches": (
        message("Timed out waiting 1800000ms for send operation to complete"),
        behavior("hangs in evaluation, or at the end of an epoch; works with DDP"),
    ),
    "hang-gather-on-rank-0": (
        behavior("freezes when rank 0 logs, gathers or saves the full state dict"),
        behavior("hangs in a save, after the final training step"),
    ),
    "hang-order": (
        message("Timed out waiting 1800000ms for recv operation to complete"),
        behavior("each rank waits in a different collective"),
    ),
    "hang-new-group": (behavior("hangs at the start, in new_group or in a smaller process group"),),
    "hang-default-timeout": (
        message("Timed out waiting 1800000ms for recv operation to complete"),
        behavior("hangs for half an hour (1800000ms), then a timeout that names no rank"),
    ),
    "hang-nccl-watchdog": (
        quote("Watchdog caught collective operation timeout: WorkNCCL", NCCL),
        quote("ran for 600060 milliseconds before timing out", NCCL),
        quote("Some NCCL operations have failed or timed out", NCCL),
        behavior("hangs for ten minutes, then all ranks but one report a timeout"),
    ),
    "hang-wrong-interface": (
        quote("RendezvousConnectionError: The connection to the C10d store has failed", "pytorch#107021"),
        behavior("hangs at the start on two machines or more; on one machine everything works"),
    ),
    "hang-dead-address": (
        message("The client socket has timed out after 2000ms while trying to connect to"),
        behavior("hangs at the start, before the first line of any rank"),
    ),
    "hang-after-last-step": (
        quote("destroy_process_group() was not called before program exit, which can leak resources", NCCL),
        quote("terminate called without an active exception", "the C++ library, when a thread outlives the program"),
        behavior("hangs after the last step, or fails with exit code -6 although training has finished"),
    ),
    # ---------------------------------------------------------------- it crashes
    "crash-connection-closed": (
        message("Connection closed by peer"),
        message("This is typically caused by a remote worker crashing"),
        quote("recvValue failed on SocketImpl", "torch's TCPStore"),
        behavior("a healthy rank fails, with a message about a connection"),
    ),
    "crash-no-traceback": (
        message("torch.distributed.elastic.multiprocessing.errors.ChildFailedError"),
        message("error_file: <N/A>"),
        message("To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"),
        behavior("torchrun reports an exit code, and no traceback"),
    ),
    "crash-port-in-use": (
        message("The server socket has failed to listen on any local network address"),
        message("EADDRINUSE"),
        message("address already in use"),
        behavior("a second job on the same machine doesn't start"),
    ),
    "crash-notebook-function": (
        message("Can't get attribute 'worker' on <module '__main__'"),
        behavior("a function from a notebook can't be spawned"),
    ),
    "crash-skipped-step": (
        message("Received data size doesn't match expected size"),
        message("Signal 6 (SIGABRT) received by PID"),
        message("Connection reset by peer"),
        behavior("one rank skips a batch, for example after nan, and a process aborts"),
    ),
    "crash-mixed-tensor-dtensor": (
        message("got mixed torch.Tensor and DTensor, need to convert all torch.Tensor to DTensor"),
        behavior("generate, a submodule, or a model that is only half parallel fails in its first layer"),
    ),
    "crash-tied-weights": (
        message("is shared with a parameter already managed by another FSDP group"),
        quote("size mismatch, got input", "FSDP1, the same model"),
        behavior("a language model with tied embeddings can't be sharded"),
    ),
    "crash-frozen-flat": (
        message("Must flatten tensors with uniform `requires_grad` when `use_orig_params=False`"),
        behavior("FSDP1 fails while wrapping a model with frozen layers or LoRA"),
    ),
    "crash-encoder-fast-path": (behavior("training works, evaluation fails inside nn.TransformerEncoderLayer"),),
    "crash-duplicate-gpu": (
        quote("Duplicate GPU detected : rank 1 and rank 0 both on CUDA device", "NCCL, init.cc"),
        behavior("out of memory on GPU 0 alone; the other GPUs are empty"),
    ),
    "crash-cuda-fork": (
        quote("Cannot re-initialize CUDA in forked subprocess", "torch/cuda/__init__.py"),
        behavior("a notebook's ranks fail after any cell has used the GPU"),
    ),
    "crash-shared-memory": (
        quote("DataLoader worker (pid 4242) is killed by signal: Bus error", "torch/utils/data"),
        quote("It is possible that dataloader's workers are out of shared memory", "torch/utils/data"),
        quote("Unexpected bus error encountered in worker", "torch's DataLoader.cpp"),
        behavior("data loaders with workers crash in a container"),
    ),
    "crash-uniform-dtype": (
        message("FSDP expects uniform original parameter dtype but got"),
        quote(
            "Must flatten tensors with uniform dtype but got torch.bfloat16 and torch.float32",
            "torch/distributed/fsdp/_flat_param.py",
        ),
        behavior("LoRA or QLoRA adapters in fp32 on a base in bf16 can't be sharded"),
    ),
    "crash-checkpoint-branch": (
        message(
            "torch.utils.checkpoint: A different number of tensors was saved during the original forward and recomputation"
        ),
        quote("Recomputed values for the following tensors have different metadata", "torch/utils/checkpoint.py"),
        behavior("CheckpointError in backward with activation checkpointing"),
    ),
    "crash-recompute-two-forwards": (
        behavior("mixed torch.Tensor and DTensor in recompute_fn, in backward after two forwards (DPO)"),
    ),
    "crash-meta-tensor": (
        message("Cannot copy out of meta tensor; no data!"),
        quote("is not on the expected device meta", "torch/_meta_registrations.py and its kin"),
        quote(
            "FSDP parameters should be materialized from meta device before training",
            "torch/distributed/fsdp/_fully_shard",
        ),
        behavior("a model that was built on the meta device can't be moved or used"),
    ),
    "crash-scalar-parameter": (
        message("fully_shard doesn't support scalar parameters"),
        behavior("a logit scale or a layer scale stops a move to FSDP2"),
    ),
    "crash-offload-device": (
        quote("No backend type associated with device type cpu", "torch/csrc/distributed/c10d/ProcessGroup.hpp"),
        quote("Expected all tensors to be on the same device, but found at least two devices, cpu and cuda:0", "torch"),
        quote(
            "An FSDP-managed module with parameter CPU offloading enabled has parameters on cuda", "FSDP1; NeMo#9531"
        ),
        behavior("gradient clipping fails with CPU offload"),
    ),
    "crash-nccl-system-error": (
        quote(
            "ncclSystemError: System call (e.g. socket, malloc) or external library call failed",
            "torch's NCCLUtils.cpp",
        ),
        quote("ncclSystemError: System call (socket, malloc, munmap, etc) failed", "NCCL before 2.12; nccl#697"),
        quote("unhandled system error", "NCCL"),
        quote("ncclUnhandledCudaError: Call to CUDA function failed", "torch's NCCLUtils.cpp"),
        quote("unhandled cuda error", "NCCL"),
    ),
    "crash-slurm-node-failed": (
        quote("slurmstepd: error: Detected 1 oom_kill event in StepId", "Slurm, slurmstepd"),
        quote("DUE TO TIME LIMIT", "Slurm, slurmstepd: *** JOB 4242 ON node1 CANCELLED AT ... DUE TO TIME LIMIT ***"),
        quote("DUE TO NODE FAILURE, SEE SLURMCTLD LOG FOR DETAILS", "Slurm, slurmstepd"),
        behavior("a Slurm job ends in the middle of a step, and no rank says why"),
    ),
    # ---------------------------------------------------------------- it runs out of memory
    "memory-root-only": (
        number("one all-gather per forward; the peak is that of the full model"),
        behavior("fully_shard saves no memory"),
    ),
    "memory-default-threshold": (
        number("one FullyShardedDataParallel in the printed model"),
        behavior("auto_wrap_policy or size_based_auto_wrap_policy saves no memory"),
    ),
    "memory-accumulation": (
        number("4 bytes per parameter of the full model more after the first micro-batch"),
        behavior("out of memory with gradient accumulation, no_sync or set_requires_gradient_sync(False)"),
    ),
    "memory-full-state-dict": (
        behavior(
            "out of memory when the model is saved: after the last epoch, in a checkpoint, in the full state dict"
        ),
        quote("Failed to clone() tensor with name", "torch/distributed/fsdp/_state_dict_utils.py"),
    ),
    "memory-every-rank-loads": (
        quote("failed (exitcode: -9) local_rank: 0 (pid: 4242) of binary", TORCHRUN),
        quote("Signal 9 (SIGKILL) received by PID", TORCHRUN),
        number("host memory is the number of ranks times the model"),
        behavior("killed, without a message, while loading checkpoint shards or the model"),
    ),
    "memory-after-oom": (
        number("several GB more after one step ran out of memory; no reduce-scatter in later steps"),
        behavior("out of memory once, then in every step"),
    ),
    "memory-map-location": (
        number("GPU 0 has 3 GB more than the others; N processes on GPU 0"),
        behavior("all processes use almost a GB each on GPU 0, after loading a checkpoint"),
    ),
    "memory-nvidia-smi": (number("nvidia-smi shows twice what you computed"),),
    "memory-fragmented": (
        quote(
            "reserved by PyTorch but unallocated is large try setting PYTORCH_CUDA_ALLOC_CONF",
            "torch's CUDACachingAllocator.cpp",
        ),
        quote("CUDA out of memory. Tried to allocate", "torch's CUDACachingAllocator.cpp"),
    ),
    "memory-gpu-nearby": (number("a few hundred MB on a GPU for each rank on the CPU"),),
    # ---------------------------------------------------------------- it trains, but wrongly
    "wrong-different-seeds": (number("the first loss is worse than in one process"),),
    "wrong-meta-buffers": (
        number("nan or nonsense from the first step, with a model from the meta device"),
        behavior("a loaded model from the meta device generates nonsense: rotary positions"),
    ),
    "wrong-optimizer-first": (
        number("the loss does not move, does not decrease; parameters are not updating"),
        behavior("FSDP2: weights are not updating after fully_shard"),
    ),
    "wrong-filled-dict": (number("the distance from the pretrained weights stays zero"),),
    "wrong-same-data": (number("eight ranks learn no faster than one; the first loss is equal on all ranks"),),
    "wrong-summed-loss": (number("a gradient norm N times smaller than in one process; the recipe learns too slowly"),),
    "wrong-mean-of-means": (
        number("the loss or the gradient depends on how tokens are shared among the ranks"),
        behavior("fine-tuning results depend on the number of GPUs"),
    ),
    "wrong-clip-local-norm": (number("a norm above the limit after clipping; each rank clips by a different factor"),),
    "wrong-local-norm-logged": (
        number("a gradient norm off by √N: ranks log different norms, smaller with more GPUs or nodes"),
    ),
    "wrong-bf16-reduction": (number("the gradient norm differs from fp32's in the third or fourth digit"),),
    "wrong-bf16-masters": (
        number("a few percent of the weights change in a step"),
        behavior(
            "bad convergence with bf16: a model loaded with torch_dtype=torch.bfloat16 learns worse, or not at all"
        ),
    ),
    "wrong-fp16-nan": (
        number("the loss is nan or inf after a few steps with fp16, GradScaler or autocast"),
        quote("Attempting to unscale FP16 gradients.", "torch/amp/grad_scaler.py"),
    ),
    "wrong-unused-parameters": (
        number("gradients of two heads or experts are mixed up: 11 and 11 instead of 1 and 10"),
        quote(
            "Expected to have finished reduction in the prior iteration before starting a new one",
            "DDP, torch's reducer.cpp",
        ),
        behavior("ranks use different heads; find_unused_parameters has no counterpart"),
    ),
    "wrong-unused-units": (
        number("a shared body's gradient is wrong where ranks run different experts"),
        behavior(
            "LayerDrop, experts or skipped layers: training hangs with NCCL, aborts with gloo, or learns nonsense"
        ),
    ),
    "wrong-muon-local-rows": (number("Muon's updates differ from one process by 30% to 50%"),),
    "wrong-schedule-per-rank": (number("each rank has a different learning rate after a resume or a move"),),
    "wrong-set-epoch": (number("the same order of samples in every epoch"),),
    "wrong-sampler-padding": (
        number("the accuracy depends on the number of ranks; more images evaluated than there are"),
    ),
    "wrong-batchnorm": (
        number("running_mean and running_var differ from rank to rank"),
        behavior("ranks disagree in evaluation; a checkpoint scores differently from the run"),
    ),
    "wrong-metric-order": (number("logged numbers are impossible: one metric contains a part of a different one"),),
    # ---------------------------------------------------------------- it is slow
    "slow-gather-every-micro-batch": (
        number("all-gathers grow with the micro-batches; the network is four times as busy"),
    ),
    "slow-many-units": (number("hundreds of small collectives in a step"),),
    "slow-head-per-chunk": (number("all-gathers grow with the chunks of a chunked loss"),),
    "slow-every-rank-downloads": (
        number("a download in the log once per rank"),
        behavior("the start takes long; a data file is damaged now and then"),
    ),
    "slow-threads": (number("cores are busy, and each rank is slower than one process alone"),),
    "slow-item-every-step": (number("GPU utilization drops between steps; cudaStreamSynchronize in the profile"),),
    # ---------------------------------------------------------------- it saves, but does not come back
    "save-plain-optimizer-state": (
        number("the loss jumps up after a resume, and needs many steps to come back"),
        behavior("each resume seems to restart from scratch; the optimizer's state is not restored"),
    ),
    "save-schedule-lost": (number("the learning rate starts over after a resume"),),
    "save-half-written": (
        message("PytorchStreamReader failed reading zip archive"),
        behavior("a checkpoint can't be read after a killed job"),
    ),
    "save-module-prefix": (
        message("Missing key(s) in state_dict"),
        message("Unexpected key(s) in state_dict"),
        behavior("a checkpoint's names begin with module., _orig_mod. or _fsdp_wrapped_module."),
    ),
    "save-not-loaded": (
        number("the first loss is that of an untrained model"),
        behavior(
            "load_state_dict(strict=False) succeeds without loading anything: names begin with module. or _orig_mod."
        ),
        behavior("a fine-tuned model produces garbage after it was loaded"),
    ),
    "save-not-set": (behavior("dcp.load succeeds, and the model is unchanged"),),
    "save-batch-size-changed": (
        number("images seen twice, or not at all, after a resume with a different batch size"),
    ),
    "save-average-lost": (number("averaged weights (EMA) score well, and the saved file scores differently"),),
    "save-two-writers": (behavior("two runs write into the same folder; ranks of a killed torchrun still train"),),
}
