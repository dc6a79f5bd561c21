"""Metadata is in pyproject.toml. Building never imports torch, so it works in an environment that has none yet."""

from setuptools import setup

setup()
