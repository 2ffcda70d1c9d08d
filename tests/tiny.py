"""Tiny random pairs: two-layer targets whose next token depends mostly on the last one, and heads that predict it.

V = 32 vocabulary, D = 16 hidden size.
"""

import re

import torch
from tokenizers import Tokenizer, decoders, models, processors
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedTokenizerFast,
)

from eagle_fsd.decoding import cycle
from eagle_fsd.drafting.tree import Unread, grow, rerank
from eagle_fsd.heads.checkpoint import save_head
from eagle_fsd.heads.eagle import DraftHead
from eagle_fsd.heads.eagle3 import Eagle3Head
from eagle_fsd.loading.pair import EagleModel

VOCAB, HIDDEN = 32, 16
PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8]
PROMPTS = [PROMPT, [7, 7, 2], [5], [(5 * i + 3) % VOCAB for i in range(21)], PROMPT[:6]]
NAMED = [1, 2, 3, 5, 6, 7, 8, 9, 12, 13, 14, 17, 19, 20, 22, 23, 24, 26, 28, 30, 31]  # a reduced draft vocabulary

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
MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
ROUTED = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}
LATENT = {"num_key_value_heads": 4, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4,
          "v_head_dim": 6}
WINDOW = {"sliding_window": 8}
TYPES = {"layer_types": ["sliding_attention", "full_attention"]}
SHORT_ROPE = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
# Options of stock configs besides SIZES; the default model type is the family's name.
FAMILIES = {
    "llama": {},
    "llama4_text": MOE | {"attention_chunk_size": 8, "no_rope_layers": [1, 0], "floor_scale": 4, "head_dim": 8,
                          "attn_scale": 0.5, "intermediate_size_mlp": 24},
    "mistral": {"sliding_window": None},
    "mistral-window": {"model_type": "mistral"} | WINDOW,
    "ministral": {"head_dim": 8} | WINDOW | TYPES,
    "ministral3": {"sliding_window": None, "head_dim": 8,
                   "rope_parameters": SHORT_ROPE | {"llama_4_scaling_beta": 0.5, "mscale_all_dim": 1.0, "mscale": 1.0}},
    "mixtral": MOE | {"sliding_window": None},
    "qwen2": {},
    "qwen2-window": {"model_type": "qwen2", "use_sliding_window": True} | WINDOW | TYPES,
    "qwen2_moe": MOE | {"shared_expert_intermediate_size": 24},
    "qwen3": {"head_dim": 8},
    "qwen3_moe": MOE | {"head_dim": 8},
    "gemma": {"head_dim": 8},
    "gemma2": {"head_dim": 8, "query_pre_attn_scalar": 8} | WINDOW,
    "gemma3_text": {"head_dim": 8, "query_pre_attn_scalar": 8} | WINDOW | TYPES,
    "gemma4_text": {"head_dim": 8, "global_head_dim": 8, "hidden_size_per_layer_input": 8,
                    "vocab_size_per_layer_input": VOCAB} | WINDOW | TYPES,
    "phi": {},
    "phi3": WINDOW,
    "phimoe": MOE | {"sliding_window": None},
    "olmo": {},
    "olmo2": {},
    "olmo3": WINDOW | TYPES,
    "olmoe": MOE,
    "glm": {"head_dim": 8},
    "glm4": {"head_dim": 8},
    "glm4_moe": MOE | ROUTED | {"head_dim": 8},
    "gpt_oss": MOE | {"head_dim": 8} | WINDOW | TYPES,
    "granite": {"logits_scaling": 3.0, "embedding_multiplier": 2.0, "residual_multiplier": 0.7,
                "attention_multiplier": 0.4},
    "granitemoe": MOE | {"logits_scaling": 3.0, "embedding_multiplier": 2.0},
    "granitemoehybrid": MOE | {"logits_scaling": 3.0, "shared_intermediate_size": 24, "mamba_n_heads": 4,
                               "mamba_d_head": 8, "layer_types": ["full_attention"] * 2},
    "cohere": {"logit_scale": 0.5},
    "cohere2": {"logit_scale": 0.5} | WINDOW | TYPES,
    "smollm3": {"no_rope_layers": [1, 0]},
    "starcoder2": {"sliding_window": None},
    "starcoder2-window": {"model_type": "starcoder2"} | WINDOW,
    "stablelm": {"partial_rotary_factor": 0.5},
    "nemotron": {},
    "exaone4": WINDOW | TYPES,
    "ernie4_5": {"head_dim": 8},
    "hunyuan_v1_dense": {"head_dim": 8},
    "seed_oss": {"head_dim": 8},
    "apertus": {},
    "arcee": {},
    "nanochat": {},
    "deepseek_v2": MOE | ROUTED | LATENT,
    "deepseek_v3": MOE | ROUTED | LATENT,
    "glm4_moe_lite": MOE | ROUTED | LATENT,
    "falcon": {"num_kv_heads": 2, "new_decoder_architecture": True},
    "gpt2": {"n_inner": 24},
    "gpt_bigcode": {"n_inner": 24},
    "gptj": {"rotary_dim": 4},
    "gpt_neox": {},
    "opt": {"ffn_dim": 24, "word_embed_proj_dim": HIDDEN},
}

MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 8, "mamba_d_state": 4}
LINEAR = {"layer_types": ["linear_attention", "full_attention"], "head_dim": 8}
# Families that cannot verify a tree: state-space and linear layers, convolutions, positions taken from mask rows.
REFUSED = {
    "mamba": {"state_size": 4},
    "mamba2": {"state_size": 4, "num_heads": 4, "head_dim": 8, "n_groups": 1},
    "falcon_mamba": {"state_size": 4},
    "rwkv": {},
    "xlstm": {"num_heads": 2},
    "recurrent_gemma": {"lru_width": 16, "num_hidden_layers": 3},
    "jamba": {"use_mamba_kernels": False, "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 4,
              "num_experts": 1, "num_experts_per_tok": 1},
    "bamba": MAMBA,
    "granitemoehybrid-mamba": MOE | MAMBA | {"model_type": "granitemoehybrid", "shared_intermediate_size": 24,
                                             "layer_types": ["linear_attention", "full_attention"]},
    "nemotron_h": {},
    "qwen3_next": MOE | LINEAR,
    "qwen3_5_text": LINEAR,
    "minimax": MOE | LINEAR,
    "olmo_hybrid": {},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "deepseek_v32": MOE | ROUTED | LATENT | {"index_head_dim": 8, "index_n_heads": 2, "index_topk": 8},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "bloom": {},
    "mpt": {"d_model": HIDDEN, "n_heads": 4, "n_layers": 2, "expansion_ratio": 2},
    "falcon-alibi": {"model_type": "falcon", "alibi": True},
    "openai-gpt": {},
    "trocr": {"d_model": HIDDEN, "decoder_layers": 2, "decoder_attention_heads": 4, "decoder_ffn_dim": 24},
    "hyperclovax": {"logits_scaling": 2.0},
}


def readable(value) -> str:
    """The id of a test's parameter, the same in every process, so that processes can share the tests."""
    return re.sub(r" at 0x[0-9a-f]+|\(moves=tensor\(.*?\)\)", "", str(value), flags=re.DOTALL)


def tiny_config(family: str, **options):
    """The family's own configuration class at a tiny size."""
    options = SIZES | (FAMILIES | REFUSED)[family] | options
    return AutoConfig.for_model(options.pop("model_type", family), **options)


def tiny_target(family: str = "llama", seed: int = 0, attention: str = "eager", **options):
    """A random causal LM of the family in float32."""
    torch.manual_seed(seed)  # for biases and other parameters that the model's own initialisation draws
    model = AutoModelForCausalLM.from_config(tiny_config(family, **options), attn_implementation=attention).eval()
    torch.manual_seed(seed)
    with torch.no_grad():
        for _, weight in sorted(model.named_parameters()):
            if weight.dim() > 1:
                weight.normal_(std=0.2)
        # Large embeddings outweigh the layers' contribution, large outputs make distributions peaked.
        model.get_input_embeddings().weight.normal_(std=1.0 if family.startswith("gemma") else 2.0)
        model.get_output_embeddings().weight.normal_(std=0.5)
    return model


