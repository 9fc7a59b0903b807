"""How many small faults do the tests see? ``make mutants`` (docs/contributing.md).

A clone of the last commit is made, and one fault at a time is written into it. The tests that run the faulty line are
run in a forked child, until one fails: the cheap ones, then those that start servers and engines. The sample is at
random; what is cut short is still a random sample.
"""

from __future__ import annotations

import argparse
import ast
import ctypes
import gc
import importlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import psutil
import pytest

from tests.mutants.mutants import PACKAGES, Mutant, mutants_of

PROJECT = ("rlcore", "tasks", "infra", "flows")
NAMES_A_PACKAGE = re.compile(r"\b(tasks|flows|rlcore\.(algorithms|training|segment))\b")
TESTS_SECONDS = 60  # of all tests of one fault in a stage, by their times without it; the quickest are run
AT_IMPORT = ""  # what coverage.py calls the time before the first test
PR_SET_CHILD_SUBREAPER = 36
CONTROL_EVERY = 25  # one of so many: the same tests without the fault have to pass


@dataclass(frozen=True, slots=True)
class Stage:
    """Tests that judge the faults which no stage before has seen."""

    name: str
    files: tuple[str, ...]
    processes: bool  # judges that start Prefect's server, and what the processes of a test run counts


STAGES = (
    Stage(
        name="cheap",
        files=(
            "tests/contracts/test_*.py",
            "tests/unit/test_*.py",
            "tests/numerics/test_*.py",
            "tests/docs/test_words.py",
            "tests/long/test_mirror.py",  # those of its cases that start no flow
        ),
        processes=False,
    ),
    Stage(
        name="flows",
        files=(
            "tests/flows/test_*.py",
            "tests/integration/test_segment.py",
            "tests/integration/test_train_tiny.py",
            "tests/integration/test_weight_sync.py",
        ),
        processes=True,
    ),
)


@dataclass(frozen=True, slots=True)
class Verdict:
    path: str
    number: int
    line: int
    before: str
    after: str
    message: bool
    outcome: str  # killed, timeout, survived, untested; control, broken-control
    stage: str  # the last one that judged
    test: str  # that failed
    said: str
    seconds: float

    @property
    def package(self) -> str:
        return next(package for package in PACKAGES if self.path.startswith(package + "/"))

    @property
    def seen(self) -> bool:
        return self.outcome in ("killed", "timeout")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", type=int, default=600, help="how many faults, over the four packages by their number")
    parser.add_argument("--minutes", type=float, default=60, help="no new one is begun after this time")
    parser.add_argument("--folder", type=Path, default=Path("build/mutants"), help="takes up where it was left")
    args = parser.parse_args()
    folder = args.folder.resolve()
    tree = folder / "tree"
    if Path.cwd() != tree:
        clone(folder)
        os.chdir(tree)
        os.environ.update(PYTHONPATH=str(tree), PYTHONDONTWRITEBYTECODE="1")
        words = [f"--seed={args.seed}", f"--size={args.size}", f"--minutes={args.minutes}", f"--folder={folder}"]
        # Once more from the clone: its modules are to be imported, not those of this checkout.
        os.execv(sys.executable, [sys.executable, "-W", "ignore", "-m", "tests.mutants", *words])
    results = folder / f"seed-{args.seed}.jsonl"
    adopt_orphans()
    stages = [Tests(stage, map_of(folder, stage)) for stage in STAGES]
    judges = ", ".join(f"{tests.stage.name} {len(tests.seconds)}" for tests in stages)
    say(f"seed {args.seed}, {args.size} faults of commit {commit(tree)[:10]}; tests that judge: {judges}")
    chosen = sample(tree, args.seed, args.size)
    judge_sample(tree, chosen, stages, results, time.monotonic() + 60 * args.minutes)
    report(results)


def adopt_orphans() -> None:
    """What a killed test leaves becomes a child of this process, so that it is found."""
    if ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def commit(tree: Path) -> str:
    return subprocess.run(["git", "rev-parse", "HEAD"], cwd=tree, check=True, capture_output=True, text=True).stdout


