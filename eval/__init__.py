"""Measuring speed, and what it costs."""

from importlib.util import find_spec

missing = [package for package in ("matplotlib", "tabulate") if find_spec(package) is None]
if missing:
    raise ImportError(f"eval/ needs {' and '.join(missing)}: pip install \".[train,eval]\" in the checkout")
