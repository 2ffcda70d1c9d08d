"""Draft heads in the published layouts: a directory or hub repository with `config.json` and `model.safetensors` or
`pytorch_model.bin`. Those of EAGLE-1/2 are written in the same layout; those of EAGLE-3 are read in the layouts of its
authors (`midlayer.*`), of SpecForge and of `speculators` (`layers.0.*`) and written in the first. The draft vocabulary
of an EAGLE-1/2 head lies beside its weights, in a file that SGLang takes as --speculative-token-map.

D hidden size, R draft vocabulary, V vocabulary of the target.
"""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import LlamaConfig
from transformers.utils import cached_file

from .draft import DraftHead, Eagle3Head
from .files import save_atomically

log = logging.getLogger(__name__)

WEIGHTS = ("model.safetensors", "pytorch_model.bin")
TOKEN_MAP = "token_map.pt"  # a list of token ids, as FR-Spec (arXiv 2502.14856) publishes them


def check_source(name: str, source: object) -> str:
    """A directory or hub id as text.

    Raises:
        TypeError: neither text nor a path.
        ValueError: a file, or a path at which there is nothing.
    """
    if not isinstance(source, (str, Path)):
        raise TypeError(f"{name} must be a directory or a hub id, got {source!r}")
    text, path = str(source), Path(source)
    if path.is_file():
        raise ValueError(f"{name} must be a directory or a hub id, {text!r} is a file")
    is_path = isinstance(source, Path) or path.is_absolute() or text.startswith(".")
    if not text or is_path and not path.is_dir():
        raise ValueError(f"{name} must be a directory or a hub id, there is no directory {text!r}")
    return text


def fetch(source: str, filename: str) -> str | None:
    """Local path of a file of a directory or hub repository; None where it has no such file."""
    if Path(source).is_dir():
        path = Path(source) / filename
        return str(path) if path.is_file() else None
    return cached_file(source, filename, _raise_exceptions_for_missing_entries=False)


