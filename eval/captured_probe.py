"""What a captured cycle would take: three programs of fixed shapes as CUDA graphs, 8B shape, random weights."""
import json, statistics, sys, time
import torch
from torch import nn
from eval.forwards import build_pair
from eagle_fsd.models.fused import FusedDecoder, FusedLayer, attention_over
from eagle_fsd.models.graphs import Places
from eagle_fsd.models.attention import without_cudnn

out, shape = sys.argv[1], sys.argv[2]
dev = torch.device("cuda" if torch.cuda.is_available() else "cpu")
cuda = dev.type == "cuda"
dtype = torch.bfloat16 if cuda else torch.float32
model = build_pair(shape, dtype, dev)
target, head = model.target, model.draft
fused = target.fused
assert fused is not None, target.stock_because
first = fused.layers[0]
hl, hr = head.fused
results = {"torch": torch.__version__, "device": torch.cuda.get_device_name() if cuda else "cpu", "rows": []}

def note(**row):
    results["rows"].append(row); print(row, flush=True)
    json.dump(results, open(out, "w"), indent=1)

def sync():
    if cuda: torch.cuda.synchronize()

class Captured:
    def __init__(self, fn):
        self.fn, self.graph = fn, None
        t = time.perf_counter()
        if cuda:
            side = torch.cuda.Stream(); side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(2): fn()
            torch.cuda.current_stream().wait_stream(side)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
                self.out = fn()
        sync(); self.seconds = time.perf_counter() - t
    def __call__(self):
        if self.graph is not None: self.graph.replay()
        else: self.fn()

def ms(fn, n=12):
    for _ in range(3): fn()
    sync(); taken = []
    for _ in range(n):
        t = time.perf_counter(); fn(); sync(); taken.append(1000 * (time.perf_counter() - t))
    return round(statistics.median(taken), 3)

def device_ms(fn, n=12):  # time on the device alone, from events
    if not cuda: return None
    for _ in range(3): fn()
    a, b = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    sync(); a.record()
    for _ in range(n): fn()
    b.record(); sync()
    return round(a.elapsed_time(b) / n, 3)

def verify_program(R, N, C, kind):
    tokens = torch.randint(fused.decoder.embed_tokens.num_embeddings, (R, N), device=dev)
    positions = torch.arange(256, 256 + N, device=dev).expand(R, -1).contiguous()
    storage = torch.zeros(len(fused.layers), 2, R, first.key_heads, C, first.size, device=dev, dtype=dtype)
    places = torch.arange(256, 256 + N, device=dev)
    mask = torch.full((R, 1, N, C), torch.finfo(dtype).min, device=dev, dtype=dtype); mask[..., :256] = 0
    mask[..., 256:256 + N] = torch.triu(torch.full((N, N), torch.finfo(dtype).min, device=dev, dtype=dtype), 1)
    groups = first.heads // first.key_heads
    if kind == "masked":
        seen = attention_over(mask, False, groups)
    elif kind == "gqa":
        def seen(q, k, v, scale):
            o = nn.functional.scaled_dot_product_attention(q.transpose(1, 2), k, v, attn_mask=mask, scale=scale, enable_gqa=True)
            return o.transpose(1, 2).flatten(2)
    elif kind == "matmul":
        big = mask.repeat(1, 1, groups, 1)
        def seen(q, k, v, scale):
            b, n, h, s = q.shape
            q = q.view(b, n, -1, groups, s).permute(0, 2, 3, 1, 4).reshape(b, -1, groups * n, s)
            w = ((q @ k.mT) * scale + big).float().softmax(-1).to(v.dtype)
            return (w @ v).unflatten(2, (groups, n)).permute(0, 3, 1, 2, 4).reshape(b, n, -1)
    elif kind == "none":  # no attention at all: what remains is the products
        def seen(q, k, v, scale): return q.flatten(2)
    written = [Places(l, places) for l in storage.unbind()]
    held = [tuple(l.unbind()) for l in storage.unbind()]
    def run():
        rotation = fused.rotary(positions, 0, N, 4096, fused.decoder.embed_tokens.weight)
        features = fused.compute(tokens, rotation, seen, written, held, ())
        return target.logits(features)
    return run

