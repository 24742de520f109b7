"""A language model's lessons: tokens count once whatever the ranks, chunks and adapters change bytes and no number."""

import os
from dataclasses import replace
from functools import partial

import pytest
import torch
from safetensors.torch import load_file

from fsdp_helpers.checkpointing.hugging_face import save_hugging_face
from fsdp_helpers.data.text import docstring_documents
from fsdp_helpers.models.llama import IGNORED, Llama
from fsdp_helpers.models.shapes import BYTE_LLAMA, config_of_llama
from fsdp_helpers.ranks.launching.launch import RankError, launch
from fsdp_helpers.teaching.lessons import language, language_memory
from fsdp_helpers.teaching.lessons.fine_tune import Documents, FineTune, fine_tune, learning_rate_at

SHAPE = replace(BYTE_LLAMA, width=32, depth=2, mlp_width=64)
LENGTHS = (32, 28, 8, 4)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> str:
    """A small model with large enough weights to have something to say."""
    torch.manual_seed(0)
    model = Llama(SHAPE)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(5 if parameter.dim() == 2 else 1)
    path = tmp_path_factory.mktemp("language") / "model"
    save_hugging_face(model, path, config_of_llama(SHAPE))
    return str(path)


def documents_of(lengths: tuple[int, ...]) -> list[str]:
    """Texts with that many tokens to predict, so one byte more."""
    text = " ".join(docstring_documents())
    return [text[100 * number : 100 * number + length + 1] for number, length in enumerate(lengths)]


def on_ranks(worker, *arguments, world_size: int) -> list:
    return launch(worker, *arguments, world_size=world_size, device="cpu", progress=False)


def test_padding_and_packing_worked_by_hand():
    numbers, targets = language.pad(["abc", "de"])
    assert (numbers.tolist(), targets.tolist()) == ([[97, 98], [100, 0]], [[98, 99], [101, IGNORED]])
    numbers, targets, owners = language.pack(["abc", "de"])
    assert (numbers.tolist(), targets.tolist(), owners.tolist()) == ([[97, 98, 100]], [[98, 99, 101]], [[0, 0, 1]])


def test_a_start_needs_its_buffers(folder):
    for found in on_ranks(language.look_at_start, folder, "some text", world_size=2):
        assert found.is_tied and found.difference == 0
        assert found.without_buffers > 0.01
        assert found.own_bytes == 4 * sum(parameter.numel() for parameter in Llama(SHAPE).parameters()) / 2


@pytest.mark.parametrize("num_parts", [1, 2])
def test_the_mean_of_means_is_wrong_and_tokens_are_right(folder, num_parts):
    (found, _) = on_ranks(language.error_of_gradient, folder, documents_of(LENGTHS), num_parts, world_size=2)
    assert found["means"] > 0.2
    assert found["tokens"] < 1e-5


def test_20_steps_equal_one_process(folder):
    """Unequal lengths, two micro-batches, chunked logits: within 1e-5 on 2 and on 3 ranks."""
    lengths = [[4 + (step * 7 + index * 13) % 60 for index in range(12)] for step in range(20)]
    batches = [documents_of(tuple(row)) for row in lengths]
    chunked = partial(language_memory.chunked_loss, num_chunks=4)
    right = on_ranks(language.losses_by_tokens, folder, batches, 1, world_size=1)[0]
    assert right[-1] < right[0]
    for world_size in (2, 3):
        losses = on_ranks(language.losses_by_tokens, folder, batches, 2, chunked, world_size=world_size)[0]
        assert losses == pytest.approx(right, abs=1e-5)


def test_packed_documents_have_the_loss_of_padded_ones(folder):
    (found,) = on_ranks(language.compare_packing, folder, documents_of(LENGTHS), world_size=1)
    assert (found["padded"][0], found["packed"][0]) == (4 * 32, sum(LENGTHS))
    assert found["packed"][1] == pytest.approx(found["padded"][1], abs=1e-5)
    assert abs(found["packed, no mask"][1] - found["padded"][1]) > 1e-3


def test_rank_0_speaks_alone_and_training_goes_on(folder):
    first, second = on_ranks(language.speak_on_rank_0, folder, "The ", 8, world_size=2)
    assert first.startswith("The ") and second is None


# ---------------------------------------------------------------- memory


