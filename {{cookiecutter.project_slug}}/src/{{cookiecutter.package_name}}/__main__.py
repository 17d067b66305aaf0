"""The one door: `VERB key=value ...`, alike for the console command, `python -m` and torchrun.

Nothing heavy is imported here, so that `--help` answers at once; a verb imports what it needs.
"""

import contextlib
import importlib
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

from .errors import FAILED, INTERRUPTED, OK, PAUSED, USAGE, Refused, TrainingFailed

if TYPE_CHECKING:
    from omegaconf import DictConfig

# verb: (module, what it does). The function has the verb's name, takes the composed config and
# returns the exit code; the config has the verb's name too.
VERBS = {
    "train": ("training.train", "train, then evaluate on the test split"),
    "evaluate": ("training.evaluate", "evaluate a run's checkpoint: run=<folder>"),
    "export": ("delivery.export", "write a run's checkpoint as one plain file: run=<folder>"),
}
# Verbs with ordinary options (see `VERB --help`). The function takes the words behind the verb.
PLAIN_VERBS = {
    "reproduce": ("delivery.reproduce", "run a run again and compare: reproduce <folder>"),
}


def main() -> int:
    """Run the verb named on the command line and return the command's exit code."""
    if len(sys.argv) < 2 or sys.argv[1] in ("-h", "--help"):
        with contextlib.suppress(BrokenPipeError):
            print(_usage(), flush=True)
        return OK if len(sys.argv) > 1 else USAGE
    verb = sys.argv[1]
    if verb == "train":
        with _early_signals():
            return _compose_and_run(verb)
    if verb in PLAIN_VERBS:
        return _run(verb, sys.argv[2:])
    if verb not in VERBS:
        known = ", ".join((*VERBS, *PLAIN_VERBS))
        return _say(f"there is no verb {verb!r}; choose one of: {known}", USAGE)
    return _compose_and_run(verb)


@contextlib.contextmanager
def _early_signals() -> Iterator[None]:
    """Until training has handlers of its own nothing is lost by ending at once, and a scheduler's signal
    gets the exit code that says "run it again"."""
    numbers = [getattr(signal, name, None) for name in ("SIGTERM", "SIGUSR1")]
    before = {}
    with contextlib.suppress(ValueError):  # not the main thread
        for number in filter(None, numbers):
            if signal.getsignal(number) == signal.SIG_DFL:
                before[number] = signal.signal(number, _leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave(number: int, frame: object) -> None:
    name = signal.Signals(number).name
    line = f"\n{_name()}: {name} while nothing is being trained; the same command goes on\n"
    os.write(2, line.encode())
    os._exit(PAUSED)


def _compose_and_run(verb: str) -> int:
    """Let Hydra compose the verb's config and hand it over; a sweep runs each trial in a process."""
    import hydra
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode

    from .training import settings

    settings.register()
    whole = list(sys.argv)
    codes: list[int] = []
    taken: list[list[str]] = []
    crash: list[BaseException] = []

    def task(config: "DictConfig") -> None:
        # Lightning starts the other ranks from sys.argv: they need the verb back.
        sys.argv = whole
        if HydraConfig.get().mode == RunMode.MULTIRUN:
            overrides = list(HydraConfig.get().overrides.task)
            if config.get("detach"):
                codes.append(_say("detach=true with -m: the trials would run all at once", USAGE))
                return
            places = [word for word in overrides if word.startswith(("name=", "run_dir="))]
            if places and places in taken:
                codes.append(_say(f"{places[0]}: an earlier trial of this sweep has it", USAGE))
                return
            taken.append(places)
            trial = [sys.executable, "-m", str(__package__), verb, *overrides]
            codes.append(subprocess.run(trial).returncode)
            return
        try:
            codes.append(_run(verb, config))
        except BaseException as error:
            crash.append(error)  # Hydra would cut the traceback short

    # @hydra.main refuses a bare word, so the verb is taken off while it parses.
    sys.argv = [whole[0], *map(_quoted, whole[2:])]
    door = hydra.main(
        version_base="1.3", config_path=f"pkg://{__package__}.configs", config_name=verb
    )
    try:
        door(task)()
    except SystemExit as exit_:  # Hydra has printed what is wrong with the overrides
        for word in whole[2:]:
            if exit_.code and (meant := settings.near(verb, word)):
                _say(f"{word.split('=')[0]}: do you mean {meant}?", USAGE)
        return USAGE if exit_.code else OK
    finally:
        sys.argv = whole
    if crash:
        raise crash[0]
    return max(codes, key=abs, default=OK)


def _quoted(word: str) -> str:
    """Put a plain value into the quotes that Hydra's grammar wants for letters beyond ASCII, `=` and
    parentheses, so that a path can be typed as it is. Lists, sweeps and quoted values stay."""
    key, equals, value = word.partition("=")
    plain = value[:1] not in ("'", '"', "[", "{", "$") and "," not in value
    if not equals or not plain or not re.search(r"[^\x00-\x7f]|[=()]", value):
        return word
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'{key}="{escaped}"'


def _run(verb: str, what: "DictConfig | list[str]") -> int:
    try:
        if verb in VERBS:
            from .training import settings

            settings.set_workspace(what)  # type: ignore[arg-type]
        module = importlib.import_module(f".{(VERBS | PLAIN_VERBS)[verb][0]}", __package__)
        return int(getattr(module, verb)(what))
    except Refused as refusal:
        return _say(str(refusal), USAGE)
    except TrainingFailed as failure:
        return _say(str(failure), FAILED, failure.rank is not None)
    except KeyboardInterrupt:
        return _say("interrupted", INTERRUPTED)


def _say(line: str, code: int, any_rank: bool = False) -> int:
    """Print one line to stderr (once, whatever the number of ranks) and pass the code on."""
    if any_rank or int(os.environ.get("RANK") or os.environ.get("LOCAL_RANK") or 0) == 0:
        print(f"{_name()}: {line}", file=sys.stderr)
    return code


def _name() -> str:
    return str(__package__).replace("_", "-")


def _usage() -> str:
    every = (VERBS | PLAIN_VERBS).items()
    verbs = "\n".join(f"  {verb:<10} {text}" for verb, (_, text) in every)
    return (
        f"usage: {_name()} VERB [key=value ...]\n\n{verbs}\n\n"
        f"`{_name()} VERB --help` shows every key and group; `-m key=1,2` sweeps over values (train)."
    )


if __name__ == "__main__":
    sys.exit(main())
