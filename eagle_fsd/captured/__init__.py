"""The cycle as four programs of fixed shapes and addresses, which CUDA graphs replay: draft, join copies, verify, and
walk and keep."""
