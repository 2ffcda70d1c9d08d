"""Models that threads and pairs share, and models that change after they were joined."""

import copy
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from test_eagle3 import deep_target, good_head
from tiny import PROMPT, VOCAB, save_pair, small_model, tiny_head, tiny_target
from torch import nn

import eagle_fsd
from eagle_fsd import TreeConfig, custom_generate, load_head, save_head
from eagle_fsd.decoding.batch import Session
from eagle_fsd.drafting.language_model import DraftModel
from eagle_fsd.drafting.tree import join_copies
from eagle_fsd.heads.eagle import DraftHead
from eagle_fsd.loading.pair import EagleModel
from eagle_fsd.models.check import TreeCheck
from eagle_fsd.models.fused import Norm
from eagle_fsd.models.linear import has_half_kernels, packed_form
from eagle_fsd.models.loading import convert_buffers

IDS, TREE, NEW = torch.tensor([PROMPT]), TreeConfig(8, 3, 2), 12


def plain(model) -> list[int]:
    """Its greedy tokens in `model.generate`."""
    return model.generate(IDS, max_new_tokens=NEW, do_sample=False)[0, len(PROMPT) :].tolist()


def ours(pair, **options) -> list[int]:
    return eagle_fsd.generate(PROMPT, pair, max_new_tokens=NEW, tree=TREE, **options).token_ids


def accepted(pair) -> list[int]:
    return eagle_fsd.generate(PROMPT, pair, max_new_tokens=40, tree=TREE, text_drafts="off").stats.accepted_lengths


def at_once(*works, times: int = 20) -> list[list]:
    """What each of the functions returns, called so often in a thread of its own."""
    begin = threading.Barrier(len(works))

    def repeat(work):
        begin.wait()
        return [work() for _ in range(times)]

    with ThreadPoolExecutor(len(works)) as pool:
        return list(pool.map(repeat, works))


# Threads --------------------------------------------------------------------------------------------------------


def test_a_norm_that_two_threads_use_first(monkeypatch):
    """One computes the factor while the other is in the middle of it."""
    norm, other = Norm(tiny_target().model.norm), torch.randn(3, 16)

    class Interrupted(torch.Tensor):
        @property
        def is_cpu(self):
            monkeypatch.delattr(Interrupted, "is_cpu")
            norm(other)
            return True

    hidden = torch.randn(3, 16)
    with torch.no_grad():
        norm(hidden.as_subclass(Interrupted))
        torch.testing.assert_close(norm(hidden), norm.module(hidden))
        norm.module.variance_epsilon = 10.0
        torch.testing.assert_close(norm(hidden), norm.module(hidden))


def test_threads_that_share_a_fresh_pair():
    model = tiny_target()
    expected, head = plain(model), tiny_head(model)
    EagleModel.from_parts(model, head)
    for _ in range(5):
        pair = EagleModel.from_parts(model, head)
        assert at_once(*4 * [lambda pair=pair: ours(pair)], times=1) == 4 * [[expected]]


def test_a_heads_frequencies_stay_while_it_is_moved(monkeypatch):
    """To where it is already, by another pair that gets it: other threads use it."""
    head, seen = tiny_head(tiny_target()).bfloat16(), []
    stock = nn.Module._apply
    monkeypatch.setattr(nn.Module, "_apply", lambda module, *given: (
        stock(module, *given), seen.append(head.rotary_emb.inv_freq.dtype))[0])
    expected = head.rotary_emb.inv_freq.clone()
    head.to(torch.bfloat16)
    assert {*seen} == {torch.float32} and torch.equal(head.rotary_emb.inv_freq, expected)


