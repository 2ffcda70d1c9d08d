"""Tiny random pairs: two-layer targets whose next token depends mostly on the last one, and heads that know it.

V = 32 vocabulary, D = 16 hidden size.
"""

import torch
from tokenizers import Tokenizer, decoders, models, processors
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    LlamaConfig,
    MistralConfig,
    MixtralConfig,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen3Config,
)

from eagle_fsd.checkpoint import save_head
from eagle_fsd.draft import DraftHead
from eagle_fsd.model import EagleModel

VOCAB, HIDDEN = 32, 16
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]

SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
FAMILIES = {
    "llama": (LlamaConfig, {}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {"head_dim": 8}),
    "mistral": (MistralConfig, {"sliding_window": None}),
    "mistral-window": (MistralConfig, {"sliding_window": 8}),
    "mixtral": (MixtralConfig, {"num_local_experts": 4, "sliding_window": None}),
    "gemma2": (Gemma2Config, {"head_dim": 8, "query_pre_attn_scalar": 8, "sliding_window": 8}),
}


def tiny_target(family: str = "llama", seed: int = 0, attention: str = "eager", **options):
    """A random causal LM of the family in float32."""
    config_class, own = FAMILIES[family]
    config = config_class(**SIZES | own | options)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=attention).eval()
    torch.manual_seed(seed)
    with torch.no_grad():
        for _, weight in sorted(model.named_parameters()):
            if weight.dim() > 1:
                weight.normal_(std=0.2)
        # Large embeddings outweigh what the layers add, large outputs make distributions peaked.
        model.get_input_embeddings().weight.normal_(std=1.0 if family == "gemma2" else 2.0)
        model.get_output_embeddings().weight.normal_(std=0.5)
    return model


def tiny_head(target, seed: int = 0, **options) -> DraftHead:
    """A head that predicts roughly the embedding of the last token, as the target does, plus a layer of noise."""
    torch.manual_seed(seed)
    sizes = SIZES | {"num_hidden_layers": 1, "vocab_size": target.config.vocab_size}
    head = DraftHead(LlamaConfig(**sizes | options))
    with torch.no_grad():
        for weight in head.parameters():
            weight.normal_(std=0.2) if weight.dim() > 1 else weight.normal_(1.0, 0.2)
        head.embed_tokens.weight.copy_(target.get_input_embeddings().weight)
        head.fc.weight.normal_(std=0.05)[:, :HIDDEN] += torch.eye(HIDDEN) / 2
    return head.eval()


def tiny_pair(family: str = "llama", seed: int = 0, tokenizer=None, **options) -> EagleModel:
    """A target and a head that drafts for it with some success."""
    target = tiny_target(family, seed, **options)
    return EagleModel.from_parts(target, tiny_head(target, seed), tokenizer)


def tiny_tokenizer(letters: str = "abcdefghijklmnopqrstuvwxyz .") -> PreTrainedTokenizerFast:
    """One token per character, after a <s>: four special ones, then 28 letters."""
    special = ["<s>", "</s>", "<user>", "<bot>"]
    vocabulary = {token: index for index, token in enumerate([*special, *letters])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(special)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=["<user>", "<bot>"],
        chat_template="<s>{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
        "{% if add_generation_prompt %}<bot>{% endif %}",
    )


CHAT_TEMPLATE = (
    "<s>{% for m in messages %}{% if m.role == 'assistant' %}<bot>{% else %}<user>{% endif %}{{ m.content }}"
    "{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}"
)


def tiny_chat_pair(family: str = "llama", **options) -> EagleModel:
    """A tiny pair whose chat template knows assistants, and whose greedy answers have no special tokens."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    model = tiny_pair(family, tokenizer=tokenizer, **options)
    with torch.no_grad():
        model.target.lm_head.weight[:4] = 0
    return model


def save_pair(folder, model: EagleModel | None = None) -> None:
    """A pair in `folder`/target and `folder`/head, the former with its tokenizer; None: a tiny one that can chat."""
    if model is None:
        model = tiny_pair(tokenizer=tiny_tokenizer())
        model.tokenizer.chat_template = CHAT_TEMPLATE
    model.target.model.save_pretrained(folder / "target")
    model.tokenizer.save_pretrained(folder / "target")
    save_head(model.draft, folder / "head")
