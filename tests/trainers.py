"""Small training in Hugging Face's and Lightning's trainers, for all whose callbacks are tested there."""

from __future__ import annotations

import lightning
import torch
from torch.utils.data import Dataset, SequentialSampler
from transformers import Trainer, TrainingArguments
from zoo import VOCABULARY

STEPS, BATCH, TOKENS, RATE = 5, 2, 7, 1e-2


class Text(Dataset):
    def __init__(self, size=STEPS * BATCH):
        self.size = size

    def __len__(self):
        return self.size

    def __getitem__(self, index):
        ids = torch.randint(3, VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


def batch(step):
    """What a trainer takes from `Text` for a step."""
    data = Text()
    return torch.stack([data[step * BATCH + k]["input_ids"] for k in range(BATCH)])


class InOrder(Trainer):
    """Hugging Face's, on `Text` from its first sequence to its last, by plain SGD."""

    def __init__(self, model, folder, callbacks, data=None, **more):
        arguments = TrainingArguments(
            output_dir=str(folder), max_steps=STEPS, per_device_train_batch_size=BATCH, learning_rate=RATE, optim="sgd",
            lr_scheduler_type="constant", max_grad_norm=0, report_to=[], logging_steps=1, use_cpu=True,
            save_strategy="no", disable_tqdm=True, **more,
        )  # fmt: skip
        super().__init__(model, arguments, train_dataset=data or Text(), callbacks=callbacks)

    def _get_train_sampler(self, *_, **__):
        return SequentialSampler(self.train_dataset)


class Module(lightning.LightningModule):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def training_step(self, batch, _):
        return self.model(**batch).loss

    def validation_step(self, batch, _):
        self.model(**batch)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=RATE)


def lightning_trainer(folder, callbacks, **more):
    """Lightning's, without progress bars and checkpoints, and without a logger unless one is given."""
    options = {"max_steps": STEPS, "logger": False, "default_root_dir": folder, **more}
    return lightning.Trainer(
        accelerator="cpu", enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        callbacks=callbacks, **options,
    )  # fmt: skip
