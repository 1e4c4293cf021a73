"""What is installed: the package from beside its clone, the pinned versions, and the citation."""

import itertools
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile

import pytest
import yaml
from support.commands import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


@pytest.mark.parametrize("beside", [True, False], ids=["beside the clone", "in the clone"])
def test_an_editable_install_is_not_shadowed_by_its_clone(beside, tmp_path):
    pytest.importorskip("hatchling")
    clone = tmp_path / "prope"
    site = tmp_path / "site"
    shutil.copytree(ROOT / "prope", clone / "prope", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone)
    build = ["hatchling", "build", "--target", "wheel:editable", "--directory"]
    command = [sys.executable, "-m", *build, site]
    subprocess.run(command, cwd=clone, check=True, capture_output=True, timeout=60)
    with zipfile.ZipFile(next(site.glob("*.whl"))) as wheel:
        wheel.extractall(site)
    # As python starts with that site-packages folder, without what else is installed here.
    code = f"""import site, sys
sys.path.insert(0, "")
sys.path.append({sysconfig.get_path("purelib")!r})
site.addsitedir({str(site)!r})
import prope
from prope import apply_p_rope
print(prope.__file__)
"""
    command = [sys.executable, "-I", "-S", "-c", code]
    cwd = tmp_path if beside else clone
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)
    assert done.stdout == f"{clone}/prope/__init__.py\n", done.stderr


def test_every_dependency_is_pinned_to_a_version_that_it_allows():
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name

    lines = (ROOT / "launch/constraints.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert list(pinned) == sorted(pinned)
    extras = PROJECT["project"]["optional-dependencies"].values()
    wanted = [PROJECT["build-system"]["requires"], PROJECT["project"]["dependencies"], *extras]
    for requirement in map(Requirement, itertools.chain(*wanted)):
        name = canonicalize_name(requirement.name)
        assert requirement.specifier.contains(pinned[name]), requirement


def test_the_citation_names_the_paper_and_this_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == PROJECT["project"]["version"]
    paper = citation["preferred-citation"]
    readme = re.sub(r"\s+", " ", (ROOT / "README.md").read_text())
    assert paper["title"] in readme and paper["url"] in readme and paper["year"] == 2025
