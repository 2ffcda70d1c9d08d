"""Options as text: the dataclasses of `eagle_fsd.options` as command lines offer them, read by tyro.

A field that is added to `eagle_fsd.options` becomes a flag of every command that takes those options. Here stands only
what text needs besides: how a tree is written, which choices there are, and what a command line leaves out (rules as
objects, lists of seeds, rules for tensor parallelism, a `quantization_config`, and the tree of `load`: a request's is
given). Nothing here imports torch, so that `--help` is quick.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TypeVar

import tyro
from tyro.conf import Suppress, UseAppendAction
from tyro.constructors import PrimitiveConstructorSpec

from ..acceptance import RULE_CLASSES
from ..drafting.config import TreeConfig
from ..models.implementations import IMPLEMENTATIONS
from ..options import AcceptanceOptions, LoadOptions, SamplingOptions
from .exits import as_flags

if TYPE_CHECKING:
    from ..pair import EagleModel

T = TypeVar("T")

# Of every command line: names without their group's, --flag without --no-flag, and no text that means None.
STYLE = (tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff, tyro.conf.DisallowNone,
         tyro.conf.PositionalMetavarFromFieldName, tyro.conf.HelptextFromCommentsOff)


def parse_options(options: type[T], argv: Sequence[str] | None = None, *, program: str | None = None,
                  description: str | None = None) -> T:
    """A dataclass from a command line: its fields are the flags, its docstring is the help.

    Args:
        options: its fields may be dataclasses such as `Loading`, whose fields are then flags too.
        argv: the words; None: those of this process.
        program: its name in messages, such as "python -m eval.benchmark"; None: the file's.
        description: what the help begins with; None: the docstring's.

    Raises:
        SystemExit: 0 after --help; 2 after a message for a word or a value that cannot be accepted.
    """
    return tyro.cli(options, args=argv, prog=program, description=description, config=STYLE)


def parse_tree(text: str) -> TreeConfig:
    """A `TreeConfig` from "total_tokens,depth,top_k[,draft_temperature]"."""
    parts = text.split(",")
    try:
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


def rule_name(text: str) -> str:
    """The name of a rule, or of several joined by +."""
    if not set(text.split("+")) <= RULE_CLASSES.keys():
        raise ValueError(f"unknown rule {text!r}; accepted: {', '.join(RULE_CLASSES)}, or several such as fsd+fly")
    return text


RuleName = Annotated[str, PrimitiveConstructorSpec(
    nargs=1, metavar="{" + ",".join(RULE_CLASSES) + "}[+GATE]", instance_from_str=lambda words: rule_name(*words),
    is_instance=lambda value: isinstance(value, str), str_from_instance=lambda name: [name])]
Implementation = Literal[("auto", *IMPLEMENTATIONS)]


class Flags:
    """Before options: what is wrong with them is said in the words of the command line."""

    def __post_init__(self) -> None:
        try:
            super().__post_init__()
        except (TypeError, ValueError) as error:
            raise type(error)(as_flags(str(error))) from None


@dataclass(frozen=True)
class Loading(Flags, LoadOptions):
    """Which pair is loaded, where to, and in what form."""

    device_map: str | None = None
    tp_plan: Suppress[str | None] = None
    quantization_config: Suppress[object] = None
    attn_implementation: Implementation | None = None
    tree: Suppress[object] = "auto"

    def load(self) -> EagleModel:
        """The pair; see `eagle_fsd.load`."""
        from ..pair import load

        return load(**vars(self))


@dataclass(frozen=True)
class ShardedLoading(Loading):
    """Which pair is loaded, where to, and in what form.

    Args:
        tp_plan: shard the target over the processes of torchrun (docs/large_targets.md).
    """

    # Only for commands whose processes decide nothing by time and write nothing twice.
    tp_plan: Literal["auto"] | None = None


@dataclass(frozen=True)
class Sampling(Flags, SamplingOptions):
    """How tokens are drawn, and where an answer ends.

    Args:
        seed: of the sampling noise; without it one is drawn. With one seed, plain decoding, exact and any rule at its
            lossless end give the same tokens.
        stop: a string that ends the answer and is not part of it; may be given several times.
    """

    seed: int | None = None
    stop: UseAppendAction[tuple[str, ...]] = ()


@dataclass(frozen=True)
class Acceptance(Flags, AcceptanceOptions):
    """Which drafted tokens are kept, and the tree that they are drafted in.

    Args:
        acceptance: the rule; fsd+fly: the first rule, where the gates of the others let it.
        gate_threshold: the dial of the gate behind a +, one for each of several; without it the gate's default.
        tree: size of the draft tree; without it the fastest that is known here.
    """

    acceptance: RuleName = "fsd"
    gate_threshold: tuple[float, ...] | None = None
    tree: Tree = None

    def check(self) -> None:
        """Refuse a rule that cannot be made, before anything is loaded."""
        from ..acceptance import make_rule

        if self.quality is None:
            make_rule(**self.rule)


@dataclass(frozen=True)
class Measuring:
    """How a file of prompts is answered, and where what is found goes.

    Args:
        prompts: JSON lines: prompts with or without answers, MT-Bench, GSM8K, HumanEval.
        divergence: that fsd gates on.
        gate_threshold: the dial of the gate behind a +, one for each of several; without it the gate's default.
        temperature: 0 is greedy; otherwise sampling.
        max_new_tokens: of each answer.
        seed: of the sampling noise.
        out: directory for what is found; without it the head's for calibrations, your cache for logged cycles.
    """

    prompts: Path
    divergence: str | None = None
    gate_threshold: tuple[float, ...] | None = None
    temperature: float = 0.0
    max_new_tokens: int = 256
    seed: int = 0
    out: Path | None = None

    def __post_init__(self) -> None:
        Sampling.of(vars(self))

    def directory(self, pair: Loading, file: str) -> Path:
        """Where a file about the pair's head goes.

        Raises:
            ValueError: no directory, or none that can be written.
        """
        from ..data.bundled import default_pair
        from ..heads.catalogue import find_head

        head = pair.draft or (find_head(pair.target).place if pair.target else default_pair()[1])
        out = self.out or Path(head)
        if not out.is_dir():
            raise ValueError(f"{out} is no directory to store {file} in: give --out")
        if not os.access(out, os.W_OK):
            raise ValueError(f"{out} cannot be written, where {file} would go: give --out")
        return out

    def where_to_load(self) -> str:
        """What to say of a directory that is not the head's."""
        return f" (load with calibration={str(self.out)!r}, or --calibration)" if self.out else ""
