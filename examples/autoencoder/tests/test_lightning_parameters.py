"""From configuration to parameters, shapes and device: `python -m unittest tests/test_lightning_parameters.py`."""

import unittest
from pathlib import Path

import torch
import yaml
from src.data.lightning_datamodule import DigitsDataModule
from src.model.lightning_module import AutoencoderModule

from lockstep.recipes.autoencoder import draw
from lockstep.recipes.autoencoder.model import Autoencoder as NativeAutoencoder

CONFIG = yaml.safe_load((Path(__file__).parents[1] / "config" / "config.yaml").read_text())


class ParametersTest(unittest.TestCase):
    def setUp(self):
        torch.manual_seed(0)
        self.module = AutoencoderModule(**CONFIG["model"])
        self.data = DigitsDataModule(**CONFIG["data"])
        self.data.setup("fit")

    def test_the_configuration_decides_the_parameters(self):
        wide, narrow = CONFIG["model"]["hidden"]
        code = CONFIG["model"]["code"]
        shapes = [tuple(p.shape) for p in self.module.model.parameters() if p.dim() == 2]
        encoder = [(wide, 64), (narrow, wide), (code, narrow)]
        self.assertEqual(shapes, [*encoder, *((narrow, code), (wide, narrow), (64, wide))])
        smaller = AutoencoderModule(hidden=(32, 16), code=4)
        self.assertEqual(smaller(torch.zeros(1, 1, 8, 8)).shape, (1, 1, 8, 8))
        self.assertEqual(smaller.hparams.code, 4)

    def test_batches_and_reconstructions_have_the_shape_of_images(self):
        batch = next(iter(self.data.train_dataloader()))
        self.assertEqual(batch.shape, (CONFIG["data"]["batch_size"], 1, 8, 8))
        reconstructions = self.module(batch)
        self.assertEqual(reconstructions.shape, batch.shape)
        self.assertTrue(reconstructions.min() >= 0 and reconstructions.max() <= 1)
        self.assertEqual(draw(batch[:5], reconstructions[:5].detach(), zoom=2).shape, (32, 80))

    def test_all_parameters_are_on_one_device(self):
        self.assertEqual({p.device.type for p in self.module.parameters()}, {"cpu"})

    def test_the_order_depends_on_the_seed_alone(self):
        first, second, other = (
            next(iter(DigitsDataModule(seed=seed)._loader(self.data.train_set, shuffle=True))) for seed in (13, 13, 14)
        )
        self.assertTrue(torch.equal(first, second))
        self.assertFalse(torch.equal(first, other))

    def test_lockstep_s_own_task_trains_the_same_network(self):
        native = NativeAutoencoder(hidden=CONFIG["model"]["hidden"], code=CONFIG["model"]["code"])
        native.load_state_dict(self.module.model.state_dict())
        images = self.data.val_set.images[:4]
        self.assertTrue(torch.equal(native(images), self.module(images)))


if __name__ == "__main__":
    unittest.main()
