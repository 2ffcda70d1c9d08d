"""Write an EAGLE-3 head as a GGUF file, with which llama.cpp drafts chains (`draft-eagle3`).

Names of keys and tensors are those of llama.cpp's loader (ggml-org/llama.cpp, `src/models/eagle3.cpp`, pull request
18039) and of the library in xllamacpp 2026.10. There the head also has the target's tokenizer, and `fc` reads the
inputs of exactly three layers.

H query heads, K key heads, S head size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..data.gguf import copy_field
from ..data.sources import is_gguf
from ..heads.checkpoint import load_head
from ..heads.eagle import DraftHead
from ..heads.eagle3 import Eagle3Head
from ..utils.files import save_atomically
from ..utils.installation import install_command

if TYPE_CHECKING:
    from gguf import ReaderField

LAYER, BLOCK = "layers.0.", "blk.0."
NAMES = {
    "input_norm": "enc.output_norm", "fc": "fc", "norm": "output_norm", "lm_head": "output",
    "embed_tokens": "token_embd",
    LAYER + "input_layernorm": BLOCK + "attn_norm", LAYER + "hidden_norm": BLOCK + "attn_norm_2",
    LAYER + "self_attn.q_proj": BLOCK + "attn_q", LAYER + "self_attn.k_proj": BLOCK + "attn_k",
    LAYER + "self_attn.v_proj": BLOCK + "attn_v", LAYER + "self_attn.o_proj": BLOCK + "attn_output",
    LAYER + "post_attention_layernorm": BLOCK + "ffn_norm", LAYER + "mlp.gate_proj": BLOCK + "ffn_gate",
    LAYER + "mlp.up_proj": BLOCK + "ffn_up", LAYER + "mlp.down_proj": BLOCK + "ffn_down",
}
TYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


def write_gguf(source: str | Path, file: str | Path, target: str | Path | None, dtype: torch.dtype) -> Path:
    """Write a head to a GGUF file, matrices in `dtype` and vectors in float32; return the file's path.

    Args:
        source: a head for `load_head`.
        target: GGUF file of the target, from which the tokenizer is copied.

    Raises:
        ValueError: llama.cpp cannot compute this head, or it does not fit the target; the file exists, or its name does
            not end in .gguf; `target` is no GGUF file, or `dtype` is not in TYPES. See also `load_head`.
        ImportError: the package gguf is missing.
        OSError: the file cannot be written.
    """
    file = Path(file)
    if file.suffix.lower() != ".gguf" or file.exists():
        raise ValueError(f"{file} exists" if file.exists() else f"llama.cpp reads a file NAME.gguf, got {str(file)!r}")
    if dtype not in TYPES:
        raise ValueError(f"dtype must be one of {', '.join(map(str, TYPES))}, got {dtype}")
    if not is_gguf(target):
        raise ValueError("llama.cpp needs the target's tokenizer in the head's file: pass target, the GGUF file of the "
                         f"target that it will serve, got {target!r}")
    if find_spec("gguf") is None:
        raise ImportError(f"writing {file} needs the package gguf: {install_command('gguf')}")
    from gguf import GGUFReader

    head = load_head(source)
    reason = unsupported(head)
    if reason is not None:
        raise ValueError(f"{source} cannot be exported to llama.cpp: {reason}")
    fields = GGUFReader(target).fields
    layers = check_target(head, source, target, fields)
    file.parent.mkdir(parents=True, exist_ok=True)
    save_atomically(file, lambda part: _write(head, Path(source).name, part, fields, layers, dtype))
    return file


def unsupported(head: DraftHead) -> str | None:
    """Why llama.cpp cannot compute this head; None: it can."""
    if not isinstance(head, Eagle3Head):
        return f"it is an {head.kind} head, and llama.cpp drafts with EAGLE-3 heads only"
    layers = head.fc.in_features // head.target_hidden_size
    if layers != 3:
        return f"it reads {layers} layers of the target; llama.cpp supports 3"
    norms = [name for name in ("fc_norm", "norm_output", "qk_norm") if getattr(head.config, name, False)]
    if norms:
        return f"it has {', '.join(norms)}; llama.cpp supports norm_before_fc and norm_before_residual"
    if isinstance(head.norm, torch.nn.Identity):
        return "it has no norm before its output layer; llama.cpp always computes one"
    if head.config.hidden_act != "silu":
        return f"it has the activation {head.config.hidden_act!r}; llama.cpp supports silu only"
    biases = [name for name, value in head.named_parameters() if name.endswith(".bias") and value.any()]
    if biases:
        return f"llama.cpp has no {', '.join(biases)}; it supports heads without biases"
    if head.fused is None or head.rotary_emb.attention_scaling != 1:
        kind = head.config.rope_parameters["rope_type"]
        return f"its rotary embedding is of type {kind!r}; accepted: default, linear, llama3"
    return None


def check_target(
    head: Eagle3Head, source: str | Path, target: str | Path, fields: Mapping[str, ReaderField]
) -> tuple[int, ...]:
    """The target's layers that the head reads.

    Raises:
        ValueError: the head does not fit the target in this file, or the file has no tokenizer.
    """
    try:
        about = fields["general.architecture"].contents()
        size, count = (fields[f"{about}.{name}"].contents() for name in ("embedding_length", "block_count"))
        tokens = len(fields["tokenizer.ggml.tokens"].data)
    except KeyError as error:
        raise ValueError(f"{target} is no target of llama.cpp: it has no {error.args[0]}") from error
    for what, ours, theirs in (("hidden size", head.target_hidden_size, size),
                               ("vocabulary", head.config.vocab_size, tokens)):
        if ours != theirs:
            raise ValueError(f"{source} does not fit {target}: {what}: head {ours}, target {theirs}")
    layers = head.target_layers(count)
    if count in layers:
        raise ValueError(f"{source} reads the output of the target's last layer; llama.cpp supports inputs of layers")
    return layers


def interleaved(
    weight: Tensor,  # [heads * S, *]
    heads: int,
) -> Tensor:  # [heads * S, *]
    """The rows of a projection in llama.cpp's order of rotary pairs: i and i + S / 2 side by side."""
    return weight.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)


