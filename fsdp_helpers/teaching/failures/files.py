"""Checkpoints that don't load because of their format, their location, or the PyTorch version that wrote them."""

import argparse
import tempfile
from pathlib import Path

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

from fsdp_helpers.teaching.failures.crashes import TinyLanguageModel
from fsdp_helpers.teaching.failures.entry import Failure, Numbers
from fsdp_helpers.teaching.failures.saving import shared_folder
from fsdp_helpers.teaching.failures.small_job import images, in_units, small_model


def outputs_of(model: nn.Module) -> Numbers:
    return {"sum of outputs": model(images()).sum().item()}


def trained_outputs() -> Numbers:
    return outputs_of(small_model(seed=3))


# ---------------------------------------------------------------- full tensors, sharded parameters


def load_into_shards(rank: int, world_size: int) -> Numbers:
    model, weights = in_units(small_model()), small_model(seed=3).state_dict()
    model.load_state_dict(weights)
    return outputs_of(model)


def load_and_shard(rank: int, world_size: int) -> Numbers:
    model, weights = in_units(small_model()), small_model(seed=3).state_dict()
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, weights if rank == 0 else {}, options=options)
    return outputs_of(model)


# ---------------------------------------------------------------- a folder of shards


def save_shards(folder: Path) -> None:
    dcp.save(get_model_state_dict(in_units(small_model(seed=3))), checkpoint_id=folder)


def load_the_folder(rank: int, world_size: int) -> Numbers:
    with shared_folder() as folder:
        save_shards(folder)
        model = small_model()
        model.load_state_dict(torch.load(folder, weights_only=True))
        return outputs_of(model)


def convert_the_folder(rank: int, world_size: int) -> Numbers:
    with shared_folder() as folder, tempfile.TemporaryDirectory() as own_folder:
        save_shards(folder)
        model, path = small_model(), Path(own_folder, "model.pt")
        dcp_to_torch_save(folder, path)
        model.load_state_dict(torch.load(path, weights_only=True))
        return outputs_of(model)


# ---------------------------------------------------------------- a disk of each node's own


def load_from(folder: Path) -> Numbers:
    model = in_units(small_model())
    state = get_model_state_dict(model)
    dcp.load(state, checkpoint_id=folder)
    return outputs_of(model)


def save_on_local_disks(rank: int, world_size: int) -> Numbers:
    with tempfile.TemporaryDirectory() as local_disk:  # as if each rank were on a node of its own
        save_shards(Path(local_disk))
        return load_from(Path(local_disk))


def save_on_a_shared_disk(rank: int, world_size: int) -> Numbers:
    with shared_folder() as shared_disk:
        save_shards(shared_disk)
        return load_from(shared_disk)


# ---------------------------------------------------------------- more than tensors


def saved_with_arguments(folder: str) -> Path:
    path = Path(folder, "checkpoint.pt")
    torch.save({"model": small_model(seed=3).state_dict(), "args": argparse.Namespace(lr=0.1)}, path)
    return path


def load_unknown_classes(rank: int, world_size: int) -> Numbers:
    model = small_model()
    with tempfile.TemporaryDirectory() as folder:
        path = saved_with_arguments(folder)
        model.load_state_dict(torch.load(path)["model"])
    return outputs_of(model)


def load_classes_that_we_trust(rank: int, world_size: int) -> Numbers:
    model = small_model()
    with tempfile.TemporaryDirectory() as folder:
        path = saved_with_arguments(folder)
        with torch.serialization.safe_globals([argparse.Namespace]):
            model.load_state_dict(torch.load(path)["model"])
    return outputs_of(model)


# ---------------------------------------------------------------- one tensor under two names


def save_both_names(rank: int, world_size: int) -> Numbers:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.safetensors")
        safetensors.torch.save_file(TinyLanguageModel().state_dict(), path)
        return {"tensors in the file": len(safetensors.torch.load_file(path))}


def save_one_name(rank: int, world_size: int) -> Numbers:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.safetensors")
        safetensors.torch.save_model(TinyLanguageModel(), path)
        return {"tensors in the file": len(safetensors.torch.load_file(path))}


def one_tensor() -> Numbers:
    return {"tensors in the file": 1}


