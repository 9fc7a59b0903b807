"""The steps of the Dockerfile, executed in root file systems of Debian packages (``image_build``)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.long.compose_file import read_image
from tests.long.hosts import ROOT
from tests.long.image_build import DOCKERFILE, Build, StepFailedError

pytestmark = [pytest.mark.clusters, pytest.mark.timeout(2400)]
_PINS = dict(re.findall(r"^([a-z0-9-]+)==(\S+)", (ROOT / "infra/requirements/gpu.txt").read_text(), re.MULTILINE))
_VERSIONS = "import importlib.metadata as m, sys; print(*(m.version(name) for name in sys.argv[1:]))"


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    made = Build(tmp_path_factory.mktemp("images"))
    made.all({})
    return made


@pytest.mark.parametrize(
    ("stage", "packages"),
    [
        ("worker", ("torch", "vllm", "ray", "prefect", "mlflow", "transformers")),
        ("servers", ("prefect", "mlflow")),
    ],
)
def test_a_stage_has_the_pinned_packages_and_its_user_starts_its_command(
    build: Build, stage: str, packages: tuple[str, ...]
) -> None:
    image = read_image(DOCKERFILE, stage)
    variables = {"PWD": image.folder, "HOME": "/home/rlflow"} | {
        name: value.replace("$PATH", "/usr/local/bin:/usr/bin:/bin") for name, value in image.environment.items()
    }
    user = f"{image.user}:{image.user}"
    found = build.run(stage, ["python", "-c", _VERSIONS, *packages], user=user, **variables).split()
    assert dict(zip(packages, found, strict=True)) == {name: _PINS[name] for name in packages}
    assert "Usage" in build.run(stage, list(image.command), user=user, **variables)
    for folder in image.folders:
        build.run(stage, ["touch", f"{folder}/written"], user=user, **variables)
        assert Path(build.root(stage) / folder.lstrip("/") / "written").stat().st_uid == image.user


def test_the_worker_imports_what_a_trainer_imports(build: Build) -> None:
    image = read_image(DOCKERFILE, "worker")
    code = "import torch, vllm, ray, transformers, rlcore.jobs.segment, flows.train_grpo; print(torch.version.cuda)"
    variables = {"PWD": image.folder, "HOME": "/home/rlflow", "PATH": "/opt/venv/bin:/usr/bin:/bin"}
    printed = build.run("worker", ["python", "-c", code], user="1000:1000", **variables)
    assert printed.split()[-1].startswith("13.")


def test_a_step_that_fails_ends_the_build(build: Build) -> None:
    with pytest.raises(StepFailedError, match="servers: false"):
        build.run("servers", ["false"])
