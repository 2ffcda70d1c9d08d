"""How to install the packages that an extra of this installation names. Imports no torch."""

from __future__ import annotations

import shlex
import sys
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]


def packages_of(extra: str) -> list[Requirement]:
    """The packages that an extra names.

    Raises:
        PackageNotFoundError: this is a checkout that is not installed.
    """
    found = map(Requirement, requires("eagle_fsd") or ())
    return [each for each in found if each.marker is not None and each.marker.evaluate({"extra": extra})]


def is_installed(package: Requirement) -> bool:
    try:
        return package.specifier.contains(version(package.name), prereleases=True)
    except PackageNotFoundError:
        return False


def install_command(extra: str) -> str:
    """The command that installs the packages of an extra that are missing or too old. It names them, or the checkout:
    `eagle_fsd[extra]` would look for eagle_fsd in the package index, where it may be another project."""
    try:
        packages = packages_of(extra)
        missing = [each for each in packages if not is_installed(each)] or packages
        words = list(dict.fromkeys(f"{each.name}{each.specifier}" for each in missing))
    except PackageNotFoundError:
        words = [f"{ROOT}[{extra}]"]
    return shlex.join([sys.executable, "-m", "pip", "install", *words])
