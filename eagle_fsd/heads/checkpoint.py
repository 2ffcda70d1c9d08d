"""Load and save draft heads in the published layouts: a directory or hub repository with `config.json` and
`model.safetensors` or `pytorch_model.bin`, or an index and its shards.

EAGLE-1/2 heads are saved in the layout in which they are loaded. EAGLE-3 heads are loaded in the layouts of its authors
(`midlayer.*`), of SpecForge and of `speculators` (`layers.0.*`), and saved in the first. The draft vocabulary of an
EAGLE-1/2 head is in a file beside its weights, which SGLang accepts as --speculative-token-map.

D hidden size, R draft vocabulary, V vocabulary of the target.
"""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import LlamaConfig

from ..data.sources import check_source, fetch, is_gguf
from ..models.loading import EmptyWeights
from ..models.masks import SLIDING
from ..utils.files import save_atomically
from ..utils.threads import one_at_a_time
from .eagle import DraftHead
from .eagle3 import LAST_NORM, LAYER_IDS, POST_NORM, Eagle3Head
from .layouts import NORMS, check_draft_tokens, is_drafter, is_eagle3, llama_config, plain_names, read_fields

log = logging.getLogger(__name__)
PLAIN = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
INDEX = ".index.json"  # suffix to one of these: maps tensors to shards
TOKEN_MAP = "token_map.pt"  # a list of token ids, in the format of FR-Spec (arXiv 2502.14856)


def read_weights(path: str) -> object:
    """The content of a weights file: tensors and plain values only.

    Raises:
        ValueError: the file is damaged, or contains other objects.
    """
    try:
        if path.endswith(".safetensors"):
            return load_file(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a broken pickle can raise any exception
        raise ValueError(f"{path} was refused: it is damaged, or contains more than tensors: {error}") from error


def weight_files(source: str) -> list[str]:
    """Paths of a head's weights: of one file, or of an index and its shards; empty if there are none.

    Raises:
        ValueError: the index cannot be read, or a shard is missing.
    """
    for name in WEIGHTS:
        if path := fetch(source, name):
            return [path]
        if index := fetch(source, name + INDEX):
            try:
                shards = sorted(set(json.loads(Path(index).read_text(encoding="utf-8"))["weight_map"].values()))
                paths = [fetch(source, shard) if shard == Path(shard).name else None for shard in shards]
            except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
                raise ValueError(f"{index} cannot be read as an index of weights: {error!r}") from error
            for shard, path in zip(shards, paths, strict=True):
                if path is None:
                    raise ValueError(f"{index} lists {shard}, which is no file in its folder")
            return [index, *paths]
    return []


def save_token_map(
    directory: str | Path,
    tokens: Tensor,  # [R] long
) -> Path:
    """Save a draft vocabulary beside a head's weights; return its path."""
    path = Path(directory) / TOKEN_MAP
    save_atomically(path, lambda part: torch.save(tokens.tolist(), part))
    return path


def read_tensors(files: list[str]) -> dict[str, Tensor]:
    """The tensors of a head in `weight_files`, under this library's names.

    Raises:
        ValueError: a file is damaged, or contains anything but plain tensors of a head.
    """
    tensors: dict[str, Tensor] = {}
    for path in files[1:] or files:
        state = read_weights(path)
        if not isinstance(state, dict) or not all(isinstance(name, str) and isinstance(value, Tensor)
                                                  for name, value in state.items()):
            raise ValueError(f"{path} contains no dictionary of tensors by name")
        tensors |= state
    path, tensors = files[0], plain_names(tensors, files[0])
    for name, value in tensors.items():
        if name == "d2t":
            continue
        if value.layout != torch.strided or value.is_meta or value.dtype not in PLAIN:
            raise ValueError(f"{path} cannot be used: {name} is {value.dtype}, {value.layout}, on {value.device}; "
                             f"accepted: plain tensors of {', '.join(map(str, PLAIN))}")
        if not value.isfinite().all():
            raise ValueError(f"{path} is damaged: {name} has values that are not finite")
    return tensors


def is_causal_lm(source: str | Path) -> bool:
    """Whether files are those of a causal LM, and not of a head: most heads have the config of a causal LM and a layer
    `fc`; those without `fc` have fields that only drafters have.

    Raises:
        TypeError, ValueError, OSError: see `load_head`.
    """
    if is_gguf(source):
        return True
    source = check_source("a draft head or causal LM", source)
    if Path(source, "adapter_config.json").is_file():
        return True
    config = fetch(source, "config.json", needed=True)  # first: without the hub, each further file would take 20 s
    files = weight_files(source)
    if not files or config and is_drafter(config):
        return False  # `load_head` says what is missing
    return "fc.weight" not in {name.removeprefix("model.") for name in weight_names(files[0])}


def weight_names(path: str) -> set[str]:
    """The names of the tensors in a weights file, or of those in an index."""
    try:
        if path.endswith(INDEX):
            return set(json.loads(Path(path).read_text(encoding="utf-8"))["weight_map"])
        if path.endswith(".safetensors"):
            with safe_open(path, "pt") as file:
                return set(file.keys())
        return set(torch.load(path, map_location="meta", weights_only=True))
    except Exception:  # a damaged file: `load_head` reports it
        return {"fc.weight"}


@one_at_a_time
def load_head(source: str | Path) -> DraftHead:
    """Load a draft head from a directory or hub id, in float32 on the CPU; an `Eagle3Head` for files of that kind.

    If the files have no embeddings, `shares_embeddings` is True, and the head needs the target's
    (`head.share_embeddings(...)`; `eagle_fsd.load` calls it). An EAGLE-3 head with the whole vocabulary and without an
    output layer uses the target's.

    If a `token_map.pt` is beside its weights, an EAGLE-1/2 head drafts only the tokens in it.

    A changed bit in the weights is not detected unless a number becomes infinite or NaN: the format has no checksum.

    Raises:
        TypeError: `source` is neither a string nor a path.
        ValueError: not a supported head: files are missing or damaged, keys are missing, unknown or of the wrong shape,
            numbers are not finite, or the variant is not supported.
        OSError: the hub id does not exist or cannot be downloaded.
    """
    source = check_source("a draft head", source)
    config_path = fetch(source, "config.json", needed=True)
    if config_path is None:
        raise ValueError(f"{source!r} has no config.json; a draft head needs config.json and {' or '.join(WEIGHTS)}")
    fields = read_fields(config_path)
    files = weight_files(source)
    if not files:
        raise ValueError(f"{source!r} has no weights; a draft head needs one of {', '.join(WEIGHTS)}")
    state = read_tensors(files)
    config, eagle3 = llama_config(fields, state, config_path), is_eagle3(state)
    head = make_head(Eagle3Head if eagle3 else DraftHead, config, "fc.bias" in state, config_path)
    _take_weights(head, state, files[0])
    token_map = fetch(source, TOKEN_MAP)
    if token_map and eagle3:
        log.warning("%s is ignored: an EAGLE-3 head has its own draft vocabulary", token_map)
    elif token_map:
        try:
            head.limit_vocabulary(torch.as_tensor(read_weights(token_map)))
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"{token_map} cannot be used as a list of token ids: {error}") from error
    return head.eval()


