"""The ways a command can end that are not success and not a crash, and their exit codes."""

OK, FAILED, USAGE = 0, 1, 2
PAUSED = 75  # EX_TEMPFAIL: the same command goes on
INTERRUPTED = 130  # what a shell gives for Ctrl-C


class Refused(Exception):
    """A request that the machine or the configuration cannot meet.

    The door prints the message as one line and exits with code 2. Raise it before data is touched and
    say three things: what was asked, why it cannot be, and what to do instead.
    """


class TrainingFailed(Exception):
    """Training cannot go on (a loss that is not finite, for example). One line, exit code 1.

    Args:
        rank: the rank that has met this alone and must say so itself; None: rank 0 speaks for all.
    """

    def __init__(self, line: str, rank: int | None = None) -> None:
        super().__init__(line if rank is None else f"rank {rank}: {line}")
        self.rank = rank


class Stopped(Exception):
    """Training pauses on request, after a complete checkpoint. Exit code 75.

    Attributes:
        step: the optimizer step of that checkpoint.
    """

    def __init__(self, why: str, step: int) -> None:
        super().__init__(why)
        self.step = step
