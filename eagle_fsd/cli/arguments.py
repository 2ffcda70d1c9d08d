"""The dataclasses of `eagle_fsd.options` as flags of a command line, parsed by tyro.

A new declaration in `eagle_fsd.options` becomes a flag of every command with those options. This module adds the text
forms of options that a word cannot express as they are, and omits those that none can (a `quantization_config`) or that
are elsewhere (the tree of `load`). It does not import torch, so that `--help` is quick.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, TypeVar

import tyro
from tyro.conf import Suppress, UseAppendAction
from tyro.constructors import PrimitiveConstructorSpec

from ..drafting.config import TreeConfig, parse_tree
from ..options.generate import Copying, GenerateOptions, RuleName
from ..options.load import LoadOptions

if TYPE_CHECKING:
    from ..loading.pair import EagleModel

T = TypeVar("T")

# Flags without a group's prefix, --flag without --no-flag, no word that means None.
STYLE = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone,
         tyro.conf.PositionalMetavarFromFieldName, tyro.conf.HelptextFromCommentsOff)


def parse_options(options: type[T], argv: Sequence[str] | None = None, *, program: str | None = None,
                  description: str | None = None, default: T | None = None) -> T:
    """Parse a command line into a dataclass: its fields are the flags, its docstring is the help.

    Args:
        options: the dataclass. The fields of a field that is a dataclass, such as `Loading`, are flags too.
        argv: words of the command line; None: those of this process.
        program: program name in messages, such as "python -m eval.forwards"; None: that of the file.
        description: beginning of the help; None: from the docstring.
        default: values of flags that are absent; None: the defaults of the fields.

    Raises:
        SystemExit: 0 after --help; 2 after a message about an unknown word or an invalid value.
    """
    defaults = {} if default is None else {"default": default}
    return tyro.cli(options, args=argv, prog=program, description=description, config=STYLE, **defaults)


def tree_text(tree: TreeConfig | None) -> str:
    """The inverse of `parse_tree`."""
    return "None" if tree is None else f"{tree.total_tokens},{tree.depth},{tree.top_k},{tree.draft_temperature:g}"


# The constructor includes None: for a union, tyro's messages would name the constructor of each member.
Tree = Annotated[TreeConfig | None, PrimitiveConstructorSpec(
    nargs=1, metavar="N,DEPTH,K[,T]", instance_from_str=lambda words: parse_tree(*words),
    is_instance=lambda value: value is None or isinstance(value, TreeConfig),
    str_from_instance=lambda tree: [tree_text(tree)])]
HeadGuard = Annotated[float | str | None, PrimitiveConstructorSpec(
    nargs=1, metavar="FLOAT|none", instance_from_str=lambda words: None if words[0] == "none" else float(words[0]),
    is_instance=lambda value: value is None or isinstance(value, (float, int, str)),
    str_from_instance=lambda guard: ["none" if guard is None else str(guard)])]
Json = Annotated[object, PrimitiveConstructorSpec(
    nargs=1, metavar="JSON", instance_from_str=lambda words: json.loads(words[0]), is_instance=lambda value: True,
    str_from_instance=lambda value: [json.dumps(value)])]
# A flag that turns something off, such as --no-prepack. Its help omits "(default: True)", which would be ambiguous.
OnUnlessFlagged = Annotated[bool, tyro.conf.arg(help_behavior_hint="")]


@dataclass(frozen=True)
class Loading(LoadOptions):
    """Which models to load, on which device, and in which form.

    Args:
        prepack: keep weights in their plain layout on a CPU: slower.
        cuda_graphs: launch each kernel of a cycle on a GPU by itself: slower.
    """

    dtype: str = "auto"
    device: str | None = None
    device_map: str | None = None
    quantization_config: Suppress[object] = None
    tree: Suppress[object] = "auto"
    prepack: OnUnlessFlagged = True
    cuda_graphs: OnUnlessFlagged = True
    draft_dtype: str | None = None

    def load(self, tree: TreeConfig | None = None) -> EagleModel:
        """Load the pair; see `eagle_fsd.load`.

        Args:
            tree: of all requests, so that latencies are not measured; None: chosen by them.
        """
        from ..loading.load import load

        return load(**vars(self) | ({} if tree is None else {"tree": tree}))


@dataclass(frozen=True)
class Decoding(GenerateOptions):
    """How to sample tokens, when to end an answer, and which draft tokens to accept.

    Args:
        seed: seed of the sampling noise; None: random. With the same seed, plain decoding, exact and every rule at
            its lossless threshold give the same tokens.
        tree: size of the draft tree; None: as fast as possible on this machine.
        response_format: format of the answer, in JSON: a schema, or for example {"type": "regex", "regex": R}.
        speculative: decode without drafts.
        chat_template_kwargs: variables of the chat template, in JSON, such as {"enable_thinking": false}.
    """

    seed: int | None = None
    stop: UseAppendAction[tuple[str, ...]] = ()
    acceptance: RuleName = "fsd"
    head_guard: HeadGuard = "default"
    tree: Tree = None
    text_drafts: Copying = "auto"
    reference: UseAppendAction[tuple[str, ...]] = ()
    response_format: Json = None
    chat_template_kwargs: Json = None
    speculative: OnUnlessFlagged = True
    generation_config: Suppress[object] = None
    eos_token_id: Suppress[object] = None
    logit_bias: Suppress[object] = None
    top_logprobs: Suppress[int] = 0
