"""The arguments of `python -m fsdp_helpers plan`, and what they ask for. No torch."""

import argparse
from dataclasses import replace
from pathlib import Path

from fsdp_helpers.config import ACTIVATION_CHECKPOINTING, APIS, SHARDING, STRATEGIES
from fsdp_helpers.models.shapes import LLAMA_SHAPES, LlamaShape, ViTShape
from fsdp_helpers.planning.cluster import (
    CONTEXT_BYTES,
    LINK_BYTES_PER_S,
    NCCL_AND_FRAGMENTATION_BYTES,
    Cluster,
    require_whole,
)
from fsdp_helpers.planning.costs import DEVICE_HOURS_BETWEEN_FAILURES, STORAGE_BYTES_PER_S
from fsdp_helpers.planning.devices import DEVICES
from fsdp_helpers.planning.hugging_face import read_config
from fsdp_helpers.planning.models import NAMED_MODELS, Subject, llama_subject, named_subject, vit_subject
from fsdp_helpers.planning.optimizers import OPTIMIZERS
from fsdp_helpers.planning.plan import Plan, Settings, make_plan
from fsdp_helpers.planning.state import PRECISIONS
from fsdp_helpers.quantities import GB

DEFAULT_BATCH = {"image": 8, "token": 8192}  # of one rank, in one forward and backward
LLAMA_FLAGS = {  # flag -> field, meaning
    "width": ("width", "numbers in a token's vector"),
    "depth": ("depth", "number of blocks"),
    "heads": ("num_heads", "number of attention heads"),
    "kv-heads": ("num_kv_heads", "number of key/value heads (default: the same)"),
    "mlp-width": ("mlp_width", "width of a block's hidden layer"),
    "vocabulary": ("vocabulary", "vocabulary size, for --llama"),
}
VIT_FLAGS = {
    "image-size": ("image_size", "image side in pixels, for --vit (default: 224)"),
    "patch-size": ("patch_size", "patch side in pixels, for --vit (default: 16)"),
    "classes": ("num_classes", "number of classes, for --vit (default: 1000)"),
}


def add_plan_arguments(plan: argparse.ArgumentParser) -> None:
    """Add the arguments of `plan`; those that `train` has too mean the same."""
    _add_model(plan)
    _add_training(plan)
    _add_cluster(plan)
    plan.add_argument(
        "--total",
        type=float,
        metavar="N",
        help="tokens or images in the whole run, to compute GPU-hours (for example 2e12)",
    )
    plan.add_argument("--json", type=Path, metavar="FILE", help="write the plan to FILE")


def _add_model(plan: argparse.ArgumentParser) -> None:
    group = plan.add_argument_group("the model")
    kind = group.add_mutually_exclusive_group(required=True)
    kind.add_argument("--model", choices=NAMED_MODELS, help="a model known by name")
    kind.add_argument(
        "--config", type=Path, metavar="FILE", help="a Hugging Face config.json of a Llama, Mistral or Qwen model"
    )
    kind.add_argument("--llama", action="store_true", help="a Llama-like model with the shape given below")
    kind.add_argument("--vit", action="store_true", help="a vision transformer with the shape given below")
    for flag, (_, meaning) in (LLAMA_FLAGS | VIT_FLAGS).items():
        group.add_argument(f"--{flag}", type=int, metavar="N", help=meaning)
    group.add_argument("--tied", action="store_true", help="the head shares the embedding's weight, for --llama")
    group.add_argument("--context", type=int, metavar="N", help="tokens per sequence")
    group.add_argument(
        "--loss-chunks", type=int, metavar="N", default=1, help="compute the logits in N recomputed parts"
    )


