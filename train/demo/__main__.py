"""`python -m train.demo`."""

from train.demo.demo import main

main()
