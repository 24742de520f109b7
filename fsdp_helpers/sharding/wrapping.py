"""Wrapping policies: which modules become FSDP units, the same for both APIs.

A policy is FSDP1's: a callable `policy(module=..., recurse=..., nonwrapped_numel=...) -> bool`. With `recurse=True`, it
says whether to look at the children; with `recurse=False`, whether `module` becomes a unit. `nonwrapped_numel` counts
the parameters in it that aren't in a unit further down. torch's `CustomPolicy`, which calls a function with each
module, is a policy, too. `plain_name` removes the prefixes that wrapping adds to names.
"""

from collections import defaultdict
from collections.abc import Callable, Set
from functools import partial
from itertools import accumulate
from typing import TypeAlias

from torch import nn
from torch.distributed.fsdp.wrap import CustomPolicy, lambda_auto_wrap_policy, size_based_auto_wrap_policy

from fsdp_helpers.models.series import count_params

Policy: TypeAlias = Callable[..., bool] | CustomPolicy


def size_policy(min_num_params: int, tied: Set[nn.Module] = frozenset()) -> Policy:
    """Return a policy: modules with at least `min_num_params` parameters outside smaller units become units.

    It skips the modules in `tied` (see `holders_of_ties`), whose parameters then go into a unit around all of them.
    """
    if min_num_params < 0:
        raise ValueError(f"min_num_params is {min_num_params}; it must be 0 or more")
    by_size = partial(size_based_auto_wrap_policy, min_num_params=min_num_params)
    return partial(unless_tied, by_size, tied) if tied else by_size


def unless_tied(by_size: Policy, tied: Set[nn.Module], module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    """Decide as `by_size` does, but leave modules with tied parameters to the unit around them."""
    return (recurse or module not in tied) and by_size(module, recurse, nonwrapped_numel)


def holders_of_ties(model: nn.Module) -> set[nn.Module]:
    """Return the modules that share a parameter with a module outside of them, and so can't be units."""
    homes: dict[nn.Parameter, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        homes[parameter].append(name)
    holders = set()
    for names in homes.values():
        around = [set(accumulate(name.split(".")[:-1], "{}.{}".format)) for name in names]
        holders |= set.union(*around) - set.intersection(*around)
    return {model.get_submodule(name) for name in holders}


def choose_units(model: nn.Module, policy: Policy | None) -> list[str]:
    """Return the names of the modules below the root that `policy` turns into units, inner ones before outer ones.

    FSDP1 does this walk itself (`auto_wrap_policy`); FSDP2 leaves the choice to you. Raises ValueError if a
    `CustomPolicy` gives a unit its own settings.
    """
    if isinstance(policy, CustomPolicy):
        policy = as_callable(policy)
    names: list[str] = []
    if policy is not None and policy(module=model, recurse=True, nonwrapped_numel=count_params(model)):
        for name, child in model.named_children():
            choose_below(name, child, policy, names)
    return names


def choose_below(name: str, module: nn.Module, policy: Policy, names: list[str]) -> int:
    """Append the units in `module`, and `name` if it's a unit itself, to `names`; return their number of parameters.

    The policy is asked twice: whether to look at the children, and then, with the parameters left over, whether
    `module` is a unit.
    """
    num_params = count_params(module)
    if not policy(module=module, recurse=True, nonwrapped_numel=num_params):
        return 0
    taken = sum(choose_below(f"{name}.{part}", child, policy, names) for part, child in module.named_children())
    if policy(module=module, recurse=False, nonwrapped_numel=num_params - taken):
        names.append(name)
        return num_params
    return taken


def as_callable(policy: CustomPolicy) -> Policy:
    """Turn torch's `CustomPolicy` into a plain callable. It must return True or False: see `choose_units`."""
    return partial(lambda_auto_wrap_policy, lambda_fn=partial(_yes_or_no, policy))


def _yes_or_no(policy: CustomPolicy, module: nn.Module) -> bool:
    answer = policy._lambda_fn(module)
    if answer and answer is not True:
        raise ValueError(
            f"the policy returned {answer!r} for a {type(module).__name__}, but only FSDP1 has settings per unit; "
            "return True or False"
        )
    return bool(answer)


# ---------------------------------------------------------------- names


WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")  # of FSDP1, recomputing, torch.compile


def plain_name(name: str) -> str:
    """Return a name without the prefixes of FSDP1, activation checkpointing and torch.compile."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)
