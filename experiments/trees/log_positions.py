"""Log wide cycles under a driving fixed tree. One row, greedy. usage: log.py OUT threshold N,depth,k questions... """
import json, sys, math, pickle, time
import torch
from dataclasses import replace
import eagle_fsd
from eagle_fsd.api import decode_requests
from eagle_fsd.decoding import decoder as D
from eagle_fsd.decoding.processing import VerifiedRequests
from eagle_fsd.drafting.config import TreeConfig
from eagle_fsd.inputs.prompts import encode_prompts
from eagle_fsd.inputs.requests import make_requests
from eagle_fsd.options.generate import GenerateOptions
from eagle_fsd.acceptance.divergence import get_divergence
out, threshold, drive, count, step = sys.argv[1], float(sys.argv[2]), tuple(map(int, sys.argv[3].split(","))), int(sys.argv[4]), int(sys.argv[5])
WIDE = TreeConfig(1 + 3 + 6*9, 7, 3)
kw = json.loads(sys.argv[6]) if len(sys.argv) > 6 else {}
model = eagle_fsd.load(**kw)
js = get_divergence("js")
cycles = []
def subtree(par, lp, ranks, dep, n, depth, k):
    """indices kept by a fixed tree (n, depth, k) grown greedily by raw log-probs."""
    cum = [0.0]*len(par); kids = {}
    for i in range(1, len(par)):
        cum[i] = cum[par[i]] + lp[i]
        kids.setdefault(par[i], []).append(i)
    front, scored = [0], []
    for d in range(depth):
        new = [c for f in front for c in kids.get(f, ()) if ranks[c] < k]
        scored += new
        front = sorted(new, key=lambda i: (-cum[i], i))[:k]
    keep = sorted(scored, key=lambda i: (-cum[i], i))[:n-1]
    return {0, *keep}
def step_(self):
    rules = [r.current_rule() for r in self.requests]
    lengths = self.forwards.lengths
    plan = self.drafting.next([None])
    tree, draft_logits = self.forwards.draft(self.requests, plan, [None], None)
    features = self.forwards.verify(tree)
    logits = self.target.logits(features)
    par = tree.parents[0].tolist(); sc = tree.scores[0].tolist(); dep = tree.depths[0].tolist(); tok = tree.tokens[0].tolist()
    n = len(par)
    lp = [0.0]+[sc[i]-sc[par[i]] for i in range(1,n)]
    kids = {}
    for i in range(1,n): kids.setdefault(par[i], []).append(i)
    ranks = [0]*n
    for c in kids.values():
        for r, i in enumerate(sorted(c, key=lambda i: (-lp[i], i))): ranks[i] = r
    tl = logits[0].float().log_softmax(-1)
    best = tl.argmax(-1).tolist()
    dr = tree.draft_rows[0].tolist()
    div = [math.nan]*n
    for i in kids:
        dl = draft_logits[dep[i]][0, dr[i]].float()
        p, q = tl[i].exp(), dl.softmax(-1)
        if self.draft_tokens is not None: q = torch.zeros_like(p).scatter(0, self.draft_tokens, q)
        m = (p+q)/2
        div[i] = 0.5*float((p*(p.clamp_min(1e-30)/m.clamp_min(1e-30)).log()).sum() + (q*(q.clamp_min(1e-30)/m.clamp_min(1e-30)).log()).sum())
    tlp = [0.0]+[float(tl[par[i], tok[i]] - tl[par[i]].max()) for i in range(1,n)]
    exact = [False]+[tok[i]==best[par[i]] for i in range(1,n)]
    tmax = tl.max(-1).values.tolist()
    cycles.append(dict(q=self.requests[0].__dict__.get("qid"), par=par, lp=lp, rank=ranks, div=div, rel=tlp, exact=exact, tmax=tmax))
    keep = {0}
    parents = tree.parents.clone()
    for i in range(1,n):
        if i not in keep: parents[0,i] = i
    tree2 = replace(tree, parents=parents)
    paths, emissions = self._accept(rules, VerifiedRequests(self.requests, lengths, tree2, logits, draft_logits, self.draft_tokens))
    cycles[-1]["path"] = paths[0]
    self.forwards.commit(lengths, paths, features, tree, plan.tree.top_k)
    return [r.append(e) for r, e in zip(self.requests, emissions)]
D.Decoder.step = step_
chats = [json.loads(l) for l in open("/work/shared/data/mt_bench.jsonl")]
chats = chats[::step][:count]
prompts = [[{"role":"user","content":c.get("turns", c.get("prompt"))[0]}] for c in chats]
options = GenerateOptions(acceptance="fsd" if threshold else "exact", threshold=threshold or None, text_drafts="off", tree=WIDE, max_new_tokens=96)
requests = make_requests(model, encode_prompts(prompts, model)[0], options)
t = time.time()
for qid, r in enumerate(requests):
    before = len(cycles)
    decode_requests(model, [r])
    for c in cycles[before:]: c["q"] = qid
    new = cycles[before:]
    print(qid, len(new), sum(len(c["path"]) for c in new)/len(new), time.time()-t, flush=True)
    pickle.dump(cycles, open(out, "wb"))
