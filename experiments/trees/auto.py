from eval import *
from dataclasses import replace as rep
ex = default_curves().greedy
CH = read_curves("/work/wt-ev/checkpoints/smollm2-135m-instruct-eagle2") if False else None
import glob
for f in glob.glob("/work/wt-ev/checkpoints/*/curves.json"): print(f)
Q = np.array([c["q"] for c in C]); even = [i for i in range(len(C)) if Q[i]%2==0]; odd=[i for i in range(len(C)) if Q[i]%2]
def interp(kn, va, x): return float(np.interp(x, kn, va))
def est_curves(cv, g=0.0):
    def est(c, i):
        r = c["rank"][i]
        p = math.exp(interp(cv.knots, cv.first if r==0 else cv.others, c["lp"][i]))
        if g: p = p+g*(1-p) if r==0 else (1-g)*p
        return math.log(max(p,1e-9))
    return est
def policy(est, k, lam, worth=None, maxdepth=8, maxn=40, rule="worth", own=False):
    """worth: LevelWorth; else exact expected-worth via simple reach-based"""
    price = (cost(25,1,k)-cost(1,1,k))/24; lp_ = cost(1,2,k)-cost(1,1,k)
    base = [cost(n,1,k) for n in range(1,66)]
    def pol(c):
        cum={0:0.0}; front=[0]; scored=[]; levels=0
        for d in range(maxdepth):
            new=[]
            for f in front:
                for x in c["kids"][f]:
                    if c["rank"][x]<k: cum[x]=min(cum[f]+est(c,x), cum[f]); new.append(x)
            if not new: break
            levels+=1; scored+=new
            front=sorted(new,key=lambda i:(-cum[i],i))[:k]
            reach=sum(math.exp(cum[i]) for i in front)
            if not worth(reach) >= lam*lp_: break
        order=sorted(scored,key=lambda i:(-cum[i],i))
        tok=[1.0]; 
        for i in order[:maxn]: tok.append(tok[-1]+math.exp(cum[i]))
        pace=lam
        if own: pace=max(pace,*[t/b for t,b in zip(tok,base)])
        sur=[t-pace*b for t,b in zip(tok,base)]
        n=1+sur.index(max(sur))
        return {0,*order[:n-1]}, levels, k
    pol.price=price
    return pol
def fix(mk, sel, it=4):
    lam=1.5
    for _ in range(it):
        r=rate(mk(lam), sel); lam=0.5*lam+0.5*r[0]
    return r
# fuzzy curve fits on `sel`, with tree of k children present: p(child accepted | node reached, first k children present)
def fit_fuzzy(sel, k, bins=10):
    data=[[],[]]
    for i in sel:
        c=C[i]
        # all nodes as if reached? use nodes on the walk of wide-k tree and all nodes weighted equally: use walk path
        S={x for x in range(len(c["par"])) if all_ranks(c,x,k)}
        node=0
        while True:
            ch=[x for x in c["kids"][node] if x in S]
            if not ch: break
            e=[x for x in ch if c["exact"][x]]
            if e: nxt=e[0]
            else:
                ok=[x for x in ch if c["rel"][x]>=GUARD]
                nxt=max(ok,key=lambda x:c["rel"][x]) if ok and c["div"][node]<=TH else None
            for x in ch: data[min(1,c["rank"][x])].append((c["lp"][x], x==nxt))
            if nxt is None: break
            node=nxt
    out=[]
    for d in data:
        if not d: out.append((np.array([-1.0,0.0]),np.array([-9.,-9.]))); continue
        d.sort(); d=np.array(d,float)
        from eagle_fsd.measure.cycles import _curve
        out.append(_curve(d[:,0],d[:,1]))
    return out
def all_ranks(c,x,k):
    while x:
        if c["rank"][x]>=k: return False
        x=c["par"][x]
    return True
def est_fit(f):
    def est(c,i):
        kn,va=f[min(1,c["rank"][i])]
        return float(np.interp(c["lp"][i],kn,va))
    return est
def worth_fit(est,k,sel,price):
    """mean of max(p-price,0) sum of next level's nodes by reach, from the estimates themselves; frontier of k"""
    R,W=[],[]
    for i in sel:
        c=C[i]; cum={0:0.0}; front=[0]; reach=1.0
        for d in range(8):
            new=[]
            for f in front:
                for x in c["kids"][f]:
                    if c["rank"][x]<k: cum[x]=min(cum[f]+est(c,x),cum[f]); new.append(x)
            if not new: break
            R.append(reach); W.append(sum(max(math.exp(cum[x])-price,0) for x in new))
            front=sorted(new,key=lambda i:-cum[i])[:k]; reach=sum(math.exp(cum[x]) for x in front)
    o=np.argsort(R); R=np.array(R)[o]; W=np.array(W)[o]
    parts=np.array_split(np.arange(len(R)),8)
    xs=[0.0]+[R[p].mean() for p in parts]; ys=[0.0]+[W[p].mean() for p in parts]
    return lambda reach: float(np.interp(reach,xs,ys))
if __name__=="__main__":
    for k in (2,3):
        price=(cost(25,1,k)-cost(1,1,k))/24
        for g in (0,0.15,0.27):
            for own in (True,False):
                est=est_curves(ex,g)
                if g==0: mk=lambda lam: policy(est,k,lam,ex.level_worth(lam*price),own=own)
                else:
                    ws={}
                    def mk(lam):
                        key=round(lam,2)
                        if key not in ws: ws[key]=worth_fit(est,k,even[::4],key*price)
                        return policy(est,k,lam,ws[key],own=own)
                print("exact curves k",k,"g",g,"own",own,*[tuple(round(x,3) for x in fix(mk,s)) for s in (even,odd)],flush=True)
    for k in (1,2,3):
        price=(cost(25,1,k)-cost(1,1,k))/24
        f=fit_fuzzy(even,k); est=est_fit(f); ws={}
        print(k,"first",[(round(a,2),round(math.exp(b),2)) for a,b in zip(*f[0])]); print("others",[(round(a,2),round(math.exp(b),2)) for a,b in zip(*f[1])])
        for own in (True,False):
            def mk(lam):
                key=round(lam,2)
                if key not in ws: ws[key]=worth_fit(est,k,even,key*price)
                return policy(est,k,lam,ws[key],own=own)
            print("fuzzy fit k",k,"own",own,*[tuple(round(x,3) for x in fix(mk,s)) for s in (even,odd)],flush=True)
