"""Stored results: JSON with its provenance, the same as a Markdown page, tables, and the plot of a comparison."""

from __future__ import annotations

import json
import logging
import math
import os
import platform
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from .. import __version__
from ..utils.files import json_digest
from ..utils.installation import CHANGES, ROOT, commit, install_command, processor_name

log = logging.getLogger(__name__)


def environment() -> dict:
    """Version, commit, command, versions of libraries, and hardware of this process.

    `commit`: see `utils.installation`; `clean`: it is known, and has no changes.
    `preloaded`: libraries in LD_PRELOAD, such as an allocator.
    """
    program = Path(sys.argv[0])
    name = f"python -m {program.parent.name}.{program.stem}" if program.suffix == ".py" else program.name
    return {
        "eagle_fsd": __version__, "commit": commit(),
        "clean": commit() not in (None, "unknown") and CHANGES not in commit(),
        "command": shlex.join([*name.split(), *map(shown, sys.argv[1:])]), "python": platform.python_version(),
        "torch": torch.__version__, "transformers": transformers.__version__, "processor": processor_name(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "threads": torch.get_num_threads(),
        "preloaded": [Path(name).name for name in os.environ.get("LD_PRELOAD", "").replace(":", " ").split()],
    }


def generation_digest(model: PreTrainedModel) -> str | None:
    """A digest of a model's generation config, which changes greedy answers too; None: it has none."""
    if model.generation_config is None:
        return None
    fields = model.generation_config.to_diff_dict().items()
    return json_digest({name: value for name, value in fields if name != "transformers_version"})


def tokenizer_digests(tokenizer: PreTrainedTokenizerBase) -> dict[str, str]:
    """Digests of the chat template and the vocabulary, with which prompts become tokens."""
    template = getattr(tokenizer, "chat_template", None)
    return {"chat_template": json_digest(template), "vocabulary": json_digest(tokenizer.get_vocab())}


def shown(value: object) -> str:
    """A setting as text. Absolute paths become relative to the repository, or lose their folders, so that no record
    contains the folders of a machine; inside a text, as in "NAME=FLAGS", those of files that exist."""
    if isinstance(value, tuple):
        return " ".join(map(shown, value))
    text = str(value)
    if not os.path.isabs(text):
        return re.sub(r"(?<=[\s=])/\S+", lambda path: shown(path[0]) if os.path.exists(path[0]) else path[0], text)
    near = os.path.relpath(text, ROOT)
    return Path(text).name if near.startswith(os.path.join("..", "..")) else near


def record_path(out: Path, suffix: str) -> Path:
    """`out` with this suffix in place of .json, .jsonl or .md; other dots belong to the name, as in quality-t0.7."""
    return out.with_name((out.stem if out.suffix in (".json", ".jsonl", ".md") else out.name) + suffix)


def write_json(path: Path, record: Mapping[str, object]) -> None:
    """Write a record, and create its folder if missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(record, indent=1, ensure_ascii=False) + "\n"
    path.write_text(text, encoding="utf-8", errors="backslashreplace")  # of file names that are no UTF-8


def version_text(about: Mapping[str, str | None]) -> str:
    """Version and commit of an `environment`; records of 0.4.0 and older have the commit alone."""
    names = {"eagle_fsd": about.get("eagle_fsd"), "commit": about["commit"]}
    return ", ".join(f"{name} {value}" for name, value in names.items() if value)


def write_record(out: Path, record: Mapping[str, object], text: str) -> str:
    """Write a record with its environment as JSON, and a Markdown page beside it; return the page."""
    about = environment()
    write_json(record_path(out, ".json"), {"environment": about, **record})
    changed = "" if about["clean"] or about["commit"] is None else " (NOT A CLEAN COMMIT: do not quote)"
    threads = "1 thread" if about["threads"] == 1 else f"{about['threads']} threads"
    machine = ", ".join([about["gpu"] or about["processor"], threads, *about["preloaded"]])
    page = f"# {record_path(out, '').name}\n\n`{about['command']}` by {version_text(about)}{changed}, {machine}, " \
           f"torch {about['torch']}, transformers {about['transformers']}\n\n{text}\n"
    record_path(out, ".md").write_text(page, encoding="utf-8", errors="backslashreplace")
    return page


def markdown(rows: Iterable[Mapping[str, object]]) -> str:
    """A table of rows of cells by heading; missing cells are empty."""
    rows = list(rows)
    headings = list(dict.fromkeys(heading for row in rows for heading in row))
    lines = [headings, ["---"] * len(headings), *([row.get(heading, "") for heading in headings] for row in rows)]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def decimals(value: float | None, digits: int = 2, unit: str = "") -> str:
    """A number as a cell; empty if None."""
    return "" if value is None else f"{value:.{digits}f}{unit}"


def percent(share: float | None, digits: int = 0) -> str:
    return decimals(None if share is None else 100 * share, digits, "%")


def with_span(text: str, ends: Sequence[float] | None, digits: int = 2) -> str:
    """A value with both ends of its interval, if it has one."""
    return text if ends is None else f"{text} ({ends[0]:.{digits}f} to {ends[1]:.{digits}f})"


def bullets(meanings: Mapping[str, str]) -> str:
    """A legend of the headings of a table."""
    return "\n".join(f"- **{heading}**: {meaning}" for heading, meaning in meanings.items())


def whiskers(value: float, ends: Sequence[float] | None) -> list[float]:
    """Lengths of error bars below and above a value, as for matplotlib; NaN: no interval."""
    return [math.nan, math.nan] if ends is None else [max(0.0, value - ends[0]), max(0.0, ends[1] - value)]


def save_plot(path: Path, width: float, height: float, *panels: Callable[[Any], None]) -> None:
    """Save a plot with a panel of the given size, in inches, for each function, which draws on the axes that it gets.
    Log a warning if matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        log.warning("no plot without matplotlib: %s", install_command("eval"))
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, all_axes = pyplot.subplots(1, len(panels), figsize=(width * len(panels), height), layout="constrained",
                                       squeeze=False)
    for axes, draw in zip(all_axes[0], panels, strict=True):
        axes.grid(alpha=0.3)
        draw(axes)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def plot_comparison(rows: Mapping[str, Sequence[Mapping]], reference: str, path: Path) -> None:
    """Plot each method's accuracy over its time per answer; where nothing is graded, its share of equal tokens.

    Args:
        rows: rows by category, "all" among them. Up to four timed categories get a panel each, and more get none.
    """
    timed = {name: lines for name, lines in rows.items() if name == "all" or lines[0]["timed"]}
    if len(timed) > 5:
        timed = {"all": rows["all"]}

    def draw(category: str, axes: Any) -> None:
        graded = all(row["accuracy"] is not None for row in timed[category])
        for row in timed[category]:
            time, value = row["time"], 100 * (row["accuracy"] if graded else row["same_tokens"])
            across = whiskers(time, row["time_interval"])
            compared = graded and row["method"] != reference
            fall = [100 * reach for reach in whiskers(row["drop"], row["drop_interval"])] if compared else None
            axes.errorbar(time, value, yerr=fall and [[fall[1]], [fall[0]]], xerr=[[reach] for reach in across],
                          marker="o", elinewidth=0.7, label=row["method"])
        axes.set(title=category if len(timed) > 1 else "", xlabel=f"time per answer, relative to {reference}",
                 ylabel="accuracy (%)" if graded else f"tokens equal to {reference}'s (%)")
        axes.legend(fontsize=8)

    save_plot(path, 7 if len(timed) == 1 else 5, 4.5, *(partial(draw, category) for category in timed))


def plot_speeds(rows: Mapping[str, Sequence[Mapping]], path: Path, reference: str) -> None:
    """Plot the speed of each method relative to the reference, as bars by category.

    Args:
        rows: rows by category (see `method_rows`).
    """
    categories = list(rows)[::-1]  # the first at the top
    names = [row["method"] for row in rows[categories[0]] if row["method"] != reference]
    height = 0.8 / len(names)

    def draw(axes: Any) -> None:
        for number, name in enumerate(names):
            shown = [next(row for row in rows[category] if row["method"] == name) for category in categories]
            reach = zip(*(whiskers(row["speedup"], row["speedup_interval"]) for row in shown), strict=True)
            places = [at + 0.4 - height * (number + 0.5) for at in range(len(categories))]
            axes.barh(places, [row["speedup"] for row in shown], height, label=name, xerr=list(reach),
                      error_kw={"elinewidth": 0.7, "ecolor": "0.35"})
        axes.axvline(1, color="black", linewidth=1)
        axes.set_yticks(range(len(categories)), categories)
        axes.set_xlabel(f"tokens per second, relative to {reference}")
        axes.legend(fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))

    save_plot(path, 8, 1.4 + 0.16 * len(categories) * (len(names) + 1), draw)
