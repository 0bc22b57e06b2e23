"""Maps configs/, at the top of the repository, to the package solrl_ray.configs: pyproject.toml cannot express this."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["solrl_ray*", "actors*"]), "solrl_ray.configs"],
    package_dir={"solrl_ray.configs": "configs"},
)