def _read_weights(path: str) -> dict[str, Tensor]:
    try:
        if path.endswith(".safetensors"):
            return load_file(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, EOFError, OSError, RuntimeError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as weights: {error}") from error
    except Exception as error:  # pickle.UnpicklingError and whatever a broken pickle raises
        raise ValueError(f"{path} was refused, since it holds more than tensors or is damaged: {error}") from error


def read_token_map(path: str | Path) -> Tensor:
    """[R] long: the tokens of a file of FR-Spec's kind.

    Raises:
        ValueError: not such a file.
    """
    held = _read_weights(str(path))
    try:
        tokens = torch.as_tensor(held)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise ValueError(f"{path} holds no list of token ids: {error}") from error
    if tokens.is_floating_point() or tokens.is_complex() or tokens.dtype == torch.bool:
        raise ValueError(f"{path} holds no list of token ids but {tokens.dtype}")
    return tokens.long()


def save_token_map(
    directory: str | Path,
    tokens: Tensor,  # [R] long
) -> Path:
    """Put a draft vocabulary beside a head's weights; returns its path."""
    path = Path(directory) / TOKEN_MAP
    save_atomically(path, lambda part: torch.save(tokens.tolist(), part))
    return path


def _require_finite(state: dict[str, Tensor], path: str) -> None:
    for name, value in state.items():
        if value.is_floating_point() and not value.isfinite().all():
            raise ValueError(f"{path} is damaged: {name} holds values that are not finite")


def load_head(source: str | Path) -> DraftHead:
    """A draft head from a directory or hub id, in float32 on the CPU; an `Eagle3Head` where the files hold one.

    Where the file has no embeddings, `shares_embeddings` is True and the target's must be given
    (`head.share_embeddings(...)`; `eagle_fsd.load` does it).

    An EAGLE-1/2 head drafts the tokens of the `token_map.pt` beside its weights, where there is one, and no others.

    A changed bit among a file's numbers goes unnoticed unless a number is no longer finite: the format has no checksum.

    Raises:
        TypeError: `source` is neither text nor a path.
        ValueError: not a head of this kind: files missing or damaged, keys missing, unknown or of the wrong shape,
            numbers that are not finite, or a variant that is not read.
        OSError: a hub id that cannot be found or fetched.
    """
    source = check_source("a draft head", source)
    config_path = fetch(source, "config.json")
    if config_path is None:
        raise ValueError(f"{source!r} has no config.json; a draft head needs config.json and {' or '.join(WEIGHTS)}")
    fields = _read_fields(config_path)
    config = _llama_config(fields, config_path)
    if config.num_hidden_layers != 1:
        raise ValueError(f"{source!r} has {config.num_hidden_layers} layers, a draft head has 1")
    weights_path = next((path for name in WEIGHTS if (path := fetch(source, name))), None)
    if weights_path is None:
        raise ValueError(f"{source!r} has no weights; one of {', '.join(WEIGHTS)} is needed")
    state = _read_weights(weights_path)
    if not isinstance(state, dict) or not all(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(f"{weights_path} holds no dictionary of tensors")

    _require_finite(state, weights_path)
    is_eagle3 = "draft_vocab_size" in fields or any(name.endswith("hidden_norm.weight") for name in state)
    try:
        head = (Eagle3Head if is_eagle3 else DraftHead)(config, bias="fc.bias" in state)
    except (ArithmeticError, MemoryError, RuntimeError) as error:  # sizes that no head can have
        raise ValueError(f"{config_path} describes no head that can be made: {error}") from error
    if isinstance(head, Eagle3Head):
        state = _eagle3_state(head, state, weights_path)
    elif "fc.bias" not in state and fields.get("bias", True):  # a missing key means true in the published code
        log.info("%s has no fc.bias although its config says so; loading it without one", source)
    kind = "EAGLE-3" if is_eagle3 else "EAGLE-1/2"
    missing, unknown = _compare_keys(head, state)
    if missing == {"embed_tokens.weight"}:
        missing = set()
        head.share_embeddings(None)
    if missing or unknown:
        raise ValueError(
            f"{weights_path} is no {kind} draft head: missing {sorted(missing) or 'nothing'}, "
            f"unknown {sorted(unknown) or 'nothing'}"
        )
    floating = {name: value.float() if value.is_floating_point() else value for name, value in state.items()}
    try:
        head.load_state_dict(floating, strict=False)
    except RuntimeError as error:
        raise ValueError(f"{weights_path} does not fit its config.json: {error}") from error
    token_map = fetch(source, TOKEN_MAP)
    if token_map and is_eagle3:
        log.warning("%s is not used: an EAGLE-3 head has a draft vocabulary of its own", token_map)
    elif token_map:
        try:
            head.limit_vocabulary(read_token_map(token_map))
        except ValueError as error:
            raise ValueError(f"{token_map} cannot be used: {error}") from error
    return head.eval()


def copy_head(source: str | Path, directory: str | Path) -> None:
    """Copy the files of a head, and nothing that lies beside them."""
    Path(directory).mkdir(parents=True, exist_ok=True)
    weights = next(name for name in WEIGHTS if fetch(str(source), name))
    for name in ("config.json", weights):
        shutil.copyfile(fetch(str(source), name), Path(directory) / name)


# Fields of config.json that change what an EAGLE-3 head computes without a key of their own in the weights.
VARIANTS = ("norm_output", "fc_norm", "use_aux_norm", "norm_before_fc", "parallel_drafting")
LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")  # layers that compute what Llama's does, where their keys are its
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


def _read_fields(path: str) -> dict:
    """What `config.json` holds, flat: the kinds of `speculators` keep the fields of the layer apart from their own.

    Raises:
        ValueError: not JSON, or a kind of `speculators` that is not read.
    """
    try:
        fields = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path} is no Llama config: {error}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"{path} is no Llama config: it holds a {type(fields).__name__}")
    kind = fields.get("speculators_model_type", "eagle3")
    if kind != "eagle3":
        raise ValueError(f"{path} is of the speculators kind {kind!r}; of those only eagle3 is read")
    if "speculators_model_type" not in fields:
        return fields
    layer = fields.get("transformer_layer_config")
    if not isinstance(layer, dict):
        raise ValueError(f"{path} is of the kind eagle3 and has no transformer_layer_config")
    if fields.get("norm_before_residual") is None:
        raise ValueError(f"{path} does not say norm_before_residual, and programs differ in what that means: add it")
    own = ("draft_vocab_size", "norm_before_residual", "target_hidden_size", LAYER_IDS, *VARIANTS)
    return {**layer, **{name: fields.get(name) for name in own}}


