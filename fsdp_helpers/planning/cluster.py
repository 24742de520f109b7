"""A cluster: the devices and links that a plan is made for. No torch import."""

from dataclasses import dataclass, fields

from fsdp_helpers.config import is_number, require_positive_int, setting
from fsdp_helpers.planning.devices import DEVICES, LINK_SHARE, named_device
from fsdp_helpers.planning.network import BETWEEN_LATENCY_S, START_S, WITHIN_LATENCY_S, Network
from fsdp_helpers.quantities import GB

# CUDA's context with its kernels: 0.5 to 2 GB. S. Bekman, "Machine Learning Engineering", on additional GPU memory use.
CONTEXT_BYTES = 2 * GB
# NCCL's buffers (4 MiB for each channel between two devices, NCCL_BUFFSIZE) and fragmentation of the allocator's pool.
# We chose this number; it's neither calculated nor measured.
NCCL_AND_FRAGMENTATION_BYTES = 2 * GB
LINK_BYTES_PER_S = 50e9  # 400 Gbit/s for each device, as in many clusters
HOST_LINK_BYTES_PER_S = 25e9  # PCIe 4 x16
# We chose this number, since no GPU's name tells it: in our runs, one thread reached 6 GB/s, and 16 cores over 100.
HOST_UPDATE_BYTES_PER_S = 20e9
MOST_RANKS = 2**20


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """A cluster's devices, one per rank: their memory, links and speed.

    Raises ValueError for an impossible cluster.
    """

    world_size: int
    device_memory_bytes: float = setting(
        None,
        "memory of each device, in 10^9 bytes; required unless you name a --device",
        flag="device-memory-gb",
        factor=GB,
    )
    bandwidth_bytes_per_s: float = setting(
        LINK_BYTES_PER_S,
        "rate at which a rank sends to other nodes (default: 50, a 400 Gbit/s link)",
        flag="bandwidth-gb-s",
        factor=GB,
    )
    flops_per_s: float | None = setting(
        None, "a device's actual speed, not the one on its data sheet, in 10^12 operations per second", flag="tflops",
        factor=1e12,
    )  # fmt: skip
    allowance_bytes: float = setting(
        CONTEXT_BYTES + NCCL_AND_FRAGMENTATION_BYTES,
        "memory set aside for everything that isn't calculated: CUDA's context, NCCL and fragmentation (default: 4)",
        flag="allowance-gb",
        factor=GB,
    )
    ranks_per_node: int = setting(1, "ranks that share a node (default: 1)")
    within_bytes_per_s: float | None = setting(
        None, "rate at which a rank sends within its node", flag="within-gb-s", factor=GB
    )
    within_latency_s: float = WITHIN_LATENCY_S
    between_latency_s: float = setting(
        BETWEEN_LATENCY_S,
        "latency of each hop of a ring between nodes, in microseconds",
        flag="latency-us",
        factor=1e-6,
    )
    start_latency_s: float = START_S
    host_bytes_per_s: float = setting(
        HOST_LINK_BYTES_PER_S, "rate at which data moves between a device and its host", flag="host-gb-s", factor=GB
    )
    host_update_bytes_per_s: float = setting(
        HOST_UPDATE_BYTES_PER_S, "rate at which an offloaded optimizer reads and writes host memory (default: 20)",
        flag="host-update-gb-s", factor=GB,
    )  # fmt: skip
    host_memory_bytes: float | None = setting(None, "host memory of each node", flag="host-memory-gb", factor=GB)
    memory_bytes_per_s: float | None = None  # of a device
    peak_flops_per_s: float | None = None  # on the data sheet, in the precision of the run
    device: str | None = setting(
        None, "sets the memory, rates and links; the flags below override them one by one", choices=tuple(DEVICES)
    )

    def __post_init__(self) -> None:
        for name in ("world_size", "ranks_per_node"):
            require_positive_int(name, getattr(self, name))
        if self.world_size > MOST_RANKS:
            raise ValueError(f"world_size is {self.world_size:,}; the planner supports at most {MOST_RANKS:,} ranks")
        if self.device_memory_bytes is None:
            raise ValueError("the device's memory is missing; give --device-memory-gb, or name a --device")
        for one in fields(self):
            value = getattr(self, one.name)
            if one.name in ("world_size", "ranks_per_node", "device") or value is None:
                continue
            or_more = one.name == "allowance_bytes" or one.name.endswith("latency_s")
            if not (is_number(value) and (value > 0 or value == 0 and or_more)):
                lowest = "a number, zero or more" if or_more else "a number above zero"
                raise ValueError(f"{one.name} is {value}; it must be {lowest}")

    @classmethod
    def of(cls, device: str, world_size: int, precision: str = "bf16", **changes) -> "Cluster":
        """Return a cluster of `world_size` devices of this type, in their usual nodes; `changes` override the defaults.

        Raises ValueError for an unknown device, or for a precision that the device doesn't support.
        """
        found = named_device(device)
        peak = found.peak(precision)
        usual = {
            "device": device,
            "device_memory_bytes": found.memory_bytes,
            "bandwidth_bytes_per_s": LINK_SHARE * found.between_bytes_per_s,
            "within_bytes_per_s": LINK_SHARE * found.within_bytes_per_s,
            "ranks_per_node": found.ranks_per_node,
            "host_bytes_per_s": found.host_bytes_per_s,
            "host_memory_bytes": found.host_memory_bytes,
            "memory_bytes_per_s": found.memory_bytes_per_s,
            "peak_flops_per_s": peak,
            "flops_per_s": found.share * peak,
        }
        return cls(world_size=world_size, **(usual | changes))

    @property
    def is_typical(self) -> bool:
        """Return True if the rate is the share of the peak that published runs reach, rather than a rate you gave."""
        if self.device is None or self.peak_flops_per_s is None:
            return False
        return self.flops_per_s == named_device(self.device).share * self.peak_flops_per_s

    @property
    def node_ranks(self) -> int:
        """Return the largest number of ranks in any node."""
        return min(self.ranks_per_node, self.world_size)

    @property
    def network(self) -> Network:
        return Network(
            between_bytes_per_s=self.bandwidth_bytes_per_s,
            within_bytes_per_s=self.within_bytes_per_s,
            ranks_per_node=self.ranks_per_node,
            within_latency_s=self.within_latency_s,
            between_latency_s=self.between_latency_s,
            start_s=self.start_latency_s,
        )
