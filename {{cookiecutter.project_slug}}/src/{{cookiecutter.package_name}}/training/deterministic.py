"""`deterministic=true`: two fresh runs are equal bit for bit; what it switches off, and what it refuses."""

import os
import re
import traceback
from pathlib import Path

import torch
from torch import nn

from ..environment.device import Device
from .choices import Choice
from .settings import WORKSPACE

# How torch begins: "put_ does not have a deterministic implementation, but you set ..."
_ALERT = re.compile(r"(\S+) does not have a deterministic implementation")


def set_deterministic(wish: bool) -> None:
    """Before the model is built: torch takes deterministic kernels, and raises where there is none.

    Lightning's own switch is not used: it overwrites the user's cuBLAS workspace. torch also fills
    new tensors with NaN from here on (`torch.utils.deterministic.fill_uninitialized_memory`): a
    write to each, kept because a kernel that reads what nobody wrote would differ from run to run.
    """
    torch.use_deterministic_algorithms(wish)  # in newer torch Inductor's autotuning too
    torch.backends.cudnn.deterministic = wish
    torch.backends.cudnn.benchmark = not wish


def deterministic_choice(device: Device) -> Choice:
    """What it costs here, in words; how much depends on model and batch."""
    if device.kind == "cpu":
        cost = "ordered scatter and index kernels, new tensors filled"
    else:
        cost = (
            "no kernel is picked by trial, no atomic adds, no channels_last, new tensors filled; cuBLAS "
            f"workspace {os.environ.get(WORKSPACE)}"
        )
    return Choice(True, f"costs speed: {cost}; by how much, see throughput in summary.json")


def without_deterministic_form(error: BaseException, module: nn.Module) -> str | None:
    """A line that names the operation and its layer, when that is what `error` is about."""
    found = _ALERT.search(str(error))
    if found is None:
        return None
    return (
        f"deterministic=true, but {found[1]} has no deterministic form ({_place(error, module)}): "
        "use another operation there, or deterministic=false"
    )


def _place(error: BaseException, module: nn.Module) -> str:
    """The innermost layer whose code the error came through, else the line of code outside of torch."""
    names = {id(layer): name for name, layer in module.named_modules() if name}
    layer, line = "", "in backward"
    for frame, number in traceback.walk_tb(error.__traceback__):
        layer = names.get(id(frame.f_locals.get("self")), layer)
        file = Path(frame.f_code.co_filename)
        if not {"torch", "lightning"} & set(file.parts):
            line = f"{file.name}:{number}"
    return f"in layer {layer}" if layer else line
