"""`eagle-fsd vocab`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from tyro.conf import Positional, create_mutex_group

if TYPE_CHECKING:
    from ..heads.vocabulary import TokenCounts

ONE_SIZE = create_mutex_group(required=False)


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
        from ..heads.checkpoint import check_copy_place, copy_head, load_head
        from ..heads.eagle3 import Eagle3Head
        from ..heads.token_map import TOKEN_MAP, save_token_map
        from ..heads.vocabulary import count_tokens

        if not self.data:
            raise ValueError("--data needs a file or a dataset")
        head = load_head(self.head)
        if isinstance(head, Eagle3Head):
            raise ValueError(f"{self.head} is an EAGLE-3 head, whose output layer has a draft vocabulary already")
        if self.out is None and not Path(self.head).is_dir():
            raise ValueError(f"{self.head} is no directory to store {TOKEN_MAP} in: give --out")
        if self.out is not None and self.out.resolve() == Path(self.head).resolve():
            raise ValueError(f"--out {self.out} is the head's own directory: leave it out to store {TOKEN_MAP} there")
        if self.out is not None:
            check_copy_place(self.head, self.out)
        tokenizer = None if self.target is None else AutoTokenizer.from_pretrained(
            target_source(self.target), trust_remote_code=self.trust_remote_code)
        counts = count_tokens(self.data, head.config.vocab_size, tokenizer)
        size = self.size if self.coverage is None else counts.size_for(self.coverage)
        tokens = None if size is None else torch.from_numpy(counts.commonest(size))
        print_coverage(counts, size)
        if tokens is not None:
            path = save_token_map(self.head, tokens) if self.out is None else copy_head(self.head, self.out, tokens)
            print(f"\n{path}: {size} of {len(counts.counted)} tokens are drafted. Run eagle-fsd tune and calibrate "
                  "again where you have")


def print_coverage(counts: TokenCounts, size: int | None) -> None:
    """The share of the text that vocabularies of several sizes cover; `size` is marked."""
    coverage, total = counts.coverage(), len(counts.counted)
    print(f"{counts.counted.sum() + counts.kept_back.sum()} tokens of text, "
          f"{((counts.counted + counts.kept_back) > 0).sum()} different ones, {len(counts.special)} special ones\n\n"
          f"{'size':>8}{'coverage':>11}")
    for each in sorted({total >> power for power in range(7)} | {size or total}, reverse=True):
        print(f"{each:>8}{coverage[each - 1]:>11.3%}{'  <' if each == size else ''}")
