"""Devices by name: memory, rates, links, and the share of the data sheet that training reaches. No torch.

Rates are those of the data sheets, dense, without sparsity; links are one direction of what a sheet adds up for both.
fp32 is torch's default, which does not use TF32.

The share is what the arithmetic of a step reaches while nothing waits. It is a median of published training runs, and
they differ by a quarter to either side: torchtitan on A100s, 51 to 61 % MFU without and 69 % of the hardware's rate
with recomputing (`docs/performance.md`); fms-fsdp on A100s, 57 % (README); torchtitan on H100s at 500 W, 33 to 39 %
(`benchmarks/llama3_h100_202412_torchtitan.md`); the Llama 3 paper, 38 to 43 % (table 4); MPT on H100s, 40 to 46 %
without recomputing (llm-foundry, `scripts/train/benchmarking/README.md`). For devices without such a run the share is
that of the nearest one, and the plan says so.
"""

from dataclasses import dataclass

GB, TERA = 10**9, 10**12
TYPICAL_RANGE = 0.25  # published runs of one device lie so far to either side of the share


@dataclass(frozen=True, kw_only=True)
class Device:
    """The data sheet of a device, and of the machine that usually holds it."""

    title: str
    memory_bytes: float
    peak_flops: dict[str, float]  # by precision
    share: float  # of the peak, that training reaches
    memory_bytes_per_s: float
    within_bytes_per_s: float  # to the other devices of the node
    between_bytes_per_s: float  # out of the node, a device's share
    host_bytes_per_s: float  # to and from host memory
    host_memory_bytes: float  # of a node
    ranks_per_node: int = 8
    measured: bool = True  # whether published runs gave the share

    def peak(self, precision: str) -> float:
        """Return the rate of the data sheet. Raises ValueError for a precision that the device has no units for."""
        rate = self.peak_flops.get("bf16" if "bf16" in precision else precision)
        if rate is None:
            raise ValueError(
                f"{self.title} has no arithmetic in bf16; use --precision fp32, or a device from Ampere (2020) on"
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
    # L4 and T4 data sheets: no NVLink, so neighbors are reached over PCIe 4 and 3; cloud machines with four of them
    "l4": Device(
        title="L4", memory_bytes=24 * GB, peak_flops={"bf16": 121 * TERA, "fp32": 30.3 * TERA}, share=0.4,
        memory_bytes_per_s=0.3e12, within_bytes_per_s=12 * GB, between_bytes_per_s=3 * GB,
        host_bytes_per_s=12 * GB, host_memory_bytes=190 * GB, ranks_per_node=4, measured=False,
    ),
    "t4": Device(
        title="T4", memory_bytes=16 * GB, peak_flops={"fp32": 8.1 * TERA}, share=0.6,
        memory_bytes_per_s=0.32e12, within_bytes_per_s=6 * GB, between_bytes_per_s=1.5 * GB,
        host_bytes_per_s=6 * GB, host_memory_bytes=190 * GB, ranks_per_node=4, measured=False,
    ),
}  # fmt: skip


def named_device(name: str) -> Device:
    """Return the device of that name. Raises ValueError for one that is not among DEVICES."""
    if name not in DEVICES:
        raise ValueError(f"unknown device {name!r}; choose one of {', '.join(DEVICES)}, or give its numbers")
    return DEVICES[name]
