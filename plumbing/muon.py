"""
plumbing/muon.py (tests/test_model.py): torch's Muon on a CPU, in fp32 and shared out over the
ranks.

  X = G / |G|, then five times  X = a X + (b X X^T + c (X X^T)^2) X, which is nearly semi-orthogonal

Else each rank of the toy's cold start would spend a seventh of a step on the same products.
Reads and writes nothing. Used by sft.py.
"""
import torch
import torch.distributed as dist

import launch


def patch_muon(optimizer, layers):
    """Muon on a CPU: in fp32, and if each rank holds all of every matrix, a rank orthogonalises
    only its share of them and sends the new weights to the others."""
    rank, world = (0, 1) if hasattr(layers[0], "full_tensor") else launch.rank_and_world()
    turns = []  # one entry for each matrix that this step has reached, in the order of `layers`

    def zeropower(matrix, *how):
        turns.append(len(turns) % world)
        return semi_orthogonal(matrix, *how) if turns[-1] == rank else 0 * matrix

    def send(*_):
        turns.clear()
        stepped = [matrix for matrix in layers if matrix.grad is not None]
        for owner in range(min(world, len(stepped))):  # one message for all matrices of a rank
            matrices = stepped[owner::world]
            flat = torch.cat([matrix.detach().flatten() for matrix in matrices])
            dist.broadcast(flat, owner)
            for matrix, part in zip(matrices, flat.split([matrix.numel() for matrix in matrices])):
                matrix.detach().copy_(part.view_as(matrix))

    # torch's own iterations run in bf16. A CPU without bf16 instructions multiplies that a hundred
    # times slower than fp32.
    torch.optim._muon._zeropower_via_newtonschulz = zeropower
    if world > 1:
        optimizer.register_step_post_hook(send)


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
