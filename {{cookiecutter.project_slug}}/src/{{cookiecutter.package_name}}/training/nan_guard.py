"""NaN and Inf: found at the step they come from, by cheap operations on the device.

`on_nan=stop` reads nothing per step; the flags are read where the losses are read anyway and before
each checkpoint. `on_nan=skip` must know before the optimizer steps, which costs a device read (and,
with several ranks, one small all-reduce) at every step.
"""

import math
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor, distributed, nn
from torch.distributed.tensor import DTensor

from ..errors import TrainingFailed
from ..run.folder import RunFolder, write_json
from .nan_report import NanReport, batch_of

ROW = 10  # skipped steps in a row that are taken for a training that has broken


class NanGuard(Callback):
    """Watches each step's loss and gradients.

    A step is bad when its loss or a gradient is not finite. Under fp16 only the loss counts: the loss
    scaler probes for gradients that overflow, and leaves those steps out by itself.

    Args:
        on_nan: `stop` or `skip`. A skipped step changes neither weights, optimizer nor buffers; it
            counts as a step, its batch is used up, and the learning-rate schedule goes on.
    """

    def __init__(self, folder: RunFolder, on_nan: str) -> None:
        self.folder, self.skips = folder, on_nan == "skip"
        self.skipped = self.in_a_row = 0
        self.last_skipped = False  # the last step was left out
        self.first_step = self.good_step = 0  # where training began; the last good step
        self.loss: Tensor | None = None  # sum over the micro batches of this step
        self.kept: list[Tensor] = []  # buffers after the last good step

    def state_dict(self) -> dict[str, Any]:
        return {"skipped": self.skipped, "in_a_row": self.in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.skipped, self.in_a_row = state["skipped"], state["in_a_row"]

    def on_train_start(self, trainer: Trainer, module: Any) -> None:
        self.trainer, self.module, self.first_step = trainer, module, trainer.global_step
        self.scaled = getattr(trainer.precision_plugin, "scaler", None) is not None
        self.names = [name for name, p in module.named_parameters() if p.requires_grad]
        self.good = torch.ones((), dtype=torch.bool, device=module.device)  # no bad step so far
        self.count = torch.zeros((), dtype=torch.int64, device=module.device)  # steps until then
        # Norm of each gradient, then the loss: of the last good step and of the first bad one.
        nothing = torch.full((len(self.names) + 1,), math.nan, device=module.device)
        self.last_good = self.first_bad = nothing
        module.watch_gradients = self._step
        if self.skips:
            state = module.state_dict().keys()  # tables that are no state do not change
            self.buffers = [buffer for name, buffer in module.named_buffers() if name in state]
            self.kept = [buffer.clone() for buffer in self.buffers]
            self.folder.update_summary(skipped_steps=self.skipped)

    def on_train_end(self, trainer: Trainer, module: Any) -> None:
        module.watch_gradients = None

    def on_before_backward(self, trainer: Trainer, module: Any, loss: Tensor) -> None:
        loss = loss.detach()
        self.loss = loss if self.loss is None else self.loss + loss

    def _step(self, norms: Tensor) -> None:
        """Between backward and the optimizer's step."""
        assert self.loss is not None
        loss, self.loss = self.loss, None
        row = torch.cat((norms, loss.reshape(1).to(norms.dtype)))
        # Few and small: x - x is NaN for NaN and Inf, and so is a sum that holds one of them.
        total = loss if self.scaled else row.sum()
        fine = total - total == 0
        if self.skips:
            self._skip_or_keep(fine, row)
            return
        self.first_bad = torch.where(self.good, row, self.first_bad)
        self.good = self.good & fine
        self.last_good = torch.where(self.good, row, self.last_good)
        self.count += self.good

    def _skip_or_keep(self, fine: Tensor, row: Tensor) -> None:
        flag = fine.to(torch.int32)
        if distributed.is_initialized():
            distributed.all_reduce(flag, op=distributed.ReduceOp.MIN)
        self.last_skipped = not bool(flag)
        step = self.trainer.global_step + 1
        if not self.last_skipped:
            self.in_a_row, self.last_good, self.good_step = 0, row, step
            if self.kept:
                torch._foreach_copy_(self.kept, self.buffers)
            return
        # Without gradients the optimizer's step touches neither weights nor moments.
        self.module.zero_grad(set_to_none=True)
        if self.kept:
            torch._foreach_copy_(self.buffers, self.kept)
        self.skipped, self.in_a_row = self.skipped + 1, self.in_a_row + 1
        self.first_bad = row
        self.folder.update_summary(skipped_steps=self.skipped)
        if self.in_a_row > ROW:
            self._fail(step, self.good_step, f"{self.in_a_row} steps in a row were skipped")
        if self.trainer.is_global_zero:
            words = f"step {step} skipped: loss or gradient not finite ({self.skipped} so far)"
            print(words, flush=True)

    def check(self, trainer: Trainer) -> None:
        """Read the flags; every rank must call it.

        Raises:
            TrainingFailed: on all ranks, when a bad step lies behind.
        """
        if self.skips:
            return
        count = trainer.strategy.reduce(self.count.clone(), reduce_op="min")
        last = self.first_step + int(count)
        if last < trainer.global_step:
            self._fail(last + 1, last)

    def check_state(self, trainer: Trainer) -> None:
        """As `check`, and look at what would be saved: finite steps can lead to infinite weights."""
        self.check(trainer)
        bad = torch.tensor(_bad_values(trainer), device=trainer.strategy.root_device)
        if int(trainer.strategy.reduce(bad, reduce_op="max")):
            step = trainer.global_step
            self._fail(step, step, "a weight or the optimizer's state was not finite")

    def _fail(self, step: int, norms_step: int, what: str = "") -> None:
        """Every rank comes here at the same time."""
        trainer, module = self.trainer, self.module
        bad = (~torch.isfinite(self.first_bad)).to(torch.int32)
        bad = trainer.strategy.reduce(bad, reduce_op="max")  # a shard of it lies on each rank
        *bad_norms, bad_loss = bad.tolist()
        if not what:
            loss = "the training loss"
            what = (
                f"{loss if bad_loss else 'the gradient (the loss was still finite)'} was not finite"
            )
        sharded = any(isinstance(p, DTensor) for p in module.parameters())
        report = NanReport(
            what=what,
            step=step,
            rank=trainer.global_rank,
            lr=trainer.optimizers[0].param_groups[0]["lr"],
            batch=batch_of(trainer.datamodule, step),  # type: ignore[attr-defined]
            bad_gradients=[n for n, flag in zip(self.names, bad_norms, strict=True) if flag],
            parameters=len(self.names),
            norms_step=norms_step,
            norms=None if sharded else dict(zip(self.names, self.last_good.tolist())),
            skipped=self.skipped,
        )
        if self.folder.writes:
            write_json(self.folder.path / "nan.json", report.plain())
        raise TrainingFailed(report.text())


def _bad_values(trainer: Trainer) -> int:
    """1 when a weight or an optimizer moment is not finite or a buffer is NaN (masks may hold Inf)."""
    module = trainer.lightning_module
    tensors = [p.detach() for p in module.parameters()]
    for optimizer in trainer.optimizers:
        for state in optimizer.state.values():
            tensors += [value for value in state.values() if isinstance(value, Tensor)]
    flags = [torch.isfinite(_local(t)).all() for t in tensors]
    flags += [~torch.isnan(_local(b)).any() for b in module.buffers() if b.is_floating_point()]
    device = module.device
    return int(not torch.stack([flag.to(device) for flag in flags]).all())


def _local(value: Tensor | nn.Parameter) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value
