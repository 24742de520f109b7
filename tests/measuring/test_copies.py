"""The trace of offload's copies; of a whole step it is held against arithmetic in `teaching/test_unit_probes.py`."""

import pytest
import torch
from torch import nn

from fsdp_helpers.measuring.copies import TO_HOST, OffloadCopy, trace_copies


def test_other_calls_are_not_noted_and_torch_is_left_as_it_was():
    before, model = torch.Tensor.to, nn.Linear(2, 2)
    with trace_copies(model) as copies:
        assert torch.Tensor.to is not before
        torch.ones(2).to(torch.device("cpu"))  # not called by FSDP2
    assert copies == [] and torch.Tensor.to is before
    with pytest.raises(KeyError), trace_copies(model):
        raise KeyError
    assert torch.Tensor.to is before


def test_the_unit_of_a_copy_is_the_innermost_one():
    copy = OffloadCopy(name="body.1.fc.weight", way=TO_HOST, bytes=4, start_s=0.0, was_made=True)
    assert [copy.unit(units) for units in ([], ["body"], ["body", "body.1"], ["body.10"])] == [
        "root",
        "body",
        "body.1",
        "root",
    ]
