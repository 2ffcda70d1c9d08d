"""A slow and obvious EAGLE-2 cycle: one node at a time, everything recomputed, without caches and tree masks.

A tree node is its path: the tuple of token ids from the root (excluded) to the node. D hidden size, V vocabulary.
"""

import math
from dataclasses import dataclass, field

import torch


def forward(model, tokens):
    """Features [T, D] and logits [T, V] of a stock model over a list of T tokens."""
    ids = torch.tensor([tokens])
    return (
        model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state[0],
        model(input_ids=ids, use_cache=False).logits[0].float(),
    )


def rotate(vector, position, theta):
    """Rotary embedding of one head's [d] at a position, first half paired with second half."""
    half = len(vector) // 2
    angles = torch.tensor([position * theta ** (-i / half) for i in range(half)])
    first, second = vector[:half], vector[half:]
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()])


def predict(head, features, tokens):
    """The feature [D] that the head predicts for the last of T tokens, from T features [D], each from the position
    before its token.
    """
    config, layer = head.config, head.layers[0]
    attention, mlp, norm = layer.self_attn, layer.mlp, layer.post_attention_layernorm
    theta = config.rope_parameters["rope_theta"]
    inputs = [
        head.fc(torch.cat([head.embed_tokens.weight[token], feature]))
        for token, feature in zip(tokens, features, strict=True)
    ]

    def split(projected, heads):
        return projected.view(heads, -1)

    last = len(inputs) - 1
    queries = split(attention.q_proj(inputs[last]), config.num_attention_heads)
    keys = [split(attention.k_proj(x), config.num_key_value_heads) for x in inputs]
    values = [split(attention.v_proj(x), config.num_key_value_heads) for x in inputs]
    group = config.num_attention_heads // config.num_key_value_heads
    mixed = []
    for number, query in enumerate(queries):
        query = rotate(query, last, theta)
        products = [query @ rotate(key[number // group], j, theta) for j, key in enumerate(keys)]
        weights = (torch.stack(products) / math.sqrt(len(query))).softmax(0)
        mixed.append(sum(weight * value[number // group] for weight, value in zip(weights, values, strict=True)))
    hidden = inputs[last] + attention.o_proj(torch.cat(mixed))
    scaled = hidden * (hidden.pow(2).mean() + config.rms_norm_eps).rsqrt() * norm.weight
    return hidden + mlp.down_proj(torch.nn.functional.silu(mlp.gate_proj(scaled)) * mlp.up_proj(scaled))


@dataclass
class Tree:
    """paths: the kept nodes in order, the root () first; logits: the draft's logits [V] at every expanded node."""

    paths: list = field(default_factory=lambda: [()])
    scores: dict = field(default_factory=lambda: {(): torch.tensor(0.0)})
    logits: dict = field(default_factory=dict)


def draft(head, model, features, tokens, config, perturbed=lambda logits, depth: logits):
    """The tree below tokens[-1]; `features` are the target's at the positions before `tokens`.

    perturbed: maps logits [V] and depth to the logits that select and score a node's children.
    """
    tree, scored, predicted = Tree(), [], {}
    frontier = [()]
    for _ in range(config.depth):
        children = []
        for path in frontier:
            drafted = [predicted[path[:n]] for n in range(len(path))]
            predicted[path] = predict(head, [*features, *drafted], [*tokens, *path])
            logits = softcapped(model, model.get_output_embeddings()(predicted[path]))
            tree.logits[path] = logits
            logits = perturbed(logits, len(path)) / config.draft_temperature
            best = sorted(range(len(logits)), key=lambda token: (-logits[token].item(), token))[: config.top_k]
            for token in best:
                log_prob = logits[token] - logits.logsumexp(0)  # float32, to round to 0 like the library
                tree.scores[(*path, token)] = tree.scores[path] + log_prob
                children.append((*path, token))
        scored += children
        frontier = sorted(children, key=lambda path: -tree.scores[path].item())[: config.top_k]  # stable
    numbers = sorted(range(len(scored)), key=lambda number: (-tree.scores[scored[number]].item(), number))
    tree.paths += [scored[number] for number in sorted(numbers[: config.total_tokens - 1])]
    return tree


def softcapped(model, logits):
    cap = getattr(model.config, "final_logit_softcapping", None)
    return logits if cap is None else torch.tanh(logits / cap) * cap


@torch.no_grad()
def decode(model, head, prompt, config, cycles):
    """Decode greedily; return the first token, and (tree, accepted path, next token) of each cycle."""
    tokens = list(prompt)
    tokens.append(forward(model, tokens)[1][-1].argmax().item())
    first, done = tokens[-1], []
    for _ in range(cycles):
        tree = draft(head, model, list(forward(model, tokens[:-1])[0]), tokens[1:], config)
        path = ()
        while True:
            token = forward(model, [*tokens, *path])[1][-1].argmax().item()
            if (*path, token) not in tree.paths:
                break
            path = (*path, token)
        done.append((tree, path, token))
        tokens += [*path, token]
    return first, done
