"""Devices by name: memory, rates, links, and the share of the peak rate that training reaches. No torch import.

Rates are the data sheets' dense rates, without sparsity. Link rates are for one direction, while data sheets count
both. The fp32 rate is the one you get with torch's defaults, which don't use TF32.

The share is the fraction of the peak rate that matrix products reach while they aren't waiting for anything. We use the
median of published training runs, which are up to a quarter above or below it: torchtitan on A100s, 51 to 61% MFU
without recomputation, and 69% of the hardware's rate with it (`docs/performance.md`); fms-fsdp on A100s, 57% (README);
torchtitan on H100s at 500 W, 33 to 39% (`benchmarks/llama3_h100_202412_torchtitan.md`); the Llama 3 paper, 38 to 43%
(table 4); MPT on H100s, 40 to 46% without recomputation (llm-foundry, `scripts/train/benchmarking/README.md`). A device
without such a run gets the most similar device's share, and the plan says so. All of these runs are in bf16. In fp32,
where matrix products take much longer than all else, an H100 reached two thirds of the peak rate (`docs/gpu-record.md`).

Two constants, RECOMPUTED_GAIN and ATTENTION_COST, are fitted to 47 runs from the last of these sources
(`planning.published_runs`). A third, LINK_SHARE, comes from nccl-tests.
"""

from dataclasses import dataclass

GB, TERA = 10**9, 10**12
TYPICAL_RANGE = 0.25  # how far published runs on a device are above or below its share
RECOMPUTED_GAIN = 1.15  # if blocks are recomputed, batches and matrix products are larger, so the share is higher
ATTENTION_COST = 1.25  # the time of an operation in attention, relative to one in a matrix product
LINK_SHARE = 0.8  # of the data sheet's rate: 8 H100s all-gather at 360 of 450 GB/s (all_gather_perf's busbw)


@dataclass(frozen=True, kw_only=True)
class Device:
    """Data-sheet numbers for a device and for the machine it usually comes in."""

    title: str
    memory_bytes: float
    peak_flops: dict[str, float]  # by precision
    share: float  # the share of the peak rate that training reaches
    memory_bytes_per_s: float
    within_bytes_per_s: float  # to other devices in the node
    between_bytes_per_s: float  # to other nodes, per device
    host_bytes_per_s: float  # to and from host memory
    host_memory_bytes: float  # of a node
    ranks_per_node: int = 8
    measured: bool = True  # whether the share comes from published runs on this device

    def peak(self, precision: str) -> float:
        """Return the data sheet's rate in this precision. Raises ValueError if the device doesn't support it."""
        half = precision.removeprefix("pure-")
        rate = self.peak_flops.get(half, self.peak_flops.get("bf16") if half == "fp16" else None)
        if rate is None:
            raise ValueError(
                f"{self.title} doesn't support bf16; use --precision fp16 or fp32, or an Ampere (2020) or newer device"
            )
        return rate