def draft_program(R, K, depth, C):
    """Reads depth + 1 accepted tokens, grows `depth` levels of K nodes: static masks and places."""
    T = depth + 1
    store = torch.zeros(2, R, hl.key_heads, C + T + K * depth, hl.size, device=dev, dtype=dtype)
    M = store.shape[3]
    feats = torch.randn(R, T, head.config.hidden_size, device=dev, dtype=dtype)
    toks = torch.randint(1000 if shape != "tiny" else 256, (R, T), device=dev)
    base = torch.full((R,), 256, device=dev)
    low = torch.finfo(dtype).min
    def layer(x, tokens, positions, mask, places):
        hidden = head.fc(torch.cat([head.embed_tokens(tokens), x], -1))
        rotation = hr(positions, 0, 0, 4096, hidden)
        h = hidden.to(torch.float32, copy=True)
        hl(h, hidden, rotation, attention_over(mask, False, hl.heads // hl.key_heads), Places(store, places), *store.unbind())
        return h.to(dtype)
    col = torch.arange(M, device=dev)
    def run():
        pos = base[:, None] + torch.arange(T, device=dev)
        m = torch.where(col[None, None, None] <= pos[:, None, :, None], 0.0, low).to(dtype)
        out = layer(feats, toks, pos, m, torch.arange(256, 256 + T, device=dev))[:, -1:]
        mask = torch.where(col < 256 + T, 0.0, low).to(dtype).expand(R, 1, K, M)
        logits = target.logits(out)
        lp, tok = logits.topk(K)
        lp = lp - logits.logsumexp(-1, keepdim=True)
        scores, tok = lp[:, 0], tok[:, 0]
        x = out.expand(-1, K, -1)
        all_scores, all_tok = [scores], [tok]
        start = C + T - T
        eye = torch.eye(K, device=dev, dtype=torch.bool)
        for level in range(depth - 1):
            s = 256 + T + level * K
            own = torch.zeros(R, 1, K, M, device=dev, dtype=torch.bool); own[..., s:s + K] = eye
            mask = mask.masked_fill(own, 0)
            x = layer(x, tok, base[:, None].expand(-1, K) + T + level, mask, torch.arange(s, s + K, device=dev))
            logits = target.logits(x)
            lp, t = logits.topk(K)
            lp = lp - logits.logsumexp(-1, keepdim=True) + scores[..., None]
            all_scores.append(lp.flatten(1)); all_tok.append(t.flatten(1))
            scores, best = lp.flatten(1).topk(K)
            tok = t.flatten(1).gather(1, best)
            par = best // K
            x = x.gather(1, par[..., None].expand_as(x))
            mask = mask.gather(2, par[:, None, :, None].expand_as(mask))
        s = torch.cat(all_scores, 1)
        order = s.argsort(dim=1, descending=True, stable=True)[:, :59].sort(1).values
        return torch.cat(all_tok, 1).gather(1, order)
    return run

def walk_program(R, N, depth, C, V):
    logits = torch.randn(R, N, V, device=dev)
    parents = torch.randint(N, (R, N), device=dev); toks = torch.randint(V, (R, N), device=dev)
    storage = torch.zeros(len(fused.layers), 2, R, first.key_heads, C, first.size, device=dev, dtype=dtype)
    idx = torch.arange(N, device=dev)
    def run():
        best = logits.argmax(-1)  # [R, N]
        at = torch.zeros(R, 1, dtype=torch.long, device=dev); alive = torch.ones(R, 1, dtype=torch.bool, device=dev)
        path = [at]
        for _ in range(depth):
            y = best.gather(1, at)
            hit = (parents == at) & (toks == y) & (idx > at)
            found = hit.any(1, keepdim=True) & alive
            at = torch.where(found, hit.int().argmax(1, keepdim=True), at); alive = found
            path.append(torch.where(found, at, -1))
        p = torch.cat(path, 1)  # [R, depth+1]
        src = (p.clamp_min(0) + 256)[None, None, :, None, :, None].expand(*storage.shape[:2], R, first.key_heads, depth + 1, first.size)
        kept = storage.gather(4, src)
        storage[:, :, :, :, 256:256 + depth + 1] = kept
        return torch.cat([p, best.gather(1, p.clamp_min(0))], 1)
    return run

with torch.no_grad(), without_cudnn():
    weights = sum(p.numel() for p in target.model.parameters()) * target.model.lm_head.weight.element_size()
    note(part="bytes of weights", value=weights)
    V = target.vocab_size
    for R, N, C, kinds in ((1, 1, 512, ("masked", "gqa", "matmul", "none")), (1, 60, 512, ("masked", "gqa", "matmul", "none")),
                    (1, 60, 2048, ("masked", "gqa", "matmul")), (1, 1, 2048, ("masked", "matmul")), (1, 16, 512, ("masked",)), (1, 128, 512, ("masked",)),
                    (8, 1, 512, ("masked",)), (8, 16, 512, ("masked",)), (8, 60, 512, ("masked", "matmul"))):
        for kind in kinds:
            try:
                fn = verify_program(R, N, C, kind); g = Captured(fn)
                note(part="verify", rows=R, nodes=N, bucket=C, attention=kind, captured=ms(g), device=device_ms(g), eager=ms(fn, 4), capture_s=round(g.seconds, 3))
                del g, fn
            except Exception as e:
                note(part="verify", rows=R, nodes=N, bucket=C, attention=kind, error=repr(e)[:200])
    for R, K, depth in ((1, 10, 6), (1, 4, 5), (8, 10, 6)):
        try:
            fn = draft_program(R, K, depth, 512); g = Captured(fn)
            note(part="draft", rows=R, top_k=K, depth=depth, captured=ms(g), device=device_ms(g), eager=ms(fn, 4), capture_s=round(g.seconds, 3))
        except Exception as e:
            note(part="draft", rows=R, top_k=K, depth=depth, error=repr(e)[:200])
    for R in (1, 8):
        try:
            fn = walk_program(R, 60, 6, 512, V); g = Captured(fn)
            note(part="walk", rows=R, captured=ms(g), device=device_ms(g), eager=ms(fn, 4))
        except Exception as e:
            note(part="walk", rows=R, error=repr(e)[:200])
    for R in (1, 8):
        try:
            d, v, w = (Captured(f) for f in (draft_program(R, 10, 6, 512), verify_program(R, 60, 512, "masked"), walk_program(R, 60, 6, 512, V)))
            def cycle():
                d(); v(); w()
                if w.graph is not None: w.out.tolist()
            note(part="cycle of 60 nodes, 6 levels", rows=R, captured=ms(cycle))
        except Exception as e:
            note(part="cycle", rows=R, error=repr(e)[:200])
    logits = torch.randn(1, 10, V, device=dev)
    for name, fn in (("topk 10 of [10, V]", lambda: logits.topk(10)), ("log_softmax", lambda: logits.log_softmax(-1)), ("argmax [60, V]", lambda: logits.expand(6, -1, -1).argmax(-1))):
        note(part=name, device=device_ms(Captured(fn)))
