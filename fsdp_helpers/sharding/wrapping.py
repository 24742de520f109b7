"""Wrapping policies: which modules become FSDP units, the same for both APIs.

A policy has the form that FSDP1 uses: `policy(module=..., recurse=..., nonwrapped_numel=...) -> bool`. With
`recurse=True`, it returns whether to look at the children; with `recurse=False`, whether `module` becomes a unit.
`nonwrapped_numel` is the number of the module's parameters that aren't in a nested unit. torch's `CustomPolicy`,
which calls a function on each module, is also a policy. `plain_name` removes the prefixes that wrapping adds to names.
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
    """Return a policy that makes a module a unit if at least `min_num_params` of its parameters aren't in inner units.

    The policy skips the modules in `tied` (see `holders_of_ties`); their parameters go into a unit around all of them.
    Raises ValueError for a negative number.
    """
    if min_num_params < 0:
        raise ValueError(f"min_num_params is {min_num_params}; it must be 0 or more")
    by_size = partial(size_based_auto_wrap_policy, min_num_params=min_num_params)
    return partial(unless_tied, by_size, tied) if tied else by_size


def unless_tied(by_size: Policy, tied: Set[nn.Module], module: nn.Module, recurse: bool, nonwrapped_numel: int) -> bool:
    """Decide as `by_size` does, but leave modules with tied parameters to the unit around them."""
    return (recurse or module not in tied) and by_size(module, recurse, nonwrapped_numel)


def holders_of_ties(model: nn.Module) -> set[nn.Module]:
    """Return the modules that can't be units because they share a parameter with a module that isn't inside them."""
    holders = set()
    for names in tied_names(model):
        around = [set(accumulate(name.split(".")[:-1], "{}.{}".format)) for name in names]
        holders |= set.union(*around) - set.intersection(*around)
    return {model.get_submodule(name) for name in holders}


def tied_names(model: nn.Module) -> list[list[str]]:
    """Return the names of each parameter that has more than one."""
    names_of: dict[nn.Parameter, list[str]] = defaultdict(list)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_of[parameter].append(name)
    return [names for names in names_of.values() if len(names) > 1]


def choose_units(model: nn.Module, policy: Policy | None) -> list[str]:
    """Return the names of the modules below the root that `policy` turns into units, inner modules first.

    FSDP1 makes this choice itself (`auto_wrap_policy`); FSDP2 leaves it to you. Raises ValueError if a `CustomPolicy`
    returns settings for a unit.
    """
    if isinstance(policy, CustomPolicy):
        policy = as_callable(policy)
    names: list[str] = []
    if policy is not None and policy(module=model, recurse=True, nonwrapped_numel=count_params(model)):
        for name, child in model.named_children():
            choose_below(name, child, policy, names)
    return names


def choose_below(name: str, module: nn.Module, policy: Policy, names: list[str]) -> int:
    """Append to `names` the units in `module`, including `module` itself; return the number of their parameters.

    The policy is called twice: to decide whether to look at the children, and then, given the number of parameters
    left over, whether `module` is a unit.
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
    """Turn torch's `CustomPolicy` into a plain callable. Its function must return True or False; see `choose_units`."""
    return partial(lambda_auto_wrap_policy, lambda_fn=partial(_yes_or_no, policy))


def _yes_or_no(policy: CustomPolicy, module: nn.Module) -> bool:
    answer = policy._lambda_fn(module)
    if answer and answer is not True:
        raise ValueError(
            f"the policy returned {answer!r} for a {type(module).__name__}, but only FSDP1 supports settings per unit; "
            "return True or False"
        )
    return bool(answer)


# ---------------------------------------------------------------- names


WRAPPERS = ("_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod")  # of FSDP1, recomputing, torch.compile


def plain_name(name: str) -> str:
    """Return a name without the prefixes of FSDP1, activation checkpointing and torch.compile."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)
