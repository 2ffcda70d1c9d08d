"""What each process of tests/test_parallel.py runs: `torchrun --nproc-per-node 2 tests/parallel_worker.py FOLDER`.

FOLDER holds the pairs that the test has saved; each process writes what it found to FOLDER/RANK.json.
"""

import json
import os
import sys
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist
from tiny import PROMPT
from transformers import TorchAoConfig

import eagle_fsd
from eagle_fsd import Chat, TreeConfig
from eagle_fsd.drafting import measuring
from eagle_fsd.models.target import TargetModel

TREE = TreeConfig(16, 5, 4)
CASES = {
    "greedy": {"acceptance": "exact"},
    "sampled": {"acceptance": "exact", "temperature": 1.0, "seed": 3},
    "fsd": {"threshold": 0.3},
    "fsd sampled": {"threshold": 0.3, "temperature": 0.8, "top_p": 0.9, "seed": 5},
    "tilt": {"acceptance": "tilt", "threshold": 0.5, "temperature": 0.8, "seed": 5},
    "budget": {"threshold": 0.3, "budget": 1.0},
    "stops at a level": {"acceptance": "exact", "tree": TreeConfig(16, 5, 4, least_reach=0.5, least_probability=0.05)},
}
SUM = {"prompt": [{"role": "user", "content": "What is 7 * 8?"}], "max_new_tokens": 32, "acceptance": "exact"}
BATCH = [PROMPT, [7], PROMPT[:5]]
TURNS = ("abc", "de f")


def answer(model, prompt=PROMPT, **options):
    options = {"tree": TREE, "max_new_tokens": 30, "ignore_eos": True} | options
    return eagle_fsd.generate(prompt, model, **options)


def answers(model) -> dict[str, list[int]]:
    """The tokens of each case, and those of a batch."""
    rows = answer(model, BATCH, temperature=0.8, seed=7, threshold=0.2)
    return {**{name: answer(model, **options).token_ids for name, options in CASES.items()},
            "batch": [output.token_ids for output in rows]}


def chat(model) -> list[list[int]]:
    talk = Chat(model, threshold=0.3, tree=TREE, max_new_tokens=8)
    return [talk.send(text).token_ids for text in TURNS]


def refusal(*args, **options) -> str:
    try:
        eagle_fsd.load(*args, **options)
    except ValueError as error:
        return str(error)
    return "accepted"


class Disagreeing:
    """Logits that are far from the others' in all processes but the first."""

    def __enter__(self):
        self.stock = TargetModel.logits
        if dist.get_rank():
            TargetModel.logits = lambda target, features: self.stock(target, features).flip(-1)

    def __exit__(self, *_):
        TargetModel.logits = self.stock


def main(folder: Path) -> None:
    rank = int(os.environ["RANK"])
    measuring.ROUNDS = 1

    def load(name, **options):
        return eagle_fsd.load(folder / name / "target", folder / name / "head", tp_plan="auto", **options)

    model = load("llama", tree=None)
    weight, own = model.target.lm_head.weight, model.target.model.lm_head.weight.to_local()
    found = {"shapes": [list(weight.shape), list(own.shape), model.target.vocab_size], "answers": answers(model),
             "digest": model.target.digest(), "chat": chat(model)}
    found["receipts"] = [list(receipt) for receipt in answer(model, **CASES["fsd sampled"]).receipts]
    unseeded = answer(model, acceptance="exact", temperature=1.0)
    found["unseeded"] = [unseeded.seed, unseeded.token_ids]

    calls = []
    criterion = lambda ids, scores: calls.append(1) or rank == 1 or ids.shape[1] == len(PROMPT) + 7  # noqa: E731
    found["criterion"] = answer(model, acceptance="exact", stopping_criteria=[criterion]).token_ids
    found["criterion calls"] = len(calls)
    torch.manual_seed(rank)
    for name, do_sample in (("custom greedy", False), ("custom sampled", True)):
        found[name] = model.target.model.generate(
            torch.tensor([PROMPT]), custom_generate=eagle_fsd.custom_generate, draft=model.draft, acceptance="exact",
            do_sample=do_sample, max_new_tokens=12)[0].tolist()
    with Disagreeing():
        found["disagreeing"] = answers(model)

    automatic = load("llama")
    found["auto"] = [answer(automatic, tree=None, **CASES[name]).token_ids for name in ("greedy", "sampled", "fsd")]
    found["auto latency"] = asdict(automatic.trees.latency)
    found["eagle3"] = answers(load("eagle3", tree=None))
    for name in ("qwen3", "gemma2", "mixtral"):
        found[name] = answers(load(name, tree=None))
    if find_spec("torchao"):
        from torchao.quantization import Int8WeightOnlyConfig
        found["torchao"] = answers(load("qwen3", tree=None, quantization_config=TorchAoConfig(Int8WeightOnlyConfig())))
    found["one head"] = refusal(folder / "one head" / "target", folder / "llama" / "head", tp_plan="auto")
    found["damaged"] = refusal(folder / "damaged" / "target", folder / "llama" / "head", tp_plan="auto")
    found["gpt2"] = refusal(folder / "gpt2" / "target", folder / "llama" / "head", tp_plan="auto")
    small = eagle_fsd.load(*json.loads((folder / "small.json").read_text()), tp_plan="auto")
    found["small"] = eagle_fsd.generate(model=small, **SUM).token_ids
    (folder / f"{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1]))