def frequency_factors(head: Eagle3Head) -> Tensor | None:  # [S / 2]
    """By what llama.cpp divides the rotary frequencies of `rope_theta`; None: they are those."""
    size, theta = 2 * len(head.rotary_emb.inv_freq), head.config.rope_parameters["rope_theta"]
    factors = theta ** (-torch.arange(0, size, 2) / size) / head.rotary_emb.inv_freq
    return None if torch.allclose(factors, torch.ones(()), rtol=1e-4) else factors


@torch.no_grad()
def _write(
    head: Eagle3Head, name: str, part: Path, fields: Mapping[str, ReaderField], layers: Sequence[int],
    dtype: torch.dtype,
) -> None:
    import gguf

    config, writer = head.config, gguf.GGUFWriter(part, "eagle3")
    writer.add_name(name)
    writer.add_file_type(gguf.LlamaFileType["ALL_F32" if dtype == torch.float32 else f"MOSTLY_{TYPES[dtype]}"])
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(1)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    size = head.layers[0].self_attn.head_dim
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(size)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    writer.add_array("eagle3.target_layers", list(layers))
    writer.add_uint32("eagle3.target_hidden_size", head.target_hidden_size)
    writer.add_bool("eagle3.norm_before_residual", head.layers[0].norm_before_residual)
    writer.add_bool("eagle3.norm_before_fc", head.input_norm is not None)
    for key, field in fields.items():
        if key.startswith("tokenizer."):
            copy_field(writer, key, field)

    def add(name: str, value: Tensor) -> None:
        kind = gguf.GGMLQuantizationType["F32" if value.dim() == 1 else TYPES[dtype]]
        values = value.detach().float().cpu().contiguous().numpy()
        writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)

    rows = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, value in head.named_parameters():
        module, _, which = name.rpartition(".")
        if which == "weight":
            heads = rows.get(module.rpartition(".")[2])
            add(f"{NAMES[module]}.weight", value if heads is None else interleaved(value, heads))
    if (factors := frequency_factors(head)) is not None:
        add("rope_freqs.weight", factors)
    if head.draft_tokens is not None:
        writer.add_tensor("d2t", head.draft_tokens.cpu().numpy())  # the tokens themselves, and no offsets
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
