"""Prints what the newest run of a project came to: the end of `make demo`."""

import json
import sys
from pathlib import Path


def newest(project: Path) -> Path:
    summaries = list((project / "runs").rglob("summary.json"))
    if not summaries:
        sys.exit(f"No run in {project / 'runs'}")
    return max(summaries, key=lambda path: path.stat().st_mtime)


def show(summary: Path) -> None:
    result = json.loads(summary.read_text(encoding="utf-8"))
    print(f"\nStatus: {result['status']} after {result['steps']} steps")
    for name, value in sorted(result["metrics"].items()):
        print(f"  {name:<24} {value:.4g}" if isinstance(value, float) else f"  {name:<24} {value}")
    print(f"Run folder: {summary.parent}")
    for name in ("summary.json", "report.html"):
        if (summary.parent / name).is_file():
            print(f"  {name:<24} {summary.parent / name}")


if __name__ == "__main__":
    show(newest(Path(sys.argv[1])))
