"""Kill a training again and again at random moments, and hold it against one that nobody disturbed.

    python tests/kill_drill.py [--times 20] [--seed 1] [--keep FOLDER] [override ...]

Real training with loader workers. Every attempt is the same command; it ends by SIGKILL or SIGTERM,
at a random moment or as soon as a checkpoint is being written. The weights and the metrics at the end
must be those of the undisturbed run, bit for bit.
"""

import argparse
import contextlib
import csv
import json
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

import torch

from {{ cookiecutter.package_name }}.__main__ import main as door

TRAIN = [
    *("experiment=vision", "model.backbone=test_resnet", "+model.backbone_options.drop_rate=0.2"),
    *("data.augment=light", "batch_size=32", "max_steps=100", "validate_every_steps=20"),
    *("checkpoint_every_steps=3", "limit_eval_batches=2", "log_every_steps=5", "num_workers=2"),
    *("accelerator=cpu", "precision=fp32"),
]


def attempt(words: list[str], log: Path) -> int:
    """Start the training in a process group of its own; returns its process id.

    A fork instead of a new interpreter: importing torch would take most of the drill's time.
    """
    number = os.fork()
    if number:
        return number
    os.setsid()
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    sys.argv = [sys.argv[0], "train", *words]
    code = 1
    try:
        code = door()
    finally:
        os._exit(code)


def wait_for_save(checkpoints: Path, seconds: float) -> None:
    """Until a checkpoint is being written, or the time is over."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and not any(checkpoints.glob(".step-*")):
        time.sleep(0.0005)


def ended(group: int, seconds: float = 20) -> bool:
    """Whether every process of the group is gone within that time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(group, os.WNOHANG)
        try:
            os.killpg(group, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def result(run: Path) -> tuple[list[dict[str, str]], dict[str, torch.Tensor]]:
    """What a run recorded (without rates) and its last weights."""
    with (run / "metrics.csv").open() as file:
        rows = [dict(row, samples_per_s="") for row in csv.DictReader(file)]
    index = json.loads((run / "checkpoints/index.json").read_text())
    content = torch.load(run / "checkpoints" / index["last"], weights_only=True)
    return rows, content["state_dict"]


def undisturbed(run: Path, words: list[str], log: Path) -> tuple[float, float]:
    """The run to compare with; returns the seconds until its folder was there, and those after."""
    started = time.monotonic()
    process = attempt([*words, f"run_dir={run}"], log)
    while not (run / "checkpoints").exists() and not os.waitpid(process, os.WNOHANG)[0]:
        time.sleep(0.01)
    ready = time.monotonic()
    with contextlib.suppress(ChildProcessError):
        os.waitpid(process, 0)
    return ready - started, time.monotonic() - ready


def disturbed(process: int, run: Path, wait: float, kind: signal.Signals, in_save: bool) -> int:
    """Kill the attempt after `wait` seconds; returns its exit code."""
    time.sleep(wait)
    if in_save:
        wait_for_save(run / "checkpoints", wait)
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, kind) if kind == signal.SIGKILL else os.killpg(process, kind)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def drill(folder: Path, times: int, seed: int, words: list[str]) -> list[str]:
    """Run the drill in `folder`; returns what went wrong, one line each."""
    log, throw, wrong = folder / "output.log", random.Random(seed), []
    words = [f"data_dir={folder}/data", *TRAIN, *words]
    start, duration = undisturbed(folder / "undisturbed", words, log)
    run, share = folder / "killed", 1.2 * duration / times
    for number in range(times):
        kind, in_save = throw.choice([signal.SIGKILL, signal.SIGTERM]), number % 4 == 0
        # One in five dies while it starts.
        wait = start * throw.random() if number % 5 == 4 else start + share * throw.random()
        process = attempt([*words, f"run_dir={run}"], log)
        code = disturbed(process, run, wait, kind, in_save)
        print(f"{kind.name}{' in a save' if in_save else ''}: exit code {code}", flush=True)
        if code not in (-signal.SIGKILL, -signal.SIGTERM, 75, 0):
            wrong.append(f"kill {number} by {kind.name}: exit code {code}, see {log}")
        if not ended(process):
            wrong.append(f"kill {number}: processes of the run are left")
    code = os.waitstatus_to_exitcode(os.waitpid(attempt([*words, f"run_dir={run}"], log), 0)[1])
    if code:
        return [*wrong, f"the last attempt failed, see {log}"]
    return [*wrong, *compared(folder / "undisturbed", run)]


def compared(first: Path, second: Path) -> list[str]:
    """How two finished runs differ."""
    (rows, weights), (other_rows, other_weights) = result(first), result(second)
    wrong = [f"{k} differs" for k, v in weights.items() if not torch.equal(v, other_weights[k])]
    if rows != other_rows:
        step = next((a["step"] for a, b in zip(rows, other_rows) if a != b), "the end")
        wrong.append(f"metrics.csv differs, first at step {step}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description="Kill a training at random moments and compare.")
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1, help="of the moments")
    parser.add_argument("--keep", type=Path, help="work here and leave it")
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.keep or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        wrong = drill(folder.absolute(), options.times, options.seed, options.overrides)
    print(*wrong or ["the same weights and metrics, bit for bit"], sep="\n")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
