"""`python -m eval.report`."""

from eval.report.tables import main

main()
