"""A dirty tree leaves nothing unrecorded, and no secret recorded."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from infra import provenance
from infra.provenance import uncommitted


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    def git(*words: str) -> None:
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=tmp_path, check=True)

    git("init", "-q")
    (tmp_path / "kept.py").write_text("a = 1\n")
    (tmp_path / ".gitignore").write_text("ignored\n")
    git("add", "-A")
    git("commit", "-qm", "first")
    return tmp_path


def test_a_clean_tree_has_no_patch(tree: Path) -> None:
    assert uncommitted(tree) == ""


def test_the_patch_makes_the_same_tree_again(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    (tree / "kept.py").write_text("a = 2\n")
    (tree / "folder").mkdir()
    (tree / "folder" / "new.py").write_text("b = 3\n")
    (tree / "picture.bin").write_bytes(bytes(range(256)))
    (tree / "ignored").write_text("x")
    patch = tmp_path_factory.mktemp("patch") / "uncommitted.patch"
    patch.write_text(uncommitted(tree))
    clone = tmp_path_factory.mktemp("clone")
    subprocess.run(["git", "clone", "-q", str(tree), str(clone)], check=True)
    subprocess.run(["git", "apply", str(patch)], cwd=clone, check=True)
    for name in ("kept.py", "folder/new.py", "picture.bin"):
        assert (clone / name).read_bytes() == (tree / name).read_bytes()
    assert not (clone / "ignored").exists()


def test_private_and_large_files_are_named_and_secrets_taken_out(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOME_API_KEY", "hunter2-hunter2")
    (tree / ".env.local").write_text("PASSWORD=letmein-please")
    (tree / "large.bin").write_bytes(bytes(2**20 + 1))
    (tree / "kept.py").write_text('key = "hunter2-hunter2"\n')
    patch = uncommitted(tree)
    assert "# not in this patch: .env.local (looks private)" in patch
    assert "# not in this patch: large.bin (1048577 bytes, sha256 " in patch
    assert "letmein" not in patch
    assert "hunter2" not in patch
    assert '+key = "***"' in patch


def test_a_repository_around_the_project_stays_out_of_the_patch(
    tree: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    project = tree / "teams" / "rl"
    project.mkdir(parents=True)
    for name in ("flow.py", "credentials.json"):
        (project / name).write_text("a = 1\n")
    for words in (("add", "-A"), ("-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "second")):
        subprocess.run(["git", *words], cwd=tree, check=True)
    (tree / "kept.py").write_text("another team's\n")
    (tree / "new.py").write_text("another team's\n")
    for name in ("flow.py", "credentials.json"):
        (project / name).write_text("a = 2\n")
    (project / "new.py").write_text("b = 1\n")
    found = uncommitted(project)
    assert "another team" not in found
    assert "# not in this patch: credentials.json (looks private)" in found
    patch = tmp_path_factory.mktemp("patch") / "uncommitted.patch"
    patch.write_text(found)
    clone = tmp_path_factory.mktemp("clone")
    subprocess.run(["git", "clone", "-q", str(tree), str(clone)], check=True)
    subprocess.run(["git", "apply", str(patch)], cwd=clone, check=True)
    assert (clone / "teams" / "rl" / "flow.py").read_text() == "a = 2\n"
    assert (clone / "teams" / "rl" / "new.py").read_text() == "b = 1\n"
    assert (clone / "teams" / "rl" / "credentials.json").read_text() == "a = 1\n"


def test_without_git_there_is_no_patch(tmp_path: Path) -> None:
    assert uncommitted(tmp_path) == ""


def test_a_git_that_does_not_answer_costs_its_facts_and_not_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    slow = tmp_path / "git"
    slow.write_text("#!/bin/sh\nexec sleep 60\n")
    slow.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(provenance, "_GIT_SECONDS", 0.2)
    facts = provenance.collect()
    assert (facts.commit, facts.patch) == ("", "")
    tags = facts.tags()
    assert (tags["rlflow.git_commit"], tags["rlflow.git_dirty"]) == ("unknown", "unknown")
    assert tags["rlflow.git_error"] == "git did not answer within 0.2 s"
    assert facts.code == provenance.code_digest(*provenance.CODE)
    assert "git did not answer within 0.2 s" in caplog.text


def test_code_that_is_not_there_is_in_no_digest() -> None:
    assert provenance.code_digest("rlcore/config") != provenance.code_digest("rlcore/rewards")
    with pytest.raises(FileNotFoundError, match="rlcore/gone"):
        provenance.code_digest("rlcore/config", "rlcore/gone")
