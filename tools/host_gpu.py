import sys, time, statistics; sys.path.insert(0,".")
import torch, torch.distributed as dist
from tests.gpu import gpu_world
from anyep import Config
def prof(context, num_sms):
    from anyep.buffer import Buffer
    from anyep.modes import gpu_intranode, gpu_talk, gpu_windows
    from anyep.backends.cuda import stream, launch, gpu, heap
    torch.cuda.set_device(0)
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
    times={}
    def wrap(cls,name):
        f=getattr(cls,name)
        def g(*a,**k):
            t=time.perf_counter_ns()
            try: return f(*a,**k)
            finally:
                e=times.setdefault(f"{cls.__name__}.{name}",[0,0]); e[0]+=time.perf_counter_ns()-t; e[1]+=1
        setattr(cls,name,g)
    G=gpu_intranode.GpuIntranode
    for n in ("_send_to_windows","_send_through_rings","_combine_through_rings","_new_results","_offer_exactly","_begin","_end","_sum","_stage","_notify","_unpack","_new_routing","_dispatch_header","routing_of","before"): wrap(G,n)
    for n in ("_exchange","meet","wait_for_totals","launcher"): wrap(gpu_talk.GpuTalk,n)
    for n in ("allocate","lend","_died","_take_back"): wrap(gpu_windows.GpuWindows,n)
    wrap(launch.Launcher,"__call__"); wrap(Buffer,"_refusing"); wrap(stream.Stream,"begin"); wrap(stream.Stream,"end"); wrap(heap.SymmetricBlock,"lend")
    out=[]
    for name,f in (("cached",lambda: b.dispatch(x,handle=handle,config=config)),("combine",lambda: b.combine(recv,handle,config=config)),("full",lambda: b.dispatch(x,**args))):
        for _ in range(5): f()
        sync(); times.clear()
        t=time.perf_counter()
        for i in range(60): f()
        t=(time.perf_counter()-t)/60*1e6
        sync(); t2=time.perf_counter()
        for i in range(8): f()
        t2=(time.perf_counter()-t2)/8*1e6
        sync()
        out.append(f"{name}: {t:.0f} us per call over 60, {t2:.0f} over 8; "+", ".join(f"{k.split('.')[1]} {v[0]/1e3/68:.1f}({v[1]/68:.0f})" for k,v in sorted(times.items(),key=lambda kv:-kv[1][0])))
    out.append(f"uses rings {int(b.runtime.talk.state[3])}")
    a=torch.empty(10)
    t=time.perf_counter()
    s=0
    for i in range(1000000): s+=i
    out.append(f"python speed {(time.perf_counter()-t)*1e3:.0f} ms per million adds")
    return "\n".join(out)
if __name__=="__main__":
    for n in (2,8):
        print(n, gpu_world(n).run(prof, {2:24,4:24,8:16}[n], timeout=200)[0],flush=True)
