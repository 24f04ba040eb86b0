"""Contender: transformers' ViTForImageClassification under its Trainer.

Logging, saving, evaluation and progress bars are off. So is the NaN filter, which would wait for the device every step.
"""

import tempfile
from collections.abc import Iterator
from itertools import cycle
from typing import Any, NoReturn

import transformers
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, IterableDataset
from transformers import Trainer, TrainerCallback, TrainingArguments, ViTConfig, ViTForImageClassification

from bench.peers.job import Job
from bench.peers.same import batches, count, start_as_ours
from bench.peers.turns import Turns
from bench.plain_loop import adamw
from bench.settings import CLIP, LR

NEVER = 10**9


class Ready(IterableDataset):
    """Endless data set of complete batches, already on the device."""

    def __init__(self, job: Job) -> None:
        self._batches = batches(job)

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for images, labels in cycle(self._batches):
            yield {"pixel_values": images, "labels": labels}


class Watched(Trainer):
    """Trainer that keeps its last loss and takes complete batches from the data set."""

    def get_train_dataloader(self) -> DataLoader:
        return DataLoader(self.train_dataset, batch_size=None)

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        self.newest = super().training_step(*args, **kwargs)
        return self.newest


class Gate(TrainerCallback):
    """Callback that reports every optimizer step to `turns`."""

    def __init__(self, turns: Turns) -> None:
        self._turns = turns
        self.trainer: Watched | None = None

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        assert self.trainer is not None
        self._turns.stepped(self.trainer.newest)


def model_of(job: Job) -> nn.Module:
    """Return transformers' model with the configuration of the job."""
    c = job.config
    config = ViTConfig(
        hidden_size=c.embed_dim,
        num_hidden_layers=c.depth,
        num_attention_heads=c.num_heads,
        intermediate_size=c.mlp_hidden_dim,
        image_size=c.image_size,
        patch_size=c.patch_size,
        num_channels=c.channels,
        num_labels=c.num_classes,
        layer_norm_eps=1e-6,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return ViTForImageClassification(config)


def train(job: Job, turns: Turns) -> NoReturn:
    """Train until the process ends."""
    model = model_of(job).to(job.device)
    start_as_ours(model, job)
    optimizer = adamw(model)
    gate = Gate(turns)
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=NEVER,
            learning_rate=LR,
            per_device_train_batch_size=job.batch_size,
            max_grad_norm=CLIP,
            bf16=job.precision == "bf16",
            torch_compile=job.compiled,
            **({"gradient_checkpointing": True} if job.saving else {}),
            logging_strategy="no",
            logging_nan_inf_filter=False,
            save_strategy="no",
            eval_strategy="no",
            report_to=[],
            disable_tqdm=True,
            remove_unused_columns=False,
            dataloader_num_workers=0,
            dataloader_pin_memory=False,
            use_cpu=job.device == "cpu",
        )
        schedule = LambdaLR(optimizer, lambda step: 1.0)
        trainer = Watched(
            model, arguments, train_dataset=Ready(job), optimizers=(optimizer, schedule), callbacks=[gate]
        )
        gate.trainer = trainer
        turns.ready(count(model), f"transformers {transformers.__version__}")
        trainer.train()
    raise AssertionError("there is always another batch")
