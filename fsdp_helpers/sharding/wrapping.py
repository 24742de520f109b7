"""Wrapping policies: which modules become FSDP units, the same for both APIs.

A policy is FSDP1's: a callable `policy(module=..., recurse=..., nonwrapped_numel=...) -> bool`. Asked with
`recurse=True` it says whether to look at the children; with `recurse=False`, whether `module` becomes a unit,
`nonwrapped_numel` being the parameters in it that no unit below has taken. torch's `CustomPolicy`, which holds a
function from a module to True or False, is a policy too.
"""

from collections.abc import Callable
from functools import partial

from torch import nn
from torch.distributed.fsdp.wrap import CustomPolicy, lambda_auto_wrap_policy, size_based_auto_wrap_policy

from fsdp_helpers.models import count_params

Policy = Callable[..., bool] | CustomPolicy


def size_policy(min_num_params: int) -> Policy:
    """Every module with at least `min_num_params` parameters that are in no smaller unit becomes one."""
    if min_num_params < 0:
        raise ValueError(f"min_num_params is {min_num_params}; it must be 0 or more")
    return partial(size_based_auto_wrap_policy, min_num_params=min_num_params)


def choose_units(model: nn.Module, policy: Policy | None) -> list[str]:
    """The names of the modules below the root that `policy` makes units, inner ones before outer ones.

    FSDP1 walks the model in this way by itself (`auto_wrap_policy`); FSDP2 leaves the choice to you. Raises ValueError
    for a `CustomPolicy` that gives a unit settings of its own.
    """
    if isinstance(policy, CustomPolicy):
        policy = as_callable(policy)
    names: list[str] = []
    if policy is not None and policy(module=model, recurse=True, nonwrapped_numel=count_params(model)):
        for name, child in model.named_children():
            choose_below(name, child, policy, names)
    return names


def choose_below(name: str, module: nn.Module, policy: Policy, names: list[str]) -> int:
    """Append the units in `module`, and its own `name` if it is one, to `names`; returns how many parameters they took.

    The policy is asked twice: whether to look at the children, and, with what they left, whether to take `module`.
    """
    num_params = count_params(module)
    if not policy(module=module, recurse=True, nonwrapped_numel=num_params):
        return 0
    taken = sum(choose_below(f"{name}.{part}", child, policy, names) for part, child in module.named_children())
    if policy(module=module, recurse=False, nonwrapped_numel=num_params - taken):
        names.append(name)
        return num_params
    return taken


def unit_sizes(model: nn.Module, policy: Policy | None) -> tuple[int, ...]:
    """The parameters of each unit that `policy` chooses below the root."""
    sizes, taken = [], set()
    for name in choose_units(model, policy):  # inner units first: what they took is not in an outer one
        own = set(model.get_submodule(name).parameters()) - taken
        sizes.append(sum(parameter.numel() for parameter in own))
        taken |= own
    return tuple(sizes)


def as_callable(policy: CustomPolicy) -> Policy:
    """torch's `CustomPolicy`, to be asked like any other. Its answers have to be yes or no: see `choose_units`."""
    return partial(lambda_auto_wrap_policy, lambda_fn=partial(_yes_or_no, policy))


def _yes_or_no(policy: CustomPolicy, module: nn.Module) -> bool:
    answer = policy._lambda_fn(module)
    if answer and answer is not True:
        raise ValueError(
            f"the policy answers {answer!r} for a {type(module).__name__}: settings of a single unit exist in FSDP1 "
            "only; let it return True or False"
        )
    return bool(answer)
