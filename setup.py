"""Packaging. The bundled demo pair travels inside the package as `eagle_fsd/checkpoints`."""

from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).parent
VERSION = next(
    line.split('"')[1] for line in (ROOT / "eagle_fsd" / "__init__.py").read_text().splitlines()
    if line.startswith("__version__")
)

setup(
    name="eagle_fsd",
    version=VERSION,
    description="EAGLE-2 speculative decoding with fuzzy acceptance, on stock Hugging Face transformers",
    long_description=(ROOT / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    python_requires=">=3.10",
    packages=[*find_packages(include=["eagle_fsd*"]), "eagle_fsd.checkpoints"],
    package_dir={"eagle_fsd.checkpoints": "checkpoints"},
    package_data={
        "eagle_fsd.cli": ["demo_prompts.json"],
        "eagle_fsd.heads": ["catalogue.json"],
        "eagle_fsd.checkpoints": ["*/*.json", "*/*.safetensors", "*/*.jinja", "*/*.md", "*.md"],
    },
    install_requires=["torch>=2.9", "transformers>=5.17,<6", "safetensors>=0.5", "accelerate>=1.1", "tqdm>=4.66"],
    extras_require={
        "eval": ["matplotlib>=3.8"],
        "flash": ["flash-attn-4>=4.0.0b36; platform_system == 'Linux'"],  # or 2, or 3: docs/attention.md
        "lm_eval": ["lm_eval>=0.4.13,<0.5"],
        "dev": ["matplotlib>=3.8", "pytest>=8", "hypothesis>=6.100", "ruff>=0.8"],
    },
    entry_points={
        "console_scripts": ["eagle-fsd=eagle_fsd.cli:main"],
        "lm_eval.models": ["eagle_fsd=eagle_fsd.lm_eval.model:EagleLM"],  # read by versions after 0.4.13
    },
)
