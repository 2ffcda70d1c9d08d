"""`python -m train.tasks --count 2000 --out tasks.json`: see `train.tasks.generator`."""

import sys

from train.tasks.generator import main

sys.exit(main())
