"""The families of targets: which decode losslessly, with heads of any kind trained for them; which are refused and why;
docs/results/families.md has the tables.

`pytest tests/test_families.py --write-tables` writes the tables there.
"""

import json
import re
from pathlib import Path

import pytest
import torch
import transformers
from test_lossless import WIDE, alone, assert_nodes_are_verified_like_their_paths, assert_same
from tiny import FAMILIES, PROMPT, REFUSED, tiny_config, tiny_head, tiny_target
from transformers import CONFIG_MAPPING

from eagle_fsd.heads.checkpoint import load_head, save_head
from eagle_fsd.loading.pair import EagleModel
from eagle_fsd.models.target import TargetModel
from train.config import TrainingConfig
from train.heads import new_head
from train.objectives import AlignedLoss, make_objective
from train.teacher import TargetEnds

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
    masked = target.computation.masked_layers
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


LONG_ROPE = {"rope_type": "longrope", "rope_theta": 2e4, "partial_rotary_factor": 0.5, "factor": 4.0,
             "short_factor": [1.0], "long_factor": [2.0], "original_max_position_embeddings": 64}
# Shapes that a Llama layer cannot have, or that transformers describes otherwise than Llama's.
SHAPES = {
    "phi3 of long texts": ("phi3", {"rope_parameters": LONG_ROPE}),  # Phi-4-mini
    "gemma4 with two sizes": ("gemma4_text", {"global_head_dim": 16}),
    "heads beside the hidden size": ("glm4_moe", {"num_attention_heads": 6}),  # GLM-4.5
    "scaled global layers": ("olmo3", {"rope_parameters": {  # OLMo 3
        "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
        "full_attention": {"rope_type": "yarn", "rope_theta": 5e5, "factor": 8.0,
                           "original_max_position_embeddings": 16}}}),
}
# Everything else about a new head's rotary embedding: its type and the theta of the target's global layers.
ROPES = {"llama4_text": ("default", 5e5), "gemma3_text": ("default", 1e6), "gemma4_text": ("default", 1e6),
         "olmo3": ("default", 5e5), "gpt_oss": ("yarn", 1.5e5), "apertus": ("llama3", 1.2e7),
         "phi3 of long texts": ("default", 2e4), "scaled global layers": ("yarn", 5e5)}


@pytest.mark.parametrize("kind", ["eagle2", "eagle3"])
@pytest.mark.parametrize("name", [*known(FAMILIES), *SHAPES])
def test_a_new_head_trains_and_decodes_losslessly(name, kind, tmp_path):
    family, options = SHAPES.get(name, (name, {}))
    try:
        model = tiny_target(family, attention="sdpa", **options)
    except ValueError:
        model = tiny_target(family, **options)
    config = TrainingConfig(output=tmp_path, head=kind, layers=(0, 1) if kind == "eagle3" else ())
    head = new_head(config, model.config.get_text_config(decoder=True))
    target = TargetModel(model.requires_grad_(False))
    target.feature_layers = head.target_layers(2)
    ends = TargetEnds.of(target, target.input_device)
    head.share_embeddings(ends.embed_tokens)
    loss_of = AlignedLoss(head, make_objective(f"{kind.replace('2', '')},aligned_steps=2"), ends.logits)
    tokens = torch.tensor([PROMPT, PROMPT[::-1]])
    lengths, learned = [len(PROMPT)] * 2, torch.ones(tokens.numel(), dtype=torch.bool)
    features = target.features(tokens, use_cache=False).detach().flatten(0, 1)
    optimizer, losses = torch.optim.AdamW(head.parameters(), lr=3e-3), []
    for _ in range(3):
        loss, _ = loss_of(features, tokens.flatten(), learned, lengths)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[2] < losses[0]
    save_head(head, tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    rope = fields["rope_parameters"]
    assert not any(isinstance(value, dict) for value in rope.values()) and "partial_rotary_factor" not in rope
    if name in ROPES:
        assert (rope["rope_type"], rope["rope_theta"]) == ROPES[name] and fields["rope_theta"] == ROPES[name][1]
    pair = EagleModel.from_parts(model, load_head(tmp_path))
    assert_same(pair, alone, [(PROMPT, {"max_new_tokens": NEW, "tree": WIDE, "acceptance": "exact", "seed": 1})])


def test_what_a_head_cannot_follow_is_said(caplog):
    caplog.set_level("INFO", "train")
    config = TrainingConfig(output=Path("run"))
    for family, options in [("llama", {}), ("gemma3_text", {})]:
        new_head(config, tiny_config(family, **options))
    assert not caplog.records
    new_head(config, tiny_config("phi3", rope_parameters=LONG_ROPE))
    assert "default rotary embedding with theta 20000 over whole attention heads; the target has " \
        "one of type longrope, over 0.5 of each" in caplog.text
    assert new_head(config, tiny_config("gemma4_text", global_head_dim=16)).config.head_dim == 16
    assert "has the sizes of the last one" in caplog.text
    head = new_head(config, tiny_config("glm4_moe", num_attention_heads=6))
    assert (head.config.num_attention_heads, head.config.num_key_value_heads, head.config.head_dim) == (4, 2, 8)
    assert "has 4 attention heads, since the target's 6 do not divide the hidden size 16" in caplog.text
    plain = transformers.GPT2Config(n_embd=16, n_head=4, vocab_size=32)  # without a field intermediate_size
    assert new_head(config, plain).config.intermediate_size == 64 and "none that its config describes" in caplog.text
    assert new_head(config, transformers.OPTConfig(hidden_size=16, num_attention_heads=4, ffn_dim=24, vocab_size=32)
                    ).config.intermediate_size == 24
    with pytest.raises(ValueError, match="cannot follow MambaConfig, which has no num_attention_heads"):
        new_head(config, transformers.MambaConfig())


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
