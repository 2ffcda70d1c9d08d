"""The families of targets: which decode losslessly, which are refused and why; docs/results/families.md has the tables.

`pytest tests/test_families.py --write-tables` writes the tables there.
"""

import re
from pathlib import Path

import pytest
import torch
import transformers
from test_lossless import WIDE, alone, assert_nodes_are_verified_like_their_paths, assert_same
from tiny import FAMILIES, PROMPT, REFUSED, tiny_config, tiny_head, tiny_target
from transformers import CONFIG_MAPPING

from eagle_fsd.loading.pair import EagleModel

PAGE = Path(__file__).parents[1] / "docs" / "results" / "families.md"
NEW = 16  # with the prompt more than three times the windows
HEADINGS = {
    "supported": ["family", "class", "layers", "reach of a layer", "sdpa", "eager", "transformers"],
    "refused": ["family", "class", "reason", "transformers"],
}
found: dict[str, dict[str, list[str]]] = {"supported": {}, "refused": {}}


def known(families):
    return [name for name in families if families[name].get("model_type", name) in CONFIG_MAPPING]


@torch.no_grad()
def assert_the_reach_matters(family, field):
    tokens = torch.tensor([PROMPT * 3])
    ours, wide = (tiny_target(family, **options)(tokens).logits[0, -1] for options in ({}, {field: 100}))
    assert not torch.allclose(ours, wide, atol=1e-3)


@pytest.mark.parametrize("family", known(FAMILIES))
def test_lossless(family):
    results = []
    for attention in ("sdpa", "eager"):
        try:
            model = tiny_target(family, attention=attention)
        except ValueError as error:
            assert "scaled_dot_product_attention" in str(error)
            results.append("not in transformers")
            continue
        assert_nodes_are_verified_like_their_paths(model)
        greedy = {"max_new_tokens": NEW, "tree": WIDE, "acceptance": "exact", "seed": 1}
        ways = [greedy] if "greedy, sampled" in results else [greedy, greedy | {"temperature": 1.2}]
        pair = EagleModel.from_parts(model, tiny_head(model))
        for options in ways:
            assert assert_same(pair, alone, [(PROMPT, options)])["head"] > 0
        results.append("greedy, sampled" if len(ways) == 2 else "greedy")
    target = EagleModel.from_parts(model, None).target
    kinds = dict.fromkeys(getattr(target.config, "layer_types", None) or [])  # in the order of the layers
    layers = ", ".join(kind.removesuffix("_attention") for kind in kinds)
    reach = ""
    masked = target.current.masked_layers
    if masked.window or masked.chunk:
        assert_the_reach_matters(family, "sliding_window" if masked.window else "attention_chunk_size")
        reach = f"window of {masked.window}" if masked.window else f"chunks of {masked.chunk}"
        layers = layers or "sliding"
    found["supported"][family] = [family, type(model).__name__, layers or "full", reach, *results]


@pytest.mark.parametrize("family", known(REFUSED))
def test_refused(family):
    model = transformers.AutoModelForCausalLM.from_config(tiny_config(family), attn_implementation="eager").eval()
    with pytest.raises(ValueError, match="is not supported: ") as caught:
        EagleModel.from_parts(model, None)
    name, reason = str(caught.value).split(" is not supported: ")
    found["refused"][family] = [family, name, re.split(r" \(|; ", reason)[0]]


def read_table(text: str, kind: str) -> dict[tuple[str, ...], set[str]]:
    """Rows of a table and the versions of transformers that they were found with."""
    lines = text.split(f"<!-- {kind} -->")[1].split("<!-- end -->")[0].strip().splitlines()[2:]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return {tuple(row[:-1]): set(row[-1].split(", ")) for row in rows}


def with_table(text: str, kind: str, rows: dict[tuple[str, ...], set[str]]) -> str:
    before, rest = text.split(f"<!-- {kind} -->")
    order = {family: number for number, family in enumerate([*FAMILIES, *REFUSED])}
    lines = [HEADINGS[kind], ["---"] * len(HEADINGS[kind])]
    lines += sorted(([*row, ", ".join(sorted(rows[row]))] for row in rows), key=lambda row: (order[row[0]], row[-1]))
    table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    return f"{before}<!-- {kind} -->\n{table}\n<!-- end -->{rest.split('<!-- end -->', 1)[1]}"


@pytest.mark.parametrize(("kind", "families"), [("supported", FAMILIES), ("refused", REFUSED)])
def test_the_page_says_what_was_found(kind, families, request):
    if found[kind].keys() != set(known(families)):
        pytest.skip("needs the results of all families")
    rows = {tuple(row) for row in found[kind].values()}
    text, version = PAGE.read_text(encoding="utf-8"), transformers.__version__
    stored = read_table(text, kind)
    if request.config.getoption("--write-tables"):
        merged = {row: stored.get(row, set()) - {version} | ({version} if row in rows else set())
                  for row in stored.keys() | rows}
        merged = {row: versions for row, versions in merged.items() if versions}
        PAGE.write_text(with_table(text, kind, merged), encoding="utf-8")
    elif any(version in versions for versions in stored.values()):
        assert {row for row, versions in stored.items() if version in versions} == rows
    else:
        assert rows <= stored.keys()
