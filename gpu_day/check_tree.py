"""TreeFlash beside model.TreeAttention on layouts of all kinds: CPU, fp64-free, seconds."""
from common import model, np, torch
from attention import Plan, TreeFlash
draw = np.random.default_rng(0)
worst = 0.0
for case in range(12):
    layout, start = [], 0
    for _ in range(draw.integers(1, 4)):
        p = int(draw.integers(1, 40))
        kind = draw.integers(3) if case else 0
        branches = [] if kind == 0 else [int(n) for n in draw.integers(1, 12, kind * 2)]
        layout.append((start, p, branches)); start += p + sum(branches)
    q = torch.randn(1, 4, start, 16, requires_grad=True); k, v = (torch.randn(1, 2, start, 16, requires_grad=True) for _ in "kv")
    w = torch.randn(1, 4, start, 16)
    a = TreeFlash.apply(q, k, v, Plan(layout, torch.device("cpu")), 0.25)
    parts = model.attention_parts(layout)
    b = model.TreeAttention.apply(q, k.repeat_interleave(2, 1), v.repeat_interleave(2, 1), parts, 0.25)
    ga, gb = (torch.autograd.grad((x * w).sum(), (q, k, v)) for x in (a, b))
    gap = max(((x - y).norm() / y.norm()).item() for x, y in zip((a, *ga), (b, *gb)))
    worst = max(worst, gap)
    print(case, layout, f"{gap:.1e}")
print("worst", worst)
assert worst < 1e-5
