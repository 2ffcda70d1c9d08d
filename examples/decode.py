"""The method in one file: EAGLE-2 draft trees with fuzzy acceptance, in plain PyTorch and transformers.

    python examples/decode.py --target DIR --draft DIR --prompt "Why is the sky blue?" --threshold 0.3

A draft head, one small layer that reads the target's hidden states, drafts a tree of next tokens (EAGLE-2, arXiv
2406.16858). One forward of the target verifies the whole tree. A drafted token is accepted if the target itself draws
it. With a threshold it is also accepted if the next-token distributions of target and draft are close (FSD, arXiv
2502.20704). Batch of one; written to be clear, not fast. docs/method.md names the library file for each part.

Shapes: L positions of the text before the root, N tree nodes, K children per node and nodes per level, F nodes of the
level that is expanded (1, then K), S scored nodes, A accepted draft tokens, D hidden size, V vocabulary.
"""

import argparse
from dataclasses import dataclass
from typing import NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, LlamaConfig, LlamaModel


@dataclass(frozen=True)
class Options:
    nodes: int = 60  # N, verified per cycle, the root included
    depth: int = 8  # levels below the root
    top_k: int = 10  # K
    threshold: float = 0.0  # the largest divergence at which fuzzy tokens are accepted; 0 is lossless
    guard: float = 0.7  # a fuzzy token needs at least 1 - guard times the probability of the target's best token
    temperature: float = 0.0  # 0 is greedy
    seed: int = 0
    max_new_tokens: int = 128


class Token(NamedTuple):
    id: int
    fuzzy: bool  # accepted although the target drew another token


class Tree(NamedTuple):
    """Drafted tokens, parents before their children. The root, node 0, is the last emitted token."""

    tokens: Tensor  # [N] long
    parents: Tensor  # [N] long; the root is its own parent
    depths: Tensor  # [N] long, 0 for the root
    ancestors: Tensor  # [N, N] bool: node j is an ancestor of node i, or i itself
    draft_logits: dict[int, Tensor]  # by expanded node, [V] of the token after it


@torch.inference_mode()
def decode(target, head, prompt: list[int], options: Options, ends=frozenset()) -> tuple[list[Token], list[int]]:
    """Generate the answer to a prompt of token ids.

    Args:
        target: a causal LM of transformers. head: from `load_head`. ends: token ids that end the answer.

    Returns:
        The new tokens, and the number of drafted tokens that each forward of the target accepted.
    """
    decoder, embed, lm_head = target.get_decoder(), target.get_input_embeddings(), target.get_output_embeddings()
    target_cache, head_cache = DynamicCache(), DynamicCache()

    # Prefill: the target reads the prompt and draws the first token. Features are its last hidden states.
    tokens = torch.tensor(prompt)  # [L]
    features = forward(decoder, embed(tokens), torch.arange(len(prompt)), causal(len(prompt)), target_cache)  # [L, D]
    first = int(perturb(lm_head(features[-1]).float(), len(prompt), options).argmax())
    answer, accepted = [Token(first, False)], []
    tokens = torch.tensor([*prompt[1:], first])  # [L], the head's next input: each token with the feature before it

    while len(answer) < options.max_new_tokens and not any(token.id in ends for token in answer):
        length = target_cache.get_seq_length()  # L, the position of the root, which is not in the cache
        # Draft (EAGLE-2, section 4).
        tree = draft_tree(head, lm_head, features, tokens, head_cache, options)
        # Verify: each node sees the text, its ancestors and itself (tree attention: SpecInfer, arXiv 2305.09781).
        node_features = forward(decoder, embed(tree.tokens), length + tree.depths, tree.ancestors, target_cache)
        node_logits = lm_head(node_features).float()  # [N, V] of [N, D]
        # Accept.
        path, emitted = accept(tree, node_logits, length, options)  # A + 1 nodes, and a token drawn at each
        # Commit: only the path stays in the cache.
        keep_positions(target_cache, torch.tensor([*range(length), *(length + node for node in path)]))
        features, tokens = node_features[path], torch.tensor([token.id for token in emitted])  # [A + 1, D], [A + 1]
        answer += emitted
        accepted.append(len(path) - 1)

    end = next((count for count, token in enumerate(answer, 1) if token.id in ends), len(answer))
    return answer[: min(end, options.max_new_tokens)], accepted


