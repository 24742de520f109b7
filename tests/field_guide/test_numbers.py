"""Numbers that a card's text gives, and its own script doesn't compute."""

import pytest
import torch

from fsdp_helpers.field_guide import cards


def muon_update(gradient: torch.Tensor) -> torch.Tensor:
    parameter = torch.nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient.clone()
    torch.optim.Muon([parameter], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False).step()
    return -parameter.detach()


@pytest.mark.parametrize("shape, ranks, right", [((64, 64), 8, 0.69), ((256, 1024), 8, 0.30)])
def test_muon_on_rows_differs_by_as_much_as_its_card_says(shape, ranks, right):
    """The largest and the smallest of the differences that were measured; its loop computes in bf16."""
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    full = muon_update(gradient)
    of_rows = torch.cat([muon_update(rows) for rows in gradient.chunk(ranks)])
    assert float((of_rows - full).norm() / full.norm()) == pytest.approx(right, abs=0.05)
    assert "30 to 69%" in cards()["wrong-muon-local-rows"].part("Why")


def test_averaged_variances_leave_out_how_far_means_are_apart():
    def variance(samples: torch.Tensor) -> float:
        layer = torch.nn.BatchNorm1d(samples.shape[1], momentum=None)
        layer(samples)
        return layer.running_var.mean().item()

    for apart, averaged, of_all in ((0.0, 1.05, 1.06), (2.0, 1.05, 1.96)):
        first, second = torch.randn(64, 8, generator=torch.Generator().manual_seed(1)).chunk(2)
        second = second + apart
        assert (variance(first) + variance(second)) / 2 == pytest.approx(averaged, abs=0.02)
        assert variance(torch.cat([first, second])) == pytest.approx(of_all, abs=0.02)
    assert "1.05 instead of 1.96" in " ".join(cards()["wrong-batchnorm"].text.split())