def test_modules_of_other_threads_are_real_while_a_head_is_built(tmp_path, monkeypatch):
    model = tiny_target("gemma", dtype="bfloat16").bfloat16()
    save_head(tiny_head(tiny_target()), tmp_path)
    made, build = [], DraftHead._build

    def made_elsewhere(module, *given):
        with ThreadPoolExecutor(1) as pool:
            made.append(pool.submit(nn.Linear, 2, 2).result())
        return build(module, *given) if isinstance(module, DraftHead) else None

    monkeypatch.setattr(DraftHead, "_build", made_elsewhere)
    before = torch.get_rng_state()
    load_head(tmp_path)
    monkeypatch.setattr(type(model), "post_init", made_elsewhere)
    model.model.embed_tokens.register_buffer("scale", torch.ones((), dtype=torch.bfloat16))
    convert_buffers(model, torch.float32)
    assert len(made) == 2 and {layer.weight.device.type for layer in made} == {"cpu"}
    assert torch.equal(before, torch.get_rng_state()) is False  # these were drawn, those of the head were not


def test_threads_load_one_after_the_other(tmp_path):
    save_pair(tmp_path)

    def load():
        return eagle_fsd.load(tmp_path / "target", tmp_path / "head", device="cpu", tree=None)

    expected = ours(load())
    pairs = at_once(*3 * [load], times=2)
    assert [ours(pair) for some in pairs for pair in some] == 6 * [expected]
    assert torch.get_default_dtype() == torch.float32


@pytest.mark.parametrize("options", [{}, {"threshold": 0.3}, {"temperature": 0.8, "seed": 1, "threshold": 0.2}],
                         ids=["greedy", "fuzzy", "sampled"])
def test_decoding_while_transformers_loads_in_another_thread(options):
    """It sets the default dtype, which belongs to the process."""
    model = tiny_target()
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        pair = EagleModel.from_parts(model, tiny_head(model))
        joined = []
        with pytest.MonkeyPatch.context() as context:
            context.setattr("eagle_fsd.decoding.cycle.join_copies", lambda *given, joined=joined: (
                joined.append(join_copies(*given)), joined[-1])[1])
            try:
                torch.set_default_dtype(dtype)
                output = eagle_fsd.generate(PROMPT * 3, pair, max_new_tokens=40, tree=TREE, **options)
            finally:
                torch.set_default_dtype(torch.float32)
        assert joined and {tree.scores.dtype for tree in joined} == {torch.float32}
        found.append((output.token_ids, output.stats.accepted_lengths, output.receipts))
    assert found[0] == found[1]


def test_the_default_pair_is_loaded_once(monkeypatch):
    loaded = []
    monkeypatch.setattr(eagle_fsd.loading.load, "load", lambda: loaded.append(object()) or loaded[-1])
    default_model = eagle_fsd.loading.load.default_model
    default_model.__wrapped__.cache_clear()
    assert at_once(*3 * [default_model], times=1) == 3 * [loaded] and len(loaded) == 1
    default_model.__wrapped__.cache_clear()


def test_layers_are_read_for_the_thread_that_asks():
    """Two pairs over one model, `custom_generate` and `model.generate`, all at once: each forward its own features."""
    model = deep_target("gemma2")
    head, expected = good_head(model), plain(model)
    pairs = [EagleModel.from_parts(model, head) for _ in range(2)]
    assert not any(pair.target.fused for pair in pairs)

    def inside():
        return model.generate(IDS, custom_generate=custom_generate, draft=head, max_new_tokens=NEW, do_sample=False,
                              tree=TREE)[0, len(PROMPT) :].tolist()

    works = lambda: ours(pairs[0]), lambda: ours(pairs[1]), inside, lambda: plain(model)
    assert at_once(*works, times=8) == 4 * [8 * [expected]]


def test_our_hooks_are_no_reason_for_the_stock_decoder():
    """They stay on the model, in copies and pickles, too."""
    model = deep_target()
    head = good_head(model)
    stock = EagleModel.from_parts(model, head, fused=False)
    expected, features = ours(stock), stock.target.features(IDS)
    assert len(model.model.layers[2]._forward_pre_hooks) == 1
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        pair = EagleModel.from_parts(each, head)
        assert pair.target.fused is not None and ours(pair) == expected
        pair.target.feature_layers = stock.target.feature_layers
        torch.testing.assert_close(pair.target.features(IDS), features)


# Changes --------------------------------------------------------------------------------------------------------


def hook(model, module) -> None:
    module.register_forward_hook(lambda _, __, out: -out)