def draft_tree(
    head: LlamaModel,
    lm_head: nn.Module,
    features: Tensor,  # [A + 1, D] (at first [L, D]), the target's at the positions before `tokens`
    tokens: Tensor,  # [A + 1] (at first [L]), emitted in the last cycle; the last one is the root
    cache: DynamicCache,
    options: Options,
) -> Tree:
    """Grow a tree by the draft's confidence, then keep its best nodes. Only `tokens` stay in the cache."""
    k, start = options.top_k, cache.get_seq_length()
    positions = start + torch.arange(len(tokens))
    predicted = predict(head, features, tokens, positions, causal(len(tokens)), cache)[-1:]  # [1, D], at the root
    length = cache.get_seq_length()  # L

    # Expansion (EAGLE-2, section 4.1). A node's confidence is the product of the draft's probabilities on its path,
    # an estimate of its acceptance probability; its score is the logarithm.
    frontier, frontier_scores = torch.tensor([0]), torch.zeros(1)  # [F], numbers of scored nodes; [F]
    visible = torch.ones(1, 0, dtype=torch.bool)  # [F, nodes in the cache]
    levels, scored, draft_logits = [(tokens[-1:], torch.tensor([0]), torch.tensor([0]), frontier_scores)], 1, {}
    for depth in range(1, options.depth + 1):
        logits = lm_head(predicted).float()  # [F, V], of tokens of this depth
        draft_logits |= dict(zip(frontier.tolist(), logits, strict=True))
        # When sampling, the draft uses the target's noise, so that the target is likely to draw its children: Gumbel
        # coupling (arXiv 2408.07978), with a weight below 1 because the draft errs.
        steps, children = perturb(logits, length + depth, options, weight=0.7).log_softmax(-1).topk(k)  # [F, K]
        scores, children = (frontier_scores[:, None] + steps).flatten(), children.flatten()  # [F * K]
        levels.append((children, frontier.repeat_interleave(k), torch.full_like(children, depth), scores))
        if depth < options.depth:  # expand the K best of this level next, in one forward of the head
            frontier_scores, best = scores.topk(k)  # [K]
            frontier, scored = scored + best, scored + len(scores)
            above = best // k  # [K], rows of the level above
            visible = torch.cat([visible[above], torch.eye(k, dtype=torch.bool)], 1)  # [K, depth * K]
            positions = torch.full((k,), length + depth - 1)
            predicted = predict(head, predicted[above], children[best], positions, visible, cache)  # [K, D]
    keep_positions(cache, torch.arange(length))

    # Reranking (section 4.2): the N best of all scored nodes. They form a tree, because no score exceeds the parent's,
    # and the stable sort keeps the parent first if the two are equal.
    tokens, parents, depths, scores = (torch.cat(column) for column in zip(*levels, strict=True))  # [S]
    kept = scores.sort(descending=True, stable=True).indices[: options.nodes].sort().values  # [N]
    parents = torch.searchsorted(kept, parents[kept])  # [N], indices into `kept`
    ancestors = torch.eye(len(kept), dtype=torch.bool)  # [N, N]
    for node in range(1, len(kept)):
        ancestors[node] |= ancestors[parents[node]]
    expanded = {node: draft_logits[number] for node, number in enumerate(kept.tolist()) if number in draft_logits}
    return Tree(tokens[kept], parents, depths[kept], ancestors, expanded)


def accept(
    tree: Tree,
    node_logits: Tensor,  # [N, V], the target's
    length: int,  # L, the position of the root
    options: Options,
) -> tuple[list[int], list[Token]]:
    """Walk down from the root while the token drawn at a node is one of its children.

    Returns the nodes of the path, the root first, and the token drawn at each. The last token is no child.
    """
    path, emitted = [0], []
    while True:
        node = path[-1]
        logits = node_logits[node]  # [V]
        drawn = perturb(logits, length + len(path), options)  # [V]
        below = ((tree.parents == node) & (tree.depths > 0)).nonzero()[:, 0].tolist()
        children = dict(zip(tree.tokens[below].tolist(), below, strict=True))  # nodes by token
        # Exact: the token of plain decoding, whatever was drafted. EAGLE-2's test, child by child, has the same law.
        token, fuzzy = int(drawn.argmax()), False
        if options.threshold > 0 and children and token not in children:
            # Fuzzy (FSD): accept a child if Div(target, draft) <= threshold. The children of a node pass or fail
            # together; the target chooses among those inside the guard.
            probs = logits.softmax(-1)  # [V]
            inside = [child for child in children if probs[child] >= (1 - options.guard) * probs.max()]
            if inside and js(probs, tree.draft_logits[node].softmax(-1)) <= options.threshold:
                token, fuzzy = max(inside, key=lambda child: drawn[child].item()), True
        emitted.append(Token(token, fuzzy))
        if token not in children:
            return path, emitted
        path.append(children[token])