def tiny_head(target, seed: int = 0, **options) -> DraftHead:
    """A head that predicts roughly the embedding of the last token, like the target, plus the noise of a layer."""
    torch.manual_seed(seed)
    sizes = SIZES | {"num_hidden_layers": 1, "vocab_size": target.config.vocab_size}
    head = DraftHead(LlamaConfig(**sizes | options))
    with torch.no_grad():
        for weight in head.parameters():
            weight.normal_(std=0.2) if weight.dim() > 1 else weight.normal_(1.0, 0.2)
        head.embed_tokens.weight.copy_(target.get_input_embeddings().weight)
        head.fc.weight.normal_(std=0.05)[:, :HIDDEN] += torch.eye(HIDDEN) / 2
    return head.eval()


def small_model(target, family: str = "llama", **options):
    """A causal LM that predicts roughly what the target does: its embeddings and outputs, around layers of its own."""
    model = tiny_target(family, seed=3, **options)
    parts = [(each.get_input_embeddings().weight, each.get_output_embeddings().weight) for each in (model, target)]
    with torch.no_grad():
        for own, weight in zip(*parts, strict=True):
            rows = min(len(own), len(weight))
            own[:rows] = weight[:rows]
    return model


def tiny_pair(family: str = "llama", seed: int = 0, tokenizer=None, **options) -> EagleModel:
    """A target and a head that drafts for it with some success."""
    target = tiny_target(family, seed, **options)
    return EagleModel.from_parts(target, tiny_head(target, seed), tokenizer)


def growing_long(family: str, limit: int) -> EagleModel:
    """A pair whose target has other rotary frequencies for texts of more tokens than the limit."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0, 1.0], "long_factor": [4.0, 5.0],
            "original_max_position_embeddings": limit}
    rope |= {"short_mscale": 1.0, "long_mscale": 1.3} if family == "phimoe" else {}
    window = {"sliding_window": None} if family == "phi3" else {}
    return tiny_pair(family, rope_parameters=rope, original_max_position_embeddings=limit, **window)


def tiny_tokenizer(letters: str = "abcdefghijklmnopqrstuvwxyz .") -> PreTrainedTokenizerFast:
    """One token per character, after <s>: four special tokens, then 28 letters."""
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


def tiny_trainable_pair(seed: int = 0) -> EagleModel:
    """A tiny pair whose chat template ends answers with </s>, so that a head can learn their ends."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = (
        "<s>{% for m in messages %}{% if m.role == 'assistant' %}<bot>{{ m.content }}</s>{% else %}"
        "<user>{{ m.content }}{% endif %}{% endfor %}{% if add_generation_prompt %}<bot>{% endif %}")
    return tiny_pair(seed=seed, tokenizer=tokenizer)


def tiny_chat_pair(family: str = "llama", **options) -> EagleModel:
    """A tiny pair whose chat template supports assistant turns, and whose greedy answers have no special tokens."""
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    model = tiny_pair(family, tokenizer=tokenizer, **options)
    with torch.no_grad():
        model.target.lm_head.weight[:4] = 0
    return model


def random_head(named=None, seed: int = 0, **options) -> Eagle3Head:
    """An EAGLE-3 head with random weights; `named`: the tokens of its vocabulary, None for all."""
    torch.manual_seed(seed)
    sizes = SIZES | {"num_hidden_layers": 1, "draft_vocab_size": None if named is None else len(named)}
    head = Eagle3Head(LlamaConfig(**sizes | options))
    with torch.no_grad():
        for weight in head.parameters():
            weight.normal_(std=0.3) if weight.dim() > 1 else weight.normal_(1.0, 0.2)
        if named is not None:
            head.d2t.copy_(torch.tensor(named) - torch.arange(len(named)))
    return head.eval()


def save_pair(folder, model: EagleModel | None = None) -> None:
    """Save a pair to `folder`/target, with its tokenizer, and `folder`/head; None: a tiny pair with a chat template."""
    if model is None:
        model = tiny_pair(tokenizer=tiny_tokenizer())
        model.tokenizer.chat_template = CHAT_TEMPLATE
    model.target.model.save_pretrained(folder / "target")
    model.tokenizer.save_pretrained(folder / "target")
    save_head(model.draft, folder / "head")


def draft_tree(drafter, target, features, tokens, cache, plan, wide=False, coupling=None):
    """One tree per row [T, F], [T], and the draft's logits by level."""
    scored, logits = grow(drafter, target, Unread.of(features, tokens, cache), cache, plan, coupling)
    return rerank(scored, plan, wide=wide), logits


def prefill(batch):
    return [cycle.prefill(batch, number) for number in range(len(batch.requests))]
