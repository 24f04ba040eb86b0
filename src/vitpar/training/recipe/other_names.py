"""Names of settings in other tools, so that errors can name those of vitpar."""

from __future__ import annotations

OTHER_NAMES = {
    "aa": "augment.policy",
    "accumulate_grad_batches": "parallel.microbatches",
    "amp": "train.precision",
    "auto_augment": "augment.policy",
    "bs": "train.batch_size",
    "clip_grad": "train.clip_grad_norm",
    "data_dir": "data.path",
    "drop_path_rate": "model.drop_path",
    "dtype": "train.precision",
    "global_batch_size": "train.batch_size",
    "grad_accum_steps": "parallel.microbatches",
    "gradient_accumulation_steps": "parallel.microbatches",
    "gradient_clip_val": "train.clip_grad_norm",
    "hflip": "data.flip",
    "img_size": "model.image_size",
    "layerwise_decay": "optimizer.layer_decay",
    "learning_rate": "optimizer.lr",
    "log_interval": "train.log_every",
    "max_epochs": "train.epochs",
    "max_grad_norm": "train.clip_grad_norm",
    "max_steps": "train.steps",
    "mixed_precision": "train.precision",
    "mlp_ratio": "model.mlp_hidden_dim",
    "model_ema": "train.ema_decay",
    "model_ema_decay": "train.ema_decay",
    "momentum_beta": "optimizer.momentum",
    "bce_loss": "task.options.bce",
    "bce_pos_weight": "task.options.bce_positive_weight",
    "bce_sum": "task.options.bce_sum",
    "bce_target_thresh": "task.options.bce_target_threshold",
    "num_epochs": "train.epochs",
    "num_layers": "model.depth",
    "num_microbatches": "parallel.microbatches",
    "num_train_epochs": "train.epochs",
    "num_workers": "data.workers",
    "padding": "data.crop_padding",
    "opt": "optimizer.name",
    "opt_betas": "optimizer.betas",
    "opt_eps": "optimizer.eps",
    "pretrained": "model.weights",
    "project_name": "track.project",
    "random_erase": "augment.random_erasing",
    "ratio": "data.crop_ratio",
    "reg_tokens": "model.num_reg_tokens",
    "report_to": "track.trackers",
    "reprob": "augment.random_erasing",
    "run_name": "track.name",
    "every_epochs": "checkpoint.every",
    "every_minutes": "checkpoint.every",
    "every_samples": "checkpoint.every",
    "every_steps": "checkpoint.every",
    "lr_base": "optimizer.lr",
    "lr_base_scale": "optimizer.lr_scaling",
    "lr_base_size": "optimizer.lr_batch_size",
    "lr_scheduler_type": "lr_schedule.shape",
    "min_lr": "lr_schedule.min_lr",
    "save_steps": "checkpoint.every",
    "scale": "data.crop_scale",
    "smoothing": "train.label_smoothing",
    "torchcompile": "train.compile",
    "sched": "lr_schedule.shape",
    "sched_on_updates": "lr_schedule.per_epoch",
    "warmup_epochs": "lr_schedule.warmup",
    "warmup_prefix": "lr_schedule.after_warmup",
    "warmup_ratio": "lr_schedule.warmup",
    "warmup_steps": "lr_schedule.warmup",
    "wd": "optimizer.weight_decay",
}
"""vitpar's key by the last part of the name elsewhere.

Names are options of timm and Megatron, and arguments of torchvision, Lightning and transformers' Trainer.
"""

ABSENT = {
    "num_classes": "the number of classes comes from the data",
}
"""Why vitpar has no such setting, by its name elsewhere."""
OTHER_VALUES = {("optimizer.name", "adam"): "Adam is adamw with optimizer.weight_decay=0"}
"""Replacement of a value that other tools have, by key and value."""
