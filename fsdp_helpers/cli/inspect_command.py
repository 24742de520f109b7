"""`python -m fsdp_helpers inspect SCRIPT ARGS`: watch a training script on CPU ranks, and name its silent failures."""

import argparse
from pathlib import Path

NUM_RANKS, STEPS, LIMIT_S = 2, 3, 600.0
MOST = 1e6  # of ranks, steps and seconds


def add_inspect_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--world-size", type=int, default=NUM_RANKS, metavar="N", help="ranks (default: %(default)s)")
    steps = "stop the script after N optimizer steps; what comes later isn't seen (default: %(default)s)"
    parser.add_argument("--steps", type=int, default=STEPS, metavar="N", help=steps)
    limit = "stop a script that hasn't ended after X seconds (default: %(default)s)"
    parser.add_argument("--limit", type=float, default=LIMIT_S, metavar="X", help=limit)
    parser.add_argument("script", type=Path, metavar="SCRIPT", help="your training script")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGS", help="the script's own arguments")


def check(options: argparse.Namespace, is_rank: bool) -> None:
    """Raise ValueError if something about the call is wrong."""
    if is_rank:
        raise ValueError("inspect: it starts its ranks itself; call it without torchrun")
    if not options.script.is_file():
        raise ValueError(f"inspect: there's no script {options.script}")
    try:
        compile(options.script.read_bytes(), str(options.script), "exec")
    except (SyntaxError, ValueError) as error:
        raise ValueError(f"inspect: {options.script} isn't Python: {error}") from error
    for name in ("world_size", "steps", "limit"):
        if not 1 <= (value := getattr(options, name)) < MOST:
            raise ValueError(f"inspect: --{name.replace('_', '-')} is {value}; it must be from 1 to {MOST:,.0f}")


def inspect(options: argparse.Namespace) -> int:
    """Run the script, and report; return 1 if there are findings, or the script's own status if it failed."""
    from fsdp_helpers.inspecting.report import findings, report
    from fsdp_helpers.inspecting.run import watch_ranks
    from fsdp_helpers.ranks.launch import LaunchOutput

    output = LaunchOutput(names=False)
    ranks = options.world_size, options.limit, output.add
    records = watch_ranks(str(options.script), options.arguments, *ranks, steps=options.steps)
    output.finish()
    print(report(options.script.name, records))
    return max(int(bool(findings(records))), *(record.status for record in records))
