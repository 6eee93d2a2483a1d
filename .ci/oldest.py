"""Prints the oldest versions that pyproject.toml allows, as constraints for pip."""

from importlib.metadata import requires

from packaging.requirements import Requirement


for line in requires("hf_fixastep"):
    requirement = Requirement(line)
    of_tests = requirement.marker is not None and requirement.marker.evaluate({"extra": "test"})
    for bound in requirement.specifier:
        if bound.operator == ">=" and not of_tests:  # whichever pytest runs is no promise to a user
            print(f"{requirement.name}=={bound.version}")  # noqa: T201