@torch.no_grad()
def make_head(kind: type[DraftHead], config: LlamaConfig, bias: bool, path: str) -> DraftHead:
    """A head whose weights are to be loaded, after a trial forward.

    Raises:
        ValueError: no head can be constructed from the config at `path`, or the forward fails.
    """
    try:
        with EmptyWeights():  # random embeddings would take seconds
            head = kind(config, bias=bias)
        for part in head.modules():
            for name, weight in part.named_parameters(recurse=False):
                setattr(part, name, nn.Parameter(torch.full(weight.shape, 0.01, dtype=torch.float32)))
        features, tokens = torch.zeros(1, 2, config.hidden_size), torch.zeros(1, 2, dtype=torch.long)
        if not head(features, tokens, torch.arange(2)[None]).isfinite().all():
            raise ValueError("what it computes is not finite")
        return head
    except Exception as error:  # anything that such sizes and names end in
        raise ValueError(f"no head can be constructed from {path}: {type(error).__name__}: {error}") from error


def require_empty(directory: str | Path) -> None:
    """Raise ValueError unless `directory` is a new or empty folder, so that no model is overwritten."""
    if not str(directory):
        raise ValueError("the folder to write to has no name")
    first = min(Path(directory).iterdir(), default=None) if Path(directory).is_dir() else None
    if first is not None:
        raise ValueError(f"{directory} contains {first.name}, and nothing is overwritten: choose another folder or "
                         "empty it")


def copy_head(
    source: str | Path, directory: Path,
    tokens: Tensor,  # [R] long
) -> Path:
    """Copy only the files of a head, and save a draft vocabulary, whose path is returned.

    Raises:
        ValueError: see `require_empty`.
    """
    require_empty(directory)
    directory.mkdir(parents=True, exist_ok=True)
    for file in filter(None, (fetch(str(source), "config.json"), *weight_files(str(source)))):
        shutil.copyfile(file, directory / Path(file).name)
    return save_token_map(directory, tokens)


def _take_weights(head: DraftHead, state: dict[str, Tensor], path: str) -> None:
    """Load tensors under this library's names into a head. Without embeddings, or without the output layer of an
    EAGLE-3 head with the whole vocabulary, the head is prepared to share the target's.

    Raises:
        ValueError: keys are missing, unknown or of the wrong shape.
    """
    if isinstance(head, Eagle3Head):
        check_draft_tokens(head, state, path)
        if isinstance(head.norm, nn.Identity):
            state.pop("norm.weight", None)
        if "lm_head.weight" not in state and head.d2t is None:
            if head.config.tie_word_embeddings and "embed_tokens.weight" in state:
                state["lm_head.weight"] = state["embed_tokens.weight"]
            elif head.target_hidden_size == head.config.hidden_size:
                log.info("%s has no lm_head.weight: the head uses the target's output layer", path)
                head.lm_head = None
    missing, unknown = head.state_dict().keys() - state.keys(), state.keys() - head.state_dict().keys()
    if missing == {"embed_tokens.weight"}:
        missing = set()
        head.share_embeddings(None)
    if missing or unknown:
        raise ValueError(f"{path} is no {head.kind} draft head: missing {sorted(missing) or 'nothing'}, "
                         f"unknown {sorted(unknown) or 'nothing'}")
    floating = {name: value if name == "d2t" else value.float() for name, value in state.items()}
    try:
        head.load_state_dict(floating, strict=False)
    except RuntimeError as error:
        raise ValueError(f"{path} does not fit its config.json: {error}") from error


