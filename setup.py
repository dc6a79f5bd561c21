"""What pyproject.toml cannot say: the C launcher, csrc/ inside the package, and cubins where nvcc is on PATH.

Metadata is in pyproject.toml. Building never imports torch, so it works in an environment that has none yet, and needs
neither a C compiler (the launcher is optional) nor nvcc (csrc/ ships and is compiled at first use).

GROUPED_LORA_BUILD_ARCHS, read here only: which cubins a build makes, "sm_80 sm_90a sm_100a sm_120" by default; "" for
none. An editable install makes none: the sources of a checkout change.
"""

import importlib.util
import os
import shutil
import sysconfig
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
spec = importlib.util.spec_from_file_location("_builds", ROOT / "grouped_lora_ops" / "_builds.py")
builds = importlib.util.module_from_spec(spec)
spec.loader.exec_module(builds)


class BuildWithKernels(build_py):
    def run(self):
        super().run()
        if self.editable_mode:
            return
        package = Path(self.build_lib) / "grouped_lora_ops"
        for folder in ("csrc", "cubins"):
            shutil.rmtree(package / folder, ignore_errors=True)
        csrc = package / "csrc"
        csrc.mkdir(parents=True)
        for path in sorted((ROOT / "csrc").iterdir()):
            if path.suffix in (".cu", ".cuh"):
                shutil.copy2(path, csrc)
        archs = os.environ.get("GROUPED_LORA_BUILD_ARCHS", " ".join(builds.ARCHS)).split()
        compiler = shutil.which("nvcc")
        if compiler and archs:
            builds.make_cubins(compiler, csrc, archs, package / "cubins")


limited = not sysconfig.get_config_var("Py_GIL_DISABLED")  # a free-threaded Python has no limited API
launcher = Extension("grouped_lora_ops._launcher", ["csrc/launcher.c"], py_limited_api=limited, optional=True)
setup(
    ext_modules=[launcher],
    cmdclass={"build_py": BuildWithKernels},
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if limited else {},
)
