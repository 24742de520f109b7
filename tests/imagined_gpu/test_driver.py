"""The imagined driver does what its sources say: else a test below would pass for want of a GPU."""

from gpu_driver import refusals

ASK = """
import torch

def say(what, ask):
    try:
        print(what, ask())
    except Exception as error:
        print(what, type(error).__name__, str(error).splitlines()[0])

say("count", torch.cuda.device_count)
say("available", torch.cuda.is_available)
say("name", lambda: torch.cuda.get_device_name(torch.cuda.device_count() - 1))
say("choose", lambda: torch.cuda.set_device(torch.cuda.device_count()))
say("zeros", lambda: torch.zeros(1, device="cuda"))
"""
STEP = """
import torch

layer = torch.nn.Linear(3, 3)
layer(torch.zeros(2, 3)).sum().backward()
torch.optim.Adam(layer.parameters()).step()
print(torch.cuda.is_initialized())
"""


def test_devices_are_counted_described_and_chosen_but_hold_nothing(gpus, run_python):
    lines = run_python(ASK, gpus.environment(2)).splitlines()
    assert lines[:3] == ["count 2", "available True", "name Imagined T4"]
    assert lines[3].startswith("choose AcceleratorError CUDA error: invalid device ordinal")
    assert lines[4].startswith("zeros OutOfMemoryError CUDA out of memory.")
    assert {use.what for use in gpus.uses()} >= {"initialize", "set_device", "allocate"}
    assert {use.rank for use in gpus.uses()} == {"-"}


def test_a_driver_that_is_too_old_is_counted_and_cannot_be_used(gpus, run_python):
    lines = run_python(ASK, gpus.environment(too_old=True)).splitlines()
    assert lines[:2] == ["count 1", "available False"]
    assert all("RuntimeError The NVIDIA driver on your system is too old" in line for line in lines[2:])


def test_hidden_devices_do_not_exist(gpus, run_python):
    lines = run_python(ASK, gpus.environment(2) | {"CUDA_VISIBLE_DEVICES": ""}).splitlines()
    assert lines[:2] == ["count 0", "available False"]
    assert gpus.uses() == []


def test_a_step_on_the_cpu_initializes_cuda(gpus, run_python):
    """Why CPU ranks hide the GPUs: torch's optimizers ask whether a stream is being captured."""
    assert run_python(STEP, gpus.environment()).strip() == "True"
    assert "initialize" in {use.what for use in gpus.uses()}


def test_what_driver_c_holds_is_not_written_again():
    text = refusals({"cuInit", "cuDriverGetVersion"})
    assert text == "int cuInit(void) { return 801; }\n"
