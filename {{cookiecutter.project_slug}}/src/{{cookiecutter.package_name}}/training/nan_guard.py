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
        self.loss_finite: Tensor | None = None  # of the micro batches of this step
        self.kept: list[Tensor] = []  # buffers after the last good step

    def state_dict(self) -> dict[str, Any]:
        return {"skipped": self.skipped, "in_a_row": self.in_a_row}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.skipped, self.in_a_row = state["skipped"], state["in_a_row"]

    def on_train_start(self, trainer: Trainer, module: Any) -> None:
        self.trainer, self.module, self.first_step = trainer, module, trainer.global_step
        self.scaled = getattr(trainer.precision_plugin, "scaler", None) is not None
        self.names = [name for name, p in module.named_parameters() if p.requires_grad]
        yes = torch.ones((), dtype=torch.bool, device=module.device)
        self.good = self.losses_good = yes  # no bad step so far; no bad loss so far
        self.count = torch.zeros(2, dtype=torch.int64, device=module.device)  # steps until then
        nothing = torch.full((len(self.names),), math.nan, device=module.device)
        self.newest = self.finite = nothing  # norms of the first bad step; of the last good one
        module.watch_gradients = self._step
        if self.skips:
            state = module.state_dict().keys()  # tables that are no state do not change
            self.buffers = [buffer for name, buffer in module.named_buffers() if name in state]
            self.kept = [buffer.clone() for buffer in self.buffers]
            self.folder.update_summary(skipped_steps=self.skipped)

    def on_train_end(self, trainer: Trainer, module: Any) -> None:
        module.watch_gradients = None

    def on_before_backward(self, trainer: Trainer, module: Any, loss: Tensor) -> None:
        finite = torch.isfinite(loss.detach())
        self.loss_finite = finite if self.loss_finite is None else self.loss_finite & finite

    def _step(self, norms: Tensor) -> None:
        """Between backward and the optimizer's step."""
        assert self.loss_finite is not None
        loss, self.loss_finite = self.loss_finite, None
        fine = loss if self.scaled else loss & torch.isfinite(norms).all()
        if self.skips:
            self._skip_or_keep(loss, fine, norms)
            return
        self.newest = torch.where(self.good, norms, self.newest)
        self.good = self.good & fine
        self.losses_good = self.losses_good & loss
        self.finite = torch.where(self.good, norms, self.finite)
        self.count += torch.stack((self.good, self.losses_good))

    def _skip_or_keep(self, loss: Tensor, fine: Tensor, norms: Tensor) -> None:
        flags = torch.stack((fine, loss)).to(torch.int32)
        if distributed.is_initialized():
            distributed.all_reduce(flags, op=distributed.ReduceOp.MIN)
        good, loss_good = (bool(flag) for flag in flags.tolist())
        self.last_skipped = not good
        step = self.trainer.global_step + 1
        if good:
            self.in_a_row, self.finite, self.good_step = 0, norms, step
            if self.kept:
                torch._foreach_copy_(self.kept, self.buffers)
            return
        # Without gradients the optimizer's step touches neither weights nor moments.
        self.module.zero_grad(set_to_none=True)
        if self.kept:
            torch._foreach_copy_(self.buffers, self.kept)
        self.skipped, self.in_a_row = self.skipped + 1, self.in_a_row + 1
        self.newest = norms
        what = "the gradient" if loss_good else "the training loss"
        if self.in_a_row > ROW:
            what = f"on_nan=skip: {self.in_a_row} steps in a row; {what}"
            self._fail(what, step, self.good_step)
        self.folder.update_summary(skipped_steps=self.skipped)
        if self.trainer.is_global_zero:
            print(f"skipped step {step}: {what} was not finite ({self.skipped} so far)", flush=True)

    def check(self, trainer: Trainer) -> None:
        """Read the flags; every rank must call it.

        Raises:
            TrainingFailed: on all ranks, when a bad step lies behind.
        """
        if self.skips:
            return
        good, losses = trainer.strategy.reduce(self.count.clone(), reduce_op="min").tolist()
        if self.first_step + good == trainer.global_step:
            return
        what = "the gradient (the loss was still finite)" if losses > good else "the training loss"
        self._fail(what, self.first_step + good + 1, self.first_step + good)

    def check_state(self, trainer: Trainer) -> None:
        """As `check`, and look at what would be saved: finite steps can lead to infinite weights."""
        self.check(trainer)
        bad = torch.tensor(_bad_values(trainer), device=trainer.strategy.root_device)
        if int(trainer.strategy.reduce(bad, reduce_op="max")):
            step = trainer.global_step
            self._fail("the weights or the optimizer's state", step, step)

    def _fail(self, what: str, step: int, norms_step: int) -> None:
        """Every rank comes here at the same time."""
        trainer, module = self.trainer, self.module
        bad = (~torch.isfinite(self.newest)).to(torch.int32)
        bad = trainer.strategy.reduce(bad, reduce_op="max")  # a shard of it lies on each rank
        sharded = any(isinstance(p, DTensor) for p in module.parameters())
        report = NanReport(
            what=what,
            step=step,
            rank=trainer.global_rank,
            lr=trainer.optimizers[0].param_groups[0]["lr"],
            batch=batch_of(trainer.datamodule, step),  # type: ignore[attr-defined]
            bad_gradients=[n for n, flag in zip(self.names, bad.tolist(), strict=True) if flag],
            parameters=len(self.names),
            norms_step=norms_step,
            norms=None if sharded else dict(zip(self.names, self.finite.tolist(), strict=True)),
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
