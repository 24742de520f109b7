"""Plans from arithmetic beside torch's own tracker of FSDP2, which follows real tensors and knows none of our formulas."""

import pytest
import torch
import torch.nn.functional as F
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from fsdp_helpers.measuring.rank_of_n import fake_group
from fsdp_helpers.models.shapes import ViTShape
from fsdp_helpers.models.vit import ViT
from fsdp_helpers.planning.models import vit_subject
from fsdp_helpers.planning.plan import Cluster, Settings, make_plan

RANKS = 8
# Few tokens in wide blocks, as ViT-10B has them: highest at a block's end, beside all its gradients ...
WIDE = ViTShape(
    image_size=28, channels=1, patch_size=14, width=512, depth=3, num_heads=8, mlp_width=2048, num_classes=10
)
# ... and many in narrow ones: highest where backward enters the last block
NARROW = ViTShape(
    image_size=28, channels=1, patch_size=4, width=64, depth=3, num_heads=4, mlp_width=256, num_classes=10
)


def tracked_peak(shape: ViTShape, images: int) -> int:
    """Return the tracker's peak of a forward and a backward, with Adam's moments there."""
    with fake_group(RANKS):
        mesh, model = init_device_mesh("cpu", (RANKS,)), ViT(shape)
        for unit in (*model.blocks, model):
            fully_shard(unit, mesh=mesh)
        optimizer = torch.optim.Adam(model.parameters(), fused=True)
        batch, labels = torch.randn(images, 1, 28, 28), torch.zeros(images, dtype=torch.long)
        F.cross_entropy(model(batch), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
        tracker = FSDPMemTracker(model, optimizer)
        with tracker:
            F.cross_entropy(model(batch), labels).backward()
        (snapshot,) = tracker.get_tracker_snapshot("peak").values()
        return snapshot["Total"]


@pytest.mark.parametrize("shape, images, when", [(WIDE, 16, "with the gradient of blocks"), (NARROW, 32, "in blocks")])
def test_the_plan_agrees_with_torchs_tracker(shape, images, when):
    plan = make_plan(
        vit_subject("vit", shape), Settings(batch=images), Cluster(world_size=RANKS, device_memory_bytes=1e9)
    )
    tracked = tracked_peak(shape, images)
    print(f"{plan.peak.when}: planned {plan.peak.bytes:,}, tracked {tracked:,}: {tracked / plan.peak.bytes:.5f}")
    assert when in plan.peak.when
    assert tracked == pytest.approx(plan.peak.bytes, rel=0.001)