def test_the_bytes_of_the_logits():
    # 1,024 tokens x 8,000 words x 4 bytes = 32.8 MB: log-probabilities, their gradient, and that of the logits.
    # In 4 chunks a quarter of that, and the gradient of the head (8,000 x 32 x 4 = 1.0 MB), which grows by addition.
    shape, words = replace(SHAPE, vocabulary=8_000), 1_024 * 8_000 * 4
    for num_chunks, predicted in ((1, 3 * words), (4, 3 * words // 4 + 8_000 * 32 * 4)):
        (curve,) = on_ranks(language_memory.curve_of_loss, shape, 1_024, num_chunks, world_size=1)
        assert curve.peak_bytes / predicted == pytest.approx(1, abs=0.02)


def test_chunks_have_the_same_loss_and_gradients():
    torch.manual_seed(0)
    head, targets = torch.nn.Linear(8, 30, bias=False), torch.randint(30, (2, 7))
    targets[0, 3] = IGNORED
    found = []
    for loss in (language_memory.summed_loss, partial(language_memory.chunked_loss, num_chunks=4)):
        hidden = torch.randn(2, 7, 8, generator=torch.Generator().manual_seed(1)).requires_grad_()
        head.zero_grad()
        value = loss(hidden, head, targets)
        value.backward()
        found.append((value.detach(), hidden.grad, head.weight.grad.clone()))
    assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(*found, strict=True))


def test_adapters_alone(folder, tmp_path):
    """Per layer q: 8 x (32 + 32), v: 8 x (32 + 16); two layers: 1,792 values, of 4 bytes, and 16 in training."""
    path = str(tmp_path / "adapters.safetensors")
    batches = [documents_of((20, 9, 14, 30))] * 6
    for found in on_ranks(language_memory.train_adapters, folder, batches, path, world_size=2):
        assert found.losses[-1] < found.losses[0] - 0.05
        assert found.loss_merged == pytest.approx(found.loss_after, abs=1e-5)
        assert (found.state.gradient_bytes, found.state.optimizer_bytes) == (1_792 * 4 // 2, 1_792 * 8 // 2)
    tensors = load_file(path)
    assert sum(tensor.numel() for tensor in tensors.values()) == 1_792
    assert all(name.endswith((".lora_a", ".lora_b")) for name in tensors)


def test_adapters_of_the_kept_model_are_small():
    model = language_memory.add_adapters(Llama(BYTE_LLAMA), 8)
    trained = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    assert trained <= 0.05 * 4 * 1_214_080


# ---------------------------------------------------------------- one worker with everything


def test_killed_and_resumed_on_three_ranks(folder, tmp_path):
    run = FineTune(folder=folder, documents=documents_of((20, 9, 14, 30) * 9), steps=8, batch=12, precision="fp32")
    run = replace(run, save_every=2, warm_up=2)
    right = on_ranks(fine_tune, run, world_size=2)[0]
    assert [step for step, _ in right] == list(range(1, 9))
    kept = replace(run, run=str(tmp_path / "run"), out=str(tmp_path / "out"))
    with pytest.raises(RankError, match="SIGKILL"):
        on_ranks(fine_tune, replace(kept, kill_after=5), world_size=2)
    resumed = on_ranks(fine_tune, kept, world_size=3)[0]
    first = resumed[0][0]
    assert first in (3, 5)  # the checkpoint of step 4 may have been under way
    assert [loss for _, loss in resumed] == pytest.approx([loss for _, loss in right[first - 1 :]], abs=1e-5)
    assert "config.json" in os.listdir(tmp_path / "out")


def test_the_learning_rate_worked_by_hand():
    run = FineTune(folder="", documents=[], steps=12, warm_up=4)
    # a quarter of it in the first step; all of it at step 4; half-way (step 8): 0.1 + 0.9 / 2; a tenth in the end
    assert [learning_rate_at(run, step) for step in (0, 3, 4, 8, 12)] == pytest.approx([0.25, 1, 1, 0.55, 0.1])


def test_documents_go_on_where_they_were():
    documents = Documents(list("abcdefg"), batch=3)
    seen = [next(documents) for _ in range(4)]
    assert len({*seen[0], *seen[1]}) == 6 and seen[0] != seen[2]  # an epoch has two whole batches
    later = Documents(list("abcdefg"), batch=3)
    later.load_state_dict({"position": 2})
    assert [next(later), next(later)] == seen[2:]
