"""`reproduce RUN`: the same code, settings and seed once more, and the metrics step by step."""

import argparse
import dataclasses
import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from ..environment.folders import project_root, shown
from ..environment.software import NUMERIC
from ..errors import FAILED, INTERRUPTED, OK, PAUSED, Refused

# Where the run lies and how it is shown is ours to say; the rest is as it was.
_OURS = ("name", "run_dir", "runs_dir", "data_dir", "resume", "stop_at", "detach", "logger")


def reproduce(words: list[str]) -> int:
    """Run a run again and compare; 0: identical or within tolerance, 1: it differs, 2: refused."""
    options = _parser().parse_args(words)
    out = sys.stderr if options.json else sys.stdout
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # the tree must go
    try:
        with _printing_to(out):
            report = _reproduce(options)
    except KeyboardInterrupt:
        print("interrupted: nothing was compared", file=sys.stderr)
        return INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, before)
    if options.json:
        print(json.dumps(report, indent=2, ensure_ascii=False))
    return int(report["exit"])


def _parser() -> argparse.ArgumentParser:
    name = __name__.split(".")[0].replace("_", "-")
    parser = argparse.ArgumentParser(
        f"{name} reproduce",
        description="Run a run again from its recorded code, and compare the metrics step by step.",
    )
    add = parser.add_argument
    add("run", type=Path, help="the run folder")
    add("--tolerance", type=float, default=1e-3, help="relative; default: %(default)s")
    add("--steps", type=int, help="only the first so many optimizer steps")
    add("--here", action="store_true", help="use today's code, not the recorded")
    add("--keep", action="store_true", help="leave the work tree with the recorded code")
    add("--output", type=Path, help="folder of the new run; default: <run>/reproduced")
    add("--json", action="store_true", help="print the result as JSON (all else to stderr)")
    return parser


def _reproduce(options: argparse.Namespace) -> dict[str, Any]:
    """Run it again; what is to be printed as JSON, with the exit code under `exit`."""
    from .code_tree import code_tree, words_for
    from .compare import read_metrics

    run = options.run.expanduser().absolute()
    manifest, summary = _read(run, "manifest.json"), _read(run, "summary.json")
    there = read_metrics(run / "metrics.csv") if (run / "metrics.csv").is_file() else {}
    last_step = _last_step(options, run, summary, there)
    output = _output(options.output or run / "reproduced")
    whole = f"{summary['status']} at step {summary.get('steps')}, {words_for(manifest['git'])}"
    print(f"{'run:':<15} {shown(run)} ({whole})", flush=True)
    root, tree = project_root(), manifest["git"]
    with nullcontext(root) if options.here else code_tree(tree, root, options.keep) as place:
        overrides, facts = _overrides(manifest, summary, run, last_step, output)
        found = _before(manifest, facts, None if options.here else place)
        for difference in found:
            print(difference, flush=True)
        code = _train(place, manifest, overrides)
    report = {"exit": code, "run": str(run), "reproduced": str(output)}
    if not (output / "metrics.csv").is_file():  # refused, or it failed at once
        return {**report, "exit": code or FAILED, "differences": _plain(found), "verdict": None}
    later, verdict = _judge(run, output, there, options.tolerance, last_step)
    ended = code in (OK, PAUSED) or summary["status"] == "failed"
    end = "" if ended else f"; but it ended with code {code}"
    print(f"{'reproduced:':<15} {shown(output)}\n{'verdict:':<15} {verdict}{end}", flush=True)
    report["exit"] = FAILED if verdict.word == "differs" or not ended else OK
    found += later
    return {**report, "differences": _plain(found), "verdict": dataclasses.asdict(verdict)}


def _judge(
    run: Path, output: Path, there: dict[Any, str], tolerance: float, last_step: int | None
) -> tuple[list[Any], Any]:
    """What turned out to differ besides the machine, and how the metrics compare."""
    from .compare import compare, read_metrics
    from .differences import run_differences

    manifests = _read(run, "manifest.json"), _read(output, "manifest.json")
    later = [*_settings(run, output), *run_differences(*manifests)]
    for difference in later:
        print(difference, flush=True)
    return later, compare(there, read_metrics(output / "metrics.csv"), tolerance, last_step)


def _plain(found: list[Any]) -> list[dict[str, str]]:
    return [dataclasses.asdict(difference) for difference in found]


