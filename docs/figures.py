"""Draws the figures of docs/results/ from the stored results: `python docs/figures.py`."""

import json
from pathlib import Path

import matplotlib
from matplotlib import pyplot

DOCS = Path(__file__).parent
RESULTS = DOCS.parent / "eval" / "results"
TASKS = {  # title: result, category, column, label of the axis
    "programs, greedy, a head drafts (664)": ("qwen-code-664-t0", "all", "accuracy", "solved (%)"),
    "programs, greedy, a model drafts (96)": ("qwen-1.5b-drafter-chain5", "all", "accuracy", "solved (%)"),
    "programs at temperature 0.7 (40)": ("qwen-code-40-t0.7", "all", "accuracy", "solved (%)"),
    "chat, greedy (24)": ("smollm2-chat-t0", "all", "repeated", "repeated 4-grams (%)"),
    "chat at temperature 1 (16)": ("smollm2-chat-t1-noise", "all", "repeated", "repeated 4-grams (%)"),
    "chat at temperature 0.7 (16)": ("smollm2-chat-t0.7-noise", "all", "repeated", "repeated 4-grams (%)"),
}
DRAFTER = {
    "HumanEval (164)": ("qwen-1.5b-drafter-finalists", "humaneval", "accuracy", "solved (%)"),
    "MBPP (498)": ("qwen-1.5b-drafter-finalists", "mbpp", "accuracy", "solved (%)"),
    "GSM8K (300)": ("qwen-1.5b-drafter-finalists", "gsm8k", "accuracy", "right (%)"),
}


def stored(name):
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["rows"]


def save(figure, name):
    for axes in figure.axes:
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(DOCS / "results" / f"{name}.svg", metadata={"Date": None})


def depth():
    """Share of forwards that accept at least 1 to 5 drafted tokens, of heads for SmolLM2."""
    study = "smollm2-study-4"
    lines = {
        "bundled head after two runs": ("smollm2-study-2", "bundled"), "small, 20 minutes": (study, "small"),
        "EAGLE-3, sparse": (study, "eagle3_sparse"), "hass": (study, "hass"),
        "from the target's last layer": (study, "last_layer"), "EAGLE-3 with 3.1's norms": (study, "eagle31"),
        "EAGLE-3": (study, "eagle3"), "lk": (study, "lk"), "lk_hybrid": (study, "lk_hybrid"),
    }
    figure, axes = pyplot.subplots(figsize=(7, 3.8), layout="constrained")
    for number, (label, (name, run)) in enumerate(lines.items()):
        row = next(row for row in stored(name) if row["run"] == run)
        axes.plot(range(1, 6), [100 * share for share in row["accepted"]], marker="o", label=label,
                  color="black" if number == 0 else None, linestyle="-" if number else "--")
    axes.set(xlabel="drafted tokens in a row", xticks=range(1, 6), ylim=(0, 100))
    axes.set_ylabel("forwards that accept them (%)")
    axes.legend(fontsize=8)
    save(figure, "depth")


def frontier(file, tasks, rows, columns):
    """What each setting costs, over its time per answer, one panel per task."""
    figure, panels = pyplot.subplots(rows, columns, figsize=(4.5 * columns, 3.5 * rows), layout="constrained",
                                     squeeze=False)
    for axes, (title, (name, category, column, label)) in zip(panels.T.flat, tasks.items(), strict=True):
        for row in stored(name)[category]:
            if row["method"].startswith(("tilt", "ensemble")):
                continue  # removed since
            low, high = row["time_interval"]
            bars = {"xerr": [[row["time"] - low], [high - row["time"]]]}
            if column == "accuracy" and row["method"] != "exact":  # the interval of its difference from exact
                low, high = row["drop_interval"]
                bars["yerr"] = [[100 * (high - row["drop"])], [100 * (row["drop"] - low)]]
            axes.errorbar(row["time"], 100 * row[column], **bars, marker="o", elinewidth=0.8,
                          label=row["method"].replace("head_guard=none", "no guard").replace("temperature=", "at "))
        axes.set(title=title, ylabel=label)
        axes.margins(y=0.45)
        axes.legend(fontsize=7, ncols=2, loc="upper center")
    for axes in panels[-1]:
        axes.set_xlabel("time per answer, relative to exact")
    save(figure, file)


def cycle():
    """Milliseconds of a cycle by part: two CPU threads, and an 8 B shape on an H200."""
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.8), layout="constrained")
    bars = []
    for pair, name in (("SmolLM2", "smollm2-forwards"), ("Qwen-Coder", "qwen-forwards")):
        ms = {(row["part"], row["nodes"]): row["ms"] for row in stored(name)}
        for nodes in (8, 16, 32):
            layers, output = (ms[f"fused {part}", nodes] for part in ("forward", "forward and output layer"))
            bars.append((f"{pair}\n{nodes} nodes", [layers, output - layers, ms["fused cycle, exact", nodes] - output]))
    stack(left, bars, ["layers of the target", "its output layer", "draft, accept, commit"])
    left.set(title="two CPU threads", ylabel="milliseconds")
    ms = {(row["part"], row["nodes"]): row["ms"] for row in stored("h200-llama-3.1-8b-captured")}
    parts = ("draft", "verify", "walk")
    bars = [(f"{rule}\n{nodes} nodes", [ms[f"captured {part}, {rule}, 1 rows", nodes] for part in parts])
            for rule in ("exact", "fsd 0.3") for nodes in (8, 60, 128)]
    stack(right, bars, ["draft", "verify", "walk and keep"])
    right.set(title="8 B shape, one H200, CUDA graphs")
    save(figure, "cycle")


def stack(axes, bars, parts):
    names, heights = zip(*bars, strict=True)
    bottom = [0.0] * len(names)
    for part, values in zip(parts, zip(*heights, strict=True), strict=True):
        axes.bar(names, values, 0.65, bottom, label=part)
        bottom = [below + value for below, value in zip(bottom, values, strict=True)]
    axes.tick_params(axis="x", labelsize=8)
    axes.legend(fontsize=8)


if __name__ == "__main__":
    matplotlib.use("Agg")
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "eagle_fsd", "font.family": "sans-serif"})
    depth()
    frontier("frontier", TASKS, 3, 2)
    frontier("drafter", DRAFTER, 1, 3)
    cycle()
