"""Write checkpoints with the real libraries: PyTorch, accelerate, transformers and Lightning.

Usage: python write_real_checkpoints.py FOLDER, with a Python that has these libraries. The program
writes one folder for each layout.
"""

from __future__ import annotations

import sys
from pathlib import Path

import lightning
import torch
from accelerate import Accelerator
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.distributed import checkpoint as distributed
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


def make_model() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model = torch.nn.Linear(40, 40)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 40)).sum().backward()
    optimizer.step()
    return model, optimizer


def write_torch(folder: Path) -> None:
    model, optimizer = make_model()
    for step in (10, 20):
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
        for name in ("torch", "torch-old"):
            (folder / name).mkdir(exist_ok=True)
        torch.save(state, folder / "torch" / f"step_{step}.pt")
        torch.save(
            state,
            folder / "torch-old" / f"step_{step}.pt",
            _use_new_zipfile_serialization=False,
        )
        distributed.save(state, checkpoint_id=str(folder / "distributed" / f"step_{step}"))


def write_accelerate(folder: Path) -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(*make_model())
    for step in (10, 20):
        accelerator.save_state(str(folder / "accelerate" / f"checkpoint_{step}"))


def write_transformers(folder: Path) -> None:
    config = LlamaConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        vocab_size=32,
    )
    rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)} for _ in range(80)]
    arguments = TrainingArguments(
        output_dir=str(folder / "transformers"),
        max_steps=20,
        save_steps=10,
        per_device_train_batch_size=2,
        report_to=[],
        use_cpu=True,
    )
    Trainer(model=LlamaForCausalLM(config), args=arguments, train_dataset=rows).train()


class Regression(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)

    def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
        return self.layer(batch).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


def write_lightning(folder: Path) -> None:
    for name, save_last in (("lightning", True), ("lightning-link", "link")):
        callback = ModelCheckpoint(
            dirpath=str(folder / name),
            every_n_train_steps=10,
            save_top_k=-1,
            save_last=save_last,
            filename="{epoch}_{step}",
            auto_insert_metric_name=False,
        )
        trainer = lightning.Trainer(
            max_steps=20,
            accelerator="cpu",
            callbacks=[callback],
            logger=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(Regression(), DataLoader(torch.ones(80, 4), batch_size=2))


def main() -> None:
    folder = Path(sys.argv[1])
    folder.mkdir(parents=True, exist_ok=True)
    write_torch(folder)
    write_accelerate(folder)
    write_transformers(folder)
    write_lightning(folder)


if __name__ == "__main__":
    main()
