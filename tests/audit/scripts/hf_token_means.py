# expect: AUDIT_MEAN_OF_MEANS
import torch
import torch.nn.functional as F
from common import sentences, tagger
from transformers import Trainer, TrainingArguments


class Tagger(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = tagger()

    def forward(self, tokens, labels):
        logits = self.net(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())  # fault
        return {"loss": loss, "logits": logits}


def collate(rows):
    tokens, labels = zip(*rows, strict=True)
    return {"tokens": torch.stack(tokens), "labels": torch.stack(labels)}


arguments = TrainingArguments(
    "output",
    num_train_epochs=1,
    per_device_train_batch_size=4,
    report_to=[],
    save_strategy="no",
    disable_tqdm=True,
    use_cpu=True,
)
Trainer(Tagger(), arguments, data_collator=collate, train_dataset=sentences()).train()
