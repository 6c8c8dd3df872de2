# expect: AUDIT_NO_SAMPLER
import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from common import model, samples
from torch.utils.data import DataLoader


class Module(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = model()

    def training_step(self, batch, number):
        return F.mse_loss(self.net(batch[0]), batch[1])

    def validation_step(self, batch, number):
        loss = F.mse_loss(self.net(batch[0]), batch[1])
        self.log("val_loss", loss, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


trainer = pl.Trainer(
    accelerator="cpu",
    devices=2,
    strategy="ddp",
    max_epochs=1,
    logger=False,
    use_distributed_sampler=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)

loader = DataLoader(samples(), batch_size=4)  # fault
trainer.fit(Module(), loader)
