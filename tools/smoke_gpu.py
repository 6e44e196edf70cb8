import sys, time, statistics; sys.path.insert(0,".")
import torch, torch.distributed as dist
from tests.gpu import gpu_world, run_gpu_case, prepare_rank
from tests.cases import Case
from anyep import Config

def bench(context, num_sms):
    from anyep.buffer import Buffer
    torch.cuda.set_device(0)
    R=context.num_ranks
    T,H,E,K=4096,7168,256,8
    torch.manual_seed(context.rank)
    topk=torch.rand(T,E,device="cuda").topk(K).indices
    w=torch.rand(T,K,device="cuda")
    x=torch.randn(T,H,device="cuda").bfloat16()
    b=Buffer(context.group, 1<<28, device="cuda", num_window_bytes=4<<30)
    config=Config(num_sms,6,256)
    def sync(): torch.cuda.synchronize(); dist.barrier(group=context.group)
    per_rank,_,per_expert,in_rank,_=b.get_dispatch_layout(topk,E)
    args=dict(num_tokens_per_rank=per_rank,is_token_in_rank=in_rank,num_tokens_per_expert=per_expert,config=config)
    recv,ids,ww,counts,handle,_=b.dispatch(x,topk_idx=topk,topk_weights=w,**args)
    # reference
    out,_,_=b.combine(recv,handle,config=config)
    ref=(in_rank.sum(1,keepdim=True).float()*x.float())
    acc=torch.zeros_like(ref)
    for r in range(R): acc+=torch.where(in_rank[:,r,None],x.float(),0)
    assert torch.equal(out,acc.bfloat16())
    nbytes=recv.numel()*2
    private=recv.clone()
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
    def host(f,n=20):
        f(); sync(); t=time.perf_counter()
        for _ in range(n): f()
        t=(time.perf_counter()-t)/n*1e6; sync(); return t
    res={}
    tgt=torch.empty_like(private)
    t=timed(lambda: tgt.copy_(private)); res["copy"]=(t,nbytes/t/1e3)
    res["layout"]=(timed(lambda: b.get_dispatch_layout(topk,E)),0)
    f=lambda: b.dispatch(x,handle=handle,config=config); t=timed(f); res["cached"]=(t,nbytes/t/1e3,host(f))
    def g(): b.dispatch(x,**args)
    t=timed(g); res["full, no topk"]=(t,nbytes/t/1e3)
    def g(): b.dispatch(x,topk_idx=topk,topk_weights=w,**args)
    t=timed(g); res["full"]=(t,nbytes/t/1e3)
    f=lambda: b.combine(recv,handle,config=config); t=timed(f); res["combine"]=(t,nbytes/t/1e3,host(f))
    f=lambda: b.combine(private,handle,config=config); t=timed(f); res["staged"]=(t,nbytes/t/1e3)
    # graph
    def graphed(f,n=10):
        f(); sync()
        s=torch.cuda.Stream(); graph=torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph,capture_error_mode="thread_local"):
            for _ in range(n): f()
        return timed(graph.replay,1)/n
    try:
        t=graphed(lambda: b.dispatch(x,handle=handle,config=config)); res["cached graph"]=(t,nbytes/t/1e3)
        t=graphed(lambda: b.combine(recv,handle,config=config)); res["combine graph"]=(t,nbytes/t/1e3)
        out2={}
        def worst(): out2["r"]=b.dispatch(x,topk_idx=topk,topk_weights=w,num_worst_tokens=T*R,**args)
        t=graphed(worst,1); res["worst graph"]=(t,nbytes/t/1e3)
        assert torch.equal(out2["r"][0][:len(recv)],recv)
    except Exception as e:
        import traceback; res["graph error"]=traceback.format_exc()[-1500:]
    b2=Buffer(context.group, 1<<28, device="cuda", num_window_bytes=0)
    f=lambda: b2.dispatch(x,handle=handle,config=config); r2=f()[0]; assert torch.equal(r2,recv); t=timed(f); res["ring cached"]=(t,nbytes/t/1e3)
    f=lambda: b2.combine(private,handle,config=config); assert torch.equal(f()[0],out); t=timed(f); res["ring combine"]=(t,nbytes/t/1e3)
    import anyep.modes.gpu_intranode as gi
    for tile in ((8,512,16,2),(16,256,16,3),(8,512,32,2),(16,512,32,2),(8,256,8,3),(16,1024,32,2)):
        gi.RING_TILE=tile
        try:
            t=timed(lambda: b2.dispatch(x,handle=handle,config=config)); t2=timed(lambda: b2.combine(private,handle,config=config))
            res[f"ring {tile}"]=(nbytes/t/1e3,nbytes/t2/1e3)
        except Exception as e: res[f"ring {tile}"]=repr(e)[:200]
    b2.destroy()
    def us(f,n=200):
        f(); torch.cuda.synchronize(); t=time.perf_counter()
        for _ in range(n): f()
        t=(time.perf_counter()-t)/n*1e6; torch.cuda.synchronize(); return t
    b.destroy()
    return res

if __name__=="__main__":
    what=sys.argv[1:]
    for n in (2,4,8):
        w=gpu_world(n)
        for case in [Case((3,4,5,6,7,8,9,10)[:n]), Case((5,0,1,2,3,4,5,6)[:n], worst=True), Case((17,9,1,0,3,50,5,60)[:n], dtype="float16", num_biases=2, combine_weights=True),
             Case((3,4,0,0,0,100,1,1)[:n], dtype="float8_e4m3fn", num_scales=3, strided_scales=True, combine_from_window=False), Case((300,)*n,hidden=1040,dtype="float32",num_biases=1,run_async=True,num_topk=4,local_experts=4)]:
            t=time.time(); w.run(run_gpu_case, case, timeout=200); print(n, case.dtype, "ok", round(time.time()-t,2), flush=True)
        for case in [Case((3,4,5,6,7,8,9,10)[:n],num_window_bytes=0), Case((50,0,10,20,30,40,50,60)[:n], worst=True,num_window_bytes=0,config=Config(4,1,2)), Case((170,90,10,0,30,50,55,60)[:n], dtype="float16", num_biases=2, combine_weights=True,num_window_bytes=0,config=Config(6,2,3)),
             Case((30,40,0,0,0,100,1,1)[:n], dtype="float8_e4m3fn", num_scales=3, strided_scales=True, num_window_bytes=0,config=Config(2,9,10)), Case((300,)*n,hidden=1040,dtype="float32",num_biases=1,run_async=True,num_topk=4,local_experts=4,num_window_bytes=1<<20), Case((60,5,80,1,2,3,4,5)[:n], hidden=512, routing="skewed", local_experts=1, num_window_bytes=1 << 16)]:
            t=time.time(); w.run(run_gpu_case, case, timeout=60); print(n, "ring", case.dtype, "ok", round(time.time()-t,2), flush=True)
        if "bench" in what and True:
            for k,v in w.run(bench, {2:24,4:24,8:16}[n], timeout=200)[0].items(): print(n,k, v if isinstance(v,str) else [round(q,1) for q in v], flush=True)
