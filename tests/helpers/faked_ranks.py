"""Where this torch cannot fake the other ranks, so that no test can measure one rank of N."""

import pytest

from fsdp_helpers.measuring.rank_of_n import can_fake_ranks

fakes_ddp = pytest.mark.skipif(not can_fake_ranks("ddp"), reason="this torch cannot fake DDP's other ranks")
