"""Compare windows of a draft head (draft_window=) on long texts: tau, and tokens/s of decoding.

    python -m eval.draft_window --text docs/*.md --lengths 200 1500 4000 7000 --windows 512 128 --out runs/window

Each prompt is a part of the text, cut to a length in tokens, and the request to summarise it. All windows answer it in
turn, in an order that rotates; the head alone drafts, and the prompt's own time does not count.
"""

from __future__ import annotations

import statistics
import sys
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from eagle_fsd.cli.arguments import Loading
from eagle_fsd.drafting.config import CPU_TREE, TreeConfig
from eagle_fsd.measure.records import markdown, write_record
from eagle_fsd.utils.progress import Progress
from eval.command import option_record, run_command


@dataclass(frozen=True, kw_only=True)
class WindowArguments:
    """Options of `eval.draft_window`.

    Args:
        text: files whose content is cut into prompts.
        lengths: tokens of the prompts' texts.
        windows: positions that the head sees, besides all of them.
        prompts: number of prompts of each length.
        max_new_tokens: tokens of each answer, end tokens ignored.
        tree: size of the draft tree.
        out: write OUT.json and OUT.md.
    """

    text: tuple[Path, ...]
    out: Path
    lengths: tuple[int, ...] = (200, 1500, 4000, 7000)
    windows: tuple[int, ...] = (1024, 512, 256, 128)
    prompts: int = 3
    max_new_tokens: int = 64
    tree: TreeConfig = CPU_TREE
    pair: Loading = Loading()


def run(args: WindowArguments) -> None:
    import eagle_fsd
    from eagle_fsd.heads.eagle import DraftHead
    from eagle_fsd.measure.methods import pair_text

    model = replace(args.pair, tree=None).load()
    if not isinstance(model.draft, DraftHead):
        raise ValueError("windows are those of a draft head, which this pair lacks: pass --draft")
    tokens = model.tokenizer.encode("\n\n".join(path.read_text(encoding="utf-8") for path in args.text))
    if len(tokens) < (needed := args.prompts * max(args.lengths)):
        raise ValueError(f"the text has {len(tokens)} tokens, and {args.prompts} prompts of {max(args.lengths)} need "
                         f"{needed}: pass more files")
    windows, rows = [None, *args.windows], []
    bar = Progress(total=len(args.lengths) * args.prompts * (len(windows) + 1), desc="answers", unit=" answers")

    def ask(prompt: str, window: int | None, **options: object) -> eagle_fsd.Output:
        model.draft.window = window
        bar.update()
        return eagle_fsd.generate([{"role": "user", "content": prompt}], model, ignore_eos=True, text_drafts="off",
                                  max_new_tokens=args.max_new_tokens, **options)

    for length in args.lengths:
        answers: dict[object, list[eagle_fsd.Output]] = {window: [] for window in ["plain", *windows]}
        for number in range(args.prompts):
            part = model.tokenizer.decode(tokens[number * length : (number + 1) * length])
            prompt = f"{part}\n\nSummarise this text in one paragraph."
            answers["plain"].append(ask(prompt, None, speculative=False))
            for window in windows[number % len(windows) :] + windows[: number % len(windows)]:
                answers[window].append(ask(prompt, window, tree=args.tree))
        speeds = {window: statistics.median((len(out.token_ids) - 1) / out.stats.decode_seconds for out in outputs)
                  for window, outputs in answers.items()}
        for window in windows:
            same = sum(out.token_ids == plain.token_ids for out, plain in zip(
                answers[window], answers["plain"], strict=True))
            rows.append({
                "length": length, "window": window,
                "tau": statistics.mean(out.stats.mean_accepted_length for out in answers[window]),
                "tokens_per_second": speeds[window], "plain_tokens_per_second": speeds["plain"],
                "same_answers": f"{same} of {args.prompts}"})
    table = markdown({
        "tokens": row["length"], "window": row["window"] or "all", "tau": f"{row['tau']:.2f}",
        "tokens/s": f"{row['tokens_per_second']:.1f}",
        "of no drafting": f"{row['tokens_per_second'] / row['plain_tokens_per_second']:.2f}",
        "same answers": row["same_answers"]} for row in rows)
    about = f"{pair_text(model)}\n\ntau: tokens per forward of the target, mean; tokens/s: without the prompt, median."
    print(write_record(args.out, {"settings": option_record(args), "rows": rows}, f"{about}\n\n{table}"))


main = partial(run_command, "eval.draft_window", WindowArguments, run)

if __name__ == "__main__":
    sys.exit(main())
