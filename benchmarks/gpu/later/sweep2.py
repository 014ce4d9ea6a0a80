import os, sys, time, traceback
import torch
T0 = time.time()
from foredraft.layers import cuda_programs, fp8_cuda, fp8_native, fused, words_native
from foredraft.layers.cuda_programs import Program, compiled
from foredraft.layers.fp8_cuda import Fp8Method, quantize_rows
from foredraft.layers.words_cuda import WordsMethod
SHAPES = {"qkv": (6144, 4096), "output": (4096, 4096), "gate_up": (28672, 4096), "down": (4096, 14336)}
BW = 4.49e12
WORDS, FP8 = Program("words.cu", "multiply_words"), Program("fp8.cu", "multiply_fp8")
DEV = torch.device("cuda")

def say(*a): print(*a, flush=True)

def name_of(linear, gated):
    return "gate_up" if gated or linear.num_outputs > 16384 else "down" if linear.num_inputs > 8192 else "qkv" if linear.num_outputs > 4096 else "output"

def words_launch(linear, x, parts, gated, own, stages, trigger, out):
    rows, inputs = x.shape
    outputs = out.shape[1]
    tiles = own * (2 if gated else 1)
    warps = parts * tiles
    stage = warps * (2048 + 128) + parts * rows * 528
    consts = {"PARTS": parts, "TILES": tiles, "GATED": int(gated), "GROUPS": 2, "CHANNEL": 0, "STAGES": stages, "COLUMN_TILES": max(1, -(-rows // 8) if rows <= 16 else 4), "HAS_BIAS": 0, "TRIGGER": trigger}
    WORDS.launch(consts, -(-outputs // (16 * own)), warps * 32, stages * stage + warps * rows * 64, (x, linear.weight, linear.scales, x, out, rows, outputs, inputs // 8))
    return stages * stage + warps * rows * 64

def fp8_launch(w, ws, q, xs, gated, spans, stages, trigger, out, columns=0):
    count, inputs = q.shape
    outputs = out.shape[1]
    columns = columns or max(8, 1 << (count - 1).bit_length())
    stage = spans * 128 * ((2 if gated else 1) * 64 + columns)
    consts = {"COLUMNS": columns, "GATED": int(gated), "SPANS": spans, "STAGES": stages, "HAS_BIAS": 0, "TRIGGER": trigger}
    FP8.launch(consts, -(-outputs // 64), 128, stages * stage + 1024, (q, xs, w, ws, out, out, count, outputs, inputs))

def graph_us(run, count, repeats=11):
    run(); torch.cuda.synchronize()
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g): run()
    times = []
    for _ in range(repeats):
        s, e = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        s.record(); g.replay(); e.record(); torch.cuda.synchronize()
        times.append(s.elapsed_time(e) * 1e3)
    return sorted(times)[repeats // 2] / count

def make(name, copies, group=128):
    from foredraft.layers.linear import Linear
    from foredraft.layers.quantized_matrix import Matrix
    from foredraft.layers.weight_scheme import WeightScheme
    scheme = WeightScheme("packed", 4, "group", group, has_zeros=True) if group else WeightScheme("packed", 4, "channel", has_zeros=True)
    outputs, inputs = SHAPES.get(name, name)
    found = []
    for _ in range(copies):
        linear = Linear(inputs, outputs, False, torch.bfloat16, DEV)
        groups = inputs // group if group else 1
        numbers = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8, device="cuda")
        scales = (torch.rand(outputs, groups, device="cuda") + .5) * inputs ** -.5 / 4.6
        zeros = torch.randint(5, 11, scales.shape, dtype=torch.uint8, device="cuda")
        linear.method = WordsMethod(scheme, inputs, outputs, torch.bfloat16)
        linear.method.set_matrix(linear, Matrix(numbers, scales.bfloat16().float(), zeros))
        found.append(linear)
    return found

def reference(x, meant, gated):
    ref = x.double() @ meant.T
    if gated:
        a, b = ref.chunk(2, 1); ref = a * torch.sigmoid(a) * b
    return ref

def isolated_words(limit):
    for name, rows in (("qkv", 1), ("gate_up", 1), ("down", 1), ("output", 1), ("gate_up", 8), ("down", 8), ("gate_up", 32), ("down", 32)):
        if time.time() - T0 > limit: return say("out of time")
        outputs, inputs = SHAPES[name]
        gated = name == "gate_up"
        own_out = outputs // 2 if gated else outputs
        size = outputs * inputs // 2 + outputs * inputs // 32
        floor = size / BW * 1e6
        copies = -(-200_000_000 // size) + 1
        linears = make(name, copies)
        x = torch.randn(rows, inputs, device="cuda"); x[:, 7] *= 30; x = x.bfloat16()
        ref = reference(x, linears[0].method.dequantized(linears[0]).double(), gated)
        words_native.MOST_ROWS = 0
        want = linears[0].gated(x) if gated else linears[0](x)
        base = graph_us(lambda: [one.gated(x) if gated else one(x) for one in linears], copies)
        line = [f"{name} rows {rows} floor {floor:.1f} product {base:.2f}:"]
        outs = [x.new_full((rows, own_out), float("nan")) for _ in linears]
        parts = linears[0].method._parts
        lot = [(1, 3, 0), (1, 4, 0), (1, 6, 0), (2, 4, 0), (4, 4, 0), (1, 4, 2)] if rows <= 8 else [(2, 2, 0), (2, 3, 0), (4, 2, 0), (4, 3, 0)]
        for own, stages, trigger in lot:
            try:
                def run():
                    for one, out in zip(linears, outs): words_launch(one, x, parts, gated, own, stages, trigger, out)
                us = graph_us(run, copies)
                err = ((outs[0].double() - ref).norm() / ref.norm()).item()
                line.append(f"T{own}S{stages}t{trigger} {us:.2f}{'' if torch.equal(outs[0], want) else f' OTHER BITS {err:.4f}'}")
            except Exception as error:
                line.append(f"T{own}S{stages} {str(error)[:60]}")
                if "CUDA error" in str(error): say(*line); raise
        say(*line)

def checks():
    for group in (128, 64, 32, 0):
        for shape in ((1536, 1024), (4096, 2048)):
            for gated in (False, True):
                [linear] = make(shape, 1, group)
                line = []
                for rows in (1, 3, 8):
                    x = torch.randn(rows, shape[1], device="cuda").bfloat16()
                    f = linear.gated if gated else linear
                    words_native.MOST_ROWS = 0; want = f(x)
                    words_native.MOST_ROWS = 8; got = f(x)
                    ref = reference(x, linear.method.dequantized(linear).double(), gated)
                    line.append(f"{rows}: {'same' if torch.equal(got, want) else 'OTHER'} {((got.double()-ref).norm()/ref.norm()).item():.4f}")
                say("check", group, shape, gated, *line)

def isolated_fp8(limit):
    from foredraft.layers import fp8_kernels
    from foredraft.kernel_launch import overlapped, power_of_two
    for name, rows in (("qkv", 1), ("gate_up", 1), ("down", 1), ("output", 1), ("down", 8), ("gate_up", 32)):
        if time.time() - T0 > limit: return say("out of time")
        outputs, inputs = SHAPES[name]
        gated = name == "gate_up"
        own = outputs // 2 if gated else outputs
        copies = -(-200_000_000 // (outputs * inputs)) + 1
        floor = outputs * inputs / BW * 1e6
        ws = [(torch.randn(outputs, inputs, device="cuda") * 64).to(torch.float8_e4m3fn) for _ in range(copies)]
        s = torch.rand(1, outputs, device="cuda") * .01 * inputs ** -.5
        x, xs = quantize_rows(torch.randn(rows, inputs, device="cuda").bfloat16())
        ref = reference(x.double() * xs.t().double(), ws[0].double() * s.t().double(), gated)
        outs = [torch.full((rows, own), float("nan"), device="cuda", dtype=torch.bfloat16) for _ in ws]
        block_m = max(16, power_of_two(rows))
        unroll, block_k, stages = fp8_cuda._fp8_tile(False, own, inputs, block_m, gated)
        def product():
            for w, out in zip(ws, outs):
                fp8_kernels.multiply_fp8[(-(-own // 64),)](x, xs, w, s, out, out, rows, own, inputs, BLOCKS=False, HAS_BIAS=False, GATED=gated, UNROLL=unroll, BLOCK_N=64, BLOCK_M=block_m, BLOCK_K=block_k, num_warps=4, num_stages=stages, **overlapped(DEV))
        base = graph_us(product, copies)
        want = outs[0].clone()
        line = [f"FP8 {name} rows {rows} floor {floor:.1f} product {base:.2f}:"]
        for spans, stages, trigger in ((1, 6, 0), (1, 12, 0), (2, 6, 0), (1, 8, 2), (1, 8, 0)):
            if spans * stages * 128 * ((2 if gated else 1) * 64 + max(8, rows)) > 225000: continue
            def run():
                for w, out in zip(ws, outs): fp8_launch(w, s, x, xs, gated, spans, stages, trigger, out)
            for out in outs: out.fill_(float("nan"))
            us = graph_us(run, copies)
            err = ((outs[0].double() - ref).norm() / ref.norm()).item()
            line.append(f"{spans}x{stages}t{trigger} {us:.2f}{'' if torch.equal(outs[0], want) else f' OTHER BITS {err:.4f}'}")
        say(*line)

def timeline(model, label, count=14):
    from torch.profiler import profile, ProfilerActivity
    import benchmarks.gpu.exactness as ex
    keep = []
    def spy(run, repeats=11):
        run(); torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as p:
            run(); torch.cuda.synchronize()
        keep.append(p); return 0.0
    old, ex._median = ex._median, spy
    try:
        with torch.inference_mode(): ex.step_ms(model, "strict", 1, 256, "plain")
        events = sorted(keep[0].events(), key=lambda e: e.time_range.start)
        n = len(events); first = events[n // 2].time_range.start
        say(f"-- {label}: {n} kernels, {events[-1].time_range.end - events[0].time_range.start:.0f} us")
        for e in events[n // 2: n // 2 + count]:
            say(f"   {e.time_range.start - first:8.2f} {e.time_range.end - e.time_range.start:7.2f} {e.name[:50]}")
    except Exception: traceback.print_exc()
    ex._median = old

def whole(form, limit):
    from benchmarks.gpu.quantized import _model
    from benchmarks.gpu.exactness import step_ms
    from verify_service.exactness import STRICT
    model = _model(form, 32)
    state = {"cfg": None}
    if form == "int4":
        method = WordsMethod; words_native.MOST_ROWS = 0
    else:
        method = Fp8Method
    original = method._multiply
    def patched(self, linear, x, gated=False):
        cfg, rows = state["cfg"], x.shape[0]
        if cfg is None or rows > 8: return original(self, linear, x, gated)
        outputs = linear.num_outputs // 2 if gated else linear.num_outputs
        a, stages = cfg[name_of(linear, gated)]
        if not a: return original(self, linear, x, gated)
        out = x.new_empty((rows, outputs))
        if form == "int4": words_launch(linear, x, self._parts, gated, a, stages, cfg["trigger"], out)
        else:
            q, xs = quantize_rows(x)
            fp8_launch(linear.weight, linear.scales, q, xs, gated, a, stages, cfg["trigger"], out)
        return out
    method._multiply = patched
    def measure(label, cfg, at_once, jobs=(("plain", 1),)):
        if time.time() - T0 > limit: return
        state["cfg"] = cfg
        fused.AT_ONCE = fp8_cuda.AT_ONCE = at_once
        line = []
        with torch.inference_mode():
            for kind, batch in jobs: line.append(f"{kind} {batch}: {step_ms(model, STRICT, batch, 256, kind):.3f}")
        say(f"{form} {label} norm at once {int(at_once)}: " + "  ".join(line), f"({time.time() - T0:.0f} s)")
    all_jobs = (("plain", 1), ("chain", 1), ("plain", 8))
    measure("product", None, False, all_jobs)
    def t(q, o, g, d, trigger): return {"qkv": q, "output": o, "gate_up": g, "down": d, "trigger": trigger}
    if form == "int4":
        same = [(1, 4)] * 4
        for trigger in (0, 1, 2):
            for at_once in (False, True):
                measure(f"all T1S4 trigger {trigger}", t(*same, trigger), at_once)
        state["cfg"] = t(*same, 0); fused.AT_ONCE = False
        timeline(model, "native")
        state["cfg"] = None
        timeline(model, "product")
        measure("all T1S4 trigger 0", t(*same, 0), False, (("chain", 1), ("plain", 8)))
        for trigger, at_once in ((0, False), (0, True), (2, False)):
            measure(f"all T1S3 trigger {trigger}", t(*[(1, 3)] * 4, trigger), at_once)
            measure(f"all T1S6 trigger {trigger}", t(*[(1, 6)] * 4, trigger), at_once)
            measure(f"all T2S4 trigger {trigger}", t(*[(2, 4)] * 4, trigger), at_once)
            measure(f"all T1S2 trigger {trigger}", t(*[(1, 2)] * 4, trigger), at_once)
        measure("gate_up only", t((0, 0), (0, 0), (1, 4), (0, 0), 0), False)
        measure("down only", t((0, 0), (0, 0), (0, 0), (1, 4), 0), False)
        measure("qkv only", t((1, 4), (0, 0), (0, 0), (0, 0), 0), False)
        measure("output only", t((0, 0), (1, 4), (0, 0), (0, 0), 0), False)
    else:
        base = [(1, 8), (1, 8), (1, 6), (1, 8)]
        for trigger, at_once in ((0, False), (1, False), (2, False), (0, True)):
            measure(f"8 8 6 8 trigger {trigger}", t(*base, trigger), at_once)
        measure("2x6 2x6 1x6 2x6", t((2, 6), (2, 6), (1, 6), (2, 6), 0), False)
        measure("4 4 4 4", t(*[(1, 4)] * 4, 0), False)
        measure("12 12 6 12", t((1, 12), (1, 12), (1, 6), (1, 12), 1), False)
        for n in range(4):
            one = [(0, 0)] * 4; one[n] = base[n]
            measure(f"only {list(SHAPES)[n] if n < 2 else ['gate_up', 'down'][n - 2]}", t(*one, 0), False)
        measure("8 8 6 8 trigger 0", t(*base, 0), False, all_jobs)

if __name__ == "__main__":
    torch.zeros(1, device="cuda")
    say("start", f"{time.time() - T0:.1f} s")
    limit = float(sys.argv[2])
    with torch.inference_mode():
        if sys.argv[1] == "words": isolated_words(limit - 8); checks()
        elif sys.argv[1] == "fp8": isolated_fp8(limit - 3)
        else: whole(sys.argv[1].removesuffix("-whole"), limit - 3)
