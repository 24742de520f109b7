"""# Some tensors share memory, and safetensors refuses them

**Why.** The head uses the embedding's weight, or the dictionary contains views of one flat tensor. safetensors won't
write the same storage twice.

**How to tell.** The message lists the names of the tensors. With tied weights, `model.config.tie_word_embeddings` is
True.

**The fix.** Use `safetensors.torch.save_model(model, path)`, or drop one of the two names and tie the weights again
after loading. With a flat parameter, gather a full state dict first instead of saving views.

**What you see.** The script needs safetensors as well:

    Some tensors share memory, this will lead to duplicate memory on disk

**Also seen as**

- saving a model with tied weights as safetensors fails: lm_head.weight and embed_tokens.weight share memory
- after a save that dropped one name, loading misses lm_head.weight; tie_word_embeddings
- `Some tensors share memory, this will lead to duplicate memory on disk`, `Some tensors share memory`
- `The weights trying to be saved contained shared tensors`, `KeyError: 'lm_head.weight'` (transformers)
"""

import os

import safetensors.torch
import torch
from torch import nn

model = nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 8, bias=False))
model[1].weight = model[0].weight
file = f"model-of-rank-{os.environ.get('RANK', '0')}.safetensors"

safetensors.torch.save_file(model.state_dict(), file)  # broken
# fixed: safetensors.torch.save_model(model, file)
saved = safetensors.torch.load_file(file)
assert len(saved) == 1, f"{len(saved)} tensors are in the file"
(weight,) = saved.values()
torch.testing.assert_close(weight, model[0].weight.detach())
