import sys, time, statistics, cProfile, pstats, io; sys.path.insert(0,".")
import torch, torch.distributed as dist
from tests.gpu import gpu_world
from anyep import Config
def prof(context, num_sms):
    from anyep.buffer import Buffer
    torch.cuda.set_device(0)
    T,H,E,K=4096,7168,256,8
    torch.manual_seed(context.rank)
    topk=torch.rand(T,E,device="cuda").topk(K).indices
    x=torch.randn(T,H,device="cuda").bfloat16()
    b=Buffer(context.group, 1<<28, device="cuda", num_window_bytes=4<<30)
    config=Config(num_sms,6,256)
    def sync(): torch.cuda.synchronize(); dist.barrier(group=context.group)
    per_rank,_,per_expert,in_rank,_=b.get_dispatch_layout(topk,E)
    args=dict(num_tokens_per_rank=per_rank,is_token_in_rank=in_rank,num_tokens_per_expert=per_expert,config=config)
    recv,ids,ww,counts,handle,_=b.dispatch(x,**args)
    out=[]
    def all_():
        b.dispatch(x,handle=handle,config=config); b.combine(recv,handle,config=config)
    for name,f in (("cached",lambda: b.dispatch(x,handle=handle,config=config)),("combine",lambda: b.combine(recv,handle,config=config)),("full",lambda: b.dispatch(x,**args)),("layout",lambda: b.get_dispatch_layout(topk,E))):
        for _ in range(3): f()
        sync()
        p=cProfile.Profile(); t=time.perf_counter(); p.enable()
        for _ in range(50): f()
        p.disable(); t=(time.perf_counter()-t)/50*1e6; sync()
        s=io.StringIO(); pstats.Stats(p,stream=s).sort_stats("tottime").print_stats(16)
        out.append(f"{name} host {t:.1f} us\n"+"\n".join(s.getvalue().splitlines()[6:]))
    from torch.profiler import profile, ProfilerActivity
    sync()
    with profile(activities=[ProfilerActivity.CUDA]) as pr:
        for _ in range(5): all_(); b.dispatch(x,**args)
        sync()
    out.append(pr.key_averages().table(sort_by="cuda_time_total",row_limit=15,max_name_column_width=40)[:4000])
    return "\n".join(out)
if __name__=="__main__":
    for n in (2,):
        print(gpu_world(n).run(prof, {2:24,4:24,8:16}[n], timeout=200)[0])
