"""The gallery of failures: each still shows its symptom within seconds, and its fixed run gives the right numbers."""

from functools import cache

import pytest
import torch
import workers_for_tests as workers

from fsdp_helpers.card_search import normalized
from fsdp_helpers.ranks.launch import launch
from fsdp_helpers.teaching.failures import gallery
from fsdp_helpers.teaching.failures.entry import SYMPTOMS, Failure, same_numbers
from fsdp_helpers.teaching.failures.gallery import GALLERY, RUN, Seen
from fsdp_helpers.teaching.failures.small_job import images

# These raise on every rank before any of them waits.
RAISES_EVERYWHERE = (
    "crash-mixed-tensor-dtensor",
    "crash-tied-weights",
    "crash-frozen-flat",
    "crash-encoder-fast-path",
    "crash-port-in-use",
    "crash-notebook-function",
    "save-half-written",
    "save-module-prefix",
    "crash-uniform-dtype",
    "crash-checkpoint-branch",
    "crash-meta-tensor",
    "crash-scalar-parameter",
    "hang-dead-address",
    "crash-no-torchrun",
    "crash-main-guard",
    "crash-ready-twice",
    "crash-no-sharding-strategy",
    "crash-dtype-mismatch",
    "crash-container",
    "crash-unused-parameters",
    "save-one-ranks-shards",
    "hang-wrong-world-size",
    "hang-forked-worker",
    "crash-local-rank-argument",
    "crash-hangup",
    "crash-rendezvous-closed",
    "crash-group-twice",
    "crash-mesh-size",
    "crash-not-in-group",
    "crash-models-differ",
    "crash-sharded-twice",
    "crash-cross-mesh",
    "crash-training-state",
    "crash-flat-groups",
    "crash-accumulation-flag",
    "crash-view-in-place",
    "crash-nothing-trainable",
    "crash-open-files",
    "save-full-into-shards",
    "save-sharded-folder",
    "save-weights-only",
    "save-shared-tensors",
)
# Long: they start programs, wait for a limit, or need much of the machine.
LONG = (
    "hang-wrong-world-size",
    "crash-local-rank-argument",
    "crash-hangup",
    "crash-rendezvous-closed",
    "save-two-writers",
    "hang-extension-lock",
    "save-sharded-folder",
    "save-weights-only",
    "save-shared-tensors",
    "save-shared-folder",
    "crash-group-twice",
    "crash-mesh-size",
    "crash-not-in-group",
    "crash-gather-shapes",
    "crash-bad-batch",
    "hang-forked-worker",
    "crash-open-files",
    "memory-loader-workers",
    "slow-data-loader",
    "memory-activations",
    "memory-frozen-in-fp32",
    "wrong-schedule-steps",
    "wrong-global-batch",
    "wrong-same-random-numbers",
    "wrong-every-rank-logs",
    "slow-threads",
    "slow-straggler",
    "slow-grad-strides",
    "crash-changed-after-wrapping",
    "crash-view-in-place",
    "crash-nothing-trainable",
    "crash-compile-and-fsdp",
)
ENDS_ALIKE = [failure for failure in RUN if not failure.says or failure.name in RAISES_EVERYWHERE]
BY_ITSELF = [failure for failure in RUN if failure not in ENDS_ALIKE]
# A fix or a symptom that is gone may leave ranks waiting: the limit, far above what all runs take, makes that a failure.
TWO_RANKS = {"world_size": 2, "device": "cpu", "progress": False, "timeout_s": 400.0}


def ids(failures):
    marks = {True: pytest.mark.long, False: []}
    return [pytest.param(failure, id=failure.name, marks=marks[failure.name in LONG]) for failure in failures]


@cache
def run(name: str, way: str) -> Seen:
    """The numbers of all ranks, or the first error."""
    found = launch(workers.run_failure, name, way, **TWO_RANKS)
    errors = [one for one in found if isinstance(one, str)]
    return Seen(error=errors[0]) if errors else Seen(numbers=tuple(found))


@pytest.mark.parametrize("failure", ids(ENDS_ALIKE))
def test_the_symptom_still_appears(failure):
    seen = run(failure.name, "broken")
    assert gallery.comes_out_as_said(failure, seen), seen
    if failure.says and not failure.not_in:
        said = normalized(seen.error)
        missing = [text for text in failure.messages if normalized(text) not in said]
        assert missing == [] or (gallery.torch_release() < "2.15" and len(missing) < len(failure.messages)), said