DEVICES = {
    # NVIDIA H100 SXM data sheet: 900 GB/s NVLink, 3.35 TB/s; DGX H100: 8 x 400 Gbit/s, PCIe 5 x16, 2 TB
    "h100": Device(
        title="H100 SXM", memory_bytes=80 * GB, peak_flops={"bf16": 989 * TERA, "fp32": 67 * TERA}, share=0.42,
        memory_bytes_per_s=3.35e12, within_bytes_per_s=450 * GB, between_bytes_per_s=50 * GB,
        host_bytes_per_s=50 * GB, host_memory_bytes=2000 * GB,
    ),
    # the same chip with 141 GB at 4.8 TB/s
    "h200": Device(
        title="H200 SXM", memory_bytes=141 * GB, peak_flops={"bf16": 989 * TERA, "fp32": 67 * TERA}, share=0.42,
        memory_bytes_per_s=4.8e12, within_bytes_per_s=450 * GB, between_bytes_per_s=50 * GB,
        host_bytes_per_s=50 * GB, host_memory_bytes=2000 * GB, measured=False,
    ),
    # A100 data sheet: 600 GB/s NVLink, 2.04 TB/s; DGX A100: 8 x 200 Gbit/s, PCIe 4 x16, 2 TB with 80-GB devices
    "a100": Device(
        title="A100 SXM 80 GB", memory_bytes=80 * GB, peak_flops={"bf16": 312 * TERA, "fp32": 19.5 * TERA}, share=0.6,
        memory_bytes_per_s=2.04e12, within_bytes_per_s=300 * GB, between_bytes_per_s=25 * GB,
        host_bytes_per_s=25 * GB, host_memory_bytes=2000 * GB,
    ),
    "a100-40": Device(
        title="A100 SXM 40 GB", memory_bytes=40 * GB, peak_flops={"bf16": 312 * TERA, "fp32": 19.5 * TERA}, share=0.6,
        memory_bytes_per_s=1.56e12, within_bytes_per_s=300 * GB, between_bytes_per_s=25 * GB,
        host_bytes_per_s=25 * GB, host_memory_bytes=1000 * GB,
    ),
    # HGX B200 and GB200 NVL72 data sheets: dense bf16, 1.8 TB/s NVLink, 400 Gbit/s each; a GB200 rack is one NVLink
    # domain of 72, with 36 Grace hosts of 480 GB over NVLink-C2C
    "b200": Device(
        title="B200", memory_bytes=180 * GB, peak_flops={"bf16": 2250 * TERA, "fp32": 75 * TERA}, share=0.42,
        memory_bytes_per_s=7.7e12, within_bytes_per_s=900 * GB, between_bytes_per_s=50 * GB,
        host_bytes_per_s=50 * GB, host_memory_bytes=2000 * GB, measured=False,
    ),
    "gb200": Device(
        title="GB200", memory_bytes=186 * GB, peak_flops={"bf16": 2500 * TERA, "fp32": 80 * TERA}, share=0.42,
        memory_bytes_per_s=8e12, within_bytes_per_s=900 * GB, between_bytes_per_s=50 * GB,
        host_bytes_per_s=450 * GB, host_memory_bytes=36 * 480 * GB, ranks_per_node=72, measured=False,
    ),
    # MI300X data sheet: 7 Infinity Fabric links of 64 GB/s each way; 400 Gbit/s each
    "mi300x": Device(
        title="MI300X", memory_bytes=192 * GB, peak_flops={"bf16": 1307 * TERA, "fp32": 163.4 * TERA}, share=0.42,
        memory_bytes_per_s=5.3e12, within_bytes_per_s=448 * GB, between_bytes_per_s=50 * GB,
        host_bytes_per_s=50 * GB, host_memory_bytes=2000 * GB, measured=False,
    ),
    # V100 SXM2 data sheet: 300 GB/s NVLink; AWS p3dn.24xlarge: 8 of them, 100 Gbit/s
    "v100": Device(
        title="V100 SXM 32 GB", memory_bytes=32 * GB, peak_flops={"fp16": 125 * TERA, "fp32": 15.7 * TERA}, share=0.42,
        memory_bytes_per_s=0.9e12, within_bytes_per_s=150 * GB, between_bytes_per_s=1.5625 * GB,
        host_bytes_per_s=12 * GB, host_memory_bytes=768 * GB, measured=False,
    ),
    # L40S, A10G, L4 and T4 data sheets: they have no NVLink, so they reach their neighbors over PCIe 4 or 3. Cloud
    # machines have eight of them (AWS g6e.48xlarge: 400 Gbit/s; g5.48xlarge: 100 Gbit/s) or four
    "l40s": Device(
        title="L40S", memory_bytes=48 * GB, peak_flops={"bf16": 362 * TERA, "fp32": 91.6 * TERA}, share=0.4,
        memory_bytes_per_s=0.864e12, within_bytes_per_s=25 * GB, between_bytes_per_s=6.25 * GB,
        host_bytes_per_s=25 * GB, host_memory_bytes=1536 * GB, measured=False,
    ),
    "a10g": Device(
        title="A10G", memory_bytes=24 * GB, peak_flops={"bf16": 70 * TERA, "fp32": 31.5 * TERA}, share=0.4,
        memory_bytes_per_s=0.6e12, within_bytes_per_s=12 * GB, between_bytes_per_s=1.5625 * GB,
        host_bytes_per_s=12 * GB, host_memory_bytes=768 * GB, measured=False,
    ),
    "l4": Device(
        title="L4", memory_bytes=24 * GB, peak_flops={"bf16": 121 * TERA, "fp32": 30.3 * TERA}, share=0.4,
        memory_bytes_per_s=0.3e12, within_bytes_per_s=12 * GB, between_bytes_per_s=3 * GB,
        host_bytes_per_s=12 * GB, host_memory_bytes=190 * GB, ranks_per_node=4, measured=False,
    ),
    "t4": Device(
        title="T4", memory_bytes=16 * GB, peak_flops={"fp16": 65 * TERA, "fp32": 8.1 * TERA}, share=0.4,
        memory_bytes_per_s=0.32e12, within_bytes_per_s=6 * GB, between_bytes_per_s=1.5 * GB,
        host_bytes_per_s=6 * GB, host_memory_bytes=190 * GB, ranks_per_node=4, measured=False,
    ),
}  # fmt: skip


def named_device(name: str) -> Device:
    """Return the device with that name. Raises ValueError if it isn't in DEVICES."""
    if name not in DEVICES:
        raise ValueError(f"unknown device {name!r}; choose one of {', '.join(DEVICES)}, or give its numbers yourself")
    return DEVICES[name]
