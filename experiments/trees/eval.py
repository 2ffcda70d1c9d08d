import pickle, math, json, sys, itertools, bisect
import numpy as np
sys.path.insert(0,"/work/main")
from eagle_fsd.drafting.latency import Latency
from eagle_fsd.drafting.curves import read_curves, default_curves, Curves
from eagle_fsd.drafting.sizing import Auto
lat = Latency.from_json(open("/root/.cache/eagle_fsd/latency/73b5328586e4afc5.json").read())
C = pickle.load(open("/work/lab/replay/fsd5.pkl","rb"))
TH = 0.5; GUARD = math.log(0.3)
for c in C:
    n = len(c["par"]); kids = [[] for _ in range(n)]
    for i in range(1,n): kids[c["par"][i]].append(i)
    for k in kids: k.sort(key=lambda i: c["rank"][i])
    c["kids"] = kids
def walk(c, S, th=TH):
    node, tokens = 0, 1
    while True:
        ch = [k for k in c["kids"][node] if k in S]
        if not ch: return tokens
        e = [k for k in ch if c["exact"][k]]
        if e: node = e[0]
        else:
            ok = [k for k in ch if c["rel"][k] >= GUARD]
            if not ok or not c["div"][node] <= th: return tokens
            node = max(ok, key=lambda k: c["rel"][k])
        tokens += 1
def cost(nodes, levels, k): 
    return float(lat.cycle(nodes, levels, k)/lat.plain) if levels else float(lat.undrafted_cycle(nodes)/lat.plain)
def fixed(c, n, depth, k):
    par, lp, ranks, kids = c["par"], c["lp"], c["rank"], c["kids"]
    cum = {0:0.0}; front, scored = [0], []
    for d in range(depth):
        new = []
        for f in front:
            for x in kids[f]:
                if ranks[x] < k: cum[x] = cum[f]+lp[x]; new.append(x)
        scored += new; front = sorted(new, key=lambda i:(-cum[i],i))[:k]
    return {0, *sorted(scored, key=lambda i:(-cum[i],i))[:n-1]}
def rate(pol, sel):
    t = s = 0
    for i in sel:
        S, levels, k = pol(C[i]); t += walk(C[i], S); s += cost(len(S), levels, k)
    return t/s, t/len(sel), s/len(sel)
if __name__ == "__main__":
    Q = np.array([c["q"] for c in C]); even = [i for i in range(len(C)) if Q[i]%2==0]; odd=[i for i in range(len(C)) if Q[i]%2]
    res=[]
    for k in (1,2,3,4):
        for depth in range(1,9):
            for n in range(2,22):
                if n > 1+k+(depth-1)*k*k: continue
                if k==1 and n!=depth+1: continue
                pol = lambda c: (fixed(c,n,depth,k), depth, k)
                res.append((rate(pol, even), rate(pol, odd),(n,depth,k)))
    res.sort(key=lambda r:-r[0][0])
    for r in res[:12]: print(r[2], *[tuple(round(x,3) for x in y) for y in r[:2]])
    for r in res:
        if r[2] in ((6,3,2),(8,4,2),(4,3,1),(12,5,2),(10,5,2)): print("named", r[2], *[tuple(round(x,3) for x in y) for y in r[:2]])
