"""Draws small changes of `prope/` and says which ones the tests notice.

They are those of cosmic-ray (`pip install cosmic-ray`).

    python tests/support/draw_mutants.py --count=80 --seed=0 --output=mutants.jsonl

Each changed file is tested by the files below, first without the slow tests, then with them; the
first failure ends it. A position is drawn first, then one of the operators that change it.
Run it in a clone that nothing else uses: it edits files.
"""

import argparse
import collections
import json
import pathlib
import random
import sys

from cosmic_ray.commands.init import _all_work_items
from cosmic_ray.mutating import mutate_and_test

ROOT = pathlib.Path(__file__).parents[2]
# By the path in prope/, the longest that fits; names of test files without "test_".
TESTS = {
    "": "house help refusals train nonfinite faults",
    "rope.py": "rope rope_transforms model",
    "encodings.py": "encodings model config_json transformers",
    "attention.py": "attention context model sharded",
    "model.py": "model encodings parameters sample sharded precision",
    "stack/parameters.py": "parameters model sharded optimizer",
    "loss.py": "loss sharded evaluate",
    "optimizer.py": "optimizer nonfinite transformers",
    "step.py": "sharded nonfinite optimizer precision train",
    "sharding.py": "sharded context rope_sharded pod",
    "config.py": "config refusals train",
    "sample.py": "sample",
    "evaluate.py": "evaluate",
    "ask.py": "scores",
    "analyze.py": "analyze",
    "report.py": "report",
    "plan.py": "plan",
    "bench.py": "bench",
    "export_hf.py": "exchange",
    "import_hf.py": "exchange config_json",
    "check_port.py": "check_port",
    "golden": "check_port",
    "data": "windows sources task_windows tokenizer prepare",
    "data/view.py": "view tokenizer",
    "data/vocabulary.py": "tokenizer",
    "data/windows.py": "windows analyze_input",
    "data/mixture.py": "sources evaluate_text task_windows",
    "data/store": "remote prepare sources",
    "data/tasks": "prompts scores task_windows",
    "data/sources": "sources refusals reading prepare remote",
    "workdir/hashes.py": "parameters damage train",
    "workdir": "records metrics lease checkpoints nonfinite train damage faults",
    "runtime": "processes runtime refusals config nonfinite train faults pod",
    "runtime/validate.py": "refusals config train",
    "runtime/files.py": "damage reading places refusals faults",
    "runtime/environment.py": "environment",
    "runtime/memory.py": "runtime evaluate_text",
    "runtime/xla_flags.py": "plan runtime",
    "runtime/profiler.py": "profile",
    "inference": "evaluate evaluate_text damage intervene read_only sample",
    "inference/generation.py": "sample",
    "inference/asking.py": "scores",
    "inference/trials.py": "scores",
    "hf": "exchange config_json transformers",
    "analysis": "measures planted analysis_input theory",
    "analysis/theory.py": "theory",
    "cost": "cost hlo bench plan",
    "kernels": "attention context kernels",
    "sweep": "grid report sweep records",
    "sweep/maps.py": "longcontext_report",
    "html": "report planted",
}


def tests_of(path: str) -> list[str]:
    """The test files for a file of prope/, given by its path there."""
    key = max(
        (key for key in TESTS if path == key or path.startswith(f"{key}/") or not key), key=len
    )
    files = [sorted(ROOT.glob(f"tests/*/test_{name}.py")) for name in TESTS[key].split()]
    assert all(files), f"{key}: {TESTS[key]}: a file that is not there"
    return [str(file) for found in files for file in found]


def draw(count: int, seed: int) -> list:
    """Draws `count` changes at different positions."""
    paths = sorted(ROOT.glob("prope/**/*.py"))
    by_position = collections.defaultdict(list)
    for item in _all_work_items([path.relative_to(ROOT) for path in paths], {}):
        (mutation,) = item.mutations
        if (
            "BinaryOperator_BitOr" not in mutation.operator_name
        ):  # mostly annotations, such as int | None
            by_position[str(mutation.module_path), mutation.start_pos].append(mutation)
    rng = random.Random(seed)
    return [
        rng.choice(by_position[position]) for position in rng.sample(sorted(by_position), count)
    ]


def main() -> None:
    """Tests each drawn change and appends a line of JSON: file, operator, outcome, difference."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=80, help="number of changes (default: 80)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw (default: 0)")
    parser.add_argument(
        "--output", default="mutants.jsonl", help="lines are appended (default: mutants.jsonl)"
    )
    options = parser.parse_args()
    for number, mutation in enumerate(draw(options.count, options.seed)):
        files = " ".join(tests_of(str(pathlib.Path(mutation.module_path).relative_to("prope"))))
        for tier in ("not slow", ""):
            command = f"{sys.executable} -m pytest -q -x -m '{tier}' -p no:cacheprovider {files}"
            result = mutate_and_test([mutation], command, timeout=1200)
            if result.test_outcome != "survived":
                break
        record = {
            "number": number,
            "file": str(mutation.module_path),
            "operator": mutation.operator_name,
        }
        record |= {"tier": tier, "outcome": str(result.test_outcome), "diff": result.diff}
        with open(options.output, "a") as file:
            file.write(json.dumps(record) + "\n")
        print(
            f"{number}: {record['file']} {record['operator']}: "
            f"{record['outcome']} ({tier or 'all'})",
            flush=True,
        )


if __name__ == "__main__":
    main()
