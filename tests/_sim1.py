import sys, time
from tests.world import World, RankContext
def setup(context):
    from tests.simulated_gpu import use_simulated_gpu
    use_simulated_gpu()
def go(context, travel, logfmt, how, n):
    import time
    from anyep.buffer import Buffer
    from tests.low_latency_cases import Case, check_case
    from dataclasses import replace
    if "b" not in context.keep:
        context.keep["b"] = Buffer(context.group, 1<<20, 1<<22, low_latency_mode=True, device="cuda")
    b = context.keep["b"]
    case = Case(tokens=(5,3)[:context.num_ranks], hidden=512, travel=travel, use_logfmt=logfmt, how=how)
    t=time.time()
    for seed in range(n):
        check_case(context.rank, replace(case, seed=seed), b)
    return time.time()-t
if __name__ == "__main__":
    with World(2) as w:
        w.run(setup, timeout=100)
        for args in (("bf16", False, "in line", 3), ("fp8", True, "hook", 1), ("fp8 rounded", False, "async", 1), ("fp8 ue8m0", False, "hook", 2)):
            try: print(args, w.run(go, *args, timeout=100))
            except Exception as e: print(args, "FAILED", str(e)[:6000]); break
