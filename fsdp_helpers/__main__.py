"""The command-line interface: see `python -m fsdp_helpers --help`. torchrun can also start it."""

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import NoReturn

from fsdp_helpers.cli.compare import add_compare_arguments
from fsdp_helpers.cli.flags import Flag, add_flags, flags
from fsdp_helpers.cli.inspect_command import add_inspect_arguments
from fsdp_helpers.cli.plan_command import add_plan_arguments, plan_command
from fsdp_helpers.cli.printing import check_output_path, print_data_source, print_summary, write_json
from fsdp_helpers.config import TrainConfig
from fsdp_helpers.quantities import format_bytes, format_count
from fsdp_helpers.training.torchrun import end_with_agent, read_torchrun_rank, started_as_rank

BAD_INPUT, FAILED, INTERRUPTED = 2, 1, 130
CALL_FLAGS = (
    Flag(setting="world_size", kind=int, meaning="number of ranks (default: 1 for local, otherwise 2)"),
    Flag(
        setting="device",
        kind=str,
        choices=("auto", "cpu", "cuda"),
        default="auto",
        meaning="auto means cuda if there is a usable GPU for each rank, otherwise cpu; several hosts have to agree",
    ),
    Flag(
        setting="timeout",
        kind=float,
        meaning="give up after waiting X seconds for other ranks in a collective (default: 1800)",
    ),
    Flag(setting="json", kind=Path, meaning="write the run's record to FILE"),
)


