"""`python -m eagle_fsd` is the command line `eagle-fsd`."""

import sys

from .cli import main

sys.exit(main())
