"""CUDA's caching allocator as a small model: how it rounds, which block it hands out, and what its history notes."""

from dataclasses import dataclass, field

SMALLEST, SMALL, ROUND_LARGE = 512, 2**20, 2**21
SMALL_SEGMENT, LARGE_SEGMENT, LARGEST_IN_SEGMENT = 2 * 2**20, 20 * 2**20, 10 * 2**20


@dataclass
class CachingAllocator:
    """Blocks by address. `noted` is what `torch.cuda.memory._snapshot()["device_traces"]` has of one device."""

    allocated_bytes: int = 0  # of blocks that were handed out
    reserved_bytes: int = 0
    time_us: int = 0
    noted: list[dict] = field(default_factory=list)
    _free: dict[int, int] = field(default_factory=dict)  # size of each free block, by its address
    _handed_out: dict[int, tuple[int, int]] = field(default_factory=dict)  # block size and request, by address

    def malloc(self, requested: int) -> int:
        """The address of a block of at least `requested` bytes."""
        rounded = -(-requested // SMALLEST) * SMALLEST
        is_small = rounded <= SMALL
        fitting = {a: size for a, size in self._free.items() if size >= rounded and _is_small(a) == is_small}
        address = min(fitting, key=fitting.get) if fitting else self._new_segment(rounded, is_small)
        size = self._free.pop(address)
        left = size - rounded
        if left >= SMALLEST if is_small else left > SMALL:  # a large block is given whole if 1 MiB or less is left
            self._free[address + rounded] = left
            size = rounded
        self._handed_out[address] = size, requested
        self.allocated_bytes += size
        self._note("alloc", address, requested)
        return address

    def free(self, address: int) -> None:
        size, requested = self._handed_out.pop(address)
        self._free[address] = size
        self.allocated_bytes -= size
        self._note("free_requested", address, requested)
        self._note("free_completed", address, requested)

    def _new_segment(self, rounded: int, is_small: bool) -> int:
        large = LARGE_SEGMENT if rounded < LARGEST_IN_SEGMENT else -(-rounded // ROUND_LARGE) * ROUND_LARGE
        size = SMALL_SEGMENT if is_small else large
        address = 2 * self.reserved_bytes * SMALLEST + is_small  # odd in segments of small blocks, even in others
        self.reserved_bytes += size
        self._free[address] = size
        self._note("segment_alloc", address, size)
        return address

    def _note(self, action: str, address: int, size: int) -> None:
        self.time_us += 1
        self.noted.append({"action": action, "addr": address, "size": size, "time_us": self.time_us})


def _is_small(address: int) -> bool:
    return address % 2 == 1
