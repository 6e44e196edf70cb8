import sys, time, statistics; sys.path.insert(0,".")
import torch, torch.distributed as dist
from tests.gpu import gpu_world
from anyep import Config
def tune(context, num_sms):
    from anyep.buffer import Buffer
    from anyep.modes.gpu_intranode import GpuIntranode as G
    torch.cuda.set_device(0)
    R=context.num_ranks
    T,H,E,K=4096,7168,256,8
    torch.manual_seed(context.rank)
    topk=torch.rand(T,E,device="cuda").topk(K).indices
    x=torch.randn(T,H,device="cuda").bfloat16()
    b=Buffer(context.group, 1<<28, device="cuda", num_window_bytes=2<<30)
    config=Config(num_sms,6,256)
    def sync(): torch.cuda.synchronize(); dist.barrier(group=context.group)
    per_rank,_,per_expert,in_rank,_=b.get_dispatch_layout(topk,E)
    args=dict(num_tokens_per_rank=per_rank,is_token_in_rank=in_rank,num_tokens_per_expert=per_expert,config=config)
    recv,ids,ww,counts,handle,_=b.dispatch(x,**args)
    nbytes=recv.numel()*2
    private=recv.clone()
    out,_,_=b.combine(recv,handle,config=config)
    res=[]
    def timed(f,n=10):
        f(); sync(); ts=[]
        for _ in range(7):
            sync()
            a,z=torch.cuda.Event(enable_timing=True),torch.cuda.Event(enable_timing=True)
            a.record()
            for _ in range(n): f()
            z.record(); torch.cuda.synchronize()
            t=torch.tensor(a.elapsed_time(z)/n*1e3); dist.all_reduce(t,op=dist.ReduceOp.MAX,group=context.group); ts.append(float(t))
        return statistics.median(ts)
    def graphed(f,n=10):
        f(); sync()
        graph=torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph,capture_error_mode="thread_local"):
            for _ in range(n): f()
        return timed(graph.replay,1)/n, graph
    def show(name,t): res.append(f"{R} {name}: {t:.1f} us {nbytes/t/1e3:.0f} GB/s")
    cached=lambda: b.dispatch(x,handle=handle,config=config)
    comb=lambda: b.combine(recv,handle,config=config)
    staged=lambda: b.combine(private,handle,config=config)
    full=lambda: b.dispatch(x,**args)
    graphs=[]
    for name,f in (("cached",cached),("combine",comb)):
        t,g=graphed(f); show(name+" graph",t); graphs.append((name,g)); show(name+" eager",timed(f))
    show("full eager",timed(full)); show("staged eager",timed(staged))
    from torch.profiler import profile, ProfilerActivity
    for name,g in graphs:
        sync()
        with profile(activities=[ProfilerActivity.CUDA]) as pr:
            for _ in range(3): g.replay()
            sync()
        rows={}
        ev=sorted([e for e in pr.events() if e.device_type.name=="CUDA"],key=lambda e:e.time_range.start)
        for e in ev: rows.setdefault(e.name[:40],[]).append(e.time_range.end-e.time_range.start)
        gaps=[q.time_range.start-p.time_range.end for p,q in zip(ev,ev[1:])]
        res.append(f"{R} {name} kernels "+", ".join(f"{k} {statistics.median(v):.1f}" for k,v in rows.items())+f" gap {statistics.median(gaps):.2f}")
    ro=(G._send_through_rings,G._combine_through_rings)
    G._send_through_rings=lambda *a:None; G._combine_through_rings=lambda *a:None
    for name,f in (("cached",cached),("combine",comb)):
        t,_=graphed(f); show(name+" graph no ring launch",t)
    G._send_through_rings,G._combine_through_rings=ro
    import time as tm
    def host(f,n=100):
        f(); sync(); t=tm.perf_counter()
        for _ in range(n): f()
        t=(tm.perf_counter()-t)/n*1e6; sync(); return t
    res.append(f"{R} host us: cached {host(cached):.0f} combine {host(comb):.0f} full {host(full):.0f} layout {host(lambda: b.get_dispatch_layout(topk,E)):.0f}; layout gpu {timed(lambda: b.get_dispatch_layout(topk,E)):.0f}")
    b2=Buffer(context.group, 1<<28, device="cuda", num_window_bytes=0)
    r2=b2.runtime
    import anyep.modes.gpu_intranode as gi
    for w,tile in ((32,(16,1024,1)),(32,(32,512,1)),(32,(32,1024,1)),(32,(16,512,1)),(16,(32,256,4)),(8,(16,256,1)),(32,(32,512,3)),(32,(8,1024,1)),(16,(32,256,1))):
        r2._ring_dispatch_tile=tile; gi.RING_WARPS=w
        try:
            assert torch.equal(b2.dispatch(x,handle=handle,config=config)[0],recv); show(f"ring dispatch {w} {tile}",timed(lambda: b2.dispatch(x,handle=handle,config=config)))
        except Exception as e: res.append(f"{tile} {repr(e)[:120]}"); break
    for w,tile in ((32,(16,1024,1,512,1)),(32,(32,512,1,256,1)),(16,(16,512,1,1024,1)),(32,(16,512,1,1024,1)),(16,(16,512,1,256,4)),(32,(32,512,1,1024,1)),(32,(8,1024,1,2048,1))):
        r2._ring_combine_tile=tile; gi.RING_WARPS=w
        try:
            assert torch.equal(b2.combine(private,handle,config=config)[0],out); show(f"ring combine {w} {tile}",timed(lambda: b2.combine(private,handle,config=config)))
        except Exception as e: res.append(f"{tile} {repr(e)[:120]}"); break
    return res
if __name__=="__main__":
    for n in map(int,sys.argv[1].split(",")):
        print(*gpu_world(n).run(tune, {2:24,4:24,8:16}[n], timeout=180)[0],sep="\n",flush=True)
