"""For tests of one rank of many: where it cannot be."""

import pytest

from fsdp_helpers.measuring.rank_of_n import can_imagine

imagines_ddp = pytest.mark.skipif(not can_imagine("ddp"), reason="this torch cannot imagine DDP's other ranks")
