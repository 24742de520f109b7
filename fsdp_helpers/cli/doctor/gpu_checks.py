"""The checks of a machine with GPUs, in the order of the table."""

from functools import partial

from fsdp_helpers.cli.doctor import device_checks, many_gpu_checks, training_checks
from fsdp_helpers.cli.doctor.rows import NOISE_BYTES, Check
from fsdp_helpers.config import APIS

NAMES = {"fsdp1": "FSDP1", "fsdp2": "FSDP2"}
SHARDED = ("fsdp", "fsdp-auto-wrap", "fsdp-offload")


def _alone() -> list[Check]:
    """Return the checks that need one GPU."""
    device, training = device_checks, training_checks
    as_ddp = f"both runs within {training.SAME:g} of DDP"
    within = f"no rank touches it, at most {NOISE_BYTES // 10**6} MB"
    checks = [
        Check("the GPU, in a process as a notebook's kernel", device.usable_in_this_process, "within 1e-2"),
        Check("the GPUs, in ranks of `launch`", device.usable_through_launch, "sums are right"),
        Check("ranks on the CPU leave the GPU alone", device.cpu_ranks_leave_it_alone, within),
        Check("a stopped rank on the CPU is named", device.stopped_cpu_rank_is_named, "rank 1 did not answer"),
        Check(
            "memory: traced, requested, allocated, reserved",
            device.memory_is_what_a_trace_says,
            "traced = requested, then ascending",
        ),
        Check("local, 8 steps", training.against_ddp("local", "fsdp2"), as_ddp),
    ]
    for strategy in SHARDED:
        for api, name in NAMES.items():
            checks.append(Check(f"{name}, {strategy}, 8 steps", training.against_ddp(strategy, api), as_ddp))
    for api, name in NAMES.items():
        checks += [
            Check(f"{name}, bf16", partial(training.bf16, api), f"above 0, at most {training.SAME_IN_BF16:.0%}"),
            Check(f"{name}, offload", partial(training.offload, api), "on cpu, pinned; less by about the state"),
            Check(
                f"{name}, saved and resumed",
                partial(training.resume, api),
                f"within {training.SAME_AFTER_RESUMING:g} of an undisturbed run",
            ),
        ]
    return [*checks, Check("compiled blocks", training.compiled_block, f"within {training.SAME_COMPILED:g}")]


def _together() -> list[Check]:
    """Return the checks that need two GPUs or more."""
    many, checks = many_gpu_checks, []
    for api, name in NAMES.items():
        checks += [
            Check(f"{name}, bytes sent", partial(many.sent_bytes, api), "as predicted, to the byte", gpus=2),
            Check(f"{name}, peak", partial(many.predicted_peak, api), f"within {many.NEAR:.0%}", gpus=2),
        ]
    for way, expected in (("dead", "rank 1 of 2 failed"), ("stopped", "rank 1 did not answer")):
        checks.append(Check(f"who is blamed for a {way} rank", partial(many.blame, way), expected, gpus=2))
    for script in many.SCRIPTS:
        checks.append(Check(f"take_home/{script}", many.take_home(script), "exit status 0", gpus=2))
    expected = f"both runs within {training_checks.SAME:g} of DDP"
    for api, name in NAMES.items():
        hybrid = training_checks.against_ddp("fsdp-auto-wrap", api, sharding="hybrid")
        checks.append(Check(f"{name}, hybrid sharding", hybrid, expected, gpus=4))
    within = f"within {training_checks.SAME_COMPILED:g} of one process"
    return [*checks, Check("two dimensions", training_checks.two_dimensions, within, gpus=4)]


assert tuple(NAMES) == APIS
CHECKS = {check.title: check for check in (*_alone(), *_together())}
