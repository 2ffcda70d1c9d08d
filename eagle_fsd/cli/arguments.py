"""Options as text: the dataclasses of `eagle_fsd.options` as command lines offer them, read by tyro.

A field that is added to `eagle_fsd.options` becomes a flag of every command that takes those options. Here stands only
what text needs besides: how a tree and a guard are written, which choices there are, and what a command line leaves out
(rules as objects, lists of seeds, a `quantization_config`, and the tree of `load`: a request's is given). Nothing here
imports torch, so that `--help` is quick.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import tyro
from tyro.conf import Suppress, UseAppendAction
from tyro.constructors import PrimitiveConstructorSpec

from ..acceptance import RULE_CLASSES
from ..drafting.config import TreeConfig
from ..load_options import LoadOptions
from ..models import IMPLEMENTATIONS
from ..options import GenerateOptions

if TYPE_CHECKING:
    from ..pair import EagleModel

T = TypeVar("T")

# Of every command line: names without their group's, --flag without --no-flag, and no text that means None.
STYLE = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone,
         tyro.conf.PositionalMetavarFromFieldName, tyro.conf.HelptextFromCommentsOff)


def parse_options(options: type[T], argv: Sequence[str] | None = None, *, program: str | None = None,
                  description: str | None = None, default: T | None = None) -> T:
    """A dataclass from a command line: its fields are the flags, its docstring is the help.

    Args:
        options: its fields may be dataclasses such as `Loading`, whose fields are then flags too.
        argv: the words; None: those of this process.
        program: its name in messages, such as "python -m eval.benchmark"; None: the file's.
        description: what the help begins with; None: the docstring's.
        default: what holds where no flag is given; None: the fields' own defaults.

    Raises:
        SystemExit: 0 after --help; 2 after a message for a word or a value that cannot be accepted.
    """
    given = {} if default is None else {"default": default}
    return tyro.cli(options, args=argv, prog=program, description=description, config=STYLE, **given)


def parse_tree(text: str) -> TreeConfig:
    """A `TreeConfig` from "total_tokens,depth,top_k[,draft_temperature]"."""
    parts = text.split(",")
    try:
        if not 3 <= len(parts) <= 4:
            raise ValueError(f"it has {len(parts)} number{'s' * (len(parts) > 1)}")
        return TreeConfig(*map(int, parts[:3]), *map(float, parts[3:]))
    except (TypeError, ValueError) as error:
        raise ValueError(f"{text!r} is no tree; it takes total_tokens,depth,top_k[,draft_temperature], such as 16,5,4 "
                         f"({error})") from error


def tree_text(tree: TreeConfig | None) -> str:
    """What `parse_tree` takes."""
    return "None" if tree is None else f"{tree.total_tokens},{tree.depth},{tree.top_k},{tree.draft_temperature:g}"


# Around None too: of a union tyro's messages name each member's constructor.
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
# A flag that takes something away, --no-prepack: "(default: True)" behind it could be read both ways.
OnUnlessFlagged = Annotated[bool, tyro.conf.arg(help_behavior_hint="")]
RuleName = Literal[tuple(RULE_CLASSES)]
Implementation = Literal[tuple(IMPLEMENTATIONS)]


@dataclass(frozen=True)
class Loading(LoadOptions):
    """Which pair is loaded, where to, and in what form.

    Args:
        prepack: leave weights in their plain layout on a CPU: slower.
    """

    dtype: str = "auto"
    device: str | None = None
    device_map: str | None = None
    quantization_config: Suppress[object] = None
    attn_implementation: Implementation | None = None
    tree: Suppress[object] = "auto"
    prepack: OnUnlessFlagged = True
    quantization: Literal["int8"] | None = None

    def load(self) -> EagleModel:
        """The pair; see `eagle_fsd.load`."""
        from ..loading import load

        return load(**vars(self))


@dataclass(frozen=True)
class Decoding(GenerateOptions):
    """How tokens are drawn, where an answer ends, and which drafted tokens are kept.

    Args:
        seed: of the sampling noise; without it one is drawn. With one seed, plain decoding, exact and any rule at its
            lossless end give the same tokens.
        stop: a string that ends the answer and is not part of it; may be given several times.
        acceptance: the rule.
        tree: size of the draft tree; without it the fastest that is known here.
        response_format: what the answer must be, in JSON: a schema, or such as {"type": "regex", "regex": R}.
        speculative: decode plainly: nothing is drafted.
        reference: a text that the answer will resemble, to copy drafts from; may be given several times.
    """

    seed: int | None = None
    stop: UseAppendAction[tuple[str, ...]] = ()
    acceptance: RuleName = "fsd"
    head_guard: HeadGuard = "default"
    tree: Tree = None
    text_drafts: Literal["auto", "off"] = "auto"
    reference: UseAppendAction[tuple[str, ...]] = ()
    response_format: Json = None
    speculative: OnUnlessFlagged = True
    logit_bias: Suppress[object] = None
    top_logprobs: Suppress[int] = 0
