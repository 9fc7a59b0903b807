"""decide() and choose() of clean, on inventories made by hand: what may go, and in which order."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tasks.clean.decide import (
    DAY_SECONDS,
    AblationFacts,
    Inventory,
    Item,
    Kind,
    RunFacts,
    UserFacts,
    Verdict,
    VersionFacts,
    choose,
    decide,
)

NOW = 1000 * DAY_SECONDS
OLD = NOW - 31 * DAY_SECONDS
NEW = NOW - 29 * DAY_SECONDS

CHECKPOINT = Item(Kind.CHECKPOINTS, "runs/a/checkpoints/step-000020", 100, OLD, run="a")
DATASET = Item(Kind.DATASETS, "datasets/d", 10, OLD)
MODEL = Item(Kind.MODELS, "models/merged-a-step-20", 50, OLD)
EVALUATION = Item(Kind.EVALUATIONS, "evaluations/e", 5, OLD)
FINISHED = RunFacts("a", alive=False, finished=True)


def verdict(item: Item, **facts: object) -> Verdict:
    (answer,) = decide(Inventory(now=NOW, older_than_days=30, items=(item,), **facts))
    return answer


def reason(item: Item, **facts: object) -> str:
    answer = verdict(item, **facts)
    assert not answer.removable
    return f"{answer.reason} ({answer.by})"


@pytest.mark.parametrize(
    "item",
    [
        *(Item(kind, "x", 1, OLD) for kind in Kind if kind not in (Kind.TRASH, Kind.RECORDS, Kind.TEMPORARY)),
        Item(Kind.CHECKPOINTS, "runs/a/checkpoints/step-000020", 1, OLD, run="a"),
    ],
    ids=lambda item: f"{item.kind.value}{' of a run' if item.run else ''}",
)
def test_age_decides_when_nothing_refers_to_it(item: Item) -> None:
    assert verdict(item, runs=(FINISHED,)).reason == "unused for 30 days, and nothing refers to it"
    assert reason(replace(item, used=NEW), runs=(FINISHED,)) == "made or used within 30 days ()"


def test_temporary_files_go_after_a_day_and_interrupted_removals_at_once() -> None:
    left = Item(Kind.TEMPORARY, "datasets/.d.x.tmp", 1, NOW - 1.1 * DAY_SECONDS)
    assert verdict(left).removable
    assert not verdict(replace(left, used=NOW - 0.9 * DAY_SECONDS)).removable
    assert verdict(Item(Kind.TRASH, ".trash/x", 1, NOW)).removable


def test_a_removal_that_was_interrupted_goes_on_whatever_refers_to_the_old_name() -> None:
    assert verdict(Item(Kind.TRASH, ".trash/1-datasets%2Fd", 1, NOW), experiments=(UserFacts("e", frozenset({"."})),))


@pytest.mark.parametrize("kind", [Kind.CHECKPOINTS, Kind.LOGS, Kind.PAGES, Kind.DAMAGED, Kind.STACKS, Kind.TEMPORARY])
def test_nothing_of_a_living_run_goes(kind: Kind) -> None:
    item = Item(kind, "runs/a/x", 1, 0.0, run="a")
    assert reason(item, runs=(replace(FINISHED, alive=True),)) == "its run is alive (a)"


def test_a_run_that_can_be_continued_keeps_its_checkpoints_and_what_it_uses() -> None:
    run = RunFacts("a", alive=False, finished=False, uses=frozenset({"datasets/d", "models/merged-a-step-20"}))
    assert reason(CHECKPOINT, runs=(run,)) == "its run is not finished and can be continued (a)"
    assert reason(DATASET, runs=(run,)) == "a run that is alive or can be continued uses it (a)"
    assert not verdict(MODEL, runs=(run,)).removable
    assert verdict(Item(Kind.DAMAGED, "runs/a/checkpoints/.damaged-x", 1, OLD, run="a"), runs=(run,)).removable
    assert verdict(DATASET, runs=(replace(run, finished=True),)).removable


def test_a_model_in_use_keeps_its_files_checkpoint_data_and_page() -> None:
    uses = frozenset({CHECKPOINT.key, DATASET.key, MODEL.key})
    version = VersionFacts("toy/3 @champion", "a", uses)
    for item in (CHECKPOINT, DATASET, MODEL):
        assert reason(item, runs=(FINISHED,), versions=(version,)) == (
            "a registered model in use refers to it (toy/3 @champion)"
        )
    page = Item(Kind.PAGES, "runs/a/report", 1, OLD, run="a")
    assert (
        reason(page, runs=(FINISHED,), versions=(version,)) == "a registered model came from its run (toy/3 @champion)"
    )
    older = replace(CHECKPOINT, key="runs/a/checkpoints/step-000010")
    assert verdict(older, runs=(FINISHED,), versions=(version,)).removable


def test_an_evaluation_stays_with_its_policy() -> None:
    item = replace(EVALUATION, policies=(MODEL.key,))
    assert verdict(item).removable
    assert not verdict(item, versions=(VersionFacts("toy/3", None, frozenset({MODEL.key})),)).removable


def test_an_evaluation_stays_as_long_as_its_run_can_be_continued() -> None:
    item = replace(EVALUATION, policies=(CHECKPOINT.key,))
    run = replace(FINISHED, finished=False)
    assert reason(item, runs=(run,)) == "an evaluation of a run that is alive or can be continued (a)"
    assert verdict(item, runs=(FINISHED,)).removable
    assert not verdict(item, runs=(replace(FINISHED, alive=True),)).removable


def test_the_leaderboard_keeps_its_rows() -> None:
    rows = frozenset({"evaluations/e/completions.parquet", CHECKPOINT.key})
    run = replace(FINISHED, leaderboard=rows)
    assert reason(EVALUATION, runs=(run,)) == "the leaderboard names it (a)"  # a file in the folder keeps the folder
    assert reason(CHECKPOINT, runs=(run,)) == "the leaderboard names it (a)"


def test_a_fork_keeps_the_checkpoint_it_starts_from() -> None:
    fork = RunFacts("b", alive=False, finished=True, trunk=CHECKPOINT.key)
    assert reason(CHECKPOINT, runs=(FINISHED, fork)) == "a fork starts from it (b)"


def test_an_unfinished_ablation_keeps_its_points_and_its_trunk() -> None:
    point = replace(FINISHED, ablation="abl")
    ablation = AblationFacts("abl", alive=False, finished=False, uses=frozenset({"runs/t/checkpoints/step-000060"}))
    trunk = Item(Kind.CHECKPOINTS, "runs/t/checkpoints/step-000060", 1, OLD, run="t")
    facts = {"runs": (point, RunFacts("t", alive=False, finished=True)), "ablations": (ablation,)}
    assert reason(CHECKPOINT, **facts) == "its ablation is not finished (abl)"
    assert reason(trunk, **facts) == "an unfinished ablation uses it (abl)"
    logs = Item(Kind.ABLATIONS, "ablations/abl/logs", 1, OLD, ablation="abl")
    assert reason(logs, **facts) == "its ablation is not finished (abl)"
    over = {**facts, "ablations": (replace(ablation, finished=True),)}
    assert all(verdict(item, **over).removable for item in (CHECKPOINT, trunk, logs))


def test_a_point_that_its_ablation_has_dropped_is_over() -> None:
    dropped = RunFacts("a", alive=False, finished=False, ablation="abl", uses=frozenset({"datasets/d"}))
    done = AblationFacts("abl", alive=False, finished=True)
    assert verdict(CHECKPOINT, runs=(dropped,), ablations=(done,)).removable
    assert verdict(DATASET, runs=(dropped,), ablations=(done,)).removable
    assert not verdict(CHECKPOINT, runs=(replace(dropped, alive=True),), ablations=(done,)).removable


def test_what_a_job_or_an_experiment_names_stays() -> None:
    user = UserFacts("someone", frozenset({MODEL.key}))
    assert reason(MODEL, jobs=(user,)) == "a job at work uses it (someone)"
    assert reason(MODEL, experiments=(user,)) == "an experiment of prefect.yaml names it (someone)"


def test_what_an_unreadable_run_may_refer_to_stays() -> None:
    broken = RunFacts("broken", alive=False, finished=False, readable=False)
    for item in (DATASET, MODEL, EVALUATION, CHECKPOINT):
        assert reason(item, runs=(FINISHED, broken)) == "a run or ablation cannot be read, and may refer to it (broken)"
    assert verdict(Item(Kind.JOBS, "jobs/j", 1, OLD), runs=(broken,)).removable


def test_nothing_that_a_registry_may_name_goes_without_that_registry() -> None:
    """As with RLFLOW_MLFLOW_URI forgotten."""
    elsewhere = RunFacts("b", alive=False, finished=True, registry_known=False)
    for item in (DATASET, MODEL, EVALUATION, CHECKPOINT):
        assert reason(item, runs=(FINISHED, elsewhere)).startswith("MLflow does not know a run")
    assert verdict(Item(Kind.JOBS, "jobs/j", 1, OLD), runs=(elsewhere,)).removable


def test_compiled_code_stays_while_anything_runs() -> None:
    item = Item(Kind.COMPILED, "compiled/inductor/x", 1, OLD)
    assert reason(item, runs=(replace(FINISHED, alive=True),)) == "something runs and may use it (a)"
    assert reason(item, jobs=(UserFacts("j"),)) == "something runs and may use it (j)"
    assert verdict(item, runs=(FINISHED,)).removable


def test_a_flow_run_of_a_run_that_can_be_continued_stays() -> None:
    item = Item(Kind.FLOW_RUNS, "11111111-2222", 0, OLD)
    assert not verdict(item, runs=(RunFacts("a", alive=False, finished=False, uses=frozenset({item.key})),)).removable
    assert verdict(item, runs=(FINISHED,)).removable


def test_what_is_held_stays_whatever_its_age() -> None:
    assert reason(replace(DATASET, used=0.0, held="a link")) == "a link ()"


def test_a_log_that_is_written_to_is_shortened_whatever_its_age() -> None:
    answer = verdict(Item(Kind.LOGS, "stack/prefect.log", 1, NOW, keep_bytes=8 * 2**20))
    assert (answer.removable, answer.reason) == (True, "too long; its last 8 MiB stay")


# -- which of those go


def items(*sizes_and_ages: tuple[int, float], kind: Kind = Kind.CHECKPOINTS) -> list[Verdict]:
    return [
        Verdict(Item(kind, f"{kind.value}-{age:g}", size, NOW - age * DAY_SECONDS), True, "")
        for size, age in sizes_and_ages
    ]


def test_without_a_limit_all_of_them_go_the_oldest_first() -> None:
    kept = Verdict(DATASET, False, "")
    chosen = choose([*items((1, 40), (1, 90), (1, 60)), kept], used_bytes=3, limit_bytes=None)
    assert [item.item.key for item in chosen] == ["checkpoints-90", "checkpoints-60", "checkpoints-40"]


@pytest.mark.parametrize(
    ("limit", "ages"),
    [(100, []), (99, [90]), (60, [90]), (59, [90, 60]), (0, [90, 60, 40])],
)
def test_with_a_limit_the_oldest_go_until_it_holds(limit: int, ages: list[float]) -> None:
    """100 bytes are used. The oldest has 40 of them, the next one 10."""
    verdicts = items((5, 40), (40, 90), (10, 60))
    chosen = choose(verdicts, used_bytes=100, limit_bytes=limit)
    assert [item.item.key for item in chosen] == [f"checkpoints-{age:g}" for age in ages]


def test_trash_and_flow_runs_go_below_the_limit_as_well() -> None:
    trash, flow_run = items((10, 0), kind=Kind.TRASH)[0], items((0, 50), kind=Kind.FLOW_RUNS)[0]
    others = items((40, 90), (10, 60))
    assert choose([*others, trash, flow_run], used_bytes=100, limit_bytes=100) == [flow_run, trash]
    # the trash counts: 100 - 10 is what the limit asks for
    assert choose([*others, trash, flow_run], used_bytes=100, limit_bytes=90) == [flow_run, trash]
