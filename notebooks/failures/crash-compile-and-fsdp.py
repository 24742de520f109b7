"""# torch.compile fails around FSDP, or compiles nothing inside it

**Why.** The compiler can't trace FSDP's hooks, which unshard and reshard parameters. At a hook, it breaks the graph (an
error with `fullgraph=True`), or it fails because a tensor's `.data` has changed. `block.compile()` traces the hooks,
too: it breaks there, and then compiles `forward` only if its class isn't one of torch's own. Of an
`nn.TransformerEncoderLayer`, nothing is compiled, without an error.

**How to tell.** The same run works without `torch.compile`. `TORCH_LOGS=graph_breaks` prints where the graph breaks,
and `torch._dynamo.utils.counters["stats"]["unique_graphs"]` counts what was compiled.

**The fix.** Wrap each block with `torch.compile(block)`, and shard the wrapper: FSDP's hooks then stay outside the
graph. With FSDP1, also set `use_orig_params=True`. If several ranks compile at the same time, raise the timeout for the
first step.

**What you see.** Among much else:

    rank 0 in `torch.testing.assert_close(model(texts), outputs_alone)`
    torch._dynamo.exc.Unsupported
    ConstantVariable(str: 'skipping FSDP hooks')

**Also seen as**

- the first step with torch.compile times out on several ranks
- Triton or Inductor cache races between ranks or nodes
- `torch._dynamo.exc.Unsupported`, `torch._dynamo.exc.TorchRuntimeError`, `torch._dynamo hit config.recompile_limit`,
  `Graph break in user code`, `BackendCompilerFailed` (a run on the CPU)
- `torch._dynamo.exc.InternalTorchDynamoError`, `backend='inductor' raised` (torch/_dynamo/exc.py)
- `torch._inductor`, `InductorError` (torch/_inductor/exc.py)
- `Dynamo only supports FSDP with use_orig_params=True` (torch/_dynamo/variables/builder.py)
- `attempting to assign a gradient with dtype` (FSDP1 with mixed precision: pytorch#111317)
- `hit config.cache_size_limit` (an older PyTorch)
"""

import copy

import torch
import torch._dynamo.utils
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

dist.init_process_group("gloo")
mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
torch.manual_seed(0)
blocks = [nn.TransformerEncoderLayer(8, nhead=2, dim_feedforward=8, dropout=0.0, batch_first=True) for _ in range(2)]
texts, count = torch.randn(2, 4, 8), torch._dynamo.utils.counters["stats"]
alone = nn.Sequential(*[torch.compile(block, backend="eager") for block in copy.deepcopy(blocks)])
outputs_alone = alone(texts)
right = count["unique_graphs"]
torch._dynamo.reset()
count.clear()

# fixed: blocks = [torch.compile(block, backend="eager") for block in blocks]
model = nn.Sequential(*blocks)
for unit in (*blocks, model):
    fully_shard(unit, mesh=mesh)
model = torch.compile(model, backend="eager", fullgraph=True)  # broken
torch.testing.assert_close(model(texts), outputs_alone)
graphs = count["unique_graphs"]
assert graphs == right, f"{graphs} graphs were compiled instead of {right}"
dist.destroy_process_group()
