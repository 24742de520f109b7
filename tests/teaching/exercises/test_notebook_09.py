"""The build exercise of notebook 09."""

from builds import BuildTests

from fsdp_helpers.teaching.exercises import notebook_09

OTHER_WAY = """
from fsdp_helpers.planning.models import named_subject
from fsdp_helpers.planning.plan import Cluster, Settings, make_plan

def largest_batch(model, world_size, device_gb, allowance_gb):
    memory = {"device_memory_bytes": device_gb * 1e9, "allowance_bytes": allowance_gb * 1e9}
    cluster, subject = Cluster(world_size=world_size, **memory), named_subject(model)

    def spare(images):
        return make_plan(subject, Settings(batch=images, activation_checkpointing="units"), cluster).spare_bytes

    step = (spare(10_000) - spare(20_000)) / 10_000
    images = max(1, 10_000 + int(spare(10_000) / step))
    while images > 1 and spare(images) < 0:
        images -= 1
    while spare(images + 1) >= 0:
        images += 1
    return images if spare(images) >= 0 else None
"""


class TestBatch(BuildTests):
    name = "my_batch"
    checker = staticmethod(notebook_09.check_batch)
    starter = "replace the ... with your answer"
    wrong = [
        ([(', "allowance_bytes": allowance_gb * 1e9', "")], "too much, including the allowance|one more image"),
        ([("return fitting\n", "return too_many\n")], "that's .* too much"),
        ([("while too_many - fitting > 1", "while False")], "one more image also fits"),
        ([("activation_checkpointing=", 'precision="bf16", activation_checkpointing=')], "too much|also fits"),
        ([("        return None\n", "        return 0\n")], "not even one image fits, the answer is None"),
        ([("    return fitting\n", "    return 64\n")], "that's .* too much|one more image also fits"),
    ]

    def test_another_way_is_accepted(self, write):
        """A straight line through two plans tells nearly where to look, and steps of one tell exactly."""
        write(OTHER_WAY)
        self.accept(**self.settings)
