"""The text task: corpora, tokens, scores, ranks, bad input."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import lockstep
from lockstep.errors import ConfigError, DataError, LockstepError
from lockstep.recipes.text.corpus import Bpe, Bytes, read_tokenizer, train_bpe
from lockstep.recipes.text.task import TextConfig, TextScores, TextTask
from lockstep.tasks.registry import find_task, make_task

NO_LABEL = -100  # as torch's ignore_index
SMALL = {"context": 16, "width": 16, "depth": 1, "heads": 2, "sample_tokens": 8}
TEXT = "How much wood would a woodchuck chuck if a woodchuck could chuck wood? " * 20


def task(path: Path | None = None, **settings: Any) -> TextTask:
    return TextTask(TextConfig(**{**SMALL, "data": path, **settings}))


def written(folder: Path, name: str = "corpus.txt", text: str = TEXT) -> Path:
    file = folder / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, encoding="utf-8")
    return file


def test_windows_have_each_token_once_as_a_target(tmp_path: Path) -> None:
    made = task(written(tmp_path))
    data = made.datasets()
    targets = [split.__getitems__(list(range(len(split))))[1] for split in (data.train, data.val)]
    counted = sum(int((rows != NO_LABEL).sum()) for rows in targets)
    assert counted == len(TEXT) + 1 - 2  # the first token of each split is no target
    first = targets[0].flatten()
    assert made.tokenizer.decode(first[first != NO_LABEL].tolist()) == TEXT[1 : int((first != NO_LABEL).sum()) + 1]


def test_folders_json_lines_and_token_files_are_the_same_corpus(tmp_path: Path) -> None:
    written(tmp_path / "folder", "a.txt", "one")
    written(tmp_path / "folder", "b.jsonl", json.dumps({"text": "two"}) + "\n" + json.dumps({"text": "three"}))
    stream = task(tmp_path / "folder")._tokens(tmp_path / "folder")
    assert Bytes().decode(stream.tolist()) == "onetwothree"
    assert stream.tolist().count(Bytes.end) == 3
    np.asarray(stream, dtype=np.uint16).tofile(tmp_path / "corpus.bin")
    assert task(tmp_path / "corpus.bin")._tokens(tmp_path / "corpus.bin").tolist() == stream.tolist()


def test_packed_documents_do_not_see_each_other(tmp_path: Path) -> None:
    texts = ["a wood", "chuck would chuck", "if", "wood chuck wood"] * 8
    lines = "\n".join(json.dumps({"text": text}) for text in texts)
    made = task(written(tmp_path, "corpus.jsonl", lines), pack=True, val_share=0.3)
    data, model = made.datasets(), made.model().eval()
    batch = [torch.stack(rows) for rows in zip(*(data.train[k] for k in range(len(data.train))), strict=True)]
    ids, targets, documents, _ = batch
    losses = made._losses(model, batch).detach()
    assert losses.isfinite().all() and bool((losses[targets == NO_LABEL] == 0).all())
    alone, together = 0.0, 0.0
    for row, column in zip(*torch.where(documents == 2), strict=True):
        if documents[row, column - 1] == 1:  # the second document of a window begins
            mine = torch.where(documents[row] == 2)[0]
            own = made._losses(model, (ids[row, mine][None], targets[row, mine][None]))
            alone, together = alone + float(own.detach().sum()), together + float(losses[row, mine].sum())
    assert alone > 0 and together == pytest.approx(alone, rel=1e-5)
    counted = int((targets != NO_LABEL).sum())
    pieces = sum(int(row.max()) for row in documents)
    assert counted >= int((documents > 0).sum()) - pieces


def test_paths_of_a_run_are_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that it is resumed from any folder."""
    monkeypatch.chdir(tmp_path)
    written(tmp_path)
    run = lockstep.train("text", {"task": {**SMALL, "data": "corpus.txt"}}, devices="cpu", max_steps=1)
    assert run.config.task.model_dump()["data"] == str(tmp_path / "corpus.txt")
    assert make_task(TextTask, {"tokenizer": "bpe"}).config.tokenizer == "bpe"


def test_bits_per_byte_and_perplexity() -> None:
    scores = TextScores()
    scores.update(torch.tensor([math.log(4.0), 3 * math.log(4.0)]), torch.tensor([1, 3]), torch.tensor([2, 6]))
    assert scores.compute() == {"bits_per_byte": pytest.approx(1.0), "perplexity": pytest.approx(4.0)}


