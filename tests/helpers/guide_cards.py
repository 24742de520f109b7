"""The cards of the field guide, as parameters of tests."""

import pytest
import torch
from torch.torch_version import TorchVersion

from fsdp_helpers.field_guide import Card, cards


def parameter(card: Card):
    is_old = card.needs and TorchVersion(torch.__version__) < card.needs
    marks = [pytest.mark.skip(reason=f"needs torch >= {card.needs}")] if is_old else []
    return pytest.param(card, id=card.name, marks=marks)


SCRIPTS = [parameter(card) for card in cards().values() if card.code]