def test_a_pytorch_that_does_not_show_it_must_not_show_it(monkeypatch):
    failure = gallery.find("crash-tied-weights")
    refused, silent = Seen(error="... shared with ..."), Seen(numbers=(failure.right(),) * 2)
    monkeypatch.setattr(torch, "__version__", "2.15.0+cpu")
    assert [gallery.comes_out_as_said(failure, seen) for seen in (refused, silent)] == [True, False]
    monkeypatch.setattr(torch, "__version__", "2.11.1+cpu")
    assert [gallery.comes_out_as_said(failure, seen) for seen in (refused, silent)] == [False, True]


@pytest.mark.parametrize("failure", ids(BY_ITSELF))
def test_ranks_that_wait_or_die_are_seen(failure):
    """Within seconds on an idle machine; not asserted, since a busy one takes its time to load PyTorch."""
    seen = gallery.run_broken(failure)
    assert gallery.shows_symptom(failure, seen), seen


@pytest.mark.parametrize("failure", ids(RUN))
def test_the_fix_gives_the_right_numbers(failure):
    if not gallery.has_fix(failure):
        pytest.skip(f"this PyTorch is older than {failure.since}, which has the fix")
    seen = run(failure.name, "fixed")
    assert gallery.is_fixed(failure, seen), seen


def test_without_its_moments_a_resumed_loss_jumps_up():
    """As its title says: a lower one would look like a gain."""
    failure = gallery.find("save-plain-optimizer-state")
    for numbers in run(failure.name, "broken").numbers:
        assert all(numbers[name] > 10 * right for name, right in failure.right().items())


@pytest.mark.parametrize("failure", ids(RUN))
def test_right_is_not_what_a_broken_run_gives(failure):
    """Neither nothing nor a number beside the right one passes for it."""
    right = failure.right()
    assert not gallery.is_fixed(failure, Seen(error="anything"))
    assert not gallery.is_fixed(
        failure, Seen(numbers=({name: value * (1.01 + 2 * failure.tolerance) + 1 for name, value in right.items()},))
    )
    assert not same_numbers(dict.fromkeys(right, float("nan")), right, failure.tolerance)


def muon_update(gradient: torch.Tensor) -> torch.Tensor:
    parameter = torch.nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient.clone()
    torch.optim.Muon([parameter], lr=1.0, weight_decay=0.0, momentum=0.0, nesterov=False).step()
    return -parameter.detach()


@pytest.mark.parametrize("shape, ranks, right", [((64, 64), 8, 0.69), ((256, 1024), 8, 0.30)])
def test_muon_on_rows_differs_by_as_much_as_its_card_says(shape, ranks, right):
    """The largest and the smallest of the differences that were measured; its loop computes in bf16."""
    gradient = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    full = muon_update(gradient)
    of_rows = torch.cat([muon_update(rows) for rows in gradient.chunk(ranks)])
    assert float((of_rows - full).norm() / full.norm()) == pytest.approx(right, abs=0.05)
    assert "30 to 69%" in gallery.find("wrong-muon-local-rows").why


def test_averaged_variances_leave_out_how_far_means_are_apart():
    def variance(samples: torch.Tensor) -> float:
        layer = torch.nn.BatchNorm1d(samples.shape[1], momentum=None)
        layer(samples)
        return layer.running_var.mean().item()

    for apart, averaged, of_all in ((0.0, 1.05, 1.06), (2.0, 1.05, 1.96)):
        first, second = images(64).chunk(2)
        second = second + apart
        assert (variance(first) + variance(second)) / 2 == pytest.approx(averaged, abs=0.02)
        assert variance(torch.cat([first, second])) == pytest.approx(of_all, abs=0.02)
    assert "1.05 instead of 1.96" in gallery.find("wrong-batchnorm").fix


# ---------------------------------------------------------------- the gallery as a whole


def test_there_are_enough_of_each_symptom():
    assert len(RUN) >= 16 and len(GALLERY) >= 24
    assert {failure.symptom for failure in RUN} == set(SYMPTOMS)
    assert len(GALLERY) == len({failure.name for failure in GALLERY.values()})


@pytest.mark.parametrize("failure", ids(GALLERY.values()))
def test_every_card_has_its_parts(failure):
    assert failure.why and failure.tell and failure.fix and failure.title
    if failure.is_run:
        assert failure.fixed and failure.right and not failure.source
    else:
        assert failure.source, "what is not run here says where it comes from"


def test_a_name_that_begins_with_no_symptom_is_refused():
    with pytest.raises(ValueError, match="has to begin with one of the symptoms hang, crash"):
        Failure(name="other-thing", title="", why="", tell="", fix="")


def test_an_unknown_name_lists_those_that_there_are():
    with pytest.raises(ValueError, match="hang-uneven-batches, "):
        gallery.find("hang-everywhere")
