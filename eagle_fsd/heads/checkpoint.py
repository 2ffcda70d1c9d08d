"""Draft heads in the published layouts: a directory or hub repository with `config.json` and `model.safetensors` or
`pytorch_model.bin`, or an index and its shards. Those of EAGLE-1/2 are written in the same layout; those of EAGLE-3 are
read in the layouts of its authors (`midlayer.*`), of SpecForge and of `speculators` (`layers.0.*`) and written in the
first. The draft vocabulary of an EAGLE-1/2 head lies beside its weights, in a file that SGLang takes as
--speculative-token-map.

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

from ..data.files import save_atomically
from ..data.sources import check_source, fetch
from .eagle import DraftHead
from .eagle3 import Eagle3Head
from .layouts import LAYER_IDS, check_draft_tokens, is_eagle3, llama_config, plain_names, read_fields

log = logging.getLogger(__name__)
PLAIN = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
WEIGHTS = ("model.safetensors", "pytorch_model.bin")
INDEX = ".index.json"  # after one of these: which of several files holds what
TOKEN_MAP = "token_map.pt"  # a list of token ids, as FR-Spec (arXiv 2502.14856) publishes them


def read_weights(path: str) -> object:
    """What a file holds, tensors and plain values only.

    Raises:
        ValueError: it is damaged, or holds more than that.
    """
    try:
        if path.endswith(".safetensors"):
            return load_file(path)
        return torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, EOFError, OSError, RuntimeError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as weights: {error}") from error
    except Exception as error:  # pickle.UnpicklingError and whatever a broken pickle raises
        raise ValueError(f"{path} was refused, since it holds more than tensors or is damaged: {error}") from error


def weight_files(source: str) -> list[str]:
    """Paths of the files with a head's weights: of one, or of an index and its shards; none where there are none.

    Raises:
        ValueError: an index that cannot be read, or a shard that is not there.
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
                    raise ValueError(f"{index} names {shard}, which is no file beside it")
            return [index, *paths]
    return []


def save_token_map(
    directory: str | Path,
    tokens: Tensor,  # [R] long
) -> Path:
    """Put a draft vocabulary beside a head's weights; returns its path."""
    path = Path(directory) / TOKEN_MAP
    save_atomically(path, lambda part: torch.save(tokens.tolist(), part))
    return path


def read_tensors(files: list[str]) -> dict[str, Tensor]:
    """The tensors of a head in `weight_files`, by our names.

    Raises:
        ValueError: a damaged file, or one that holds something else than plain tensors that a head can be made of.
    """
    tensors: dict[str, Tensor] = {}
    for path in files[1:] or files:
        state = read_weights(path)
        if not isinstance(state, dict) or not all(isinstance(name, str) and isinstance(value, Tensor)
                                                  for name, value in state.items()):
            raise ValueError(f"{path} holds no dictionary of tensors by name")
        tensors |= state
    path, tensors = files[0], plain_names(tensors, files[0])
    for name, value in tensors.items():
        if name == "d2t":
            continue
        if value.layout != torch.strided or value.is_meta or value.dtype not in PLAIN:
            raise ValueError(f"{path} cannot be used: {name} is {value.dtype}, {value.layout}, on {value.device}; "
                             f"read are plain tensors of {', '.join(map(str, PLAIN))}")
        if not value.isfinite().all():
            raise ValueError(f"{path} is damaged: {name} holds values that are not finite")
    return tensors


def load_head(source: str | Path) -> DraftHead:
    """A draft head from a directory or hub id, in float32 on the CPU; an `Eagle3Head` where the files hold one.

    Where the file has no embeddings, `shares_embeddings` is True and the target's must be given
    (`head.share_embeddings(...)`; `eagle_fsd.load` does it). Where an EAGLE-3 head that names all tokens has no output
    layer, the target's serves.

    An EAGLE-1/2 head drafts the tokens of the `token_map.pt` beside its weights, where there is one, and no others.

    A changed bit among a file's numbers goes unnoticed unless a number is no longer finite: the format has no checksum.

    Raises:
        TypeError: `source` is neither text nor a path.
        ValueError: not a head of this kind: files missing or damaged, keys missing, unknown or of the wrong shape,
            numbers that are not finite, or a variant that is not read.
        OSError: a hub id that cannot be found or fetched.
    """
    source = check_source("a draft head", source)
    config_path = fetch(source, "config.json", needed=True)
    if config_path is None:
        raise ValueError(f"{source!r} has no config.json; a draft head needs config.json and {' or '.join(WEIGHTS)}")
    fields = read_fields(config_path)
    files = weight_files(source)
    if not files:
        raise ValueError(f"{source!r} has no weights; one of {', '.join(WEIGHTS)} is needed")
    state = read_tensors(files)
    config, eagle3 = llama_config(fields, state, config_path), is_eagle3(state)
    head = make_head(Eagle3Head if eagle3 else DraftHead, config, "fc.bias" in state, config_path)
    if "fc.bias" not in state and not eagle3 and fields.get("bias", True):  # missing: true in the published code
        log.info("%s has no fc.bias although its config says so; loading it without one", source)
    _take_weights(head, state, files[0])
    token_map = fetch(source, TOKEN_MAP)
    if token_map and eagle3:
        log.warning("%s is not used: an EAGLE-3 head has a draft vocabulary of its own", token_map)
    elif token_map:
        try:
            head.limit_vocabulary(torch.as_tensor(read_weights(token_map)))
        except (TypeError, ValueError, RuntimeError) as error:
            raise ValueError(f"{token_map} cannot be used as a list of token ids: {error}") from error
    return head.eval()


