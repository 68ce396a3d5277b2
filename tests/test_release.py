"""What a release relies on: one version everywhere."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import yaml

import onnxtrain

ROOT = Path(__file__).resolve().parents[1]
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]


def test_the_version_is_one():
    assert onnxtrain.__version__ == VERSION == onnxtrain._C.build_info()["version"]
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))["version"] == VERSION
    sections = re.findall(r"^## ([\d.]+)", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    assert sections[0] == VERSION