def test_a_trained_tokenizer_is_kept_in_the_cache_and_has_the_bytes_of_its_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tokenizers")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made = task(written(tmp_path), tokenizer="bpe", vocabulary=300)
    tokens = made.tokenizer.encode("wood, chück")
    assert made.tokenizer.decode(tokens.tolist()) == "wood, chück"
    assert made.tokenizer.lengths()[tokens].sum() == len("wood, chück".encode())
    assert len(list((tmp_path / "cache").rglob("*.json"))) == 1
    assert task(written(tmp_path), tokenizer="bpe", vocabulary=300).tokenizer.state() == made.tokenizer.state()


@pytest.mark.parametrize("kind", ["metaspace", "wordpiece", "bytes"])
def test_tokens_have_the_bytes_of_their_text_with_other_tokenizers(kind: str) -> None:
    library = pytest.importorskip("tokenizers")
    models, decoders, before = library.models, library.decoders, library.pre_tokenizers
    text = "wood, chück <mark>wood woodchuck"
    if kind == "wordpiece":
        vocabulary = dict.fromkeys(["wood", "##chuck", "chück", ",", "</s>", "[UNK]"])
        own = library.Tokenizer(models.WordPiece({name: n for n, name in enumerate(vocabulary)}, unk_token="[UNK]"))
        own.pre_tokenizer, own.decoder = before.Whitespace(), decoders.WordPiece(cleanup=False)
        # As decoded: a space before each token that does not continue a word.
        expected = "wood , chück <mark> wood woodchuck"
    elif kind == "metaspace":
        pieces = ["▁wood", "wood", ",", "▁ch", "▁", "ck", "chuck", "<0xC3>", "<0xBC>", "</s>"]
        scores = [(name, -1.0 - number) for number, name in enumerate(pieces)]
        own = library.Tokenizer(models.Unigram(scores, unk_id=4, byte_fallback=True))
        own.pre_tokenizer = before.Metaspace(prepend_scheme="never")
        own.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        expected = text
    else:
        own = library.Tokenizer.from_str(train_bpe([text] * 3, 280))
        expected = text
    own.add_tokens(["<mark>"])
    tokens = Bpe(own.to_str())
    numbers = tokens.encode(text)
    assert tokens.decode(numbers.tolist()) == expected
    assert tokens.lengths()[numbers].sum() == len(expected.encode())


def test_the_end_token_is_the_declared_one(tmp_path: Path) -> None:
    library = pytest.importorskip("tokenizers")
    own = library.Tokenizer.from_str(train_bpe([TEXT], 280))
    own.add_special_tokens(["<stop>", "<last>"])
    file, beside = tmp_path / "tokenizer.json", tmp_path / "tokenizer_config.json"
    file.write_text(own.to_str())
    assert read_tokenizer(file).end == 0  # a usual name
    for declared in ("<stop>", {"content": "<stop>"}):
        beside.write_text(json.dumps({"eos_token": declared}))
        made = task(written(tmp_path), tokenizer=str(file))
        assert made.tokenizer.end == own.token_to_id("<stop>") < made.tokenizer.size - 1
        again = task(written(tmp_path))
        again.load_state_dict(made.state_dict())
        assert again.tokenizer.end == made.tokenizer.end
    beside.write_text('{"eos_token": "<none>"}')
    with pytest.raises(DataError, match="<none>"):
        read_tokenizer(file)


def test_ids_of_a_tokenizer_may_have_gaps() -> None:
    library = pytest.importorskip("tokenizers")
    own = library.Tokenizer(library.models.WordLevel({"wood": 0, "</s>": 1, "chuck": 9}, unk_token="wood"))
    own.pre_tokenizer = library.pre_tokenizers.Whitespace()
    tokens = Bpe(own.to_str())
    numbers = tokens.encode("wood chuck")
    assert numbers.tolist() == [0, 9] and tokens.size == len(tokens.lengths()) == 10


@pytest.mark.parametrize("pack", [False, True])
def test_padding_does_not_count(tmp_path: Path, pack: bool) -> None:
    made = task(written(tmp_path), pack=pack)
    model, train = made.model(), made.datasets().train
    batch = tuple(torch.stack(rows) for rows in zip(*(train[k] for k in range(3)), strict=True))
    full = made.pad(batch, 8)
    assert [column.shape for column in full] == [(8, *column.shape[1:]) for column in batch]
    found = []
    for one in (batch, full):
        total, count = made.loss(model, one)
        found.append((total.item(), int(count), torch.autograd.grad(total, model.tokens.weight)[0]))
    assert found[0][:2] == pytest.approx(found[1][:2], rel=1e-6)
    torch.testing.assert_close(found[0][2], found[1][2])