def _read(run: Path, name: str) -> dict[str, Any]:
    try:
        content: dict[str, Any] = json.loads((run / name).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise Refused(f"{shown(run)} is no run folder ({name} cannot be read)") from error
    if name == "manifest.json" and not {"overrides", "git"} <= content.keys():
        raise Refused(f"{shown(run)} was made before runs kept what `reproduce` needs")
    return content


def _last_step(
    options: argparse.Namespace, run: Path, summary: dict[str, Any], there: dict[Any, Any]
) -> int | None:
    """Where to stop; None: at the end. A run that did not end is reproduced as far as it came."""
    steps = sorted({step for step, _ in there})
    if not steps:
        raise Refused(f"{shown(run)} has no metrics yet: there is nothing to compare")
    if options.steps is not None and options.steps < steps[0]:
        raise Refused(f"--steps {options.steps}: the first metrics are of step {steps[0]}")
    whole = summary["status"] == "finished"
    if options.steps is not None and (not whole or options.steps < steps[-1]):
        return min(options.steps, steps[-1])
    return None if whole else steps[-1]


def _output(wish: Path) -> Path:
    """The folder for the new run: `wish`, or with a number behind it when that is taken."""
    place, number = wish.expanduser().absolute(), 1
    while place.exists():
        number += 1
        place = place.with_name(f"{wish.name}-{number}")
    return place


def _overrides(
    manifest: dict[str, Any],
    summary: dict[str, Any],
    run: Path,
    last_step: int | None,
    output: Path,
) -> tuple[list[str], dict[str, Any]]:
    """The recorded command's overrides with our own places; and the facts of this machine."""
    from omegaconf import OmegaConf

    from ..environment.device import find_device
    from ..run.manifest import machine_facts

    device = find_device("cpu" if manifest["device"]["kind"] == "cpu" else "auto")
    count = manifest["world_size"]
    if device.kind == "cuda":
        count = min(count, device.count)
    kept = [word for word in manifest["overrides"] if _key(word) not in _OURS]
    # A list of GPU numbers stays as long as it fits; `auto` becomes what it was.
    if count != manifest["world_size"] or not any(word.startswith("devices=[") for word in kept):
        own = ("devices", "num_nodes", "accelerator")
        kept = [word for word in kept if _key(word) not in own]
        kept += [f"devices={count}", "num_nodes=1", f"accelerator={device.kind}"]
    data = Path(OmegaConf.load(run / "config.yaml").data_dir)
    places = {
        "data_dir": data if data.is_dir() else project_root() / "data",
        "run_dir": output,
        "resume": summary.get("resumed_from") or "never",
    }
    kept += ["logger=none", *(f"{key}={_quoted(value)}" for key, value in places.items())]
    kept += [f"stop_at={last_step}"] if last_step else []
    return kept, {**machine_facts(device), "world_size": count}


def _quoted(value: Any) -> str:
    """A path in the quotes of Hydra's grammar, whatever letters it has."""
    escaped = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _key(word: str) -> str:
    return word.lstrip("+~").split("=")[0].split(".")[0]


def _before(manifest: dict[str, Any], facts: dict[str, Any], tree: Path | None) -> list[Any]:
    """What differs before anything runs, heaviest first. `tree`: the recorded code; None: today's."""
    from ..run.identity import code_fingerprint
    from .code_tree import lost_files
    from .differences import Difference, attempt_differences, by_weight, machine_differences

    facts["cpu"] = {**facts["cpu"], "threads": manifest["cpu"]["threads"]}  # we set them so
    found = [*machine_differences(manifest, facts), *attempt_differences(manifest)]
    code = code_fingerprint(tree / "src" / __name__.split(".")[0] if tree else None)
    if code != manifest["code"]:
        why = "git does not bring all of it back" if tree else "--here: today's code"
        found.append(Difference("heavy", "code", manifest["code"], code, why))
    lost = lost_files(manifest["git"]) if tree else []
    if lost:
        names = ", ".join(lost[:5])
        why = "untracked and large, or no text: the manifest keeps names only"
        found.append(Difference("medium", "files", names, "none", why))
    return by_weight(found)


def _settings(run: Path, output: Path) -> list[Any]:
    """Settings that decide the result and are otherwise than in the run."""
    from omegaconf import OmegaConf

    from ..run.identity import differences, telling_settings
    from .differences import Difference

    there, here = (telling_settings(OmegaConf.load(f / "config.yaml")) for f in (run, output))  # type: ignore[arg-type]
    return [
        Difference("heavy", "setting", "as recorded", words, "other training")
        for words in differences(there, here)
    ]


def _train(tree: Path, manifest: dict[str, Any], overrides: list[str]) -> int:
    """Train from the tree, under the variables and in the directory of then; its exit code."""
    from .code_tree import child_environment

    environment = child_environment(tree)
    for name in NUMERIC:
        environment.pop(name, None)
        if name in manifest["environment"]:
            environment[name] = manifest["environment"][name]
    if manifest["world_size"] == 1:  # with several, Lightning shares the threads out
        environment.setdefault("OMP_NUM_THREADS", str(manifest["cpu"]["threads"]))
    there = Path(manifest["working_directory"])  # relative paths among the overrides
    words = [sys.executable, "-m", __name__.split(".")[0], "train", *overrides]
    process = subprocess.Popen(
        words, env=environment, cwd=there if there.is_dir() else tree, stdout=sys.stdout.fileno()
    )
    try:
        return process.wait()
    except KeyboardInterrupt:
        process.terminate()  # it saves and leaves; a second one ends it at once
        process.wait()
        raise


@contextmanager
def _printing_to(out: Any) -> Iterator[None]:
    before, sys.stdout = sys.stdout, out
    try:
        yield
    finally:
        sys.stdout = before
