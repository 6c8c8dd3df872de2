"""The built-in tasks."""

from __future__ import annotations

from typing import Any

#: Name and class of each. Reading the names imports no torch.
BUILT_IN = {
    "har": "lockstep.tasks.har:HarTask",
    "images": "lockstep.recipes.images.task:ImagesTask",
    "text": "lockstep.recipes.text.task:TextTask",
    "speech": "lockstep.recipes.speech.task:SpeechTask",
    "autoencoder": "lockstep.recipes.autoencoder:AutoencoderTask",
}

#: Settings of each that differ from the general defaults.
DEFAULTS: dict[str, dict[str, Any]] = {
    "har": {
        "training": {"epochs": 30, "batch_size": 32, "max_grad_norm": 1.0, "early_stopping_patience": 15},
        "optimizer": {"name": "adamw", "lr": 2e-3, "weight_decay": 1e-2},
        "scheduler": {"name": "cosine"},
        "telemetry": {"log_interval": 50},
    },
    "images": {
        "training": {"epochs": 10, "batch_size": 32, "early_stopping_patience": 0},
        "optimizer": {"name": "adamw", "lr": 2e-3, "weight_decay": 0.05, "weight_decay_on": "matrices"},
        "scheduler": {"name": "cosine", "warmup_epochs": 1},
    },
    "text": {
        "training": {"epochs": 2, "batch_size": 16, "early_stopping_patience": 0},
        "optimizer": {
            "name": "adamw",
            "lr": 3e-3,
            "weight_decay": 0.1,
            "weight_decay_on": "matrices",
            "betas": [0.9, 0.95],
        },
        "scheduler": {"name": "cosine", "min_lr": 1e-4},
    },
    "speech": {
        "training": {"epochs": 36, "batch_size": 4, "max_grad_norm": 0.5, "early_stopping_patience": 8},
        "optimizer": {"name": "adamw", "lr": 1.5e-3, "weight_decay": 1e-4},
        "scheduler": {"name": "cosine", "warmup_epochs": 0.5},
        "validation": {"batch_size": 32},
        "telemetry": {"log_interval": 50},
    },
    "autoencoder": {
        "training": {"epochs": 40, "batch_size": 32, "early_stopping_patience": 10},
        "optimizer": {"name": "adamw", "lr": 3e-3, "weight_decay": 1e-4},
        "scheduler": {"name": "cosine", "warmup_epochs": 1},
    },
}