def clone(folder: Path) -> None:
    """A clone of the last commit, with the maps of its tests. Compiled files hold for a content, not for a time."""
    tree = folder / "tree"
    if all(map_of(folder, stage).exists() for stage in STAGES) and commit(tree) == commit(Path.cwd()):
        subprocess.run(["git", "checkout", "--quiet", "."], cwd=tree, check=True)
        return
    shutil.rmtree(folder, ignore_errors=True)  # verdicts over another commit too
    folder.mkdir(parents=True)
    subprocess.run(["git", "clone", "--quiet", ".", str(tree)], check=True)
    (tree / ".venv").symlink_to(Path(sys.prefix).resolve())
    compiled = ["-m", "compileall", "-q", "--invalidation-mode", "checked-hash", *PROJECT]
    subprocess.run([sys.executable, *compiled], cwd=tree, check=True)
    for stage in STAGES:
        make_map(folder, stage)


def map_of(folder: Path, stage: Stage) -> Path:
    return folder / f"map-{stage.name}.json"


def make_map(folder: Path, stage: Stage) -> None:
    tree = folder / "tree"
    files = [path for pattern in stage.files for path in sorted(tree.glob(pattern))]
    # A test may reach a package through a program that it starts.
    useful = [path for path in files if stage.processes or NAMES_A_PACKAGE.search(path.read_text())]
    chosen = [str(path.relative_to(tree)) for path in useful]
    options = ["-p", "tests.mutants.coverage_map", "-p", "no:cacheprovider", "-q", "--timeout=300"]
    environment = os.environ | {"PYTHONPATH": str(tree), "MUTANTS_MAP": str(map_of(folder, stage))}
    if stage.processes:
        environment["MUTANTS_PROCESSES"] = "1"
    subprocess.run([sys.executable, "-m", "pytest", *options, *chosen], cwd=tree, env=environment, check=False)


class Modules:
    """The project's, imported once; a child imports again what has a fault in it, and all that builds on that."""

    def __init__(self, tree: Path) -> None:
        paths = [path.relative_to(tree) for part in PROJECT for path in sorted((tree / part).rglob("*.py"))]
        self._names = {str(path): ".".join(path.with_suffix("").parts).removesuffix(".__init__") for path in paths}
        known = set(self._names.values())
        self._users: dict[str, set[str]] = {}
        for path, name in self._names.items():
            for used in _imported(ast.parse((tree / path).read_text())):
                parts = used.split(".")
                for end in range(1, len(parts) + 1):
                    if (module := ".".join(parts[:end])) in known:
                        self._users.setdefault(module, set()).add(name)
        for name in known:
            if not name.endswith("__main__"):
                importlib.import_module(name)

    def forget(self, path: str) -> None:
        waiting, forgotten = {self._names[path]}, set[str]()
        while waiting:
            name = waiting.pop()
            forgotten.add(name)
            waiting |= self._users.get(name, set()) - forgotten
        for name in forgotten:
            sys.modules.pop(name, None)
            package, _, last = name.rpartition(".")
            if package in sys.modules:  # "from package import module" takes it from there
                vars(sys.modules[package]).pop(last, None)