def js(target_probs: Tensor, draft_probs: Tensor) -> Tensor:  # [V], [V] -> []
    """Jensen-Shannon divergence in nats: the entropy of the mean, less the mean of the entropies."""
    entropy, mean = torch.special.entr, (target_probs + draft_probs) / 2
    return entropy(mean).sum() - (entropy(target_probs).sum() + entropy(draft_probs).sum()) / 2


def perturb(logits: Tensor, position: int, options: Options, weight: float = 1.0) -> Tensor:  # [..., V] -> [..., V]
    """Logits whose argmax is a sample of softmax(logits / temperature) (Gumbel-max trick); unchanged if greedy.

    The noise depends on seed and position alone. So lossless decoding emits the tokens of plain sampling with the same
    noise, and the draft may use it, as the target's draw does not depend on the draft.
    """
    if options.temperature == 0:
        return logits
    return logits + weight * options.temperature * gumbel(options.seed, position, logits.shape[-1]).to(logits.device)


def gumbel(seed: int, position: int, size: int) -> Tensor:  # [V]
    generator = torch.Generator("cpu").manual_seed(hash((seed, position)))
    return -torch.empty(size, device="cpu").exponential_(generator=generator).log()


def predict(head: LlamaModel, features: Tensor, tokens: Tensor, positions: Tensor, visible: Tensor, cache) -> Tensor:
    """Features [N, D] of N tokens from the features [N, D] of the positions before them, the target's or predicted
    (EAGLE, arXiv 2401.15077, section 4.1). Other shapes as in `forward`."""
    return forward(head, head.fc(torch.cat([head.embed_tokens(tokens), features], -1)), positions, visible, cache)


def forward(
    model: nn.Module,  # the target's decoder, or the head
    embeddings: Tensor,  # [N, D]
    positions: Tensor,  # [N]
    visible: Tensor,  # [N, M] bool, of the last M keys, the last N of which are these; earlier keys are visible
    cache: DynamicCache,
) -> Tensor:  # [N, D]
    keys = cache.get_seq_length() + len(embeddings)
    mask = embeddings.new_zeros(len(embeddings), keys)  # [N, keys], added to the attention scores
    mask[:, keys - visible.shape[1] :].masked_fill_(~visible, torch.finfo(mask.dtype).min)
    # transformers uses a 4D mask unchanged. Positional arguments, since the cache's keyword depends on the version.
    return model(None, mask[None, None], positions[None], cache, embeddings[None]).last_hidden_state[0]


def causal(count: int) -> Tensor:  # [N, N] bool
    return torch.ones(count, count, dtype=torch.bool).tril()


def keep_positions(cache: DynamicCache, positions: Tensor) -> None:  # long, those to keep
    for layer in cache.layers:  # keys and values [1, heads, positions, head size]
        layer.keys, layer.values = layer.keys[:, :, positions], layer.values[:, :, positions]


def load_head(directory: str, target) -> LlamaModel:
    """An EAGLE-1/2 head in its published layout: `fc` over [embedding, feature], then one Llama layer without input
    norm, and no final norm. The target's output layer turns predicted features into logits."""
    config, weights = LlamaConfig.from_pretrained(directory), load_file(f"{directory}/model.safetensors")
    config.attention_bias = getattr(config, "qkv_bias", False)
    head = LlamaModel(config).eval()
    head.layers[0].input_layernorm = head.norm = nn.Identity()
    head.layers[0].self_attn.o_proj.bias = None
    head.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias="fc.bias" in weights)
    weights.setdefault("embed_tokens.weight", target.get_input_embeddings().weight)
    head.load_state_dict({name: weight.to(target.dtype) for name, weight in weights.items()}, assign=True)
    return head.to(target.device)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name in ("target", "draft", "prompt"):
        parser.add_argument(f"--{name}", required=True)
    for name, default in vars(Options()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    parser.add_argument("--device", default="cpu")
    args = vars(parser.parse_args(argv))
    folder, draft, prompt, device = (args.pop(name) for name in ("target", "draft", "prompt", "device"))

    with torch.device(device):
        tokenizer, target = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder).eval()
        if tokenizer.chat_template:
            chat = [{"role": "user", "content": prompt}]
            ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        else:
            ids = tokenizer(prompt).input_ids
        eos = target.generation_config.eos_token_id
        ends = frozenset(eos if isinstance(eos, list) else [eos])
        answer, accepted = decode(target.to(device), load_head(draft, target), ids, Options(**args), ends)
    print(tokenizer.decode([token.id for token in answer], skip_special_tokens=True))
    print(f"{len(answer)} tokens, {sum(token.fuzzy for token in answer)} of them fuzzy, "
          f"{sum(accepted) / max(len(accepted), 1) + 1:.2f} per forward of the target")


if __name__ == "__main__":
    main()
