"""How far a sum of 16-bit gradients over NCCL is from one that rounds once, as sums on CPUs do.

    torchrun --nproc-per-node 4 benchmarks/nccl_rounding.py
    WEFT_SHARE_GPUS=1 torchrun --nproc-per-node 4 benchmarks/nccl_rounding.py    # ranks that share one GPU

NCCL adds in the format of the tensor, at every hop of its ring. Each rank draws normal numbers; the table gives the
error of the sum, as a share of the root mean square of the exact one, beside that of rounding the exact sum once.
"""

from __future__ import annotations

import torch

from weft.comm.collectives import all_reduce
from weft.mesh import make_mesh
from weft.plan.plan import Axes, Plan
from weft.world import join_world, leave_world

NUMEL = 1 << 20


def main() -> None:
    world = join_world()
    with make_mesh(Plan(axes=Axes(data=world.size)), world, groups=[("data", "gradients")]) as mesh:
        group = mesh.group("data", "gradients")
        if world.rank == 0:
            print(f"{world.size} ranks over {world.backend}")
            print(f"{'format':10} {'rounded once':>13} {'over NCCL':>10} {'ratio':>6}")
        for dtype in (torch.bfloat16, torch.float16, torch.float32):
            drawn = torch.randn(NUMEL, generator=torch.Generator().manual_seed(world.rank)).to(world.device, dtype)
            exact = drawn.double()
            all_reduce(exact, group)
            summed = drawn.clone()
            all_reduce(summed, group)
            scale = exact.square().mean().sqrt()
            once, found = ((one.double() - exact).square().mean().sqrt() / scale for one in (exact.to(dtype), summed))
            if world.rank == 0:
                print(f"{str(dtype)[6:]:10} {float(once):13.2e} {float(found):10.2e} {float(found / once):6.2f}")
    leave_world()


if __name__ == "__main__":
    main()
