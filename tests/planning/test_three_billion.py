"""A model of 3 billion parameters, planned by its shape, by its `config.json`, and by a factory on the meta device."""

import json
import subprocess
import sys

import pytest
from programs import OWN_PEAK_KB

from fsdp_helpers.models.shapes import LlamaShape
from fsdp_helpers.planning.hugging_face import read_config
from fsdp_helpers.planning.models import llama_subject
from fsdp_helpers.planning.plan import Cluster, Settings, make_plan

SHAPE = {
    "width": 3072, "depth": 28, "num_heads": 24, "num_kv_heads": 8, "mlp_width": 8192, "vocabulary": 128256,
    "tied": True,
}  # fmt: skip
CONFIG = {
    "model_type": "llama", "hidden_size": 3072, "num_hidden_layers": 28, "num_attention_heads": 24,
    "num_key_value_heads": 8, "intermediate_size": 8192, "vocab_size": 128256, "max_position_embeddings": 131072,
    "tie_word_embeddings": True, "head_dim": 128,
}  # fmt: skip
BY_FACTORY = """
import json, sys, time
import torch
import torch.nn.functional as F
from fsdp_helpers.models.llama import Layer, Llama
from fsdp_helpers.measuring.own_plan import plan_model
from fsdp_helpers.models.shapes import LlamaShape
import torch.distributed.fsdp, torch.utils.flop_counter, torch.nn.attention

settings, shape = json.loads(sys.argv[1]), LlamaShape(**json.loads(sys.argv[2]))
began_s = time.process_time()
# Outside the model, as a plan by shape has it. Within its forward, the last layer is gathered for backward beside it.
def loss_of(model, tokens):
    return F.cross_entropy(model(tokens).float().flatten(0, 1), tokens.flatten())

def on_meta():
    with torch.device("meta"):
        return Llama(shape)
tokens = torch.zeros(1, shape.context, dtype=torch.long)
plan, _ = plan_model(on_meta, tokens, world_size=8, device="h100", unit_class=Layer, loss_of=loss_of, **settings)
print(json.dumps({
    "plan": plan.to_json(),
    "processor_s": time.process_time() - began_s,
    "memory_bytes": 1024 * int(OWN_PEAK_KB),
}))
""".replace("OWN_PEAK_KB", OWN_PEAK_KB)


def numbers(plan: dict) -> dict[str, float]:
    return (
        {name: plan[name] for name in ("num_params", "sent_bytes", "checkpoint_bytes")}
        | plan["state"]
        | {
            "peak_bytes": plan["peak"]["bytes"],
            "step_estimate_s": plan["step_estimate_s"],
        }
    )


@pytest.mark.long
def test_three_ways_to_say_it_give_one_plan(tmp_path):
    """How long the factory takes depends on the processor, so that it is printed only (`pytest -s`)."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    settings = {"precision": "bf16"}
    cluster, chosen = Cluster.of("h100", 8, "bf16"), Settings(batch=8192, **settings)
    subjects = [llama_subject("", LlamaShape(**SHAPE)), llama_subject(*read_config(tmp_path))]
    by_shape, by_file = (make_plan(subject, chosen, cluster).to_json() for subject in subjects)
    command = [sys.executable, "-c", BY_FACTORY, json.dumps(settings), json.dumps(SHAPE)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    found = json.loads(done.stdout.splitlines()[-1])
    for name, number in numbers(found["plan"]).items():
        print(f"{name}: {number / numbers(by_shape)[name]:.5f} of the plan by shape")
    print(f"{found['processor_s']:.1f} s of processor time, {found['memory_bytes'] / 1e9:.2f} GB")
    assert numbers(by_file) == numbers(by_shape)
    assert numbers(found["plan"]) == pytest.approx(numbers(by_shape), rel=0.01)
    assert found["memory_bytes"] < 2e9