def _llama_config(fields: dict, path: str) -> LlamaConfig:
    """The config of a head's layer, with the target's layers counted as `Eagle3Head` counts them.

    Raises:
        ValueError: no Llama config, or a variant that is not read.
    """
    nested = fields.get("eagle_config") or {}  # of SGLang, SpecForge and ModelOpt
    if not isinstance(nested, dict):
        raise ValueError(f"{path}: eagle_config must hold fields by name, got {nested!r}")
    for name in ("draft_vocab_size", "target_hidden_size"):
        size = fields.get(name)
        if size is not None and (type(size) is not int or size < 1):
            raise ValueError(f"{path}: {name} must be a whole number of at least 1, got {size!r}")
    variant = next((name for name in VARIANTS if fields.get(name) or nested.get(name)), None)
    if variant is not None:
        raise ValueError(f"{path} is of a variant of EAGLE-3 that is not read: it has {variant}")
    layer = fields.get("model_type") or "llama"
    if "draft_vocab_size" in fields and layer not in LLAMA_LIKE:
        raise ValueError(f"{path} has a layer of type {layer!r}; read are {', '.join(LLAMA_LIKE)}")
    layers, shift = fields.get(LAYER_IDS), 0
    if layers is None:  # there the layers are named whose output is read, elsewhere those that it enters
        layers, shift = nested.get(LAYER_IDS), 1
    if layers is not None:
        if not isinstance(layers, list) or not layers or not all(type(number) is int for number in layers):
            raise ValueError(f"{path}: {LAYER_IDS} must be a list of layer numbers, got {layers!r}")
        layers = [number + shift for number in layers]
    # Published configs carry the target's `head_dim`-free Llama fields; null entries stand for defaults.
    given = {**fields, LAYER_IDS: layers}
    given = {name: value for name, value in given.items() if name not in ("bias", "model_type") and value is not None}
    try:
        return LlamaConfig(**given)
    except Exception as error:  # one of the config classes' own errors
        raise ValueError(f"{path} is no Llama config: {error}") from error


def _eagle3_state(head: Eagle3Head, state: dict[str, Tensor], path: str) -> dict[str, Tensor]:
    """The tensors under our names, without what says a thing twice.

    Raises:
        ValueError: draft tokens that stand for no token of the target, or two for one.
    """
    state = {
        "layers.0." + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name: value
        for name, value in state.items() if name != "t2d"  # the tokens of d2t, as a mask
    }
    named, vocabulary = head.draft_vocab_size, head.config.vocab_size
    offsets = state.get("d2t")
    if head.d2t is None:
        if offsets is not None and offsets.any():
            raise ValueError(f"{path} has offsets in d2t, although its draft vocabulary is the whole one")
        state.pop("d2t", None)
        return state
    if offsets is None:
        raise ValueError(f"{path} has no d2t, which says what its {named} tokens stand for among {vocabulary}")
    if offsets.is_floating_point() or tuple(offsets.shape) != (named,):
        raise ValueError(f"{path}: d2t must be integers [{named}], got {offsets.dtype} {list(offsets.shape)}")
    tokens = torch.arange(named) + offsets
    if tokens.min() < 0 or tokens.max() >= vocabulary or len(tokens.unique()) < named:
        raise ValueError(f"{path}: d2t must name {named} different tokens of {vocabulary}, as offsets")
    return state


