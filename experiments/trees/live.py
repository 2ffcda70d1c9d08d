import json, sys, time, statistics as st
from collections import defaultdict
import torch, eagle_fsd
from eagle_fsd import TreeConfig as TC
from eagle_fsd.decoding import decoder as D, forwards as F
from eagle_fsd.drafting.latency import Latency
T=defaultdict(float); rows=[]
def wrap(cls,name,label):
    f=getattr(cls,name)
    def g(self,*a,**k):
        t=time.perf_counter(); r=f(self,*a,**k); T[label]+=time.perf_counter()-t; return r
    setattr(cls,name,g)
wrap(F.Forwards,"draft","draft"); wrap(F.Forwards,"verify","verify"); wrap(D.Decoder,"_accept","accept"); wrap(F.Forwards,"commit","commit")
from eagle_fsd.models.target import TargetModel
old=D.Decoder.step
learn=D.Drafting.learn
info={}
def learn2(self,plan,nodes,levels,emitted,**k): info.update(nodes=nodes,levels=levels,tokens=sum(emitted)); return learn(self,plan,nodes,levels,emitted,**k)
D.Drafting.learn=learn2
def step(self):
    T.clear(); t=time.perf_counter(); r=old(self); dt=time.perf_counter()-t
    rows.append((info["nodes"],info["levels"],info["tokens"],dt,dict(T))); return r
D.Decoder.step=step
pre=D.Decoder.prefill
P=[0.0]
def prefill(self):
    t=time.perf_counter(); r=pre(self); P[0]+=time.perf_counter()-t; return r
D.Decoder.prefill=prefill
model=eagle_fsd.load()
chats=[json.loads(l)["turns"][0] for l in open("/work/shared/data/mt_bench.jsonl")][5::16]
from eagle_fsd.drafting.sizing import Fixed
MODE=[None]; nxt=D.Drafting.next; cnt=[0]
SEQ={"alt46":[TC(4,3,1),TC(6,3,1+1)],"alt4567":[TC(n,3,2) for n in (4,7,5,6)],"same3":[TC(4,3,3)],"k3n6":[TC(6,3,3)]}
def next2(self,*a):
    if MODE[0] in SEQ:
        cnt[0]+=1; t=SEQ[MODE[0]][cnt[0]%len(SEQ[MODE[0]])]
        return Fixed(t).plan(t)
    return nxt(self,*a)
D.Drafting.next=next2
cfg={"auto":{}, "alt46":dict(tree=TC(8,3,3)), "alt4567":dict(tree=TC(8,3,3)), "same3":dict(tree=TC(8,3,3)), "k3n6":dict(tree=TC(8,3,3)), "431":dict(tree=TC(4,3,1)), "541":dict(tree=TC(5,4,1)), "632":dict(tree=TC(6,3,2)), "plain":dict(speculative=False)}
if len(sys.argv)>1: cfg={k:v for k,v in cfg.items() if k in sys.argv[1].split(",")}
lat=model.sizing.latency if hasattr(model,"sizing") else Latency.from_json(open("/root/.cache/eagle_fsd/latency/73b5328586e4afc5.json").read())
eagle_fsd.generate("Hello", model, threshold=0.5, max_new_tokens=40)
acc=defaultdict(list); tot=defaultdict(lambda:[0,0.0,0.0])
for rep in range(3):
  for c in chats:
    for name,kw in cfg.items():
        rows.clear(); P[0]=0; MODE[0]=name; t=time.perf_counter()
        o=eagle_fsd.generate([{"role":"user","content":c}], model, **({} if name=="plain" else dict(threshold=0.5)), text_drafts="off", max_new_tokens=96, **kw)
        dt=time.perf_counter()-t
        acc[name]+=rows; x=tot[name]; x[0]+=len(o.token_ids); x[1]+=dt; x[2]+=P[0]
for name,rs in acc.items():
    n=len(rs); x=tot[name]
    parts={k:1e3*sum(r[4].get(k,0) for r in rs)/n for k in ("draft","verify","accept","commit")}
    k={"431":1,"541":1,"632":2}.get(name,3)
    mod=1e3*sum(float(lat.cycle(r[0],r[1],k)) if r[1] else lat.plain for r in rs)/n
    grp=defaultdict(list)
    for r in rs: grp[r[0],r[1]].append(r[3])
    med=1e3*sum(len(v)*st.median(v) for v in grp.values())/n; q1=1e3*sum(len(v)*sorted(v)[len(v)//4] for v in grp.values())/n
    dm={L:round(1e3*st.median([r[4]["draft"] for r in rs if r[1]==L]),2) for L in sorted({r[1] for r in rs}) if sum(r[1]==L for r in rs)>8}
    vm={N:round(1e3*st.median([r[4]["verify"] for r in rs if r[0]==N]),1) for N in sorted({r[0] for r in rs}) if sum(r[0]==N for r in rs)>8}
    print(name, "MEDIAN cycle %.1f q1 %.1f rate %.1f"%(med,q1,1e3*sum(r[2] for r in rs)/n/med), "draft by levels",dm,"verify by nodes",vm, "tok/s %.1f"%(x[0]/x[1]), "tau %.2f"%(sum(r[2] for r in rs)/n), "cycle %.1f model %.1f"%(1e3*sum(r[3] for r in rs)/n, mod), "outside cycles+prefill per cycle %.1f"%(1e3*(x[1]-x[2]-sum(r[3] for r in rs))/n), "prefill %.1f"%(1e3*x[2]/n), "nodes %.1f levels %.1f"%(sum(r[0] for r in rs)/n,sum(r[1] for r in rs)/n), {k:round(v,1) for k,v in parts.items()}, flush=True)
