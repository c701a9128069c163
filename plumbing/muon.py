"""
plumbing/muon.py (tests/test_model.py): the iterations of Muon, for a CPU.

  X = G / |G|, then five times  X = a X + (b X X^T + c (X X^T)^2) X, which is nearly semi-orthogonal

torch's own run in bf16. A CPU without bf16 instructions multiplies that a hundred times slower than
fp32. Reads and writes nothing. Used by sft.py.
"""


def semi_orthogonal(matrix, coefficients, steps, eps):
    """The semi-orthogonal matrix near to `matrix`, by Newton-Schulz iterations as in torch.optim
    (torch 2.13), but in the dtype of the matrix."""
    a, b, c = coefficients
    wide = matrix.T if matrix.size(0) > matrix.size(1) else matrix
    x = wide / wide.norm().clamp(min=eps)  # the largest singular value is then at most 1
    for _ in range(steps):
        gram = x @ x.T
        x = x.addmm(gram.addmm(gram, gram, beta=b, alpha=c), x, beta=a)
    return x.T if wide is not matrix else x