def replaced_mlp(model):
    model.model.layers[1].mlp = copy.deepcopy(model.model.layers[1].mlp)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight.neg_()


def own_forward(model):
    stock = model.model.layers[1].mlp.forward
    model.model.layers[1].mlp.forward = lambda hidden: -stock(hidden)


def all_hooked(model):
    def negated(module, _, out):
        return -out if module is model.model.layers[1].mlp else None

    model.handle = nn.modules.module.register_module_forward_hook(negated)


def embeddings(model):
    new = nn.Embedding(VOCAB, 16)
    with torch.no_grad():
        new.weight.copy_(model.get_input_embeddings().weight.flip(0))
    model.set_input_embeddings(new)


CHANGES = {
    "a hook": lambda model: hook(model, model.model.layers[1].mlp),
    "a hook of a linear layer": lambda model: hook(model, model.model.layers[1].mlp.down_proj),
    "a hook of all modules": all_hooked,
    "a module": replaced_mlp,
    "an activation": lambda model: setattr(model.model.layers[1].mlp, "act_fn", nn.Tanh()),
    "a forward": own_forward,
    "a scale": lambda model: setattr(model.model.layers[1].self_attn, "scaling", 5.0),
    "an epsilon": lambda model: setattr(model.model.layers[1].input_layernorm, "variance_epsilon", 1e4),
    "frequencies": lambda model: model.model.rotary_emb.inv_freq.mul_(3.0),
    "embeddings": embeddings,
    "a norm": lambda model: setattr(model.model.layers[1], "post_attention_layernorm", nn.Identity()),
}


@pytest.mark.parametrize("packed", [False, True], ids=["plain", "packed"])
@pytest.mark.parametrize("change", CHANGES)
def test_changes_after_from_parts_count(change, packed):
    """Texts are those of `model.generate`, in the pair that exists and in a new one."""
    model = tiny_target().bfloat16().float()  # float16 represents these weights
    pair = EagleModel.from_parts(model, tiny_head(model))
    if packed:
        pair.prepack()
        assert packed_form(model) or not has_half_kernels()
    before = ours(pair)
    assert before == plain(model) and pair.target.fused
    CHANGES[change](model)
    try:
        expected = plain(model)
        assert ours(pair) == expected != before
        assert ours(EagleModel.from_parts(model, pair.draft)) == expected
    finally:
        if hasattr(model, "handle"):
            model.handle.remove()


@pytest.mark.parametrize("change", ["a hook", "a module", "a forward"])
def test_changes_of_a_draft_model_and_of_a_head_count(change):
    target = tiny_target()
    expected = plain(target)
    small = small_model(target)
    pair = EagleModel.from_parts(target, small)
    before = accepted(pair)
    CHANGES[change](small)
    assert accepted(pair) == accepted(EagleModel.from_parts(target, small, fused=False)) != before
    head = tiny_head(target)
    pair = EagleModel.from_parts(target, head)
    before = accepted(pair)
    head.model = nn.Module()  # `CHANGES` look the layer up there
    head.model.layers = [None, head.layers[0]]
    CHANGES[change](head)
    assert pair.draft.fused and accepted(pair) != before and not pair.draft.fused
    assert ours(pair) == expected


def test_the_fused_decoder_is_back_when_a_hook_is_gone(monkeypatch):
    compared, compare = [], TreeCheck.compare
    monkeypatch.setattr(TreeCheck, "compare", lambda self, *forward: compared.append(self) or compare(self, *forward))
    model = tiny_target()
    pair = EagleModel.from_parts(model, tiny_head(model))
    expected = ours(pair)
    for _ in range(2):
        handle = model.model.layers[0].register_forward_hook(lambda *_: None)
        assert ours(pair) == expected and pair.target.stock_reason == "its modules have hooks"
        handle.remove()
        assert ours(pair) == expected and pair.target.computed_by == "fused"
    assert len(compared) == 3  # at first and with each hook; without one it had passed