FILES = (
    Failure(
        name="save-full-into-shards",
        title="A full checkpoint doesn't load into a sharded model",
        why=(
            "The model's parameters are DTensors (or flat parameters, with FSDP1), but the file contains full tensors "
            "under their plain names. `load_state_dict` would have to copy full tensors into shards, which it can't do."
        ),
        tell=(
            "The error comes from `copy_`, or it reports a size mismatch in which one size is a single number, the "
            "length of a flat parameter."
        ),
        fix=(
            "Call `set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, "
            "broadcast_from_rank0=True))`. With FSDP1, load the file before wrapping, or inside "
            "`FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT)`."
        ),
        messages=(
            "While copying the parameter named",
            "aten.copy_.default",
        ),
        behavior=(
            "loading pretrained weights (a torch.Tensor state_dict) into an FSDP2 model's DTensors fails",
            "resuming from a full checkpoint under FSDP fails with a size mismatch",
            "how to load a full, pretrained or single-GPU checkpoint into an FSDP or DTensor model",
            "copy_ between a tensor and a DTensor fails; broadcast_from_rank0",
        ),
        quotes={
            "a run on the CPU": ("Size mismatch between saved",),
            "torch's MetaFallbackKernel.cpp": ("attempted to run this operator with Meta tensors",),
            "torch/distributed/fsdp/_state_dict_utils.py": ("is in the state_dict but the state_dict only has",),
            "an older PyTorch": ("aten.copy_.default: got mixed torch.Tensor and DTensor",),
        },
        broken=load_into_shards,
        fixed=load_and_shard,
        right=trained_outputs,
        says="While copying the parameter named",
    ),
    Failure(
        name="save-sharded-folder",
        title="The checkpoint is a folder of __0_0.distcp files",
        why=(
            "A sharded checkpoint (DCP, SHARDED_STATE_DICT) has one file per rank and a `.metadata` file. `torch.load` "
            "and `from_pretrained` expect a single file or safetensors files."
        ),
        tell=(
            "The folder contains `__0_0.distcp`, or the folder is named `pytorch_model_fsdp_0` or `global_step`. If "
            "the folder has no `.metadata` file, the save never finished."
        ),
        fix=(
            "Convert the folder with `python -m torch.distributed.checkpoint.format_utils dcp_to_torch FOLDER "
            "model.pt`, `accelerate merge-weights FOLDER OUT`, or `python -m fsdp_helpers consolidate`. To continue "
            "training, use `dcp.load`."
        ),
        messages=("IsADirectoryError",),
        behavior=(
            "how to load, merge or convert a sharded checkpoint, distcp files, into one model for inference",
            "the saved FSDP model has no pytorch_model.bin or model.safetensors",
            "how to convert distcp, pytorch_model_fsdp_0 or sharded files to safetensors or a Hugging Face model",
            "how to resume or run inference from a sharded checkpoint; merge shards; zero_to_fp32",
        ),
        quotes={
            "a run on the CPU": (
                ".metadata'",
                "CheckpointException ranks:dict_keys",
            ),
            "transformers": (
                "Error no file named pytorch_model.bin",
                "Can't find a valid checkpoint at",
                "no file named model.safetensors",
            ),
            "transformers, accelerate": (
                "pytorch_model_fsdp",
                "save_only_model option is not compatible with FSDP state dict type",
            ),
        },
        broken=load_the_folder,
        fixed=convert_the_folder,
        right=trained_outputs,
        says="Is a directory",
    ),
    Failure(
        name="save-weights-only",
        title="Weights only load failed: Unsupported global",
        why=(
            "Since PyTorch 2.6, `torch.load` reads only tensors and plain containers by default, because unpickling "
            "can run code. An older checkpoint may contain more: an argparse namespace, a NumPy scalar, or a whole "
            "model."
        ),
        tell="The message names the class that isn't allowed.",
        fix=(
            "Save plain dictionaries of tensors. If you trust a file, load it under "
            "`torch.serialization.safe_globals([argparse.Namespace])`, and then save it again. Use "
            "`weights_only=False` only for your own files."
        ),
        messages=("Weights only load failed",),
        behavior=(
            "loading or resuming from a checkpoint fails in PyTorch 2.6 and later",
            "torch.load fails after upgrading to 2.6; weights_only=True; numpy or argparse objects in the checkpoint",
        ),
        quotes={
            "a run on the CPU": (
                "_pickle.UnpicklingError",
                "Unsupported global: GLOBAL",
                "WeightsUnpickler error",
            ),
        },
        broken=load_unknown_classes,
        fixed=load_classes_that_we_trust,
        right=trained_outputs,
        says="Weights only load failed",
    ),
    Failure(
        name="save-shared-tensors",
        title="Some tensors share memory, and safetensors refuses them",
        why=(
            "The head uses the embedding's weight, or the dictionary contains views of one flat tensor. safetensors "
            "won't write the same storage twice."
        ),
        tell=(
            "The message lists the names of the tensors. With tied weights, `model.config.tie_word_embeddings` is True."
        ),
        fix=(
            "Use `safetensors.torch.save_model(model, path)`, or drop one of the two names and tie the weights again "
            "after loading. With a flat parameter, gather a full state dict first instead of saving views."
        ),
        messages=(
            "Some tensors share memory, this will lead to duplicate memory on disk",
            "Some tensors share memory",
        ),
        behavior=(
            "saving a model with tied weights as safetensors fails",
            "safetensors and tied weights; lm_head.weight and embed_tokens.weight share memory",
        ),
        quotes={
            "transformers": ("The weights trying to be saved contained shared tensors",),
        },
        broken=save_both_names,
        fixed=save_one_name,
        right=one_tensor,
        says="Some tensors share memory",
    ),
    Failure(
        name="save-shared-folder",
        title="Half of the checkpoint files are on a different node",
        why=(
            "In a sharded save, each rank writes its own files, and rank 0 also writes `.metadata`. With local disks, "
            "each node ends up with only its own ranks' files. On a network disk, new files and folders may show up "
            "late on other nodes."
        ),
        tell=(
            "List the folder on each node. The *No such file* error names a file that another rank wrote. The same run "
            "works on a single node."
        ),
        fix=(
            "Save to a disk that all nodes share. Call `os.makedirs(folder, exist_ok=True)` on every rank, and "
            "`dist.barrier()` before reading. If you use the HF Trainer with local disks, set "
            "`save_on_each_node=True`."
        ),
        messages=("CheckpointException ranks:dict_keys",),
        behavior=(
            (
                "on several nodes, a checkpoint is incomplete, or resuming fails on all nodes but the first; no "
                "shared file system"
            ),
            "a file or folder that exists isn't found on some ranks; NFS, Lustre, a stale handle",
            "the best model or checkpoint can't be found on node 1",
        ),
        quotes={
            "a run on the CPU": ("OSError: [Errno 116] Stale file handle",),
            "transformers": (
                "you should activate `--save_on_each_node`",
                "Could not locate the best model at",
            ),
        },
        broken=save_on_local_disks,
        fixed=save_on_a_shared_disk,
        right=trained_outputs,
        says=r"\.metadata",
    ),
)