# The fields of config.json that servers read; the rest of a Llama config has no meaning for a head.
CONFIG_FIELDS = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps", "rope_parameters",
    "initializer_range", "attention_bias", "mlp_bias", "qkv_bias", "tie_word_embeddings", "bos_token_id",
    "eos_token_id", "pad_token_id", "draft_vocab_size", "target_hidden_size", "norm_before_residual", *NORMS, LAST_NORM,
    LAYER_IDS,
)


def config_fields(head: DraftHead, dtype: torch.dtype) -> dict[str, object]:
    """The fields of `config.json` for a head whose weights are stored in this dtype."""
    config = head.config.to_dict()
    fields = {name: config[name] for name in CONFIG_FIELDS if config.get(name) is not None}
    # Servers on transformers 4 read the rotary embedding under older names.
    rope = dict(head.config.rope_parameters)
    fields["rope_theta"] = rope.pop("rope_theta")
    if rope.get("rope_type", "default") != "default":
        fields["rope_scaling"] = rope
    fields["torch_dtype"] = str(dtype).removeprefix("torch.")
    fields |= {"architectures": ["LlamaForCausalLM"], "bias": head.fc.bias is not None}
    if isinstance(head, Eagle3Head):
        fields |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": head.draft_vocab_size}
        if getattr(head.config, "qk_norm", False):
            fields |= {"architectures": ["Eagle3Qwen3ForCausalLM"], "model_type": "qwen3"}  # vLLM's names
        nested = {LAYER_IDS: [number - 1 for number in fields[LAYER_IDS]]} if LAYER_IDS in fields else {}
        nested |= {POST_NORM: True} if head.norm_output else {}
        fields |= {"eagle_config": nested} if nested else {}
    if head.window is not None:
        fields |= {"layer_types": [SLIDING], "sliding_window": head.window}
    return fields


def save_head(
    head: DraftHead, directory: str | Path, *, dtype: torch.dtype | None = None, file: str = "model.safetensors",
    **extra: object,
) -> Path:
    """Save a head in the published layout, with its draft vocabulary; return the path of the weights.

    Args:
        directory: created if it does not exist. A `token_map.pt` in it is removed if the head has no draft vocabulary.
        dtype: of the stored weights; None: the head's.
        file: one of WEIGHTS.
        extra: additional fields of config.json.

    Raises:
        TypeError: not a head, or an `extra` that JSON cannot represent.
        ValueError: `file` is not in WEIGHTS, or `dtype` is not floating.
        OSError: `directory` cannot be written.
    """
    if not isinstance(head, DraftHead):
        raise TypeError(f"head must be a DraftHead, got {type(head).__name__}")
    if file not in WEIGHTS:
        raise ValueError(f"file must be one of {', '.join(WEIGHTS)}, got {file!r}")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ValueError(f"dtype must be a floating torch dtype or None, got {dtype!r}")
    directory = Path(directory)
    state = {
        name: value.detach().to("cpu", dtype if dtype and value.is_floating_point() else value.dtype).contiguous()
        for name, value in head.state_dict().items()
    }
    if isinstance(head, Eagle3Head):
        state = {name.replace("layers.0.", "midlayer."): value for name, value in state.items()}
        if head.d2t is not None:
            state["t2d"] = torch.zeros(head.config.vocab_size, dtype=torch.bool)
            state["t2d"][head.draft_tokens.cpu()] = True
    fields = config_fields(head, state["fc.weight"].dtype) | extra
    text = json.dumps(fields, indent=1, sort_keys=True) + "\n"
    directory.mkdir(parents=True, exist_ok=True)
    if file.endswith(".bin"):
        save_atomically(directory / file, lambda path: torch.save(state, path))
    else:
        save_atomically(directory / file, lambda path: save_file(state, path, metadata={"format": "pt"}))
    if head.token_map is not None:
        save_token_map(directory, head.token_map)
    save_atomically(directory / "config.json", lambda path: path.write_text(text, encoding="utf-8"))
    kept = {file} if head.token_map is None else {file, TOKEN_MAP}
    for other in {*WEIGHTS, *(name + INDEX for name in WEIGHTS), TOKEN_MAP} - kept:  # files of another head
        (directory / other).unlink(missing_ok=True)
    return directory / file
