"""Every rule against the slow reference, at every node of random trees."""

import math

import pytest
import torch
from random_trees import fuzzy_nodes, random_verification
from reference_acceptance import Reference
from tiny import MARKS, tiny_judge

from eagle_fsd.acceptance import RULES, make_rule, walk

GUARDS = [{}, {"head_guard": 0.0}, {"head_guard": 0.5}, {"head_guard": 0.9}, {"head_guard": 1.0}]
SIBLINGS = [{"sibling": "target"}, {"sibling": "longest"}]
DIVERGENCES = ["js", "kl", "reverse_kl", "tv", "js_fsd_code", "js_top3", "kl_top1"]

SETTINGS = {
    "exact": [{}],
    "fsd": [
        *(
            {"threshold": threshold, **sibling, **guard}
            for threshold in (0.0, 0.05, 0.2, math.inf)
            for sibling in (*SIBLINGS, {"sibling": "draft"})
            for guard in GUARDS
        ),
        *({"threshold": 0.15, "divergence": divergence} for divergence in DIVERGENCES),
        *({"threshold": 0.4, "gates": [make_rule("judge", dial, learned=tiny_judge(5))]} for dial in (0.3, 0.9)),
        {"threshold": 0.4, "sibling": "longest", "gates": [make_rule("fly", 0.9, window=1)]},
        *({"threshold": 0.4, "gates": [make_rule(name, math.inf, marks=MARKS)]} for name in ("prose", "afterword")),
    ],
    "fsd_paper": [
        *({"threshold": threshold, **guard} for threshold in (0.0, 0.05, 0.2, math.inf) for guard in GUARDS),
        *({"threshold": 0.15, "divergence": divergence} for divergence in DIVERGENCES),
    ],
    "tilt": [
        {"threshold": threshold, **regret, **guard}
        for threshold in (0.0, 0.01, 0.4, 1.5, 30.0)
        for regret in ({}, {"max_regret": 0.7})
        for guard in GUARDS
    ],
    "typical": [
        {"threshold": threshold, **sibling, **guard}
        for threshold in (0.0, 0.3, 0.5, 0.7, 0.95)
        for sibling in SIBLINGS
        for guard in GUARDS
    ],
    "fly": [
        {"threshold": threshold, "window": window, "renormalised": renormalised, **guard}
        for threshold in (0.0, 0.2, 0.6, math.log(3))
        for window in (1, 2, 3)
        for renormalised in (True, False)
        for guard in GUARDS[::2]
    ],
    "regret": [
        {"threshold": threshold, "most": most, **guard}
        for threshold in (0.0, 0.5, 2.0, math.inf)
        for most in (1, 2, 5)
        for guard in GUARDS[::2]
    ],
    "judge": [{"threshold": threshold, "learned": tiny_judge(width), **guard}
              for threshold in (0.0, 0.3, 0.7, 1.0) for width in (3, 5) for guard in GUARDS],
    "prose": [{"threshold": threshold, "marks": MARKS, **guard}
              for threshold in (0.0, 0.5, 3.0, math.inf) for guard in GUARDS],
    "afterword": [{"threshold": threshold, "marks": MARKS, **guard}
                  for threshold in (0.0, 0.5, 3.0, math.inf) for guard in GUARDS],
    "fsd+fly": [{"threshold": 0.4, "gate_threshold": dial} for dial in (0.4, 0.9)],
    "fsd+regret": [{"threshold": 0.4, "gate_threshold": dial} for dial in (0.0, 1.0, 3.0)],
    "fsd+fsd": [{"threshold": 0.4, "gate_threshold": 0.2, "sibling": "draft"}],
    "relaxed+fly+regret": [{"threshold": 2.0, "gate_threshold": [0.9, dial]} for dial in (1.0, 4.0)],
    "regret+fly": [{"threshold": dial, "gate_threshold": 1.0} for dial in (3.0, 20.0, math.inf)],
    "typical+relaxed": [{"threshold": 0.7, "gate_threshold": dial} for dial in (0.5, 1.0)],
    "lenience": [{"threshold": dial, **guard} for dial in (0.0, 0.3, 1.0, 50.0) for guard in GUARDS],
    "relaxed": [
        {"threshold": threshold, **sibling, **top, **guard}
        for threshold in (0.0, 0.6, 3.0)
        for sibling in SIBLINGS
        for top in ({}, {"top": 2})
        for guard in GUARDS[::2]
    ],
}


def test_every_rule_has_settings():
    assert RULES.keys() <= SETTINGS.keys()


@pytest.mark.parametrize("greedy", [True, False], ids=["greedy", "sampling"])
@pytest.mark.parametrize("name", SETTINGS)
def test_rule_equals_the_reference(name, greedy):
    fuzzy_steps = 0
    for index, setting in enumerate(SETTINGS[name]):
        for banned in (0.0, 0.4):
            verification = random_verification(
                seed=2 * index + (banned > 0), greedy=greedy, batch=4, gap=0.7, temperature=0.8, banned=banned
            )
            rule = make_rule(name, **setting)
            decision = rule(verification)
            walked = walk(verification, decision)
            for row in range(4):
                reference = Reference(rule, verification, row)
                drawn = [reference.choice(v) for v in range(12)]
                assert walked.choice[row].tolist() == [token for token, _ in drawn], (rule, banned, row)
                path, token = reference.walk()
                assert walked.accepted[row].nonzero()[:, 0].tolist() == path, (rule, banned, row)
                assert walked.choice[row, walked.last[row]] == token
                if decision.divergence is not None:
                    expected = [
                        reference.node_divergence(v) if reference.children(v) else math.nan for v in range(12)
                    ]
                    torch.testing.assert_close(
                        decision.divergence[row], torch.tensor(expected), equal_nan=True, rtol=1e-4, atol=1e-6
                    )
            fuzzy_steps += int(fuzzy_nodes(verification, walked).sum())
    assert (fuzzy_steps > 0) == (name != "exact" and (name, greedy) != ("lenience", True))
