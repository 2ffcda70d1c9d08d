"""Each form of files that targets and tokenizers come in: what was saved is what is loaded, and decodes losslessly.

What `transformers` reads and writes differs between its minor versions: `make test-newest` runs these on the newest.
"""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_gguf import write as write_gguf
from tiny import CHAT_TEMPLATE, PROMPT, save_pair, tiny_chat_pair, tiny_head, tiny_target, tiny_tokenizer
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer, PreTrainedTokenizerFast, Qwen2Tokenizer

import eagle_fsd
from eagle_fsd.cli import main
from eagle_fsd.heads.checkpoint import save_head
from eagle_fsd.loading.pair import check_once

TEXT = "ab cd.\nGrüße: 猫が好き <|im_start|>user\n"


def halves(folder, name, save):
    """The weights of a checkpoint as two files with an index."""
    state = load_file(folder / "model.safetensors")
    where = {key: f"part-{number % 2}-{name}" for number, key in enumerate(sorted(state))}
    for part in set(where.values()):
        save({key: state[key] for key in state if where[key] == part}, folder / part)
    index = {"metadata": {"total_size": sum(weight.nbytes for weight in state.values())}, "weight_map": where}
    (folder / f"{name}.index.json").write_text(json.dumps(index))
    (folder / "model.safetensors").unlink()


def one_bin(folder):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def published(folder):
    """A config as it was written before version 5."""
    config = json.loads((folder / "config.json").read_text())
    rope = config.pop("rope_parameters")
    config |= {"torch_dtype": config.pop("dtype"), "rope_theta": rope["rope_theta"], "rope_scaling": None,
               "transformers_version": "4.40.0"}
    (folder / "config.json").write_text(json.dumps(config))


FORMS = {
    "safetensors": lambda folder: None,
    "sharded safetensors": lambda folder: halves(
        folder, "model.safetensors", lambda state, file: save_file(state, file, {"format": "pt"})),
    "bin": one_bin,
    "sharded bin": lambda folder: halves(folder, "pytorch_model.bin", torch.save),
    "config of version 4": published,
}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("form", [*FORMS, "gguf"])
def test_targets(form, tied, tmp_path, monkeypatch):
    monkeypatch.setenv("EAGLE_FSD_CACHE", str(tmp_path / "cache"))
    saved = tiny_target(tie_word_embeddings=tied, rope_parameters={"rope_type": "default", "rope_theta": 5000.0})
    saved.generation_config.eos_token_id = [1, 3]
    place = tmp_path / "target"
    if form == "gguf":
        pytest.importorskip("gguf")
        saved.bfloat16().float()  # they are kept in bfloat16
        place = write_gguf(tmp_path / "target.gguf", saved)
    else:
        saved.save_pretrained(place)
        FORMS[form](place)
    save_head(tiny_head(saved), tmp_path / "head")
    pair = eagle_fsd.load(place, tmp_path / "head", device="cpu", dtype="float32", tree=eagle_fsd.TreeConfig(12, 4, 3),
                          prepack=False)
    found = pair.target.model
    assert found.state_dict().keys() == saved.state_dict().keys()
    assert all(torch.equal(weight, saved.state_dict()[name]) for name, weight in found.state_dict().items())
    assert found.config.rope_parameters["rope_theta"] == 5000.0
    if form != "gguf":
        assert found.generation_config.eos_token_id == [1, 3]
    ids = torch.tensor([PROMPT])
    expected = saved.generate(ids, max_new_tokens=16, do_sample=False, eos_token_id=None)[0, len(PROMPT) :].tolist()
    output = eagle_fsd.generate(PROMPT, pair, max_new_tokens=16, ignore_eos=True)
    assert output.token_ids == expected and sum(output.stats.accepted_lengths) > 0


def letters_tokenizer():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def bytes_tokenizer():
    """As Qwen's and SmolLM's: bytes with merges, special tokens after them."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*alphabet, "ab", "cd"])}
    raw = Tokenizer(models.BPE(vocabulary, [("a", "b"), ("c", "d")]))
    raw.pre_tokenizer, raw.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    raw.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    raw.add_tokens([AddedToken("<tool_call>", normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|im_end|>", pad_token="<|endoftext|>",
                                   chat_template="{% for m in messages %}<|im_start|>{{ m.content }}{% endfor %}")


def template_in_config(folder):
    """The chat template where it was kept before version 5."""
    file = folder / "tokenizer_config.json"
    template = (folder / "chat_template.jinja").read_text()
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))
    (folder / "chat_template.jinja").unlink()


def vocabulary_and_merges(folder):
    """The files of a tokenizer without tokenizer.json; what it adds stands in its config."""
    raw = json.loads((folder / "tokenizer.json").read_text())
    (folder / "vocab.json").write_text(json.dumps(raw["model"]["vocab"]))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in raw["model"]["merges"]))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    added = {str(token.pop("id")): token for token in raw["added_tokens"]}
    config |= {"tokenizer_class": Qwen2Tokenizer.__name__, "added_tokens_decoder": added}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "tokenizer.json").unlink()


@pytest.mark.parametrize(("make", "change"), [
    (letters_tokenizer, None), (bytes_tokenizer, None), (letters_tokenizer, template_in_config),
    (bytes_tokenizer, vocabulary_and_merges),
])
def test_tokenizers(make, change, tmp_path):
    saved, chat = make(), [{"role": "user", "content": "ab cd"}]
    saved.save_pretrained(tmp_path)
    if change is not None:
        change(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    for text in (TEXT, "ab<tool_call>cd<|im_end|>"):
        ids = saved(text)["input_ids"]
        assert loaded(text)["input_ids"] == ids
        for skip in (False, True):
            assert loaded.decode(ids, skip_special_tokens=skip) == saved.decode(ids, skip_special_tokens=skip)
    assert loaded.apply_chat_template(chat)["input_ids"] == saved.apply_chat_template(chat)["input_ids"]
    assert loaded.eos_token_id == saved.eos_token_id and loaded.all_special_ids == saved.all_special_ids
    assert len(loaded) == len(saved)


def test_without_a_home_a_pair_loads_and_nothing_is_stored(tmp_path, homeless, caplog, capsys):
    """As with a home that cannot be written: its latency is measured, and its check made, at each load."""
    save_pair(tmp_path, tiny_chat_pair())
    pair = eagle_fsd.load(tmp_path / "target", tmp_path / "head", device="cpu")
    assert "latency cannot be stored (this user has no home directory" in caplog.text and pair.sizing is not None
    assert len(eagle_fsd.generate("ab", pair, max_new_tokens=4).token_ids) == 4
    check_once(pair.target.model, fused=True)
    assert not list(homeless.iterdir())
    assert main(["cache"]) == 2 and "set EAGLE_FSD_CACHE to a folder" in capsys.readouterr().err