@pytest.mark.long
@pytest.mark.parametrize("lora", [0, 2])
def test_a_model_of_transformers_is_saved_in_its_format_and_as_a_program(tmp_path: Path, lora: int) -> None:
    library = pytest.importorskip("transformers")
    pytest.importorskip("peft")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    library.LlamaConfig(vocab_size=257, **sizes).save_pretrained(tmp_path / "llama")
    made = task(written(tmp_path), model=tmp_path / "llama", lora=lora)
    made.prepare()
    model = made.model()
    total, count = made.loss(model, made.datasets().train.__getitems__([0, 1]))
    assert count == 32 and total.item() == pytest.approx(32 * math.log(257), rel=0.1)
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert all("lora" in name for name in trained) == bool(lora)
    made.export(model, tmp_path)
    saved = tmp_path / "pretrained"
    assert (
        (saved / "adapter_model.safetensors").is_file() if lora else library.AutoConfig.from_pretrained(saved).use_cache
    )
    ids = torch.zeros(2, 16, dtype=torch.int64)
    program = torch.export.export(model.eval(), (ids,))
    torch.testing.assert_close(program.module()(ids), model(ids))


def test_an_export_has_the_tokenizer_as_transformers_reads_it(tmp_path: Path) -> None:
    library = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    library.LlamaConfig(vocab_size=300, **sizes).save_pretrained(tmp_path / "llama")
    made = task(written(tmp_path), model=tmp_path / "llama", tokenizer="bpe", vocabulary=300)
    made.prepare()
    made.export(made.model(), tmp_path)
    read = library.AutoTokenizer.from_pretrained(tmp_path / "pretrained")
    text = "a text, and é"
    assert read(text)["input_ids"] == made.tokenizer.encode(text).tolist() and read.eos_token_id == made.tokenizer.end
    again = task(written(tmp_path), model=tmp_path / "pretrained")
    assert again.tokenizer.state()["tokenizer"] == made.tokenizer.state()["tokenizer"]
    assert again.model().get_input_embeddings().num_embeddings == 300
    (tmp_path / "pretrained" / "tokenizer.json").unlink()
    with pytest.raises(ConfigError, match=r"\b300 tokens.*task\.tokenizer .*\b257\b"):
        task(written(tmp_path), model=tmp_path / "pretrained").model()


@pytest.mark.long
def test_a_model_of_a_config_file_has_float32_weights_and_that_of_a_folder_its_own(tmp_path: Path) -> None:
    library = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = library.LlamaConfig(vocab_size=257, dtype="bfloat16", **sizes)
    config.save_pretrained(tmp_path / "llama")
    made = task(written(tmp_path), model=tmp_path / "llama" / "config.json").model()
    assert {parameter.dtype for parameter in made.parameters()} == {torch.float32}
    weights = {name: value.bfloat16() for name, value in made.state_dict().items()}
    torch.save(weights, tmp_path / "llama" / "pytorch_model.bin")
    again = task(written(tmp_path), model=tmp_path / "llama").model()
    assert all(torch.equal(value, weights[name].float()) for name, value in again.state_dict().items())


def test_a_text_model_with_pictures_is_trained_on_texts(tmp_path: Path) -> None:
    library = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    text = {"vocab_size": 257, "head_dim": 8, "num_key_value_heads": 1, **sizes}
    library.Gemma3Config(text_config=text).save_pretrained(tmp_path / "both")
    made = task(written(tmp_path), model=tmp_path / "both")
    total, count = made.loss(made.model().train(), made.datasets().train.__getitems__([0, 1]))
    assert total.item() == pytest.approx(int(count) * math.log(257), rel=0.1)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "settings", "text"),
    [
        ("Bert", {}, "sees the tokens that it predicts"),
        ("XLNet", {}, "sees the tokens that it predicts"),
        ("Mamba", {"lora": 2}, "peft has no adapters"),
        ("T5", {}, "causal"),
    ],
)
def test_models_of_transformers_that_cannot_be_trained_so(
    tmp_path: Path, kind: str, settings: dict[str, Any], text: str
) -> None:
    library = pytest.importorskip("transformers")
    pytest.importorskip("peft")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    small = {
        "XLNet": {"d_model": 16, "n_layer": 1, "n_head": 2, "d_inner": 16},
        "Mamba": {"hidden_size": 16, "num_hidden_layers": 1, "state_size": 4},
        "T5": {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2},
    }.get(kind, sizes)
    getattr(library, f"{kind}Config")(vocab_size=257, **small).save_pretrained(tmp_path / "model")
    with pytest.raises(ConfigError, match=text):
        task(written(tmp_path), model=tmp_path / "model", **settings).model()


