import eval as E
import pickle
from auto import *
A = pickle.load(open("/work/lab/replay/all.pkl","rb"))
from collections import defaultdict
def prep(C):
    for c in C:
        n=len(c["par"]); kids=[[] for _ in range(n)]
        for i in range(1,n): kids[c["par"][i]].append(i)
        for k in kids: k.sort(key=lambda i:c["rank"][i])
        c["kids"]=kids
prep(A)
texts=defaultdict(list)
for c in A: texts[c["q"]].append(c)
def run(mk, qs, th, adapt=True, starts=3):
    """sequential cycles; lam learnt per request as live. returns rate, tau, cost"""
    T=S=N=0; per={}
    for q in qs:
        tq=sq=0
        for s in range(starts):   # several phases
            gained, spent = 1.6*4, 4.0
            t=s
            while t<len(texts[q]):
                lam=max(1.0,gained/spent)
                tree, levels, k = mk(lam)(texts[q][t])
                tok=E.walk(texts[q][t], tree, th); co=cost(len(tree),levels,k)
                gained+=tok; spent+=co; tq+=tok; sq+=co; N+=1; t+=tok
        T+=tq; S+=sq; per[q]=tq/sq
    return T/S, T/N, S/N, per
def mk_fixed(n,d,k): return lambda lam: (lambda c: (fixed(c,n,d,k), d, k))
even=[q for q in texts if q%2==0]; odd=[q for q in texts if q%2]; ALL=list(texts)
def show(name, mk, th):
    a=run(mk,even,th); b=run(mk,odd,th)
    print(f"{name:34s} th {th}: even {a[0]:.3f} ({a[1]:.2f}, {a[2]:.2f})  odd {b[0]:.3f} ({b[1]:.2f}, {b[2]:.2f})  all {run(mk,ALL,th)[0]:.3f}", flush=True)
def mk_auto(est,k,worthf,own=True):
    ws={}; ps={}
    price=(cost(25,1,k)-cost(1,1,k))/24
    def mk(lam):
        key=round(lam,2)
        if key not in ps:
            ps[key]=policy(est,k,key,worthf(key*price),own=own,maxdepth=7)
        return ps[key]
    return mk
import auto
def fitg(est,k,sel,C_):
    cache={}
    def w(price):
        key=round(price,3)
        if key not in cache:
            auto.C=C_; cache[key]=worth_fit(est,k,sel,key)
        return cache[key]
    return w
if __name__=="__main__":
    for th in (0.0,0.5):
        for t in ((3,2,1),(4,3,1),(5,4,1),(6,5,1),(5,3,2),(6,3,2),(7,4,2),(8,4,2),(10,5,2),(12,5,2)):
            show("fixed "+str(t), mk_fixed(*t), th)
        for k in (1,2,3): show(f"auto exact curves k={k}", mk_auto(est_curves(ex),k,ex.level_worth), th)
    sel=[i for i,c in enumerate(A) if c["q"]%2==0][::3]
    for th in (0.5,):
        for k in (1,2,3):
            for g in (0.15,0.27):
                est=est_curves(ex,g)
                show(f"auto g={g} k={k}", mk_auto(est,k,fitg(est,k,sel,A)), th)
        for k in (1,2,3):
            auto.C=A; f=fit_fuzzy([i for i,c in enumerate(A) if c["q"]%2==0],k); est=est_fit(f)
            show(f"auto fuzzy fit k={k}", mk_auto(est,k,fitg(est,k,sel,A)), th)
