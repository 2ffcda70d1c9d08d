"""Draws docs/tree.svg, the README's picture: one decode cycle on a small draft tree.  python docs/tree.py"""

from pathlib import Path

INK, GREY, GREEN, AMBER, BLUE = "#1f2937", "#9ca3af", "#15803d", "#b45309", "#1d4ed8"

# node: text, column (level), row, parent, kind
NODES = {
    "root": ("Then", 0, 2.0, None, "root"),
    "a": (", ", 1, 1.0, "root", "exact"),
    "b": (" we", 1, 3.0, "root", "rejected"),
    "c": ("6", 2, 0.0, "a", "exact"),
    "d": ("9", 2, 2.0, "a", "rejected"),
    "e": (" add", 2, 3.5, "b", "rejected"),
    "f": (" plus", 3, 0.0, "c", "fuzzy"),
    "g": (" +", 3, 1.5, "c", "rejected"),
    "h": (" 4", 4, 0.0, "f", "exact"),
    "y": ("7", 5, 0.0, "h", "target"),
}
STYLE = {  # fill, stroke, text
    "root": ("#e5e7eb", INK, INK),
    "exact": ("#dcfce7", GREEN, GREEN),
    "fuzzy": ("#fef3c7", AMBER, AMBER),
    "rejected": ("#ffffff", GREY, GREY),
    "target": ("#dbeafe", BLUE, BLUE),
}
LEGEND = [
    ("exact", "drafted, and the target's own choice"),
    ("fuzzy", "drafted; accepted because divergence ≤ threshold"),
    ("rejected", "drafted, verified, not used"),
    ("target", "drawn by the target where the path ends"),
]


def place(column: float, row: float) -> tuple[float, float]:
    return 80 + 130 * column, 78 + 48 * row


def draw() -> str:
    parts = [
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 840 400" font-family="Helvetica, Arial, sans-serif">',
        '<rect width="840" height="400" fill="white"/>',
        f'<text x="20" y="30" font-size="15" font-weight="bold" fill="{INK}">One cycle: the head drafts a tree, '
        "one target forward checks it, a rule picks the path</text>",
    ]
    for _, column, row, parent, kind in NODES.values():
        if parent is not None:
            x0, y0 = place(*NODES[parent][1:3])
            x1, y1 = place(column, row)
            on_path = kind != "rejected"
            dash = ' stroke-dasharray="5 4"' if kind == "target" else ""
            parts.append(f'<line x1="{x0}" y1="{y0}" x2="{x1}" y2="{y1}" stroke="{INK if on_path else GREY}" '
                         f'stroke-width="{2.5 if on_path else 1.2}"{dash}/>')
    for text, column, row, _, kind in NODES.values():
        x, y = place(column, row)
        fill, stroke, ink = STYLE[kind]
        shown = text.replace(" ", "␣")
        parts.append(f'<rect x="{x - 36}" y="{y - 15}" width="72" height="30" rx="15" fill="{fill}" '
                     f'stroke="{stroke}" stroke-width="1.8"/>')
        parts.append(f'<text x="{x}" y="{y + 5}" font-size="14" text-anchor="middle" fill="{ink}">{shown}</text>')
    for number, (kind, text) in enumerate(LEGEND):
        x, y = 30 + 400 * (number % 2), 312 + 34 * (number // 2)
        fill, stroke, ink = STYLE[kind]
        parts.append(f'<rect x="{x}" y="{y - 11}" width="30" height="16" rx="8" fill="{fill}" stroke="{stroke}" '
                     'stroke-width="1.8"/>')
        parts.append(f'<text x="{x + 40}" y="{y + 2}" font-size="13" fill="{INK}">{text}</text>')
    parts.append(f'<text x="30" y="385" font-size="13" fill="{INK}">Here one forward of the target emits 5 tokens: '
                 "4 accepted and 1 of its own (tau counts 5).</text>")
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    Path(__file__).with_name("tree.svg").write_text(draw(), encoding="utf-8")
