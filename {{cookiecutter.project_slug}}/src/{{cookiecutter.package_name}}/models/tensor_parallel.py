"""How a GPT's layers are split over the devices of a tensor-parallel group.

Megatron's scheme (Shoeybi et al. 2019) with sequence parallelism (Korthikanti et al. 2022): in each
block the first matrix is split by columns and the second by rows; between them the sequence is split,
norms included, so that every parameter is part of the plan (gradient clipping needs one mesh).
"""

from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
)

from .gpt import GPT

SEQUENCE = 1  # of (batch, sequence, width)


def tensor_parallel_plan(net: GPT) -> dict[str, ParallelStyle]:
    """Style by module name, for `torch.distributed.tensor.parallel.parallelize_module`."""
    split, whole = Shard(SEQUENCE), Replicate()
    plan: dict[str, ParallelStyle] = {
        "embedding": RowwiseParallel(input_layouts=whole, output_layouts=split),
        "norm": SequenceParallel(sequence_dim=SEQUENCE),
        "head": ColwiseParallel(input_layouts=split, output_layouts=whole),
    }
    for number in range(len(net.blocks)):
        block = f"blocks.{number}"
        plan |= {
            f"{block}.attention_norm": SequenceParallel(sequence_dim=SEQUENCE),
            f"{block}.attention": PrepareModuleInput(
                input_layouts=(split, None, None), desired_input_layouts=(whole, None, None)
            ),
            f"{block}.attention.qkv": ColwiseParallel(),
            f"{block}.attention.out": RowwiseParallel(output_layouts=split),
            f"{block}.mlp_norm": SequenceParallel(sequence_dim=SEQUENCE),
            f"{block}.mlp": PrepareModuleInput(input_layouts=split, desired_input_layouts=whole),
            f"{block}.mlp.into": ColwiseParallel(),
            f"{block}.mlp.out": RowwiseParallel(output_layouts=split),
        }
        if net.shape.mlp == "swiglu":
            plan[f"{block}.mlp.gate"] = ColwiseParallel()
    return plan
