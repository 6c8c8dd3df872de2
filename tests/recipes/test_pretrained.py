"""A task whose model is one of transformers or peft: exported as ``from_pretrained`` reads it, and ``generate``."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import lockstep
from lockstep.cli.main import main

TASK = """
import torch
from peft import LoraConfig, get_peft_model
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast

from lockstep import Datasets, Loss, Task

WORDS = ["[END]", *"abcdefgh"]


class Letters(Task):
    def __init__(self, lora: bool = False, wrapped: bool = False):
        super().__init__()
        self.lora, self.wrapped = lora, wrapped
        words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[END]"))
        words.pre_tokenizer = pre_tokenizers.Whitespace()
        self.tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="[END]", unk_token="[END]")

    def datasets(self):
        rows = torch.arange(1, 9).repeat(8, 2)
        return Datasets(rows, rows[:4])

    def model(self):
        sizes = {"n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2}
        net = GPT2LMHeadModel(GPT2Config(vocab_size=len(WORDS), bos_token_id=0, eos_token_id=0, **sizes))
        if self.lora:
            net = get_peft_model(net, LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True))
        return nn.ModuleDict({"net": net}) if self.wrapped else net

    def loss(self, model, batch):
        net = model["net"] if self.wrapped else model
        scores = net(input_ids=batch).logits[:, :-1].flatten(0, 1)
        return Loss(cross_entropy(scores, batch[:, 1:].flatten(), reduction="sum"), len(scores))
"""


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # peft reads it
def test_export_and_generate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2LMHeadModel

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "letters.py").write_text(TASK)
    settings = {"devices": "cpu", "epochs": 2, "batch_size": 4, "lr": 0.05, "num_workers": 0}
    run = lockstep.train("letters.py:Letters", save_dir="plain", **settings)  # type: ignore[arg-type]
    model = run.load_model()
    ids = torch.tensor([[1, 2, 3]])
    folder = run.export("exported", program=False) / "pretrained"
    again = AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(again(ids).logits, model(ids).logits)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer("a b c")["input_ids"] == [1, 2, 3]

    capsys.readouterr()
    assert main(["generate", "plain", "--prompt", "a b c", "--tokens", "4", "--temperature", "0", "--json"]) == 0
    expected = again.generate(ids, max_new_tokens=4, do_sample=False)
    assert json.loads(capsys.readouterr().out)["text"] == tokenizer.decode(expected[0], skip_special_tokens=True)
    drawn = set()
    for _ in range(2):
        assert main(["generate", "plain", "--prompt", "a", "--seed", "3", "--tokens", "5"]) == 0
        drawn.add(capsys.readouterr().out)
    assert len(drawn) == 1

    adapted = lockstep.train(
        "letters.py:Letters", {"task.lora": True, "task.wrapped": True}, save_dir="lora", **settings
    )  # type: ignore[arg-type]
    folder = adapted.export("adapter", program=False) / "pretrained"
    assert (folder / "adapter_model.safetensors").exists() and not (folder / "model.safetensors").exists()
    trained = adapted.load_model()["net"]
    base = GPT2LMHeadModel(trained.base_model.model.config)
    base.load_state_dict(
        {
            name.replace(".base_layer", ""): value
            for name, value in trained.base_model.model.state_dict().items()
            if "lora" not in name
        }
    )
    assert torch.allclose(PeftModel.from_pretrained(base, folder)(ids).logits, trained(ids).logits, atol=1e-6)
    assert main(["generate", "lora", "--prompt", "a"]) == 2
