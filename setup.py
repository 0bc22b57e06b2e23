"""What pyproject.toml cannot say: configs/ stays at the top of the repository, and is inside the package in a wheel."""

from setuptools import find_packages, setup

setup(
    packages=[*find_packages(include=["solrl_ray*", "actors*"]), "solrl_ray.configs"],
    package_dir={"solrl_ray.configs": "configs"},
)