def _imported(tree: ast.Module) -> set[str]:
    """Modules, and what may be modules."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            found |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
    return found


class Tests:
    """Which tests of a stage run which line."""

    def __init__(self, stage: Stage, path: Path) -> None:
        self.stage = stage
        known = json.loads(path.read_text())
        self.seconds: dict[str, float] = {
            test: seconds
            for test, seconds in known["seconds"].items()
            if test not in known["unfit"] and seconds <= TESTS_SECONDS
        }
        self._lines: dict[str, dict[str, list[str]]] = known["lines"]
        self._of_file: dict[str, list[str]] = {}
        for test in self.seconds:
            self._of_file.setdefault(test.partition("::")[0], []).append(test)

    def of(self, mutant: Mutant) -> list[str]:
        """Those that run the statement; of one that runs at import, then those that run any of the file. Of each, the
        quickest first."""
        lines = self._lines.get(mutant.path, {})
        first, last = mutant.lines
        contexts = {context for line, those in lines.items() if first <= int(line) <= last for context in those}
        tests = self._named(contexts)
        order = sorted(tests, key=lambda test: self.seconds[test])
        if not mutant.in_function or AT_IMPORT in contexts:
            others = self._named({context for those in lines.values() for context in those}) - tests
            order += sorted(others, key=lambda test: self.seconds[test])
        chosen: list[str] = []
        seconds = 0.0
        for test in order:
            seconds += self.seconds[test]
            if seconds > TESTS_SECONDS:
                break
            chosen.append(test)
        return chosen

    def _named(self, contexts: set[str]) -> set[str]:
        tests = {test for context in contexts for test in self._of_file.get(context, [context])}
        return tests & self.seconds.keys()


def sample(tree: Path, seed: int, size: int) -> list[Mutant]:
    """Of each package by its share of all, and all of them in a random order."""
    everything: dict[str, list[Mutant]] = {package: [] for package in PACKAGES}
    for package, mutants in everything.items():
        for path in sorted((tree / package).glob("*.py")):
            mutants.extend(mutants_of(tree, str(path.relative_to(tree))))
    total = sum(map(len, everything.values()))
    say("faults: " + ", ".join(f"{package} {len(mutants)}" for package, mutants in everything.items()))
    chance = random.Random(seed)
    chosen = [
        mutant
        for mutants in everything.values()
        for mutant in chance.sample(mutants, round(size * len(mutants) / total))
    ]
    chance.shuffle(chosen)
    return chosen


def judge_sample(tree: Path, chosen: list[Mutant], stages: Sequence[Tests], results: Path, until: float) -> None:
    known = {(verdict.path, verdict.number) for verdict in read(results)}
    modules = Modules(tree)
    gc.freeze()  # or each collection of a child walks, and so copies, all that the parent has imported
    with results.open("a") as file:
        for place, mutant in enumerate(chosen):
            if (mutant.path, mutant.number) in known:
                continue
            if time.monotonic() > until:
                say(f"{len(chosen) - place} are left: out of time")
                break
            verdicts = [judged_in_turn(tree, mutant, stages, modules)]
            if place % CONTROL_EVERY == 0 and verdicts[0].outcome == "killed":
                judges = next(tests for tests in stages if tests.stage.name == verdicts[0].stage)
                verdicts.append(judged(tree, mutant, judges, modules, control=True))
            for verdict in verdicts:
                file.write(json.dumps(asdict(verdict)) + "\n")
                file.flush()
                say(f"{verdict.stage}: {verdict.outcome} {verdict.path}:{verdict.line} {verdict.seconds:.1f} s")


def judged_in_turn(tree: Path, mutant: Mutant, stages: Sequence[Tests], modules: Modules) -> Verdict:
    """The verdict of the first stage that sees the fault; else of the last one that had a test to run."""
    answer: Verdict | None = None
    for tests in stages:
        verdict = judged(tree, mutant, tests, modules)
        if answer is not None and verdict.outcome == "untested":
            continue
        seconds = verdict.seconds + (answer.seconds if answer is not None else 0.0)
        answer = replace(verdict, seconds=seconds)
        if answer.seen:
            break
    assert answer is not None
    return answer


def judged(tree: Path, mutant: Mutant, tests: Tests, modules: Modules, *, control: bool = False) -> Verdict:
    started = time.monotonic()
    path = tree / mutant.path
    original = path.read_text()
    chosen = tests.of(mutant)
    outcome, test, said = "untested", "", ""
    source = original if control else mutant.source()
    if chosen and ast.dump(ast.parse(source)) == ast.dump(ast.parse(original)) and not control:
        raise AssertionError(f"{mutant} changes nothing")
    if chosen:
        path.write_text(source)
        try:
            outcome, test, said = run_forked(
                tree, chosen, 60 + 5 * sum(tests.seconds[name] for name in chosen), lambda: modules.forget(mutant.path)
            )
        finally:
            path.write_text(original)
    if control:
        outcome = "control" if outcome == "survived" else "broken-control"
    return Verdict(
        path=mutant.path,
        number=mutant.number,
        line=mutant.lines[0],
        before=mutant.before,
        after=mutant.after,
        message=mutant.message,
        outcome=outcome,
        stage=tests.stage.name,
        test=test,
        said=said,
        seconds=time.monotonic() - started,
    )


def run_forked(tree: Path, chosen: list[str], limit: float, first: Callable[[], None]) -> tuple[str, str, str]:
    answer = tree.parent / "child.json"
    temporary = tree.parent / "temporary"  # with a folder of its own for each child: Prefect caches by path
    answer.unlink(missing_ok=True)
    temporary.mkdir(exist_ok=True)
    driver = psutil.Process()
    before = set(driver.children(recursive=True))
    child = os.fork()
    if child == 0:
        first()
        _in_child(tree.parent, chosen, temporary, answer)
    until = time.monotonic() + limit
    while os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None and time.monotonic() < until:
        time.sleep(0.05)
    in_time = time.monotonic() < until
    while left := set(driver.children(recursive=True)) - before:
        for process in left:
            with suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left)
    shutil.rmtree(temporary)
    if not in_time:
        return "timeout", "", f"over {limit:.0f} s"
    if not answer.exists():
        return "killed", "", "the process of the tests died"
    told = json.loads(answer.read_text())
    return ("survived", "", "") if told["code"] == 0 else ("killed", told["test"], told["said"])


class _FirstFailure:
    def __init__(self) -> None:
        self.test = self.said = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report)

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.failed and not self.test:
            self.test, self.said = report.nodeid, str(report.longrepr)[-300:]


def _in_child(folder: Path, chosen: list[str], temporary: Path, answer: Path) -> None:
    """Never returns."""
    code = 1
    failure = _FirstFailure()
    try:
        with (folder / "child.log").open("w") as log:
            os.dup2(log.fileno(), 1)
            os.dup2(log.fileno(), 2)
        options = ["-x", "-q", "-p", "no:cacheprovider", f"--basetemp={temporary / str(os.getpid())}", "--timeout=180"]
        code = int(pytest.main([*options, *chosen], plugins=[failure]))
        answer.write_text(json.dumps({"code": code, "test": failure.test, "said": failure.said}))
    except BaseException:  # noqa: BLE001 - a fault may raise anything; without an answer it counts as seen
        traceback.print_exc()
    finally:
        os._exit(code)


def read(results: Path) -> list[Verdict]:
    if not results.exists():
        return []
    return [Verdict(**json.loads(line)) for line in results.read_text().splitlines()]


def report(results: Path) -> None:
    verdicts = read(results)
    rows = [verdict for verdict in verdicts if not verdict.outcome.endswith("control")]
    say(f"\n{Counter(verdict.outcome for verdict in verdicts)}\n")
    say("| package | faults | seen | share | without texts for people | seen | share |")
    say("| --- | --- | --- | --- | --- | --- | --- |")
    for package in [*PACKAGES, "all"]:
        ours = [verdict for verdict in rows if package in ("all", verdict.package)]
        plain = [verdict for verdict in ours if not verdict.message]
        say(f"| {package} | {_cells(ours)} | {_cells(plain)} |")
    for verdict in sorted(rows, key=lambda verdict: (verdict.path, verdict.line)):
        if not verdict.seen:
            kind = f"{verdict.outcome}, {verdict.stage}" + (", text" if verdict.message else "")
            say(f"\n{verdict.path}:{verdict.line} ({kind})\n  {_line(verdict.before)}\n  {_line(verdict.after)}")


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _cells(verdicts: list[Verdict]) -> str:
    seen = sum(verdict.seen for verdict in verdicts)
    share = f"{100 * seen / len(verdicts):.1f} %" if verdicts else "-"
    return f"{len(verdicts)} | {seen} | {share}"


def _line(code: str) -> str:
    return " ".join(code.split())


if __name__ == "__main__":
    main()
