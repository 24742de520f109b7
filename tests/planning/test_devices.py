"""Devices, from their data sheets."""

import pytest

from fsdp_helpers.planning.cluster import Cluster
from fsdp_helpers.planning.devices import DEVICES, LINK_SHARE

TERA = 1e12
# name, GB, TFLOPS in half precision, GB/s to a neighbor in the node one way, Gbit/s out of a node for each device
SHEETS = [
    ("h100", 80, 989, 450, 400),
    ("h200", 141, 989, 450, 400),
    ("a100", 80, 312, 300, 200),
    ("a100-40", 40, 312, 300, 200),
    ("b200", 180, 2250, 900, 400),
    ("gb200", 186, 2500, 900, 400),
    ("mi300x", 192, 1307, 448, 400),
    ("l40s", 48, 362, 25, 50),
    ("a10g", 24, 70, 12, 12.5),
    ("v100", 32, 125, 150, 12.5),
    ("l4", 24, 121, 12, 24),
    ("t4", 16, 65, 6, 12),
]


@pytest.mark.parametrize("name, memory_gb, tflops, within_gb_s, gbit_s", SHEETS)
def test_a_device_is_its_data_sheet(name, memory_gb, tflops, within_gb_s, gbit_s):
    cluster = Cluster.of(name, 8, "fp16")
    assert (cluster.device_memory_bytes, cluster.peak_flops_per_s) == (memory_gb * 1e9, tflops * TERA)
    assert cluster.bandwidth_bytes_per_s == pytest.approx(LINK_SHARE * gbit_s * 1e9 / 8)
    assert cluster.within_bytes_per_s == pytest.approx(LINK_SHARE * within_gb_s * 1e9)
    assert cluster.is_typical and not Cluster.of(name, 8, "fp16", flops_per_s=1e12).is_typical


def test_every_device_has_a_row():
    assert [name for name, *_ in SHEETS] == sorted(DEVICES, key=[name for name, *_ in SHEETS].index)


@pytest.mark.parametrize("name", ["v100", "t4"])
def test_devices_without_bf16(name):
    for precision in ("bf16", "pure-bf16"):
        with pytest.raises(ValueError, match="doesn't support bf16; use --precision fp16"):
            Cluster.of(name, 8, precision)
