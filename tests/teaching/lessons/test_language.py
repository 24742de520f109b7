"""What the exercises of 13 share: chunks and adapters change bytes and no number."""

from functools import partial

import pytest
import torch

from fsdp_helpers.models.llama import IGNORED, Llama, summed_loss
from fsdp_helpers.models.shapes import BYTE_LLAMA
from fsdp_helpers.teaching.lessons import language


def test_chunks_have_the_same_loss_and_gradients(monkeypatch):
    torch.manual_seed(0)
    head, targets = torch.nn.Linear(8, 30, bias=False), torch.randint(30, (2, 7))
    targets[0, 3] = IGNORED
    sizes = []
    head.register_forward_hook(lambda _, inputs, output: sizes.append(len(output.flatten(0, -2))))
    found = []
    for loss in (summed_loss, partial(language.chunked_loss, num_chunks=4)):
        hidden = torch.randn(2, 7, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
        head.zero_grad()
        value = loss(hidden, head, targets)
        value.backward()
        found.append((value.detach(), hidden.grad, head.weight.grad.clone()))
    assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(*found, strict=True))
    assert sizes == [14] + [4, 4, 4, 2] + [2, 4, 4, 4]  # backward computes each chunk's logits again, the last first


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
