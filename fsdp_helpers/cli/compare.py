"""Compare every strategy, with both APIs, in one table: `python -m fsdp_helpers compare`."""

import argparse
from dataclasses import asdict, replace
from pathlib import Path

from fsdp_helpers.cli.printing import check_output_path, print_data_source, write_json
from fsdp_helpers.config import MODELS, TrainConfig


def add_compare_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `compare` to its parser."""
    parser.add_argument(
        "--models",
        nargs="+",
        choices=MODELS,
        default=["shallow", "deep"],
        help="models to run (default: shallow deep)",
    )
    parser.add_argument("--world-size", type=int, metavar="N", default=2, help="number of ranks (default: 2)")
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="same as for train (default: auto)"
    )
    parser.add_argument("--steps", type=int, metavar="N", default=8, help="steps per run, 4 or more (default: 8)")
    parser.add_argument("--global-batch-size", type=int, metavar="N", default=64, help="images per step (default: 64)")
    parser.add_argument("--data-dir", metavar="DIR", help="folder with MNIST, as for train")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table to FILE")
    parser.set_defaults(run=compare_command)


def compare_command(options: argparse.Namespace) -> None:
    """Run every strategy and print the table; also write it if requested."""
    import torch

    from fsdp_helpers.data.source import num_train_images
    from fsdp_helpers.gpus import choose_device, device_name
    from fsdp_helpers.training.comparison import compare, comparison_configs, plain_table
    from fsdp_helpers.training.run import prepare_run_data
    from fsdp_helpers.training.watch import STEADY_STEP
    from fsdp_helpers.training.worker import time_stamp, versions

    if options.steps <= STEADY_STEP:
        raise ValueError(
            f"--steps {options.steps}: the first {STEADY_STEP} steps aren't timed; use {STEADY_STEP + 1} or more"
        )
    check_output_path(options.json)
    base = TrainConfig(
        epochs=options.steps,  # always enough, even if an epoch has only one step
        max_steps=options.steps,
        global_batch_size=options.global_batch_size,
        test_images=1,
        data_dir=options.data_dir,
    )
    replace(base, strategy="ddp").check_world_size(options.world_size)
    device = choose_device(options.device, options.world_size)
    source = prepare_run_data(base)
    print_data_source(source, base)
    images = min(options.steps * options.global_batch_size, num_train_images(source))
    configs = comparison_configs(options.models, replace(base, train_images=images), device)
    rows = compare(configs, world_size=options.world_size, device=device, progress=True)
    print(plain_table(rows))
    if options.json:
        content = {
            "device": device,
            "device_name": device_name(torch.device(device)),
            "finished": time_stamp(),
            "versions": versions(),
            "rows": [asdict(row) for row in rows],
        }
        write_json(content, options.json)
