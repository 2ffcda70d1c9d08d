"""`eagle-fsd heads`, `heads check`, `inspect`, `export` and `vocab`: list, check and convert draft heads."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, create_mutex_group

from ..drafting.config import CPU_TREE
from ..heads.catalogue import known_heads
from .arguments import Loading
from .exits import check_counts

KINDS = {"eagle": "EAGLE-1/2", "eagle3": "EAGLE-3"}
ONE_SIZE = create_mutex_group(required=False)


@dataclass(frozen=True)
class HeadsCommand:
    """List the known published heads with their kind, licence and source. `eagle-fsd heads check` diagnoses one head.

    Args:
        target: only heads for targets whose id contains this text.
    """

    target: str | None = None

    def run(self) -> None:
        part = (self.target or "").casefold()
        heads = [head for head in known_heads() if part in head.target.casefold()]
        if not heads:
            raise ValueError(f"no head is known for a target whose id contains {self.target!r}")
        sources = list(dict.fromkeys((head.source, head.looked_up) for head in heads if not head.bundled))
        rows = [(f"  {Path(head.head).name}" if head.bundled else f"  {head.head}", KINDS[head.kind], head.licence,
                 "bundled" if head.bundled else f"[{sources.index((head.source, head.looked_up)) + 1}]",
                 "*" if head.bundled or head.preferred else "") for head in heads]
        heading = ("TARGET / HEAD", "KIND", "LICENCE", "SOURCE", "")
        widths = [max(len(row[column]) for row in (heading, *rows)) for column in range(len(heading))]

        def show(row: Sequence[str]) -> None:
            print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())

        show(heading)
        for target, group in itertools.groupby(zip(heads, rows, strict=True), key=lambda pair: pair[0].target):
            print(target)
            for _, row in group:
                show(row)
        print("\n* is used without --draft; so is the only head of a target. The licences are those on the hub.")
        for number, (source, day) in enumerate(sources, 1):
            print(f"[{number}] {source}, accessed on {day}")


@dataclass(frozen=True, kw_only=True)
class CheckCommand:
    """Diagnose a draft head whose tokens are rarely accepted: compare its predictions with the target's on a text.

    Prints how likely the text is to the target, how many of its tokens the head can draft, and how often, at positions
    1 to 5 of a chain of drafts, the head's best token is the target's best among the tokens that the head can draft
    (the other tokens of the text count as misses). Then names what is wrong: a text that the target did not write,
    another chat template, features of another layer or position, a config.json unlike that of training, a small draft
    vocabulary, or too little training.
    Reads either --data or --questions.

    Args:
        data: text that the head did not learn: ShareGPT, messages or text file, or dataset of prepare_data. Of the
            dataset that it was trained on, only the held-out documents are read.
        questions: questions that the target answers first, greedily: JSON lines of prompts, MT-Bench, GSM8K, HumanEval.
        documents: number of conversations, questions or pieces of a text: the first of a file, the last of a dataset.
        max_new_tokens: most tokens of each answer to --questions.
    """

    data: Path | None = None
    questions: Path | None = None
    documents: int = 32
    max_new_tokens: int = 128
    pair: Loading = Loading()

    def run(self) -> None:
        from ..data.documents import is_dataset
        from ..data.questions import read_questions
        from ..heads.eagle3 import Eagle3Head
        from ..measure.diagnosis import answer_questions, check_pair, examine, read_documents, table, verdicts

        check_counts(self, "documents", "max_new_tokens")
        if (self.data is None) == (self.questions is None):
            raise ValueError("pass either --data or --questions")
        questions = None if self.questions is None else read_questions(self.questions)[: self.documents]
        if self.data is not None and not (self.data.is_file() or is_dataset(self.data)):
            raise ValueError(f"--data {self.data} is neither a file nor a dataset of prepare_data")
        model = self.pair.load(CPU_TREE)
        check_pair(model)
        documents = (read_documents(self.data, self.documents, model, self.pair.draft) if questions is None
                     else answer_questions(model, questions, self.max_new_tokens))
        found = examine(model, documents)
        print(table(found))
        for verdict in verdicts(found, isinstance(model.draft, Eagle3Head)) or ["no fault was detected"]:
            print(f"- {verdict}")


@dataclass(frozen=True)
class InspectCommand:
    """Describe a draft head, and list the servers that can load it; or a small causal LM that may draft. Exits with
    status 2 if it does not fit the target.

    Args:
        head: directory or hub id; of a causal LM also a GGUF file.
        target: directory, hub id or GGUF file of a target to check it against.
        revision: branch, tag or commit of the head's repository on the hub.
        trust_remote_code: allow a target to run code from its repository.
    """

    head: Positional[str]
    target: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False

    def run(self) -> None:
        from ..data.sources import at_revision
        from ..export.inspection import inspect_head

        head = at_revision("revision", self.head, self.revision)
        report = inspect_head(head, self.target, trust_remote_code=self.trust_remote_code)
        for name, value in report.facts.items():
            print(f"{name + ':':<20}{value}")
        for server, problems in report.server_problems.items():
            hint = "" if any("would not compute" in problem for problem in problems) else (
                f" (eagle-fsd export --to {server})")
            verdict = "; ".join(problems) + hint if problems else "loads it unchanged"
            print(f"{server + ':':<20}{verdict}")
        if report.target_problems:
            raise ValueError(f"{self.head} does not fit {self.target}: {'; '.join(report.target_problems)}")
        if self.target is not None:
            print(f"{'target:':<20}it fits ({self.target})")


@dataclass(frozen=True)
class ExportCommand:
    """Convert a draft head to the format of another program.

    Args:
        head: directory or hub id.
        to: program that will load the head; llama.cpp loads EAGLE-3 heads only.
        out: output directory; for llama.cpp a file NAME.gguf.
        target: directory or hub id of the target, for formats that include its embeddings; for llama.cpp its GGUF file,
            which has the tokenizer.
        revision: branch, tag or commit of the head's repository on the hub.
        trust_remote_code: allow a target to run code from its repository.
    """

    head: Positional[str]
    to: Literal["eagle", "sglang", "vllm", "llama.cpp"]  # export.servers.LAYOUTS and LLAMA_CPP, which imports torch
    out: str
    target: str | None = None
    revision: str | None = None
    trust_remote_code: bool = False

    def run(self) -> None:
        from ..data.sources import at_revision
        from ..export.servers import export_head
        from ..heads.checkpoint import TOKEN_MAP

        head = at_revision("revision", self.head, self.revision)
        path = export_head(head, self.to, self.out, target=self.target, trust_remote_code=self.trust_remote_code)
        if self.to == "llama.cpp":
            return print(f"wrote {path}: llama-server -m {self.target} -md {path} --spec-type draft-eagle3")
        print(f"wrote {path} and config.json for {self.to}")
        if path.with_name(TOKEN_MAP).is_file():
            print(f"draft vocabulary: pass --speculative-token-map {path.with_name(TOKEN_MAP)}")


@dataclass(frozen=True)
class VocabCommand:
    """Restrict an EAGLE-1/2 head to drafting the tokens that are frequent in your text.

    Counts the tokens of answers, prints the share of text that the most frequent ones cover (measured on every tenth
    block of text, which is not counted), and writes token_map.pt to the head's directory. The head then computes only
    the logits of these tokens. Lossless text does not change. Delete the file to draft all tokens again.

    Args:
        head: directory or hub id.
        data: ShareGPT, messages or text files, or datasets of prepare_data.
        target: directory or hub id of the target, for its tokenizer; not needed for datasets of prepare_data.
        size: number of tokens to draft. Without size and coverage, the command only prints a table.
        coverage: draft as many tokens as cover this share of the text, such as 0.99.
        out: directory for a copy of the head with the file; None: the head's own directory.
        revision: branch, tag or commit of the head's repository on the hub.
        trust_remote_code: allow a target to run code from its repository.
    """

    head: Positional[str]
    data: tuple[str, ...]
    target: str | None = None
    size: Annotated[int | None, ONE_SIZE] = None
    coverage: Annotated[float | None, ONE_SIZE] = None
    out: Path | None = None
    revision: str | None = None
    trust_remote_code: bool = False

    def run(self) -> None:
        import torch
        from transformers import AutoTokenizer

        from ..data.gguf import target_source
        from ..data.sources import at_revision
        from ..data.token_counts import count_tokens
        from ..heads.checkpoint import TOKEN_MAP, copy_head, load_head, require_empty, save_token_map
        from ..heads.eagle3 import Eagle3Head

        if not self.data:
            raise ValueError("--data needs a file or a dataset")
        source = at_revision("revision", self.head, self.revision)
        head = load_head(source)
        if isinstance(head, Eagle3Head):
            raise ValueError(f"{self.head} is an EAGLE-3 head, which already has a draft vocabulary")
        if self.out is not None:
            require_empty(self.out)
        elif not Path(self.head).is_dir():
            raise ValueError(f"{self.head} is not a local directory, to which {TOKEN_MAP} could be written: add --out")
        tokenizer = None if self.target is None else AutoTokenizer.from_pretrained(
            target_source(self.target), trust_remote_code=self.trust_remote_code)
        counts = count_tokens(self.data, head.config.vocab_size, tokenizer)
        size = self.size if self.coverage is None else counts.size_for(self.coverage)
        tokens = None if size is None else torch.from_numpy(counts.most_frequent(size))
        coverage, text, total = counts.coverage(), counts.counts + counts.held_out, len(counts.counts)
        print(f"{text.sum()} tokens of text, {(text > 0).sum()} distinct, {len(counts.special)} special\n\n"
              f"{'size':>8}{'coverage':>11}")
        for count in sorted({total >> power for power in range(7)} | {size or total}, reverse=True):
            print(f"{count:>8}{coverage[count - 1]:>11.3%}{'  <' if count == size else ''}")
        if tokens is not None:
            path = save_token_map(self.head, tokens) if self.out is None else copy_head(source, self.out, tokens)
            print(f"\nwrote {path}: the head drafts {size} of {total} tokens. Fit its curves again with eagle-fsd tune")
