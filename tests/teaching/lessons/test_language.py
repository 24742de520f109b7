"""What notebook 13 and its exercises share: padding and adapters change bytes and no number."""

import pytest
import torch

from fsdp_helpers.models.llama import IGNORED, Llama
from fsdp_helpers.models.shapes import BYTE_LLAMA
from fsdp_helpers.teaching.lessons import language


def test_padding_worked_by_hand():
    numbers, targets = language.pad(["abc", "de"])
    assert (numbers.tolist(), targets.tolist()) == ([[97, 98], [100, 0]], [[98, 99], [101, IGNORED]])


def test_adapters_of_the_kept_model_are_small_and_start_with_no_change():
    model = Llama(BYTE_LLAMA)
    numbers = torch.arange(24).view(2, 12)
    right = model(numbers)
    model = language.add_adapters(model, 8)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert sum(parameter.nbytes for parameter in trained) <= 0.05 * 4 * 1_214_080
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith(language.ADAPTERS):
                parameter.normal_() if name.endswith("lora_a") else parameter.zero_()
    assert torch.equal(model(numbers), right)


def test_a_second_adapter_freezes_the_first_and_adds_to_it():
    model = language.add_adapters(language.add_adapters(Llama(BYTE_LLAMA), 2), 3, ("second_a", "second_b"))
    assert {name.rpartition(".")[2] for name, one in model.named_parameters() if one.requires_grad} == {
        "second_a",
        "second_b",
    }
    layer = model.model.layers[0].self_attn.q_proj
    with torch.no_grad():
        for name in (*language.ADAPTERS, "second_a", "second_b"):
            getattr(layer, name).fill_(0.1)
        inputs = torch.randn(1, layer.in_features)
        added = layer(inputs) - torch.nn.functional.linear(inputs, layer.weight)
    assert added[0, 0].item() == pytest.approx(2.0 * 0.01 * 5 * inputs.sum().item(), rel=1e-3)  # ranks 2 and 3