def _compare_keys(head: DraftHead, state: dict[str, Tensor]) -> tuple[set[str], set[str]]:
    expected = set(head.state_dict())
    return expected - state.keys(), state.keys() - expected


# What consumers of heads read from config.json; the rest of a Llama config has no meaning for a head.
CONFIG_FIELDS = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps", "rope_parameters",
    "initializer_range", "attention_bias", "mlp_bias", "qkv_bias", "tie_word_embeddings", "bos_token_id",
    "eos_token_id", "pad_token_id", "draft_vocab_size", "target_hidden_size", "norm_before_residual", LAYER_IDS,
)


def save_head(
    head: DraftHead, directory: str | Path, *, dtype: torch.dtype | None = None, file: str = "model.safetensors",
    **extra: object,
) -> Path:
    """Write a head in the published layout, with its draft vocabulary; returns the path of the weights.

    Args:
        directory: created where it does not exist; a `token_map.pt` in it goes where the head has no draft vocabulary.
        dtype: type of the stored weights; None keeps the head's.
        file: one of WEIGHTS.
        extra: goes into config.json.

    Raises:
        TypeError: not a head, `dtype` is no torch dtype, or an `extra` that JSON does not know.
        ValueError: `file` is not in WEIGHTS, or a dtype that is not of floating point.
        OSError: `directory` cannot be written.
    """
    if not isinstance(head, DraftHead):
        raise TypeError(f"save_head writes a DraftHead, got {type(head).__name__}")
    if file not in WEIGHTS:
        raise ValueError(f"file must be one of {', '.join(WEIGHTS)}, got {file!r}")
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype must be a torch dtype or None, got {dtype!r}")
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"dtype must be of floating point, got {dtype}")
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    state = {
        name: value.detach().to("cpu", dtype if dtype and value.is_floating_point() else value.dtype).contiguous()
        for name, value in head.state_dict().items()
    }
    given = head.config.to_dict()
    fields = {name: given[name] for name in CONFIG_FIELDS if given.get(name) is not None}
    # Consumers on transformers 4 read the rotary embedding by older names.
    rope = dict(head.config.rope_parameters)
    fields["rope_theta"] = rope.pop("rope_theta")
    if rope.get("rope_type", "default") != "default":
        fields["rope_scaling"] = rope
    fields["torch_dtype"] = str(state["fc.weight"].dtype).removeprefix("torch.")
    fields |= {"architectures": ["LlamaForCausalLM"], "bias": head.fc.bias is not None}
    if isinstance(head, Eagle3Head):
        state = {name.replace("layers.0.", "midlayer."): value for name, value in state.items()}
        if head.d2t is not None:
            state["t2d"] = torch.zeros(head.config.vocab_size, dtype=torch.bool)
            state["t2d"][head.target_tokens.cpu()] = True
        fields |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": head.draft_vocab_size}
        if LAYER_IDS in fields:
            fields["eagle_config"] = {LAYER_IDS: [number - 1 for number in fields[LAYER_IDS]]}
    fields |= extra
    text, path = json.dumps(fields, indent=1, sort_keys=True) + "\n", directory / file
    if file.endswith(".bin"):
        save_atomically(path, lambda part: torch.save(state, part))
    else:
        save_atomically(path, lambda part: save_file(state, part, metadata={"format": "pt"}))
    save_atomically(directory / "config.json", lambda part: part.write_text(text, encoding="utf-8"))
    for other in set(WEIGHTS) - {file}:  # another head's
        (directory / other).unlink(missing_ok=True)
    if head.token_map is None:
        (directory / TOKEN_MAP).unlink(missing_ok=True)
    else:
        save_token_map(directory, head.token_map)
    return path
