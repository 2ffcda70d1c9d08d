"""`python -m train.tasks --count 2000 --out tasks.json`: see `train.demo.tasks`."""

import sys

from train.demo.tasks import main

if __name__ == "__main__":
    sys.exit(main())