def _add_training(plan: argparse.ArgumentParser) -> None:
    group = plan.add_argument_group("the training")
    group.add_argument(
        "--strategy",
        choices=STRATEGIES,
        default="fsdp-auto-wrap",
        help="how state is sharded; auto-wrap makes each block a unit",
    )
    group.add_argument("--api", choices=APIS, default="fsdp2", help="the FSDP to plan for (default: fsdp2)")
    group.add_argument("--sharding", choices=SHARDING, default="full", help="see train --help (default: full)")
    group.add_argument(
        "--replicas", type=int, metavar="N", default=2, help="number of copies, for hybrid sharding (default: 2)"
    )
    group.add_argument("--precision", choices=tuple(PRECISIONS), default="fp32", help="bf16 is mixed precision")
    group.add_argument("--activation-checkpointing", choices=ACTIVATION_CHECKPOINTING, default="none")
    group.add_argument("--optimizer", choices=tuple(OPTIMIZERS), default="adam", help="adam is the fused one")
    group.add_argument(
        "--micro-batches", type=int, metavar="N", default=1, help="parts of a step, each with the batch given below"
    )
    batch = group.add_mutually_exclusive_group()
    for item, usual in DEFAULT_BATCH.items():
        batch.add_argument(
            f"--{item}s", type=int, metavar="N", help=f"{item}s per rank in one forward and backward (default: {usual})"
        )


def _add_cluster(plan: argparse.ArgumentParser) -> None:
    group = plan.add_argument_group("the cluster")
    link, outside = round(LINK_BYTES_PER_S / GB), round((CONTEXT_BYTES + NCCL_AND_FRAGMENTATION_BYTES) / GB)
    group.add_argument("--world-size", type=int, metavar="N", required=True, help="number of ranks, one per device")
    named = "sets memory, rates and links, each of which a flag below can override"
    group.add_argument("--device", choices=tuple(DEVICES), help=named)
    numbers = {
        "device-memory-gb": "memory of a device, in 10^9 bytes; required without --device",
        "tflops": "speed that a device reaches, in 10^12 operations per second",
        "bandwidth-gb-s": f"rate at which a rank sends to other nodes (default: {link}, a {8 * link} Gbit/s link)",
        "within-gb-s": "rate at which a rank sends within its node",
        "latency-us": "latency of one step of a ring between nodes, in microseconds",
        "host-gb-s": "rate between a device and its host",
        "host-memory-gb": "host memory of a node",
    }
    for flag, meaning in numbers.items():
        group.add_argument(f"--{flag}", type=float, metavar="X", help=meaning)
    group.add_argument("--ranks-per-node", type=int, metavar="N", help="ranks that share a node (default: 1)")
    allowance = f"memory set aside for CUDA's context, NCCL and fragmentation (default: {outside})"
    group.add_argument("--allowance-gb", type=float, metavar="GB", default=float(outside), help=allowance)
    hours = f"mean time between failures of one device (default: {DEVICE_HOURS_BETWEEN_FAILURES:,.0f}, from the Llama 3 paper)"
    group.add_argument(
        "--hours-between-failures", type=float, metavar="X", default=DEVICE_HOURS_BETWEEN_FAILURES, help=hours
    )
    storage = f"rate at which a node writes a checkpoint (default: {STORAGE_BYTES_PER_S / GB:.0f})"
    group.add_argument("--storage-gb-s", type=float, metavar="X", default=STORAGE_BYTES_PER_S / GB, help=storage)


def read_plan(options: argparse.Namespace) -> tuple[Subject, Plan]:
    """Return the model and the plan that the arguments ask for. Raises ValueError for what is impossible."""
    subject = read_subject(options)
    settings = Settings(
        batch=_batch(options, subject),
        strategy=options.strategy,
        api=options.api,
        sharding=options.sharding,
        replicas=options.replicas,
        precision=options.precision,
        activation_checkpointing=options.activation_checkpointing,
        micro_batches=options.micro_batches,
        optimizer=options.optimizer,
    )
    return subject, make_plan(subject, settings, read_cluster(options))


def read_subject(options: argparse.Namespace) -> Subject:
    """Return the model that is named, described by a file, or given by its shape."""
    require_whole("loss_chunks", options.loss_chunks)
    if options.vit or options.model and options.model not in LLAMA_SHAPES:
        for flag, given in {"context": options.context, "loss-chunks": options.loss_chunks > 1}.items():
            if given:
                raise ValueError(f"--{flag} belongs to language models; leave it out")
    if options.vit:
        return vit_subject("vit", _vit_shape(options))
    name, shape = None, None
    if options.config:
        name, shape = read_config(options.config)
    elif options.llama:
        name, shape = "llama", _llama_shape(options)
    elif options.model in LLAMA_SHAPES:
        name, shape = options.model, LLAMA_SHAPES[options.model]
    if not options.llama:
        _refuse(options, [*LLAMA_FLAGS, *VIT_FLAGS, "tied"], "--llama or --vit")
    if shape is None:
        return named_subject(options.model)
    if options.context is not None:
        require_whole("context", options.context)
        shape = replace(shape, context=options.context)
    return llama_subject(name, shape, loss_chunks=options.loss_chunks)


