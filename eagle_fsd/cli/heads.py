"""`eagle-fsd heads`, `inspect`, `export` and `vocab`: the published heads, what one is, and one made over."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, create_mutex_group

from ..heads.catalogue import known_heads

KINDS = {"eagle": "EAGLE-1/2", "eagle3": "EAGLE-3"}
ONE_SIZE = create_mutex_group(required=False)


@dataclass(frozen=True)
class HeadsCommand:
    """List the published heads that are known, with kind, licence and source.

    Args:
        target: only those of targets whose id contains this.
    """

    target: str | None = None

    def run(self) -> None:
        wanted = (self.target or "").casefold()
        found = [head for head in known_heads() if wanted in head.target.casefold()]
        if not found:
            raise ValueError(f"no head is known for a target whose id contains {self.target!r}")
        sources = list(dict.fromkeys((head.source, head.looked_up) for head in found if not head.bundled))
        rows = [(f"  {Path(head.head).name}" if head.bundled else f"  {head.head}", KINDS[head.kind], head.licence,
                 "bundled" if head.bundled else f"[{sources.index((head.source, head.looked_up)) + 1}]",
                 "*" if head.bundled or head.preferred else "") for head in found]
        heading = ("TARGET, and its heads", "KIND", "LICENCE", "SOURCE", "")
        widths = [max(len(row[column]) for row in (heading, *rows)) for column in range(len(heading))]

        def show(row: Sequence[str]) -> None:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())

        show(heading)
        for target, each in itertools.groupby(zip(found, rows, strict=True), key=lambda pair: pair[0].target):
            print(target)
            for _, row in each:
                show(row)
        print("\n* is taken where --draft names none, as is the only head of a target. Licences: as on the hub.")
        for number, (source, day) in enumerate(sources, 1):
            print(f"[{number}] {source}, looked up on {day}")


@dataclass(frozen=True)
class InspectCommand:
    """Say what a draft head is, what it fits, and who can serve it; status 2 where it does not fit the target.

    Args:
        head: directory or hub id.
        target: directory or hub id to check the head against.
        trust_remote_code: allow a target to run code from its repository.
    """

    head: Positional[str]
    target: str | None = None
    trust_remote_code: bool = False

    def run(self) -> None:
        from ..heads.inspection import inspect_head

        found = inspect_head(self.head, self.target, trust_remote_code=self.trust_remote_code)
        for name, value in found.facts.items():
            print(f"{name + ':':<20}{value}")
        for server, problems in found.server_problems.items():
            verdict = "; ".join(problems) + f" (eagle-fsd export --to {server})" if problems else "as it is"
            print(f"{server + ':':<20}{verdict}")
        if found.target_problems:
            raise ValueError(f"{self.head} does not fit {self.target}: {'; '.join(found.target_problems)}")
        if self.target is not None:
            print(f"{'target:':<20}the head fits ({self.target})")


@dataclass(frozen=True)
class ExportCommand:
    """Write a draft head as another program loads it.

    Args:
        head: directory or hub id.
        to: the program.
        out: directory to write.
        target: where embeddings come from, for formats that want them in the file.
        trust_remote_code: allow a target to run code from its repository.
    """

    head: Positional[str]
    to: Literal["eagle", "sglang", "vllm"]  # those of heads.export.LAYOUTS, which imports torch
    out: str
    target: str | None = None
    trust_remote_code: bool = False

    def run(self) -> None:
        from ..heads.checkpoint import TOKEN_MAP
        from ..heads.export import export_head

        path = export_head(self.head, self.to, self.out, target=self.target, trust_remote_code=self.trust_remote_code)
        print(f"{path} and config.json written for {self.to}")
        if path.with_name(TOKEN_MAP).is_file():
            print(f"its draft vocabulary: --speculative-token-map {path.with_name(TOKEN_MAP)}")


@dataclass(frozen=True)
class VocabCommand:
    """Let an EAGLE-1/2 head draft only the tokens that are frequent in your text.

    Counts the tokens of answers, says which share of them the most frequent ones make up (measured on every tenth block
    of text, which is not counted for that), and writes token_map.pt beside the head. The draft's output layer then
    costs as many rows; what is generated losslessly stays the same. Delete the file to draft all tokens again.

    Args:
        head: directory or hub id.
        data: ShareGPT, messages or text files, or datasets of train.prepare_data.
        target: directory or hub id, for its tokenizer; not needed for such datasets.
        size: tokens to draft; without size and coverage it is only said what sizes would cover.
        coverage: as many tokens as make up this share of the text, such as 0.99.
        out: directory for a copy of the head with the file; without it the head's.
        trust_remote_code: allow a target to run code from its repository.
    """

    head: Positional[str]
    data: tuple[str, ...]
    target: str | None = None
    size: Annotated[int | None, ONE_SIZE] = None
    coverage: Annotated[float | None, ONE_SIZE] = None
    out: Path | None = None
    trust_remote_code: bool = False

    def run(self) -> None:
        import torch
        from transformers import AutoTokenizer

        from ..data.gguf import target_source
        from ..heads.checkpoint import TOKEN_MAP, copy_head, load_head, require_empty, save_token_map
        from ..heads.eagle3 import Eagle3Head
        from ..heads.vocabulary import count_tokens

        if not self.data:
            raise ValueError("--data needs a file or a dataset")
        head = load_head(self.head)
        if isinstance(head, Eagle3Head):
            raise ValueError(f"{self.head} is an EAGLE-3 head, whose output layer has a draft vocabulary already")
        if self.out is not None:
            require_empty(self.out)
        elif not Path(self.head).is_dir():
            raise ValueError(f"{self.head} is no directory to store {TOKEN_MAP} in: give --out")
        tokenizer = None if self.target is None else AutoTokenizer.from_pretrained(
            target_source(self.target), trust_remote_code=self.trust_remote_code)
        counts = count_tokens(self.data, head.config.vocab_size, tokenizer)
        size = self.size if self.coverage is None else counts.size_for(self.coverage)
        tokens = None if size is None else torch.from_numpy(counts.most_frequent(size))
        coverage, text, total = counts.coverage(), counts.counts + counts.held_out, len(counts.counts)
        print(f"{text.sum()} tokens of text, {(text > 0).sum()} different ones, {len(counts.special)} special ones\n\n"
              f"{'size':>8}{'coverage':>11}")
        for each in sorted({total >> power for power in range(7)} | {size or total}, reverse=True):
            print(f"{each:>8}{coverage[each - 1]:>11.3%}{'  <' if each == size else ''}")
        if tokens is not None:
            path = save_token_map(self.head, tokens) if self.out is None else copy_head(self.head, self.out, tokens)
            print(f"\n{path}: {size} of {total} tokens are drafted. Fit its curves again (eagle-fsd tune)")
