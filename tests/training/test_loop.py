import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fsdp_helpers.training.loop import batch_loss, evaluate, train_one_epoch, train_step


def one_weight() -> nn.Linear:
    """Two classes from one input, all weights zero: both have probability 1/2."""
    model = nn.Linear(1, 2, bias=False)
    nn.init.zeros_(model.weight)
    return model


def test_train_step_hand_worked():
    model = one_weight()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    images, labels = torch.tensor([[1.0], [3.0]]), torch.tensor([0, 0])
    loss = train_step(model, images, labels, optimizer)
    # Both classes have probability 1/2, so the mean loss is ln 2 = 0.69315, taken before the update.
    assert loss.item() == pytest.approx(0.69315, abs=1e-5)
    assert not loss.requires_grad
    # Gradient of the mean: class 0 mean((1/2 - 1) x) = (-0.5 - 1.5) / 2 = -1, class 1 the opposite.
    # One step with learning rate 1: weights 0 - (-1) = 1 and 0 - 1 = -1.
    assert model.weight.flatten().tolist() == pytest.approx([1.0, -1.0])


def test_the_loss_of_a_model_in_bf16_is_in_fp32():
    loss = batch_loss(one_weight().bfloat16(), torch.ones(2, 1, dtype=torch.bfloat16), torch.tensor([0, 1]))
    assert loss.dtype == torch.float32 and loss.item() == pytest.approx(0.69315, abs=1e-5)  # ln 2; in bf16 0.6914


def test_gradients_do_not_pile_up():
    model = one_weight()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)  # the weights stay, so the gradient must stay too
    batch = torch.tensor([[1.0]]), torch.tensor([0])
    train_step(model, *batch, optimizer)
    first = model.weight.grad.clone()
    train_step(model, *batch, optimizer)
    assert torch.equal(model.weight.grad, first)


def test_one_loss_a_step_and_a_call_after_each():
    model = nn.Sequential(nn.Dropout(0.0), one_weight()).eval()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batches = [(torch.ones(2, 1), torch.zeros(2, dtype=torch.int64))] * 3
    seen = []
    losses = train_one_epoch(model, iter(batches), optimizer, after_step=lambda *call: seen.append(call))
    assert losses.shape == (3,)
    assert losses[0] > losses[1] > losses[2]
    assert [loss.item() for loss, _ in seen] == losses.tolist()
    # 2 images of 4 bytes and 2 labels of 8 bytes
    assert [batch_bytes for _, batch_bytes in seen] == [24] * 3
    assert model.training  # it switched dropout on


def test_evaluate_sums_over_batches_of_any_size():
    model = nn.Sequential(nn.Dropout(0.5), nn.Flatten(), nn.Linear(4, 3)).train()
    images, labels = torch.randn(7, 1, 2, 2), torch.tensor([0, 1, 2, 0, 1, 2, 0])
    loss, correct, count = evaluate(model, [(images[:5], labels[:5]), (images[5:], labels[5:])]).tolist()
    assert not model.training  # it switched dropout off
    with torch.no_grad():
        outputs = model(images)
    assert count == 7
    assert correct == (outputs.argmax(dim=1) == labels).sum().item()
    assert loss == pytest.approx(F.cross_entropy(outputs, labels, reduction="sum").item(), rel=1e-6)


def test_evaluate_counts_nothing_for_an_empty_batch():
    model = one_weight()
    empty = torch.empty(0, 1), torch.empty(0, dtype=torch.int64)
    assert evaluate(model, [empty]).tolist() == [0.0, 0.0, 0.0]


def test_evaluate_leaves_no_gradient():
    model = one_weight()
    evaluate(model, [(torch.ones(1, 1), torch.zeros(1, dtype=torch.int64))])
    assert model.weight.grad is None


def test_evaluation_calls_layers_one_by_one():
    """A transformer layer's fast path would read weights that FSDP1 has not gathered."""
    model, seen = one_weight(), []
    model.register_forward_hook(lambda *_: seen.append(torch.backends.mha.get_fastpath_enabled()))
    evaluate(model, [(torch.tensor([[1.0]]), torch.tensor([0]))])
    assert (seen, torch.backends.mha.get_fastpath_enabled()) == ([False], True)
