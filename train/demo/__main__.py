"""`python -m train.demo`."""

import sys

from train.demo.demo import main

sys.exit(main())
