import pytest

from fsdp_helpers.quantities import format_bytes, format_count, format_seconds


@pytest.mark.parametrize(
    "num_bytes, text",
    [
        (0, "0 B"),
        (999, "999 B"),
        (1_000, "1.00 kB"),  # 1 kB = 10^3, not 1,024
        (4_799_528, "4.80 MB"),  # ShallowNet's parameters: 1,199,882 x 4
        (1_505_667_744, "1.51 GB"),  # DeepNet's: 94,104,234 x 16
        (-2_500_000, "-2.50 MB"),  # a difference may be negative
    ],
)
def test_format_bytes(num_bytes, text):
    assert format_bytes(num_bytes) == text


@pytest.mark.parametrize(
    "seconds, text",
    [
        (0.00085, "850 µs"),
        (0.0123, "12.3 ms"),
        (4.56, "4.56 s"),
        (119.0, "119 s"),
        (200.0, "3 min 20 s"),  # 3 x 60 + 20
    ],
)
def test_format_seconds(seconds, text):
    assert format_seconds(seconds) == text


def test_format_count():
    assert format_count(1_199_882) == "1,199,882"