def test_a_model_with_fewer_tokens_than_bytes_is_refused_with_what_helps(tmp_path: Path) -> None:
    library = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    library.LlamaConfig(vocab_size=256, **sizes).save_pretrained(tmp_path / "model")
    with pytest.raises(ConfigError, match=r"\b256 tokens.*\b257\b") as caught:
        task(written(tmp_path), model=tmp_path / "model").model()
    assert "task.vocabulary" not in str(caught.value), "bytes have 257 tokens with any"


@pytest.mark.parametrize("pack", [False, True])
def test_predicted_windows_have_their_whole_text(tmp_path: Path, pack: bool) -> None:
    """From the first byte, over documents, to the last window, which is not full."""
    made = task(written(tmp_path), pack=pack)
    written(tmp_path / "new", "a.txt", "The cat sat.")
    written(tmp_path / "new", "b.txt", "A dog ran off.")
    data = made.evaluation_data(tmp_path / "new")
    batch = [torch.stack(rows) for rows in zip(*(data[k] for k in range(len(data))), strict=True)]
    texts = made.predict(made.model().eval(), batch)["text"]
    if pack:
        assert sorted(texts) == ["A dog ran off.", "The cat sat."]
    else:
        assert texts == ["The cat sat.A do", "og ran off."], "the last byte of a window is the first of the next"


def test_texts_of_any_machine_are_the_same_corpus(tmp_path: Path) -> None:
    """A byte order mark, line ends of Windows, capitals in suffixes; hidden files are left out."""
    folder = tmp_path / "folder"
    written(folder, "a.TXT", "one\n")
    (folder / "._a.TXT").write_bytes(b"\0\5\x16\7\xff")
    (folder / "b.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "two"}\r\n\r\n{"text": "three"}\r\n')
    (folder / "c d.txt").write_bytes("\ufefffour\r\n".encode())
    assert task(folder)._documents == ["one\n", "two", "three", "four\n"]


BAD: list[tuple[dict[str, str], dict[str, Any], type[LockstepError], str]] = [
    ({"corpus.txt": ""}, {}, DataError, "has no text"),
    ({"corpus.txt": "short"}, {}, DataError, "the corpus has 6 tokens"),
    ({"corpus.jsonl": '{"other": 1}'}, {}, DataError, "line 1 of .* has no text"),
    ({"corpus.jsonl": '{"text": null}'}, {}, DataError, "text is null, not a text"),
    ({"corpus.jsonl": '{"text": {"a": 1}}'}, {}, DataError, "not a text"),
    ({"corpus.jsonl": '{"text": "\\ud83d"}'}, {}, DataError, "line 1 of .* has no text"),
    ({"corpus.json": '[{"text": "one"}]'}, {}, DataError, "line 1 of .* has no text"),
    ({"corpus.bin": "ÿÿÿÿ"}, {}, DataError, "the tokenizer has 257"),
    ({"corpus.bin": "abc"}, {}, DataError, r"(?s)no tokens of 16 bits.*3 bytes"),
    ({"corpus.bin": ""}, {}, DataError, "no tokens of 16 bits"),
    ({"corpus.txt": TEXT}, {"tokenizer": "nothing.json"}, ConfigError, "there is no tokenizer"),
    ({"corpus.txt": TEXT}, {"lora": 4}, ConfigError, "task.lora needs task.model"),
    ({"corpus.txt": TEXT}, {"pack": True, "model": "config.json"}, ConfigError, "task.pack does not work"),
    ({"corpus.txt": TEXT}, {"width": 15}, ConfigError, "task.width and task.heads do not fit"),
]


@pytest.mark.parametrize(("files", "settings", "error", "key"), BAD)
def test_bad_input(
    tmp_path: Path, files: dict[str, str], settings: dict[str, Any], error: type[LockstepError], key: str
) -> None:
    ((name, content),) = files.items()
    made = task(written(tmp_path, name, content), **settings)
    with pytest.raises(error, match=key):
        made.prepare()
        made.datasets()
        made.model()


def test_no_such_file(tmp_path: Path) -> None:
    with pytest.raises(DataError):
        task(tmp_path / "missing.txt").datasets()


def test_the_default_corpus_is_there() -> None:
    built = find_task("text")()
    assert isinstance(built, TextTask)
    data = built.datasets()
    assert (len(data.train) + len(data.val)) * built.config.context > 400_000
