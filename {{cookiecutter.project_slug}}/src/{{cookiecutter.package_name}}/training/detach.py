"""`detach=true`: train in a session of its own, which outlives the terminal and the connection."""

import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from ..environment.folders import shown, typed
from ..errors import OK, Refused
from ..run.output import LOG

_TELL = f"{__name__.split('.')[0].upper()}_TELL"  # a pipe to the command that detached us


def detach(launched_outside: bool) -> int:
    """Start this command once more in a new session; returns when its run folder is there.

    Returns the exit code: 0, or that of the training when it ended before it had a run folder.

    Raises:
        Refused: under torchrun or srun, which would lose sight of their ranks.
    """
    if launched_outside:
        raise Refused(
            "detach=true under torchrun or srun: they must stay; use `setsid nohup torchrun ... &`"
        )
    words = [word for word in sys.argv[1:] if not word.lstrip("+").startswith("detach=")]
    ours, theirs = os.pipe()
    with tempfile.TemporaryFile() as early, open(ours) as tell:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__.split(".")[0], *words, "detach=false"],
            stdin=subprocess.DEVNULL,
            stdout=early,
            stderr=early,
            start_new_session=True,
            pass_fds=[theirs],
            env={**os.environ, _TELL: str(theirs), "PYTHONUNBUFFERED": "1"},
        )
        os.close(theirs)
        run = tell.read()  # the folder, or nothing when it ends before
        early.seek(0)
        sys.stderr.write(early.read().decode(errors="replace"))
        if not run:
            return process.wait()
    log = typed(Path(run) / LOG)
    print(f"{'detached:':<15} process {process.pid}, run {shown(run)}")
    print(f"{'follow:':<15} tail -f {log}")
    print(f"{'stop:':<15} kill {process.pid}  (saves a checkpoint; the same command goes on)")
    return OK


def tell_run(run: Path) -> bool:
    """Let the command that detached this process know the run folder; False: nobody did."""
    number = os.environ.pop(_TELL, None)
    if number is None:
        return False
    with open(int(number), "w") as tell:
        tell.write(str(run))
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    return True