def test_what_from_parts_would_refuse_is_refused_later():
    model = tiny_target()
    pair = EagleModel.from_parts(model, tiny_head(model))
    handle = model.register_forward_hook(lambda _, __, out: out.__class__(logits=2 * out.logits))
    for _ in range(2):
        with pytest.raises(ValueError, match="its logits of a tree are not those of its own forward"):
            ours(pair)
    handle.remove()
    assert ours(pair) == plain(model)
    model.set_attn_implementation("flex_attention")
    with pytest.raises(ValueError, match="does not accept a tree mask"):
        ours(pair)
    model.set_attn_implementation("sdpa")
    model.resize_token_embeddings(VOCAB + 3, mean_resizing=False)
    for _ in range(2):
        with pytest.raises(ValueError, match=f"its vocabulary size is {VOCAB}, the target's is {VOCAB + 3}"):
            ours(pair)


@pytest.mark.parametrize("change", ["a hook", "a module", "weights"])
def test_sessions_begin_anew_after_a_change(change):
    """Their caches have keys and values of the model as it was."""
    model = tiny_target()
    pair, session, first = EagleModel.from_parts(model, tiny_head(model)), Session(), model.model.layers[0]
    ours(pair, session=session)
    before = session.row.caches[0]
    assert ours(pair, session=session) == plain(model) and session.row.caches[0] is before
    if change == "weights":
        with torch.no_grad():
            first.self_attn.v_proj.weight.neg_()
    elif change == "a hook":
        hook(model, first.self_attn.v_proj)
    else:
        first.self_attn.v_proj = nn.Linear(16, 8, bias=False)
    assert ours(pair, session=session) == plain(model) and session.row.caches[0] is not before

@pytest.mark.skipif(not torch.cpu._is_vnni_supported(), reason="int8 needs VNNI")
def test_changes_of_an_int8_model_count_without_the_check_that_int8_fails():
    model = tiny_target()
    pair = EagleModel.from_parts(model, tiny_head(model))
    pair.prepack("int8")
    before = ours(pair)
    assert pair.target.fused
    CHANGES["a hook"](model)
    assert ours(pair) == plain(model) != before
    assert pair.target.stock_reason == "it has changed since it was packed as int8"


def test_a_hooked_linear_layer_is_not_packed():
    model = tiny_target().bfloat16().float()
    hook(model, model.model.layers[1].mlp.down_proj)
    expected = plain(model)
    pair = EagleModel.from_parts(model, tiny_head(model))
    pair.prepack()
    assert type(model.model.layers[1].mlp.down_proj) is nn.Linear and ours(pair) == plain(model) == expected


# Drafters of several targets --------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["embeddings", "rows", "bfloat16"])
def test_a_head_that_drafts_for_another_target_stays_as_it_is(kind):
    model, other = tiny_target(), tiny_target(seed=1)
    head = tiny_head(model)
    if kind == "embeddings":
        head.share_embeddings(None)
    if kind == "rows":
        head.limit_vocabulary(torch.arange(3, 25))
    if kind == "bfloat16":
        other = other.bfloat16()
    first = EagleModel.from_parts(model, head)
    assert first.draft is head
    alone, before = accepted(EagleModel.from_parts(other, copy.deepcopy(head))), accepted(first)
    second = EagleModel.from_parts(other, head)
    assert accepted(first) == before and accepted(second) == alone
    assert first.draft is head and second.draft is not head
    assert (second.draft.fc is head.fc) == (kind != "bfloat16")
    assert (head.dtype, second.draft.dtype) == (model.dtype, other.dtype)
    assert ours(first) == plain(model)
    del first
    assert EagleModel.from_parts(other, head).draft is head  # no other pair has it any more


def test_a_draft_model_of_two_targets():
    """Whose vocabularies are padded differently."""
    target, wide = tiny_target(), tiny_target(vocab_size=VOCAB + 8)
    draft = DraftModel(tiny_target(vocab_size=VOCAB + 8, seed=3))
    first = EagleModel.from_parts(target, draft)
    before = accepted(first)
    second = EagleModel.from_parts(wide, draft)
    assert (first.draft.draft_vocab_size, second.draft.draft_vocab_size) == (VOCAB, VOCAB + 8)
    assert accepted(first) == before and ours(first) == plain(target) and ours(second) == plain(wide)
