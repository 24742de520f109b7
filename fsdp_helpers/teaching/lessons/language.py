"""What notebook 13, its exercises and the planner's tests share about a language model."""

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fsdp_helpers.checkpointing.hugging_face import load_hugging_face, read_config
from fsdp_helpers.models.llama import IGNORED, Llama
from fsdp_helpers.models.shapes import llama_from_config

ADAPTED = ("q_proj", "v_proj")  # as in Hu et al. 2021, arXiv:2106.09685
ADAPTERS = ("lora_a", "lora_b")
SCALE = 2.0


def start_plain(folder: str) -> Llama:
    """Start a Llama from a Hugging Face folder in one process, on the CPU."""
    model = Llama(llama_from_config(read_config(folder)))
    load_hugging_face(model, folder)
    return model


def pad(documents: Sequence[str]) -> tuple[Tensor, Tensor]:
    """Return documents as rows of equal length, numbers and targets, (N, length) each; padding has no loss."""
    texts = [torch.tensor(list(text.encode())) for text in documents]
    numbers = nn.utils.rnn.pad_sequence([text[:-1] for text in texts], batch_first=True)
    targets = nn.utils.rnn.pad_sequence([text[1:] for text in texts], batch_first=True, padding_value=IGNORED)
    return numbers, targets


def whole_gradient(model: nn.Module) -> Tensor:
    """Return the full gradient as one vector, on every rank."""
    return torch.cat([getattr(p.grad, "full_tensor", lambda grad=p.grad: grad)().flatten() for p in model.parameters()])


def add_adapters(model: nn.Module, rank: int, names: tuple[str, str] = ADAPTERS) -> nn.Module:
    """Freeze the model, and add to some of its layers the product of two thin matrices, which are not drawn yet.

    The names of what was there do not change, so its files still fit. An adapter that is there already, under other
    names, is frozen and counts.
    """
    model.requires_grad_(False)
    for name, layer in model.named_modules():
        if name.endswith(ADAPTED):
            like = {"device": layer.weight.device, "dtype": torch.float32}  # what is trained stays fp32
            layer.register_parameter(names[0], nn.Parameter(torch.empty(rank, layer.in_features, **like)))
            layer.register_parameter(names[1], nn.Parameter(torch.empty(layer.out_features, rank, **like)))
            layer.register_forward_hook(partial(add_low_rank, names))
    return model


def add_low_rank(names: tuple[str, str], layer: nn.Linear, inputs: tuple[Tensor], output: Tensor) -> Tensor:
    first, second = (getattr(layer, name) for name in names)
    thin = F.linear(inputs[0].to(first.dtype), first)
    return output + (SCALE * F.linear(thin, second)).to(output.dtype)
