"""Failures that need a GPU, a cluster or half an hour: from the documentation and from people's reports, not run here."""

from fsdp_helpers.teaching.lessons.failures.entry import Failure

DOCUMENTED = (
    Failure(
        name="hang-nccl-watchdog",
        title="Watchdog caught collective operation timeout",
        why="On GPUs nobody waits in the open: NCCL's calls return at once, and a thread of each *healthy* rank ends its process "
        "after ten minutes. The rank at fault says nothing.",
        tell="The rank without such a message is the one to look at. The flight recorder's dump (`TORCH_FR_BUFFER_SIZE`, "
        "`TORCH_FR_DUMP_TEMP_FILE`) has the last collectives of each rank.",
        fix="Find the first collective in which the ranks differ, as [hang-order](#hang-order) does.",
        source="PyTorch documentation, *Flight Recorder*; pytorch#38174",
    ),
    Failure(
        name="hang-wrong-interface",
        title="Ranks on two machines never meet",
        why="A machine has several network interfaces, and gloo or NCCL takes one that leads nowhere: Docker's, or a management "
        "network. Or a firewall blocks the ports.",
        tell="`NCCL_DEBUG=INFO` prints the interface. On one machine everything works.",
        fix="`NCCL_SOCKET_IFNAME` and `GLOO_SOCKET_IFNAME`; see [10](10_many_machines.ipynb).",
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
        why="A process that has used CUDA cannot hand it to a forked child. In a notebook one `.cuda()` in any cell is enough.",
        tell="It disappears in a fresh kernel.",
        fix="Start ranks with `spawn` or `forkserver`, as `launch` does, and keep the kernel off the GPU.",
        source="accelerate#940, #182",
    ),
    Failure(
        name="crash-shared-memory",
        title="DataLoader worker is killed by signal: Bus error",
        why="Workers hand batches over in `/dev/shm`, and a container gives it 64 MB.",
        tell="`df -h /dev/shm`, or `python -m fsdp_helpers doctor`.",
        fix="Start the container with `--shm-size=1g` or `--ipc=host`.",
        source="PyTorch README, *Docker image*",
    ),
    Failure(
        name="memory-nvidia-smi",
        title="nvidia-smi shows twice what you computed",
        why="It shows what the process has reserved, with the CUDA context and NCCL's buffers. Tensors have less. And between "
        "two steps you see what is held, not the peak.",
        tell="Compare `memory_allocated`, `max_memory_allocated` and `memory_reserved`, the second within a step.",
        fix="Plan with the peak of allocated bytes; leave room for the rest. See [04](04_fsdp_auto_wrap.ipynb).",
        source="fairscale#1050; ml-engineering, *GPU memory*",
    ),
    Failure(
        name="memory-fragmented",
        title="Out of memory, although gigabytes are reserved and free",
        why="The allocator's free blocks are too small for a unit's buffer, because sizes vary from step to step.",
        tell="The message says how much is *reserved but unallocated*.",
        fix="`PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True`, and batches of one shape.",
        source="PyTorch documentation, *CUDA memory management*",
    ),
    Failure(
        name="memory-gpu-nearby",
        title="Ranks on the CPU take memory of a GPU",
        why="A GPU that PyTorch sees attracts it, even if all tensors are on the CPU: `fully_shard` without a mesh, the group of "
        "a mesh, and every step of an optimiser look there, and each look makes a CUDA context.",
        tell="`nvidia-smi` lists the CPU ranks with some hundred MB each.",
        fix="Pass a mesh on the CPU, and start CPU ranks with an empty `CUDA_VISIBLE_DEVICES`, as `launch` does: it has to be "
        "empty before PyTorch looks.",
        source="this series' tests beside an imagined GPU, `tests/imagined_gpu/test_ranks.py`",
    ),
    Failure(
        name="slow-threads",
        title="Ranks on one machine take turns instead of working side by side",
        why="Every process starts one thread per core, so N ranks have N times as many threads as the machine has cores. "
        "torchrun therefore sets one thread per rank, which may be too few.",
        tell="`torch.get_num_threads()` times the ranks of this machine, against its cores.",
        fix="`torch.set_num_threads(cores // ranks)`, as `launch` does, or `OMP_NUM_THREADS`.",
        source="PyTorch documentation, *torchrun*; measured in this series' `share_cores`",
    ),
    Failure(
        name="slow-item-every-step",
        title="GPUs idle between steps",
        why="`loss.item()` and `print(loss)` wait until the GPU has finished, so the next step is not prepared meanwhile. "
        "Gathers cannot run ahead, either.",
        tell="A profile shows gaps after each step, and the CPU waits in `cudaStreamSynchronize`.",
        fix="Log every N steps; keep the running sum on the GPU.",
        source="PyTorch *Performance Tuning Guide*",
    ),
    Failure(
        name="save-two-writers",
        title="Two runs write into the same folder",
        why="torchrun was killed with SIGKILL, and its ranks went on as orphans. The next run writes beside them.",
        tell="`python -m fsdp_helpers doctor` lists such ranks; `ps` shows them with parent 1.",
        fix="Ask Linux to end a rank with its agent (`prctl`), and lock the folder, as `train` does; "
        "[10](10_many_machines.ipynb) lists the endings, and its tests kill an agent.",
        source="chapter 10's tests",
    ),
)
