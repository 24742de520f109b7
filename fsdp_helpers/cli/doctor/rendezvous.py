"""Check how ranks find and reach each other: variables, names, interfaces, ports, and two ranks that communicate."""

import os
import socket
import time
from collections.abc import Mapping, Sequence

from fsdp_helpers.cli.doctor.leftovers import AGENTS
from fsdp_helpers.cli.doctor.rows import Outcome, Unfit, note
from fsdp_helpers.training.torchrun import RANK_VARIABLES, TELLING

ROUND_TRIP_S = 180.0
PROXIES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


# ---------------------------------------------------------------- variables


def rank_variables() -> Outcome:
    """Look for torchrun variables set outside torchrun, which would make `train` run as a rank and wait for others."""
    found = {name: os.environ[name] for name in dict.fromkeys((*TELLING, *RANK_VARIABLES)) if name in os.environ}
    said, names = ", ".join(f"{name}={value}" for name, value in found.items()), " ".join(found)
    if not found:
        return Outcome(True, "none are set")
    if any(agent in word for word in command_of(os.getppid())[:4] for agent in AGENTS):
        return Outcome(True, "set by torchrun, which started this command")
    if not any(name in found for name in TELLING):
        return note(
            f"{said}: left over? Unless they're for a script that calls `init_process_group` itself, `unset {names}`"
        )
    if found.items() <= variables_of(1).items():
        return note(f"{said}: set when this container was started; start ranks with torchrun, or `unset {names}`")
    return Outcome(False, f"{said} without torchrun: `train` would wait for other ranks; `unset {names}`")


def command_of(pid: int) -> Sequence[str]:
    import psutil

    try:
        return psutil.Process(pid).cmdline()
    except psutil.Error:
        return ()


def variables_of(pid: int) -> Mapping[str, str]:
    """Return the environment variables a process was started with; {} if they can't be read."""
    import psutil

    try:
        return psutil.Process(pid).environ()
    except (psutil.Error, OSError):
        return {}


def interfaces_exist() -> Outcome:
    """Check that this machine has the network interfaces that gloo and NCCL are told to use."""
    there = interfaces()
    if missing := missing_for_gloo():
        remedy = f"name one of {', '.join(there)}, or `unset GLOO_SOCKET_IFNAME`"
        return Outcome(
            False, f"GLOO_SOCKET_IFNAME names {', '.join(missing)}, which this machine doesn't have; {remedy}"
        )
    chosen = os.environ.get("NCCL_SOCKET_IFNAME", "")
    if chosen and not matches_nccl(chosen, there):
        return note(f"NCCL_SOCKET_IFNAME={chosen} matches none of {', '.join(there)}: NCCL wouldn't find an interface")
    return Outcome(True, ", ".join(there))


def interfaces() -> list[str]:
    return [name for _, name in socket.if_nameindex()]


def missing_for_gloo() -> list[str]:
    """Return the comma-separated names in GLOO_SOCKET_IFNAME that aren't interfaces of this machine."""
    names = filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(","))
    return [name for name in names if name not in interfaces()]


def matches_nccl(chosen: str, there: Sequence[str]) -> bool:
    """Return True if NCCL would find at least one of the interfaces with NCCL_SOCKET_IFNAME set to `chosen`."""
    is_excluded, chosen = chosen.startswith("^"), chosen.removeprefix("^")  # "^" excludes those that match
    is_exact, names = chosen.startswith("="), chosen.removeprefix("=").split(",")  # without "=", prefixes match

    def is_named(name: str) -> bool:
        return name in names if is_exact else any(name.startswith(prefix) for prefix in names)

    return any(is_named(name) != is_excluded for name in there)


def proxies_leave_this_machine_alone() -> Outcome:
    """Look for a proxy that would intercept requests to this machine, such as those to Jupyter and the debug server."""
    found = [name for name in PROXIES if os.environ.get(name)]
    if not found:
        return Outcome(True, "none")
    spared = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    if spared == "*" or {"localhost", "127.0.0.1"} <= set(spared.replace(" ", "").split(",")):
        return Outcome(True, f"{', '.join(found)}; not used for localhost")
    return note(
        f"{', '.join(found)} set: `export no_proxy=localhost,127.0.0.1`, or the proxy gets requests to this machine"
    )


# ---------------------------------------------------------------- names and ports


def host_name_is_this_machine() -> Outcome:
    """Look up this host's name, as torchrun does to tell ranks where to meet."""
    name = socket.gethostname()
    remedy = f"torchrun's ranks meet at that name; add the line `127.0.0.1 {name}` to /etc/hosts"
    try:
        address = socket.getaddrinfo(name, None, family=socket.AF_INET)[0][4][0]
    except OSError as error:
        return Outcome(False, f"{name} doesn't resolve ({error.strerror}); {remedy}")
    if not is_own_address(address):
        return Outcome(False, f"{name} resolves to {address}, which isn't this machine; {remedy}")
    return Outcome(True, f"{name} is {address}")


def is_own_address(address: str) -> bool:
    """Return True if an interface of this machine has that IPv4 address; all of 127.0.0.0/8 belongs to loopback."""
    import psutil

    known = {one.address for addresses in psutil.net_if_addrs().values() for one in addresses}
    return address in known or address.startswith("127.")


def ports_answer() -> Outcome:
    """Open a free port on this machine and connect to it."""
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            socket.create_connection(server.getsockname(), timeout=5).close()
    except OSError as error:
        remedy = "a firewall or sandbox blocks 127.0.0.1; torchrun and gloo need it"
        return Outcome(False, f"can't connect to a port on this machine ({error}); {remedy}")
    return Outcome(True, "a free port on 127.0.0.1 answers")


# ---------------------------------------------------------------- two ranks


def two_ranks_add_up() -> Outcome:
    """Start two ranks that run an all-reduce, an all-gather and a reduce-scatter, as the notebooks do."""
    from fsdp_helpers.cli.doctor.workers import collectives_on_device, expected_of_collectives
    from fsdp_helpers.ranks.launch import launch

    if missing_for_gloo():
        raise Unfit("not started: gloo has no interface (see above)")
    began_s = time.monotonic()
    found = launch(collectives_on_device, world_size=2, device="cpu", timeout_s=ROUND_TRIP_S, progress=False)
    right = expected_of_collectives("cpu", 2)
    if found != right:
        remedy = "run doctor again, and if it's still wrong, open an issue with this line"
        return Outcome(False, f"they found {found}, not {right}; {remedy}")
    return Outcome(
        True, f"they communicate through gloo; {time.monotonic() - began_s:.1f} s, most of it spent loading PyTorch"
    )