class OneLineParser(argparse.ArgumentParser):
    """An argument parser that reports an error in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: {message}\n")


def build_parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="fsdp_helpers",
        description="Train small models in one process or many, and plan, check and compare such runs.",
    )
    commands = parser.add_subparsers(dest="command", required=True, parser_class=OneLineParser)
    train = commands.add_parser("train", help="train a model in one process or many")
    add_flags(train, train_flags())
    train.set_defaults(run=train_command)

    consolidate = commands.add_parser("consolidate", help="turn a sharded checkpoint into one file for a plain model")
    consolidate.add_argument(
        "checkpoint",
        type=Path,
        metavar="CHECKPOINT",
        help="a checkpoint folder, or a run's folder of checkpoints (the newest is used)",
    )
    consolidate.add_argument("out", type=Path, metavar="OUT", help="the file to write: .safetensors or .pt")
    consolidate.add_argument(
        "--prefix",
        default="model.",
        metavar="TEXT",
        help="write only the tensors whose names start with TEXT, and strip TEXT from the names (default: model.)",
    )
    consolidate.set_defaults(run=consolidate_command)

    compare = commands.add_parser("compare", help="run every strategy with both APIs and compare the results")
    add_compare_arguments(compare)

    plan = commands.add_parser("plan", help="predict a model's memory, traffic and time on many devices")
    add_plan_arguments(plan)

    doctor = commands.add_parser("doctor", help="check this machine; exit status 1 if anything is wrong")
    doctor.add_argument(
        "--gpu", action="store_true", help="also check this machine's GPUs, and print a table to paste into an issue"
    )
    doctor.set_defaults(run=doctor_command)

    explain = commands.add_parser(
        "explain", help="find the failures that an error message belongs to; exit status 1 if there are none"
    )
    explain.add_argument(
        "message", nargs="*", metavar="MESSAGE", help="the message (default: read from standard input)"
    )
    explain.set_defaults(run=explain_command)

    inspect = commands.add_parser(
        "inspect", help="run your training script on CPU ranks, and name its silent failures; exit status 1 if any"
    )
    add_inspect_arguments(inspect)
    inspect.set_defaults(run=inspect_command)

    lab = commands.add_parser("lab", help="open copies of the notebooks in JupyterLab, which gets other arguments")
    lab.add_argument("--copies", type=Path, metavar="DIR", help="the folder with your copies (default: work)")
    lab.add_argument("--originals", action="store_true", help="for authors: open the notebooks themselves")
    lab.set_defaults(run=lab_command)
    return parser


def train_flags() -> list[Flag]:
    """Return all flags of `train`: the run's settings, and the options that apply only to this call."""
    return [*flags(), *CALL_FLAGS]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; return 0 for success, 1 if a rank or check failed, 2 for bad input, or 130 if interrupted."""
    parser = build_parser()
    options, others = parser.parse_known_args(arguments)
    if options.command == "lab":
        options.arguments = others
    elif others:
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    if options.command == "plan":  # it doesn't need torch, which takes longer to import than the plan does to compute
        return write_plan(options)
    if options.command == "doctor":  # it has to run even if an import fails
        return doctor_command(options)
    if options.command == "explain":  # so does this one, and it shouldn't wait for torch
        return explain_command(options)
    if problem := _wrong_place(options):  # checked on every rank, at every restart, before torch is loaded
        return _complain(BAD_INPUT, problem)
    from fsdp_helpers.checkpointing.folder import CheckpointError
    from fsdp_helpers.data.source import DataError
    from fsdp_helpers.progress import in_lines
    from fsdp_helpers.ranks.launch import RankError

    try:
        with in_lines():
            return options.run(options) or 0
    except (ValueError, DataError, CheckpointError) as error:
        return _complain(BAD_INPUT, str(error))
    except RankError as error:
        return _complain(FAILED, str(error))
    except KeyboardInterrupt:
        return _complain(INTERRUPTED, "interrupted; all ranks are stopped")


def run() -> NoReturn:
    """Run `main`, then exit this process with the status it returns.

    Like `launch`'s ranks, a rank under torchrun exits without Python's cleanup: gloo's threads outlive their group, and
    if one of them releases a tensor while Python is shutting down, the process aborts.
    """
    end_with_agent()  # before torch is loaded, which takes seconds
    try:
        status = main()
        sys.stdout.flush()
    except BrokenPipeError:  # the program reading the output, such as `head`, has closed its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for what Python flushes at exit
        status = FAILED
    except KeyboardInterrupt:  # in the first seconds, while torch is being loaded
        status = _complain(INTERRUPTED, "interrupted; nothing was started")
    except ModuleNotFoundError as error:
        status = _complain(
            FAILED,
            f"{error}; run `source .venv/bin/activate`, or activate the environment you installed the project in",
        )
    if started_as_rank():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    sys.exit(status)


def _wrong_place(options: argparse.Namespace) -> str:
    """Return what's wrong with the variables that say how ranks start, or "" if they're fine; start the server then."""
    try:
        if started_as_rank():
            if options.command == "train":
                read_torchrun_rank()
        elif options.command in ("train", "compare"):
            from fsdp_helpers.ranks import server  # a browser, where plan and explain run, has no processes

            server.ensure_running()
    except ValueError as error:
        return str(error)
    return ""


def train_command(options: argparse.Namespace) -> None:
    from fsdp_helpers.training.run import train, train_as_rank_of_torchrun

    config = TrainConfig(**{field.name: getattr(options, field.name) for field in fields(TrainConfig)})
    check_output_path(options.json)
    start = train_as_rank_of_torchrun if started_as_rank() else train
    record = start(
        config,
        world_size=options.world_size,
        device=options.device,
        group_timeout_s=options.timeout,
        on_data=lambda source: print_data_source(source, config),
    )
    if record is not None:
        print_summary(record)
        if options.json:
            write_json(record.to_json(), options.json)


def consolidate_command(options: argparse.Namespace) -> None:
    from fsdp_helpers.checkpointing.consolidate import consolidate

    check_output_path(options.out)
    done = consolidate(options.checkpoint, options.out, prefix=options.prefix)
    num_bytes = sum(entry.num_bytes for entry in done.tensors)
    print(f"{options.out}: {format_count(len(done.tensors), 'tensor')}, {format_bytes(num_bytes)}")
    if done.skipped:
        print(f"skipped (not tensors): {', '.join(done.skipped)}")


def doctor_command(options: argparse.Namespace) -> int:
    from fsdp_helpers.cli.doctor import gpu, report
    from fsdp_helpers.cli.doctor.rows import FAIL

    if options.gpu:
        with tempfile.TemporaryDirectory() as folder:
            return gpu.main(["fsdp_helpers.cli.doctor.gpu_checks"], Path(folder))
    rows = report.examine(report.LOOKS, on_row=lambda row: print(report.line(row), flush=True))
    print(report.verdict(rows))
    return FAILED if any(row.result == FAIL for row in rows) else 0


def explain_command(options: argparse.Namespace) -> int:
    from fsdp_helpers.cli.explain import explain_text, find_cards, read_message

    try:
        text = read_message(options.message)
    except ValueError as error:
        return _complain(BAD_INPUT, str(error))
    matches = find_cards(text)
    print(explain_text(text, matches))
    return 0 if matches else FAILED


def inspect_command(options: argparse.Namespace) -> int:
    from fsdp_helpers.cli.inspect_command import check, inspect

    check(options, started_as_rank())
    return inspect(options)


def lab_command(options: argparse.Namespace) -> None:
    from fsdp_helpers.cli.lab.jupyter import PROJECT, open_lab

    copies = None if options.originals else options.copies or PROJECT / "work"
    open_lab(copies, options.arguments)


def write_plan(options: argparse.Namespace) -> int:
    try:
        check_output_path(options.json)
        plan_command(options)
    except ValueError as error:
        return _complain(BAD_INPUT, str(error))
    return 0


def _complain(status: int, message: str) -> int:
    from fsdp_helpers.training.torchrun import reports_bad_input, wait_for_first_rank

    if status == BAD_INPUT and not reports_bad_input():
        wait_for_first_rank()
        return status
    print(f"fsdp_helpers: {message}", file=sys.stderr)
    return status


if __name__ == "__main__":
    run()
