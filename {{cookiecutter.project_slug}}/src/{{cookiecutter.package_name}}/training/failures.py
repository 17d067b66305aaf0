"""What went wrong, in one line that says what to do, where the library's own words do not."""

from ..errors import TrainingFailed
from .deterministic import without_deterministic_form
from .prepare import Job

_UNUSED = (
    "some parameters took no part in a step (a branch left them out), and DDP waits for their "
    "gradients: strategy.find_unused_parameters=true allows it; every rank must take the same branch "
    "(data.order.same_chance)"
)


def explained(error: RuntimeError, job: Job) -> TrainingFailed | None:
    """The failure in our words; None: the error speaks for itself, with its traceback."""
    words = str(error)
    if "find_unused_parameters" in words:
        return TrainingFailed(_UNUSED)
    if line := without_deterministic_form(error, job.module):
        return TrainingFailed(line)
    return None
