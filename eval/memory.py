"""Measure the resident memory of a loaded pair in each form, and its peak during loading, relative to the weights.

    python -m eval.memory --forms stock fused int8 --out eval/results/memory

Each form is loaded in a separate process. The memory of imports and of a first answer by a tiny model is subtracted,
that of the tokenizer is not (about 50 MB for 49,152 tokens). Weights are the stored weights of target and head, and the
output rows of a head with a reduced vocabulary. Linux only.
"""

from __future__ import annotations

import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Literal

from eagle_fsd.cli.arguments import Loading
from eagle_fsd.measure.records import markdown, write_record
from eval.command import option_record, run_command
from eval.forwards import FORMS, build_pair

MB = 2**20


@dataclass(frozen=True)
class MemoryArguments:
    """Options of `eval.memory`.

    Args:
        forms: forms of the pair; see `eval.forwards`.
        out: write OUT.json and OUT.md.
    """

    out: Path
    forms: tuple[Literal[tuple(FORMS)], ...] = ("stock", "fused", "int8")
    pair: Loading = Loading()


def status(name: str) -> int:
    """A value in bytes from /proc/self/status."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise ValueError(f"/proc/self/status has no {name}: this command needs Linux")


def measure(pair: Loading) -> tuple[str, dict[str, float]]:
    """Load a pair; return its description, and the MB of its weights, resident memory and peak."""
    import torch

    import eagle_fsd
    from eagle_fsd.loading.pair import parameter_count
    from eagle_fsd.measure.methods import pair_text

    eagle_fsd.generate([3, 1, 4, 1, 5], build_pair("tiny", torch.float32, torch.device("cpu")), max_new_tokens=4)
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # resets the peak
    model = pair.load()
    resident, peak = status("VmRSS") - before, status("VmHWM") - before
    copied = getattr(model.draft, "output_rows", None)
    weights = parameter_count(model.target.model)
    weights += 0 if model.draft is None else parameter_count(model.draft.module)
    weights += 0 if copied is None else model.draft.draft_vocab_size * model.target.hidden_size
    return pair_text(model), {
        "weights": weights * model.target.dtype.itemsize / MB, "resident": resident / MB, "peak": peak / MB}


def run(args: MemoryArguments) -> None:
    rows = []
    for form in args.forms:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as alone:
            pair, megabytes = alone.submit(measure, replace(args.pair, tree=None, **FORMS[form])).result()
        rows.append({"form": form, **megabytes})
    table = markdown({"form": row["form"], "weights (MB)": f"{row['weights']:.0f}", **{
        f"{name} (MB)": f"{row[name]:.0f} ({row[name] / row['weights']:.2f} x)" for name in ("resident", "peak")}}
        for row in rows)
    print(write_record(args.out, {"settings": option_record(args), "rows": rows}, f"{pair}\n\n{table}"))


main = partial(run_command, "eval.memory", MemoryArguments, run)

if __name__ == "__main__":
    sys.exit(main())
