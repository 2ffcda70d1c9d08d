"""`python -m eagle_fsd` is the command line `eagle-fsd`."""

import sys

from .cli.app import main

sys.exit(main())