@torch.no_grad()
def make_head(kind: type[DraftHead], config: LlamaConfig, bias: bool, path: str) -> DraftHead:
    """A head of random weights that has computed something.

    Raises:
        ValueError: nothing can be made of, or computed with, what `path` says.
    """
    try:
        head = kind(config, bias=bias)
        features, tokens = torch.zeros(1, 2, config.hidden_size), torch.zeros(1, 2, dtype=torch.long)
        if not head(features, tokens, torch.arange(2)[None]).isfinite().all():
            raise ValueError("what it computes is not finite")
        return head
    except Exception as error:  # anything that such sizes and names end in
        raise ValueError(f"{path} describes no head that can be made: {type(error).__name__}: {error}") from error


def check_place(directory: str | Path) -> None:
    """Raise ValueError unless `directory` is new or an empty folder: what is in one may be anybody's model."""
    if not str(directory):
        raise ValueError("the folder to write to has no name")
    held = min(Path(directory).iterdir(), default=None) if Path(directory).is_dir() else None
    if held is not None:
        raise ValueError(f"{directory} holds {held.name}, and nothing is replaced: choose another folder or empty it")


def copy_head(
    source: str | Path, directory: Path,
    tokens: Tensor,  # [R] long
) -> Path:
    """Copy the files of a head and nothing that lies beside them, with a draft vocabulary, whose path is returned.

    Raises:
        ValueError: see `check_place`.
    """
    check_place(directory)
    directory.mkdir(parents=True, exist_ok=True)
    for file in filter(None, (fetch(str(source), "config.json"), *weight_files(str(source)))):
        shutil.copyfile(file, directory / Path(file).name)
    return save_token_map(directory, tokens)


def _take_weights(head: DraftHead, state: dict[str, Tensor], path: str) -> None:
    """Fill a head from tensors by our names; where there are no embeddings, or no output layer of an EAGLE-3 head that
    names all tokens, the target's are to be shared.

    Raises:
        ValueError: keys missing, unknown or of the wrong shape.
    """
    if isinstance(head, Eagle3Head):
        check_draft_tokens(head, state, path)
        if "lm_head.weight" not in state and head.d2t is None:
            if head.config.tie_word_embeddings and "embed_tokens.weight" in state:
                state["lm_head.weight"] = state["embed_tokens.weight"]
            elif head.target_hidden_size == head.config.hidden_size:
                log.info("%s has no lm_head.weight: the target's output layer serves", path)
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


# What consumers of heads read from config.json; the rest of a Llama config has no meaning for a head.
CONFIG_FIELDS = (
    "model_type", "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "rms_norm_eps", "rope_parameters",
    "initializer_range", "attention_bias", "mlp_bias", "qkv_bias", "tie_word_embeddings", "bos_token_id",
    "eos_token_id", "pad_token_id", "draft_vocab_size", "target_hidden_size", "norm_before_residual", LAYER_IDS,
)


def config_fields(head: DraftHead, dtype: torch.dtype) -> dict[str, object]:
    """What `config.json` says of a head whose weights are stored in this dtype."""
    given = head.config.to_dict()
    fields = {name: given[name] for name in CONFIG_FIELDS if given.get(name) is not None}
    # Consumers on transformers 4 read the rotary embedding by older names.
    rope = dict(head.config.rope_parameters)
    fields["rope_theta"] = rope.pop("rope_theta")
    if rope.get("rope_type", "default") != "default":
        fields["rope_scaling"] = rope
    fields["torch_dtype"] = str(dtype).removeprefix("torch.")
    fields |= {"architectures": ["LlamaForCausalLM"], "bias": head.fc.bias is not None}
    if isinstance(head, Eagle3Head):
        fields |= {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": head.draft_vocab_size}
        if LAYER_IDS in fields:
            fields["eagle_config"] = {LAYER_IDS: [number - 1 for number in fields[LAYER_IDS]]}
    return fields


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
        TypeError: not a head, or an `extra` that JSON does not know.
        ValueError: `file` is not in WEIGHTS, or not a dtype of floating point.
        OSError: `directory` cannot be written.
    """
    if not isinstance(head, DraftHead):
        raise TypeError(f"save_head writes a DraftHead, got {type(head).__name__}")
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
    for other in {*WEIGHTS, *(name + INDEX for name in WEIGHTS), TOKEN_MAP} - kept:  # another head's
        (directory / other).unlink(missing_ok=True)
    return directory / file