def _refuse(options: argparse.Namespace, flags: list[str], belongs_to: str) -> None:
    for flag in flags:
        if getattr(options, flag.replace("-", "_")):
            raise ValueError(f"--{flag} belongs to {belongs_to}; leave it out")


def _shape_values(options: argparse.Namespace, flags: dict, defaults: dict) -> dict:
    """Return fields and values. Raises ValueError for a value that is missing or is not a size."""
    values = {}
    for flag, (field, _) in flags.items():
        value = getattr(options, flag.replace("-", "_"))
        value = defaults.get(field) if value is None else value
        if value is None:
            raise ValueError(f"the shape lacks --{flag}; give all of {', '.join(f'--{name}' for name in flags)}")
        require_whole(flag, value)
        values[field] = value
    if values["width"] % values["num_heads"]:
        raise ValueError(f"{values['num_heads']} heads do not divide a width of {values['width']}")
    return values


def _llama_shape(options: argparse.Namespace) -> LlamaShape:
    _refuse(options, [*VIT_FLAGS], "--vit")
    values = _shape_values(options, LLAMA_FLAGS, {"num_kv_heads": options.heads})
    if values["num_heads"] % values["num_kv_heads"]:
        raise ValueError(f"{values['num_kv_heads']} kv-heads do not divide {values['num_heads']} heads")
    return LlamaShape(**values, tied=options.tied)


def _vit_shape(options: argparse.Namespace) -> ViTShape:
    _refuse(options, ["kv-heads", "vocabulary", "tied"], "--llama")
    flags = {name: field for name, field in LLAMA_FLAGS.items() if name not in ("kv-heads", "vocabulary")}
    usual = {"image_size": 224, "patch_size": 16, "num_classes": 1000}
    values = _shape_values(options, flags | VIT_FLAGS, usual)
    if values["image_size"] % values["patch_size"]:
        raise ValueError(f"patches of {values['patch_size']} pixels do not divide an image of {values['image_size']}")
    return ViTShape(**values, channels=3, class_token=True)


def read_cluster(options: argparse.Namespace) -> Cluster:
    """Return the cluster; what is given replaces what is usual for the device."""
    given = {
        "device_memory_bytes": (options.device_memory_gb, GB),
        "bandwidth_bytes_per_s": (options.bandwidth_gb_s, GB),
        "flops_per_s": (options.tflops, 1e12),
        "allowance_bytes": (options.allowance_gb, GB),
        "ranks_per_node": (options.ranks_per_node, 1),
        "within_bytes_per_s": (options.within_gb_s, GB),
        "between_latency_s": (options.latency_us, 1e-6),
        "host_bytes_per_s": (options.host_gb_s, GB),
        "host_memory_bytes": (options.host_memory_gb, GB),
    }
    changes = {name: factor * value for name, (value, factor) in given.items() if value is not None}
    if options.device:
        return Cluster.of(options.device, options.world_size, options.precision, **changes)
    if options.device_memory_gb is None:
        raise ValueError("the memory of a device is missing; give --device-memory-gb, or --device")
    return Cluster(world_size=options.world_size, **changes)


def _batch(options: argparse.Namespace, subject: Subject) -> int:
    given = {item: getattr(options, f"{item}s") for item in DEFAULT_BATCH}
    (other,) = [item for item in DEFAULT_BATCH if item != subject.item]
    if given[other] is not None:
        raise ValueError(f"--{other}s: a batch of {subject.name} is counted in {subject.item}s; use --{subject.item}s")
    if given[subject.item] is not None:
        return given[subject.item]
    return max(1, DEFAULT_BATCH[subject.item] // subject.sequence) * subject.sequence
