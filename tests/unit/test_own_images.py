"""Images of our own: what their folder, the recipes and the project say is one and the same."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from flexlab import __version__
from flexlab.core import paths
from flexlab.recipes.catalogue import Catalogue

ROOT = Path(__file__).resolve().parents[2]
FOLDER = paths.shipped_dir("compose") / "images" / "llamacpp-cpu"
BUILD = FOLDER / "build"


def build(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(BUILD), *words],
        env=os.environ | env,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.fixture
def bare_path(tmp_path: Path) -> str:
    """A machine without Docker and without mmdebstrap."""
    (tmp_path / "bin").mkdir()
    return str(tmp_path / "bin")


def test_the_recipe_names_what_the_build_makes() -> None:
    recipe = Catalogue.load().backend("llamacpp")
    own = [image for image, _ in recipe.image_choices if image.built_from is not None]
    assert [image.image for image in own] == [f"flexlab/llamacpp-cpu:{__version__}"]
    assert own[0].built_from == FOLDER.name
    said = (FOLDER / "Dockerfile").read_text("utf-8")
    assert set(re.findall(r"flexlab/llamacpp-cpu:([0-9.]+)", said)) == {__version__}
    assert f"ARG VERSION={__version__}\n" in said
    assert own[0].entrypoint == "image"
    assert f"EXPOSE {own[0].port}\n" in said
    words = ", ".join(f'"{word}"' for word in own[0].program)
    assert f"ENTRYPOINT [{words}]\n" in said


def test_the_image_asks_of_a_cpu_what_its_engine_asks() -> None:
    recipe = Catalogue.load().backend("llamacpp")
    (own,) = [image for image, _ in recipe.image_choices if image.built_from is not None]
    assert recipe.embedded is not None
    assert own.cpu_flags == recipe.embedded.cpu_flags


def test_the_image_holds_the_engine_that_is_embedded() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    wanted = (FOLDER / "requirements.txt").read_text("utf-8").split()
    assert wanted == project["optional-dependencies"]["embedded"]


def test_it_can_be_started_by_its_name() -> None:
    assert os.access(BUILD, os.X_OK)


def test_without_docker_it_says_how_to_get_it(bare_path: str) -> None:
    done = build(PATH=bare_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "build: docker is not installed; sudo apt-get install -y docker.io\n"


def test_without_mmdebstrap_it_says_how_to_get_it_and_leaves_nothing(
    bare_path: str, tmp_path: Path
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    context = str(tmp_path / "context")
    done = build("--context", context, PATH=bare_path, TMPDIR=str(temporary))
    assert done.returncode == 1
    assert "sudo apt-get install -y mmdebstrap" in done.stderr
    assert list(temporary.iterdir()) == []
    assert not Path(context).exists()


def test_an_engine_that_is_not_there_is_one_sentence(bare_path: str, tmp_path: Path) -> None:
    """`docker` says what it says; the sentence keeps its reason and adds the mend."""
    fake = Path(bare_path) / "docker"
    fake.write_text("#!/bin/sh\necho 'Cannot connect to the Docker daemon.' >&2\nexit 1\n")
    fake.chmod(0o755)
    done = build(PATH=bare_path)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "Cannot connect to the Docker daemon; start it" in done.stderr


def test_a_wrong_word_is_a_wrong_word() -> None:
    assert build("--froce").returncode == 2
