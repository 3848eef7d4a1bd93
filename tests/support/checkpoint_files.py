"""Write checkpoints in the layouts of several trainers, byte by byte as their libraries do.

The libraries themselves are not needed. `write_real_checkpoints.py` writes some of these layouts
with PyTorch, transformers, accelerate and Lightning.
"""

from __future__ import annotations

import io
import json
import pickle
import sys
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from safetensors.numpy import save_file

#: Type of a function `write(folder, step)` that writes one checkpoint into a folder, and returns
#: the path of the checkpoint.
Write = Callable[[Path, int], Path]
#: Module of PyTorch that defines the metadata of a distributed checkpoint.
_METADATA_MODULE = "torch.distributed.checkpoint.metadata"


def write_torch(path: Path, content: object = None) -> Path:
    """Write a file in the format of `torch.save`: a zip archive with a pickle and a tensor's data.

    Args:
        path: Path of the file.
        content: Object to pickle. None for an empty dict.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(content or {}, protocol=2))
        archive.writestr("archive/data/0", bytes(range(256)) * 8)
        archive.writestr("archive/version", "3\n")
    return path


def write_safetensors(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({"weight": np.ones((8, 8), np.float32)}, path)
    return path


def write_npz(path: Path, step: int) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        np.savez(file, weights=np.ones(64), step=np.array(step))
    return path


def write_json(path: Path, content: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content))
    return path


def write_text(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def write_distributed(folder: Path, ranks: int = 2) -> Path:
    """Write a folder in the format of `torch.distributed.checkpoint.save`.

    The shards are written first, and the file `.metadata` is written last.
    """
    folder.mkdir(parents=True, exist_ok=True)
    length = 512
    for rank in range(ranks):
        (folder / f"__{rank}_0.distcp").write_bytes(bytes(range(256)) * 2)
    names = [f"__{rank}_0.distcp" for rank in range(ranks)]
    (folder / ".metadata").write_bytes(_pickle_metadata(names, length))
    return folder


def _pickle_metadata(names: list[str], length: int) -> bytes:
    """Return the content of a `.metadata` file of a distributed checkpoint.

    The pickle refers to classes of PyTorch. This function works even if PyTorch is not installed.

    Args:
        names: Names of the files with the tensors.
        length: Number of bytes of each tensor.
    """
    module = ModuleType(_METADATA_MODULE)
    classes: dict[str, type[Any]] = {}
    for name in ("Metadata", "MetadataIndex", "_StorageInfo"):
        classes[name] = type(name, (), {"__module__": _METADATA_MODULE})
        setattr(module, name, classes[name])
    parents = ["torch", "torch.distributed", "torch.distributed.checkpoint"]
    before = {name: sys.modules.get(name) for name in (*parents, _METADATA_MODULE)}
    try:
        for parent in parents:
            sys.modules[parent] = ModuleType(parent)
        sys.modules[_METADATA_MODULE] = module
        metadata = classes["Metadata"]()
        metadata.storage_data = {}
        for number, name in enumerate(names):
            index, info = classes["MetadataIndex"](), classes["_StorageInfo"]()
            index.fqn = f"weight.{number}"
            info.__dict__.update(relative_path=name, offset=0, length=length)
            metadata.storage_data[index] = info
        return pickle.dumps(metadata)
    finally:
        for name, earlier in before.items():
            sys.modules.pop(name, None)
            if earlier is not None:
                sys.modules[name] = earlier


def hugging_face(folder: Path, step: int) -> Path:
    checkpoint = folder / f"checkpoint-{step}"
    shards = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    for shard in shards:
        write_safetensors(checkpoint / shard)
    weights = {f"layer.{number}": shard for number, shard in enumerate(shards)}
    write_json(checkpoint / "model.safetensors.index.json", {"weight_map": weights})
    write_json(checkpoint / "config.json", {"hidden_size": 8})
    for name in (
        "training_args.bin",
        "optimizer.pt",
        "scheduler.pt",
        "rng_state_0.pth",
        "rng_state_1.pth",
    ):
        write_torch(checkpoint / name)
    write_json(checkpoint / "trainer_state.json", {"global_step": step, "log_history": []})
    return checkpoint


def accelerate(folder: Path, step: int) -> Path:
    checkpoint = folder / f"checkpoint_{step}"
    write_safetensors(checkpoint / "model.safetensors")
    write_torch(checkpoint / "optimizer.bin")
    for rank in (0, 1):
        write_torch(checkpoint / f"random_states_{rank}.pkl")
    return checkpoint


def distributed(folder: Path, step: int) -> Path:
    return write_distributed(folder / f"step-{step}")


def lightning(folder: Path, step: int) -> Path:
    return write_torch(folder / f"epoch={step // 10}-step={step}.ckpt", {"global_step": step})


def lightning_of_nemo(folder: Path, step: int) -> Path:
    name = f"megatron_gpt--val_loss=1.{step}-step={step}-consumed_samples={8 * step}.0.ckpt"
    return write_torch(folder / name, {"global_step": step})


def lightning_sharded(folder: Path, step: int) -> Path:
    checkpoint = write_distributed(folder / f"epoch=0-step={step}.ckpt")
    write_torch(checkpoint / "meta.pt", {"global_step": step})
    return checkpoint


def megatron_distributed(folder: Path, step: int) -> Path:
    checkpoint = folder / f"iter_{step:07}"
    write_torch(checkpoint / "common.pt", {"iteration": step})
    write_distributed(checkpoint)
    write_json(checkpoint / "metadata.json", {"sharded_backend": "torch_dist"})
    return checkpoint


def megatron(folder: Path, step: int) -> Path:
    checkpoint = folder / f"iter_{step:07}"
    for rank in (0, 1):
        write_torch(checkpoint / f"mp_rank_{rank:02}" / "model_optim_rng.pt")
    write_text(folder / "latest_checkpointed_iteration.txt", str(step))
    return checkpoint


def verl(folder: Path, step: int) -> Path:
    checkpoint = folder / f"global_step_{step}"
    for role in ("actor", "critic"):
        for kind in ("model", "optim", "extra_state"):
            for rank in (0, 1):
                write_torch(checkpoint / role / f"{kind}_world_size_2_rank_{rank}.pt")
        write_json(checkpoint / role / "fsdp_config.json", {"world_size": 2})
    write_torch(checkpoint / "data.pt")
    return checkpoint


def verl_with_pointer(folder: Path, step: int) -> Path:
    checkpoint = verl(folder, step)
    write_text(folder / "latest_checkpointed_iteration.txt", str(step))
    return checkpoint


def deepspeed(folder: Path, step: int) -> Path:
    checkpoint = folder / f"global_step{step}"
    write_torch(checkpoint / "mp_rank_00_model_states.pt", {"dp_world_size": 2})
    for rank in (0, 1):
        write_torch(checkpoint / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    write_text(folder / "latest", checkpoint.name)
    return checkpoint


def deepspeed_with_prefix(folder: Path, step: int) -> Path:
    """Write a DeepSpeed checkpoint with a tag of the form `folder/name`.

    DeepSpeed stores the tag of the newest checkpoint in the file `latest`. Some launchers use tags
    of this form.
    """
    checkpoint = deepspeed(folder / "states", step)
    (folder / "states" / "latest").unlink()
    write_text(folder / "latest", f"states/{checkpoint.name}")
    return checkpoint


def orbax(folder: Path, step: int) -> Path:
    checkpoint = folder / str(step)
    write_text(checkpoint / "default" / "manifest.ocdbt", "manifest")
    write_text(checkpoint / "default" / "d" / "0123abcd", "tensors")
    write_json(
        checkpoint / "_CHECKPOINT_METADATA",
        {"init_timestamp_nsecs": 1, "commit_timestamp_nsecs": 2, "item_handlers": {}},
    )
    return checkpoint


def nemo_rl(folder: Path, step: int) -> Path:
    checkpoint = folder / f"step_{step}"
    write_distributed(checkpoint / "policy" / "weights")
    write_torch(checkpoint / "train_dataloader.pt")
    write_json(checkpoint / "training_info.json", {"step": step})
    return checkpoint


def prime_rl(folder: Path, step: int) -> Path:
    checkpoint = folder / f"step_{step}"
    write_distributed(checkpoint / "trainer")
    write_torch(checkpoint / "orchestrator" / "progress.pt", {"step": step})
    write_text(checkpoint / "STABLE", "")
    return checkpoint


def slime(folder: Path, step: int) -> Path:
    checkpoint = folder / f"iter_{step:07}"
    write_distributed(checkpoint / "model")
    write_distributed(checkpoint / "optimizer")
    write_torch(checkpoint / "rng.pt")
    write_json(checkpoint / "meta.json", {"iteration": step})
    write_torch(folder / "rollout" / f"global_dataset_state_dict_{step}.pt")
    write_text(folder / "latest_checkpointed_iteration.txt", str(step))
    return checkpoint


def skyrl(folder: Path, step: int) -> Path:
    checkpoint = folder / f"global_step_{step}"
    write_distributed(checkpoint / "policy")
    write_torch(checkpoint / "data.pt")
    write_torch(checkpoint / "trainer_state.pt", {"global_step": step})
    write_text(folder / "latest_ckpt_global_step.txt", str(step))
    return checkpoint


def files_of_ranks(folder: Path, step: int) -> Path:
    paths = [write_torch(folder / f"step_{step}_rank_{rank}.pt") for rank in (0, 1, 2)]
    return paths[0]


def files_of_known_ranks(folder: Path, step: int) -> Path:
    names = [f"ckpt_step{step}_world_size_2_rank_{rank}.pt" for rank in (0, 1)]
    paths = [write_torch(folder / name) for name in names]
    return paths[0]


def folder_with_link(folder: Path, step: int) -> Path:
    checkpoint = folder / f"step_{step}"
    write_torch(checkpoint / "model.pt")
    write_torch(checkpoint / "optim.pt")
    link = folder / "last"
    link.unlink(missing_ok=True)
    link.symlink_to(checkpoint.name)
    return checkpoint


def plain_torch(folder: Path, step: int) -> Path:
    return write_torch(folder / f"step_{step}.pt", {"step": step})


def plain_npz(folder: Path, step: int) -> Path:
    return write_npz(folder / f"step-{step:06}.npz", step)


def plain_safetensors(folder: Path, step: int) -> Path:
    return write_safetensors(folder / f"model-step-{step}.safetensors")


def plain_pickle(folder: Path, step: int) -> Path:
    path = folder / f"checkpoint_{step}.pkl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pickle.dumps({"step": step, "weights": [0.5] * 200}))
    return path


def plain_tar(folder: Path, step: int) -> Path:
    path = folder / f"step_{step}.tar"
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as archive:
        member = tarfile.TarInfo("weights")
        member.size = 20_000
        archive.addfile(member, io.BytesIO(bytes(member.size)))
    return path


#: Mapping from the name of a checkpoint layout to the function that writes such a checkpoint.
LAYOUTS: dict[str, Write] = {
    "hugging-face": hugging_face,
    "accelerate": accelerate,
    "distributed": distributed,
    "lightning": lightning,
    "nemo-1": lightning_of_nemo,
    "lightning-sharded": lightning_sharded,
    "megatron-distributed": megatron_distributed,
    "megatron": megatron,
    "verl": verl,
    "verl-with-pointer": verl_with_pointer,
    "deepspeed": deepspeed,
    "deepspeed-prefix": deepspeed_with_prefix,
    "orbax": orbax,
    "nemo-rl": nemo_rl,
    "prime-rl": prime_rl,
    "slime": slime,
    "skyrl": skyrl,
    "ranks": files_of_ranks,
    "known-ranks": files_of_known_ranks,
    "last-link": folder_with_link,
    "pt": plain_torch,
    "npz": plain_npz,
    "safetensors": plain_safetensors,
    "pickle": plain_pickle,
    "tar": plain_tar,
}
