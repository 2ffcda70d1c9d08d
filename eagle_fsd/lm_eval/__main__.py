"""The harness' own command line, with our model registered: for versions that find no models of other packages."""

import importlib.util
import sys


def main() -> None:
    if importlib.util.find_spec("lm_eval") is None:
        sys.exit("eagle_fsd.lm_eval: lm-evaluation-harness is not installed: pip install eagle_fsd[lm_eval]")
    from lm_eval.__main__ import cli_evaluate

    from . import model  # noqa: F401  # importing it registers the model

    cli_evaluate()


if __name__ == "__main__":
    main()
