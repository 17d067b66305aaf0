"""The two ways a command can end that are not success and not a crash."""


class Refused(Exception):
    """A request that the machine or the configuration cannot meet.

    The door prints the message as one line and exits with code 2. Raise it before data is touched and
    say three things: what was asked, why it cannot be, and what to do instead.
    """


class TrainingFailed(Exception):
    """Training cannot go on (a loss that is not finite, for example). One line, exit code 1."""
