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
        message("Timed out waiting 1800000ms for recv operation to complete"),
        behavior("generate hangs when ranks write texts of different lengths; synced_gpus"),
        behavior("one rank stops early, breaks out of the loop, or has an empty batch, and the others wait"),
    ),
    "hang-gather-on-rank-0": (
        behavior("freezes when rank 0 logs, gathers or saves the full state dict"),
        behavior("hangs in a save, after the final training step"),
        behavior(
            "validation, evaluation or logging on rank 0 only (is_main_process), the others wait in a barrier: hangs indefinitely"
        ),
        behavior("save_state, save_model or state_dict inside if rank == 0 hangs"),
        message("Timed out waiting 1800000ms for"),
    ),
    "hang-order": (
        message("Timed out waiting 1800000ms for recv operation to complete"),
        behavior("each rank waits in a different collective"),
        message("Timed out waiting 1800000ms for send operation to complete"),
    ),
    "hang-new-group": (behavior("hangs at the start, in new_group or in a smaller process group"),),
    "hang-default-timeout": (
        message("Timed out waiting 1800000ms for recv operation to complete"),
        behavior("hangs for half an hour (1800000ms), then a timeout that names no rank"),
        behavior(
            "fails always after 30 minutes, while rank 0 tokenizes, downloads or prepares a large data set and the others wait in a barrier"
        ),
        quote("wait timeout after 1800000ms", "torch's TCPStore"),
    ),
    "hang-nccl-watchdog": (
        quote("Watchdog caught collective operation timeout: WorkNCCL", NCCL),
        quote("ran for 600060 milliseconds before timing out", NCCL),
        quote("Some NCCL operations have failed or timed out", NCCL),
        behavior("hangs for ten minutes, then all ranks but one report a timeout"),
        quote("Timeout(ms)=600000", "torch's ProcessGroupNCCL.cpp"),
        behavior("all GPUs at 100% utilization, and nothing moves"),
    ),
    "hang-wrong-interface": (
        quote("RendezvousConnectionError: The connection to the C10d store has failed", "pytorch#107021"),
        behavior("hangs at the start on two machines or more; on one machine everything works"),
        quote("Gloo connectFullMesh failed with", "gloo"),
        quote("Unable to find address for", "gloo, device.cc"),
        quote("connect [127.0.1.1]:3210: Connection refused", "gloo, pair.cc; pytorch#15592"),
        quote("NET/Socket : No usable listening port found", "NCCL"),
        behavior(
            "the second node can't connect to the first, its host name resolves to 127.0.1.1 or to Docker's network"
        ),
    ),
    "hang-gpu-to-gpu": (
        behavior("the model freezes or is stuck on several GPUs of a single node; it works with NCCL_P2P_DISABLE=1"),
        quote("P2P is disabled between connected GPUs", "NCCL"),
    ),
    "hang-dead-address": (
        message("The client socket has timed out after 2000ms while trying to connect to"),
        behavior("hangs at the start, before the first line of any rank"),
        quote("The hostname of the client socket cannot be retrieved", "torch's socket.cpp"),
        quote("RendezvousTimeoutError", "torch/distributed/elastic/rendezvous/api.py"),
        behavior("stuck in init_process_group: some ranks never join"),
        behavior("waiting for clients, fewer of them joined than the world size"),
    ),
    "hang-after-last-step": (
        quote("destroy_process_group() was not called before program exit, which can leak resources", NCCL),
        quote("terminate called without an active exception", "the C++ library, when a thread outlives the program"),
        behavior("hangs after the last step, or fails with exit code -6 although training has finished"),
    ),
    # ---------------------------------------------------------------- it crashes
    "crash-connection-closed": (
        message("Connection closed by peer"),
        message("This is typically caused by a remote worker"),
        quote("recvValue failed on SocketImpl", "torch's TCPStore"),
        behavior("a healthy rank fails, with a message about a connection"),
        message("Connection reset by peer"),
        quote(
            "ncclRemoteError: A call failed possibly due to a network error or a remote process exiting prematurely",
            "torch's NCCLUtils.cpp",
        ),
        quote("Broken pipe", "torch's TCPStore"),
    ),
    "crash-no-traceback": (
        message("torch.distributed.elastic.multiprocessing.errors.ChildFailedError"),
        message("error_file: <N/A>"),
        message("To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html"),
        behavior("torchrun reports an exit code, and no traceback"),
        quote("closing signal SIGTERM", "torchrun"),
    ),
    "crash-port-in-use": (
        message("The server socket has failed to listen on any local network address"),
        message("EADDRINUSE"),
        message("address already in use"),
        behavior("a second job on the same machine doesn't start"),
        quote("errno: 98 - Address already in use", "torch's socket.cpp"),
        behavior(
            "two tasks on a single node at the same time, each with its own GPUs: the default master port is taken"
        ),
    ),
    "crash-no-torchrun": (
        message("environment variable RANK expected, but not set"),
        quote("Default process group has not been initialized", "torch/distributed/distributed_c10d.py"),
        behavior("each process says that it is rank 0 of 1; the world size is 1"),
    ),
    "crash-main-guard": (
        message(
            "An attempt has been made to start a new process before the current process has finished its bootstrapping phase"
        ),
        behavior("the script runs again in each spawned process"),
    ),
    "crash-local-rank-argument": (
        quote("error: unrecognized arguments: --local-rank=5", "argparse, under torch.distributed.launch; SN-Net#2"),
        behavior("argument parsing fails since PyTorch 2.0, with --local_rank"),
    ),
    "crash-hangup": (
        quote("torch.distributed.elastic.multiprocessing.api.SignalException", "torchrun"),
        quote("got signal: 1", "torchrun, torch/distributed/elastic/multiprocessing/api.py"),
        behavior("training ends when the terminal or the SSH connection is closed"),
    ),
    "crash-notebook-function": (
        message("Can't get attribute 'worker' on <module '__main__'"),
        behavior("a function from a notebook can't be spawned"),
        quote("Can't pickle local object", "Python, pickle"),
        quote("cannot pickle", "Python, pickle"),
    ),
    "crash-skipped-step": (
        message("Received data size doesn't match expected size"),
        message("Signal 6 (SIGABRT) received by PID"),
        behavior("one rank skips a batch, for example after nan, and a process aborts"),
        quote("Detected mismatch between collectives on ranks", "TORCH_DISTRIBUTED_DEBUG=DETAIL"),
    ),
    "crash-mixed-tensor-dtensor": (
        message("got mixed torch.Tensor and DTensor, need to convert all torch.Tensor to DTensor"),
        behavior("generate, a submodule, or a model that is only half parallel fails in its first layer"),
        quote("'weight' must be 2-D", "FSDP1: an embedding whose unit isn't gathered; pytorch#100069"),
        quote("weight should have at least three dimensions", "FSDP1, a convolution"),
        quote(
            "The tensor has a non-zero number of elements, but its data is not allocated yet", "FSDP1, freed storage"
        ),
        behavior("calling generate on a wrapped model results in an error; it works with summon_full_params"),
    ),
    "crash-no-sharding-strategy": (
        message("Sharding propagation failed for"),
        quote("does not have a sharding strategy registered", "torch/distributed/tensor/_sharding_prop.py"),
        behavior("an optimizer or a log of statistics fails on DTensor parameters"),
    ),
    "crash-ready-twice": (
        message("Expected to mark a variable ready only once"),
        behavior("gradient checkpointing crashes under DDP; use_reentrant"),
    ),
    "crash-buffer-in-place": (
        quote(
            "one of the variables needed for gradient computation has been modified by an inplace operation",
            "torch, autograd; pytorch#22095",
        ),
        behavior("backward fails when the forward of a DDP model with buffers is called twice"),
    ),
    "crash-dtype-mismatch": (
        message("mat1 and mat2 must have the same dtype, but got Float and BFloat16"),
        quote("Input type (float) and bias type (c10::BFloat16) should be the same", "torch, a convolution"),
        quote("Expected query, key, and value to have the same dtype", "torch, attention"),
        behavior("LoRA, QLoRA or a value head fails in its first linear layer under FSDP with bf16"),
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
    "crash-invalid-device": (
        quote("CUDA error: invalid device ordinal", "CUDA; mace#435"),
        behavior("all processes but local_rank 0 fail when they set their device"),
        quote("Distributed package doesn't have NCCL built in", "torch/distributed/distributed_c10d.py"),
        quote("ProcessGroupNCCL is only supported with GPUs, no GPUs found!", "torch's ProcessGroupNCCL.cpp"),
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
        quote("posix_fallocate failed: No space left on device", "NCCL; nccl#342"),
        quote("Error while creating shared memory segment", "NCCL; nccl#342"),
        quote("received 0 items of ancdata", "Python, multiprocessing: too many open files"),
        behavior("shared memory error or No space left on device in a Docker container"),
    ),
    "crash-uniform-dtype": (
        message("FSDP expects uniform original parameter dtype but got"),
        quote(
            "Must flatten tensors with uniform dtype but got torch.bfloat16 and torch.float32",
            "torch/distributed/fsdp/_flat_param.py",
        ),
        behavior("LoRA or QLoRA adapters in fp32 on a base in bf16 can't be sharded"),
        quote("Cannot flatten integer dtype tensors", "torch/distributed/fsdp/_flat_param.py"),
    ),
    "crash-checkpoint-branch": (
        message(
            "torch.utils.checkpoint: A different number of tensors was saved during the original forward and recomputation"
        ),
        quote("Recomputed values for the following tensors have different metadata", "torch/utils/checkpoint.py"),
        behavior("CheckpointError in backward with activation checkpointing"),
        quote("Trying to backward through the graph a second time", "torch, autograd"),
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
        quote("clip_coef = max_norm / (total_norm + 1e-6)", "torch/nn/utils/clip_grad.py"),
        behavior("clip_grad_norm_ fails with CPUOffloadPolicy: an allreduce of a DTensor on the cpu device"),
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
        quote("ncclInternalError: Internal check failed", "torch's NCCLUtils.cpp"),
        quote("NCCL WARN", "NCCL"),
        behavior("NCCL fails in one container or with one version, and works in a different one"),
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
        quote("CUDA out of memory. Tried to allocate", "torch's CUDACachingAllocator.cpp"),
    ),
    "memory-default-threshold": (
        number("one FullyShardedDataParallel in the printed model"),
        behavior("auto_wrap_policy or size_based_auto_wrap_policy saves no memory"),
    ),
    "memory-accumulation": (
        number("4 bytes per parameter of the full model more after the first micro-batch"),
        behavior("out of memory with gradient accumulation, no_sync or set_requires_gradient_sync(False)"),
        quote("CUDA out of memory. Tried to allocate", "torch's CUDACachingAllocator.cpp"),
    ),
    "memory-full-state-dict": (
        behavior(
            "out of memory when the model is saved: after the last epoch, in a checkpoint, in the full state dict"
        ),
        quote("Failed to clone() tensor with name", "torch/distributed/fsdp/_state_dict_utils.py"),
        quote("CUDA out of memory. Tried to allocate", "torch's CUDACachingAllocator.cpp"),
        behavior("out of memory after training has finished, in save_model"),
    ),
    "memory-every-rank-loads": (
        quote("failed (exitcode: -9) local_rank: 0 (pid: 4242) of binary", TORCHRUN),
        quote("Signal 9 (SIGKILL) received by PID", TORCHRUN),
        number("host memory is the number of ranks times the model"),
        behavior("killed, without a message, while loading checkpoint shards or the model"),
        quote("CUDA out of memory. Tried to allocate", "torch's CUDACachingAllocator.cpp"),
        behavior(
            "all processes load the full checkpoint; CPU memory usage goes up to the number of GPUs times the model"
        ),
    ),
    "memory-after-oom": (
        number("several GB more after one step ran out of memory; no reduce-scatter in later steps"),
        behavior("out of memory once, then in every step"),
    ),
    "memory-graph-kept": (
        number("memory grows by the same amount with every batch"),
        quote("CUDA out of memory. Tried to allocate", "torch's CUDACachingAllocator.cpp"),
        behavior("out of memory in evaluation or validation, while training fits; a memory leak from step to step"),
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
    "wrong-different-seeds": (
        number("the first loss is worse than in one process"),
        number("a higher loss that stagnates earlier: ranks start from different initial weights"),
        behavior("the model was built without a seed (manual_seed), and FSDP does not synchronize it across ranks"),
    ),
    "wrong-meta-buffers": (
        number("nan or nonsense from the first step, with a model from the meta device"),
        behavior("a loaded model from the meta device generates nonsense: rotary positions"),
        number("the loss is about ln(vocabulary) and stays there"),
    ),
    "wrong-optimizer-first": (
        number("the loss does not move, does not decrease; parameters are not updating"),
        behavior("FSDP2: weights are not updating after fully_shard"),
        quote("No inf checks were recorded for this optimizer", "torch/amp/grad_scaler.py"),
        number("grad_norm is 0; gradients are None"),
    ),
    "wrong-unwrapped-module": (
        number("parameters and gradients differ from rank to rank under DDP"),
        behavior("gradients are not synchronized: each GPU or node trains independently, no communication in a step"),
        quote(
            "'DistributedDataParallel' object has no attribute",
            "torch, nn.Module: a method of yours, called on the wrapper",
        ),
    ),
    "wrong-filled-dict": (number("the distance from the pretrained weights stays zero"),),
    "wrong-same-data": (
        number("eight ranks learn no faster than one; the first loss is equal on all ranks"),
        behavior("an IterableDataset without a split gives every rank the same samples"),
    ),
    "wrong-summed-loss": (
        number("a gradient norm N times smaller than in one process; the recipe learns too slowly"),
        number("the effective batch size grows with the number of GPUs; the learning rate no longer fits"),
    ),
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
        quote("Parameter indices which did not receive grad for rank", "DDP, torch's reducer.cpp"),
    ),
    "wrong-unused-units": (
        number("a shared body's gradient is wrong where ranks run different experts"),
        behavior(
            "LayerDrop, experts or skipped layers: training hangs with NCCL, aborts with gloo, or learns nonsense"
        ),
    ),
    "wrong-muon-local-rows": (number("Muon's updates differ from one process by a third or more"),),
    "wrong-schedule-per-rank": (number("each rank has a different learning rate after a resume or a move"),),
    "wrong-set-epoch": (
        number("the same order of samples in every epoch"),
        behavior("DistributedSampler does not shuffle: the same data order in each epoch"),
    ),
    "wrong-sampler-padding": (
        number("the accuracy depends on the number of ranks; more images evaluated than there are"),
        number("metrics in a distributed evaluation differ slightly from a single GPU"),
    ),
    "wrong-batchnorm": (
        number("running_mean and running_var differ from rank to rank"),
        behavior("ranks disagree in evaluation; a checkpoint scores differently from the run"),
        quote("SyncBatchNorm expected input tensor to be on GPU", "torch/nn/modules/batchnorm.py"),
        quote("Expected more than 1 value per channel when training", "torch/nn/functional.py"),
    ),
    "wrong-metric-order": (number("logged numbers are impossible: one metric contains a part of a different one"),),
    # ---------------------------------------------------------------- it is slow
    "slow-gather-every-micro-batch": (
        number("all-gathers grow with the micro-batches; the network is four times as busy"),
    ),
    "slow-many-units": (
        number("hundreds of small collectives in a step"),
        behavior("FSDP is slower than DDP or than a single GPU"),
    ),
    "slow-head-per-chunk": (number("all-gathers grow with the chunks of a chunked loss"),),
    "slow-every-rank-downloads": (
        number("a download in the log once per rank"),
        behavior("the start takes long; a data file is damaged now and then"),
        behavior("every rank tokenizes or preprocesses the same data set"),
    ),
    "slow-threads": (number("cores are busy, and each rank is slower than one process alone"),),
    "slow-item-every-step": (number("GPU utilization drops between steps; cudaStreamSynchronize in the profile"),),
    # ---------------------------------------------------------------- it saves, but does not come back
    "save-plain-optimizer-state": (
        number("the loss jumps up after a resume, and needs many steps to come back"),
        behavior("each resume seems to restart from scratch; the optimizer's state is not restored"),
        quote("that doesn't match the size of optimizer's group", "torch/optim/optimizer.py"),
    ),
    "save-schedule-lost": (number("the learning rate starts over after a resume"),),
    "save-missing-key": (
        message("Missing key in checkpoint state_dict"),
        behavior("saving the optimizer succeeds, loading it fails: step or exp_avg of a parameter is missing"),
    ),
    "save-one-ranks-shards": (
        message("size mismatch for"),
        message("copying a param with shape"),
        number("the saved file has 1/N of the size of the model, or a few hundred kB"),
        message("from checkpoint, the shape in current model is"),
        behavior("tensors in the saved file are empty (torch.Size([0])), flat, or a part of their rows"),
    ),
    "save-half-written": (
        message("PytorchStreamReader failed reading zip archive"),
        behavior("a checkpoint can't be read after a killed job"),
        behavior("the disk was full while the checkpoint was written"),
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
        number(
            "the loss does not decrease from ln(vocabulary), 10 to 12 in a language model: the pretrained weights were never loaded"
        ),
        quote("were not initialized from the model checkpoint", "transformers"),
        quote("Some weights of the model checkpoint", "transformers"),
    ),
    "save-not-set": (behavior("dcp.load succeeds, and the model is unchanged"),),
    "save-batch-size-changed": (
        number("images seen twice, or not at all, after a resume with a different batch size"),
    ),
    "save-average-lost": (number("averaged weights (EMA) score well, and the saved file scores differently"),),
    "save-two-writers": (behavior("two runs write into the same folder; ranks of a killed torchrun still train"),),
}
