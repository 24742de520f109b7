"""Failures that need a GPU or a cluster, from documentation and reports; we haven't run any of them."""

from fsdp_helpers.teaching.failures.entry import Failure

DOCUMENTED = (
    Failure(
        name="hang-gpu-to-gpu",
        title="Training freezes with several GPUs of one machine, and runs with NCCL_P2P_DISABLE=1",
        why="GPUs copy to each other directly (peer to peer). Where the machine redirects such copies, through PCI access "
        "control (ACS), an IOMMU or a virtual machine, they never arrive, or arrive damaged.",
        tell="`NCCL_P2P_DISABLE=1` makes it run, more slowly. `doctor --gpu` counts the pairs that reach each other; NCCL's "
        "documentation has the commands that show ACS.",
        fix="Turn off ACS and the IOMMU (VT-d, `iommu=pt`) in the BIOS or the kernel's options. Until then `NCCL_P2P_DISABLE=1`.",
        source="nccl#631; NVIDIA, *NCCL troubleshooting*, GPU-to-GPU communication",
    ),
    Failure(
        name="crash-invalid-device",
        title="invalid device ordinal",
        why="A rank asks for the GPU of its local rank, and doesn't see that many: Slurm's `--gpus-per-task=1` or "
        "`CUDA_VISIBLE_DEVICES` shows each process a single one, number 0, or there are more ranks than GPUs. A torch built for the "
        "CPU sees none at all, and has no NCCL: there the backend is gloo.",
        tell="Print `torch.cuda.device_count()` and `os.environ.get('CUDA_VISIBLE_DEVICES')` next to the local rank.",
        fix="Show every rank all GPUs of its node (`--gpus-per-node=8`), and `torch.cuda.set_device(local_rank)`; at most one rank "
        "per GPU.",
        source="mace#435; Slurm documentation, *sbatch*",
    ),
    Failure(
        name="crash-local-rank-argument",
        title="unrecognized arguments: --local-rank",
        why="`torch.distributed.launch` passes `--local-rank=N` to the script, spelled with a hyphen since PyTorch 2.0. torchrun "
        "passes nothing; it sets variables.",
        tell="The script parses `--local_rank`, and is started by `python -m torch.distributed.launch`.",
        fix="Start with torchrun and read `int(os.environ['LOCAL_RANK'])`; or `parser.add_argument('--local-rank', "
        "'--local_rank', type=int)`.",
        source="PyTorch documentation, *torch.distributed.launch*; SN-Net#2",
    ),
    Failure(
        name="crash-buffer-in-place",
        title="A variable needed for gradient computation has been modified by an inplace operation",
        why="Before each forward DDP writes rank 0's buffers into every rank's. Two forwards before one backward (a pair of "
        "views, a generator and a discriminator) overwrite a buffer that the first forward's graph needs.",
        tell="The tensor in the message has the shape of a buffer. With one forward per backward, or without DDP, it's gone. PyTorch "
        "2.15 on the CPU doesn't show it.",
        fix="`DistributedDataParallel(model, broadcast_buffers=False)`, with `SyncBatchNorm` for statistics; or one forward for both.",
        source="pytorch#22095",
    ),
    Failure(
        name="crash-hangup",
        title="SignalException: Process got signal: 1",
        why="The terminal or the SSH connection from which torchrun was started has ended, and sent SIGHUP to it. Signal 15 is a "
        "scheduler's or somebody's `kill`.",
        tell="The message names the signal; the ranks' logs end in the middle of a step, without an error.",
        fix="Start it in `tmux` or as a job of a scheduler. `nohup` doesn't help: torchrun has its own handler of SIGHUP, unless "
        "`TORCHELASTIC_SIGNALS_TO_HANDLE` leaves it out.",
        source="torch/distributed/elastic/multiprocessing/api.py",
    ),
    Failure(
        name="hang-nccl-watchdog",
        title="Watchdog caught collective operation timeout",
        why="NCCL's calls return at once, so no line of yours seems to wait. After ten minutes a watchdog thread on each "
        "*healthy* rank ends its process. The rank at fault says nothing.",
        tell="Look at the rank that has no such message. The flight recorder's dump (`TORCH_FR_BUFFER_SIZE`, "
        "`TORCH_FR_DUMP_TEMP_FILE`) has the last collectives of each rank.",
        fix="Find the first collective in which the ranks differ, as [hang-order](#hang-order) does.",
        source="PyTorch documentation, *Flight Recorder*; pytorch#38174",
    ),
    Failure(
        name="hang-wrong-interface",
        title="Ranks on two machines never meet",
        why="A machine has several network interfaces, and gloo or NCCL picked one that does not reach the other machine, such "
        "as Docker's or a management network. A firewall that blocks the ports looks the same.",
        tell="On one machine everything works. `NCCL_DEBUG=INFO` prints the interface that NCCL picked.",
        fix="Name the right interface in `NCCL_SOCKET_IFNAME` and `GLOO_SOCKET_IFNAME`; see [10](10_many_machines.ipynb).",
        source="NVIDIA, *NCCL environment variables*; ml-engineering, network debugging",
    ),
    Failure(
        name="crash-duplicate-gpu",
        title="Duplicate GPU detected, or out of memory on GPU 0 alone",
        why="Without `torch.cuda.set_device(local_rank)` every rank uses GPU 0, and NCCL refuses two ranks on one device.",
        tell="`nvidia-smi` lists all processes on GPU 0.",
        fix="Set the device before anything touches CUDA, or pass `device_id=` to `init_process_group`.",
        source="pytorch#133761; awsome-distributed-ai#1041",
    ),
    Failure(
        name="crash-cuda-fork",
        title="Cannot re-initialize CUDA in forked subprocess",
        why="After a process has used CUDA, a child that it forks cannot. In a notebook, one `.cuda()` in any cell is enough.",
        tell="The same cell works in a fresh kernel.",
        fix="Start ranks with `spawn` or `forkserver`, as `launch` does, and keep the kernel off the GPU.",
        source="accelerate#940, #182",
    ),
    Failure(
        name="crash-shared-memory",
        title="DataLoader worker is killed by signal: Bus error",
        why="Worker processes pass batches through `/dev/shm`, and Docker gives a container 64 MB of it.",
        tell="`df -h /dev/shm` shows its size; `python -m fsdp_helpers doctor` says how much is free.",
        fix="Start the container with `--shm-size=1g` or `--ipc=host`.",
        source="PyTorch README, *Docker image*",
    ),
    Failure(
        name="memory-nvidia-smi",
        title="nvidia-smi shows twice what you computed",
        why="It shows what the process has reserved, plus the CUDA context and NCCL's buffers; your tensors take less. It "
        "also shows a single moment, which is rarely a step's peak.",
        tell="Compare `memory_allocated`, `memory_reserved`, and `max_memory_allocated` over a whole step.",
        fix="Plan with the peak of allocated bytes, and leave room for the rest. See [04](04_fsdp_auto_wrap.ipynb).",
        source="fairscale#1050; ml-engineering, *GPU memory*",
    ),
    Failure(
        name="memory-fragmented",
        title="Out of memory, although gigabytes are reserved and free",
        why="Sizes vary from step to step, so the memory that the allocator has reserved falls into pieces, each too small for a "
        "unit's buffer.",
        tell="The message says how much is *reserved by PyTorch but unallocated*: gigabytes.",
        fix="Set `PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`, as the message suggests, and keep all batches the same shape.",
        source="PyTorch documentation, *CUDA memory management*",
    ),
    Failure(
        name="memory-gpu-nearby",
        title="Ranks on the CPU take memory of a GPU",
        why="If PyTorch can see a GPU, it looks at it even when all tensors are on the CPU: in `fully_shard` without a mesh, in "
        "the group of a mesh, and in every step of an optimizer. The first look makes a CUDA context in that rank.",
        tell="`nvidia-smi` lists the CPU ranks, each with a few hundred MB.",
        fix="Pass a mesh on the CPU, and start CPU ranks with an empty `CUDA_VISIBLE_DEVICES`, as `launch` does. It has to be "
        "empty before PyTorch looks.",
        source="this series' tests beside an imagined GPU, `tests/imagined_gpu/test_ranks.py`",
    ),
    Failure(
        name="slow-threads",
        title="Ranks on one machine take turns instead of working side by side",
        why="Each process starts one thread per core, so N ranks have N times as many threads as the machine has cores. "
        "torchrun therefore sets one thread per rank, which may be too few.",
        tell="Multiply `torch.get_num_threads()` by the number of ranks on this machine, and compare with its cores.",
        fix="Call `torch.set_num_threads(cores // ranks)`, as `launch` does, or set `OMP_NUM_THREADS`.",
        source="PyTorch documentation, *torchrun*; measured in this series' `share_cores`",
    ),
    Failure(
        name="slow-item-every-step",
        title="GPUs idle between steps",
        why="`loss.item()` and `print(loss)` wait until the GPU has finished. Only then does the CPU prepare the next "
        "step, and its first gathers start late as well.",
        tell="A profile shows a gap after each step, while the CPU waits in `cudaStreamSynchronize`.",
        fix="Keep the running sum on the GPU, and log it every N steps.",
        source="PyTorch *Performance Tuning Guide*",
    ),
    Failure(
        name="save-two-writers",
        title="Two runs write into the same folder",
        why="torchrun was killed with SIGKILL, and its ranks kept running as orphans. The next run writes to the same folder.",
        tell="`python -m fsdp_helpers doctor` lists such ranks; `ps -ef` shows them with parent 1.",
        fix="Ask Linux to end each rank with its agent (`prctl`), and lock the folder, as `train` does. "
        "[10](10_many_machines.ipynb) lists all the ways in which a job can end.",
        source="chapter 10's tests",
    ),
    Failure(
        name="hang-after-last-step",
        title="The job stands still after the last step, or ends badly although all steps are done",
        why="The end is a step like others: a last save or barrier in which not every rank takes part. And threads outlive the "
        "group, as NCCL's watchdog does, while a reference to a sharded tensor keeps it alive.",
        tell="Every rank has logged its last step. *destroy_process_group() was not called before program exit*, "
        "*terminate called without an active exception* and exit code -6 are about the end.",
        fix="On every rank, in this order: `dist.barrier()`, `del model, optimizer`, `dist.destroy_process_group()`.",
        source="PyTorch documentation, *Shutdown*; pytorch#75097; torchtitan#1342; measured under torchrun, 11 of 20 runs",
    ),
    Failure(
        name="crash-offload-device",
        title="No backend type associated with device type cpu",
        why="With `CPUOffloadPolicy` shards and gradients are on the host. `clip_grad_norm_` reduces their norm there, and a group "
        "of NCCL alone has no backend for the host. A loss or a mask of your own that is on the host meets outputs on the GPU: "
        "*Expected all tensors to be on the same device*.",
        tell="The traceback ends in `clip_grad_norm_`, or in your loss. `next(model.parameters()).device` is `cpu`; it isn't the "
        "device to send batches to.",
        fix="`init_process_group('cpu:gloo,cuda:nccl')`, and `batch.to(torch.device('cuda', local_rank))`.",
        source="pytorch#148532, #149395; torchtune#1977; torchtitan#1168",
    ),
    Failure(
        name="memory-map-location",
        title="GPU 0 has a process of every rank on it",
        why="`torch.load` puts each tensor where it was when it was saved: on GPU 0, in every rank. The context alone takes "
        "several hundred MB per rank; a checkpoint takes its size, N times.",
        tell="`nvidia-smi` lists N processes on GPU 0 and one on each other GPU; it began when the checkpoint was loaded.",
        fix="`torch.load(path, map_location='cpu', weights_only=True)`, and `torch.cuda.set_device(local_rank)` before anything "
        "else.",
        source="pytorch#23138; apex#222; PyTorch's DDP tutorial, *Save and Load Checkpoints*",
    ),
    Failure(
        name="crash-nccl-system-error",
        title="ncclSystemError, unhandled system error, unhandled cuda error",
        why="NCCL passes on that a system call or a CUDA call failed, and says which one only if asked. Usual ones: /dev/shm too "
        "small, no usable network interface, a firewall, a driver that doesn't fit, GPUs that a container doesn't see.",
        tell="Run again with `NCCL_DEBUG=INFO` (and `NCCL_DEBUG_SUBSYS=INIT,NET`), and read the first WARN line.",
        fix="Containers: `--ipc=host` or `--shm-size=1g`, `--network=host`. Several interfaces: `NCCL_SOCKET_IFNAME=eth0`. Before "
        "asking anyone, have that WARN line, `nvidia-smi topo -m` and `python -m fsdp_helpers doctor --gpu`.",
        source="nccl#207, #473, #697, #1000; NVIDIA, *NCCL environment variables*",
    ),
    Failure(
        name="crash-recompute-two-forwards",
        title="Two forwards before one backward, and recomputation finds shards",
        why="A preference loss (DPO) calls the model twice, then backward once. With activation checkpointing the first "
        "recomputation reshards units that the second one still expects unsharded.",
        tell="The message is that of [crash-mixed-tensor-dtensor](#crash-mixed-tensor-dtensor), and the traceback comes from "
        "`recompute_fn`. Two flat models in PyTorch 2.15 don't show it.",
        fix="One forward for both: `model(torch.cat([chosen, rejected]))`; or `model.set_reshard_after_backward(False)` on the "
        "units inside checkpointed blocks.",
        source="pytorch#153354, #144035, PR #171779",
    ),
    Failure(
        name="crash-slurm-node-failed",
        title="Slurm ends the job: killed by a limit, or by a node",
        why="Slurm kills what exceeds the memory or the time that was asked for, and cancels a job when one of its nodes fails.",
        tell="`sacct -j JOB --format=State,ExitCode,MaxRSS` says OUT_OF_MEMORY, TIMEOUT or NODE_FAIL; the ranks say nothing.",
        fix="`--mem=0` for all of a node's memory; `--signal=B:USR1@120` to save before the end, and `--requeue`, as in "
        "[10](10_many_machines.ipynb).",
        source="Slurm documentation, *sbatch*, *Job State Codes*",
    ),
)
