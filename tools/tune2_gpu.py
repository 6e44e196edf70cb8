import sys; sys.path.insert(0,".")
import tools.tune_gpu as t
import torch, statistics, torch.distributed as dist
from tests.gpu import gpu_world
from anyep import Config
def tune(context, num_sms):
    from anyep.buffer import Buffer
    torch.cuda.set_device(0)
    R=context.num_ranks
    T,H,E,K=4096,7168,256,8
    torch.manual_seed(context.rank)
    topk=torch.rand(T,E,device="cuda").topk(K).indices
    x=torch.randn(T,H,device="cuda").bfloat16()
    b=Buffer(context.group, 1<<28, device="cuda", num_window_bytes=3<<30)
    config=Config(num_sms,6,256)
    def sync(): torch.cuda.synchronize(); dist.barrier(group=context.group)
    per_rank,_,per_expert,in_rank,_=b.get_dispatch_layout(topk,E)
    args=dict(num_tokens_per_rank=per_rank,is_token_in_rank=in_rank,num_tokens_per_expert=per_expert,config=config)
    recv,ids,ww,counts,handle,_=b.dispatch(x,**args)
    nbytes=recv.numel()*2
    private=recv.clone()
    out,_,_=b.combine(recv,handle,config=config)
    acc=torch.zeros(T,H,device="cuda")
    for r in range(R): acc+=torch.where(in_rank[:,r,None],x.float(),0)
    assert torch.equal(out,acc.bfloat16())
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
    def graphed(f,n=5):
        f(); sync()
        graph=torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph,capture_error_mode="thread_local"):
            for _ in range(n): f()
        return timed(graph.replay,1)/n
    def show(name,t): res.append(f"{R} {name}: {t:.1f} us {nbytes/t/1e3:.0f} GB/s")
    cached=lambda: b.dispatch(x,handle=handle,config=config)
    comb=lambda: b.combine(recv,handle,config=config)
    staged=lambda: b.combine(private,handle,config=config)
    for name,f in (("cached",cached),("combine",comb)): show(name+" graph",graphed(f))
    show("cached eager",timed(cached)); show("full eager",timed(lambda: b.dispatch(x,**args)))
    tiles={2:[(32,1024,32,256,16384),(32,1024,32,128,16384),(32,1024,32,512,32768)],4:[(8,1024,32,64,16384),(8,1024,32,128,16384),(16,1024,32,64,32768)],8:[(8,1024,32,32,16384),(8,1024,32,64,16384),(16,512,32,32,8192)]}[R]
    for tile in tiles:
        b.runtime._staging_tile=tile
        assert torch.equal(staged()[0],out)
        show(f"staged {tile}",graphed(staged))
    return res
if __name__=="__main__":
    for n in (2,4,8):
        try: print(*gpu_world(n).run(tune, {2:24,4:24,8:16}[n], timeout=100)[0],sep="\n",flush=True)
        except Exception as e: print(n, str(e)[-1500:], flush=True)
